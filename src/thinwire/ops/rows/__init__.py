"""A flat buffer <-> rows: every parameter's values from where an engine has them to its columns, all in one pass.

Rows may be those of several buckets: they are told by where they lie in one memory (1-D).

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
FIELDS = 9
"""Of a part's line in a device's table."""

_backend = backend("thinwire.ops.rows", cpu="reference")


class Part(NamedTuple):
    """One parameter. Its value i of row r is element ``offset + r * step + i`` of the flat buffer, i < ``span``.

    In the rows' memory that is element ``start + r * stride + i``.

    Attributes:
        numel: r * step + i is below it: a last row may be shorter, and rows behind it are empty.
        width: its columns, of which those from ``span`` on hold no values. rows: R.
    """

    offset: int
    numel: int
    step: int
    start: int
    width: int
    span: int
    stride: int
    rows: int


class Places:
    """Where the parameters of some rows lie in a flat buffer, as the host has it and as a device has it."""

    def __init__(self, parts: Sequence[Part], device: torch.device, per_program: int = PER_PROGRAM) -> None:
        """``per_program``: columns that one program of a GPU takes."""
        self.parts, self.device, self._per_program = tuple(parts), device, per_program

    @functools.cached_property
    def programs(self) -> Tensor:
        """(B,) int32: of each program the number of its part."""
        return torch.tensor(self._programs[0], dtype=torch.int32, device=self.device)

    @functools.cached_property
    def table(self) -> Tensor:
        """(parts * FIELDS,) int64: each part, and the number of its first program."""
        values = [value for part, first in zip(self.parts, self._programs[1], strict=True) for value in (*part, first)]
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    @functools.cached_property
    def _programs(self) -> tuple[list[int], list[int]]:
        """A part's programs go along its first row, then along the second."""
        per_program = self._per_program
        whole = (part.rows * -(-part.width // per_program) * per_program for part in self.parts)
        return programs_of(whole, per_program)


def pack(flat: Tensor, places: Places, rows: Tensor) -> Tensor:
    """``rows`` (1-D, float32) = the values of ``flat`` (1-D, float32 or bfloat16), zeros in their padding."""
    if rows.numel() and places.parts:
        _backend(rows).pack(flat, places, rows)
    return rows


def unpack(rows: Tensor, places: Places, flat: Tensor, *, add: bool = False) -> Tensor:
    """``flat`` (1-D, float32 or bfloat16) = the values of ``rows`` (1-D, float32); what lies between is left alone.

    ``add``: they are added to what is there.
    """
    if rows.numel() and places.parts:
        _backend(rows).unpack(rows, places, flat, add)
    return flat
