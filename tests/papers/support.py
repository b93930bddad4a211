"""What the transcriptions share: float64 arrays, means over workers, and the choice of the largest.

The files beside this one transcribe papers in float64, in plain numpy with loops over workers and no communication,
from the papers' text and its restatement alone; nothing of Thinwire is used. All but 1-bit Adam and ``peel`` were
written without sight of the library, so that agreement means something. Where a text can be read in two ways there is a
switch, and the docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Map = Callable[[Array], Array]
Indices = Sequence[int] | NDArray[np.int64]


def array(x: Any) -> Array:
    """A fresh float64 copy, of the same shape; torch tensors may ask for gradients and have any dtype."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.array(x, dtype=np.float64)


def flat(x: Any) -> Array:
    """A fresh flat float64 copy."""
    return np.array(x, dtype=np.float64).reshape(-1)


def zeros_like(tensors: Sequence[Array]) -> list[Array]:
    """Zeros in the shapes of `tensors`."""
    return [np.zeros(x.shape) for x in tensors]


def mean_of(parts: Sequence[Array]) -> Array:
    """The mean over workers, added in worker order."""
    total = np.zeros(parts[0].shape)
    for part in parts:
        total = total + part
    return total / len(parts)


def top_mask(values: Array, k: int) -> Mask:
    """The mask of the k largest magnitudes; among equal magnitudes the lowest index wins."""
    order = np.argsort(-np.abs(values), kind="stable")
    mask = np.zeros(values.size, dtype=np.bool_)
    mask[order[:k]] = True
    return mask
