"""feedback="updates" and Trickle: the transcription, what is refused, the engines, the codec and the kernels."""

from __future__ import annotations

import copy
import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ranks
import test_edges as edges
import thinwire
from breadth import ALL, alternating, spread
from engines import build, train
from models import flat, loss_of
from papers import compressors
from papers.powersgd import PowerSGDUpdates
from papers.trickle import Trickle
from programs import needs_triton, run_python
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.base.random import random_normal, seed_of
from thinwire.codecs import Int8
from thinwire.codecs.base import Residual
from thinwire.codecs.sparse import Positions, Sparse
from thinwire.core.road import Road
from thinwire.methods import resolve
from thinwire.network.comm import local
from thinwire.ops import direction, sparse
from thinwire.ops.direction import DirectionSegment, cpu, reference
from threaded import FlatMuon, entries, reduce_on_threads

SHAPES = {"a": (16, 20), "b": (8, 40)}
LR, B2, DECAY, STEPS, SIZE = 1e-2, 0.9, 0.1, 12, 3
EPS = 1.5e-2  # so large that in the first step, too, larger gradients make larger steps: without it all are tied
DENSITY = 0.125  # no k on the edge of an integer
PORTION = 0.1  # of that density: 0.0125 / 0.125
GROUP = 8


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """A part that all ranks share, and noise; sizes that differ by 100 between values, and change with the steps."""
    generator = torch.Generator().manual_seed(step)
    common = torch.randn(numel, generator=generator)
    own = torch.randn(numel, generator=torch.Generator().manual_seed(1000 + 10 * step + rank))
    sizes = torch.logspace(-2, 0, numel)[torch.randperm(numel, generator=torch.Generator().manual_seed(7))]
    return (0.5 * common + own) * sizes * (1 + step % 3)


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LR, betas=(0.9, B2), eps=EPS, weight_decay=DECAY)


def played(spec: str, topology: str = "all_reduce", **more):
    return reduce_on_threads(
        lambda: methods.resolve(spec), gradient, topology=topology, size=SIZE, shapes=SHAPES, steps=STEPS,
        **{"optimizer": adamw, **more},
    )  # fmt: skip


def sample(tensor: int, t: int) -> list[int]:
    """Ours: 64 of the values of a tensor, the same in all steps."""
    name = list(SHAPES)[tensor]
    generator = torch.Generator().manual_seed(seed_of(0, name))
    return torch.randint(math.prod(SHAPES[name]), (64,), generator=generator).tolist()


def sample_in_rows(tensor: int, t: int, span: int = 107) -> list[int]:
    """The same of a tensor in three rows, of 107 values but for the last: 64 values of one row."""
    seed = seed_of(0, list(SHAPES)[tensor])
    columns = torch.randint(span, (64,), generator=torch.Generator().manual_seed(seed))
    return [i for i in (columns + span * (seed % SIZE)).tolist() if i < 320]


def k_of(h) -> int:
    return compressors.kept(h.size, DENSITY)


LEVELS = {8: 127, 4: 7}


def merged_spec(bits: int, share: float) -> str:
    return f"trickle(density={DENSITY}, smallest=0, mask='merged', server_density={share}, group={GROUP}, bits={bits})"


COMPRESSORS = {
    f"topk(density={DENSITY}, smallest=0, feedback='updates(delivered_share=1.0)')": lambda: compressors.each_worker(
        lambda h: compressors.top_k(h, k_of(h))
    ),
    f"topk(density={DENSITY}, smallest=0, feedback='updates')": lambda: compressors.each_worker(
        lambda h: PORTION * compressors.top_k(h, k_of(h))
    ),
    f"trickle(density={DENSITY}, smallest=0, group={GROUP}, feedback='updates(delivered_share=1.0)')": lambda: (
        compressors.each_worker(lambda h: compressors.top_k_int8(h, k_of(h), GROUP, np.float32))
    ),
    f"trickle(density={DENSITY}, smallest=0, group={GROUP}, feedback='updates(delivered_share=0.3)')": lambda: (
        compressors.each_worker(lambda h: 0.3 * compressors.top_k_int8(h, k_of(h), GROUP, np.float32))
    ),
    f"radius(density={DENSITY}, T=3, start=0, smallest=0, feedback='updates', residual_scale=1.0)": (
        lambda: compressors.RadiusUpdates(DENSITY, 3)
    ),
    "powersgd(rank=2, smallest=0, feedback='updates(beta1=0.0)')": lambda: PowerSGDUpdates(
        {
            i: random_normal(seed_of(0, name), shape[1] * 2, torch.device("cpu")).view(-1, 2)
            for i, (name, shape) in enumerate(SHAPES.items())
        }
    ),
    "powersgd(rank=2, smallest=0, feedback='updates(beta1=0.5)')": lambda: PowerSGDUpdates(
        {
            i: random_normal(seed_of(0, name), shape[1] * 2, torch.device("cpu")).view(-1, 2)
            for i, (name, shape) in enumerate(SHAPES.items())
        }
    ),
    "tagc(theta=0, smallest=0, feedback='updates')": lambda: compressors.dense,
    **{
        merged_spec(bits, share): partial(
            compressors.Merged, SIZE, DENSITY, share, GROUP, LEVELS[bits], LEVELS[bits], np.float32
        )
        for bits, share in ((8, 0.25), (8, 1.0), (4, 0.1), (4, 1.0))  # the three masks' union is up to 0.375
    },
}


