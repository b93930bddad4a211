# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch per operation. A program takes columns of one parameter, in one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import kernel, launch
from thinwire.ops.quant.triton import _load, _words
from thinwire.ops.rows import FIELDS, PER_PROGRAM, CopyTable


@triton.jit
def _copy_offsets(number, programs, table, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """Return a program's offsets in the flat buffer and in the rows' memory, which columns exist, which have values."""
    segment = table + tl.load(programs + 2 * number).to(tl.int64) * FIELDS
    offset, numel, step, start = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3)
    width, span, stride = tl.load(segment + 4), tl.load(segment + 5), tl.load(segment + 6)
    block = tl.load(programs + 2 * number + 1).to(tl.int64)
    row = block // tl.cdiv(width, BLOCK)
    column = (block - row * tl.cdiv(width, BLOCK)) * BLOCK + tl.arange(0, BLOCK)
    has_value = (column < span) & (row * step + column < numel)
    return offset + row * step + column, start + row * stride + column, column < width, has_value


@kernel
def _pack(flat, programs, table, rows, WIDEN: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    source, target, inside, has_value = _copy_offsets(tl.program_id(0), programs, table, BLOCK, FIELDS)
    values = _load(flat + source, has_value) if WIDEN else tl.load(flat + source, mask=has_value, other=0)
    tl.store(rows + target, values.to(rows.dtype.element_ty), mask=inside)


@kernel
def _unpack(rows, programs, table, flat, ADD: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    target, source, _, has_value = _copy_offsets(tl.program_id(0), programs, table, BLOCK, FIELDS)
    values = tl.load(rows + source, mask=has_value, other=0)
    if ADD:
        values = tl.load(flat + target, mask=has_value, other=0) + values
    tl.store(flat + target, values.to(flat.dtype.element_ty), mask=has_value)


def pack(flat: Tensor, copy_table: CopyTable, rows: Tensor) -> None:
    widen = flat.dtype == torch.bfloat16 and rows.dtype == torch.float32
    flat, rows = (_words(flat), rows) if widen else _same_bits(flat, rows)
    programs, table = copy_table.programs, copy_table.table
    launch(_pack, (len(programs) // 2,), flat, programs, table, rows, WIDEN=widen, BLOCK=PER_PROGRAM, FIELDS=FIELDS)


def unpack(rows: Tensor, copy_table: CopyTable, flat: Tensor, add: bool) -> None:
    if not add:  # sums are of numbers
        rows, flat = _same_bits(rows, flat)
    programs, table = copy_table.programs, copy_table.table
    launch(_unpack, (len(programs) // 2,), rows, programs, table, flat, ADD=add, BLOCK=PER_PROGRAM, FIELDS=FIELDS)


def _same_bits(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """View two tensors of one dtype as words, so that bfloat16 is copied, not converted."""
    return (_words(a), _words(b)) if a.dtype == b.dtype else (a, b)
