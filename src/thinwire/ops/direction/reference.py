"""Plain torch: the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.ops.direction import DirectionSegment


def step_segment(
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
    segments: Sequence[DirectionSegment], lr: Tensor, scale: Tensor, beta1: float,
    step: Callable[..., None] = step_segment,
) -> None:  # fmt: skip
    """Treat one tensor after the other; ``step``: this or another backend's pass."""
    tensors = rows, second, second_out, first, first_out
    for segment in segments:
        values = (None if tensor is None else tensor[:, segment.columns] for tensor in tensors)
        step(*values, lr[segment.tensor_index], scale[segment.tensor_index], beta1, segment.beta2, segment.eps)