class MuonTranscribed(Trickle):
    """Jordan et al., 2024, by torch's arithmetic: each worker's own momentum, orthogonalised; ``scale`` by shape."""

    def __init__(self, *args, scale=lambda shape: 0.2 * math.sqrt(max(shape)), nesterov=True, **more):
        super().__init__(*args, **more)
        self.scale_of, self.nesterov = scale, nesterov

    def update(self, n, i, t, g, r, lr, b2, eps):
        self.m[n][i] = 0.95 * self.m[n][i] + 0.05 * g
        x = 0.05 * g + 0.95 * self.m[n][i] if self.nesterov else self.m[n][i]
        x = x / np.sqrt((x**2).sum())
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return lr * self.scale_of(x.shape) * x


def muon(parameters: list[Tensor], **settings) -> torch.optim.Optimizer:
    return FlatMuon(parameters, lr=LR, weight_decay=DECAY, **{"adjust_lr_fn": "match_rms_adamw", **settings})


ZEROS = [np.zeros(shape) for shape in SHAPES.values()]


@pytest.mark.parametrize(
    ("settings", "transcribed"),
    [
        ({}, {}),
        ({"adjust_lr_fn": None, "nesterov": False},
         {"scale": lambda shape: math.sqrt(max(1, shape[0] / shape[1])), "nesterov": False}),
    ],
)  # fmt: skip
def test_muons_direction_is_the_transcription(settings, transcribed):
    spec = f"topk(density={DENSITY}, smallest=0, feedback='updates(delivered_share=1.0)')"
    other = MuonTranscribed(ZEROS, SIZE, COMPRESSORS[spec](), sample, delayed=True, **transcribed)
    agree(spec, other, optimizer=partial(muon, **settings))


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter", "hsdp"])
def test_muons_direction_is_the_transcription_on_every_engine(topology):
    """On HSDP a node is a worker, its gradient the mean of its ranks'; half of every value is sent, the rest waits."""
    spec = "topk(density=1.0, smallest=0, feedback='updates(delivered_share=0.5)')"
    size, per_node = 4, 2 if topology == "hsdp" else 1
    found = reduce_on_threads(
        lambda: methods.resolve(spec), gradient, topology=topology, size=size, per_node=per_node, shapes=SHAPES,
        steps=STEPS, optimizer=muon,
    )  # fmt: skip
    workers = size // per_node
    other = MuonTranscribed(ZEROS, workers, compressors.each_worker(lambda h: 0.5 * h), None)
    for step in range(STEPS):
        inputs = [np.stack([whole_tensors(found[rank][step]["input"], topology, size)[i] for rank in range(size)])
                  for i in range(2)]  # fmt: skip
        nodes = [value.reshape(workers, per_node, *value.shape[1:]).mean(1) for value in inputs]
        expected = other.step(step + 1, [[node[n] for node in nodes] for n in range(workers)], LR, B2, EPS, DECAY)
        for i, name in enumerate(SHAPES):
            parts = [found[rank][step]["weights"][name].double().numpy() for rank in range(size)]
            if topology == "hsdp":
                assert (parts[0] == parts[2]).all() and (parts[1] == parts[3]).all()
                parts = parts[:2]
            ours = np.concatenate(parts) if topology != "all_reduce" else parts[0]
            of = expected[i].reshape(-1)
            assert np.abs(ours[: of.size] - of).max() <= 1e-4 * np.abs(of).max(), (step, name)


def whole_tensors(flat: Tensor, topology: str, size: int) -> list[np.ndarray]:
    """The tensors of a rank's own gradient in an engine's buffer: of rows, one behind the other, on sharded engines."""
    rows = {"all_reduce": 1, "reduce_scatter": size, "hsdp": 2}[topology]
    matrix, found, at = flat.view(rows, -1), [], 0
    for shape in SHAPES.values():
        width = -(-shape[0] // rows) * shape[1]
        values = matrix[:, at : at + width].reshape(-1)[: math.prod(shape)]
        found.append(values.double().numpy().reshape(shape))
        at += width
    return found


def test_whole_muon_on_one_rank_is_torchs():
    """All sent: Muon, with the momentum and the iteration of ``torch.optim.Muon``, which computes in bfloat16."""
    spec = "topk(density=1.0, smallest=0)"
    found = reduce_on_threads(
        lambda: methods.resolve(spec), gradient, topology="all_reduce", size=1, shapes=SHAPES, steps=5,
        optimizer=partial(muon, adjust_lr_fn="original"),
    )  # fmt: skip
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES.values()]
    stepper = torch.optim.Muon(weights, lr=LR, weight_decay=DECAY)
    for step in range(5):
        for weight, values in zip(weights, found[0][step]["input"].split([320, 320]), strict=True):
            weight.grad = values.view(weight.shape)
        stepper.step()
        for name, weight in zip(SHAPES, weights, strict=True):
            ours = found[0][step]["weights"][name].view(weight.shape)
            assert (ours - weight).norm() < 0.02 * weight.norm()


