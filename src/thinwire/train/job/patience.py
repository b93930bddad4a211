"""The time that a rank waits for the others, fitted to the link: a slow one must not be taken for a lost rank."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import NamedTuple

import torch

from thinwire.network.comm import GroupComm

PROBES = (2**14, 2**18, 2**22)
"""Bytes for each other rank. A larger probe follows one that took less than ``BRIEF_S``, of which delay is a part."""
BRIEF_S = 0.5
BYTES_PER_PARAMETER = 12
"""Bytes of a parameter that may be under way at once: gradients there and back, and sharded weights, in float32."""
MARGIN = 4.0
"""Times the measured need: links are shared, and their rates change."""


class Patience(NamedTuple):
    """Seconds that a rank waits, what asks for them, and the rate that was measured in bytes per second."""

    seconds: float
    need_s: float
    rate: float

    def __str__(self) -> str:
        line = f"a rank waits {self.seconds:,.0f} s for the others"
        if not self.need_s:  # there are none, so that no link was measured
            return line
        rate = f"{self.rate * 8 / 1e6:,.0f} Mbit/s"
        return f"{line}: a step of float32 values takes about {self.need_s:.3g} s at the measured rate of {rate}"


def fit_timeout(comm: GroupComm, parameters: int, floor_s: float) -> Patience:
    """Let ``comm``, and every group that is made after it, wait as long as the link needs for a step. Collective.

    Args:
        parameters: of the model. floor_s: the shortest time to wait, that of a fast link.
    """
    rate = _measure_rate(comm)
    need_s = BYTES_PER_PARAMETER * parameters / rate
    patience = Patience(max(floor_s, MARGIN * need_s), need_s, rate)
    comm.wait_up_to(timedelta(seconds=patience.seconds))
    return patience


def _measure_rate(comm: GroupComm) -> float:
    """Measure the bytes per second that every rank sends while all do, the same on all ranks. Collective."""
    rate = float("inf")
    for size in PROBES if comm.size > 1 else ():
        row = torch.zeros(size, dtype=torch.uint8, device=comm.device)
        out = row.new_empty(comm.size, size)
        comm.all_reduce(torch.zeros(1, dtype=torch.float32, device=comm.device))  # so that all begin together
        began = time.perf_counter()
        comm.all_gather(out, row)
        if row.is_cuda:
            torch.cuda.synchronize(row.device)
        slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float32, device=comm.device)
        comm.all_reduce(slowest, "max")
        rate = (comm.size - 1) * size / float(slowest)
        if float(slowest) > BRIEF_S:
            break
    return rate
