"""Measures what one device does by itself: products of matrices, copies, launches."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from thinwire.network.comm import GroupComm
from thinwire.predict.cluster import Constant, Kernel
from thinwire.predict.links import spread, timed

TIMES = 5
NOTHING = Constant(0.0, "datasheet")


@dataclass(frozen=True)
class Device:
    """A device's constants.

    Attributes:
        on_core: kernels and messages take the core that computes (CPUs).
        flops: of a product of matrices. memory_rate: of a copy, read and written. launch_seconds: of a small kernel.
        host_seconds_per_byte: of a core, for a byte sent. kernels: by name.
    """

    name: str
    on_core: bool
    memory_bytes: Constant
    flops: Constant
    memory_rate: Constant
    launch_seconds: Constant
    host_seconds_per_byte: Constant = NOTHING
    kernels: Mapping[str, Kernel] = field(default_factory=dict)


def measure_device(job: GroupComm, dtype: torch.dtype, per_node: int) -> Device:
    """Measure this rank's device, on all ranks at the same time: a node's share its memory. Collective."""
    device = job.device
    on_gpu = device.type == "cuda"
    side, length = (8192, 1 << 28) if on_gpu else (1024, 1 << 24)
    matrix, product = (
        torch.ones(side, side, dtype=dtype, device=device),
        torch.empty(side, side, dtype=dtype, device=device),
    )
    source = torch.ones(length, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    small = torch.zeros(1, dtype=torch.float32, device=device)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if on_gpu
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    )  # fmt: skip
    return Device(
        torch.cuda.get_device_name(device) if on_gpu else "cpu",
        not on_gpu,
        Constant(memory, "datasheet"),
        _rate(job, 2 * side**3, lambda: torch.mm(matrix, matrix, out=product)),
        _rate(job, 2 * source.nbytes, lambda: target.copy_(source)),
        spread(timed(job, lambda: small.add_(1), 2000), [], 1.5),
    )


def _rate(job: GroupComm, amount: float, work: Callable[[], object]) -> Constant:
    """Measure ``amount`` per second of ``work``, on the slowest rank. Collective."""
    timed(job, work, 1)
    times = [timed(job, work, 3) for _ in range(TIMES)]
    middle = statistics.median(times)
    return spread(amount / middle, [middle / seconds for seconds in times], 1.03)