class Cautious(FlatMuon):
    """A Muon with a step of its own."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("topology", "optimizer", "words"),
    [
        ("two_level", muon, "on two levels a rank sends a part of a"),
        ("two_level_owner", muon, "on two levels a rank sends a part of a"),
        ("all_reduce", Cautious, "Cautious has a step"),
    ],
)
def test_where_muon_cannot_be_had_one_line_says_so(topology, optimizer, words):
    with pytest.raises(ThinwireError, match=words) as refused:
        reduce_on_threads(
            lambda: methods.resolve("trickle(smallest=0)"), gradient, topology=topology, size=4, per_node=2,
            shapes=SHAPES, optimizer=optimizer,
        )  # fmt: skip
    assert "\n" not in str(refused.value)


def test_muons_steps_are_delivered_whole_beside_adams():
    """Of a density of 0.05 a fourth of Adam's steps is delivered."""
    found = {
        spec: reduce_on_threads(
            lambda spec=spec: methods.resolve(spec), gradient, topology="all_reduce", size=2, shapes=SHAPES, steps=3,
            optimizer=muon,
        )[0][-1]
        for spec in ("topk(density=0.05, smallest=0)",
                     "topk(density=0.05, smallest=0, feedback='updates(delivered_share=1.0)')",
                     "topk(density=0.05, smallest=0, feedback='updates(delivered_share=0.25)')")
    }  # fmt: skip
    default, whole, fourth = (of["weights"]["a"] for of in found.values())
    assert torch.equal(default, whole) and not torch.equal(default, fourth)


@pytest.mark.parametrize("spec", COMPRESSORS)
def test_it_is_the_transcription(spec):
    zeros = [np.zeros(shape) for shape in SHAPES.values()]
    b1 = 0.5 if "beta1=0.5" in spec else 0.0
    places = sample_in_rows if "shared" in spec or "merged" in spec else sample
    compress = COMPRESSORS[spec]()
    server = compress.server if isinstance(compress, compressors.Merged) else None
    agree(spec, Trickle(zeros, SIZE, compress, places, delayed=True, b1=b1, server=server))


def agree(spec: str, other: Trickle, **more) -> None:
    found = played(spec, **more)
    for step in range(STEPS):
        parts = [
            [part.reshape(shape) for part, shape in zip(of.split([320, 320]), SHAPES.values(), strict=True)]
            for of in (found[rank][step]["input"] for rank in range(SIZE))
        ]
        expected = other.step(step + 1, parts, LR, B2, EPS, DECAY)
        for rank in range(SIZE):
            for name, of in zip(SHAPES, expected, strict=True):
                ours = found[rank][step]["weights"][name].view(of.shape).double().numpy()
                assert np.abs(ours - of).max() <= 2e-5 * np.abs(of).max(), (step, rank, name)
    if "residual/a" in found[0][-1]:  # and what waits
        for rank in range(SIZE):
            for i, name in enumerate(SHAPES):
                ours, of = found[rank][-1][f"residual/{name}"].double().numpy(), other.e[rank][i]
                assert np.abs(ours.reshape(-1)[: of.size].reshape(of.shape) - of).max() <= 1e-4 * np.abs(of).max()
    if other.server is not None:  # there, too
        for name, of, y in zip(SHAPES, other.s, other.y, strict=True):  # what is left of y, which float32 rounds
            assert np.abs(on_servers(found, -1, name).reshape(of.shape) - of).max() <= 2e-5 * np.abs(y).max()


def on_servers(found, step: int, name: str) -> np.ndarray:
    """What waits of a tensor's three rows on their servers."""
    rows = np.concatenate([found[rank][step][f"server/{name}"].double().numpy()[0, :107] for rank in range(SIZE)])
    assert not rows[320:].any()
    return rows[:320]


@pytest.mark.parametrize(("bits", "share"), [(4, 0.18), (4, 0.25), (4, 0.3), (4, 0.5), (8, 0.5)])
def test_merged_is_the_transcription_step_by_step(bits, share):
    """Each step from the state that the library was in.

    Of integers of 4 bits many are equal in size, and with a share of 0.5 there are first fewer values than places: what
    float32 has left of a value that was sent whole, 1e-9 or nothing, decides who is the last to be chosen. So such runs
    leave the transcription for good; but from the same state a step, too, is the same, with y as float32 has it.
    """
    found = played(merged_spec(bits, share))
    merge = compressors.Merged(SIZE, DENSITY, share, GROUP, LEVELS[bits], LEVELS[bits], np.float32)
    other = Trickle(
        [np.zeros(shape) for shape in SHAPES.values()], SIZE, merge, sample_in_rows, delayed=True,
        server=lambda y: merge.server(y.astype(np.float32).astype(np.float64)),
    )  # fmt: skip
    for step in range(STEPS):
        for i, (name, shape) in enumerate(SHAPES.items() if step else ()):
            other.weights[i] = found[0][step - 1]["weights"][name].double().numpy().reshape(shape)
            other.s[i] = on_servers(found, step - 1, name).reshape(shape)
            for rank in range(SIZE):
                waiting = found[rank][step - 1][f"residual/{name}"].double().numpy()
                other.e[rank][i] = waiting.reshape(-1)[:320].reshape(shape)
        given = [
            [part.view(shape) for part, shape in zip(of.split([320, 320]), SHAPES.values(), strict=True)]
            for of in (found[rank][step]["input"] for rank in range(SIZE))
        ]
        for name, of in zip(SHAPES, other.step(step + 1, given, LR, B2, EPS, DECAY), strict=True):
            for rank in range(SIZE):
                ours = found[rank][step]["weights"][name].view(of.shape).double().numpy()
                assert np.abs(ours - of).max() <= 2e-5 * np.abs(of).max(), (step, rank, name)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize("bits", [8, 4])
