# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory and one launch per operation, for any number of moments."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import alignment, along, kernel, launch, row_of, whole
from thinwire.ops.mask.triton import BLOCK as DIRECTORY
from thinwire.ops.mask.triton import _bits, directory
from thinwire.ops.moments import PER_PROGRAM, Moments, Sent

BLOCK = PER_PROGRAM


@triton.jit
def _segment(programs, table, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Return this program's elements in the row, which are inside its segment, pointers to their moments, which have
    one, the address of the segment's scores, or 0, and the columns within the segment."""
    program = programs + 2 * tl.program_id(0)
    segment = table + tl.load(program).to(tl.int64) * 5
    column = tl.load(program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    moment, m, start = tl.load(segment).to(tl.pointer_type(tl.float32)), tl.load(segment + 1), tl.load(segment + 2)
    has_moment, inside = column < whole(m, ALIGN), column < whole(tl.load(segment + 3), ALIGN)
    return start + column, inside, along(moment, column, ALIGN), has_moment, tl.load(segment + 4), column


@triton.jit
def _payload_index(words, bit_offsets, element, inside, k, DIRECTORY: tl.constexpr):
    """Return which elements, from a multiple of 64 on, are on the mask, and their indices in the payload."""
    first = tl.min(element, 0)
    entry = first // DIRECTORY
    earlier = entry * DIRECTORY + tl.arange(0, DIRECTORY)
    bits = _bits(words, element, inside)
    index = tl.load(bit_offsets + entry) + tl.sum(_bits(words, earlier, earlier < first)) + tl.cumsum(bits, 0) - bits
    return (bits != 0) & (index < k), index


@kernel
def _add_up(
    rows, stride, residual, residual_stride, common, own_row, programs, table, words, words_stride, bit_offsets,
    bit_offsets_stride, payload, payload_stride, residual_out, residual_out_stride, share, k, beta1, rest1,
    COMMON: tl.constexpr, CHOOSE: tl.constexpr, BLOCK: tl.constexpr, DIRECTORY: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    element, inside, moment, has_moment, scores, column = _segment(programs, table, BLOCK, ALIGN)
    total = rest1 * tl.load(along(row_of(rows, stride, row, ALIGN), element, ALIGN), mask=inside, other=0)
    total += tl.load(along(row_of(residual, residual_stride, row, ALIGN), element, ALIGN), mask=inside, other=0)
    values = total
    if not COMMON:
        old = beta1 * tl.load(moment, mask=has_moment, other=0)
        total += old
        values = total - old
    on_mask, index = _payload_index(
        words + row * words_stride, bit_offsets + row * bit_offsets_stride, element, inside, k, DIRECTORY
    )
    tl.store(payload + row * payload_stride + index, values * share, mask=on_mask)
    unsent = tl.where(on_mask, 0.0, total)
    tl.store(along(row_of(residual_out, residual_out_stride, row, ALIGN), element, ALIGN), unsent, mask=inside)
    if CHOOSE:  # noqa: SIM102 (one is a constant, the other a value)
        if (row == own_row) & (scores != 0):
            if COMMON:
                total += tl.load(along(common, element, ALIGN), mask=inside, other=0)
                total += beta1 * tl.load(moment, mask=has_moment, other=0)
            tl.store(along(scores.to(tl.pointer_type(tl.float32)), column, ALIGN), total, mask=inside)


@kernel
def _advance(
    payload, common, programs, table, words, bit_offsets, k, beta1, rest1, next_moment, gradient, common_out,
    COMMON: tl.constexpr, BLOCK: tl.constexpr, DIRECTORY: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    element, inside, moment, has_moment, _, _ = _segment(programs, table, BLOCK, ALIGN)
    on_mask, index = _payload_index(words, bit_offsets, element, inside, k, DIRECTORY)
    mean = tl.load(payload + index, mask=on_mask, other=0)
    if COMMON:
        old = beta1 * tl.load(moment, mask=has_moment, other=0)
        joined = tl.load(along(common, element, ALIGN), mask=inside, other=0)
        mean += joined
        tl.store(along(common_out, element, ALIGN), tl.where(on_mask, 0.0, joined + old), mask=inside)
    else:
        old = beta1 * tl.load(moment, mask=on_mask & has_moment, other=0)
    tl.store(along(next_moment, element, ALIGN), tl.where(on_mask, old + mean, 0.0), mask=has_moment)
    mean = tl.div_rn(mean, tl.full(mean.shape, 1.0, tl.float32) * rest1)
    tl.store(along(gradient, element, ALIGN), tl.where(on_mask, mean, 0.0), mask=inside)


def _aligned(moments: Moments, *values: Tensor) -> int:
    memory = (tensor for segment in moments.segments for tensor in (segment.moment, segment.scores))
    return alignment(*values, *(tensor for tensor in memory if tensor is not None))


def add_up(
    rows: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool, common: Tensor | None,
    own_row: int,
) -> None:  # fmt: skip
    words, bit_offsets, payload, residual_out, share = sent
    shared = rows[0] if common is None else common  # not touched
    launch(
        _add_up, (len(moments.programs) // 2, len(rows)), rows, residual, shared, own_row, moments.programs,
        moments.table, words, directory(words) if bit_offsets is None else bit_offsets, payload, residual_out, share,
        payload.shape[1], beta1, 1 - beta1, COMMON=common is not None, CHOOSE=choose, BLOCK=BLOCK, DIRECTORY=DIRECTORY,
        ALIGN=_aligned(moments, rows, residual, shared, residual_out),
    )  # fmt: skip


def advance(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, next_moment: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, bit_offsets: Tensor | None,
) -> None:  # fmt: skip
    old, new = (gradient if memory is None else memory for memory in (common, common_out))  # not touched
    launch(
        _advance, (len(moments.programs) // 2,), payload, old, moments.programs, moments.table, words,
        directory(words.view(1, -1))[0] if bit_offsets is None else bit_offsets, len(payload), beta1, 1 - beta1,
        next_moment, gradient, new, COMMON=common is not None, BLOCK=BLOCK, DIRECTORY=DIRECTORY,
        ALIGN=_aligned(moments, gradient, next_moment, old, new),
    )  # fmt: skip
