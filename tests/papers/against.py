"""A method on a few ranks as threads, to be held against its paper's transcription: 50 steps on 2, 3 and 4 ranks."""

from __future__ import annotations

import numpy as np
import torch

from threaded import reduce_on_threads

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
