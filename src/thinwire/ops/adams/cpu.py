# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes ten. bfloat16, which numba lacks, goes through the reference."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.adams import reference
from thinwire.ops.kernels import njit


@njit
def _adams(weight, moment, gradient, next_moment, has_next, rate, beta1, rest1, beta2, rest2, eps, keep, root):
    for i in range(weight.size):
        old, g = moment[i], gradient[i]
        new = next_moment[i] if has_next else beta1 * old + rest1 * g
        denominator = np.sqrt(beta2 * old * old + rest2 * g * g) * root + eps
        weight[i] = weight[i] * keep - rate * new / denominator
        moment[i] = new


def adams(
    weight: Tensor, moment: Tensor, gradient: Tensor, next_moment: Tensor | None, rate: float, beta1: float,
    beta2: float, eps: float, keep: float, root: float,
) -> None:  # fmt: skip
    tensors = [weight, moment, gradient] + ([] if next_moment is None else [next_moment])
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        reference.adams(weight, moment, gradient, next_moment, rate, beta1, beta2, eps, keep, root)
        return
    knobs = (rate, beta1, 1 - beta1, beta2, 1 - beta2, eps, keep, root)
    source = moment if next_moment is None else next_moment
    _adams(
        weight.numpy(), moment.numpy(), gradient.numpy(), source.numpy(), next_moment is not None,
        *(np.float32(knob) for knob in knobs),
    )  # fmt: skip
