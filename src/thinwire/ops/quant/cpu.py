# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, call-arg"
"""Numba, the same bits as ``reference``.

Without ``fastmath``: reordering or fusing would change results. A kernel sees each tensor as one flat array and the
distance between its rows, because LLVM vectorises only where it knows that neighbours are adjacent. One thread: ranks
share the machine's cores, and every kernel releases the GIL.

Functions that run once per group are compiled into their caller: a call would count references to every slice passed,
which costs as much as quantizing 128 values. Constant flags turn each kernel into one straight loop.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.base.random import Seeds, key_of
from thinwire.ops.kernels import flat, inlined, njit
from thinwire.ops.quant.reference import INT4_LEVELS, INT8_LEVELS, MIX_1, MIX_2, NORM, ORDER, SMALLEST_SCALE, Format

INFINITY_BITS = np.int32(0x7F800000)
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
PER_LEVEL_INT4 = np.float32(1 / INT4_LEVELS)
PER_LEVEL_INT8 = np.float32(1 / INT8_LEVELS)
TINY = np.float32(SMALLEST_SCALE)
ROUND = np.float32(1.5 * 2**23)  # adding and subtracting it rounds |v| < 2^22 to the nearest integer, ties to even
ONE = np.float32(1)
NAN = np.float32(np.nan)
HALF = np.float32(0.5)
FINE = np.float32(65536)  # stochastic rounding reckons in units of 2^-16 of a level
MIX = np.uint32(MIX_1), np.uint32(MIX_2)
NORM_32 = np.float32(NORM)

LANES = 16  # values in a vector of _rotate_32: as many as AVX-512 holds; LLVM cuts them up for other machines
VECTOR = ir.VectorType(ir.FloatType(), LANES)


@inlined
def _real(bits):
    return np.int32(bits).view(np.float32)


@inlined
def _wide(narrow, value):
    """Return a value as float32; the bits of a bfloat16 (``narrow``) become its upper half."""
    return _real(np.uint32(value) << np.uint32(16)) if narrow else np.float32(value)


@inlined
def _scale_of(bits, per_level):
    """Return a group's scale from the bits of its values: the maximum of int32 vectorises, and NaN is largest."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE_BITS))
    if largest >= INFINITY_BITS:
        return NAN
    if largest == 0:
        return ONE
    return max(_real(largest) * per_level, TINY)


@inlined
def _nearest(value, per_scale):
    """Return the integer in the lowest byte: it is the end of the mantissa after adding ROUND."""
    return np.float32(value * per_scale + ROUND).view(np.int32)


@inlined
def _random(pair):
    """Return 32 random bits, the high 16 for the pair's second element."""
    word = np.uint32(pair)
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * MIX[0])
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(15))) * MIX[1])
    return np.uint32(word ^ (word >> np.uint32(16)))


@inlined
def _stochastic(value, per_scale, bits, levels):
    fine = np.int32(np.floor(value * per_scale * FINE + HALF))
    fine = max(min(fine, np.int32(levels << 16)), np.int32(-(levels << 16)))
    return np.int32(np.int32(fine + np.int32(bits)) >> np.int32(16))


@inlined
def _encode(four, stochastic, values, per_scale, codes, key, first):
    """Quantize one group, whose first pair has number ``first``."""
    half, levels = values.size // 2, INT4_LEVELS if four else INT8_LEVELS
    for i in range(half):
        if stochastic:
            word = _random(key ^ np.uint32(first + np.uint32(i)))
            low = _stochastic(values[i], per_scale, word & np.uint32(0xFFFF), levels)
            high = _stochastic(values[half + i], per_scale, word >> np.uint32(16), levels)
        else:
            low, high = _nearest(values[i], per_scale), _nearest(values[half + i], per_scale)
        if four:
            codes[i] = np.uint8(np.int32(low + (high << np.int32(4))) + np.int32(0x88))
        else:
            codes[i], codes[half + i] = np.uint8(low), np.uint8(high)


@inlined
def _scaled(values, factor, out):
    for i in range(out.size):
        out[i] = values[i] * factor


@inlined
def _scale(values, factor):
    """Scale in place: with one array LLVM knows that nothing overlaps."""
    for i in range(values.size):
        values[i] *= factor


def _shuffled(builder, vector, indices):
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), LANES), indices))


def _butterflies(builder, vector, step):
    """Return a + b and a - b of elements ``step`` apart. The product with +-1 is exact, so it may be fused."""
    sign = ir.Constant(VECTOR, [-1.0 if i & step else 1.0 for i in range(LANES)])
    partner = _shuffled(builder, vector, [i ^ step for i in range(LANES)])
    return builder.fadd(builder.fmul(vector, sign, flags=("contract",)), partner, flags=("contract",))


