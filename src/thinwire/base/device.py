"""What is different on a device that works through streams while the host goes on: nothing else asks for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def streams(device: torch.device) -> Any:
    """torch's module of ``device``'s streams and events; None where work is over when a call returns (CPU)."""
    return torch.cuda if device.type == "cuda" else None


def mark(device: torch.device) -> Any:
    """A timed event, recorded on the current stream; None where there are no streams."""
    if (there := streams(device)) is None:
        return None
    event = there.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def on(stream: Any, device: torch.device) -> Iterator[None]:
    """Work that is given inside takes its turn in the current stream, and is done on ``stream``."""
    there = streams(device)
    if there is None or (current := there.current_stream(device)) == stream:
        yield
        return
    stream.wait_stream(current)
    with there.stream(stream):
        yield
    current.wait_stream(stream)


def future(device: torch.device) -> torch.futures.Future:
    """One that is completed under a stream: whoever waits for it, waits for what that stream has been given."""
    return torch.futures.Future(devices=[device])


def keep(tensor: Tensor) -> None:
    """``tensor``, which another stream has allocated, is used on this one: its memory is not given away before."""
    if (there := streams(tensor.device)) is not None:
        tensor.record_stream(there.current_stream(tensor.device))


def host_memory(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros in CPU memory from and to which ``device`` copies while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=streams(device) is not None)


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """``values``, 1-D, on ``device``, which copies them while the host goes on."""
    there = host_memory((len(values),), device, dtype)
    there.numpy()[:] = values  # by the host alone
    return there.to(device, non_blocking=True)


def uploaded(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """As ``upload``; for values that come again and again it is done once, for each stream. Not to be written to."""
    there = streams(device)
    return _uploaded(tuple(values), device, dtype, None if there is None else there.current_stream(device))


@functools.lru_cache(maxsize=1024)
def _uploaded(values: tuple[int, ...], device: torch.device, dtype: torch.dtype, stream: Any) -> Tensor:
    return upload(values, device, dtype)


def wait(device: torch.device) -> None:
    """The host waits until ``device`` has done all that it was given."""
    if (there := streams(device)) is not None:
        there.synchronize(device)
