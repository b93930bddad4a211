"""Each method against its paper's pseudo-code in float64, 50 steps on 2, 3 and 4 ranks.

Radius, SEPARATE and TAGC against ``independent.py``, written from the papers by someone who had not seen the methods;
the baselines against ``papers.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from breadth import spread
from independent import SEPARATE as SeparatePaper
from independent import TAGC as TagcPaper
from independent import Radius as RadiusPaper
from independent import one_bit_index
from papers import PowerSgdPaper, peel, top
from thinwire.base.random import random_normal, seed_of
from thinwire.methods import DGC, SEPARATE, TAGC, PowerSGD, Radius, TopK
from thinwire.methods.papers import tagc as tagc_module
from thinwire.ops.sketch.reference import hashes
from thinwire.proof.ranks import reduce_on_threads

STEPS = 50
TOPOLOGIES = ["all_reduce", "reduce_scatter"]
SIZES = [2, 3, 4]


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    """Noise of its own for every rank, around a common gradient that changes slowly."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))
    return common * (1 + 0.01 * step) + noise


def run(make, topology, size, shapes, **more):
    more = {"steps": STEPS, **more}
    return reduce_on_threads(make, gradients, topology=topology, size=size, shapes=shapes, **more)


def given(size: int, step: int, numel: int) -> list[np.ndarray]:
    return [gradients(rank, step, numel).double().numpy() for rank in range(size)]


def received(results, step: int, topology: str) -> np.ndarray:
    """The whole mean, from all owners."""
    if topology == "all_reduce":
        return results[0][step]["mean"].double().numpy()
    return torch.cat([rank[step]["mean"] for rank in results]).double().numpy()


