"""Group-wise quantization: values <-> integers or 8-bit floats with one scale per group.

``reference``, ``cpu`` and ``triton`` give the same bits.
The arithmetic that makes this possible: ``scale = max(max|x| * (1/levels), 2^-126)``, or 1 for a zero group, or NaN
for a group with a NaN or an infinity (whose codes are 0); ``code = round_half_even(x * (1/scale))``; sums start at
row 0 and add in rank order; everything in float32, and no product is fused into an addition.
The fp8 operations on CUDA are the reference: torch's own cast is what the hardware has.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from thinwire.ops.backends import backend
from thinwire.ops.quant import reference

__all__ = [
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_sum_fp8",
    "dequantize_sum_int8",
    "quantize_fp8",
    "quantize_int8",
    "sum_rows",
]


_backend = backend("thinwire.ops.quant")


def _backend_fp8(tensor: Tensor) -> ModuleType:
    return reference if tensor.device.type == "cuda" else _backend(tensor)


def quantize_int8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    """``rows`` (R, n) float32 or bfloat16 -> ``codes`` (R, n) int8 and ``scales`` (R, n / group) float32."""
    if rows.numel():
        _backend(rows).quantize_int8(rows, group, codes, scales)


def dequantize_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> Tensor:
    """``codes`` (R, n) int8 * ``scales`` (R, n / group) -> ``out`` (R, n) float32."""
    if out.numel():
        _backend(out).dequantize_int8(codes, scales, group, out)
    return out


def dequantize_sum_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` * the sum over peers of ``codes`` (N, n) int8 * ``scales`` (N, n / group) -> ``out`` (n,) float32."""
    if out.numel():
        _backend(out).dequantize_sum_int8(codes, scales, group, out, scale)
    return out


def quantize_fp8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    """``rows`` (R, n) float32 or bfloat16 -> E4M3 ``codes`` (R, n) uint8 and ``scales`` (R, n / group) float32."""
    if rows.numel():
        _backend_fp8(rows).quantize_fp8(rows, group, codes, scales)


def dequantize_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> Tensor:
    """E4M3 ``codes`` (R, n) uint8 * ``scales`` (R, n / group) -> ``out`` (R, n) float32."""
    if out.numel():
        _backend_fp8(out).dequantize_fp8(codes, scales, group, out)
    return out


def dequantize_sum_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` * the sum over peers of E4M3 ``codes`` (N, n) uint8 * ``scales`` -> ``out`` (n,) float32."""
    if out.numel():
        _backend_fp8(out).dequantize_sum_fp8(codes, scales, group, out, scale)
    return out


def sum_rows(rows: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
    """``scale`` * the sum over ``rows`` (N, n) float32 or bfloat16, in row order -> ``out`` (n,) float32."""
    if out.numel():
        _backend(out).sum_rows(rows, out, scale)
    return out
