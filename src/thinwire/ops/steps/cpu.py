# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: one pass over memory where plain torch makes two."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from thinwire.ops.kernels import array_of, njit


@njit
def _take(weight, change, factor):
    for i in range(weight.size):
        weight[i] = factor * weight[i] - change[i]


def take(weights: Sequence[Tensor], changes: Sequence[Tensor], factors: Sequence[float]) -> None:
    for weight, change, factor in zip(weights, changes, factors, strict=True):
        _take(array_of(weight.view(-1)), array_of(change.view(-1)), np.float32(factor))
