"""Adam's step of one tensor along a gradient, not taken. ``reference``, ``cpu`` and ``triton`` agree to rounding."""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["direction"]

_backend = backend("thinwire.ops.direction")


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, *, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    """``rows`` (R, n) hold a gradient g, and then the step that Adam would take along it. One pass.

    v' = b2 v + (1-b2) g^2;  m' = b1 m + (1-b1) g, or g itself;  ``rows`` = lr m' / (sqrt(v' scale) + eps).

    Args:
        second, second_out: v and v' (R, n). first, first_out: m and m', or None: no momentum.
        lr, scale: 0-dim, on the device of the rows; bias corrections are the caller's, in them.
            All float32; rows may be apart in memory, each is contiguous. A v' beyond float32 is its largest.
    """
    if rows.numel():
        _backend(rows).direction(rows, second, second_out, first, first_out, lr, scale, beta1, beta2, eps)
