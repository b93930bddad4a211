# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba kernels for CPU tensors, the same bits as ``reference``.

Without ``fastmath``: reordering or fusing would change results. A kernel sees each tensor as one flat array and the
distance between its rows, because LLVM vectorises only where it knows that neighbours are adjacent. bfloat16, which
numba lacks, arrives as uint16 and is widened by a shift. One thread: ranks share the machine's cores, and every kernel
releases the GIL.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.kernels import flat, njit
from thinwire.ops.quant.reference import (
    FP8_LEVELS,
    INT4_LEVELS,
    INT8_LEVELS,
    LANES,
    MIX_1,
    MIX_2,
    NORM,
    SMALLEST_SCALE,
    TILE,
    key_of,
)

INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
PER_LEVEL_INT4 = np.float32(1 / INT4_LEVELS)
PER_LEVEL_INT8 = np.float32(1 / INT8_LEVELS)
PER_LEVEL_FP8 = np.float32(1 / FP8_LEVELS)
TINY = np.float32(SMALLEST_SCALE)
ROUND = np.float32(1.5 * 2**23)  # adding and subtracting it rounds |v| < 2^22 to the nearest integer, ties to even
ONE = np.float32(1)
NAN = np.float32(np.nan)
HALF = np.float32(0.5)
FINE = np.float32(65536)  # stochastic rounding reckons in units of 2^-16 of a level
MIX = np.uint32(MIX_1), np.uint32(MIX_2)
NORM_32 = np.float32(NORM)
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
def _nearest(value, per_scale):
    return np.int32((value * per_scale + ROUND) - ROUND)


@njit
def _random(pair):
    """32 random bits: the high 16 for the pair's second element."""
    word = np.uint32(pair)
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * MIX[0])
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(15))) * MIX[1])
    return np.uint32(word ^ (word >> np.uint32(16)))


@njit
def _stochastic(value, per_scale, bits, levels):
    fine = np.int32(np.floor(value * per_scale * FINE + HALF))
    fine = max(min(fine, np.int32(levels << 16)), np.int32(-(levels << 16)))
    return np.int32(fine + np.int32(bits)) >> np.int32(16)


@njit
def _encode_int8(values, per_scale, codes):
    for i in range(codes.size):
        codes[i] = np.uint8(_nearest(values[i], per_scale))


@njit
def _encode_int4(values, per_scale, codes):
    half = codes.size
    for i in range(half):
        low, high = _nearest(values[i], per_scale), _nearest(values[half + i], per_scale)
        codes[i] = np.uint8(np.int32(low + (high << np.int32(4))) + np.int32(0x88))


@njit
def _encode_int8_stochastic(values, per_scale, codes, key, first):
    half = codes.size // 2
    for i in range(half):
        word = _random(key ^ np.uint32(first + np.uint32(i)))
        codes[i] = np.uint8(_stochastic(values[i], per_scale, word & np.uint32(0xFFFF), INT8_LEVELS))
        codes[half + i] = np.uint8(_stochastic(values[half + i], per_scale, word >> np.uint32(16), INT8_LEVELS))


@njit
def _encode_int4_stochastic(values, per_scale, codes, key, first):
    half = codes.size
    for i in range(half):
        word = _random(key ^ np.uint32(first + np.uint32(i)))
        low = _stochastic(values[i], per_scale, word & np.uint32(0xFFFF), INT4_LEVELS)
        high = _stochastic(values[half + i], per_scale, word >> np.uint32(16), INT4_LEVELS)
        codes[i] = np.uint8(np.int32(low + (high << np.int32(4))) + np.int32(0x88))


