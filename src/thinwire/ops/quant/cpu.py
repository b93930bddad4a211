# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, call-arg"
"""Numba kernels for CPU tensors, the same bits as ``reference``.

Without ``fastmath``: reordering or fusing would change results. A kernel sees each tensor as one flat array and the
distance between its rows, because LLVM vectorises only where it knows that neighbours are adjacent. bfloat16, which
numba lacks, arrives as uint16 and is widened by a shift. One thread: ranks share the machine's cores, and every kernel
releases the GIL.

What runs once per group is compiled into its caller: a call would count references to every slice that it is handed,
which costs as much as quantizing 128 values. Hence also the kernels' flags, constants by which each becomes one
straight loop.
"""

from __future__ import annotations

import itertools

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.base.random import Drawn, key_of
from thinwire.ops.kernels import flat, njit
from thinwire.ops.quant import reference
from thinwire.ops.quant.reference import (
    INT4_LEVELS,
    INT8_LEVELS,
    MIX_1,
    MIX_2,
    NORM,
    ORDER,
    SMALLEST_SCALE,
    Format,
)

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

inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)


@inlined
def _real(bits):
    return np.int32(bits).view(np.float32)


@inlined
def _scale_of(bits, per_level):
    """Scale of a group from the bit patterns of its values: as int32 the maximum vectorises, and NaN is largest."""
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
    """The integer in the lowest byte: it is what ends the mantissa of a number of the size of ROUND."""
    return np.float32(value * per_scale + ROUND).view(np.int32)


@inlined
def _random(pair):
    """32 random bits: the high 16 for the pair's second element."""
    word = np.uint32(pair)
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * MIX[0])
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(15))) * MIX[1])
    return np.uint32(word ^ (word >> np.uint32(16)))


@inlined
def _stochastic(value, per_scale, bits, levels):
    fine = np.int32(np.floor(value * per_scale * FINE + HALF))
    fine = max(min(fine, np.int32(levels << 16)), np.int32(-(levels << 16)))
    return np.int32(fine + np.int32(bits)) >> np.int32(16)


@inlined
def _encode_int8(values, per_scale, codes):
    for i in range(codes.size):
        codes[i] = np.uint8(_nearest(values[i], per_scale))


@inlined
def _encode_int4(values, per_scale, codes):
    half = codes.size
    for i in range(half):
        low, high = _nearest(values[i], per_scale), _nearest(values[half + i], per_scale)
        codes[i] = np.uint8(np.int32(low + (high << np.int32(4))) + np.int32(0x88))


@inlined
def _encode_int8_stochastic(values, per_scale, codes, key, first):
    half = codes.size // 2
    for i in range(half):
        word = _random(key ^ np.uint32(first + np.uint32(i)))
        codes[i] = np.uint8(_stochastic(values[i], per_scale, word & np.uint32(0xFFFF), INT8_LEVELS))
        codes[half + i] = np.uint8(_stochastic(values[half + i], per_scale, word >> np.uint32(16), INT8_LEVELS))


@inlined
def _encode_int4_stochastic(values, per_scale, codes, key, first):
    half = codes.size
    for i in range(half):
        word = _random(key ^ np.uint32(first + np.uint32(i)))
        low = _stochastic(values[i], per_scale, word & np.uint32(0xFFFF), INT4_LEVELS)
        high = _stochastic(values[half + i], per_scale, word >> np.uint32(16), INT4_LEVELS)
        codes[i] = np.uint8(np.int32(low + (high << np.int32(4))) + np.int32(0x88))


@inlined
def _encode(four, stochastic, values, per_scale, codes, key, first):
    """Quantize one group, whose first pair has number ``first``."""
    if four and stochastic:
        _encode_int4_stochastic(values, per_scale, codes, key, first)
    elif four:
        _encode_int4(values, per_scale, codes)
    elif stochastic:
        _encode_int8_stochastic(values, per_scale, codes, key, first)
    else:
        _encode_int8(values, per_scale, codes)


