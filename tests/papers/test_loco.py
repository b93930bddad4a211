"""LoCo against its update rule, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from papers.sdp4bit import Int4Group
from thinwire.base.errors import ThinwireError
from thinwire.methods import LoCo
from threaded import reduce_on_threads


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng([rank, step]).standard_t(4, numel).astype(np.float32))


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_against_the_update_rule(size, beta):
    """50 steps, a reset every 20; each step from our own errors, because a tie can go either way."""
    numel = size * 1024
    results = reduce_on_threads(
        lambda: LoCo(beta=beta, reset=20, send=("*",)), gradients, topology="reduce_scatter", size=size,
        shapes={"w": (numel // 8, 8)}, steps=50,
    )  # fmt: skip
    quantize = Int4Group(4, 128, scale_type=np.float32)
    errors = [np.zeros(numel) for _ in range(size)]
    for step in range(50):
        total = np.zeros(numel)
        for rank in range(size):
            h = gradients(rank, step, numel).double().numpy() + errors[rank]
            sent = quantize(h)
            total += sent
            expected = np.zeros(numel) if (step + 1) % 20 == 0 else beta * errors[rank] + (1 - beta) * (h - sent)
            errors[rank] = results[rank][step]["error/w"].double().numpy().reshape(-1)
            assert (np.abs(errors[rank] - expected) > 1e-4).mean() < 2e-3
        for rank in range(size):
            off = np.abs(results[rank][step]["mean"].double().numpy() - total.reshape(size, -1)[rank] / size)
            assert (off > 1e-4).mean() < 5e-3


def test_what_does_not_fit_is_refused():
    with pytest.raises(ThinwireError, match="weight of the old error"):
        LoCo(beta=1.0)
    with pytest.raises(ThinwireError, match="reset is a number of steps"):
        LoCo(reset=-1)
