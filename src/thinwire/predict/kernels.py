"""Times the kernels of methods on a device, by the names that a recording gives them.

A method's own steps are played on real tensors, over a group that only counts. Values are random: how long a choice of
the largest values or the peeling of a sketch takes depends on them.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from thinwire.base import device as devices
from thinwire.predict.cluster import Kernel
from thinwire.predict.launches import Launches, touched
from thinwire.predict.links import fit_line

Times = Mapping[str, Sequence[tuple[float, float]]]
"""Bytes and seconds of each launch, by the kernel's name."""


class KernelTimer(Launches):
    """Times every kernel that is launched while it is on; the device does one at a time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._device = device

    def launch(self, name: str, run: Callable[..., Any], args: Sequence[Any], knobs: Mapping[str, Any]) -> Any:
        devices.wait(self._device)
        began = time.perf_counter()
        result = run(*args, **knobs)
        devices.wait(self._device)
        self.times[name].append((touched(args, knobs, result), time.perf_counter() - began))
        return result


def kernels_of(times: Times, memory_rate: float) -> dict[str, Kernel]:
    """Fit seconds per launch and bytes/s to each kernel; a kernel too short to show a rate has the memory's."""
    kernels = {}
    for name, pairs in times.items():
        by_size: dict[float, list[float]] = defaultdict(list)
        for nbytes, seconds in pairs:
            by_size[nbytes].append(seconds)
        medians = [statistics.median(seconds) for seconds in by_size.values()]
        seconds, slope = fit_line([1.0] * len(medians), list(by_size), medians)
        kernels[name] = Kernel(seconds, 1 / slope if slope > 0 else memory_rate)
    return kernels
