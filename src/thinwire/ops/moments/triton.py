# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory each."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _score(gradient, residual, common, moment, beta1, out, m, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(gradient + at, mask=inside, other=0) + tl.load(residual + at, mask=inside, other=0)
    total += tl.load(common + at, mask=inside, other=0)
    tl.store(out + at, total + beta1 * tl.load(moment + at, mask=at < m, other=0), mask=inside)


@triton.jit
def _settle(mean, common, moment, words, beta1, rest1, common_out, given, m, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    on = (tl.load(words + at // 64, mask=inside, other=0) >> (at % 64)) & 1 != 0
    left = tl.load(common + at, mask=inside, other=0)
    old = beta1 * tl.load(moment + at, mask=at < m, other=0)
    sent = tl.load(mean + at, mask=inside, other=0) + left
    tl.store(given + at, tl.where(on, old + sent, 0.0), mask=at < m)
    tl.store(mean + at, tl.where(on, tl.div_rn(sent, tl.full(sent.shape, 1.0, tl.float32) * rest1), 0.0), mask=inside)
    tl.store(common_out + at, tl.where(on, 0.0, left + old), mask=inside)


def score(gradient: Tensor, residual: Tensor, common: Tensor, moment: Tensor, beta1: float, out: Tensor) -> None:
    n = out.numel()
    _score[(triton.cdiv(n, BLOCK),)](
        gradient, residual, common, moment, beta1, out, moment.numel(), n, BLOCK=BLOCK, enable_fp_fusion=False
    )  # fmt: skip


def settle(
    mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor, given: Tensor
) -> None:
    n = mean.numel()
    _settle[(triton.cdiv(n, BLOCK),)](
        mean, common, moment, words, beta1, 1 - beta1, common_out, given, moment.numel(), n, BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip
