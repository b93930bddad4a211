"""PowerSGD against its pseudo-code in float64."""

from __future__ import annotations

import numpy as np
import pytest

from papers.against import SIZES, STEPS, TOPOLOGIES, given, received, run
from papers.powersgd import PowerSGDUpdates
from papers.support import mean_of
from thinwire.base.random import random_normal, seed_of
from thinwire.methods import PowerSGD


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_against_the_pseudo_code(topology, size):
    shape = (24, 20)
    results = run(lambda: PowerSGD(rank=3, smallest=0, feedback="gradients"), topology, size, {"w": shape})
    paper = PowerSGDUpdates({0: random_normal(seed_of(0, "w"), 60).double().numpy().reshape(20, 3)})
    errors = [np.zeros(shape)] * size
    for step in range(STEPS):
        sums = [g.reshape(shape) + e for g, e in zip(given(size, step, 480), errors, strict=True)]
        sent = paper(0, step, sums)
        assert np.abs(received(results, step, topology) - mean_of(sent).ravel()).max() < 1e-4
        for n in range(size):
            residual = results[n][step]["residual/w"].double().numpy().reshape(shape)
            assert np.abs(residual - (sums[n] - sent[n])).max() < 1e-4
            errors[n] = residual  # power iteration amplifies rounding from step to step
        paper.q[0] = results[0][step]["=q/w"].double().numpy()
