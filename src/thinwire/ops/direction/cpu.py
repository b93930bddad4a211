# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes seven."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.kernels import flat, njit

LARGEST = np.float32(torch.finfo(torch.float32).max)


@njit
def _plain(g, g_step, v, v_step, out, out_step, rows, n, scale, lr, beta2, rest2, eps):
    for row in range(rows):
        of, old, new = g[row * g_step :], v[row * v_step :], out[row * out_step :]
        for i in range(n):
            x = of[i]
            moment = min(beta2 * old[i] + rest2 * x * x, LARGEST)
            new[i] = moment
            of[i] = lr * x / (np.sqrt(moment * scale) + eps)


@njit
def _with_momentum(
    g, g_step, v, v_step, out, out_step, m, m_step, m_out, m_out_step, rows, n, scale, lr, beta1, rest1, beta2,
    rest2, eps,
):  # fmt: skip
    for row in range(rows):
        of, old, new = g[row * g_step :], v[row * v_step :], out[row * out_step :]
        before, after = m[row * m_step :], m_out[row * m_out_step :]
        for i in range(n):
            x = of[i]
            moment = min(beta2 * old[i] + rest2 * x * x, LARGEST)
            new[i] = moment
            mean = beta1 * before[i] + rest1 * x
            after[i] = mean
            of[i] = lr * mean / (np.sqrt(moment * scale) + eps)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    count, n = rows.shape
    size = (count, n, np.float32(float(scale)), np.float32(float(lr)))
    last = (np.float32(beta2), np.float32(1 - beta2), np.float32(eps))
    tensors = (*flat(rows), *flat(second), *flat(second_out))
    if first is None or first_out is None:
        _plain(*tensors, *size, *last)
    else:
        _with_momentum(
            *tensors, *flat(first), *flat(first_out), *size, np.float32(beta1), np.float32(1 - beta1), *last
        )
