# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes ten. bfloat16 takes the reference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.adams import reference
from thinwire.ops.kernels import njit

_ROUNDED, _EXACT, _LEAST = map(np.float32, (reference.ROUNDED, reference.EXACT, reference.LEAST))


@njit
def _adams(weight, moment, gradient, next_moment, rate, beta1, rest1, beta2, rest2, eps, keep, root):
    for i in range(weight.size):
        old, g = moment[i], gradient[i]
        new = beta1 * old + rest1 * g
        if next_moment is not None:
            given = next_moment[i]
            rounding = abs(given - beta1 * old) * _ROUNDED + abs(given) * _EXACT + _LEAST
            if given == 0 or not abs(new - given) > rounding:
                new = given
        denominator = np.sqrt(beta2 * old * old + rest2 * g * g) * root + eps
        weight[i] = weight[i] * keep - rate * new / denominator
        moment[i] = new


def adams(
    weight: Tensor, moment: Tensor, gradient: Tensor, next_moment: Tensor | None, rate: float, beta1: float,
    beta2: float, eps: float, keep: float, root: float,
) -> None:  # fmt: skip
    tensors = weight, moment, gradient, next_moment
    if any(tensor is not None and tensor.dtype != torch.float32 for tensor in tensors):
        reference.adams(weight, moment, gradient, next_moment, rate, beta1, beta2, eps, keep, root)
        return
    knobs = (rate, beta1, 1 - beta1, beta2, 1 - beta2, eps, keep, root)
    known = None if next_moment is None else next_moment.numpy()
    _adams(weight.numpy(), moment.numpy(), gradient.numpy(), known, *(np.float32(knob) for knob in knobs))
