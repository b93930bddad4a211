# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import alignment, along, kernel, launch, whole
from thinwire.ops.mask.triton import _bits

BLOCK = 1024


@kernel
def _add_up(gradient, residual, moment, beta1, rest1, m, n, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, gradient = at < whole(n, ALIGN), along(gradient, at, ALIGN)
    old = tl.load(along(moment, at, ALIGN), mask=at < whole(m, ALIGN), other=0)
    total = rest1 * tl.load(gradient, mask=inside, other=0)
    total += tl.load(along(residual, at, ALIGN), mask=inside, other=0)
    tl.store(gradient, total + beta1 * old, mask=inside)


@kernel
def _take(values, moment, words, beta1, m, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = along(values, at, ALIGN)
    due = (at < whole(m, ALIGN)) & (_bits(words, at, at < whole(m, ALIGN)) != 0)
    old = tl.load(along(moment, at, ALIGN), mask=due, other=0)
    tl.store(values, tl.load(values, mask=due, other=0) - beta1 * old, mask=due)


@kernel
def _rejoin(mean, common, moment, words, beta1, common_out, m, n, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, mean = at < whole(n, ALIGN), along(mean, at, ALIGN)
    on = _bits(words, at, inside) != 0
    left = tl.load(along(common, at, ALIGN), mask=inside, other=0)
    tl.store(mean, tl.load(mean, mask=inside & on, other=0) + left, mask=inside & on)
    old = beta1 * tl.load(along(moment, at, ALIGN), mask=at < whole(m, ALIGN), other=0)
    tl.store(along(common_out, at, ALIGN), tl.where(on, 0.0, left + old), mask=inside)


@kernel
def _settle(mean, moment, words, beta1, rest1, given, m, n, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside, mean = at < whole(n, ALIGN), along(mean, at, ALIGN)
    on = inside & (_bits(words, at, inside) != 0)
    sent = tl.load(mean, mask=on, other=0)
    old = beta1 * tl.load(along(moment, at, ALIGN), mask=on & (at < whole(m, ALIGN)), other=0)
    tl.store(along(given, at, ALIGN), tl.where(on, old + sent, 0.0), mask=at < whole(m, ALIGN))
    tl.store(mean, tl.div_rn(sent, tl.full(sent.shape, 1.0, tl.float32) * rest1), mask=on)


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, BLOCK),)


def add_up(gradient: Tensor, residual: Tensor, moment: Tensor, beta1: float) -> None:
    m, n = moment.numel(), gradient.numel()
    launch(_add_up, _grid(n), gradient, residual, moment, beta1, 1 - beta1, m, n, BLOCK=BLOCK,
           ALIGN=alignment(gradient, residual, moment))  # fmt: skip


def take(values: Tensor, moment: Tensor, words: Tensor, beta1: float) -> None:
    m = moment.numel()
    launch(_take, _grid(m), values, moment, words, beta1, m, BLOCK=BLOCK, ALIGN=alignment(values, moment))


def rejoin(mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor) -> None:
    m, n = moment.numel(), mean.numel()
    launch(_rejoin, _grid(n), mean, common, moment, words, beta1, common_out, m, n, BLOCK=BLOCK,
           ALIGN=alignment(mean, common, moment, common_out))  # fmt: skip


def settle(mean: Tensor, moment: Tensor, words: Tensor, beta1: float, given: Tensor) -> None:
    m, n = moment.numel(), mean.numel()
    launch(_settle, _grid(n), mean, moment, words, beta1, 1 - beta1, given, m, n, BLOCK=BLOCK,
           ALIGN=alignment(mean, moment, given))  # fmt: skip