def test_merged_where_a_row_has_an_owner_is_the_transcription(bits, share):
    """FSDP2: row j of a tensor is rank j's weights, 6 of 16 rows of 20, and 3 of 8 of 40; the owner rounds nothing."""
    span = 120

    def padded(rank: int, step: int, numel: int) -> Tensor:
        given = gradient(rank, step, numel)
        given.view(SIZE, 2, span)[-1, :, 320 - 2 * span :] = 0
        return given

    found = reduce_on_threads(
        lambda: methods.resolve(merged_spec(bits, share)), padded, topology="reduce_scatter", size=SIZE, shapes=SHAPES,
        steps=STEPS, optimizer=adamw,
    )  # fmt: skip
    merge = compressors.Merged(SIZE, DENSITY, share, GROUP, LEVELS[bits], None, np.float32)
    zeros = [np.zeros((SIZE, span)) for _ in SHAPES]
    places = partial(sample_in_rows, span=span)
    other = Trickle(zeros, SIZE, merge, places, delayed=True, server=merge.server)
    for step in range(STEPS):
        given = [found[rank][step]["input"].view(SIZE, 2, span).unbind(1) for rank in range(SIZE)]
        expected = other.step(step + 1, given, LR, B2, EPS, DECAY)
        for name, of in zip(SHAPES, expected, strict=True):
            ours = np.stack([found[rank][step]["weights"][name].double().numpy() for rank in range(SIZE)])
            assert np.abs(ours - of).max() <= 2e-5 * np.abs(of).max(), (step, name)
    for i, name in enumerate(SHAPES):
        ours = np.stack([found[rank][-1][f"server/{name}"].double().numpy()[0] for rank in range(SIZE)])
        assert np.abs(ours - other.s[i]).max() <= 1e-4 * np.abs(other.s[i]).max()
        for rank in range(SIZE):
            ours, of = found[rank][-1][f"residual/{name}"].double().numpy(), other.e[rank][i]
            assert np.abs(ours - of).max() <= 1e-4 * np.abs(of).max()


def test_bytes_of_merged_masks_do_not_grow_with_the_ranks_and_own_ones_do():
    def sent(spec: str, size: int) -> float:
        found = reduce_on_threads(
            lambda: methods.resolve(spec), gradient, topology="all_reduce", size=size, shapes={"w": (256, 1024)},
            steps=2, optimizer=adamw,
        )  # fmt: skip
        return float(found[0][1]["bytes"])

    own, merged = "trickle(smallest=0)", "trickle:merged(smallest=0, server_density=0.1)"
    assert sent(own, 8) > 2.2 * sent(own, 4)
    assert sent(merged, 8) < 1.25 * sent(merged, 4)  # 7/8 to 3/4 of twice the values
    dense = 2 * 3 / 4 * 4 * 256 * 1024
    assert sent(own, 4) < 0.015 * dense


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(("ranks", "share"), [(2, 0.02), (4, 0.04), (12, 0.1)])
def test_servers_send_by_default_no_more_values_than_the_ranks_chose(topology, ranks, share):
    def sent(knob: str) -> tuple[float, list[dict[str, Tensor]]]:
        found = reduce_on_threads(
            lambda: methods.resolve(f"trickle:merged({knob})"), gradient, topology=topology, size=ranks,
            shapes={"w": (32, 128)}, steps=3, optimizer=adamw,
        )  # fmt: skip
        return sum(float(step["bytes"]) for step in found[0]), [found[rank][-1]["weights"] for rank in range(ranks)]

    (ours, weights), (same, alike), (most, _) = sent(""), sent(f"server_density={share}"), sent("server_density=0.1")
    assert ours == same and (ours < most) == (share < 0.1)
    for one, other in zip(weights, alike, strict=True):
        assert torch.equal(one["w"], other["w"])


def test_a_density_takes_at_most_24_bits_a_value():
    for density in (0.003, 0.01, 0.05):
        numel = 1 << 20
        codec = Sparse(((numel, int(density * numel)),), Int8(64))
        assert 8 * codec.wire_numel(numel) / int(density * numel) < 19


@pytest.mark.parametrize(
    ("optimizer", "spec", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "trickle(smallest=0)",
         r"built on Adam: .* got SGD, .* write trickle\(smallest=0, feedback='gradients'\)$"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "topk(smallest=0)",
         r"write topk\(smallest=0, feedback='gradients'\), or topk:paper$"),
        (thinwire.AdamS, "powersgd(smallest=0, feedback='updates(beta1=0.9)')",
         r"got AdamS, .* write powersgd\(smallest=0, feedback='gradients'\), or powersgd:paper$"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "trickle(smallest=0)", "amsgrad"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "topk(smallest=0)", "decoupled"),
    ],
)  # fmt: skip
def test_what_is_no_adamw_is_refused(optimizer, spec, words):
    with pytest.raises(ThinwireError, match=words):
        reduce_on_threads(
            lambda: methods.resolve(spec), gradient, topology="all_reduce", size=1, shapes=SHAPES, optimizer=optimizer
        )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("dgc(feedback='updates')", "no knob 'feedback'"), ("loco(feedback='updates')", "no knob 'feedback'"),
        ("topk(feedback='both')", "feedback is"),
        ("sign(feedback=None)", "feedback is Gradients.* or Updates.*, got None"),
        ("radius(beta1=0.5)", "no knob 'beta1'; it has: .*feedback"),
        ("topk(portion=0.5)", "no knob 'portion'; it has: .*feedback"),
        ("topk(feedback='update')", "feedback is 'gradients' or 'updates.* with delivered_share, beta1, got 'update'"),
        ("topk(feedback='updates(beta1=1.0)')", "beta1 is"), ("trickle(bits=32)", "bits is"),
        ("trickle(bits=5)", "bits is"), ("trickle(density=0)", "density is"),
        ("trickle(bits=2)", "bits is 4 or 8"),
        ("trickle(feedback=\"updates(direction='muon')\")", "feedback is 'gradients' or 'updates"),
        ("topk(feedback='updates(delivered_share=0.0)')", "delivered_share is a share"),
        ("sign(feedback='updates(delivered_share=0.5)')", "delivered_share is for"),
        ("tagc(theta=0, feedback='updates(delivered_share=0.5)')", "delivered_share does nothing"),
        ("trickle(server_density=0.2)", "server_density does nothing"),
        ("trickle:merged(server_density=0.0)", "server_density is the share"),
        ("trickle:merged(feedback='updates(delivered_share=0.5)')", "delivered_share is for"),
    ],
)  # fmt: skip
def test_bad_knobs_are_refused(spec, words):
    with pytest.raises(ThinwireError, match=words):
        methods.resolve(spec)


