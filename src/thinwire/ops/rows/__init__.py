"""Copies between a flat buffer and rows: every parameter's values go from an engine's buffer to its columns, or back.

Rows may belong to several buckets in one memory (1-D), which offsets refer to. ``reference`` takes one copy or two for
each parameter, ``cpu`` one call for all small ones, ``triton`` one launch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.alignment import padded
from thinwire.ops.backends import backend
from thinwire.ops.programs import programs_on

__all__ = ["STAYS", "CopySegment", "CopyTable", "pack", "unpack"]

PER_PROGRAM = 1024
"""Columns of one parameter, in one row, per program of a GPU."""
LARGE = 1 << 15
"""Values of a parameter from which on a CPU copies it by itself, with all threads."""
STAYS = -1
"""The ``start`` of a parameter that stays in the flat buffer, where its rows are whole: no copy touches it."""
_backend = backend("thinwire.ops.rows")


class CopySegment(NamedTuple):
    """A parameter whose value i < ``span`` of row r < ``rows`` is element ``offset + r * step + i`` of the flat buffer.

    In the rows' memory that value is element ``start + r * stride + i``.

    Attributes:
        numel: the limit of r * step + i: the last row may be shorter, and rows after it are empty.
        width: columns of the parameter; those from ``span`` on hold no values.
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
    """The segments of some rows, on the host and, after first use by a kernel, on a device."""

    def __init__(self, segments: Sequence[CopySegment], device: torch.device, per_program: int = PER_PROGRAM) -> None:
        """Keep ``segments``; one program of a GPU takes ``per_program`` columns."""
        self.segments, self.device, self._per_program = tuple(segments), device, per_program

    @functools.cached_property
    def copied(self) -> CopyTable:
        """The segments that do not stay in the flat buffer."""
        copied = [segment for segment in self.segments if segment.start != STAYS]
        return self if len(copied) == len(self.segments) else CopyTable(copied, self.device, self._per_program)

    @functools.cached_property
    def small(self) -> np.ndarray:
        """(segments below ``LARGE``, FIELDS) int64, for a CPU."""
        values = [segment for segment in self.segments if segment.rows * segment.span < LARGE]
        return np.array(values, np.int64).reshape(-1, FIELDS)

    @functools.cached_property
    def large(self) -> list[CopySegment]:
        """The segments that are not ``small``."""
        return [segment for segment in self.segments if segment.rows * segment.span >= LARGE]

    @functools.cached_property
    def programs(self) -> Tensor:
        """(2 B,) int32: see ``programs_on``. A segment's programs go along its rows, one after the other."""
        widths = (segment.rows * padded(segment.width, self._per_program) for segment in self.segments)
        return programs_on(self.device, widths, self._per_program)

    @functools.cached_property
    def starts(self) -> Tensor:
        """(segments + 1,) int32: the first program of each segment, and the number of all programs."""
        counts = (segment.rows * -(-segment.width // self._per_program) for segment in self.segments)
        return devices.upload(list(itertools.accumulate(counts, initial=0)), self.device)

    @functools.cached_property
    def table(self) -> Tensor:
        """(segments * FIELDS,) int64."""
        values = [value for segment in self.segments for value in segment]
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def pack(flat: Tensor, copy_table: CopyTable, rows: Tensor) -> Tensor:
    """Copy the values of ``flat`` (1-D, float32 or bfloat16) to ``rows`` (1-D, float32), with zeros in the padding."""
    if rows.numel() and copy_table.copied.segments:
        _backend(rows).pack(flat, copy_table.copied, rows)
    return rows


def unpack(rows: Tensor, copy_table: CopyTable, flat: Tensor, *, add: bool = False) -> Tensor:
    """Copy, or ``add``, ``rows`` (1-D, float32) to their elements of ``flat`` (1-D, float32 or bfloat16), no others."""
    if rows.numel() and copy_table.copied.segments:
        _backend(rows).unpack(rows, copy_table.copied, flat, add)
    return flat
