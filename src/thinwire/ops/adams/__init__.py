"""The AdamS update of one tensor in one pass. ``reference``, ``cpu`` and ``triton`` agree to float32 rounding."""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["adams"]

_backend = backend("thinwire.ops.adams")


def adams(
    weight: Tensor, moment: Tensor, gradient: Tensor, next_moment: Tensor | None, *, lr: float, beta1: float,
    beta2: float, eps: float, decay: float, correction1: float, correction2: float,
) -> None:  # fmt: skip
    """Take one AdamS step on ``weight`` and ``moment`` along ``gradient``; all 1-D, adjacent, of one length and dtype.

    m' = b1 m + (1-b1) g, or where that is the same to rounding, or 0, ``next_moment``;  v = b2 m^2 + (1-b2) g^2;
    u = m'/c1 / (sqrt(v/c2) + eps);  w = (1 - lr decay) w - lr u. Computed in float32. ``correction1`` and
    ``correction2`` are c1 and c2 (1 for none).
    """
    if weight.numel():
        keep, root = 1 - lr * decay, correction2**-0.5
        _backend(weight).adams(weight, moment, gradient, next_moment, lr / correction1, beta1, beta2, eps, keep, root)