# On the engines.


def model_and_wire(kind: str, world: int, spec: str, **more):
    model = build(kind, world)
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    return model, optimizer, thinwire.compress(model, optimizer, spec, **more)


def _everywhere(rank: int, world: int) -> list[str]:
    """Moments are never made; ranks stay equal; a skipped step and a resume leave no trace; planned = sent."""
    found = []
    cases = [
        ("ddp", 0.0), ("fsdp2", 0.5), ("hsdp", 0.5),
    ]  # fmt: skip
    for kind, beta1 in spread(2, cases):
        spec = f"trickle(density=0.1, smallest=100, feedback='updates(beta1={beta1})')"
        model, optimizer, wire = model_and_wire(kind, world, spec)
        train(model, optimizer, rank, range(3), wire)
        saved = (
            {name: value.clone() for name, value in model.state_dict().items()},
            copy.deepcopy(optimizer.state_dict()), wire.state_dict(),
        )  # fmt: skip
        train(model, optimizer, rank, range(3, 6), wire)
        plain = flat(model)
        planned, sent = wire.plan.wire_bytes, sum(wire.stats()["wire_bytes_per_step"].values())
        if kind == "ddp" and planned != sent:  # the others gather weights besides
            found.append(f"{kind}: planned {planned}, sent {sent}")
        compressed = [p for n, p in model.named_parameters() if p.dim() >= 2 and "embed" not in n and p.numel() >= 100]
        if any("exp_avg" in optimizer.state[p] for p in compressed if p in optimizer.state):
            found.append(f"{kind}: moments were made")
        wire.close()

        model, optimizer, wire = model_and_wire(kind, world, spec)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        wire.load_state_dict(saved[2])
        train(model, optimizer, rank, [3], wire, poison=(3, 0))
        train(model, optimizer, rank, range(3, 6), wire)
        if wire.skipped != 1:
            found.append(f"{kind}: {wire.skipped} skipped")
        if not torch.equal(plain, flat(model)):
            found.append(f"{kind}: resumed and skipped, the weights differ by {(plain - flat(model)).abs().max()}")
        wire.close()
    return found


def _flushes(rank: int, world: int) -> list[str]:
    """Weights move by the mean of what waited, which is then nothing; and again: nothing."""
    found = []
    cases: list[tuple[str, str, dict]] = [
        ("ddp", "trickle(density=0.1, smallest=100)", {}), ("fsdp2", "trickle(density=0.1, smallest=100)", {}),
        ("hsdp", "topk(density=0.1, smallest=100, feedback='updates')", {}),
        ("ddp", "trickle(density=0.1, smallest=100)", {"two_level": True}),
        ("ddp", "sign(smallest=100, feedback='updates')", {}),
    ]  # fmt: skip
    for kind, spec, more in spread(2, cases):
        model, optimizer, wire = model_and_wire(kind, world, spec, **more)
        train(model, optimizer, rank, range(3), wire)
        before, waiting = flat(model), entries(wire.state_dict())
        wire.flush()
        after, left = flat(model), entries(wire.state_dict())
        kinds = [name for name in left if name.startswith(("residual/", "server/"))]
        if not kinds or any(left[name].any() for name in kinds):
            found.append(f"{kind} {spec}: something waits")
        if not any(waiting[name].any() for name in kinds) or torch.equal(before, after):
            found.append(f"{kind} {spec}: nothing was delivered")
        if kind == "ddp" and not more and spec.startswith("trickle"):
            total = torch.cat([waiting[f"residual/{n.removeprefix('module.')}"].flatten()
                               if f"residual/{n.removeprefix('module.')}" in waiting else torch.zeros(p.numel())
                               for n, p in model.named_parameters()])  # fmt: skip
            torch.distributed.all_reduce(total)
            if not torch.allclose(before - after, total / world, atol=1e-6):
                found.append(f"{kind}: not the mean of what waited")
        wire.flush()
        if not torch.equal(after, flat(model)):
            found.append(f"{kind} {spec}: flushed twice")
        train(model, optimizer, rank, range(3, 5), wire)  # and it goes on
        wire.close()
    return found


