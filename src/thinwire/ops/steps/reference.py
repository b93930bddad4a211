"""Plain torch, any device: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take(weights: Sequence[Tensor], changes: Sequence[Tensor], factors: Sequence[float]) -> None:
    if set(factors) != {1.0}:
        torch._foreach_mul_(list(weights), list(factors))
    torch._foreach_sub_(list(weights), list(changes))
