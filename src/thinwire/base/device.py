"""Streams of devices that work while the host goes on; only this module asks for CUDA."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError


def streams(device: torch.device) -> Any:
    """Return torch's module for ``device``'s streams and events; None if work is over when a call returns (CPU)."""
    return torch.cuda if device.type == "cuda" else None


def stream_key(device: torch.device) -> object:
    """Return what tells the current stream from others, to cache what is in order on it alone; None without streams.

    torch's own object of a stream takes the host as long to make and compare as a launch; its handle, which torch never
    gives to another one, does not.
    """
    backend = streams(device)
    if backend is torch.cuda and _raw_stream is not None:
        return _raw_stream(torch.cuda.current_device() if device.index is None else device.index)
    return None if backend is None else backend.current_stream(device)


_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def mark(device: torch.device) -> Any:
    """Record a timed event on the current stream and return it; None without streams."""
    if (backend := streams(device)) is None:
        return None
    event = backend.Event(enable_timing=True)
    event.record()
    return event


def refuse_capture(device: torch.device) -> None:
    """Refuse to exchange where a CUDA graph records the current stream's work and nothing is done.

    Raises:
        ThinwireError: it does.
    """
    if (backend := streams(device)) is not None and backend.is_current_stream_capturing():
        raise ThinwireError(
            "a whole step cannot be captured in a CUDA graph: in each one the host reads whether all ranks' gradients "
            "are finite, and copies to the GPU. Capture the model alone (torch.compile, or "
            "torch.cuda.make_graphed_callables before it is wrapped)"
        )


@contextmanager
def on(stream: Any, device: torch.device) -> Iterator[None]:
    """Run the body's work on ``stream``: after the current stream's earlier work and before its later work."""
    backend = streams(device)
    if backend is None or (current := backend.current_stream(device)) == stream:
        yield
        return
    stream.wait_stream(current)
    with backend.stream(stream):
        yield
    current.wait_stream(stream)


def future(device: torch.device) -> torch.futures.Future:
    """Make a future; where ``device`` has streams, waiting for it includes the work given to the present one before."""
    return torch.futures.Future() if streams(device) is None else torch.futures.Future(devices=[device])


def keep(tensor: Tensor) -> None:
    """Keep the memory of ``tensor``, allocated on another stream, until the current stream has used it."""
    if (backend := streams(tensor.device)) is not None:
        tensor.record_stream(backend.current_stream(tensor.device))


def host_memory(shape: Sequence[int], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Allocate zeros in CPU memory that ``device`` can copy from and to while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=streams(device) is not None, device="cpu")


def upload(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Copy ``values``, 1-D, to ``device`` while the host goes on."""
    staged = host_memory((len(values),), device, dtype)
    staged.numpy()[:] = values  # the host alone writes
    return staged.to(device, non_blocking=True)


def uploaded(values: Sequence[int], device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    """Like ``upload``, but copy repeated values once per stream. Do not write to the result."""
    return _uploaded(tuple(values), device, dtype, stream_key(device))


@functools.lru_cache(maxsize=1024)
def _uploaded(values: tuple[int, ...], device: torch.device, dtype: torch.dtype, stream: Any) -> Tensor:
    return upload(values, device, dtype)


def wait(device: torch.device) -> None:
    """Let the host wait until ``device`` has done all its work."""
    if (backend := streams(device)) is not None:
        backend.synchronize(device)
