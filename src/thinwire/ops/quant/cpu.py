# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba kernels for CPU tensors, the same bits as ``reference``.

Without ``fastmath``: reordering or fusing would change results. A kernel sees each tensor as one flat array and the
distance between its rows, because LLVM vectorises only where it knows that neighbours are adjacent. bfloat16, which
numba lacks, arrives as uint16 and is widened by a shift. One thread: ranks share the machine's cores, and every kernel
releases the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.kernels import flat, njit
from thinwire.ops.quant.reference import FP8_LEVELS, INT8_LEVELS, SMALLEST_SCALE

INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
PER_LEVEL_INT8 = np.float32(1 / INT8_LEVELS)
PER_LEVEL_FP8 = np.float32(1 / FP8_LEVELS)
TINY = np.float32(SMALLEST_SCALE)
ROUND = np.float32(1.5 * 2**23)  # adding and subtracting it rounds |v| < 2^22 to the nearest integer, ties to even
ONE = np.float32(1)
NAN = np.float32(np.nan)
FP8_SMALLEST_NORMAL_BITS = np.int32(0x3C800000)  # 2^-6
FP8_PER_SUBNORMAL = np.float32(2**9)


@njit
def _scale_of(bits, per_level, word, real):
    """Scale of a group from the bit patterns of its values: as int32 the maximum vectorises, and NaN is largest.

    ``word`` and ``real`` are one element of memory seen as int32 and as float32.
    """
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE_BITS))
    if largest >= INFINITY_BITS:
        return NAN
    if largest == 0:
        return ONE
    word[0] = largest
    return max(real[0] * per_level, TINY)


@njit
def _encode_int8(values, scale, codes):
    if np.isnan(scale):
        codes[:] = 0
        return
    per_scale = ONE / scale
    for i in range(codes.size):
        codes[i] = np.int8(np.int32((values[i] * per_scale + ROUND) - ROUND))


@njit
def _encode_fp8(values, scale, codes, scaled, scaled_bits):
    """E4M3 by integer arithmetic on the float32 bits. |value / scale| < 448.001 rounds to 448: nothing overflows."""
    if np.isnan(scale):
        codes[:] = 0
        return
    per_scale = ONE / scale
    for i in range(codes.size):
        scaled[i] = values[i] * per_scale
    for i in range(codes.size):
        bits = scaled_bits[i]
        magnitude = np.int32(bits & MAGNITUDE_BITS)
        # 20 mantissa bits fall off, half rounds to even; the exponent's bias goes from 127 to 7
        normal = np.int32(np.int32(magnitude + np.int32(0x7FFFF) + ((magnitude >> 20) & 1)) >> 20) - np.int32(960)
        subnormal = np.int32((abs(scaled[i]) * FP8_PER_SUBNORMAL + ROUND) - ROUND)
        code = subnormal if magnitude < FP8_SMALLEST_NORMAL_BITS else normal
        codes[i] = np.uint8(code | ((bits >> 24) & 0x80))


@njit
def _widen(narrow, bits):
    for i in range(narrow.size):
        bits[i] = np.int32(np.uint32(narrow[i]) << np.uint32(16))


@njit
def _quantize_int8(values, bits, stride, rows, n, group, codes, to_stride, scales, scales_stride):
    word = np.empty(1, np.int32)
    real = word.view(np.float32)
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            scale = _scale_of(bits[start : start + group], PER_LEVEL_INT8, word, real)
            scales[row * scales_stride + g] = scale
            _encode_int8(values[start : start + group], scale, codes[to : to + group])


@njit
def _quantize_int8_bf16(narrow, stride, rows, n, group, codes, to_stride, scales, scales_stride):
    word = np.empty(1, np.int32)
    real = word.view(np.float32)
    bits = np.empty(group, np.int32)
    values = bits.view(np.float32)
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            _widen(narrow[start : start + group], bits)
            scale = _scale_of(bits, PER_LEVEL_INT8, word, real)
            scales[row * scales_stride + g] = scale
            _encode_int8(values, scale, codes[to : to + group])


@njit
def _quantize_fp8(values, bits, stride, rows, n, group, codes, to_stride, scales, scales_stride):
    word = np.empty(1, np.int32)
    real = word.view(np.float32)
    scaled = np.empty(group, np.float32)
    scaled_bits = scaled.view(np.int32)
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            scale = _scale_of(bits[start : start + group], PER_LEVEL_FP8, word, real)
            scales[row * scales_stride + g] = scale
            _encode_fp8(values[start : start + group], scale, codes[to : to + group], scaled, scaled_bits)


@njit
def _quantize_fp8_bf16(narrow, stride, rows, n, group, codes, to_stride, scales, scales_stride):
    word = np.empty(1, np.int32)
    real = word.view(np.float32)
    bits = np.empty(group, np.int32)
    values = bits.view(np.float32)
    scaled = np.empty(group, np.float32)
    scaled_bits = scaled.view(np.int32)
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            _widen(narrow[start : start + group], bits)
            scale = _scale_of(bits, PER_LEVEL_FP8, word, real)
            scales[row * scales_stride + g] = scale
            _encode_fp8(values, scale, codes[to : to + group], scaled, scaled_bits)


