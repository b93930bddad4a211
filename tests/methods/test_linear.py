"""Laws and limits of Radius, SEPARATE, TAGC and the sparse and low-rank baselines, on virtual ranks."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from breadth import spread
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.core.method import Parameter, Run, first_step
from thinwire.core.selection import keep_dense
from thinwire.methods import SEPARATE, TAGC, Radius
from thinwire.methods.papers import tagc as tagc_module
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import plan_of
from thinwire.proof.ranks import Threads, parameters_for
from threaded import exchange_on, reduce_on_threads

SHAPES = {"a.weight": (50, 30), "b.weight": (13, 20), "c.weight": (7, 64)}
METHODS = [
    "radius(density=0.3, T=4, start=2, smallest=0, residual_scale=1.0)",
    "radius(density=0.3, T=4, start=2, smallest=0, residual_scale=0.25)",
    "separate(beta=None, ratio=4, block=16, smallest=0)",
    "tagc(feedback='gradients', theta=0.9, smallest=0)",
    "powersgd(feedback='gradients', rank=2, smallest=0)",
    "topk(feedback='gradients', density=0.1, smallest=0)",
    "topk(feedback='gradients', density=0.01, smallest=0)",
    "dgc(density=0.1, momentum=0, smallest=0)",  # with momentum what is sent is not a share of what came in
]
TOPOLOGIES = ["all_reduce", "reduce_scatter"]


def gradients(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.1


def adamw(weights: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2)


def run(method, topology="all_reduce", size=3, **more):
    make = method if callable(method) else lambda: methods.resolve(method)
    more = {"gradients": gradients, "shapes": SHAPES, "optimizer": adamw, **more}
    return reduce_on_threads(make, more.pop("gradients"), topology=topology, size=size, **more)


def parts(results, step: int, topology: str, shapes=SHAPES) -> tuple[Tensor, Tensor, Tensor]:
    """Summed over ranks, in float64: what went in, what waits in residuals, and N times the mean."""
    size = len(results)
    if step < 0:
        return torch.zeros(()), torch.zeros(()), torch.zeros(())
    given = sum(rank[step]["input"].double() for rank in results)
    if topology == "all_reduce":
        waiting = [torch.cat([r[step][f"residual/{n}"].flatten() for n in shapes]).double() for r in results
                   if f"residual/{next(iter(shapes))}" in r[step]]  # fmt: skip
        return given, sum(waiting, torch.zeros(())), size * results[0][step]["mean"].double()
    waiting = [torch.cat([r[step][f"residual/{n}"] for n in shapes], 1).double() for r in results
               if f"residual/{next(iter(shapes))}" in r[step]]  # fmt: skip
    mean = torch.stack([rank[step]["mean"] for rank in results]).double()
    return given.view(size, -1), sum(waiting, torch.zeros(())), size * mean


def lost(results, topology: str, shapes=SHAPES) -> float:
    """The largest value that is neither in the mean nor in a residual, over all steps."""
    worst = 0.0
    for step in range(len(results[0])):
        given, now, mean = parts(results, step, topology, shapes)
        _, before, _ = parts(results, step - 1, topology, shapes)
        worst = max(worst, float((given + before - mean - now).abs().max()))
    return worst


@pytest.mark.parametrize(("method", "topology"), spread(2, METHODS, TOPOLOGIES))
def test_nothing_is_lost(method, topology):
    for size in (1, 2, 3):
        assert lost(run(method, topology, size, steps=12), topology) < 1e-4


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    "method",
    ["radius(density=1, T=7, start=2, smallest=0)", "radius(density=0.1, T=1, start=2, smallest=0)",
     "tagc(feedback='gradients', theta=0, smallest=0)"],
)  # fmt: skip
def test_limits_are_dense_bit_for_bit(method, topology):
    for size in (2, 3, 4):
        limit, dense = (run(name, topology, size, steps=10, max_norm=1.0) for name in (method, "dense"))
        for a, b in zip(limit, dense, strict=True):
            assert all(torch.equal(x["mean"], y["mean"]) for x, y in zip(a, b, strict=True))
            assert all(torch.equal(x["weights"][n], y["weights"][n]) for x, y in zip(a, b, strict=True) for n in SHAPES)


@pytest.mark.parametrize(
    "method",
    [
        "separate(ratio=1, block=16, smallest=0, beta=None)",
        "topk(density=1, smallest=0, feedback='gradients')",
        "powersgd(rank=13, smallest=0, feedback='gradients')",
    ],
)
def test_limits_are_dense_to_rounding(method):
    shapes = {"b.weight": (13, 20)}
    limit, dense = (run(name, size=3, steps=4, shapes=shapes) for name in (f"{method[:-1]}, send=('*',))", "dense"))
    assert all(torch.allclose(x["mean"], y["mean"], atol=2e-5) for x, y in zip(limit[0], dense[0], strict=True))


def test_dgc_refuses_a_second_momentum_from_the_start_or_from_a_schedule():
    def sgd(weights, now=0.0, later=0.0):
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=now)
        optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0].update(momentum=later))
        return optimizer

    for momenta in ((0.9, 0.9), (0.0, 0.9)):
        with pytest.raises(ThinwireError, match="cycle_momentum=False"):
            run("dgc(density=0.1, smallest=0)", steps=3, optimizer=lambda weights, m=momenta: sgd(weights, *m))
        run("dgc(density=0.1, smallest=0, momentum=0)", steps=3, optimizer=lambda weights, m=momenta: sgd(weights, *m))
    run("dgc(density=0.1, smallest=0)", steps=3, optimizer=sgd)


@pytest.mark.parametrize("method", spread(2, METHODS))
def test_all_ranks_hold_the_same_bits_after_100_steps(method):
    results = run(method, size=4, steps=100, max_norm=1.0)
    for rank in results[1:]:
        assert torch.equal(rank[-1]["mean"], results[0][-1]["mean"])
        assert all(torch.equal(rank[-1]["weights"][name], results[0][-1]["weights"][name]) for name in SHAPES)
    assert lost(results, "all_reduce") < 1e-3


@pytest.mark.parametrize(("method", "topology"), spread(2, METHODS, TOPOLOGIES))
def test_bytes_are_what_the_plan_says(method, topology):
    """To the byte, over the steps of one period; TAGC's sketches shrink from what is planned for disjoint masks."""
    size, steps = 3, 23
    results = run(method, topology, size, steps=steps)
    made = methods.resolve(method)
    exchange = exchange_on(topology, Threads(size), 0, Ledger())
    parameters = parameters_for(exchange, SHAPES)
    planned = plan_of(made, parameters.values(), exchange).wire_bytes
    period = getattr(made, "T", 0) or getattr(made, "reset", 0) or 1
    sent = sum(float(step["bytes"]) for step in results[0][-period:]) / period
    if isinstance(made, TAGC):
        assert sent <= planned
    else:
        assert sent == pytest.approx(planned, abs=1e-3)  # ring shares of a third are no whole bytes