def test_what_waits_is_delivered_on_demand():
    for found in ranks.run(_flushes, 4, LOCAL_WORLD_SIZE="2"):
        assert not found, "\n".join(found)


def test_on_every_engine():
    for found in ranks.run(_everywhere, 4 if ALL else 2):
        assert not found, "\n".join(found)


def _alternates(rank: int, world: int, spec: str, turns: str) -> dict[str, tuple[Tensor, Tensor]]:
    """On FSDP2, whose buffers leave out what has no gradient: weights, and the mean of what waits, by parameter."""
    model = build("fsdp2", world, net=edges.Given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    wire = thinwire.compress(model, optimizer, spec, safety=thinwire.Safety(outlier_clip=None))
    generator, books = torch.Generator().manual_seed(rank), edges.Books("fsdp2", rank, world, optimizer, wire)
    for turn in turns:
        used = {"A": ("w0", "w1", "w2"), "B": ("w0", "w1"), "C": ("w1", "w2")}[turn]
        gradients = {name: torch.randn(edges.SHAPES[name], generator=generator) for name in used}
        with wire.accumulate():
            model(gradients).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: (edges.full(w).double(), books.read("residual", name, edges.SHAPES[name], w)["residual"] / world)
        for name, w in edges.parts(model).items()
    }


def _conserves(rank: int, world: int) -> dict[str, float]:
    found = {}
    for spec in ("topk(density=0.1)", "tagc(theta=0.9)", "powersgd(rank=2)",
                 "trickle(density=0.1)"):  # fmt: skip
        beta1 = resolve(spec).feedback.beta1
        some, all_ = (
            _alternates(rank, world, text, "AABBACAB")
            for text in (
                spec.replace(")", ", smallest=0)"),
                f"topk(density=1.0, feedback='updates(delivered_share=1.0, beta1={beta1})', smallest=0)",
            )
        )
        lost = [(some[n][0] - some[n][1] - all_[n][0]).abs().max() / all_[n][0].abs().max() for n in some]
        found[spec] = float(max(lost)) if min(float(wait.abs().max()) for _, wait in some.values()) else math.inf
    return found


def test_steps_that_wait_are_not_lost_when_parameters_have_no_gradient_by_turns():
    """Weights - what waits = the weights of a run that sends everything."""
    for found in ranks.run(_conserves, 2):
        assert max(found.values()) < edges.LAW, found


def _clips(rank: int, world: int) -> str:
    model, optimizer, wire = model_and_wire("ddp", world, "trickle(density=0.1, smallest=100)")
    for step in range(2):
        train(model, optimizer, rank, [step], wire)  # with wire.clip_grad_norm_: fine
    try:
        for step in range(2, 4):
            loss_of(model, step, rank).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
            optimizer.step()
            optimizer.zero_grad()
    except ThinwireError as error:
        return f"{step}: {error}"
    return "nothing was said"


def test_clipping_with_torch_is_noticed():
    for said in ranks.run(_clips, 2):
        assert said.startswith("3: ") and "wire.clip_grad_norm_" in said


def _gradients_at_the_end(rank: int, world: int) -> dict[str, set[int]]:
    """How many gradients DDP shows at the end of a backward pass."""
    shown: dict[str, set[int]] = {}
    for spec, scaled in itertools.product(("trickle(smallest=100)", "sign(feedback='updates')", "int8"), (False, True)):
        model, scaler = build("ddp", world), torch.amp.GradScaler("cpu", enabled=scaled)
        optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), shown.setdefault(f"{spec} {scaled}", set())
        wire, end_pass = thinwire.compress(model, optimizer, spec, scaler=scaler), Road.end_pass
        with pytest.MonkeyPatch.context() as patch:
            look = lambda road, shown, end=end_pass, seen=seen: end(road, seen.add(len(shown)) or shown)  # noqa: E731
            patch.setattr(Road, "end_pass", look)
            for step in range(2):
                scaler.scale(loss_of(model, step, rank)).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        wire.close()
    return shown


def test_ddp_shows_gradients_to_who_looks_at_them_alone():
    """Nobody does under a GradScaler, which scales what is shown, and no method that makes no steps."""
    (shown,) = ranks.run(_gradients_at_the_end, 1)
    assert all(counts == {0} for case, counts in shown.items() if "True" in case or "int8" in case), shown
    assert all(counts != {0} for case, counts in shown.items() if "False" in case and "int8" not in case), shown


def _probed(rank: int, world: int, kind: str) -> dict[str, str]:
    """What is said when one parameter's step alone is scaled, after or inside the backward pass (FSDP2's own hooks)."""
    said = {}
    cases = [(True, False, False), (False, True, False), (False, False, True)] if kind == "ddp" else [(False,) * 3]
    for as_view, two_level, scaled in cases:
        options = {"gradient_as_bucket_view": True} if as_view else {}
        names = [name for name, of in build(kind, world).named_parameters() if of.dim() >= 2 and of.numel() >= 100]
        for number, name in spread(2, list(enumerate((*names, "")))[::-1]):  # "": none
            model, scaler = build(kind, world, **options), torch.amp.GradScaler("cpu", enabled=scaled)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            more = {"two_level": True} if two_level else {}
            spec = "sign(smallest=100, feedback='updates')"  # no step is zero
            wire = thinwire.compress(model, optimizer, spec, scaler=scaler, **more)
            weight = dict(model.named_parameters()).get(name)
            inside = kind != "ddp" and number % 2 == 0
            if weight is not None and inside:
                weight.register_post_accumulate_grad_hook(lambda of: local(of.grad).mul_(0.9))
            for step in range(2):
                scaler.scale(loss_of(model, step, rank)).backward()
                scaler.unscale_(optimizer)
                wire.clip_grad_norm_(1.0)
                if step and weight is not None and not inside:
                    local(weight.grad).mul_(0.9)
                try:
                    scaler.step(optimizer)
                    wire.close() if step else None
                    said[f"{name} {as_view} {two_level} {scaled}"] = ""
                except ThinwireError as error:
                    said[f"{name} {as_view} {two_level} {scaled}"] = str(error)
                    break
                scaler.update()
                optimizer.zero_grad()
    return said


