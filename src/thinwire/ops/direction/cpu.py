# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes seven."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.direction import DirectionSegment
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
    pair = (second, second_out) if first is None or first_out is None else (first, first_out)  # not touched
    for segment in segments:
        columns, index, beta2 = segment.columns, segment.tensor_index, segment.beta2
        memory = [value for tensor in (rows, second, second_out, *pair) for value in flat(tensor[:, columns])]
        knobs = (float(lr[index]), float(scale[index]), beta1, 1 - beta1, beta2, 1 - beta2, segment.eps)
        _direction(*memory, first is not None, len(rows), segment.width, *(np.float32(knob) for knob in knobs))
