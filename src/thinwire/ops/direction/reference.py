"""Plain torch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.ops.direction import DirectionSegment


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    segments: Sequence[DirectionSegment], lr: Tensor, scale: Tensor, factor: Tensor, beta1: float,
) -> None:  # fmt: skip
    largest, scale = torch.finfo(torch.float32).max, factor * scale
    for segment in segments:
        columns, index, beta2 = segment.columns, segment.tensor_index, segment.beta2
        g, v = rows[:, columns], second_out[:, columns]
        v.copy_((beta2 * second[:, columns] + (1 - beta2) * g * g).clamp_(max=largest))
        if first is not None and first_out is not None:
            g.copy_(beta1 * first[:, columns] + (1 - beta1) * g)
            first_out[:, columns] = g
        g.mul_(lr[index]).div_((v * scale[index]).sqrt_().add_(segment.eps))
