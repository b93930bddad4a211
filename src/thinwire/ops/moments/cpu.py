# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable"
"""Numba: at most one pass over memory each; where only the mask matters, a walk over its set bits."""

from __future__ import annotations

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import njit
from thinwire.ops.mask.cpu import WORD, trailing_zeros
from thinwire.ops.moments import each


@njit
def _add_up(gradient, residual, moment, beta1, rest1):
    m = moment.size
    for i in range(m):
        gradient[i] = rest1 * gradient[i] + residual[i] + beta1 * moment[i]
    for i in range(m, gradient.size):
        gradient[i] = rest1 * gradient[i] + residual[i]


@njit
def _take(values, moment, words, beta1):
    for i in range(words.size):
        word = words[i]
        while word != 0:
            at = WORD * i + np.int64(trailing_zeros(word))
            if at < moment.size:
                values[at] -= beta1 * moment[at]
            word &= word - uint64(1)


@njit
def _rejoin(mean, common, moment, words, beta1, common_out):
    m = moment.size
    for number in range(words.size):
        start = WORD * number
        word = words[number]
        while word != 0:
            at = start + np.int64(trailing_zeros(word))
            mean[at] += common[at]
            word &= word - uint64(1)
        for i in range(start, min(start + WORD, m)):
            common_out[i] = common[i] + beta1 * moment[i]
        for i in range(max(start, m), start + WORD):
            common_out[i] = common[i]
        word = words[number]
        while word != 0:
            common_out[start + np.int64(trailing_zeros(word))] = np.float32(0)
            word &= word - uint64(1)


@njit
def _settle(mean, moment, words, beta1, rest1, given):
    given[:] = np.float32(0)
    for i in range(words.size):
        word = words[i]
        while word != 0:
            at = WORD * i + np.int64(trailing_zeros(word))
            if at < moment.size:
                given[at] = beta1 * moment[at] + mean[at]
            mean[at] /= rest1
            word &= word - uint64(1)


def blend(gradient: Tensor, residual: Tensor, beta1: float) -> None:
    _add_up(gradient.numpy(), residual.numpy(), gradient[:0].numpy(), np.float32(beta1), np.float32(1 - beta1))


@each
def add_up(gradient: Tensor, residual: Tensor, moment: Tensor, beta1: float) -> None:
    _add_up(gradient.numpy(), residual.numpy(), moment.numpy(), np.float32(beta1), np.float32(1 - beta1))


@each
def take(values: Tensor, moment: Tensor, words: Tensor, beta1: float) -> None:
    _take(values.numpy(), moment.numpy(), words.numpy().view(np.uint64), np.float32(beta1))


@each
def rejoin(mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor) -> None:
    _rejoin(
        mean.numpy(), common.numpy(), moment.numpy(), words.numpy().view(np.uint64), np.float32(beta1),
        common_out.numpy(),
    )  # fmt: skip


@each
def settle(mean: Tensor, moment: Tensor, words: Tensor, beta1: float, given: Tensor) -> None:
    _settle(
        mean.numpy(), moment.numpy(), words.numpy().view(np.uint64), np.float32(beta1), np.float32(1 - beta1),
        given[: moment.numel()].numpy(),
    )  # fmt: skip