def _vectors(context, builder, kind, array, first):
    """Return pointers to the vectors of the 32 values from ``array[first]`` on."""
    data = context.make_array(kind)(context, builder, array).data
    start = builder.bitcast(builder.gep(data, [first]), VECTOR.as_pointer())
    return [builder.gep(start, [ir.IntType(32)(i)]) for i in range(ORDER // LANES)]


@intrinsic
def _rotate_32(typing_context, values, first, factor, out, out_first):
    """Multiply the Hadamard matrix of +-1 with ``factor`` * 32 ``values`` from ``first`` -> ``out`` from ``out_first``.

    In LLVM's own vectors: loops over neighbours 1 to 8 apart compile to code that is 8 times slower.
    """

    def generate(context, builder, signature, arguments):
        values, first, factor, out, out_first = arguments
        factors = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), factor, ir.IntType(32)(0))
        factors = _shuffled(builder, factors, [0] * LANES)
        sources = _vectors(context, builder, signature.args[0], values, first)
        targets = _vectors(context, builder, signature.args[3], out, out_first)
        low, high = (builder.fmul(builder.load(source, align=4), factors) for source in sources)
        for step in (1, 2, 4, 8):
            low, high = _butterflies(builder, low, step), _butterflies(builder, high, step)
        builder.store(builder.fadd(low, high), targets[0], align=4)
        builder.store(builder.fsub(low, high), targets[1], align=4)
        return context.get_dummy_value()

    return types.void(values, first, factor, out, out_first), generate


@inlined
def _rotate(values, factor, out):
    """Transform every 32 of ``factor`` * ``values`` -> ``out``, which may be ``values``."""
    for first in range(0, out.size, ORDER):
        _rotate_32(values, first, factor, out, first)


@inlined
def _load(narrow, rotated, values, group_values):
    """Load one group as float32, transformed if ``rotated``."""
    for i in range(values.size):
        group_values[i] = _wide(narrow, values[i])
    if rotated:
        _rotate(group_values, NORM_32, group_values)


@inlined
def _encode_group(four, stochastic, bits, group_values, codes, scales, scale_index, key, first):
    """Encode ``group_values``, whose bits are ``bits``; write their scale to ``scales[scale_index]``."""
    scale = _scale_of(bits, PER_LEVEL_INT4 if four else PER_LEVEL_INT8)
    scales[scale_index] = scale
    if np.isnan(scale):
        group_values.fill(0)  # its codes are 0
    per_scale = ONE if np.isnan(scale) else ONE / scale
    _encode(four, stochastic, group_values, per_scale, codes, key, first)


