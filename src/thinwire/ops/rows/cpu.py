# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one call for all small parameters, of which a model has many; large ones, and bfloat16, take the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.ops.kernels import array_of, inlined, njit
from thinwire.ops.rows import reference

if TYPE_CHECKING:
    from thinwire.ops.rows import CopyTable


@inlined
def _copy(source, target):
    for i in range(target.size):
        target[i] = source[i]


@inlined
def _add(source, target):
    for i in range(target.size):
        target[i] += source[i]


@inlined
def _zero(target):
    for i in range(target.size):
        target[i] = 0


@njit
def _pack(flat, table, rows):
    for segment in range(len(table)):
        offset, numel, step, start, width, span, stride, count = table[segment]
        for row in range(count):
            filled = min(max(numel - row * step, 0), span)
            source, target = offset + row * step, start + row * stride
            _copy(flat[source : source + filled], rows[target : target + filled])
            _zero(rows[target + filled : target + width])


@njit
def _unpack(rows, table, flat, add):
    for segment in range(len(table)):
        offset, numel, step, start, _, span, stride, count = table[segment]
        for row in range(count):
            filled = min(max(numel - row * step, 0), span)
            source, target = start + row * stride, offset + row * step
            if add:
                _add(rows[source : source + filled], flat[target : target + filled])
            else:
                _copy(rows[source : source + filled], flat[target : target + filled])


def pack(flat: Tensor, copy_table: CopyTable, rows: Tensor) -> None:
    if not _takes(flat, rows):
        reference.pack(flat, copy_table, rows)
        return
    if len(copy_table.small):
        _pack(array_of(flat), copy_table.small, array_of(rows))
    for segment in copy_table.large:
        reference.pack_segment(flat, segment, rows)


def unpack(rows: Tensor, copy_table: CopyTable, flat: Tensor, add: bool) -> None:
    if not _takes(flat, rows):
        reference.unpack(rows, copy_table, flat, add)
        return
    if len(copy_table.small):
        _unpack(array_of(rows), copy_table.small, array_of(flat), add)
    for segment in copy_table.large:
        reference.unpack_segment(rows, segment, flat, add)


def _takes(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 for tensor in tensors)
