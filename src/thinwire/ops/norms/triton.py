# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch; a parameter's last program makes norm, factor and statistics of all programs' sums, and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import cdiv, counters, is_last, kernel, launch
from thinwire.ops.norms import Limit, Statistics
from thinwire.ops.quant.triton import _load, _widen, _words
from thinwire.ops.rows import FIELDS, PER_PROGRAM, CopyTable
from thinwire.ops.rows.triton import _copy_offsets

BLOCK = 1024
"""Sums, usual norms, or values to be scaled down, that a program takes at a time."""


@kernel
def _bound(
    flat, programs, table, rows, sums, ends, starts, columns, current, updated, shares, factors, residues, bounded,
    parameters, times, leaves, decay, gain, COPIED: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Copy what does not stay, and write each program's sum of squares to ``sums``; a segment's last program cuts."""
    segment = tl.load(programs + 2 * tl.program_id(0))
    line = table + segment.to(tl.int64) * FIELDS
    start = tl.load(line + 3)
    source, target, inside, has_value = _copy_offsets(tl.program_id(0), programs, table, COPIED, FIELDS)
    values = _load(flat + source, has_value)
    if start >= 0:
        _store(rows + target, values, inside)
    tl.store(sums + tl.program_id(0), tl.sum(values * values, 0))
    if is_last(ends + segment, tl.load(starts + segment + 1) - tl.load(starts + segment)):
        first, end = tl.load(starts + segment), tl.load(starts + segment + 1)
        factor = bound_segment(
            segment, sums, first, end, columns, current, updated, shares, factors, residues, bounded, parameters, times,
            leaves, decay, gain, BLOCK,
        )  # fmt: skip
        if factor != 1.0:
            if start >= 0:
                _scale(rows, start, tl.load(line + 6), line, factor, BLOCK)
            else:
                _scale(flat, tl.load(line), tl.load(line + 2), line, factor, BLOCK)


@triton.jit
def _store(pointers, values, inside):
    """Store float32, rounded to bfloat16 where that is handed in as int16."""
    if pointers.dtype.element_ty == tl.int16:
        words = values.to(tl.int32, bitcast=True)
        values = (words + 0x7FFF + (words >> 16 & 1) >> 16).to(tl.int16)
    tl.store(pointers, values, mask=inside)


@triton.jit
def _scale(memory, start, stride, line, factor, BLOCK: tl.constexpr):
    """Multiply a segment's values where all programs have left them."""
    span = tl.load(line + 5)
    for row in range(tl.load(line + 7)):
        for first in range(0, span, BLOCK):
            column = first + tl.arange(0, BLOCK)
            place = memory + start + row * stride + column
            values = tl.load(place, mask=column < span, other=0, cache_modifier=".cg")
            _store(place, _widen(values) * factor, column < span)


@triton.jit
def bound_segment(
    segment, sums, first_sum, end, columns, current, updated, shares, factors, residues, bounded, parameters, times,
    leaves, decay, gain, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make a segment's factor, residue and statistics of the sums from ``first_sum`` to ``end``; return the factor.

    See ``reference``.
    """
    lane = tl.arange(0, BLOCK)
    total, usual_total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(first_sum, end, BLOCK):
        total += tl.load(sums + first + lane, mask=first + lane < end, other=0, cache_modifier=".cg")
    for first in range(0, parameters, BLOCK):
        usual = tl.load(current + first + lane, mask=first + lane < parameters, other=0)
        usual_total += usual * usual
    norm = tl.sqrt_rn(tl.sum(total, 0))
    column = tl.load(columns + segment)
    usual = tl.load(current + column)
    largest = times * tl.maximum(usual, tl.load(shares + column) * tl.sqrt_rn(tl.sum(usual_total, 0)))
    counted = (norm > 0) & (norm - norm == 0)
    exceeds = (norm > largest) & (usual > 0) & counted
    cut_to = leaves * largest
    factor = tl.where(exceeds, tl.div_rn(cut_to, tl.where(exceeds, norm, 1.0)), 1.0)
    tl.store(factors + segment, factor)
    tl.store(residues + segment, norm - norm)
    tl.store(bounded + segment, tl.where(exceeds, cut_to, norm))
    norm_now = tl.where(exceeds, largest, tl.where(counted, norm, usual))
    tl.store(updated + column, tl.where(usual > 0, decay * usual + gain * norm_now, norm_now))
    line = column + parameters
    tl.store(updated + line, tl.load(current + line) + tl.where(counted, 1.0, 0.0))
    line += parameters
    tl.store(updated + line, tl.load(current + line) + tl.where(exceeds, 1.0, 0.0))
    line += parameters
    tl.store(updated + line, tl.load(current + line) + tl.where(exceeds, norm - cut_to, 0.0))
    return factor


@kernel
def _sample(rows, stride, n, positions, norms, norm_count, sums, sums_stride, each, size, share, BLOCK: tl.constexpr):
    """Write ``share`` * (``each`` values, a norm) of every tensor to ``sums`` (2, size), and below it of squares.

    Norms from ``norm_count`` on are 0.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sample_of(rows, stride, n, positions, norms, norm_count, sums, sums_stride, each, size, share, rows, i, False)


@triton.jit
def sample_of(
    rows, stride, n, positions, norms, norm_count, sums, sums_stride, each, size, share, factors, i, CUT: tl.constexpr
):
    """Write the entries ``i`` of ``_sample``'s; of values times their tensor's ``factors`` if ``CUT``."""
    tensor = i // (each + 1)
    is_norm = i % (each + 1) == each
    is_value = (i < size) & ~is_norm
    position = tl.load(positions + i - tensor, mask=is_value, other=0)
    row = position // n
    values = tl.load(rows + row * stride + (position - row * n), mask=is_value, other=0)
    if CUT:
        values *= tl.load(factors + tensor, mask=is_value, other=0)
    is_known = is_norm & (tensor < norm_count)
    values = tl.where(is_known, tl.load(norms + tensor, mask=is_known, other=0), values)
    tl.store(sums + i, values * share, mask=i < size)
    tl.store(sums + sums_stride + i, values * values * share, mask=i < size)


def sample_arguments(
    rows: Tensor, positions: Tensor, tensors: Sequence[slice], norms: Tensor | None, sums: Tensor, share: float
) -> tuple[Any, ...]:
    """Return ``sample_of``'s arguments from ``positions`` to ``share``. Where no norm is known, that of all rows is."""
    norms = torch.linalg.vector_norm(rows).view(1) if norms is None else norms
    return positions, norms, len(norms), sums, len(positions) // len(tensors), sums.shape[1], share


def sample(
    rows: Tensor, positions: Tensor, tensors: Sequence[slice], norms: Tensor | None, sums: Tensor, share: float
) -> None:
    arguments = sample_arguments(rows, positions, tensors, norms, sums, share)
    launch(_sample, (cdiv(sums.shape[1], BLOCK),), rows, rows.shape[1], *arguments, BLOCK=BLOCK)


def limit_arguments(limit: Limit, programs: int) -> tuple[Any, ...]:
    """Return ``bound_segment``'s arguments but the segment and its sums' place, for ``programs`` that make sums."""
    current, updated, shares, times, leaves, decay = limit.statistics
    sums = torch.empty(programs, dtype=torch.float32, device=current.device)
    norms = current.view(-1), updated.view(-1), shares
    return sums, limit.columns, *norms, *limit.bounds, current.shape[1], times, leaves, decay, 1 - decay


def bound(
    flat: Tensor, table: CopyTable, rows: Tensor, columns: Tensor, statistics: Statistics, factors: Tensor,
    residues: Tensor, bounded: Tensor,
) -> None:  # fmt: skip
    current, updated, shares, times, leaves, decay = statistics
    sums = torch.empty(len(table.programs) // 2, dtype=torch.float32, device=flat.device)
    rows = sums if rows is flat else rows  # all stays: one variant less to compile
    launch(
        _bound, (len(sums),), _words(flat), table.programs, table.table, _words(rows), sums,
        counters(flat.device, len(table.segments)), table.starts, columns, current.view(-1), updated.view(-1), shares,
        factors, residues, bounded, current.shape[1], times, leaves, decay, 1 - decay, COPIED=PER_PROGRAM, BLOCK=BLOCK,
        FIELDS=FIELDS,
    )  # fmt: skip
