# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch each. A program takes the columns of one parameter, in one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import kernel, launch, row_of
from thinwire.ops.quant.triton import _load, _words
from thinwire.ops.rows import PER_PROGRAM, Places


@triton.jit
def _places(programs, table, BLOCK: tl.constexpr):
    """Of this program's columns: their places in the flat buffer, in the row, and which are the row's and have values.
    """
    row, number = tl.program_id(1).to(tl.int64), tl.program_id(0)
    part = table + tl.load(programs + number).to(tl.int64) * 7
    offset, numel, step = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    start, width, span = tl.load(part + 3), tl.load(part + 4), tl.load(part + 5)
    column = (number - tl.load(part + 6)) * BLOCK + tl.arange(0, BLOCK)
    there = (column < span) & (row * step + column < numel)
    return offset + row * step + column, start + column, column < width, there


@kernel
def _pack(flat, programs, table, rows, rows_stride, WIDEN: tl.constexpr, BLOCK: tl.constexpr):
    at, to, inside, there = _places(programs, table, BLOCK)
    values = _load(flat + at, there) if WIDEN else tl.load(flat + at, mask=there, other=0)
    tl.store(row_of(rows, rows_stride, tl.program_id(1), 1) + to, values.to(rows.dtype.element_ty), mask=inside)


@kernel
def _unpack(rows, rows_stride, programs, table, flat, BLOCK: tl.constexpr):
    at, to, _, there = _places(programs, table, BLOCK)
    values = tl.load(row_of(rows, rows_stride, tl.program_id(1), 1) + to, mask=there, other=0)
    tl.store(flat + at, values.to(flat.dtype.element_ty), mask=there)


def pack(flat: Tensor, places: Places, rows: Tensor) -> None:
    widen = flat.dtype == torch.bfloat16 and rows.dtype == torch.float32
    flat, rows = (_words(flat), rows) if widen else _alike(flat, rows)
    grid = (len(places.programs), len(rows))
    launch(_pack, grid, flat, places.programs, places.table.view(-1), rows, WIDEN=widen, BLOCK=PER_PROGRAM)


def unpack(rows: Tensor, places: Places, flat: Tensor) -> None:
    rows, flat = _alike(rows, flat)
    grid = (len(places.programs), len(rows))
    launch(_unpack, grid, rows, places.programs, places.table.view(-1), flat, BLOCK=PER_PROGRAM)


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 that stays what it is travels as words."""
    return (_words(a), _words(b)) if a.dtype == b.dtype else (a, b)