@pytest.mark.parametrize(("topology", "size", "scale"), spread(2, TOPOLOGIES, SIZES, [1.0, 0.25]))
def test_radius(topology, size, scale):
    shapes = {"a": (24, 25), "b": (12, 7)}
    made = {"density": 0.3, "T": 7, "start": 5, "residual_scale": scale, "smallest": 0, "send": ("*",)}
    results = run(lambda: Radius(**made), topology, size, shapes, max_norm=1.0,
                  optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2))  # fmt: skip
    rows = size if topology == "reduce_scatter" else 1
    columns = [600 // rows, 84 // rows]
    paper = RadiusPaper(
        [c for c in columns for _ in range(rows)], size, 0.3, 7, 5, 1e-2, 1.0, residual_scale=scale,
        decay_in_direction=True, floor_k=True, residual_at_mask=True,
    )  # fmt: skip

    def parts(flat):
        """By tensor and by owner's row: a mask is a row's."""
        flat = flat.reshape(rows, -1)
        return [*flat[:, : columns[0]], *flat[:, columns[0] :]]

    for step in range(STEPS):
        means = paper.step([parts(g) for g in given(size, step, 684)])
        assert np.abs(np.concatenate(parts(received(results, step, topology))) - np.concatenate(means)).max() < 2e-5
        for i, name in enumerate(shapes):
            for n in range(size):
                weights = paper.weights[i * rows + n] if rows > 1 else paper.weights[i]
                assert np.abs(results[n][step]["weights"][name].double().numpy() - weights).max() < 1e-5
                if step >= 5:
                    residual = results[n][step][f"residual/{name}"].double().numpy()
                    expected = np.stack(paper.residuals[n][i * rows : (i + 1) * rows])
                    assert np.abs(residual - expected).max() < 1e-4
    assert results[0][-1]["facts"]["last resample, step"] == 47


ESTIMATORS = [
    ("paper", 0.95), ("cyclic_srht", 0), ("cyclic_srht", 0.25),
]  # fmt: skip


@pytest.mark.parametrize(("knobs", "topology", "size"), spread(3, ESTIMATORS, TOPOLOGIES, SIZES))
def test_separate(knobs, topology, size):
    estimator, beta = knobs
    block, ratio, numel = 16, 4, 16 * 16 * 12
    method = {"ratio": ratio, "estimator": estimator, "block": block, "smallest": 0, "send": ("*",)}
    method["beta"] = beta
    if estimator == "paper":
        method |= {"reset": 20}
    results = run(lambda: SEPARATE(**method), topology, size, {"w": numel})
    lanes = 16 if "srht" in estimator else 1
    kept = block // ratio
    scale = 1 / kept if estimator == "paper" else 1.0
    paper = SeparatePaper(numel // block, block, size, scale, beta, method.get("reset", 0))
    paper.steps = -1  # ours counts k from 0, so that "k % T = 0" is true of the first step

    def blocks(flat):
        return flat.reshape(-1, block, lanes).transpose(0, 2, 1).ravel()

    for step in range(STEPS):
        matrix = SEPARATE(**method).codec_for([("w", 0, numel)], step).matrix().double().numpy()
        expected = paper.step([blocks(g) for g in given(size, step, numel)], matrix)
        mean = received(results, step, topology)
        assert np.abs(blocks(mean) - expected).max() < 2e-4 * max(1.0, np.abs(expected).max())
        for n in range(size):
            residual = blocks(results[n][step]["residual/w"].double().numpy().ravel())
            assert np.abs(residual - paper.errors[n]).max() < 5e-4 * max(1.0, np.abs(paper.errors[n]).max())


class OurSketch:
    """``recover`` for :class:`TagcPaper` with the sizes and hashes that Thinwire has at this step."""

    def __init__(self, step: int, union: int, load: float, numel: int) -> None:
        cells = int(np.ceil(union / load / 3)) + 8
        places, signs = hashes(seed_of(0, "w", step), torch.arange(numel), cells)
        self.table, self.signs, self.cells = places.T.tolist(), signs.tolist(), 3 * cells
        self.union = 0

    def __call__(self, total, index):
        self.union = max(self.union, len(index))
        return peel(total, index, lambda i: (self.table[i], self.signs[i]), self.cells)


@pytest.mark.parametrize(("topology", "size"), spread(2, TOPOLOGIES, SIZES))
def test_tagc(topology, size, monkeypatch):
    """The sketch is peeled element by element, at a load at which some steps leave elements over."""
    columns, keep, load, resize = 1280, 64, 0.799, 3
    rows = size if topology == "reduce_scatter" else 1
    monkeypatch.setattr(tagc_module, "LOAD", load)
    monkeypatch.setattr(tagc_module, "RESIZE", resize)
    method = {"theta": 0.95, "smallest": 0, "send": ("*",), "feedback": "gradient"}
    results = run(lambda: TAGC(**method), topology, size, {"w": columns * rows})
    papers = [TagcPaper(columns, size, keep) for _ in range(rows)]
    union, peak = min(size * keep, columns), 0
    for step in range(STEPS):
        sketch = OurSketch(step, union, load, columns)
        for row, paper in enumerate(papers):
            mine = [g.reshape(rows, -1)[row] for g in given(size, step, columns * rows)]
            expected = paper.step(mine, sketch)
            mean = results[row][step]["mean"].double().numpy()
            assert np.abs(mean - expected).max() < 1e-4
            for n in range(size):
                residual = results[n][step]["residual/w"][row].double().numpy()
                assert np.abs(residual - paper.accumulators[n]).max() < 1e-4
                paper.accumulators[n] = residual  # or a value within rounding of the k-th would end the comparison
        peak = max(peak, sketch.union)
        if step % resize == 0 or step & (step - 1) == 0:
            union, peak = max(peak, 1), 0
    assert results[0][-1]["facts"]["left-overs so far"] > 0  # met by both sides, which agreed on each


@pytest.mark.parametrize(("topology", "size", "momentum"), spread(2, TOPOLOGIES, SIZES, [0.0, 0.9]))
def test_topk_and_dgc(topology, size, momentum):
    columns = 600 // size if topology == "reduce_scatter" else 600
    knobs = {"density": 0.1, "smallest": 0, "send": ("*",)}
    make = (lambda: DGC(momentum=momentum, **knobs)) if momentum else (lambda: TopK(feedback="gradient", **knobs))
    results = run(make, topology, size, {"w": 600})
    papers = [[np.zeros(columns) for _ in range(size)] for _ in range(600 // columns)]
    velocities = [[np.zeros(columns) for _ in range(size)] for _ in papers]
    for step in range(STEPS):
        expected = []
        for row, residuals in enumerate(papers):
            total = np.zeros(columns)
            for n, g in enumerate(given(size, step, 600)):
                u = momentum * velocities[row][n] + g.reshape(-1, columns)[row]
                h = u + residuals[n]
                flags = top(h, max(int(0.1 * columns), 1))
                total += np.where(flags, h, 0)
                residuals[n] = np.where(flags, 0, h)
                velocities[row][n] = np.where(flags, 0, u)
            expected.append(total / size)
        assert np.abs(received(results, step, topology) - np.concatenate(expected)).max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_powersgd(topology, size):
    shape = (24, 20)
    results = run(lambda: PowerSGD(rank=3, smallest=0, feedback="gradient"), topology, size, {"w": shape})
    start = random_normal(seed_of(0, "w"), 60).double().numpy().reshape(20, 3)
    paper = PowerSgdPaper(start, size, shape)
    for step in range(STEPS):
        expected = paper.step([g.reshape(shape) for g in given(size, step, 480)])
        assert np.abs(received(results, step, topology) - expected.ravel()).max() < 1e-4
        for n in range(size):
            residual = results[n][step]["residual/w"].double().numpy().reshape(shape)
            assert np.abs(residual - paper.e[n]).max() < 1e-4
            paper.e[n] = residual  # power iteration amplifies rounding from step to step
        paper.q = results[0][step]["=q/w"].double().numpy()


def test_the_one_bit_index_loses_entries_that_ours_keeps():
    generator = np.random.default_rng(0)
    masks = [generator.random(32000) < 0.2 for _ in range(2)]
    union = masks[0] | masks[1]
    read = one_bit_index(masks)
    lost = (union & ~read).sum() / union.sum()
    assert 0.1 < lost < 0.25
    assert (read & ~union).any()  # and carries make entries that nobody sent
    assert np.array_equal(one_bit_index(masks, field_bits=4), union)
    agree = one_bit_index([masks[0], masks[0]])
    assert (masks[0] & ~agree).sum() > 0.5 * masks[0].sum()
    words = [torch.from_numpy(np.packbits(mask, bitorder="little").view(np.int64)) for mask in masks]
    ours = np.unpackbits((words[0] | words[1]).numpy().view(np.uint8), bitorder="little").astype(bool)
    assert np.array_equal(ours, union)
