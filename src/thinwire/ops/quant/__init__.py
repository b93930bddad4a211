"""Group-wise quantization: values <-> integers with one scale per group.

``reference``, ``cpu`` and ``triton`` give the same bits, because the arithmetic is fixed:
``scale = max(max|x| * (1/levels), 2^-126)``, or 1 for a zero group, or NaN for a group with a NaN or an infinity (whose
codes are 0); ``code = round_half_even(x * (1/scale))``; sums add in rank order; all is in float32, and no product is
fused into an addition.

*Integers* have a :class:`Format`. In 8 bits codes are -127 .. 127, one int8 each. In 4 bits they are -7 .. 7, stored
plus 8 in half a byte: byte i of a group is element i (low bits) and element i + group / 2 (high bits).

*Stochastic rounding* (with ``drawn``) rounds up with the probability of the fraction, in steps of 2^-16, so the mean of
many roundings is the value. An element's 16 random bits are half of a hash of its index in its segment's rows laid end
to end and of the segment's seed: the same seed and shape give the same bits on any device. Take another seed for every
step, rank and bucket. ``drawn=None`` rounds to the nearest, ties to even.

*hadamard* multiplies every 32 neighbours of a row with the orthonormal Hadamard matrix of order 32 before they are
quantized, and again after, which undoes it (H H = 1): a single large value is spread over 32 of its group (SDP4Bit,
sections 3.2 and 3.3). Groups are a multiple of 32. Values are multiplied with 32^-1/2 (and the caller's ``scale``),
then pass five levels of butterflies (a + b, a - b) of elements 1 to 16 apart, in Sylvester's order. A group with a NaN
or an infinity decodes to NaN throughout. The layout of the wire is the same without the transform: read as such, it
gives transformed values, and their sum is the transform of the sum.
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
    """Quantize ``rows`` (R, n) float32 or bfloat16, or their transform, to ``codes`` and ``scales``.

    ``codes``: (R, n) int8, or in 4 bits (R, n / 2) uint8. ``scales``: (R, n / group) float32. ``drawn``: seeds of
    random bits, one for each segment of columns.
    """
    if rows.numel():
        _backend(rows).quantize(rows, format, codes, scales, drawn)


def dequantize(codes: Tensor, scales: Tensor, format: Format, out: Tensor) -> Tensor:
    """Write ``codes`` * ``scales``, or its transform, to ``out`` (R, n) float32."""
    if out.numel():
        _backend(out).decode(codes, scales, format, out, 1, format.norm)
    return out


def dequantize_sum(codes: Tensor, scales: Tensor, format: Format, out: Tensor, scale: float = 1.0) -> Tensor:
    """Write ``scale`` * the sum of N peers' rows ``codes`` * ``scales``, or its transform, to ``out`` (n,) float32."""
    if out.numel():
        _backend(out).decode(codes, scales, format, out.unsqueeze(0), len(codes), scale * format.norm)
    return out


def requantize(
    codes: Tensor, scales: Tensor, format: Format, codes_out: Tensor, scales_out: Tensor, scale: float = 1.0,
    drawn: Seeds | None = None,
) -> None:  # fmt: skip
    """Quantize the result of ``dequantize_sum``, in one pass, to ``codes_out`` and ``scales_out`` of one row."""
    if codes_out.numel():
        _backend(codes).requantize(codes, scales, format, codes_out, scales_out, scale * format.norm, drawn)


def sum_rows(rows: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """Write ``scale`` * the sum of ``rows`` (N, n) float32 or bfloat16, in row order, to ``out`` (n,) float32."""
    if out.numel():
        _backend(out).sum_rows(rows, out, scale)
    return out