@inlined
def _quantize(narrow, four, stochastic, rotated, values, stride, rows, n, group, codes, codes_stride, scales,
              scales_stride, key):  # fmt: skip
    """Quantize rows. The first four arguments are constants: ``narrow`` means bfloat16, ``four`` int4."""
    bits = np.empty(group, np.int32)
    group_values = bits.view(np.float32)
    size = group // 2 if four else group
    for row in range(rows):
        for g in range(n // group):
            offset, start = row * stride + g * group, row * codes_stride + g * size
            _load(narrow, rotated, values[offset : offset + group], group_values)
            first = np.uint32((row * n + g * group) // 2)
            group_codes, scale_index = codes[start : start + size], row * scales_stride + g
            _encode_group(four, stochastic, bits, group_values, group_codes, scales, scale_index, key, first)


@inlined
def _decode(four, add, codes, scale, out):
    """Write one group's values to ``out``, or ``add`` them."""
    size = codes.size
    for i in range(size):
        if four:
            low = np.float32(np.int32(codes[i] & 15) - np.int32(8)) * scale
            high = np.float32(np.int32(codes[i] >> 4) - np.int32(8)) * scale
            out[size + i] = out[size + i] + high if add else high
        else:
            low = np.float32(np.int8(codes[i])) * scale
        out[i] = out[i] + low if add else low


@inlined
def _sum_group(four, codes, stride, scales, scales_stride, row, peers, g, size, total):
    """Write the sum of ``peers`` rows of group ``g``, from ``row`` on, to ``total``."""
    start = row * stride + g * size
    _decode(four, False, codes[start : start + size], scales[row * scales_stride + g], total)
    for peer in range(row + 1, row + peers):
        start = peer * stride + g * size
        _decode(four, True, codes[start : start + size], scales[peer * scales_stride + g], total)


@inlined
def _dequantize(four, rotated, summed, codes, stride, scales, scales_stride, out, out_stride, rows, n, peers, group,
                factor):  # fmt: skip
    """Make ``rows`` results, each ``factor`` * the sum of ``peers`` rows of codes. The first three are constants.

    Without ``summed``, each result is the values of one row, not transformed.
    """
    total = np.empty(group, np.float32)
    size = group // 2 if four else group
    for row in range(rows):
        for g in range(n // group):
            result = out[row * out_stride + g * group : row * out_stride + (g + 1) * group]
            if not summed:
                start = row * stride + g * size
                _decode(four, False, codes[start : start + size], scales[row * scales_stride + g], result)
                continue
            _sum_group(four, codes, stride, scales, scales_stride, row, peers, g, size, total)
            if rotated:
                _rotate(total, factor, result)
            else:
                _scaled(total, factor, result)


@inlined
def _requantize(four, stochastic, rotated, codes, stride, scales, scales_stride, peers, n, group, codes_out,
                scales_out, factor, key):  # fmt: skip
    """Encode ``factor`` * the sum of ``peers`` rows of codes. The first three are constants."""
    total = np.empty(group, np.float32)
    bits = np.empty(group, np.int32)
    group_values = bits.view(np.float32)
    size = group // 2 if four else group
    for g in range(n // group):
        _sum_group(four, codes, stride, scales, scales_stride, 0, peers, g, size, total)
        if rotated:
            _rotate(total, factor, total)
        else:
            _scale(total, factor)
        _load(False, rotated, total, group_values)
        group_codes, first = codes_out[g * size : (g + 1) * size], np.uint32(g * group // 2)
        _encode_group(four, stochastic, bits, group_values, group_codes, scales_out, g, key, first)


def _quantizer(narrow, four, stochastic, rotated):
    def quantize(*arguments):
        _quantize(narrow, four, stochastic, rotated, *arguments)

    return njit(quantize, f"{narrow:d}{four:d}{stochastic:d}{rotated:d}")


def _dequantizer(four, rotated, summed):
    def dequantize(*arguments):
        _dequantize(four, rotated, summed, *arguments)

    return njit(dequantize, f"{four:d}{rotated:d}{summed:d}")


def _requantizer(four, stochastic, rotated):
    def requantize(*arguments):
        _requantize(four, stochastic, rotated, *arguments)

    return njit(requantize, f"{four:d}{stochastic:d}{rotated:d}")


QUANTIZE = {flags: _quantizer(*flags) for flags in itertools.product((False, True), repeat=4)}
DEQUANTIZE = {flags: _dequantizer(*flags) for flags in itertools.product((False, True), repeat=3)}
REQUANTIZE = {flags: _requantizer(*flags) for flags in itertools.product((False, True), repeat=3)}


BLOCK = 1024  # elements summed at a time: the partial sums stay in the first-level cache


@njit
def _sum_rows(narrow, values, stride, rows, n, out, factor):
    total = np.empty(BLOCK, np.float32)
    for block in range(0, n, BLOCK):
        size = min(BLOCK, n - block)
        for row in range(rows):
            start = row * stride + block
            addend = values[start : start + size]
            if row == 0:
                for i in range(size):
                    total[i] = _wide(narrow, addend[i])
            else:
                for i in range(size):
                    total[i] += _wide(narrow, addend[i])
        _scaled(total, factor, out[block : block + size])


def _ranges(drawn: Seeds | None, n: int) -> list[tuple[int, int, np.uint32]]:
    """List the (first, last, key) of each segment in ``n`` columns."""
    ranges = [(0, n, 0)] if drawn is None else drawn.ranges
    return [(first, last, np.uint32(key_of(seed) & 0xFFFFFFFF)) for first, last, seed in ranges]


def quantize(rows: Tensor, format: Format, codes: Tensor, scales: Tensor, drawn: Seeds | None = None) -> None:
    bits, group = format.bits, format.group
    kernel = QUANTIZE[rows.dtype == torch.bfloat16, bits == 4, drawn is not None, format.hadamard]
    (values, stride), (octets, octets_stride) = flat(rows), flat(codes.view(torch.uint8))
    scale, scale_stride = flat(scales)
    for first, last, key in _ranges(drawn, rows.shape[1]):
        kernel(
            values[first:], stride, len(rows), last - first, group, octets[first * bits // 8 :], octets_stride,
            scale[first // group :], scale_stride, key,
        )  # fmt: skip


def decode(codes: Tensor, scales: Tensor, format: Format, out: Tensor, peers: int, factor: float) -> None:
    kernel = DEQUANTIZE[format.bits == 4, format.hadamard, peers > 1 or factor != 1.0]
    memory = *flat(codes.view(torch.uint8)), *flat(scales), *flat(out)
    kernel(*memory, *out.shape, peers, format.group, np.float32(factor))


def requantize(
    codes: Tensor, scales: Tensor, format: Format, codes_out: Tensor, scales_out: Tensor, factor: float,
    drawn: Seeds | None,
) -> None:  # fmt: skip
    bits, group = format.bits, format.group
    kernel = REQUANTIZE[bits == 4, drawn is not None, format.hadamard]
    (octets, octets_stride), (scale, scale_stride) = flat(codes.view(torch.uint8)), flat(scales)
    octets_out, scale_out = flat(codes_out.view(torch.uint8))[0], flat(scales_out)[0]
    for first, last, key in _ranges(drawn, scales.shape[1] * group):
        octet, number = first * bits // 8, first // group
        kernel(
            octets[octet:], octets_stride, scale[number:], scale_stride, len(codes), last - first, group,
            octets_out[octet:], scale_out[number:], np.float32(factor), key,
        )  # fmt: skip


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    _sum_rows(rows.dtype == torch.bfloat16, *flat(rows), *rows.shape, out.numpy(), np.float32(scale))