@pytest.mark.parametrize("method", METHODS)
def test_a_skipped_step_leaves_no_trace(method):
    """Step 6 resamples Radius's mask: it is due again at the next. (Step numbers count the steps taken.)"""
    made = methods.resolve(method)
    if isinstance(made, Radius):
        results = run(method, size=2, steps=9, skip=(6,))
        assert [step["facts"].get("last resample, step") for step in results[0]][2:] == [2, 2, 2, 2, 2, 7, 7]
    results = run(method, size=2, steps=7, skip=(6,))
    kept = {k: v for k, v in results[0][5].items() if "/" in k}
    assert kept.keys() == {k for k in results[0][6] if "/" in k}
    assert all(torch.equal(results[0][6][k], v) for k, v in kept.items())


# Radius


def test_the_mask_is_adamws_direction_or_any_optimizers_change():
    def sgd(weights):
        return torch.optim.SGD(weights, lr=0.1, momentum=0.5)

    for make in (adamw, sgd):
        spec = "radius(density=0.1, T=5, start=0, smallest=0, residual_scale=1.0)"
        results = run(spec, size=2, steps=6, optimizer=make, max_norm=1.0)
        before, after = results[0][4]["weights"], results[0][5]["weights"]
        for name, shape in SHAPES.items():
            change = (after[name] - before[name]).abs()
            k = max(int(0.1 * math.prod(shape)), 1)
            expected = set(change.topk(k).indices.tolist())
            words = results[0][5][f"=mask/{name}"]
            chosen = {64 * w + b for w, word in enumerate(words[0].tolist()) for b in range(64) if word >> b & 1}
            # float32 weights hold the change to about 1e-4 of itself, so values next to the threshold may swap
            assert len(chosen) == k and len(chosen & expected) >= k - 1