@pytest.mark.parametrize(("kind", "world"), alternating(0, [("ddp", 4), ("fsdp2", 2), ("hsdp", 4)]))
def test_whoever_scales_a_single_step_is_told(kind, world):
    for said in ranks.run(_probed, world, kind, LOCAL_WORLD_SIZE="2"):
        assert any(said.values())
        for case, error in said.items():
            assert ("something has scaled it" in error) == (not case.startswith(" ")), (case, error)


class Formed(torch.nn.Module):
    """Weights that are not contiguous, of more values than are probed."""

    def __init__(self) -> None:
        super().__init__()
        kernel = torch.randn(96, 8, 3, 3).to(memory_format=torch.channels_last)
        self.kernel, self.matrix = torch.nn.Parameter(kernel), torch.nn.Parameter(torch.randn(96, 80).t())

    def forward(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(of.shape, generator=generator) for of in self.parameters()]
        return sum((of * by).sum() + of.square().sum() for of, by in zip(self.parameters(), given, strict=True))


def _formed(rank: int, world: int) -> dict[tuple[Any, ...], str]:
    said = {}
    for spec in ("trickle(smallest=0)", "sign(smallest=0, feedback='updates')"):
        for as_view, two_level, scaled in itertools.product((False, True), repeat=3):
            model = build("ddp", world, net=Formed, gradient_as_bucket_view=as_view)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            wire = thinwire.compress(model, optimizer, spec, two_level=two_level)
            said[spec, as_view, two_level, scaled] = ""
            try:
                for step in range(3):
                    model(10 * step + rank).backward()
                    if scaled:
                        next(iter(model.parameters())).grad.mul_(0.9)
                    optimizer.step()
                    optimizer.zero_grad()
                wire.close()
            except ThinwireError as error:
                said[spec, as_view, two_level, scaled] = str(error)
    return said


def test_steps_of_weights_that_are_not_contiguous_are_refused_if_they_are_scaled_and_only_then():
    for said in ranks.run(_formed, 4, LOCAL_WORLD_SIZE="2"):
        for case, error in said.items():
            assert ("something has scaled it" in error) == case[-1] and bool(error) == case[-1], (case, error)


