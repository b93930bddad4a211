"""Plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDED, EXACT, LEAST = 2.0**-7, 2.0**-20, 2.0**-120
"""The most that rounding changes in (1-b1) g (gradients in bfloat16) and in m' (float32), and what is near the least
numbers: less is no clip."""


def adams(
    weight: Tensor, moment: Tensor, gradient: Tensor, next_moment: Tensor | None, rate: float, beta1: float,
    beta2: float, eps: float, keep: float, root: float,
) -> None:  # fmt: skip
    """Update with ``rate`` = lr / c1, ``keep`` = 1 - lr decay, ``root`` = c2^-1/2."""
    old, g = moment.float(), gradient.float()
    new = beta1 * old + (1 - beta1) * g
    if next_moment is not None:
        given = next_moment.float()
        rounding = (given - beta1 * old).abs() * ROUNDED + given.abs() * EXACT + LEAST
        new = torch.where((given != 0) & ((new - given).abs() > rounding), new, given)
    # SCAPE's Alg. 1: l. 19 is under the root, l. 20 is new / denominator, l. 21 the weight.
    denominator = (beta2 * old * old + (1 - beta2) * g * g).sqrt_().mul_(root).add_(eps)
    weight.copy_(weight.float() * keep - rate * new / denominator)
    moment.copy_(new)
