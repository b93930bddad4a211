# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch; a parameter's last program makes norm, factor and statistics of all programs' sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import cdiv, counters, is_last, kernel, launch
from thinwire.ops.norms import Statistics
from thinwire.ops.quant.triton import _load, _words
from thinwire.ops.rows import FIELDS, PER_PROGRAM, CopyTable
from thinwire.ops.rows.triton import _copy_offsets

BLOCK = 1024
"""Sums, or usual norms, that a program takes at a time."""


@kernel
def _bound(
    flat, programs, table, sums, ends, starts, columns, current, updated, shares, factors, residues, bounded,
    parameters, times, leaves, decay, gain, WIDEN: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Write each program's sum of squares to ``sums``; a segment's last program bounds it."""
    source, _, _, has_value = _copy_offsets(tl.program_id(0), programs, table, COPIED, FIELDS)
    values = _load(flat + source, has_value) if WIDEN else tl.load(flat + source, mask=has_value, other=0)
    values = values.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(values * values, 0))
    segment = tl.load(programs + 2 * tl.program_id(0))
    if is_last(ends + segment, tl.load(starts + segment + 1) - tl.load(starts + segment)):
        _bound_segment(
            segment, sums, starts, columns, current, updated, shares, factors, residues, bounded, parameters, times,
            leaves, decay, gain, BLOCK,
        )  # fmt: skip


@triton.jit
def _bound_segment(
    segment, sums, starts, columns, current, updated, shares, factors, residues, bounded, parameters, times, leaves,
    decay, gain, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make a segment's factor, residue and statistics: see ``reference``."""
    lane = tl.arange(0, BLOCK)
    end = tl.load(starts + segment + 1)
    total, usual_total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(starts + segment), end, BLOCK):
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
    tl.store(factors + segment, tl.where(exceeds, tl.div_rn(cut_to, tl.where(exceeds, norm, 1.0)), 1.0))
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


@kernel
def _sample(rows, stride, n, positions, norms, norm_count, sums, sums_stride, count, size, share, BLOCK: tl.constexpr):
    """Write ``share`` * (``count`` values, ``norm_count`` norms, 0) to ``sums`` (2, size), and below it of squares."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + i, mask=i < count, other=0)
    row = position // n
    values = tl.load(rows + row * stride + (position - row * n), mask=i < count, other=0)
    is_norm = (i >= count) & (i - count < norm_count)
    values = tl.where(is_norm, tl.load(norms + i - count, mask=is_norm, other=0), values)
    tl.store(sums + i, values * share, mask=i < size)
    tl.store(sums + sums_stride + i, values * values * share, mask=i < size)


def sample(
    rows: Tensor, positions: Tensor, tensors: Sequence[slice], norms: Tensor | None, sums: Tensor, share: float
) -> None:
    count, size = len(positions), sums.shape[1]
    norms = torch.linalg.vector_norm(rows).view(1) if norms is None else norms
    launch(
        _sample, (cdiv(size, BLOCK),), rows, rows.shape[1], positions, norms, len(norms), sums, count, size,
        share, BLOCK=BLOCK,
    )  # fmt: skip


def factors_of(
    flat: Tensor, table: CopyTable, columns: Tensor, statistics: Statistics, factors: Tensor, residues: Tensor,
    bounded: Tensor,
) -> None:  # fmt: skip
    current, updated, shares, times, leaves, decay = statistics
    widen = flat.dtype == torch.bfloat16
    sums = torch.empty(len(table.programs) // 2, dtype=torch.float32, device=flat.device)
    launch(
        _bound, (len(sums),), _words(flat) if widen else flat, table.programs, table.table, sums,
        counters(flat.device, len(table.segments)), table.starts, columns, current.view(-1), updated.view(-1), shares,
        factors, residues, bounded, current.shape[1], times, leaves, decay, 1 - decay, WIDEN=widen, COPIED=PER_PROGRAM,
        BLOCK=BLOCK, FIELDS=FIELDS,
    )  # fmt: skip
