"""Measures what one device does by itself: products of matrices, copies, launches."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch

from thinwire.network.comm import GroupComm
from thinwire.predict.cluster import Cluster, Constant
from thinwire.predict.links import spread, timed

TIMES = 5
RATE, LATENCY = Constant(1.25e9, "assumed", 0.1, 10), Constant(5e-5, "assumed", 0.1, 10)
"""Rate and latency of a link that these ranks could not measure: 10 Gbit/s, 50 us."""


def measure_device(job: GroupComm, dtype: torch.dtype, per_node: int) -> Cluster:
    """Measure this rank's device, on all ranks at the same time: a node's share its memory. Collective.

    Of the cluster that is returned, all else is assumed.
    """
    device = job.device
    on_gpu = device.type == "cuda"
    side, length = (8192, 1 << 28) if on_gpu else (1024, 1 << 24)
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    source = torch.ones(length, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    small = torch.zeros(1, dtype=torch.float32, device=device)
    memory = (
        torch.cuda.get_device_properties(device).total_memory if on_gpu
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    )  # fmt: skip
    return Cluster(
        "here",
        torch.cuda.get_device_name(device) if on_gpu else "cpu",
        per_node,
        memory_bytes=Constant(memory, "datasheet"),
        flops=_rate(job, 2 * side**3, lambda: torch.mm(matrix, matrix, out=product)),
        compute_share=Constant(1.0, "assumed"),
        memory_rate=_rate(job, 2 * source.nbytes, lambda: target.copy_(source)),
        memory_share=Constant(0.6, "assumed", 0.5, 1.5),
        intra_rate=RATE,
        intra_latency=LATENCY,
        inter_rate=RATE,
        inter_latency=LATENCY,
        inter_share=Constant(1.0, "measured"),
        launch_seconds=spread(timed(job, lambda: small.add_(1), 2000), [], 1.5),
        codec_on_core=not on_gpu,
    )


def _rate(job: GroupComm, amount: float, work: Callable[[], object]) -> Constant:
    """Measure ``amount`` per second of ``work``, on the slowest rank. Collective."""
    timed(job, work, 1)
    times = [timed(job, work, 3) for _ in range(TIMES)]
    middle = statistics.median(times)
    return spread(amount / middle, [middle / seconds for seconds in times], 1.03)