@njit
def _decode_int8(codes, scale, out):
    for i in range(codes.size):
        out[i] = np.float32(codes[i]) * scale


@njit
def _decode_fp8(codes, scale, out, table):
    for i in range(codes.size):
        out[i] = table[codes[i]] * scale


@njit
def _times(total, factor, out):
    for i in range(out.size):
        out[i] = total[i] * factor


@njit
def _dequantize_int8(codes, stride, scales, scales_stride, rows, n, group, out, to_stride):
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            _decode_int8(codes[start : start + group], scales[row * scales_stride + g], out[to : to + group])


@njit
def _dequantize_fp8(codes, stride, scales, scales_stride, rows, n, group, out, to_stride, table):
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            _decode_fp8(codes[start : start + group], scales[row * scales_stride + g], out[to : to + group], table)


@njit
def _add_int8(codes, scale, total):
    for i in range(codes.size):
        total[i] += np.float32(codes[i]) * scale


@njit
def _add_fp8(codes, scale, total, table):
    for i in range(codes.size):
        total[i] += table[codes[i]] * scale


@njit
def _dequantize_sum_int8(codes, stride, scales, scales_stride, rows, n, group, out, factor):
    total = np.empty(group, np.float32)
    for g in range(n // group):
        at = g * group
        _decode_int8(codes[at : at + group], scales[g], total)
        for row in range(1, rows):
            start = row * stride + at
            _add_int8(codes[start : start + group], scales[row * scales_stride + g], total)
        _times(total, factor, out[at : at + group])


@njit
def _dequantize_sum_fp8(codes, stride, scales, scales_stride, rows, n, group, out, factor, table):
    total = np.empty(group, np.float32)
    for g in range(n // group):
        at = g * group
        _decode_fp8(codes[at : at + group], scales[g], total, table)
        for row in range(1, rows):
            start = row * stride + at
            _add_fp8(codes[start : start + group], scales[row * scales_stride + g], total, table)
        _times(total, factor, out[at : at + group])


BLOCK = 1024  # elements summed at a time: the partial sums stay in the first-level cache


@njit
def _add(values, total):
    for i in range(values.size):
        total[i] += values[i]


@njit
def _sum_rows(values, stride, rows, n, out, factor):
    total = np.empty(BLOCK, np.float32)
    for at in range(0, n, BLOCK):
        size = min(BLOCK, n - at)
        total[:size] = values[at : at + size]
        for row in range(1, rows):
            start = row * stride + at
            _add(values[start : start + size], total)
        _times(total, factor, out[at : at + size])


@njit
def _sum_rows_bf16(narrow, stride, rows, n, out, factor):
    total_bits = np.empty(BLOCK, np.int32)
    total = total_bits.view(np.float32)
    bits = np.empty(BLOCK, np.int32)
    values = bits.view(np.float32)
    for at in range(0, n, BLOCK):
        size = min(BLOCK, n - at)
        _widen(narrow[at : at + size], total_bits)
        for row in range(1, rows):
            start = row * stride + at
            _widen(narrow[start : start + size], bits)
            _add(values[:size], total)
        _times(total, factor, out[at : at + size])


_fp8_values: np.ndarray | None = None


def _fp8_table() -> np.ndarray:
    """The value of each of the 256 E4M3 codes."""
    global _fp8_values
    if _fp8_values is None:
        _fp8_values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return _fp8_values


def _quantize(
    wide: Callable[..., Any], narrow: Callable[..., Any], rows: Tensor, group: int, codes: Tensor, scales: Tensor
) -> None:
    values, stride = flat(rows)
    shape = (stride, *rows.shape, group)
    if rows.dtype == torch.bfloat16:
        narrow(values, *shape, *flat(codes), *flat(scales))
    else:
        wide(values, values.view(np.int32), *shape, *flat(codes), *flat(scales))


def quantize_int8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    _quantize(_quantize_int8, _quantize_int8_bf16, rows, group, codes, scales)


def dequantize_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _dequantize_int8(*flat(codes), *flat(scales), *out.shape, group, *flat(out))


def dequantize_sum_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _dequantize_sum_int8(*flat(codes), *flat(scales), *codes.shape, group, out.numpy(), np.float32(scale))


def quantize_fp8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    _quantize(_quantize_fp8, _quantize_fp8_bf16, rows, group, codes, scales)


def dequantize_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _dequantize_fp8(*flat(codes), *flat(scales), *out.shape, group, *flat(out), _fp8_table())


def dequantize_sum_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    factor = np.float32(scale)
    _dequantize_sum_fp8(*flat(codes), *flat(scales), *codes.shape, group, out.numpy(), factor, _fp8_table())


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    kernel = _sum_rows_bf16 if rows.dtype == torch.bfloat16 else _sum_rows
    kernel(*flat(rows), *rows.shape, out.numpy(), np.float32(scale))
