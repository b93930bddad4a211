"""Top-k and DGC against their pseudo-code in float64."""

from __future__ import annotations

import numpy as np
import pytest

from breadth import spread
from papers.against import SIZES, STEPS, TOPOLOGIES, given, received, run
from papers.support import top_mask
from thinwire.methods import DGC, TopK


@pytest.mark.parametrize(("topology", "size", "momentum"), spread(2, TOPOLOGIES, SIZES, [0.0, 0.9]))
def test_against_the_pseudo_code(topology, size, momentum):
    columns = 600 // size if topology == "reduce_scatter" else 600
    knobs = {"density": 0.1, "smallest": 0, "send": ("*",)}
    make = (lambda: DGC(momentum=momentum, **knobs)) if momentum else (lambda: TopK(feedback="gradients", **knobs))
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
                flags = top_mask(h, max(int(0.1 * columns), 1))
                total += np.where(flags, h, 0)
                residuals[n] = np.where(flags, 0, h)
                velocities[row][n] = np.where(flags, 0, u)
            expected.append(total / size)
        assert np.abs(received(results, step, topology) - np.concatenate(expected)).max() < 1e-4
