# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``), the same bits as ``reference``.

Launched without floating-point fusion: a product contracted into an addition would round once instead of twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.quant.reference import INT8_LEVELS, SMALLEST_SCALE

PER_PROGRAM = 4096  # elements of one row that one program handles

_PER_LEVEL = tl.constexpr(1 / INT8_LEVELS)
_TINY = tl.constexpr(SMALLEST_SCALE)
_ROUND = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds |v| < 2^22 to the nearest integer, ties to even


@triton.jit
def _load(pointers, inside):
    """float32 as it is; bfloat16 arrives as int16 and is widened by a shift: the interpreter loses its denormals."""
    values = tl.load(pointers, mask=inside, other=0)
    if values.dtype == tl.int16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _quantize(
    rows, rows_stride, codes, codes_stride, scales, scales_stride, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (g < groups)[:, None]
    values = _load(rows + row * rows_stride + at, inside)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    finite = largest < 0x7F800000
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * _PER_LEVEL, _TINY)
    scale = tl.where(largest == 0, 1.0, scale)
    per_scale = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), tl.where(finite, scale, 1.0))
    rounded = (tl.where(finite[:, None], values, 0.0) * per_scale[:, None] + _ROUND) - _ROUND
    tl.store(codes + row * codes_stride + at, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row * scales_stride + g, tl.where(finite, scale, float("nan")), mask=g < groups)


@triton.jit
def _dequantize(
    codes, codes_stride, scales, scales_stride, out, out_stride, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (g < groups)[:, None]
    scale = tl.load(scales + row * scales_stride + g, mask=g < groups, other=0.0)
    values = tl.load(codes + row * codes_stride + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + row * out_stride + at, values * scale[:, None], mask=inside)


@triton.jit
def _dequantize_sum(
    codes, codes_stride, scales, scales_stride, out, factor, peers, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = (g < groups)[:, None]
    scale = tl.load(scales + g, mask=g < groups, other=0.0)
    total = tl.load(codes + at, mask=inside, other=0).to(tl.float32) * scale[:, None]
    for _ in range(1, peers):
        codes += codes_stride
        scales += scales_stride
        scale = tl.load(scales + g, mask=g < groups, other=0.0)
        total += tl.load(codes + at, mask=inside, other=0).to(tl.float32) * scale[:, None]
    tl.store(out + at, total * factor, mask=inside)


@triton.jit
def _sum_rows(rows, rows_stride, out, factor, count, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = _load(rows + at, inside)
    for _ in range(1, count):
        rows += rows_stride
        total += _load(rows + at, inside)
    tl.store(out + at, total * factor, mask=inside)


def _words(rows: Tensor) -> Tensor:
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows


def _launch(kernel: Any, grid: tuple[int, ...], out: Tensor, *arguments: Any, **blocks: int) -> None:
    with torch.cuda.device_of(out):
        kernel[grid](*arguments, **blocks, enable_fp_fusion=False)


def _blocks(n: int, group: int) -> tuple[int, int]:
    """Groups per program, and programs per row."""
    block = max(1, PER_PROGRAM // group)
    return block, triton.cdiv(n // group, block)


def quantize_int8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    count, n = rows.shape
    block, programs = _blocks(n, group)
    strides = rows.stride(0), codes.stride(0), scales.stride(0)
    arguments = _words(rows), strides[0], codes, strides[1], scales, strides[2], n // group
    _launch(_quantize, (programs, count), codes, *arguments, GROUP=group, BLOCK=block)


def dequantize_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    count, n = out.shape
    block, programs = _blocks(n, group)
    arguments = codes, codes.stride(0), scales, scales.stride(0), out, out.stride(0), n // group
    _launch(_dequantize, (programs, count), out, *arguments, GROUP=group, BLOCK=block)


def dequantize_sum_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    peers, n = codes.shape
    block, programs = _blocks(n, group)
    arguments = codes, codes.stride(0), scales, scales.stride(0), out, scale, peers, n // group
    _launch(_dequantize_sum, (programs,), out, *arguments, GROUP=group, BLOCK=block)


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    count, n = rows.shape
    arguments = _words(rows), rows.stride(0), out, scale, count, n
    _launch(_sum_rows, (triton.cdiv(n, PER_PROGRAM),), out, *arguments, BLOCK=PER_PROGRAM)
