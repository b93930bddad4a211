"""Assign the programs of one launch on a GPU to the segments of a row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError

T = TypeVar("T")
WIDEST = 4096
"""No kernel's program takes more columns: so far the last one of a row counts beyond its end."""


def per_stream(make: Callable[..., T]) -> Callable[..., T]:
    """Cache what ``make(device, *hashable)`` copies to ``device``, for one stream: another cannot rely on it."""
    cached = functools.lru_cache(maxsize=256)(lambda stream, *arguments: make(*arguments))

    @functools.wraps(make)
    def on_current_stream(device: torch.device, *arguments: Any) -> T:
        return cached(devices.stream_key(device), device, *arguments)

    on_current_stream.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
    return on_current_stream


def check_width(rows: Tensor) -> None:
    """Refuse ``rows`` (R, n) of whose columns kernels would lose count.

    Raises:
        ThinwireError: n is nearly 2^31 or more.
    """
    if rows.shape[1] > 2**31 - WIDEST:
        raise ThinwireError(
            f"{rows.shape[1]} values in one row are more than the 2147483647 that positions in 32 bits reach: wrap "
            "modules one by one (fully_shard of each block), or train on more ranks"
        )


def programs_on(device: torch.device, widths: Iterable[int], per_program: int) -> Tensor:
    """Return (2 programs,) int32 on ``device``, cached: each program's segment, and its number within the segment.

    ``widths``: the segments' columns in a row, of which a program takes up to ``per_program``.
    """
    return _programs_on(device, tuple(widths), per_program)


@per_stream
def _programs_on(device: torch.device, widths: tuple[int, ...], per_program: int) -> Tensor:
    pairs = [(number, i) for number, width in enumerate(widths) for i in range(-(-width // per_program))]
    return devices.upload([value for pair in pairs for value in pair], device)
