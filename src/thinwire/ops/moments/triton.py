# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory and one launch each, whatever the number of moments."""

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
def _part(programs, table, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Of this program's columns: their places in the row, which are its part's, their moments, which have one, and
    their places in the scores, or less than 0."""
    number = tl.program_id(0)
    part = table + tl.load(programs + number).to(tl.int64) * 6
    moment, m, start = tl.load(part).to(tl.pointer_type(tl.float32)), tl.load(part + 1), tl.load(part + 2)
    column = (number - tl.load(part + 4)) * BLOCK + tl.arange(0, BLOCK)
    held, inside = column < whole(m, ALIGN), column < whole(tl.load(part + 3), ALIGN)
    scores = tl.load(part + 5)
    return start + column, inside, along(moment, column, ALIGN), held, scores, column


@triton.jit
def _place(words, before, at, inside, k, DIRECTORY: tl.constexpr):
    """As the masks' own, of columns that begin at any multiple of 64: the bits of the directory's entry before them are
    counted."""
    first = tl.min(at, 0)
    entry = first // DIRECTORY
    early = entry * DIRECTORY + tl.arange(0, DIRECTORY)
    bits = _bits(words, at, inside)
    place = tl.load(before + entry) + tl.sum(_bits(words, early, early < first)) + tl.cumsum(bits, 0) - bits
    return (bits != 0) & (place < k), place


@triton.jit
def _send(
    words, before, payload, left, at, inside, values, off, share, k, DIRECTORY: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """``values`` at the mask, ``off`` those off it."""
    on, place = _place(words, before, at, inside, k, DIRECTORY)
    tl.store(payload + place, values * share, mask=on)
    tl.store(along(left, at, ALIGN), tl.where(on, 0.0, off), mask=inside)


@triton.jit
def _score(scores, column, values, inside, ALIGN: tl.constexpr):
    """``values`` -> the scores at the address ``scores``, unless that is 0."""
    if scores != 0:
        tl.store(along(scores.to(tl.pointer_type(tl.float32)), column, ALIGN), values, mask=inside)


@kernel
def _blend(
    rows, stride, residual, residual_stride, mine, common, programs, table, words, words_stride, before, before_stride,
    payload, payload_stride, left, left_stride, share, k, beta1, rest1, CHOOSE: tl.constexpr, BLOCK: tl.constexpr,
    DIRECTORY: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    at, inside, moment, held, scores, column = _part(programs, table, BLOCK, ALIGN)
    rows = along(row_of(rows, stride, row, ALIGN), at, ALIGN)
    total = rest1 * tl.load(rows, mask=inside, other=0)
    total += tl.load(along(row_of(residual, residual_stride, row, ALIGN), at, ALIGN), mask=inside, other=0)
    wide = row.to(tl.int64)
    _send(
        words + wide * words_stride, before + wide * before_stride, payload + wide * payload_stride,
        row_of(left, left_stride, row, ALIGN), at, inside, total, total, share, k, DIRECTORY, ALIGN,
    )  # fmt: skip
    if CHOOSE:  # noqa: SIM102 (one is a constant, the other a value)
        if row == mine:
            total += tl.load(along(common, at, ALIGN), mask=inside, other=0)
            _score(scores, column, total + beta1 * tl.load(moment, mask=held, other=0), inside, ALIGN)


@kernel
def _add_up(
    gradient, residual, programs, table, words, before, payload, left, share, k, beta1, rest1, CHOOSE: tl.constexpr,
    BLOCK: tl.constexpr, DIRECTORY: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    at, inside, moment, held, scores, column = _part(programs, table, BLOCK, ALIGN)
    total = rest1 * tl.load(along(gradient, at, ALIGN), mask=inside, other=0)
    total += tl.load(along(residual, at, ALIGN), mask=inside, other=0)
    old = beta1 * tl.load(moment, mask=held, other=0)
    total += old
    if CHOOSE:
        _score(scores, column, total, inside, ALIGN)
    _send(words, before, payload, left, at, inside, total - old, total, share, k, DIRECTORY, ALIGN)


@kernel
def _settle(
    payload, common, programs, table, words, before, k, beta1, rest1, given, gradient, common_out,
    COMMON: tl.constexpr, BLOCK: tl.constexpr, DIRECTORY: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    at, inside, moment, held, _, _ = _part(programs, table, BLOCK, ALIGN)
    on, place = _place(words, before, at, inside, k, DIRECTORY)
    sent = tl.load(payload + place, mask=on, other=0)
    if COMMON:
        old = beta1 * tl.load(moment, mask=held, other=0)
        left = tl.load(along(common, at, ALIGN), mask=inside, other=0)
        sent += left
        tl.store(along(common_out, at, ALIGN), tl.where(on, 0.0, left + old), mask=inside)
    else:
        old = beta1 * tl.load(moment, mask=on & held, other=0)
    tl.store(along(given, at, ALIGN), tl.where(on, old + sent, 0.0), mask=held)
    sent = tl.div_rn(sent, tl.full(sent.shape, 1.0, tl.float32) * rest1)
    tl.store(along(gradient, at, ALIGN), tl.where(on, sent, 0.0), mask=inside)


def _aligned(moments: Moments, *values: Tensor) -> int:
    memory = (of for part in moments.parts for of in (part.moment, part.scores) if of is not None)
    return alignment(*values, *memory)


def _grid(moments: Moments, rows: int = 1) -> tuple[int, int]:
    return len(moments.programs), rows


def _directory(sent: Sent) -> Tensor:
    return directory(sent.words) if sent.before is None else sent.before


def blend(
    rows: Tensor, residual: Tensor, mine: int, common: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool
) -> None:
    words, _, payload, left, share = sent
    launch(
        _blend, _grid(moments, len(rows)), rows, residual, mine, common, moments.programs, moments.table, words,
        _directory(sent), payload, left, share, payload.shape[1], beta1, 1 - beta1, CHOOSE=choose, BLOCK=BLOCK,
        DIRECTORY=DIRECTORY, ALIGN=_aligned(moments, rows, residual, common, left),
    )  # fmt: skip


def add_up(gradient: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool) -> None:
    words, _, payload, left, share = sent
    launch(
        _add_up, _grid(moments), gradient, residual, moments.programs, moments.table, words[0], _directory(sent)[0],
        payload[0], left[0], share, payload.shape[1], beta1, 1 - beta1, CHOOSE=choose, BLOCK=BLOCK,
        DIRECTORY=DIRECTORY, ALIGN=_aligned(moments, gradient, residual, left),
    )  # fmt: skip


def settle(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, given: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, before: Tensor | None,
) -> None:  # fmt: skip
    old, new = (gradient if memory is None else memory for memory in (common, common_out))  # not touched
    launch(
        _settle, _grid(moments), payload, old, moments.programs, moments.table, words,
        directory(words.view(1, -1))[0] if before is None else before, len(payload), beta1, 1 - beta1, given, gradient,
        new, COMMON=common is not None, BLOCK=BLOCK, DIRECTORY=DIRECTORY,
        ALIGN=_aligned(moments, gradient, given, old, new),
    )  # fmt: skip