@njit
def _encode(values, bits, group, codes, scales, four, stochastic, key, first):
    """Quantize the groups of ``values``, the first of which begins with pair number ``first``."""
    word = np.empty(1, np.int32)
    real = word.view(np.float32)
    per_level = PER_LEVEL_INT4 if four else PER_LEVEL_INT8
    size = group // 2 if four else group
    for g in range(scales.size):
        scale = _scale_of(bits[g * group : (g + 1) * group], per_level, word, real)
        scales[g] = scale
        groups_values, groups_codes = values[g * group : (g + 1) * group], codes[g * size : (g + 1) * size]
        if np.isnan(scale):
            groups_codes[:] = np.uint8(0x88 if four else 0)
        elif four and stochastic:
            _encode_int4_stochastic(groups_values, ONE / scale, groups_codes, key, first + np.uint32(g * group // 2))
        elif four:
            _encode_int4(groups_values, ONE / scale, groups_codes)
        elif stochastic:
            _encode_int8_stochastic(groups_values, ONE / scale, groups_codes, key, first + np.uint32(g * group // 2))
        else:
            _encode_int8(groups_values, ONE / scale, groups_codes)


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
def _scaled(values, factor, out):
    for i in range(out.size):
        out[i] = values[i] * factor


@njit
def _rotate(values, factor, between, out):
    """The Hadamard matrix of +-1 down the columns of ``factor`` * ``values`` (TILE,) -> ``out``.

    Three levels within each quarter, then two across the quarters. Neither reads and writes the same array, which
    LLVM would not vectorise; ``out`` may be ``values``.
    """
    for quarter in range(0, TILE, TILE // 4):
        for i in range(quarter, quarter + LANES):
            a, b = values[i] * factor, values[i + LANES] * factor
            c, d = values[i + 2 * LANES] * factor, values[i + 3 * LANES] * factor
            e, f = values[i + 4 * LANES] * factor, values[i + 5 * LANES] * factor
            g, h = values[i + 6 * LANES] * factor, values[i + 7 * LANES] * factor
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            between[i], between[i + LANES] = a + e, b + f
            between[i + 2 * LANES], between[i + 3 * LANES] = c + g, d + h
            between[i + 4 * LANES], between[i + 5 * LANES] = a - e, b - f
            between[i + 6 * LANES], between[i + 7 * LANES] = c - g, d - h
    step = TILE // 4
    for i in range(step):
        a, b, c, d = between[i], between[i + step], between[i + 2 * step], between[i + 3 * step]
        a, b, c, d = a + b, a - b, c + d, c - d
        out[i], out[i + step], out[i + 2 * step], out[i + 3 * step] = a + c, b + d, a - c, b - d


@njit
def _quantize(values, bits, stride, rows, n, group, codes, to_stride, scales, scales_stride, four, stochastic, key,
              rotated):  # fmt: skip
    tile_bits = np.empty(TILE, np.int32)
    tile = tile_bits.view(np.float32)
    between = np.empty(TILE, np.float32)
    piece = TILE if rotated else n
    size, pieces = (piece // 2 if four else piece), n // piece
    for row in range(rows):
        for p in range(pieces):
            at, first = row * stride + p * piece, np.uint32((row * n + p * piece) // 2)
            to = codes[row * to_stride + p * size : row * to_stride + (p + 1) * size]
            g = row * scales_stride + p * (piece // group)
            to_scales = scales[g : g + piece // group]
            if rotated:
                _rotate(values[at : at + TILE], NORM_32, between, tile)
                _encode(tile, tile_bits, group, to, to_scales, four, stochastic, key, first)
            else:
                _encode(values[at : at + n], bits[at : at + n], group, to, to_scales, four, stochastic, key, first)


@njit
def _quantize_bf16(narrow, stride, rows, n, group, codes, to_stride, scales, scales_stride, four, stochastic, key,
                   rotated):  # fmt: skip
    piece = TILE if rotated else group
    bits = np.empty(piece, np.int32)
    values = bits.view(np.float32)
    between = np.empty(TILE, np.float32)
    size = piece // 2 if four else piece
    for row in range(rows):
        for p in range(n // piece):
            at, first = row * stride + p * piece, np.uint32((row * n + p * piece) // 2)
            to = codes[row * to_stride + p * size : row * to_stride + (p + 1) * size]
            g = row * scales_stride + p * (piece // group)
            _widen(narrow[at : at + piece], bits)
            if rotated:
                _rotate(values, NORM_32, between, values)
            _encode(values, bits, group, to, scales[g : g + piece // group], four, stochastic, key, first)


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
        out[i] = np.float32(np.int8(codes[i])) * scale


@njit
def _decode_int4(codes, scale, out):
    half = codes.size
    for i in range(half):
        out[i] = np.float32(np.int32(codes[i] & 15) - np.int32(8)) * scale
        out[half + i] = np.float32(np.int32(codes[i] >> 4) - np.int32(8)) * scale


@njit
def _decode_fp8(codes, scale, out, table):
    for i in range(codes.size):
        out[i] = table[codes[i]] * scale


@njit
def _dequantize_int8(codes, stride, scales, scales_stride, rows, n, group, out, to_stride):
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * group
            to = row * to_stride + g * group
            _decode_int8(codes[start : start + group], scales[row * scales_stride + g], out[to : to + group])


@njit
def _dequantize_int4(codes, stride, scales, scales_stride, rows, n, group, out, to_stride):
    size = group // 2
    for row in range(rows):
        for g in range(n // group):
            start = row * stride + g * size
            to = row * to_stride + g * group
            _decode_int4(codes[start : start + size], scales[row * scales_stride + g], out[to : to + group])


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
        total[i] += np.float32(np.int8(codes[i])) * scale


@njit
def _add_int4(codes, scale, total):
    half = codes.size
    for i in range(half):
        total[i] += np.float32(np.int32(codes[i] & 15) - np.int32(8)) * scale
        total[half + i] += np.float32(np.int32(codes[i] >> 4) - np.int32(8)) * scale


@njit
def _sum_int8(codes, stride, scales, scales_stride, peers, g, group, total):
    """The sum over peers of group number ``g`` -> ``total`` (group,)."""
    at = g * group
    _decode_int8(codes[at : at + group], scales[g], total)
    for row in range(1, peers):
        start = row * stride + at
        _add_int8(codes[start : start + group], scales[row * scales_stride + g], total)


@njit
def _sum_int4(codes, stride, scales, scales_stride, peers, g, group, total):
    """The sum over peers of group number ``g`` -> ``total`` (group,)."""
    size = group // 2
    at = g * size
    _decode_int4(codes[at : at + size], scales[g], total)
    for row in range(1, peers):
        start = row * stride + at
        _add_int4(codes[start : start + size], scales[row * scales_stride + g], total)


@njit
def _add_fp8(codes, scale, total, table):
    for i in range(codes.size):
        total[i] += table[codes[i]] * scale


@njit
def _dequantize_sum_int8(codes, stride, scales, scales_stride, peers, n, group, out, factor):
    total = np.empty(group, np.float32)
    for g in range(n // group):
        _sum_int8(codes, stride, scales, scales_stride, peers, g, group, total)
        _scaled(total, factor, out[g * group : (g + 1) * group])


@njit
def _dequantize_sum_int4(codes, stride, scales, scales_stride, peers, n, group, out, factor):
    total = np.empty(group, np.float32)
    for g in range(n // group):
        _sum_int4(codes, stride, scales, scales_stride, peers, g, group, total)
        _scaled(total, factor, out[g * group : (g + 1) * group])


@njit
def _dequantize_rotate_int8(codes, stride, scales, scales_stride, rows, peers, n, group, out, to_stride, factor):
    """``rows`` results, each of the sum over ``peers`` rows of codes."""
    tile, between = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for row in range(rows):
        row_codes, row_scales = codes[row * stride :], scales[row * scales_stride :]
        for at in range(0, n, TILE):
            for g in range(TILE // group):
                number, total = at // group + g, tile[g * group : (g + 1) * group]
                _sum_int8(row_codes, stride, row_scales, scales_stride, peers, number, group, total)
            to = row * to_stride + at
            _rotate(tile, factor, between, out[to : to + TILE])


@njit
def _dequantize_rotate_int4(codes, stride, scales, scales_stride, rows, peers, n, group, out, to_stride, factor):
    """``rows`` results, each of the sum over ``peers`` rows of codes."""
    tile, between = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for row in range(rows):
        row_codes, row_scales = codes[row * stride :], scales[row * scales_stride :]
        for at in range(0, n, TILE):
            for g in range(TILE // group):
                number, total = at // group + g, tile[g * group : (g + 1) * group]
                _sum_int4(row_codes, stride, row_scales, scales_stride, peers, number, group, total)
            to = row * to_stride + at
            _rotate(tile, factor, between, out[to : to + TILE])


@njit
def _dequantize_sum_fp8(codes, stride, scales, scales_stride, rows, n, group, out, factor, table):
    total = np.empty(group, np.float32)
    for g in range(n // group):
        at = g * group
        _decode_fp8(codes[at : at + group], scales[g], total, table)
        for row in range(1, rows):
            start = row * stride + at
            _add_fp8(codes[start : start + group], scales[row * scales_stride + g], total, table)
        _scaled(total, factor, out[at : at + group])


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
        _scaled(total, factor, out[at : at + size])


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
        _scaled(total, factor, out[at : at + size])


_fp8_values: np.ndarray | None = None


def _fp8_table() -> np.ndarray:
    """The value of each of the 256 E4M3 codes."""
    global _fp8_values
    if _fp8_values is None:
        _fp8_values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return _fp8_values


def _integers(
    rows: Tensor, group: int, codes: Tensor, scales: Tensor, seed: int | None, *, four: bool, rotated: bool
) -> None:
    values, stride = flat(rows)
    rounding = four, seed is not None, np.uint32(key_of(seed or 0) & 0xFFFFFFFF), rotated
    arguments = (stride, *rows.shape, group, *flat(codes.view(torch.uint8)), *flat(scales), *rounding)
    if rows.dtype == torch.bfloat16:
        _quantize_bf16(values, *arguments)
    else:
        _quantize(values, values.view(np.int32), *arguments)


def quantize_int8(rows: Tensor, group: int, codes: Tensor, scales: Tensor, seed: int | None = None) -> None:
    _integers(rows, group, codes, scales, seed, four=False, rotated=False)


def quantize_int4(rows: Tensor, group: int, codes: Tensor, scales: Tensor, seed: int | None = None) -> None:
    _integers(rows, group, codes, scales, seed, four=True, rotated=False)


def hadamard_quantize_int8(rows: Tensor, group: int, codes: Tensor, scales: Tensor, seed: int | None = None) -> None:
    _integers(rows, group, codes, scales, seed, four=False, rotated=True)


def hadamard_quantize_int4(rows: Tensor, group: int, codes: Tensor, scales: Tensor, seed: int | None = None) -> None:
    _integers(rows, group, codes, scales, seed, four=True, rotated=True)


def _bytes(codes: Tensor, scales: Tensor) -> tuple[np.ndarray, int, np.ndarray, int]:
    return *flat(codes.view(torch.uint8)), *flat(scales)


def dequantize_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _dequantize_int8(*_bytes(codes, scales), *out.shape, group, *flat(out))


def dequantize_int4(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _dequantize_int4(*_bytes(codes, scales), *out.shape, group, *flat(out))


def dequantize_sum_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _dequantize_sum_int8(*_bytes(codes, scales), len(codes), out.numel(), group, out.numpy(), np.float32(scale))


def dequantize_sum_int4(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _dequantize_sum_int4(*_bytes(codes, scales), len(codes), out.numel(), group, out.numpy(), np.float32(scale))


def hadamard_dequantize_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    count, n = out.shape
    _dequantize_rotate_int8(*_bytes(codes, scales), count, 1, n, group, *flat(out), NORM_32)


def hadamard_dequantize_int4(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    count, n = out.shape
    _dequantize_rotate_int4(*_bytes(codes, scales), count, 1, n, group, *flat(out), NORM_32)


def hadamard_dequantize_sum_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    shape, factor = (1, len(codes), out.numel(), group), np.float32(scale * NORM)
    _dequantize_rotate_int8(*_bytes(codes, scales), *shape, out.numpy(), 0, factor)


def hadamard_dequantize_sum_int4(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    shape, factor = (1, len(codes), out.numel(), group), np.float32(scale * NORM)
    _dequantize_rotate_int4(*_bytes(codes, scales), *shape, out.numpy(), 0, factor)


def quantize_fp8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    values, stride = flat(rows)
    arguments = (stride, *rows.shape, group, *flat(codes), *flat(scales))
    if rows.dtype == torch.bfloat16:
        _quantize_fp8_bf16(values, *arguments)
    else:
        _quantize_fp8(values, values.view(np.int32), *arguments)


def dequantize_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _dequantize_fp8(*flat(codes), *flat(scales), *out.shape, group, *flat(out), _fp8_table())


def dequantize_sum_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    factor = np.float32(scale)
    _dequantize_sum_fp8(*flat(codes), *flat(scales), *codes.shape, group, out.numpy(), factor, _fp8_table())


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    kernel = _sum_rows_bf16 if rows.dtype == torch.bfloat16 else _sum_rows
    kernel(*flat(rows), *rows.shape, out.numpy(), np.float32(scale))
