"""1-bit Adam against its pseudo-code (``papers/onebit_adam.py``, float64), laws, limits, and the kernels of signs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from breadth import spread
from papers.onebit_adam import OneBitAdam as OneBitAdamPaper
from programs import check_interpreted, needs_triton
from test_ops_quant import apart, assert_same_bits, hard_rows, margin, poisoned
from thinwire.base.errors import ThinwireError
from thinwire.codecs.intquant import Integers
from thinwire.codecs.sign import Sign
from thinwire.core.exchange import bucket_rows
from thinwire.core.method import Parameter, Run
from thinwire.core.selection import keep_dense
from thinwire.methods import OneBitAdam, resolve
from thinwire.methods.baselines.onebit import _frozen_steps
from thinwire.network.ledger import Ledger
from thinwire.ops.sign import cpu, reference
from thinwire.plan.plan import plan_of
from thinwire.proof.laws import check_laws
from thinwire.proof.ranks import Threads, parameters_for
from thinwire.proof.record import Setup
from threaded import exchange_on, reduce_on_threads

STEPS, WARMUP, LR, DECAY = 50, 6, 1e-2, 0.1
TOPOLOGIES = ["all_reduce", "reduce_scatter"]
SHAPES = {"a": (12, 25), "b": (12, 8), "c": (13, 5)}
"""In groups of 32 and on 2 to 4 ranks: whole groups, tails, and (c) rows of different length."""


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    common = torch.randn(numel, generator=torch.Generator().manual_seed(8))
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))
    return common * (1 + 0.01 * step) + noise


def adamw(weights):
    return torch.optim.AdamW(weights, lr=LR, weight_decay=DECAY)


def make(**knobs) -> OneBitAdam:
    return OneBitAdam(**{"group": 32, "warmup": WARMUP, "smallest": 0, "send": ("*",), **knobs})


def run(topology, size, knobs=None, *, given=gradients, **more):
    common = {"shapes": SHAPES, "steps": STEPS, "optimizer": adamw, **more}
    return reduce_on_threads(lambda: make(**(knobs or {})), given, topology=topology, size=size, **common)


def locals_of(topology: str, size: int) -> dict[str, int]:
    """Elements of each parameter in one rank's part of the engine's buffer."""
    parameters = parameters_for(exchange_on(topology, Threads(size), 0, Ledger()), SHAPES)
    return {name: parameter.local for name, parameter in parameters.items()}


def by_parameter(flat, topology: str, size: int) -> dict[str, np.ndarray]:
    """The engine's whole buffer, taken apart; where it is sharded, with the engine's padding."""
    widths = locals_of(topology, size)
    rows = np.asarray(flat).reshape(1 if topology == "all_reduce" else size, -1)
    columns = np.split(rows, np.cumsum(list(widths.values()))[:-1], 1)
    return {name: values.reshape(-1) for name, values in zip(widths, columns, strict=True)}


@pytest.mark.parametrize(("topology", "size", "scale"), spread(2, TOPOLOGIES, [2, 3, 4], ["mean", "rms"]))
def test_against_the_pseudo_code(topology, size, scale):
    """Weights, momentum and both errors, for 6 dense and 44 compressed steps. Sharded is the same algorithm."""
    results = run(topology, size, {"scale": scale})
    numels = {name: len(v) for name, v in by_parameter(results[0][0]["input"], topology, size).items()}
    papers = {
        name: OneBitAdamPaper(numel, size, group=32, warmup=WARMUP, scale=scale, lr=LR, betas=(0.9, 0.999), eps=1e-8,
                              decay=DECAY) for name, numel in numels.items()
    }  # fmt: skip
    for step in range(STEPS):
        given = [by_parameter(rank[step]["input"].double(), topology, size) for rank in results]
        ranks = results[:1] if topology == "all_reduce" else results
        moments = by_parameter(torch.cat([rank[step]["mean"] for rank in ranks]), topology, size)
        for name, paper in papers.items():
            expected = paper.step([mine[name] for mine in given])
            assert paper.closest > 2e-7, "a sign that float32 cannot tell: take other gradients"
            weights = np.concatenate([rank[step]["weights"][name].double().numpy() for rank in ranks])
            assert np.abs(weights - expected).max() < 1e-5 + 1e-4 * np.abs(expected).max()
            if step < WARMUP:
                continue
            assert np.abs(moments[name] - paper.m).max() < 1e-5
            for n, rank in enumerate(results):
                mine = rank[step][f"residual/{name}"].reshape(-1)[: numels[name]].double().numpy()
                assert np.abs(mine - paper.worker_error[n]).max() < 1e-4
                error = rank[step][f"server/{name}"].reshape(-1).double().numpy()
                assert np.abs(error[: len(paper.server_error[n])] - paper.server_error[n]).max() < 1e-4


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_is_lost(topology):
    """m' + s + mean e = b1 m + (1-b1) mean g + last s + last mean e, value by value."""
    size = 3
    results = run(topology, size, steps=WARMUP + 8)

    def held(step, name):  # what waits: e and s
        ranks = [rank[step] for rank in results]
        numel = sum(rank["weights"][name].numel() for rank in (ranks[:1] if topology == "all_reduce" else ranks))
        errors = sum(rank[f"residual/{name}"].double().reshape(-1) for rank in ranks) / size
        return (errors + torch.cat([rank[f"server/{name}"].double()[0] for rank in ranks]))[:numel].numpy()

    def moments(step):
        flats = [rank[step]["mean"] for rank in results]
        return by_parameter(flats[0] if topology == "all_reduce" else torch.cat(flats), topology, size)

    for step in range(WARMUP + 1, WARMUP + 8):
        given = by_parameter(sum(rank[step]["input"].double() for rank in results) / size, topology, size)
        for name in SHAPES:
            before = 0.9 * moments(step - 1)[name].astype(float) + 0.1 * given[name] + held(step - 1, name)
            assert np.abs(moments(step)[name] + held(step, name) - before).max() < 1e-5
            assert np.abs(held(step, name)).max() > 0.01


