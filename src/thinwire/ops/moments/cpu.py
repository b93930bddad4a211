# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory each."""

from __future__ import annotations

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import njit

WORD = 64


@njit
def _score(gradient, residual, common, moment, beta1, out):
    m = moment.size
    for i in range(m):
        out[i] = gradient[i] + residual[i] + common[i] + beta1 * moment[i]
    for i in range(m, out.size):
        out[i] = gradient[i] + residual[i] + common[i]


@njit
def _settle(mean, common, moment, words, beta1, rest1, common_out, given):
    m = moment.size
    for i in range(words.size):
        word = words[i]
        for j in range(WORD):
            at = WORD * i + j
            old = beta1 * moment[at] if at < m else np.float32(0)
            if (word >> uint64(j)) & uint64(1):
                sent = mean[at] + common[at]
                if at < m:
                    given[at] = old + sent
                mean[at] = sent / rest1
                common_out[at] = np.float32(0)
            else:
                if at < m:
                    given[at] = np.float32(0)
                mean[at] = np.float32(0)
                common_out[at] = common[at] + old


def score(gradient: Tensor, residual: Tensor, common: Tensor, moment: Tensor, beta1: float, out: Tensor) -> None:
    tensors = (gradient, residual, common, moment)
    _score(*(tensor.numpy() for tensor in tensors), np.float32(beta1), out.numpy())


def settle(
    mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor, given: Tensor
) -> None:
    _settle(
        mean.numpy(), common.numpy(), moment.numpy(), words.numpy().view(np.uint64), np.float32(beta1),
        np.float32(1 - beta1), common_out.numpy(), given.numpy(),
    )  # fmt: skip
