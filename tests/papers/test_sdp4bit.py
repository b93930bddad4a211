"""SDP4Bit against its pseudo-code (``papers/sdp4bit.py``, float64, by someone who had not seen it), laws and limits."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import ranks
import thinwire
from breadth import ALL, spread
from engines import adamw, build, same_on_all_ranks, train
from models import Net, flat, loss_of
from papers.sdp4bit import Int4Group, WeightDifference, gather_parts, two_level
from papers.sdp4bit import hadamard as rotate
from thinwire.base.errors import ThinwireError
from thinwire.codecs.intquant import ShiftedInt8
from thinwire.core.bucket import Piece, Shard
from thinwire.core.method import Run
from thinwire.core.names import describe
from thinwire.core.selection import keep_dense
from thinwire.core.state import State
from thinwire.core.weights import Replica
from thinwire.methods import SDP4Bit, ZeROPP, resolve
from thinwire.methods.papers import sdp4bit
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import Plan
from thinwire.proof.ranks import ThreadComm, ThreadEngine, Threads, parameters_for
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS
from threaded import exchange_on, reduce_on_threads

GROUP = 128


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    """Heavy-tailed, as gradients are."""
    return torch.from_numpy(np.random.default_rng([rank, step]).standard_t(4, numel).astype(np.float32))


PLACES = [
    *((topology, size, of) for topology in ("all_reduce", "reduce_scatter") for size in (2, 3, 4) for of in (1, size)),
    ("two_level", 4, 2), ("two_level_owner", 4, 2), ("two_level_owner", 6, 2), ("two_level", 6, 2),
]  # fmt: skip


@pytest.mark.parametrize(("place", "hadamard"), spread(5, PLACES, [True, False]))
def test_gradients_against_the_pseudo_code(place, hadamard):
    """50 steps; one node, one rank per node, two and three nodes of two ranks."""
    topology, size, per_node = place
    numel = size * GROUP * 12
    results = reduce_on_threads(
        lambda: SDP4Bit(rounding="nearest", hadamard=hadamard, send=("*",)), gradients,
        topology=topology, size=size, per_node=per_node, shapes={"w": (numel // 8, 8)}, steps=50,
    )  # fmt: skip
    inside, across = Int4Group(8, 128, scale_type=np.float32), Int4Group(4, 128, scale_type=np.float32)
    turn = rotate if hadamard else None
    apart, total = 0, 0
    for step in range(50):
        given = [[gradients(n, step, numel).double().numpy() for n in range(k, k + per_node)]
                 for k in range(0, size, per_node)]  # fmt: skip
        parts = two_level(given, inside, across, turn)
        last = inside if per_node == size else across
        if "owner" in topology or topology == "reduce_scatter":
            expected = [part for node in parts for part in node]
        else:
            # the all-reduce form: each owner encodes its part of the mean, in the transformed space
            def send(part, last=last):
                return part if not hadamard else rotate(last(rotate(part)))

            whole = gather_parts(parts, send if hadamard else last)
            expected = [whole] * size
        quantum = max(float(np.abs(part).max()) for node in parts for part in node) / 7
        for rank in range(size):
            off = results[rank][step]["mean"].double().numpy() - expected[rank]
            off = np.abs(rotate(off) if hadamard else off)
            # A value that lies on the boundary between two levels in float32 takes the other in float64.
            apart += int((off > 1e-5).sum())
            total += off.size
            assert off.max() < 2 * quantum
        if "owner" not in topology and topology != "reduce_scatter":
            assert all(torch.equal(results[0][step]["mean"], results[r][step]["mean"]) for r in range(size))
    assert apart < 0.01 * total


def weights_on_threads(method_of, masters, *, size: int, steps: int, asks: int = 1, split=(0.5, 0.25, 0.25)):
    """Follow ``masters(step)`` (numpy, whole) for ``steps`` steps; per rank and step: the replica, the bytes sent."""
    numel = len(masters(0))
    n = numel // size
    sizes = [int(share * n) for share in split]
    world = Threads(size)

    def body(rank):
        method, ledger = method_of(), Ledger()
        comm = ThreadComm(world, rank, ledger)
        exchange = exchange_on("reduce_scatter", world, rank, ledger)
        names = [f"p{i}" for i in range(len(sizes))]
        parameters = parameters_for(exchange, {name: count * size for name, count in zip(names, sizes, strict=True)})
        method.state = State()
        method.begin(Run(parameters, exchange))
        pieces, column = [], 0
        for name, count in zip(names, sizes, strict=True):
            pieces.append(Piece(name, column, count))
            column += count
        shard = Shard(tuple(pieces), (), n, torch.float32)
        message, found = method.weight_message(shard, rank), []
        replica = Replica(message, method.state, shard, comm, torch.device("cpu"))
        for step in range(steps):
            for _ in range(asks):
                out = replica.allocate()
                own = out[rank * n : (rank + 1) * n]
                own.copy_(torch.from_numpy(masters(step)[rank * n : (rank + 1) * n]))
                replica.gather(out, step)
            found.append((out.clone(), sum(ledger.current.bytes.values())))
            ledger.close_step()
        return found

    return world.run(body)


def walk(numel: int, seed: int = 0):
    """Masters that move as under Adam: steps of about 1e-3 in slowly changing directions."""
    draw = np.random.default_rng(seed)
    found, direction = [draw.standard_normal(numel).astype(np.float32)], np.zeros(numel)
    for _ in range(250):
        direction = 0.9 * direction + 0.1 * draw.standard_normal(numel)
        found.append((found[-1] - 1e-3 * direction).astype(np.float32))
    return lambda step: found[step]


@pytest.mark.parametrize(("size", "kind"), spread(2, [2, 3, 4], ["difference", "plain"]))
def test_weights_against_the_pseudo_code(size, kind):
    group, numel = 64, size * 4096
    masters = walk(numel, size)
    results = weights_on_threads(
        lambda: SDP4Bit(weights=kind, weight_group=group, send=("*",)), masters, size=size, steps=50
    )
    quantizer = Int4Group(4, group, scale_type=np.float32)
    papers = [WeightDifference(masters(0).astype(float), size, quantizer, plain=kind == "plain") for _ in range(2)]
    for step in range(50):
        if not step and kind == "difference":
            assert np.array_equal(results[0][0][0].numpy(), masters(0))  # Alg. 4 l. 2: the weights themselves
            continue
        # A value on the boundary between two levels in float32 takes the other in float64, and both then follow the
        # master on paths of their own. So: a level apart at most from the first step on, and step by step, equal.
        whole = papers[0].step_to(masters(step).astype(float))
        if kind == "difference":
            papers[1].replicas = [results[rank][step - 1][0].double().numpy() for rank in range(size)]
        one = papers[1].step_to(masters(step).astype(float))
        for rank in range(size):
            found = results[rank][step][0].double().numpy()
            assert (np.abs(found - one) > 1e-5).mean() < 1e-3
            assert np.abs(found - whole).max() < (1 if kind == "plain" else 1e-3)


def test_a_shifted_lattice_is_unbiased_and_within_half_a_level():
    """QSDP's weights: over the shift errors are uniform in half a level; zeros and NaN stay."""
    rows = torch.randn(2, 2048, generator=torch.Generator().manual_seed(0))
    rows[0, :1024] = 0
    total, shifts = torch.zeros(2, 2048), torch.linspace(-0.5, 0.5, 257)[:-1]
    level = rows.view(2, 2, 1024).abs().amax(2, keepdim=True) / 126.5
    for shift in shifts:
        codec = ShiftedInt8(1024, float(shift))
        wire = codec.encode(rows, torch.empty((2, codec.wire_numel(2048)), dtype=torch.uint8))
        decoded = codec.decode(wire, torch.full_like(rows, torch.nan))
        off = (decoded - rows).view(2, 2, 1024)
        assert (off.abs() <= 0.5001 * level).all()
        total += decoded
    assert ((total / 256 - rows).view(2, 2, 1024).abs() <= 0.01 * level).all()
    summed = codec.decode_sum(wire, torch.empty(2048), 0.5)
    assert torch.allclose(summed, decoded.mean(0), atol=1e-6)
    rows[1, 5] = math.inf
    codec.encode(rows, wire)
    assert codec.decode(wire, decoded)[1, :1024].isnan().all() and not decoded[0, :1024].any()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_replicas_stay_bit_equal_and_near_the_masters(rounding):
    """200 steps; an error is never older than one step: up to half a level of the last difference (or a whole one)."""
    masters = walk(4 * 2048)
    results = weights_on_threads(
        lambda: SDP4Bit(weight_group=128, weight_rounding=rounding, send=("*",)), masters, size=4, steps=200
    )
    for step in range(1, 200):
        replica = results[0][step][0]
        assert all(torch.equal(replica, results[rank][step][0]) for rank in range(1, 4))
        before = results[0][step - 1][0].numpy()
        difference = np.abs(masters(step) - before).reshape(-1, 128).max(1, keepdims=True)
        bound = difference / 7 * (0.5 if rounding == "nearest" else 1) * (1 + 1e-3) + 1e-6
        assert (np.abs(replica.numpy() - masters(step)).reshape(-1, 128) <= bound).all()
    last = np.abs(replica.numpy() - masters(199)).mean()
    assert last < 2e-4 < np.abs(masters(199) - masters(0)).mean() / 10


