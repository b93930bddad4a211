"""Signs: values <-> one bit each, with one scale per group. ``reference``, ``cpu`` and ``triton`` give the same bits.

The bit is 1 where x < 0: zero (of either sign) and NaN count as positive. Bit j of byte i of a group is element
j * group / 8 + i, so that neither packing nor unpacking shuffles neighbours. The scale is the sum of |x| * share, or
the square root of the sum of x * x * share: ``share`` is 1 / (the group's number of values without padding, which is
zeros). A sum folds its second half onto its first until one number is left, the same on every device; all is float32.
A group with a NaN or an infinity has a scale that is not finite, so it decodes to nothing finite. A group of zeros has
scale 0 and decodes to zeros.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend

__all__ = ["pack", "unpack", "unpack_sum"]

_backend = backend("thinwire.ops.sign")


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, *, rms: bool = False) -> None:
    """Pack ``rows`` (R, n) float32 or bfloat16 into ``bits`` (R, n / 8) uint8 and ``scales`` (R, n / group) float32.

    ``group``: a power of two, 32 or more. ``shares``: (R, n / group) float32. ``rms``: scale by the root of the mean
    square, which keeps the group's 2-norm and overflows from 1.8e19 on; else by the mean of |x|, the smallest error.
    """
    if rows.numel():
        _backend(rows).pack(rows, group, shares, bits, scales, rms)


def unpack(bits: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    """Unpack ``bits`` (R, n / 8) uint8 and ``scales`` (R, n / group) to ``out`` (R, n) float32: + or - scale."""
    if out.numel():
        _backend(out).unpack(bits, scales, group, out)


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float = 1.0) -> None:
    """Write ``scale`` * the sum of N peers' values to ``out`` (n,) float32, added in rank order.

    ``bits``: (N, n / 8) uint8. ``scales``: (N, n / group).
    """
    if out.numel():
        _backend(out).unpack_sum(bits, scales, group, out, scale)
