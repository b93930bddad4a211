"""SCAPE's passes over a first moment: what a mask is chosen by, and what becomes of everything once a sum is there.

``reference``, ``cpu`` and ``triton`` agree to float32 rounding. All tensors are adjacent and float32, except masks
(int64 words of 64 elements, ``thinwire.ops.mask``); ``moment`` (m,) may be shorter than the rest: padding has none.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["add_up", "rejoin", "settle", "take"]

_backend = backend("thinwire.ops.moments")


def add_up(gradient: Tensor, residual: Tensor, moment: Tensor, beta1: float) -> None:
    """``gradient`` (n,) = m~ = (1-b1) ``gradient`` + ``residual`` (n,) + b1 ``moment`` (m,), m <= n."""
    if gradient.numel():
        _backend(gradient).add_up(gradient, residual, moment, beta1)


def take(values: Tensor, moment: Tensor, words: Tensor, beta1: float) -> None:
    """``values`` (n,) -= b1 ``moment`` (m,) at the mask ``words`` (n / 64,): all ranks know it, it need not travel."""
    if moment.numel():
        _backend(values).take(values, moment, words, beta1)


def rejoin(mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor) -> None:
    """What all ranks have in common joins their mean at the mask, where it is known to the owner of the moment alone.

    On the mask: ``mean`` += ``common``; ``common_out`` = 0. Off it: ``common_out`` = ``common`` + b1 ``moment``.

    Args:
        mean, common, common_out: (n,), n a multiple of 64; common_out may be common. moment: (m,), m <= n.
        words: (n / 64,) int64.
    """
    if mean.numel():
        _backend(mean).rejoin(mean, common, moment, words, beta1, common_out)


def settle(mean: Tensor, moment: Tensor, words: Tensor, beta1: float, given: Tensor) -> None:
    """Of the ranks' mean of what was sent: the next moment, and the gradient that belongs to it.

    On the mask: ``given`` = b1 ``moment`` + ``mean``; ``mean`` /= 1-b1. Off it ``given`` = 0, and ``mean`` has to be 0.

    Args:
        mean: (n,), n a multiple of 64. moment, given: (m,), m <= n. words: (n / 64,) int64.
    """
    if mean.numel():
        _backend(mean).settle(mean, moment, words, beta1, given)