def quantized(x: np.ndarray, bits: int) -> np.ndarray:
    """Q of one chunk, in groups of 32."""
    out, most = np.empty_like(x), 2 ** (bits - 1) - 1
    for at in range(0, len(x), 32):
        step = np.abs(x[at : at + 32]).max() / most
        out[at : at + 32] = np.round(x[at : at + 32] / step) * step
    return out


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_warm_up_in_few_bits_against_loops_and_what_waits_at_its_end_goes_on(topology, bits):
    """Means and errors of the warm-up; then, value by value over its end too, m' + s + mean e is conserved; bytes."""
    size, numel = 3, 96 * 3
    results = run(topology, size, {"warmup_bits": bits}, shapes={"a": (12, 24)}, steps=WARMUP + 4)
    chunks = [slice(96 * r, 96 * (r + 1)) for r in range(size)]
    worker, server, m = [np.zeros(numel) for _ in range(size)], np.zeros(numel), np.zeros(numel)
    waited = np.zeros(numel)
    for step in range(WARMUP + 4):
        given = [rank[step]["input"].double().numpy() for rank in results]
        flats = [rank[step]["mean"].double() for rank in results]
        mean = (flats[0] if topology == "all_reduce" else torch.cat(flats)).numpy()
        errors = [rank[step]["residual/a"].double().reshape(-1).numpy() for rank in results]
        serves = torch.cat([rank[step].get("server/a", torch.zeros(1, 96)).double()[0] for rank in results]).numpy()
        if step < WARMUP:
            sent = [np.concatenate([quantized((0.1 * g + e)[at], bits) for at in chunks])
                    for g, e in zip(given, worker, strict=True)]  # fmt: skip
            worker = [0.1 * g + e - s for g, e, s in zip(given, worker, sent, strict=True)]
            expected = sum(sent) / size + server
            if topology == "all_reduce":
                y, expected = expected, np.concatenate([quantized(expected[at], bits) for at in chunks])
                server = y - expected
            assert np.abs(mean - expected / 0.1).max() < 1e-5
            assert max(np.abs(e - w).max() for e, w in zip(errors, worker, strict=True)) < 1e-6
            assert np.abs(serves - server).max() < 1e-6
            ways = 2 if topology == "all_reduce" else 1
            assert results[0][step]["bytes"].item() == ways * (size - 1) * (96 * bits // 8 + 96 // 32 * 4)
        before = 0.9 * m + 0.1 * sum(given) / size + waited
        m = 0.9 * m + 0.1 * mean if step < WARMUP else mean
        waited = sum(errors) / size + serves
        assert np.abs(waited).max() > (1e-4 if step < WARMUP else 1e-2)
        assert np.abs(m + waited - before).max() < 1e-5


def largest(x: np.ndarray, k: int, chunk: int) -> np.ndarray:
    """C of all chunks: the k largest of each, in the order of their positions in 4 bits, in groups of 8."""
    out = np.zeros_like(x)
    for at in range(0, len(x), chunk):
        places = at + np.sort(np.argsort(-np.abs(x[at : at + chunk]))[:k])
        for first in range(0, k, 8):
            group = places[first : first + 8]
            step = np.abs(x[group]).max() / 7
            out[group] = np.round(x[group] / step) * step
    return out


def test_any_codec_takes_the_momentum():
    """What a subclass needs: the codec. Eight bits here."""

    class EightBits(OneBitAdam):
        def make_codec(self):
            return Integers(self.group, 8)

    check_laws(EightBits, setups=(Setup("all_reduce", 3), Setup("reduce_scatter", 2)))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_warm_up_is_the_dense_optimizer_and_ranks_stay_equal(topology):
    results = run(topology, 3, steps=WARMUP + 3)
    dense = reduce_on_threads(lambda: resolve("dense"), gradients, topology=topology, size=3, shapes=SHAPES,
                              steps=WARMUP, optimizer=adamw)  # fmt: skip
    for rank, other in zip(results, dense, strict=True):
        for step in range(WARMUP):
            assert all(torch.equal(rank[step]["weights"][name], other[step]["weights"][name]) for name in SHAPES)
        if topology == "all_reduce":
            for name in SHAPES:
                assert torch.equal(rank[-1]["weights"][name], results[0][-1]["weights"][name])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bytes_are_the_plans(topology, size):
    """Signs both ways; once, where the optimizer is sharded, the momentum of the warm-up in fp32."""
    results = run(topology, size, steps=WARMUP + 3)
    exchange = exchange_on(topology, Threads(size), 0, Ledger())
    planned = plan_of(make(), parameters_for(exchange, SHAPES).values(), exchange).wire_bytes
    once, *later = [step["bytes"].item() for step in results[0][WARMUP:]]
    assert later == [planned, planned]
    width = sum(-(-columns // 32) * 32 for columns in
                (-(-local // bucket_rows(exchange, False)) if topology == "all_reduce" else local
                 for local in locals_of(topology, size).values()))  # fmt: skip
    assert planned == 2 * (size - 1) * (width // 8 + width // 32 * 4)
    assert once == planned + (0 if topology == "all_reduce" else 4 * width * (size - 1))


@pytest.mark.parametrize("skipped", [WARMUP - 1, WARMUP, 9])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_skipped_step_leaves_no_trace(topology, skipped):
    """Its NaN is nowhere, the first compressed step (where the momentum changes hands) included."""

    def shifted(rank, step, numel):
        if step == skipped:
            return torch.full((numel,), math.nan)
        return gradients(rank, step - (step > skipped), numel)

    # The clock of ``reduce_on_threads`` goes on at a skipped step (the wire's does not): a skipped warm-up is longer.
    knobs = {"warmup": WARMUP + (skipped < WARMUP)}
    clean = run(topology, 2, steps=12)
    dirty = run(topology, 2, knobs, given=shifted, steps=13, skip=(skipped,))
    for rank, other in zip(clean, dirty, strict=True):
        for key, value in rank[-1].items():
            if isinstance(value, torch.Tensor) and key not in ("input", "bytes"):
                assert torch.equal(value, other[-1][key]), key
        assert all(torch.equal(rank[-1]["weights"][name], other[-1]["weights"][name]) for name in SHAPES)


def test_with_one_value_in_each_group_the_frozen_step_is_all_that_is_left():
    """Limit: constant magnitudes lose nothing to C, so the momentum is Adam's own; v is the warm-up's."""

    def signs(rank, step, numel):
        return torch.ones(numel) * (-1) ** (torch.arange(numel) % 3)

    results = run("all_reduce", 2, given=signs, shapes={"a": 64}, steps=20)
    weight = torch.zeros(64, dtype=torch.float64)
    for t in range(1, 21):  # m^ = g and v^ = g^2 whatever t
        weight = (1 - LR * DECAY) * weight - LR * signs(0, 0, 64) / (1 + 1e-8)
        assert torch.allclose(results[0][t - 1]["weights"]["a"].double(), weight, atol=1e-6)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_steps_of_many_tensors_are_those_of_each_bit_for_bit(dtype, clipped):
    """Of tensors that were frozen at other steps, or before their first, with values without gradients, and eps 0."""
    generator, eps, many = torch.Generator().manual_seed(0), 0.0, 13
    weights, moments, averages, variances = (
        [torch.randn(5, 7, generator=generator).to(dtype) for _ in range(many)] for _ in range(4)
    )
    for variance in variances:
        variance.square_()[0] = 0
    variances[4].zero_()
    frozen = [torch.tensor(3.0 + number % 5 if number != 4 else 0.0) for number in range(many)]
    steps = [count + 9 + number for number, count in enumerate(frozen)]
    scale = torch.tensor(0.3) if clipped else 1.0
    expected = []
    for w, m, v, step, count in zip(weights, moments, variances, steps, frozen, strict=True):
        one, last = 1 - 0.9 ** step.double(), 1 - 0.9 ** count.double()
        denominator = (v.float() / (1 - 0.999 ** count.double())).sqrt() + eps
        denominator = (denominator * (one / scale)).masked_fill(v == 0, torch.inf)
        moved = (w * (1 - LR * DECAY)).clone().addcdiv_(m.float(), denominator, value=-LR)
        expected.append((moved, m.clone().mul_(last / one * scale)))
    group = {"betas": (0.9, 0.999), "lr": LR, "weight_decay": DECAY, "eps": eps}
    _frozen_steps(weights, moments, averages, variances, steps, frozen, group, scale)
    for w, average, (moved, kept) in zip(weights, averages, expected, strict=True):
        assert torch.equal(w, moved) and torch.equal(average, kept) and moved.isfinite().all()


class OneDevice(TorchDispatchMode):
    """Refuses what CUDA does: an operation on a list and a tensor of another device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__.startswith("_foreach"):
            assert len({of.device for of in tree_leaves((args, kwargs)) if isinstance(of, torch.Tensor)}) <= 1, function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("clipped", [False, True])
def test_counts_on_the_cpu_go_with_weights_elsewhere(clipped):
    """As those of AdamW do that is neither fused nor capturable."""
    weights, moments, averages, variances = ([torch.ones(3, device="meta") for _ in range(4)] for _ in range(4))
    counts, scale = [torch.tensor(3.0)] * 4, torch.ones((), device="meta") if clipped else 1.0
    group = {"betas": (0.9, 0.999), "lr": LR, "weight_decay": DECAY, "eps": 1e-8}
    with OneDevice():
        _frozen_steps(weights, moments, averages, variances, counts, counts, group, scale)


def test_beta1_is_the_schedules_in_every_step():
    """OneCycleLR moves beta1. The limit above, with gradients whose size changes once v is frozen."""

    def sized(step):
        return 1.0 if step < WARMUP else 1.0 + 0.3 * (step % 3)

    def beta1(step):
        return 0.85 + 0.01 * (step % 7)

    def signs(rank, step, numel):
        return sized(step) * torch.ones(numel) * (-1) ** (torch.arange(numel) % 3)

    def scheduled(weights):
        optimizer, done = adamw(weights), iter(range(1, 100))
        change = lambda step: optimizer.param_groups[0].update(betas=(beta1(step), 0.999))  # noqa: E731
        change(0)
        optimizer.register_step_post_hook(lambda *_: change(next(done)))
        return optimizer

    results = run("all_reduce", 2, given=signs, shapes={"a": 64}, steps=20, optimizer=scheduled)
    weight = moment = torch.zeros(64, dtype=torch.float64)
    for t in range(20):
        b1, gradient = beta1(t), signs(0, t, 64).double()
        moment = b1 * moment + (1 - b1) * gradient
        weight = (1 - LR * DECAY) * weight - LR * moment / (1 - b1 ** (t + 1)) / (1 + 1e-8)
        assert torch.allclose(results[0][t]["weights"]["a"].double(), weight, atol=1e-6), t


def test_weights_that_never_had_a_gradient_stay_where_they_are():
    def unused(rank, step, numel):
        values = gradients(rank, step, numel)
        values[:16] = 0
        return values

    results = run("all_reduce", 2, given=unused, shapes={"a": (20, 16)})
    weights = results[0][-1]["weights"]["a"]
    assert (weights[:16] == 0).all() and (weights[16:] != 0).all() and weights.abs().max() < STEPS * LR * 3


def test_clipping_acts_on_the_step_and_not_on_what_is_kept():
    def growing(rank, step, numel):  # too small to be clipped in the warm-up
        return gradients(rank, step, numel) * (0.01 if step < WARMUP else 1.0)

    clipped, free = (run("all_reduce", 2, given=growing, steps=12, max_norm=norm)[0] for norm in (1.0, math.inf))
    for kind in ("mean", "residual/a", "server/a", "=moment/a"):
        assert torch.equal(clipped[-1][kind], free[-1][kind])
    assert clipped[-1]["weights"]["a"].norm() < 0.9 * free[-1]["weights"]["a"].norm()


def test_embeddings_stay_dense_unless_they_are_sent():
    embedding = Parameter("tok", (1000, 100), 100_000, "embedding", torch.float32, 100_000)
    assert "variance" in (keep_dense(OneBitAdam(), embedding) or "")
    assert keep_dense(resolve("onebit-adam:paper"), embedding) is None
    assert resolve("onebit-adam:paper").scale == "rms"


def _run_of(optimizer, steps=100):
    """Two matrices that are large enough to be compressed."""
    weights = {name: torch.nn.Parameter(torch.zeros(1000, 100)) for name in ("a", "b")}
    parameters = {name: Parameter(name, (1000, 100), 10**5, "matrix", torch.float32, 10**5) for name in weights}
    return Run(parameters, None, steps, 0, (optimizer(list(weights.values())),), weights)


@pytest.mark.parametrize("optimizer, says", [
    (lambda w: torch.optim.SGD(w), "built on Adam"),
    (lambda w: torch.optim.Adam(w, weight_decay=0.1), "decoupled weight decay"),
    (lambda w: torch.optim.AdamW(w, amsgrad=True), "amsgrad"),
    (lambda w: torch.optim.AdamW(w, maximize=True), "maximize"),
    (lambda w: torch.optim.AdamW([{"params": w[:1]}, {"params": w[1:], "betas": (0.8, 0.9)}]), "one beta1"),
])  # fmt: skip
def test_optimizers_that_do_not_fit_are_refused(optimizer, says):
    with pytest.raises(ThinwireError, match=says):
        OneBitAdam(warmup=3).begin(_run_of(optimizer))


def test_knobs_that_do_not_fit_are_refused():
    OneBitAdam().begin(_run_of(torch.optim.Adam))
    for warmup, steps, says in ((0, 100, "no variance"), (0.15, None, "steps="), (100, 100, "beyond the end")):
        with pytest.raises(ThinwireError, match=says):
            OneBitAdam(warmup=warmup).begin(_run_of(torch.optim.AdamW, steps))
    for knobs in ("group=16", "group=100", "scale='max'", "smallest=-1", "warmup_bits=16", "weights='plain'"):
        with pytest.raises(ThinwireError, match=r"onebit-adam|Sign"):
            resolve(f"onebit-adam({knobs})")


def check_kernels(fast, count: int, groups: int, group: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Every operation of ``fast`` against the reference, on rows apart from each other, into poisoned results."""
    n = groups * group
    rows = apart(hard_rows(count, n, dtype)).to(device)
    counts = torch.randint(1, group + 1, (count, groups), generator=torch.Generator().manual_seed(n))
    shares = (1 / counts.float()).to(device)
    for rms in (False, True):
        results = []
        for module in (reference, fast):
            bits, scales, out = (
                x.to(device) if device != "cpu" else x
                for x in (poisoned(count, n // 8, torch.uint8), poisoned(count, groups, torch.float32),
                          poisoned(count, n, torch.float32))
            )  # fmt: skip
            total = torch.full((n,), torch.nan, device=device)
            module.pack(rows, group, shares, bits, scales, rms)
            module.unpack(bits, scales, group, out)
            module.unpack_sum(bits, scales, group, total, 1 / 3)
            if device == "cpu":
                assert all(bool((margin(x) == 255).all()) for x in (bits, scales, out)), "wrote between the rows"
            results.append([x.cpu() for x in (bits, scales, out, total)])
        for actual, expected in zip(results[1], results[0], strict=True):
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128, 2048])
def test_cpu_kernels_are_the_reference(group, dtype):
    for count, groups in ((1, 1), (3, 5), (2, 37)):
        check_kernels(cpu, count, groups, group, dtype)


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
import torch
from papers import test_onebit
from thinwire.ops.sign import triton as fast
for case in ((3, 5, 128, torch.float32), (2, 37, 32, torch.bfloat16), (1, 3, 4096, torch.float32)):
    test_onebit.check_kernels(fast, *case)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_the_reference():
    from thinwire.ops.sign import triton as fast

    for case in ((3, 5, 128, torch.float32), (2, 37, 32, torch.bfloat16), (1, 300, 2048, torch.float32)):
        check_kernels(fast, *case, device="cuda")


def test_layout_and_scales():
    """Bit j of byte i is element j * group / 8 + i; zeros are positive, a group of zeros is zeros; NaN stays NaN."""
    rows = torch.zeros(1, 128)
    rows[0, 1], rows[0, 5], rows[0, 31], rows[0, 33] = -2.0, -6.0, 8.0, torch.nan
    rows[0, 64], rows[0, 96:] = torch.inf, -0.0
    wire, values = torch.empty(1, 32, dtype=torch.uint8), torch.empty(1, 128)
    codec = Sign(group=32)
    codec.decode(codec.encode(rows, wire), values)
    assert wire[0, :16].tolist() == [0, 0b11] + [0] * 14
    assert values[0, :32].tolist() == [0.5, -0.5, 0.5, 0.5, 0.5, -0.5] + [0.5] * 26
    assert not values[0, 32:96].isfinite().any() and (values[0, 96:] == 0).all()
    codec = Sign(group=32, scale="rms", shares=torch.tensor([[1 / 26, 1 / 32, 1 / 32, 1.0]]))
    codec.decode(codec.encode(rows, wire), values)
    assert values[0, :2].tolist() == [2.0, -2.0]
    with pytest.raises(ThinwireError, match="shares"):
        codec.encode(rows.repeat(2, 1), wire.repeat(2, 1))


def test_mean_never_leaves_more_than_there_was_and_rms_keeps_the_norm():
    rows = torch.randn(1, 1 << 14, generator=torch.Generator().manual_seed(0)) ** 5  # long tails
    left = {}
    for scale in ("mean", "rms"):
        codec, values = Sign(scale=scale), torch.empty_like(rows)
        codec.decode(codec.encode(rows, torch.empty(1, codec.wire_numel(1 << 14), dtype=torch.uint8)), values)
        left[scale] = float((rows - values).norm() / rows.norm())
        if scale == "rms":
            assert float(values.norm()) == pytest.approx(float(rows.norm()), rel=1e-5)
    assert left["mean"] < 1 < left["rms"]
