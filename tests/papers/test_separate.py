"""SEPARATE: resets, the stability bound, bytes, limits and knobs.

(``test_linear.py`` holds the laws that all linear methods obey, and that the printed update overflows where ours is
bounded.)
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from breadth import spread
from papers import against
from papers.separate import SEPARATE as SeparatePaper
from projections import matrix_of
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.codecs.projection import Estimator, Projection
from thinwire.methods import SEPARATE
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import plan_of
from thinwire.proof.ranks import Threads, parameters_for
from threaded import exchange_on, reduce_on_threads

TOPOLOGIES = ["all_reduce", "reduce_scatter"]
SHAPES = {"a.weight": (48, 64), "b.weight": (16, 24)}


def gradients(rank: int, step: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank)) + 0.2


def run(topology: str = "all_reduce", size: int = 2, shapes=SHAPES, steps: int = 12, skip=(), **knobs):
    knobs = {"ratio": 4, "block": 16, "smallest": 0, "send": ("*",), "beta": None, **knobs}
    return reduce_on_threads(
        lambda: SEPARATE(**knobs), gradients, topology=topology, size=size, shapes=shapes, steps=steps, skip=skip
    )


def residual(step, shapes=SHAPES) -> Tensor:
    return torch.cat([step[f"residual/{name}"].flatten() for name in shapes]).double()


def norm_of(values: Tensor) -> float:
    return float(values.double().norm())


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_reset_to_zero_leaves_no_error_behind_in_step_5_of_the_paper(topology):
    """In steps 0, 5 and 10 (k % T = 0), whose own gradients still carry the error of the steps before."""
    results = run(topology, estimator="paper", reset=5)
    kept = run(topology, estimator="paper", reset=0)
    for step in range(12):
        assert (norm_of(residual(results[0][step])) == 0) == (step % 5 == 0)
    assert not torch.equal(results[0][5]["mean"], run(topology, estimator="paper", beta=1.0)[0][5]["mean"])
    assert norm_of(residual(kept[0][5])) > 0


@pytest.mark.parametrize("skipped", [5, 7])
def test_a_skipped_step_is_rolled_back(skipped):
    results = run(size=2, skip=(skipped,), steps=skipped + 2)
    before, after = (residual(results[0][step]) for step in (skipped - 1, skipped))
    assert torch.equal(before, after) and norm_of(before) > 1
    # what comes next builds on the error of before, as if the skipped gradients had never been
    for step in (skipped + 1,):
        given = sum(rank[step]["input"].double() + residual(rank[skipped - 1]) for rank in results)
        left = sum(residual(rank[step]) for rank in results)
        assert torch.allclose(2 * results[0][step]["mean"].double() + left, given, atol=1e-5)


@pytest.mark.parametrize("ratio", [8, 16])
def test_the_bound_is_where_the_theory_says(ratio, monkeypatch):
    """Weight a on the new error: above a = 2 / (1 + w), |e| grows by sqrt((1 - a)^2 + w a^2) per step; not below.

    (At the block of 512 that is used: a small M scatters so much that the typical growth is below the mean one.)
    """
    block = 512
    w = (block + 1) / (block // ratio)
    bound = 2 / (1 + w)
    kw = {"shapes": {"w": 16384}, "steps": 40, "estimator": "paper", "ratio": ratio, "block": block, "size": 1}
    for factor in (0.5, 3.0):
        a = factor * bound
        monkeypatch.setattr(SEPARATE, "_weight_of_old", property(lambda method, old=1 - a: old))  # not refused
        norms = [norm_of(residual(step, ["w"])) for step in run(**kw)[0]]
        if factor < 1:
            assert max(norms) < 2 * norm_of(gradients(0, 0, 16384))
        else:
            growth = (norms[39] / norms[19]) ** (1 / 20)
            assert growth == pytest.approx(math.sqrt((1 - a) ** 2 + w * a**2), rel=0.05)


def test_beta_one_is_no_feedback():
    assert not any(key.startswith("residual/") for step in run(estimator="paper", beta=1.0)[0] for key in step)


def test_ratio_one_sends_everything_and_leaves_nothing():
    """A rotation there and back: dense to rounding, in both topologies. The Gaussian estimators cannot do that."""
    for topology in TOPOLOGIES:
        for rank, result in enumerate(run(topology, ratio=1, steps=4)):
            for step in range(4):
                whole = sum(gradients(r, step, 3456) for r in range(2)) / 2
                mine = whole if topology == "all_reduce" else whole.view(2, -1)[rank]
                assert torch.allclose(result[step]["mean"], mine, atol=1e-5)
                assert norm_of(residual(result[step])) < 1e-4 * norm_of(whole)


def test_the_gaussian_estimator_is_not_dense_at_ratio_one():
    """Its error is w = (B + 1) / m = 17 / 16 of the signal, in the mean over matrices: 100 steps, two tensors each."""
    squares = [0.0, 0.0]
    for step, result in enumerate(run(ratio=1, estimator="paper", beta=1.0, steps=100)[0]):
        whole = (gradients(0, step, 3456) + gradients(1, step, 3456)) / 2
        squares[0] += norm_of(result["mean"] - whole) ** 2
        squares[1] += norm_of(whole) ** 2
    assert squares[0] / squares[1] == pytest.approx(17 / 16, rel=0.1)


def test_a_constant_gradient_arrives_whole_in_every_cycle():
    """Cyclic, one rank: from one cycle's end to the next the same error waits, so all that came in went out."""
    results = reduce_on_threads(
        lambda: SEPARATE(ratio=4, block=16, smallest=0, send=("*",), beta=None),
        lambda rank, step, n: gradients(0, 0, n),
        topology="all_reduce", size=1, shapes={"w": 1024}, steps=80,
    )  # fmt: skip
    whole = gradients(0, 0, 1024).double()
    sent = sum(step["mean"].double() for step in results[0])
    waiting = residual(results[0][-1], ["w"])
    assert torch.allclose(80 * whole, sent + waiting, atol=1e-3)
    # after the last row of a cycle, direction j waits for the steps since it was sent: 0, 1, 2 or 3 of them
    assert norm_of(waiting) < 3 * norm_of(whole)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("preset", ["", ":paper"])
