"""Assign the programs of one launch on a GPU to the segments of a row."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.base.device import streams, upload


def programs_of(widths: Iterable[int], per_program: int) -> tuple[list[int], list[int]]:
    """Return the number of each program's segment, along a row, and the number of each segment's first program.

    ``widths``: columns of the segments, of which a program takes up to ``per_program``.
    """
    numbers: list[int] = []
    first_programs: list[int] = []
    for number, width in enumerate(widths):
        first_programs.append(len(numbers))
        numbers += [number] * -(-width // per_program)
    return numbers, first_programs


def programs_on(device: torch.device, widths: Iterable[int], per_program: int) -> Tensor:
    """Return (2 programs,) int32 on ``device``, made once: for each its segment, and how many are before it there."""
    stream_module = streams(device)  # what one stream has copied is not there for another
    stream = None if stream_module is None else stream_module.current_stream(device)
    return _programs_on(device, stream, tuple(widths), per_program)


@functools.lru_cache(maxsize=256)
def _programs_on(device: torch.device, stream: Any, widths: tuple[int, ...], per_program: int) -> Tensor:
    numbers, firsts = programs_of(widths, per_program)
    pairs = [(number, program - firsts[number]) for program, number in enumerate(numbers)]
    return upload([value for pair in pairs for value in pair], device)
