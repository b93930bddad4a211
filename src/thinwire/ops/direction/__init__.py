"""Adam's step along gradients, not taken. ``reference``, ``cpu`` and ``triton`` agree to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["DirectionSegment", "direction"]

_backend = backend("thinwire.ops.direction")


class DirectionSegment(NamedTuple):
    """Columns ``[start, start + width)`` of all rows, those of one tensor.

    ``tensor_index``: of its lr and scale. ``beta2``, ``eps``: Adam's own.
    """

    start: int
    width: int
    tensor_index: int
    beta2: float
    eps: float

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    segments: Sequence[DirectionSegment], *, lr: Tensor, scale: Tensor, beta1: float,
) -> None:  # fmt: skip
    """``rows`` (R, n) hold gradients g, and then the steps that Adam would take along them. One pass over ``segments``.

    v' = b2 v + (1-b2) g^2;  m' = b1 m + (1-b1) g, or g itself;  ``rows`` = lr m' / (sqrt(v' scale) + eps).

    Args:
        second, second_out: v and v' (R, n). first, first_out: m and m', or None: no momentum.
        lr, scale: (tensors,), on the device of the rows; bias corrections are the caller's, in them.
            All float32; rows may be apart in memory, each is contiguous. A v' beyond float32 is its largest.
    """
    if rows.numel() and segments:
        _backend(rows).direction(rows, second, second_out, first, first_out, segments, lr, scale, beta1)
