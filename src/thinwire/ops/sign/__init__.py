"""Signs: values <-> one bit each, with one scale per group. ``reference``, ``cpu`` and ``triton`` give the same bits.

The bit is 1 where x < 0: zero (of either sign) and NaN count as positive. Bit j of byte i of a group is element
j * group / 8 + i, so that neither packing nor unpacking shuffles neighbours. The scale is the sum of |x| * share, or
the square root of the sum of x * x * share: ``share`` is 1 / (number of values in the group that count), and what does
not count (padding) is zero. A sum folds its second half onto its first until one number is left, so that it is the
same on every device; everything is in float32. A group with a NaN or an infinity has a scale that is not finite, and
so decodes to nothing finite. A group of zeros has scale 0 and decodes to zeros.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["pack", "unpack", "unpack_sum"]

_backend = backend("thinwire.ops.sign")


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, *, rms: bool = False) -> None:
    """``rows`` (R, n) float32 or bfloat16 -> ``bits`` (R, n / 8) uint8 and ``scales`` (R, n / group) float32.

    Args:
        group: a power of two, 32 or more. shares: (R, n / group) float32. rms: the root of the mean square, which keeps
            the group's 2-norm; else the mean of |x|, which leaves the smallest error. Squares overflow from 1.8e19 on.
    """
    if rows.numel():
        _backend(rows).pack(rows, group, shares, bits, scales, rms)


def unpack(bits: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    """``bits`` (R, n / 8) uint8 and ``scales`` (R, n / group) -> ``out`` (R, n) float32: the scale with either sign."""
    if out.numel():
        _backend(out).unpack(bits, scales, group, out)


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float = 1.0) -> None:
    """``scale`` * the sum over peers of ``bits`` (N, n / 8) with ``scales`` (N, n / group) -> ``out`` (n,) float32.

    Float32, added in rank order.
    """
    if out.numel():
        _backend(out).unpack_sum(bits, scales, group, out, scale)
