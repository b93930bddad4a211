# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes seven."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.direction import DirectionSegment, reference
from thinwire.ops.kernels import flat, njit

LARGEST = np.float32(torch.finfo(torch.float32).max)


@njit
def _direction(
    g, g_step, v, v_step, v_out, v_out_step, m, m_step, m_out, m_out_step, momentum, rows, n, lr, scale, beta1, rest1,
    beta2, rest2, eps,
):  # fmt: skip
    for row in range(rows):
        gradients, second, second_out = g[row * g_step :], v[row * v_step :], v_out[row * v_out_step :]
        first, first_out = m[row * m_step :], m_out[row * m_out_step :]
        for i in range(n):
            x = gradients[i]
            v_next = min(beta2 * second[i] + rest2 * x * x, LARGEST)
            second_out[i] = v_next
            if momentum:
                x = beta1 * first[i] + rest1 * x
                first_out[i] = x
            gradients[i] = lr * x / (np.sqrt(v_next * scale) + eps)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    segments: Sequence[DirectionSegment], lr: Tensor, scale: Tensor, beta1: float,
) -> None:  # fmt: skip
    reference.direction(rows, second, second_out, first, first_out, segments, lr, scale, beta1, _pass)


def _pass(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    momentum = first is not None and first_out is not None
    pair = (first, first_out) if first is not None and first_out is not None else (second, second_out)
    tensors = [argument for tensor in (rows, second, second_out, *pair) for argument in flat(tensor)]
    knobs = (float(lr), float(scale), beta1, 1 - beta1, beta2, 1 - beta2, eps)
    _direction(*tensors, momentum, *rows.shape, *(np.float32(knob) for knob in knobs))
