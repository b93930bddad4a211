"""Radius against its pseudo-code in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from breadth import spread
from papers.against import SIZES, STEPS, TOPOLOGIES, given, received, run
from papers.radius import Radius as RadiusPaper
from thinwire.methods import Radius


@pytest.mark.parametrize(("topology", "size", "scale"), spread(2, TOPOLOGIES, SIZES, [1.0, 0.25]))
def test_against_the_pseudo_code(topology, size, scale):
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
