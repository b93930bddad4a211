"""Assign the programs of one launch on a GPU to the segments of a row."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.base import device as devices


def programs_on(device: torch.device, widths: Iterable[int], per_program: int) -> Tensor:
    """Return (2 programs,) int32 on ``device``, cached: each program's segment, and its number within the segment.

    ``widths``: the segments' columns in a row, of which a program takes up to ``per_program``.
    """
    stream_module = devices.streams(device)  # a copy made on one stream is not ready on another
    stream = None if stream_module is None else stream_module.current_stream(device)
    return _programs_on(device, stream, tuple(widths), per_program)


@functools.lru_cache(maxsize=256)
def _programs_on(device: torch.device, stream: Any, widths: tuple[int, ...], per_program: int) -> Tensor:
    pairs = [(number, i) for number, width in enumerate(widths) for i in range(-(-width // per_program))]
    return devices.upload([value for pair in pairs for value in pair], device)
