# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch each. A program takes columns of one parameter, in one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import kernel, launch
from thinwire.ops.quant.triton import _load, _words
from thinwire.ops.rows import FIELDS, PER_PROGRAM, Places


@triton.jit
def _places(number, programs, table, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """Of the columns of program ``number``: their places in the flat buffer and in the rows' memory, which are the
    part's, and which have values."""
    part = table + tl.load(programs + number).to(tl.int64) * FIELDS
    offset, numel, step, start = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
    width, span, stride = tl.load(part + 4), tl.load(part + 5), tl.load(part + 6)
    along = number - tl.load(part + 8)
    row = along // tl.cdiv(width, BLOCK)
    column = (along - row * tl.cdiv(width, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    there = (column < span) & (row * step + column < numel)
    return offset + row * step + column, start + row * stride + column, column < width, there


@kernel
def _pack(flat, programs, table, rows, WIDEN: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    at, to, inside, there = _places(tl.program_id(0), programs, table, BLOCK, FIELDS)
    values = _load(flat + at, there) if WIDEN else tl.load(flat + at, mask=there, other=0)
    tl.store(rows + to, values.to(rows.dtype.element_ty), mask=inside)


@kernel
def _unpack(rows, programs, table, flat, ADD: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    at, to, _, there = _places(tl.program_id(0), programs, table, BLOCK, FIELDS)
    values = tl.load(rows + to, mask=there, other=0)
    if ADD:
        values = tl.load(flat + at, mask=there, other=0) + values
    tl.store(flat + at, values.to(flat.dtype.element_ty), mask=there)


def pack(flat: Tensor, places: Places, rows: Tensor) -> None:
    widen = flat.dtype == torch.bfloat16 and rows.dtype == torch.float32
    flat, rows = (_words(flat), rows) if widen else _alike(flat, rows)
    grid = (len(places.programs),)
    launch(_pack, grid, flat, places.programs, places.table, rows, WIDEN=widen, BLOCK=PER_PROGRAM, FIELDS=FIELDS)


def unpack(rows: Tensor, places: Places, flat: Tensor, add: bool) -> None:
    if not add:  # sums are of numbers
        rows, flat = _alike(rows, flat)
    grid = (len(places.programs),)
    launch(_unpack, grid, rows, places.programs, places.table, flat, ADD=add, BLOCK=PER_PROGRAM, FIELDS=FIELDS)


def _alike(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """bfloat16 that stays what it is travels as words."""
    return (_words(a), _words(b)) if a.dtype == b.dtype else (a, b)