@inlined
def _widen(narrow, bits):
    for i in range(narrow.size):
        bits[i] = np.int32(np.uint32(narrow[i]) << np.uint32(16))


@inlined
def _scaled(values, factor, out):
    for i in range(out.size):
        out[i] = values[i] * factor


def _shuffled(builder, vector, places):
    """Element i is element ``places[i]`` of ``vector``."""
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), LANES), places))


def _butterflies(builder, vector, step):
    """a + b and a - b of the elements ``step`` apart: each one's partner, plus or minus itself.

    The product with +-1 is exact, so that it may be fused into the addition.
    """
    sign = ir.Constant(VECTOR, [-1.0 if i & step else 1.0 for i in range(LANES)])
    partner = _shuffled(builder, vector, [i ^ step for i in range(LANES)])
    return builder.fadd(builder.fmul(vector, sign, flags=("contract",)), partner, flags=("contract",))


def _vectors(context, builder, kind, array, first):
    """Where the vectors of the 32 values from ``array[first]`` are."""
    data = context.make_array(kind)(context, builder, array).data
    start = builder.bitcast(builder.gep(data, [first]), VECTOR.as_pointer())
    return [builder.gep(start, [ir.IntType(32)(i)]) for i in range(ORDER // LANES)]


@intrinsic
def _rotate_32(typing_context, values, first, factor, out, to):
    """The Hadamard matrix of +-1 times ``factor`` * 32 ``values`` from ``first`` -> ``out`` from ``to``.

    In LLVM's own vectors: loops over neighbours that are 1 to 8 apart compile to something 8 times slower.
    """

    def generate(context, builder, signature, arguments):
        values, first, factor, out, to = arguments
        factors = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), factor, ir.IntType(32)(0))
        factors = _shuffled(builder, factors, [0] * LANES)
        sources = _vectors(context, builder, signature.args[0], values, first)
        targets = _vectors(context, builder, signature.args[3], out, to)
        low, high = (builder.fmul(builder.load(source, align=4), factors) for source in sources)
        for step in (1, 2, 4, 8):
            low, high = _butterflies(builder, low, step), _butterflies(builder, high, step)
        builder.store(builder.fadd(low, high), targets[0], align=4)
        builder.store(builder.fsub(low, high), targets[1], align=4)
        return context.get_dummy_value()

    return types.void(values, first, factor, out, to), generate


@inlined
def _rotate(values, factor, out):
    """The transform of every 32 of ``factor`` * ``values`` -> ``out``, which may be ``values``."""
    for first in range(0, out.size, ORDER):
        _rotate_32(values, first, factor, out, first)


@inlined
def _load(narrow, rotated, values, bits, own):
    """One group as float32, transformed if ``rotated``, -> ``own``, whose bits are ``bits``."""
    if narrow:
        _widen(values, bits)
        if rotated:
            _rotate(own, NORM_32, own)
    elif rotated:
        _rotate(values, NORM_32, own)
    else:
        _scaled(values, ONE, own)


@inlined
def _encode_group(four, stochastic, bits, own, codes, scales, at, key, first):
    """Codes of the values ``own``, whose bits are ``bits``, and their scale, which is number ``at`` of ``scales``."""
    scale = _scale_of(bits, PER_LEVEL_INT4 if four else PER_LEVEL_INT8)
    scales[at] = scale
    if np.isnan(scale):
        own.fill(0)  # its codes are 0
    per_scale = ONE if np.isnan(scale) else ONE / scale
    _encode(four, stochastic, own, per_scale, codes, key, first)


