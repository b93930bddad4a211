# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory and one launch each, whatever the number of moments."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import alignment, along, kernel, launch, whole
from thinwire.ops.mask.triton import _bits
from thinwire.ops.moments import PER_PROGRAM, Moments

BLOCK = PER_PROGRAM


@triton.jit
def _part(programs, table, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Of this program's columns: their places in the row, which are its part's, their moments, and which have one."""
    number = tl.program_id(0)
    part = table + tl.load(programs + number).to(tl.int64) * 5
    moment, m, start = tl.load(part).to(tl.pointer_type(tl.float32)), tl.load(part + 1), tl.load(part + 2)
    column = (number - tl.load(part + 4)) * BLOCK + tl.arange(0, BLOCK)
    held = column < whole(m, ALIGN)
    return start + column, column < whole(tl.load(part + 3), ALIGN), along(moment, column, ALIGN), held


@kernel
def _blend(gradient, residual, rest1, n, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, gradient = at < whole(n, ALIGN), along(gradient, at, ALIGN)
    total = rest1 * tl.load(gradient, mask=inside, other=0)
    tl.store(gradient, total + tl.load(along(residual, at, ALIGN), mask=inside, other=0), mask=inside)


@kernel
def _add_up(gradient, residual, programs, table, beta1, rest1, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at, inside, moment, held = _part(programs, table, BLOCK, ALIGN)
    gradient = along(gradient, at, ALIGN)
    total = rest1 * tl.load(gradient, mask=inside, other=0)
    total += tl.load(along(residual, at, ALIGN), mask=inside, other=0)
    tl.store(gradient, total + beta1 * tl.load(moment, mask=held, other=0), mask=inside)


@kernel
def _take(values, programs, table, words, beta1, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at, _, moment, held = _part(programs, table, BLOCK, ALIGN)
    values = along(values, at, ALIGN)
    due = held & (_bits(words, at, held) != 0)
    tl.store(values, tl.load(values, mask=due, other=0) - beta1 * tl.load(moment, mask=due, other=0), mask=due)


@kernel
def _rejoin(mean, common, programs, table, words, beta1, common_out, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at, inside, moment, held = _part(programs, table, BLOCK, ALIGN)
    on, mean = _bits(words, at, inside) != 0, along(mean, at, ALIGN)
    left = tl.load(along(common, at, ALIGN), mask=inside, other=0)
    tl.store(mean, tl.load(mean, mask=inside & on, other=0) + left, mask=inside & on)
    old = beta1 * tl.load(moment, mask=held, other=0)
    tl.store(along(common_out, at, ALIGN), tl.where(on, 0.0, left + old), mask=inside)


@kernel
def _settle(mean, programs, table, words, beta1, rest1, given, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at, inside, moment, held = _part(programs, table, BLOCK, ALIGN)
    mean = along(mean, at, ALIGN)
    on = inside & (_bits(words, at, inside) != 0)
    sent = tl.load(mean, mask=on, other=0)
    old = beta1 * tl.load(moment, mask=on & held, other=0)
    tl.store(along(given, at, ALIGN), tl.where(on, old + sent, 0.0), mask=held)
    tl.store(mean, tl.div_rn(sent, tl.full(sent.shape, 1.0, tl.float32) * rest1), mask=on)


def _aligned(moments: Moments, *values: Tensor) -> int:
    return alignment(*values, *(part.moment for part in moments.parts))


def _grid(moments: Moments) -> tuple[int]:
    return (len(moments.programs),)


def blend(gradient: Tensor, residual: Tensor, beta1: float) -> None:
    n = gradient.numel()
    launch(_blend, (triton.cdiv(n, BLOCK),), gradient, residual, 1 - beta1, n, BLOCK=BLOCK,
           ALIGN=alignment(gradient, residual))  # fmt: skip


def add_up(gradient: Tensor, residual: Tensor, moments: Moments, beta1: float) -> None:
    launch(_add_up, _grid(moments), gradient, residual, moments.programs, moments.table, beta1, 1 - beta1, BLOCK=BLOCK,
           ALIGN=_aligned(moments, gradient, residual))  # fmt: skip


def take(values: Tensor, moments: Moments, words: Tensor, beta1: float) -> None:
    launch(_take, _grid(moments), values, moments.programs, moments.table, words, beta1, BLOCK=BLOCK,
           ALIGN=_aligned(moments, values))  # fmt: skip


def rejoin(mean: Tensor, common: Tensor, moments: Moments, words: Tensor, beta1: float, common_out: Tensor) -> None:
    launch(_rejoin, _grid(moments), mean, common, moments.programs, moments.table, words, beta1, common_out,
           BLOCK=BLOCK, ALIGN=_aligned(moments, mean, common, common_out))  # fmt: skip


def settle(mean: Tensor, moments: Moments, words: Tensor, beta1: float, given: Tensor) -> None:
    launch(_settle, _grid(moments), mean, moments.programs, moments.table, words, beta1, 1 - beta1, given, BLOCK=BLOCK,
           ALIGN=_aligned(moments, mean, given))  # fmt: skip