def test_the_clip_factor_at_a_resample_is_reported():
    facts = run("radius(density=0.3, T=4, start=0, smallest=0)", size=2, steps=9, max_norm=0.5)[0][-1]["facts"]
    assert facts["last resample, step"] == 8 and 0 < facts["clip factor at the last resample"] < 0.1


# SEPARATE


@pytest.mark.parametrize("ratio", spread(2, [8, 16, 64]))
def test_the_printed_update_overflows_and_ours_is_bounded(ratio):
    def norm(step, name="w"):
        return float(step[f"residual/{name}"].double().norm() / step["input"].double().norm())

    kw = {"size": 2, "shapes": {"w": 2048}, "steps": 128, "optimizer": None}
    knobs = {"ratio": ratio, "block": 512, "smallest": 0, "send": ("*",)}

    def as_printed():
        method = SEPARATE(estimator="paper", beta=None, **knobs)
        method._weight_of_old = 1 - 0.95  # the paper prints beta as the weight of the new error
        return method

    printed = run(as_printed, **kw)
    assert not math.isfinite(norm(printed[0][-1])) and norm(printed[0][5]) > 100
    for estimator, bound in (("paper", 1.2), ("cyclic_srht", 8)):
        ours = run(lambda e=estimator: SEPARATE(estimator=e, beta=None, **knobs), **kw)
        assert max(norm(step) for step in ours[0]) < bound * max(1.0, math.sqrt(ratio / 16)) * 1.3


def test_an_unstable_weight_is_refused_with_the_bound():
    with pytest.raises(ThinwireError, match=r"take beta above 0.883 \(1 - beta must be below 2 / \(1 \+ w\)"):
        SEPARATE(estimator="paper", beta=0.80)
    assert methods.resolve("separate:paper").beta == 0.95


# TAGC


LARGEST = {"theta": 0.95, "feedback": "gradients", "smallest": 0, "send": ("*",)}


