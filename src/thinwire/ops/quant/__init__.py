"""Group-wise quantization: values <-> integers or 8-bit floats with one scale per group.

``reference``, ``cpu`` and ``triton`` give the same bits.
The arithmetic that makes this possible: ``scale = max(max|x| * (1/levels), 2^-126)``, or 1 for a zero group, or NaN
for a group with a NaN or an infinity (whose codes are 0); ``code = round_half_even(x * (1/scale))``; sums start at
row 0 and add in rank order; everything in float32, and no product is fused into an addition.

*Integers* have a :class:`Format`. In 8 bits codes are -127 .. 127, one int8 each. In 4 bits they are -7 .. 7, stored
plus 8 in half a byte: byte i of a group is element i (low bits) and element i + group / 2 (high bits), so that neither
half is interleaved.

*Stochastic rounding* (``drawn`` is given): up with the probability of the fraction, in steps of 2^-16, so that the
mean of many roundings is the value. The 16 random bits of an element are half of a hash of its index in its segment's
rows laid end to end and of the segment's seed: the same seed and shape give the same bits, on any device. Take another
seed for every step, rank and bucket. ``drawn=None`` rounds to the nearest, ties to even.

*hadamard*: every 32 neighbours, from the first of a row on, are multiplied with the orthonormal Hadamard matrix of
order 32 before they are quantized, and again after, which undoes it (H H = 1): a single large value is spread over 32
and stays within its group (SDP4Bit, sections 3.2 and 3.3). Groups are a multiple of 32. The values are multiplied with
32^-1/2 (and the caller's ``scale``); then five levels of butterflies (a + b, a - b) run from elements 1 apart to
elements 16 apart, in Sylvester's order. A group with a NaN or an infinity decodes to NaN throughout. The layout of the
wire is the one without the transform: under the same format without it ``dequantize_sum`` reads transformed values, and
the sum of transformed values is the transform of the sum.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.base.random import Seeds
from thinwire.ops.backends import backend
from thinwire.ops.quant.reference import ORDER, Format

__all__ = [
    "ORDER", "Format", "dequantize", "dequantize_sum", "quantize", "requantize", "sum_rows",
]  # fmt: skip

_backend = backend("thinwire.ops.quant")


def quantize(rows: Tensor, format: Format, codes: Tensor, scales: Tensor, drawn: Seeds | None = None) -> None:
    """``rows`` (R, n) float32 or bfloat16, or their transform -> ``codes`` and ``scales`` (R, n / group) float32.

    ``codes``: (R, n) int8, or in 4 bits (R, n / 2) uint8. ``drawn``: random bits, for each segment of columns its own.
    """
    if rows.numel():
        _backend(rows).quantize(rows, format, codes, scales, drawn)


def dequantize(codes: Tensor, scales: Tensor, format: Format, out: Tensor) -> Tensor:
    """Decode what ``quantize`` wrote, ``codes`` * ``scales`` or its transform -> ``out`` (R, n) float32."""
    if out.numel():
        _backend(out).decode(codes, scales, format, out, 1, format.norm)
    return out


def dequantize_sum(codes: Tensor, scales: Tensor, format: Format, out: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` * the sum over N peers' rows of ``codes`` * ``scales``, or its transform -> ``out`` (n,) float32."""
    if out.numel():
        _backend(out).decode(codes, scales, format, out.unsqueeze(0), len(codes), scale * format.norm)
    return out


def requantize(
    codes: Tensor, scales: Tensor, format: Format, codes_out: Tensor, scales_out: Tensor, scale: float = 1.0,
    drawn: Seeds | None = None,
) -> None:  # fmt: skip
    """``quantize`` what ``dequantize_sum`` gives of N peers, in one pass; ``codes_out``, ``scales_out``: of one row."""
    if codes_out.numel():
        _backend(codes).requantize(codes, scales, format, codes_out, scales_out, scale * format.norm, drawn)


def sum_rows(rows: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` * the sum over ``rows`` (N, n) float32 or bfloat16, in row order -> ``out`` (n,) float32."""
    if out.numel():
        _backend(out).sum_rows(rows, out, scale)
    return out
