# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.mask.triton import _bits

BLOCK = 1024


@triton.jit
def _add_up(gradient, residual, moment, beta1, rest1, m, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = rest1 * tl.load(gradient + at, mask=inside, other=0) + tl.load(residual + at, mask=inside, other=0)
    tl.store(gradient + at, total + beta1 * tl.load(moment + at, mask=at < m, other=0), mask=inside)


@triton.jit
def _take(values, moment, words, beta1, m, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    due = (at < m) & (_bits(words, at, at < m) != 0)
    left = tl.load(values + at, mask=due, other=0) - beta1 * tl.load(moment + at, mask=due, other=0)
    tl.store(values + at, left, mask=due)


@triton.jit
def _rejoin(mean, common, moment, words, beta1, common_out, m, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    on = _bits(words, at, inside) != 0
    left = tl.load(common + at, mask=inside, other=0)
    tl.store(mean + at, tl.load(mean + at, mask=inside & on, other=0) + left, mask=inside & on)
    old = beta1 * tl.load(moment + at, mask=at < m, other=0)
    tl.store(common_out + at, tl.where(on, 0.0, left + old), mask=inside)


@triton.jit
def _settle(mean, moment, words, beta1, rest1, given, m, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    on = inside & (_bits(words, at, inside) != 0)
    sent = tl.load(mean + at, mask=on, other=0)
    old = beta1 * tl.load(moment + at, mask=on & (at < m), other=0)
    tl.store(given + at, tl.where(on, old + sent, 0.0), mask=at < m)
    tl.store(mean + at, tl.div_rn(sent, tl.full(sent.shape, 1.0, tl.float32) * rest1), mask=on)


def _grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, BLOCK),)


def add_up(gradient: Tensor, residual: Tensor, moment: Tensor, beta1: float) -> None:
    n = gradient.numel()
    _add_up[_grid(n)](
        gradient, residual, moment, beta1, 1 - beta1, moment.numel(), n, BLOCK=BLOCK, enable_fp_fusion=False
    )


def take(values: Tensor, moment: Tensor, words: Tensor, beta1: float) -> None:
    m = moment.numel()
    _take[_grid(m)](values, moment, words, beta1, m, BLOCK=BLOCK, enable_fp_fusion=False)


def rejoin(mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor) -> None:
    n = mean.numel()
    _rejoin[_grid(n)](
        mean, common, moment, words, beta1, common_out, moment.numel(), n, BLOCK=BLOCK, enable_fp_fusion=False
    )


def settle(mean: Tensor, moment: Tensor, words: Tensor, beta1: float, given: Tensor) -> None:
    n = mean.numel()
    _settle[_grid(n)](
        mean, moment, words, beta1, 1 - beta1, given, moment.numel(), n, BLOCK=BLOCK, enable_fp_fusion=False
    )