def disjoint(size: int, numel: int):
    """Every rank's large values lie elsewhere, from step 2 on; in the first two steps all at the same places."""

    def make(rank: int, step: int, count: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * step + rank)
        values = torch.randn(count, generator=draw) * 0.01
        start = rank * (numel // size) if step >= 2 else 0
        values[start : start + numel // 20] += 3 + torch.rand(numel // 20, generator=draw)
        return values

    return make


@pytest.mark.parametrize("size", [2, 4, 8])
def test_disjoint_supports_lose_nothing_whatever_the_load(size, monkeypatch):
    numel = 6400
    kw = {"size": size, "shapes": {"w": numel}, "steps": 5, "gradients": disjoint(size, numel), "optimizer": None}
    results = run(lambda: TAGC(**LARGEST), **kw)
    assert lost(results, "all_reduce", {"w": numel}) < 1e-4
    left = [step["facts"]["left-overs so far"] for step in results[0]]
    assert left[1] == 0  # sized for disjoint masks at first, then from the union that was measured
    assert left[2] > 0.3 * size * numel / 20  # the union has grown by a factor of N since
    # resizing at once ends it
    monkeypatch.setattr(tagc_module, "RESIZE", 1)
    again = run(lambda: TAGC(**LARGEST), **kw)
    assert again[0][-1]["facts"]["left-overs so far"] == again[0][3]["facts"]["left-overs so far"]


def test_the_median_of_the_paper_loses_what_ours_keeps():
    numel, size = 6400, 4
    kw = {"size": size, "shapes": {"w": numel}, "steps": 3, "gradients": disjoint(size, numel), "optimizer": None}
    results = run(lambda: TAGC(leftovers="median", **LARGEST), **kw)
    assert lost(results, "all_reduce", {"w": numel}) > 1


def test_a_union_too_dense_for_a_sketch_goes_dense_and_says_so():
    results = run("tagc(feedback='gradients', theta=0.5, smallest=0)", size=3, steps=3)
    assert results[0][-1]["facts"]["tensors sent dense"] == len(SHAPES)
    assert lost(results, "all_reduce") < 1e-5


def test_selection():
    def why(select, name, role="matrix"):
        return keep_dense(TAGC(select=select), Parameter(name, (512, 512), 512 * 512, role, torch.float32, 512 * 512))

    assert why("all", "blocks.0.attention.query.weight") is None
    for name in ("blocks.0.attention.query.weight", "h.1.attn.c_attn.weight", "layers.0.self_attn.k_proj.weight"):
        assert why("non-attention", name) == "attention input"
    for name in ("blocks.0.attention.output.weight", "blocks.0.mlp.up.weight", "embedding.weight", "keyboard.weight"):
        assert why("non-attention", name) is None
    assert why("*.mlp.*", "blocks.0.mlp.up.weight") is None
    assert why("*.mlp.*", "embedding.weight") == "not selected"
    assert why("all", "norm.weight", "norm") == "norm"


# knobs


@pytest.mark.parametrize(
    ("method", "message"),
    [("radius(density=0)", "density is the share"), ("radius(T=0)", "T is a number of steps"),
     ("radius(residual_scale=2)", "residual_scale is a share"),
         ("radius(start=-1)", "start is a share"), ("radius(start=1.5)", "start is a share"),
     ("radius:none", "has no preset 'none'; there are: radius:paper"),
     ("bf16:paper", "has no preset 'paper'; there are: none"), ("separate(ratio=3)", "that ratio divides"),
     ("separate(estimator='x')", "estimator is cyclic_srht or paper"), ("separate(reset=-1)", "reset is a number"),
     ("tagc(theta=1)", "share of values zeroed"), ("tagc(mask='shared')", "no knob .mask."),
     ("topk(density=2)", "density is the share"), ("dgc(momentum=1)", "momentum is"),
     ("dgc(error_feedback=False)", "no knob .error_feedback."), ("powersgd(rank=0)", "rank is a number")],
)  # fmt: skip
def test_knobs_that_mean_nothing_are_refused(method, message):
    with pytest.raises(ThinwireError, match=message):
        methods.resolve(method)


def test_starts():
    def first(start: float, **run: int | None) -> int:
        return first_step(SimpleNamespace(name="m", start=start, run=Run({}, None, **run)), "start")  # type: ignore[arg-type]

    assert first(0.15, steps=800) == 120 and first(7) == 7 and first(0) == 0
    assert first(0.15, steps=200, began=800) == 120
    beyond = "beyond the end of the run of 9 steps"
    for start, steps, began, message in (
        (0.5, None, None, "pass compress"), (9, 9, None, f"{beyond}$"),
        (0.5, 9, 18, rf"{beyond} \(it is step 9, as the run began with 18\)"),
    ):  # fmt: skip
        with pytest.raises(ThinwireError, match=message):
            first(start, steps=steps, began=began)


def test_presets_take_further_knobs():
    made = methods.resolve("radius:paper-d0.5(T=100)")
    assert isinstance(made, Radius) and (made.density, made.T, made.start) == (0.5, 100, 0.15)
