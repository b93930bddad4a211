# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes seven."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.direction import DirectionSegment
from thinwire.ops.kernels import by_row

LARGEST = np.float32(torch.finfo(torch.float32).max)


@by_row
def _direction(gradients, second, second_out, first, first_out, lr, scale, beta1, rest1, beta2, rest2, eps):
    for i in range(gradients.size):
        x = gradients[i]
        v_next = min(beta2 * second[i] + rest2 * x * x, LARGEST)
        second_out[i] = v_next
        if first is not None:
            x = beta1 * first[i] + rest1 * x
            first_out[i] = x
        gradients[i] = lr * x / (np.sqrt(v_next * scale) + eps)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    segments: Sequence[DirectionSegment], lr: Tensor, scale: Tensor, beta1: float,
) -> None:  # fmt: skip
    tensors = rows, second, second_out, first, first_out
    for segment in segments:
        columns = (None if tensor is None else tensor[:, segment.columns] for tensor in tensors)
        index, beta2 = segment.tensor_index, segment.beta2
        knobs = (float(lr[index]), float(scale[index]), beta1, 1 - beta1, beta2, 1 - beta2, segment.eps)
        _direction(*columns, *(np.float32(knob) for knob in knobs))