class Shuffled(torch.nn.Module):
    """Layers in another order than that in which they are used, so that DDP cuts its buckets anew after a step."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"c": (96, 8), "a": (16, 128), "d": (128, 96), "b": (128, 128)}
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(*size))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.d):
            x = layer(x).relu()
        return self.c(x).square().mean()


def _resumes(rank: int, world: int) -> dict[str, float]:
    """By how much the weights of a resumed run differ from those of the run that went on, by method."""
    found = {}
    for spec in spread(2, ("trickle(smallest=0)", "topk(smallest=0)", "trickle:merged(smallest=0)",
                           "sign(smallest=0, feedback='updates')", "trickle(smallest=0, start=4)")):  # fmt: skip

        def begin(spec=spec):
            model = build("ddp", world, net=Shuffled, bucket_cap_mb=0.04)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            return model, optimizer, thinwire.compress(model, optimizer, spec)

        def go(model, optimizer, wire, steps):
            for step in steps:
                model(torch.randn(16, 16, generator=torch.Generator().manual_seed(100 * step + rank))).backward()
                wire.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            return flat(model)

        def copied(*parts):
            return copy.deepcopy([part.state_dict() for part in parts])

        def load(parts, saved):
            for part, values in zip(parts, saved, strict=True):
                part.load_state_dict(values)

        run = begin()
        first, fourth = copied(*run), go(*run, range(4))
        saved, plain = copied(*run), go(*run, range(4, 10))
        if "start" not in spec:  # the network sums its dense steps
            load(run, first)
            found[spec, "put back to its beginning"] = float((go(*run, range(4)) - fourth).abs().max())
        run[-1].close()
        run = begin()
        load(run, saved)
        found[spec] = float((go(*run, range(4, 10)) - plain).abs().max())
        run[-1].close()
    return found


def test_three_ranks_resume_bit_for_bit_however_ddp_cuts_its_buckets():
    """A network's sum of three depends on where in a message a value stands: these leave it none but r's.

    Nor does the first of their steps depend on the buckets, be it the run's or the one that ends a dense start.
    """
    for found in ranks.run(_resumes, 3):
        assert not any(found.values()), found


# The codec and the kernels.


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(1, 12), st.floats(0, 1)), min_size=1, max_size=3))
def test_positions_come_back(seed, shapes):
    parts = tuple((64 * words, max(1, int(share * 64 * words))) for words, share in shapes)
    n, generator = sum(width for width, _ in parts), torch.Generator().manual_seed(seed)
    values, words, place = torch.randn(4, n, generator=generator), torch.zeros(4, n // 64, dtype=torch.int64), 0
    for width, k in parts:
        at = slice(place // 64, (place + width) // 64)
        sparse.marked(values[:, place : place + width], (sparse.ListSegment(0, width, k, 0),), words[:, at])
        place += width
    positions = Positions(parts)
    wire = torch.full((4, positions.nbytes), 255, dtype=torch.uint8)

    def space(use, shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    positions.split(values.clone(), Residual(None, torch.empty_like(values)), space, wire)
    assert torch.equal(positions.read(wire, torch.full_like(words, -7), space), words)


@pytest.mark.parametrize(
    "segments", [((0, 640, 6), (640, 6400, 64)), ((0, 64, 64),), ((0, 16384, 164), (16384, 64, 1))]
)
def test_top_k_integers(segments):
    generator = torch.Generator().manual_seed(0)
    codec = Sparse(tuple((width, k) for _, width, k in segments), Int8(64))
    n = sum(width for _, width, _ in segments)
    rows, old = torch.randn(3, n, generator=generator), torch.randn(3, n, generator=generator)
    wire, new, h = torch.zeros(3, codec.wire_numel(n), dtype=torch.uint8), torch.full((3, n), torch.nan), rows + old
    codec.encode(rows.clone(), wire, residual=Residual(old, new))
    out = codec.decode(wire, torch.full((3, n), torch.nan))
    assert torch.allclose(out + new, h, rtol=0, atol=1e-6)
    for start, width, k in segments:
        part, sent = h[:, start : start + width], out[:, start : start + width]
        largest = part.abs().topk(k).indices
        assert not sent.scatter(1, largest, 0).any()  # nothing else
        step = part.abs().amax() / 127
        assert (sent - part).gather(1, largest).abs().max() <= step / 2 * 1.001
    total = codec.decode_sum(wire, torch.full((n,), torch.nan), 1 / 3)
    assert torch.allclose(total, out.mean(0), atol=1e-6)
    plain = codec.encode(h.clone(), torch.zeros_like(wire))
    assert torch.equal(codec.decode(plain, torch.zeros(3, n)), out)


def check(fast, device="cpu"):
    for momentum in (False, True):
        for count, n, pad in ((1, 1, 0), (3, 1000, 24), (2, 4097, 0)):
            generator = torch.Generator().manual_seed(n)
            held = torch.randn(count, 5, n + pad, generator=generator)
            held[:, 1].square_()
            held[0, :3, 0] = 0  # a value that no batch used
            if n > 1:
                held[0, 0, 1], held[-1, 0, 2] = 1e30, 1e-30
            ours, theirs = held.clone().to(device), held.clone()
            for which, of in ((fast, ours), (reference, theirs)):
                g, v, v_out, m, m_out = (of[:, i, :n] for i in range(5))
                lr, scale = (torch.tensor(x, device=of.device) for x in ([7.0, 3e-3, 0.5], [9.0, 4.0, 0.25]))
                pair = (m, m_out) if momentum else (None, None)
                parts = [DirectionSegment(0, min(n, 48), 1, 0.95, 1e-8)]
                if n > 304:
                    parts += [DirectionSegment(64, 80, 2, 0.5, 1e-3), DirectionSegment(304, n - 304, 1, 1.0, 1e-8)]
                half = torch.tensor(0.5, device=of.device)
                which.direction(g, v, v_out, *pair, parts, lr, 2 * scale, half, 0.9)
            assert torch.allclose(ours.cpu(), theirs, rtol=2e-6, atol=0, equal_nan=True)
            assert theirs[:, :3, :n].isfinite().all() and (momentum or theirs[0, 0, 0] == 0)
            assert n == 1 or torch.equal(theirs[:, :, 48:64], held[:, :, 48:64])  # of no part


def test_direction_equals_reference():
    check(cpu)


def test_direction_of_nothing():
    empty = torch.zeros(2, 0)
    one = torch.ones(1)
    segments = [DirectionSegment(0, 0, 0, 0.9, 1e-8)]
    direction.direction(empty, empty, empty, None, None, segments, lr=one, scale=one, factor=one[0], beta1=0)


@needs_triton
def test_triton_direction_interpreted_equals_reference():
    code = "import test_update; from thinwire.ops.direction import triton; test_update.check(triton)"
    done = run_python(code, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_direction_on_a_gpu():
    from thinwire.ops.direction import triton

    check(triton, "cuda")


def test_without_beta1_dense_is_a_density_of_one():
    """One rank, everything sent: AdamW with beta1 = 0."""
    found = reduce_on_threads(
        lambda: methods.resolve("topk(density=1, smallest=0, feedback='updates(delivered_share=1.0)')"), gradient,
        topology="all_reduce", size=1, shapes=SHAPES, steps=5, optimizer=adamw,
    )  # fmt: skip
    weights = [torch.nn.Parameter(torch.zeros(320)) for _ in SHAPES]
    stepper = torch.optim.AdamW(weights, lr=LR, betas=(0.0, B2), eps=EPS, weight_decay=DECAY)
    for step in range(5):
        for weight, values in zip(weights, found[0][step]["input"].split([320, 320]), strict=True):
            weight.grad = values
        stepper.step()
        for name, weight in zip(SHAPES, weights, strict=True):
            assert torch.allclose(found[0][step]["weights"][name], weight, rtol=1e-5, atol=1e-7)
