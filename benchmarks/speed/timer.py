"""The time of one call, on a device that works on while the host goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from thinwire.base import device as devices


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, from an idle device to its end."""
    devices.wait(device)
    start = time.perf_counter()
    function()
    devices.wait(device)
    return time.perf_counter() - start