def test_bytes_of_the_presets_to_the_byte(preset, topology, size):
    shapes = {"w": (256, 256)}
    knobs = f"separate{preset}(smallest=0)"
    results = reduce_on_threads(
        lambda: methods.resolve(knobs), gradients, topology=topology, size=size, shapes=shapes, steps=2
    )
    values = 256 * 256 // 16
    shares = {"all_reduce": 2 * (size - 1) / size, "reduce_scatter": (size - 1) / size}
    made, exchange = methods.resolve(knobs), exchange_on(topology, Threads(size), 0, Ledger())
    parameters = parameters_for(exchange, shapes)
    planned = plan_of(made, parameters.values(), exchange).wire_bytes
    for step in results[0]:
        assert float(step["bytes"]) == 4 * values * shares[topology] == planned


def test_presets():
    paper, ours = methods.resolve("separate:paper"), methods.resolve("separate")
    assert isinstance(paper, SEPARATE) and isinstance(ours, SEPARATE)
    assert (paper.ratio, paper.estimator, paper.beta, paper.reset) == (16, "paper", 0.95, 128)
    assert paper._weight_of_old == 0.95  # of the old error
    assert (ours.ratio, ours.estimator, ours.reset, ours._weight_of_old) == (16, "cyclic_srht", 0, 1.0)  # no feedback
    for ratio, estimator in ((8, "paper"), (64, "paper")):
        made = SEPARATE(ratio=ratio, estimator=estimator, beta=None)
        assert made._weight_of_old == pytest.approx(1 - 1 / (1 + 513 / (512 // ratio)))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [({"beta": math.nan}, "beta is a finite number or None"), ({"beta": 1.5}, "beta is a weight from 0 to 1"),
     ({"ratio": 2.0}, "ratio is a whole number, got 2.0"), ({"ratio": "16"}, "ratio is a whole number, got '16'"),
     ({"reset": 1.5}, "reset is a whole number"), ({"smallest": -1}, "smallest must be 0 or more"),
     ({"block": 0}, "got block=0 and"), ({"block": 1000}, "a power of two"), ({"ratio": 0}, "=256 and ratio=0"),
     ({"ratio": 512}, "got block=256 and ratio=512"), ({"estimator": "srht"}, "estimator is cyclic_srht or paper"),
     ({"estimator": "paper", "ratio": 64, "beta": 0.95}, "take beta above 0.969")],
)  # fmt: skip
def test_knobs_that_mean_nothing_are_refused_in_one_line(knobs, message):
    with pytest.raises(ThinwireError, match=message) as refused:
        SEPARATE(**knobs)
    assert "\n" not in str(refused.value)


ESTIMATORS = [
    ("paper", 0.95), ("cyclic_srht", 0), ("cyclic_srht", 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "topology", "size"), spread(3, ESTIMATORS, against.TOPOLOGIES, against.SIZES))
def test_against_algorithm_1(knobs, topology, size):
    estimator, beta = knobs
    block, ratio, numel = 16, 4, 16 * 16 * 12
    method = {"ratio": ratio, "estimator": estimator, "block": block, "smallest": 0, "send": ("*",)}
    method["beta"] = beta
    if estimator == "paper":
        method |= {"reset": 20}
    results = against.run(lambda: SEPARATE(**method), topology, size, {"w": numel})
    lanes = 16 if "srht" in estimator else 1
    kept = block // ratio
    scale = 1 / kept if estimator == "paper" else 1.0
    paper = SeparatePaper(numel // block, block, size, scale, beta, method.get("reset", 0))
    paper.steps = -1  # ours counts k from 0, so that "k % T = 0" is true of the first step

    def blocks(flat):
        return flat.reshape(-1, block, lanes).transpose(0, 2, 1).ravel()

    drawing = Estimator(estimator, ratio, block)
    for step in range(against.STEPS):
        drawn = drawing.draw(0, "w", step, torch.device("cpu"))
        matrix = matrix_of(Projection(drawing, ((0, numel, drawn),))).double().numpy()
        expected = paper.step([blocks(g) for g in against.given(size, step, numel)], matrix)
        mean = against.received(results, step, topology)
        assert np.abs(blocks(mean) - expected).max() < 2e-4 * max(1.0, np.abs(expected).max())
        for n in range(size):
            residual = blocks(results[n][step]["residual/w"].double().numpy().ravel())
            assert np.abs(residual - paper.errors[n]).max() < 5e-4 * max(1.0, np.abs(paper.errors[n]).max())
