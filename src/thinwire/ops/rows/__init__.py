"""A flat buffer <-> rows: every parameter's values between an engine's buffer and its columns, all in one pass.

Rows may be those of several buckets, all in one memory (1-D), which offsets refer to.

``reference`` (plain torch, one copy or two for each parameter) runs on CPUs too; ``triton`` takes one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.ops.backends import backend
from thinwire.ops.programs import programs_on

__all__ = ["CopySegment", "CopyTable", "pack", "unpack"]

PER_PROGRAM = 1024
"""Columns of one parameter, in one row, that one program of a GPU takes."""
_backend = backend("thinwire.ops.rows", cpu="reference")


class CopySegment(NamedTuple):
    """A parameter whose value i of row r is element ``offset + r * step + i`` of the flat buffer, i < ``span``.

    In the rows' memory that value is element ``start + r * stride + i``.

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


FIELDS = len(CopySegment._fields)
"""Numbers of a segment in a device's table."""


class CopyTable:
    """The segments of some rows, on the host and, once a kernel needs them, on a device."""

    def __init__(self, segments: Sequence[CopySegment], device: torch.device, per_program: int = PER_PROGRAM) -> None:
        """``per_program``: columns that one program of a GPU takes."""
        self.segments, self.device, self._per_program = tuple(segments), device, per_program

    @functools.cached_property
    def programs(self) -> Tensor:
        """(2 B,) int32: see ``programs_on``. A segment's programs go along its first row, then along the second."""
        widths = (segment.rows * padded(segment.width, self._per_program) for segment in self.segments)
        return programs_on(self.device, widths, self._per_program)

    @functools.cached_property
    def table(self) -> Tensor:
        """(segments * FIELDS,) int64."""
        values = [value for segment in self.segments for value in segment]
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def pack(flat: Tensor, copy_table: CopyTable, rows: Tensor) -> Tensor:
    """``rows`` (1-D, float32) = the values of ``flat`` (1-D, float32 or bfloat16), zeros in their padding."""
    if rows.numel() and copy_table.segments:
        _backend(rows).pack(flat, copy_table, rows)
    return rows


def unpack(rows: Tensor, copy_table: CopyTable, flat: Tensor, *, add: bool = False) -> Tensor:
    """``flat`` (1-D, float32 or bfloat16) = the values of ``rows`` (1-D, float32); other elements are left alone.

    ``add``: the values are added to those of ``flat``.
    """
    if rows.numel() and copy_table.segments:
        _backend(rows).unpack(rows, copy_table, flat, add)
    return flat
