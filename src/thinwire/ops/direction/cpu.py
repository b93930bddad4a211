# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes seven."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.direction import Part, reference
from thinwire.ops.kernels import flat, njit

LARGEST = np.float32(torch.finfo(torch.float32).max)


@njit
def _direction(
    g, g_step, v, v_step, out, out_step, m, m_step, m_out, m_out_step, momentum, rows, n, lr, scale, beta1, rest1,
    beta2, rest2, eps,
):  # fmt: skip
    for row in range(rows):
        of, old, new = g[row * g_step :], v[row * v_step :], out[row * out_step :]
        before, after = m[row * m_step :], m_out[row * m_out_step :]
        for i in range(n):
            x = of[i]
            moment = min(beta2 * old[i] + rest2 * x * x, LARGEST)
            new[i] = moment
            if momentum:
                x = beta1 * before[i] + rest1 * x
                after[i] = x
            of[i] = lr * x / (np.sqrt(moment * scale) + eps)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    parts: Sequence[Part], lr: Tensor, scale: Tensor, beta1: float,
) -> None:  # fmt: skip
    reference.direction(rows, second, second_out, first, first_out, parts, lr, scale, beta1, _pass)


def _pass(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    momentum = first is not None and first_out is not None
    pair = (first, first_out) if first is not None and first_out is not None else (second, second_out)
    tensors = [of for tensor in (rows, second, second_out, *pair) for of in flat(tensor)]
    knobs = (float(lr), float(scale), beta1, 1 - beta1, beta2, 1 - beta2, eps)
    _direction(*tensors, momentum, *rows.shape, *(np.float32(knob) for knob in knobs))