@inlined
def _quantize(narrow, four, stochastic, rotated, values, stride, rows, n, group, codes, to_stride, scales,
              scales_stride, key):  # fmt: skip
    """The first four are constants: ``narrow`` for bfloat16, ``four`` for int4."""
    bits = np.empty(group, np.int32)
    own = bits.view(np.float32)
    size = group // 2 if four else group
    for row in range(rows):
        for g in range(n // group):
            at, to = row * stride + g * group, row * to_stride + g * size
            _load(narrow, rotated, values[at : at + group], bits, own)
            first = np.uint32((row * n + g * group) // 2)
            _encode_group(
                four, stochastic, bits, own, codes[to : to + size], scales, row * scales_stride + g, key, first
            )


@inlined
def _decode_int8(codes, scale, out):
    for i in range(codes.size):
        out[i] = np.float32(np.int8(codes[i])) * scale


@inlined
def _decode_int4(codes, scale, out):
    half = codes.size
    for i in range(half):
        out[i] = np.float32(np.int32(codes[i] & 15) - np.int32(8)) * scale
        out[half + i] = np.float32(np.int32(codes[i] >> 4) - np.int32(8)) * scale


@inlined
def _add_int8(codes, scale, total):
    for i in range(codes.size):
        total[i] += np.float32(np.int8(codes[i])) * scale


@inlined
def _add_int4(codes, scale, total):
    half = codes.size
    for i in range(half):
        total[i] += np.float32(np.int32(codes[i] & 15) - np.int32(8)) * scale
        total[half + i] += np.float32(np.int32(codes[i] >> 4) - np.int32(8)) * scale


@inlined
def _decode(four, codes, scale, out):
    if four:
        _decode_int4(codes, scale, out)
    else:
        _decode_int8(codes, scale, out)


@inlined
def _add_decoded(four, codes, scale, total):
    if four:
        _add_int4(codes, scale, total)
    else:
        _add_int8(codes, scale, total)


@inlined
def _sum_group(four, codes, stride, scales, scales_stride, row, peers, g, size, total):
    """The sum of ``peers`` rows of group ``g``, from ``row`` on -> ``total``."""
    start = row * stride + g * size
    _decode(four, codes[start : start + size], scales[row * scales_stride + g], total)
    for peer in range(row + 1, row + peers):
        start = peer * stride + g * size
        _add_decoded(four, codes[start : start + size], scales[peer * scales_stride + g], total)


@inlined
def _dequantize(four, rotated, summed, codes, stride, scales, scales_stride, rows, peers, n, group, out, to_stride,
                factor):  # fmt: skip
    """``rows`` results, each ``factor`` * the sum of ``peers`` rows of codes. The first three are constants.

    Not ``summed``: each the values of one row, not transformed.
    """
    total = np.empty(group, np.float32)
    size = group // 2 if four else group
    for row in range(rows):
        for g in range(n // group):
            result = out[row * to_stride + g * group : row * to_stride + (g + 1) * group]
            if not summed:
                start = row * stride + g * size
                _decode(four, codes[start : start + size], scales[row * scales_stride + g], result)
                continue
            _sum_group(four, codes, stride, scales, scales_stride, row, peers, g, size, total)
            if rotated:
                _rotate(total, factor, result)
            else:
                _scaled(total, factor, result)


@inlined
def _requantize(four, stochastic, rotated, codes, stride, scales, scales_stride, peers, n, group, codes_out,
                scales_out, factor, key):  # fmt: skip
    """Codes of ``factor`` * the sum of ``peers`` rows of codes. The first three are constants."""
    total = np.empty(group, np.float32)
    bits = np.empty(group, np.int32)
    own = bits.view(np.float32)
    size = group // 2 if four else group
    for g in range(n // group):
        _sum_group(four, codes, stride, scales, scales_stride, 0, peers, g, size, total)
        if rotated:
            _rotate(total, factor, total)
        else:
            _scaled(total, factor, total)
        _load(False, rotated, total, bits, own)
        at, first = g * size, np.uint32(g * group // 2)
        _encode_group(four, stochastic, bits, own, codes_out[at : at + size], scales_out, g, key, first)


def _quantizer(*flags):
    narrow, four, stochastic, rotated = flags

    def quantize(*arguments):
        _quantize(narrow, four, stochastic, rotated, *arguments)

    return _compiled(quantize, flags)


def _dequantizer(*flags):
    four, rotated, summed = flags

    def dequantize(*arguments):
        _dequantize(four, rotated, summed, *arguments)

    return _compiled(dequantize, flags)


def _requantizer(*flags):
    four, stochastic, rotated = flags

    def requantize(*arguments):
        _requantize(four, stochastic, rotated, *arguments)

    return _compiled(requantize, flags)


def _compiled(kernel, flags):
    # An index file of its own in numba's cache: in one that several kernels share, ranks that save two of them at the
    # same time can leave the one under the other's name.
    kernel.__qualname__ += "".join(str(int(flag)) for flag in flags)
    return njit(kernel)


QUANTIZE = {flags: _quantizer(*flags) for flags in itertools.product((False, True), repeat=4)}
DEQUANTIZE = {flags: _dequantizer(*flags) for flags in itertools.product((False, True), repeat=3)}
REQUANTIZE = {flags: _requantizer(*flags) for flags in itertools.product((False, True), repeat=3)}


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




def quantize(rows: Tensor, format: Format, codes: Tensor, scales: Tensor, seed: int | None = None) -> None:
    kernel = QUANTIZE[rows.dtype == torch.bfloat16, format.bits == 4, seed is not None, format.hadamard]
    key = np.uint32(key_of(seed or 0) & 0xFFFFFFFF)
    kernel(*flat(rows), *rows.shape, format.group, *flat(codes.view(torch.uint8)), *flat(scales), key)


def quantize_parts(rows: Tensor, format: Format, codes: Tensor, scales: Tensor, drawn: Drawn) -> None:
    reference.quantize_parts(rows, format, codes, scales, drawn, quantize)


def dequantize(codes: Tensor, scales: Tensor, format: Format, out: Tensor) -> None:
    _values(codes, scales, 1, format, out, 1.0, summed=False)


def dequantize_sum(codes: Tensor, scales: Tensor, format: Format, out: Tensor, scale: float) -> None:
    _values(codes, scales, len(codes), format, out.unsqueeze(0), scale, summed=True)


def _values(
    codes: Tensor, scales: Tensor, peers: int, format: Format, out: Tensor, scale: float, *, summed: bool
) -> None:
    kernel = DEQUANTIZE[format.bits == 4, format.hadamard, summed or format.hadamard]
    factor = np.float32(scale * NORM if format.hadamard else scale)
    (to, to_stride), (count, n) = flat(out), out.shape
    kernel(*flat(codes.view(torch.uint8)), *flat(scales), count, peers, n, format.group, to, to_stride, factor)


def requantize(
    codes: Tensor, scales: Tensor, format: Format, codes_out: Tensor, scales_out: Tensor, scale: float,
    drawn: Drawn | None,
) -> None:  # fmt: skip
    bits, group = format.bits, format.group
    kernel = REQUANTIZE[bits == 4, drawn is not None, format.hadamard]
    factor = np.float32(scale * NORM if format.hadamard else scale)
    for first, last, seed in [(0, scales.shape[1] * group, 0)] if drawn is None else drawn.ranges:
        at, groups = slice(first * bits // 8, last * bits // 8), slice(first // group, last // group)
        (result, _), (result_scales, _) = flat(codes_out[:, at].view(torch.uint8)), flat(scales_out[:, groups])
        kernel(
            *flat(codes[:, at].view(torch.uint8)), *flat(scales[:, groups]), len(codes), last - first, group, result,
            result_scales, factor, np.uint32(key_of(seed) & 0xFFFFFFFF),
        )  # fmt: skip


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    kernel = _sum_rows_bf16 if rows.dtype == torch.bfloat16 else _sum_rows
    kernel(*flat(rows), *rows.shape, out.numpy(), np.float32(scale))
