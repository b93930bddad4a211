# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: a launch that adds up squares, and one that makes norms, factors and statistics of the sums."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import kernel, launch
from thinwire.ops.norms import Statistics
from thinwire.ops.quant.triton import _load, _words
from thinwire.ops.rows import FIELDS, PER_PROGRAM, CopyTable
from thinwire.ops.rows.triton import _copy_offsets

BLOCK = 1024
"""Sums, or usual norms, that a program takes at a time."""


@kernel
def _squares(flat, programs, table, sums, WIDEN: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """Write each program's sum of squares to ``sums``."""
    source, _, _, has_value = _copy_offsets(tl.program_id(0), programs, table, BLOCK, FIELDS)
    values = _load(flat + source, has_value) if WIDEN else tl.load(flat + source, mask=has_value, other=0)
    values = values.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(values * values, 0))


@kernel
def _bound(
    sums, starts, columns, current, updated, shares, factors, residues, parameters, times, leaves, decay, gain,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Take one segment: see ``reference``."""
    segment, lane = tl.program_id(0), tl.arange(0, BLOCK)
    end = tl.load(starts + segment + 1)
    total, usual_total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.load(starts + segment), end, BLOCK):
        total += tl.load(sums + first + lane, mask=first + lane < end, other=0)
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
    norm_now = tl.where(exceeds, largest, tl.where(counted, norm, usual))
    tl.store(updated + column, tl.where(usual > 0, decay * usual + gain * norm_now, norm_now))
    line = column + parameters
    tl.store(updated + line, tl.load(current + line) + tl.where(counted, 1.0, 0.0))
    line += parameters
    tl.store(updated + line, tl.load(current + line) + tl.where(exceeds, 1.0, 0.0))
    line += parameters
    tl.store(updated + line, tl.load(current + line) + tl.where(exceeds, norm - cut_to, 0.0))


def factors_of(
    flat: Tensor, table: CopyTable, columns: Tensor, statistics: Statistics, factors: Tensor, residues: Tensor
) -> None:
    current, updated, shares, times, leaves, decay = statistics
    widen = flat.dtype == torch.bfloat16
    sums = torch.empty(len(table.programs) // 2, dtype=torch.float32, device=flat.device)
    launch(
        _squares, (len(sums),), _words(flat) if widen else flat, table.programs, table.table, sums, WIDEN=widen,
        BLOCK=PER_PROGRAM, FIELDS=FIELDS,
    )  # fmt: skip
    launch(
        _bound, (len(table.segments),), sums, table.starts, columns, current.view(-1), updated.view(-1), shares,
        factors, residues, current.shape[1], times, leaves, decay, 1 - decay, BLOCK=BLOCK,
    )  # fmt: skip
