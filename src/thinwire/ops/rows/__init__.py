"""A flat buffer <-> rows: every parameter's values from where an engine has them to its columns, all in one pass.

``reference`` (plain torch, one copy or two for each parameter) runs on CPUs too; ``triton`` takes one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.ops.backends import backend
from thinwire.ops.programs import programs_of

__all__ = ["Part", "Places", "pack", "unpack"]

PER_PROGRAM = 1024
"""Columns of one parameter, in one row, that one program of a GPU takes."""

_backend = backend("thinwire.ops.rows", cpu="reference")


class Part(NamedTuple):
    """One parameter. Its value i of row r is element ``offset + r * step + i`` of the flat buffer, i < ``span``.

    Attributes:
        numel: r * step + i is below it: a last row may be shorter, and rows behind it are empty.
        start, width: its columns, of which those from ``span`` on hold no values.
    """

    offset: int
    numel: int
    step: int
    start: int
    width: int
    span: int


class Places:
    """Where the parameters of some rows lie in a flat buffer, as the host has it and as a device has it."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts, self.device = tuple(parts), device

    @functools.cached_property
    def programs(self) -> Tensor:
        """(B,) int32: of each program along a row, the number of its part."""
        return torch.tensor(self._programs[0], dtype=torch.int32, device=self.device)

    @functools.cached_property
    def table(self) -> Tensor:
        """(parts, 7) int64: each part, and the number of its first program."""
        rows = [[*part, first] for part, first in zip(self.parts, self._programs[1], strict=True)]
        return torch.tensor(rows, dtype=torch.int64, device=self.device)

    @property
    def _programs(self) -> tuple[list[int], list[int]]:
        return programs_of((part.width for part in self.parts), PER_PROGRAM)


def pack(flat: Tensor, places: Places, rows: Tensor) -> Tensor:
    """``rows`` (R, n) float32 = the values of ``flat`` (1-D, float32 or bfloat16), zeros in their padding."""
    if rows.numel() and places.parts:
        _backend(rows).pack(flat, places, rows)
    return rows


def unpack(rows: Tensor, places: Places, flat: Tensor) -> Tensor:
    """``flat`` (1-D, float32 or bfloat16) = the values of ``rows`` (R, n) float32; what lies between is left alone."""
    if rows.numel() and places.parts:
        _backend(rows).unpack(rows, places, flat)
    return flat
