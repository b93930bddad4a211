"""SCAPE's passes over a first moment: what a mask is chosen by, and what becomes of everything once a sum is there.

``reference``, ``cpu`` and ``triton`` agree to float32 rounding. All tensors are 1-D, adjacent and float32, except masks
(int64 words of 64 elements, ``thinwire.ops.mask``).
"""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["score", "settle"]

_backend = backend("thinwire.ops.moments")


def score(gradient: Tensor, residual: Tensor, common: Tensor, moment: Tensor, beta1: float, out: Tensor) -> Tensor:
    """``out`` (n,) = m~ = ``gradient`` (scaled already) + ``residual`` + ``common`` + b1 ``moment`` (m,), m <= n.

    Beyond the moment's end (padding) its share is 0.
    """
    if out.numel():
        _backend(out).score(gradient, residual, common, moment, beta1, out)
    return out


def settle(
    mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor, given: Tensor
) -> None:
    """Of the ranks' mean of what was sent: the next moment, the gradient that belongs to it, and what is left.

    On the mask: x = ``mean`` + ``common``; ``given`` = b1 ``moment`` + x; ``mean`` = x / (1-b1); ``common_out`` = 0.
    Off it: ``given`` = ``mean`` = 0; ``common_out`` = ``common`` + b1 ``moment``.

    Args:
        mean, common, common_out: (n,), n a multiple of 64; common_out may be common. moment, given: (m,), m <= n.
        words: (n / 64,) int64.
    """
    if mean.numel():
        _backend(mean).settle(mean, common, moment, words, beta1, common_out, given)