def test_it_is_sent_once_per_step_however_often_it_is_asked_for():
    masters = walk(2 * 4096)
    once, thrice = (
        weights_on_threads(lambda: SDP4Bit(weight_group=64, send=("*",)), masters, size=2, steps=5, asks=asks)
        for asks in (1, 3)
    )
    for rank in range(2):
        for (a, sent), (b, again) in zip(once[rank], thrice[rank], strict=True):
            assert torch.equal(a, b) and sent == again


def test_what_stays_dense_travels_as_it_is_in_the_same_message():
    masters = walk(2 * 4096)
    results = weights_on_threads(
        lambda: SDP4Bit(weight_group=64, send=("p0",), dense=("p1", "p2")), masters, size=2, steps=4
    )
    half, sent = 2048, results[0][3][1]
    for step in range(4):
        whole = results[0][step][0].view(2, 4096)
        assert np.array_equal(whole[:, half:], masters(step).reshape(2, 4096)[:, half:])
    assert sent == half / 2 + half / 64 * 4 + 4 * half


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
def test_with_fp32_codecs_it_is_dense(topology):
    """Bit for bit: four ranks, whose division is exact wherever it happens."""
    shapes = {"w": (64, 64), "b": (64, 16)}
    exact, dense = (
        reduce_on_threads(lambda m=method: resolve(m), gradients, topology=topology, size=4, shapes=shapes, steps=3)
        for method in ("sdp4bit(bits=32, intra_bits=32, weights='dense', send='*')", "dense")
    )
    for ours, theirs in zip(exact, dense, strict=True):
        assert all(torch.equal(a["mean"], b["mean"]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "topology, per_node", spread(2, [("two_level", 2), ("two_level_owner", 2), ("reduce_scatter", 4)])
)
def test_the_mean_is_unbiased(topology, per_node):
    """The mean of 400 roundings of one gradient: its error falls to that of one over the root of 400."""
    results = reduce_on_threads(
        lambda: SDP4Bit(send=("*",)), lambda rank, step, numel: gradients(rank, 0, numel), topology=topology, size=4,
        per_node=per_node, shapes={"w": (2048, 4)}, steps=400,
    )  # fmt: skip
    exact = sum(gradients(rank, 0, 8192).double() for rank in range(4)) / 4
    exact = exact if topology == "two_level" else exact.view(4, -1)[0]
    means = torch.stack([step["mean"].double() for step in results[0]])
    one = (means[0] - exact).norm()
    assert (means.mean(0) - exact).norm() == pytest.approx(float(one) / 20, rel=0.1)


@pytest.mark.parametrize("topology, size, per_node", [
    ("all_reduce", 3, 1), ("all_reduce", 3, 3), ("reduce_scatter", 4, 1), ("two_level", 4, 2), ("two_level", 6, 2),
    ("two_level_owner", 4, 2), ("two_level_owner", 6, 2),
])  # fmt: skip
@pytest.mark.parametrize("knobs", [{}, {"bits": 16}, {"hadamard": False, "intra_bits": 4}])
def test_bytes_are_the_plans(topology, size, per_node, knobs):
    shapes = {"w": (170, 7), "b": (31, 50)}
    results = reduce_on_threads(
        lambda: SDP4Bit(send=("*",), **knobs), gradients, topology=topology, size=size, per_node=per_node,
        shapes=shapes, steps=2,
    )  # fmt: skip
    engine, method = ThreadEngine(topology, Threads(size), 0, Ledger(), shapes, per_node), SDP4Bit(send=("*",), **knobs)
    run = engine.run(weights=engine.weights())
    method.begin(run)
    planned = Plan(engine.road(method, run), run).wire_bytes
    assert all(step["bytes"].item() == planned for rank in results for step in rank)


def test_bits_per_value_of_a_125m_model():
    """The published 4.016, 4.25 and 8.25 bits, and less than 1% of padding, on 16 ranks: of what is compressed.

    (With "everything", as in the paper, norms and biases are padded to many times their size: 3% of all bytes.)
    """
    with torch.device("meta"):
        model = Decoder(PRESETS["gpt-125m"])
    method, exact, padded, values = SDP4Bit(), [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], 0
    codecs = (method.make_weight_codec(), method.codec, method._intra_codec)
    for parameter, weight in zip(describe(model).values(), model.parameters(), strict=True):
        if keep_dense(method, parameter):
            continue
        shard = -(-weight.shape[0] // 16) * math.prod(weight.shape[1:])
        values += shard
        for i, codec in enumerate(codecs):
            exact[i] += shard * (codec.bits + 32 / codec.group)
            group = method.weight_group if i == 0 else method.card.group
            padded[i] += 8 * codec.wire_bytes(-(-shard // group) * group)
    assert [round(bits / values, 3) for bits in exact] == [4.016, 4.25, 8.25]
    assert all(b / a < 1.01 for a, b in zip(exact, padded, strict=True))


def _engines(rank, world, kind):
    found = {}
    sdp4bit.READ = 2200 if kind == "fsdp2" else 1 << 24  # of qsdp three shards at once: one is left over
    for method in ("sdp4bit:paper(weight_group=32)", "zeropp(smallest=100)", "qsdp(smallest=100)"):
        model = build(kind, world)
        optimizer = adamw(model, lr=1e-2)
        wire = thinwire.compress(model, optimizer, method)
        losses = train(model, optimizer, rank, range(5), wire)
        found[method] = losses, same_on_all_ranks(model), wire.ledger.stats()["weight_bytes_per_step"]
        wire.close()
    return found


def test_resharding_changes_nothing():
    """The second gathering of a step gives the first one's bits: it sends nothing (qWD), or the same (qW)."""
    resharded, kept = (ranks.run(_engines, 4, kind, LOCAL_WORLD_SIZE="2")[0] for kind in ("fsdp2", "fsdp2-keep"))
    for method, (losses, equal, sent) in resharded.items():
        assert equal and losses == kept[method][0], method
        assert losses[-1] < 0.9 * losses[0]
        assert sent == (1 if method.startswith("sdp4bit") else 2) * kept[method][2]


def _changed(rank, world):
    """Weights from elsewhere: replicas start anew from them."""
    method = "sdp4bit(weight_group=32, smallest=100)"
    model = build("fsdp2", world)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, method)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = train(model, optimizer, rank, range(1), wire)
    train(model, optimizer, rank, range(1, 4), wire)
    model.load_state_dict(before)
    again = train(model, optimizer, rank, range(1), wire)
    wire.close()
    errors = []
    frozen = build("fsdp2", world, prepare=lambda net: net.head.weight.requires_grad_(False))
    optimizer = torch.optim.AdamW(frozen.parameters(), lr=3e-3)
    thinwire.compress(frozen, optimizer, method)
    train(frozen, optimizer, rank, range(1))
    torch.distributed.barrier()  # what follows fails, and whoever is early would end what others still send
    next(p for name, p in frozen.named_parameters() if "head" in name).requires_grad_(True)
    try:
        train(frozen, optimizer, rank, range(1, 2))
    except ThinwireError as error:
        errors.append(str(error))
    return first == again, errors


def test_loaded_weights_are_followed_and_thawed_ones_refused():
    for same, errors in ranks.run(_changed, 2):
        assert same
        assert errors and "was frozen when compress() was called" in errors[0]


EVERY = (
    "sdp4bit(weight_group=32, smallest=100)", "zeropp(smallest=100)", "qsdp(smallest=100)",
    "scape(density=0.1, warmup=2, smallest=100)", "scape(density=0.1, warmup=2, smallest=100, weights='dense')",
)  # fmt: skip
SWAPPED = EVERY if ALL else (EVERY[0], *EVERY[3:])
"""The others have other bits for the same messages."""


def _optimizer(method, model):
    if method.startswith("scape"):
        return thinwire.AdamS([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    return adamw(model)


def _swapped(rank, world):
    """Losses with other weights for an evaluation, with a gradient taken away, and with frozen modules."""
    found = {}

    def freeze(net):
        net.embedding.requires_grad_(False)
        net.blocks[1].requires_grad_(False)

    for method in ("dense", *SWAPPED):
        model = build("fsdp2", world, net=partial(Net, layers=3))  # which has learned something after four steps
        optimizer = _optimizer(method, model)
        wire = thinwire.compress(model, optimizer, method)
        train(model, optimizer, rank, range(4), wire)
        with torch.no_grad():
            own = [parameter.clone() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.zero_()
            evaluated = loss_of(model, 0, 0).item()
            for parameter, value in zip(model.parameters(), own, strict=True):
                parameter.copy_(value)
            back = loss_of(model, 0, 0).item()
            for parameter in model.parameters():
                parameter.data.zero_()
            wire.weights_changed()
            again = loss_of(model, 0, 0).item()
            for parameter, value in zip(model.parameters(), own, strict=True):
                parameter.data.copy_(value)
            wire.weights_changed()
            whole = loss_of(model, 0, 0).item()
        loss_of(model, 4, rank).backward()
        model.head.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses = train(model, optimizer, rank, range(5, 8), wire)
        wire.close()
        model = build("fsdp2", world, net=partial(Net, layers=3), prepare=freeze)
        optimizer = _optimizer(method, model)
        wire = thinwire.compress(model, optimizer, method)
        frozen = train(model, optimizer, rank, range(6), wire)
        wire.close()
        found[method] = evaluated, again, back, whole, losses, frozen
    return found


def test_other_weights_are_noticed_and_frozen_ones_arrive():
    for found in ranks.run(_swapped, 2):
        *_, frozen_dense = found["dense"]
        for method in SWAPPED:
            evaluated, again, back, whole, losses, frozen = found[method]
            assert evaluated == again == found["dense"][0], method  # of weights that are all zero
            assert back == whole < evaluated - 0.1, method
            assert max(losses) < evaluated and all(math.isfinite(loss) for loss in frozen), method
            assert abs(frozen[-1] - frozen_dense[-1]) < (0.3 if method.startswith("scape") else 0.1), method
        assert found[EVERY[3]][4] == found[EVERY[4]][4], "masked weights are the weights, stepped or not"


def _halves(rank, world):
    found = {}
    for method in spread(2, EVERY):
        losses = []
        for reshard in (True, 2):
            model = build("fsdp2", world, reshard_after_forward=reshard)
            optimizer = _optimizer(method, model)
            wire = thinwire.compress(model, optimizer, method)
            losses.append(train(model, optimizer, rank, range(4), wire))
            assert wire.ledger.last.weight_bytes == wire.plan.weight_bytes, (method, reshard)
            wire.close()
        found[method] = losses
    return found


def test_resharding_to_fewer_ranks_changes_nothing_but_the_planned_bytes():
    for found in ranks.run(_halves, 4):
        for method, (whole, halves) in found.items():
            assert whole == halves, method


def _low_precision(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for method in ("dense", "sdp4bit(weight_group=32, smallest=100)"):
        model = build("fsdp2", world, policy=policy)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        found.append((train(model, optimizer, rank, range(12), wire), flat(model).norm().item()))
        wire.close()

    def mixed(net):
        net.register_parameter("frozen", nn.Parameter(torch.ones(4, dtype=torch.bfloat16), requires_grad=False))

    model = build("fsdp2", world, prepare=mixed)
    wire = thinwire.compress(model, adamw(model), "sdp4bit(weight_group=32, smallest=100)")
    try:
        train(model, adamw(model), rank, range(1))
        error = ""
    except ThinwireError as raised:
        error = str(raised)
    return found, error


def test_bf16_replicas_and_several_dtypes():
    for ((dense, _), (ours, _)), error in ranks.run(_low_precision, 2):
        assert abs(dense[-1] - ours[-1]) < 0.05
        assert "several dtypes" in error


def test_what_does_not_fit_is_refused():
    for knobs, message in (
        ({"weights": "deltas"}, "weights is one of difference, plain, dense"),
        ({"weight_bits": 3}, "weight_bits is 4 or 8"),
        ({"bits": 5}, "bits is one of 4, 8, 16, 32"),
        ({"rounding": "up"}, "rounding is nearest or stochastic"),
        ({"group": 16}, "from 32 to 4096"),
    ):
        with pytest.raises(ThinwireError, match=message):
            SDP4Bit(**knobs)
    assert ZeROPP().weights == "plain"
    for preset, (weights, bits, inside, hadamard) in {
        "paper": ("difference", 4, 8, True), "qwd": ("difference", 32, 32, True), "qw": ("plain", 32, 32, True),
        "tlq-hs": ("dense", 4, 8, True), "tlq": ("dense", 4, 8, False), "ulq": ("dense", 4, 4, False),
    }.items():  # fmt: skip
        made = resolve(f"sdp4bit:{preset}")
        assert (made.weights, made.bits, made.intra_bits, made.hadamard) == (weights, bits, inside, hadamard)
