"""Plain torch: the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.ops.direction import Part


def step(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    largest = torch.finfo(torch.float32).max
    second_out.copy_((beta2 * second + (1 - beta2) * rows * rows).clamp_(max=largest))
    if first is not None and first_out is not None:
        first_out.copy_(beta1 * first + (1 - beta1) * rows)
        rows.copy_(first_out)
    rows.mul_(lr).div_((second_out * scale).sqrt_().add_(eps))


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    parts: Sequence[Part], lr: Tensor, scale: Tensor, beta1: float, by: Callable[..., None] = step,
) -> None:  # fmt: skip
    """One tensor after the other, ``by`` this or another backend's pass."""
    for part in parts:
        values = [None if of is None else of[:, part.columns] for of in (rows, second, second_out, first, first_out)]
        by(*values, lr[part.place], scale[part.place], beta1, part.beta2, part.eps)
