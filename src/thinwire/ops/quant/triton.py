# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Triton, the same bits as ``reference``: launched without fusion, which would round once instead of twice."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.device import uploaded
from thinwire.base.random import Seeds
from thinwire.ops.gpu import alignment, along, cdiv, kernel, launch, row_of, segment_of, whole, wire_alignment
from thinwire.ops.programs import programs_on
from thinwire.ops.quant import reference
from thinwire.ops.quant.reference import Format

PER_PROGRAM = 4096  # elements of one row that one program handles

ORDER = tl.constexpr(reference.ORDER)
INT4_LEVELS, INT8_LEVELS = tl.constexpr(reference.INT4_LEVELS), tl.constexpr(reference.INT8_LEVELS)
NORM = tl.constexpr(reference.NORM)
MIX_1, MIX_2 = tl.constexpr(reference.MIX_1), tl.constexpr(reference.MIX_2)
TINY = tl.constexpr(reference.SMALLEST_SCALE)
ROUND = tl.constexpr(1.5 * 2**23)  # adding and subtracting it rounds |v| < 2^22 to the nearest integer, ties to even


@triton.jit
def _load(pointers, inside):
    return _widen(tl.load(pointers, mask=inside, other=0))


@triton.jit
def _widen(values):
    """Return float32. A shift widens bfloat16, which arrives as int16: the interpreter loses its denormals."""
    if values.dtype == tl.int16:
        return (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _magnitude(values):
    """Return the bits of |values| as int32: NaN and infinity are largest."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(largest, LEVELS: tl.constexpr):
    """Return every group's scale from its largest magnitude, NaN if that is not finite, and the reciprocal."""
    finite = largest < 0x7F800000
    scale = tl.maximum(largest.to(tl.float32, bitcast=True) * (1 / LEVELS), TINY)
    scale = tl.where(finite, tl.where(largest == 0, 1.0, scale), 1.0)
    per_scale = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(finite, scale, float("nan")), per_scale


@triton.jit
def _random(pair, key):
    word = (pair.to(tl.int32) ^ key).to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * tl.full((), MIX_1, tl.uint32)
    word = (word ^ (word >> 15)) * tl.full((), MIX_2, tl.uint32)
    return word ^ (word >> 16)


@triton.jit
def _stochastic(scaled, bits, LEVELS: tl.constexpr):
    fine = tl.floor(scaled * 65536.0 + 0.5).to(tl.int32)
    fine = tl.minimum(tl.maximum(fine, -LEVELS * 65536), LEVELS * 65536)
    return (fine + bits.to(tl.int32)) >> 16


@triton.jit
def _load_codes(codes, byte, inside, HALF: tl.constexpr, FOUR: tl.constexpr):
    """Load the codes of ``_encode`` as float32."""
    if FOUR:
        pair = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
        return ((pair & 15) - 8).to(tl.float32), ((pair >> 4) - 8).to(tl.float32)
    else:
        low = tl.load(codes + byte, mask=inside, other=0)
        high = tl.load(codes + byte + HALF, mask=inside, other=0)
        return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _group_elements(g, GROUP: tl.constexpr, FOUR: tl.constexpr):
    """Return the groups ``g`` (int64), the indices of their low halves' elements, and those elements' bytes."""
    lane = tl.arange(0, GROUP // 2)[None, :]
    return g, g[:, None] * GROUP + lane, g[:, None] * (GROUP // 2 if FOUR else GROUP) + lane


@triton.jit
def _rotate(low, high, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Multiply the Hadamard matrix of +-1 with every 32 neighbours of groups (BLOCK, GROUP), given as halves.

    Each of five levels does butterflies of neighbours: sums become the first half, differences the second one. This
    moves the last bit of an element's index to the front, so every bit has its turn.
    """
    x = tl.permute(tl.join(low, high), (0, 2, 1))
    for _ in tl.static_range(5):
        a, b = tl.split(tl.reshape(x, (BLOCK * GROUP // ORDER, ORDER // 2, 2)))
        x = tl.permute(tl.join(a + b, a - b), (0, 2, 1))
    return tl.split(tl.permute(tl.reshape(x, (BLOCK, 2, GROUP // 2)), (0, 2, 1)))


@triton.jit
def _program(
    groups, programs, segments, keys, row, BLOCK: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Return ``_group_elements`` of this program's groups, their end, their pairs of elements, and the key.

    A line of ``segments`` holds a segment's first group, its number of groups, and the index of its key.
    """
    if STOCHASTIC:
        _, _, segment, g = segment_of(programs, segments, BLOCK, 3)
        key = tl.load(keys + tl.load(segment + 2))
        first, groups = tl.load(segment).to(tl.int64), tl.load(segment + 1).to(tl.int64)
        g, element, byte = _group_elements(first + g, GROUP, FOUR)
        pair = (row * groups + g - first)[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        return g, element, byte, first + groups, pair, key
    else:
        g, element, byte = _group_elements(tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), GROUP, FOUR)
        return g, element, byte, tl.cast(groups, tl.int64), element, 0


@triton.jit
def _encode(
    low, high, codes, byte, scales, g, last, pair, key, GROUP: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr,
    STOCHASTIC: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Quantize a row's groups ``g`` < ``last``: values ``low`` (codes at ``byte``) and ``high``, half a group later.

    Return what these decode to, before a transform is undone.
    """
    LEVELS: tl.constexpr = INT4_LEVELS if FOUR else INT8_LEVELS
    if ROTATED:
        low, high = _rotate(low * NORM, high * NORM, BLOCK, GROUP)
    largest = tl.max(tl.maximum(_magnitude(low), _magnitude(high)), axis=1)
    scale, per_scale = _scale_of(largest, LEVELS)
    tl.store(scales + g, scale, mask=g < last)
    inside, finite = (g < last)[:, None], (largest < 0x7F800000)[:, None]
    low, high = tl.where(finite, low, 0.0) * per_scale[:, None], tl.where(finite, high, 0.0) * per_scale[:, None]
    if STOCHASTIC:
        word = _random(pair, key)
        low, high = _stochastic(low, word & 0xFFFF, LEVELS), _stochastic(high, word >> 16, LEVELS)
    else:
        low, high = ((low + ROUND) - ROUND).to(tl.int32), ((high + ROUND) - ROUND).to(tl.int32)
    if FOUR:
        tl.store(codes + byte, (low + (high << 4) + 0x88).to(tl.uint8), mask=inside)
    else:
        tl.store(codes + byte, low.to(tl.int8), mask=inside)
        tl.store(codes + byte + GROUP // 2, high.to(tl.int8), mask=inside)
    return low.to(tl.float32) * scale[:, None], high.to(tl.float32) * scale[:, None]


@triton.jit
def _sum(
    codes, codes_stride, scales, scales_stride, row, peers, factor, g, byte, last, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, FOUR: tl.constexpr, ROTATED: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Return ``factor`` * the sum of ``peers`` rows from ``row`` on, or its transform, in groups ``g`` < ``last``."""
    HALF: tl.constexpr = GROUP // 2
    inside = (g < last)[:, None]
    scale = tl.load(scales + row * scales_stride + g, mask=g < last, other=0.0)[:, None]
    low, high = _load_codes(row_of(codes, codes_stride, row, WIRE), byte, inside, HALF, FOUR)
    low, high = low * scale, high * scale
    for peer in range(1, peers):
        scale = tl.load(scales + (row + peer) * scales_stride + g, mask=g < last, other=0.0)[:, None]
        more_low, more_high = _load_codes(row_of(codes, codes_stride, row + peer, WIRE), byte, inside, HALF, FOUR)
        low += more_low * scale
        high += more_high * scale
    low, high = low * factor, high * factor
    if ROTATED:
        low, high = _rotate(low, high, BLOCK, GROUP)
    return low, high


@kernel
def _quantize(
    rows, rows_stride, codes, codes_stride, scales, scales_stride, groups, programs, segments, keys,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr, STOCHASTIC: tl.constexpr, ROTATED: tl.constexpr,
    WIRE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    g, element, byte, last, pair, key = _program(groups, programs, segments, keys, row, BLOCK, GROUP, FOUR, STOCHASTIC)
    inside = (g < last)[:, None]
    rows = row_of(rows, rows_stride, row, 16 if WIRE > 1 else 1)
    low, high = _load(rows + element, inside), _load(rows + element + GROUP // 2, inside)
    _encode(
        low, high, row_of(codes, codes_stride, row, WIRE), byte, scales + row * scales_stride, g, last, pair, key,
        GROUP, BLOCK, FOUR, STOCHASTIC, ROTATED,
    )  # fmt: skip


@kernel
def _dequantize(
    codes, codes_stride, scales, scales_stride, out, out_stride, factor, peers, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr, ROTATED: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Set every row of ``out`` to ``factor`` * the sum of ``peers`` rows of codes from its own on, or its transform."""
    row = tl.program_id(1).to(tl.int64)
    g, element, byte = _group_elements(tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), GROUP, FOUR)
    low, high = _sum(
        codes, codes_stride, scales, scales_stride, row, peers, factor, g, byte, groups, GROUP, BLOCK, FOUR, ROTATED,
        WIRE,
    )  # fmt: skip
    inside = (g < groups)[:, None]
    out = row_of(out, out_stride, row, 16 if WIRE > 1 else 1)
    tl.store(out + element, low, mask=inside)
    tl.store(out + element + GROUP // 2, high, mask=inside)


@kernel
def _requantize(
    codes, codes_stride, scales, scales_stride, out, out_stride, scales_out, factor, peers, groups, programs, segments,
    keys, GROUP: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr, STOCHASTIC: tl.constexpr,
    ROTATED: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Encode the result of ``_dequantize`` of ``peers`` rows to one row, ``out`` and ``scales_out``."""
    row = tl.program_id(1).to(tl.int64)
    g, _, byte, last, pair, key = _program(groups, programs, segments, keys, row, BLOCK, GROUP, FOUR, STOCHASTIC)
    low, high = _sum(
        codes, codes_stride, scales, scales_stride, row, peers, factor, g, byte, last, GROUP, BLOCK, FOUR, ROTATED, WIRE
    )
    _encode(
        low, high, row_of(out, out_stride, row, WIRE), byte, scales_out, g, last, pair, key, GROUP, BLOCK, FOUR,
        STOCHASTIC, ROTATED,
    )  # fmt: skip


@kernel
def _sum_rows(rows, rows_stride, out, factor, count, n, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < whole(n, ALIGN)
    total = _load(along(rows, element, ALIGN), inside)
    for row in range(1, count):
        total += _load(row_of(rows, rows_stride, row, ALIGN) + element, inside)
    tl.store(along(out, element, ALIGN), total * factor, mask=inside)


def _words(rows: Tensor) -> Tensor:
    return rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows


def _constants(format: Format) -> dict[str, Any]:
    block = max(1, PER_PROGRAM // format.group)
    return {"GROUP": format.group, "BLOCK": block, "FOUR": format.bits == 4, "ROTATED": format.hadamard}


def _draw(
    drawn: Seeds | None, groups: int, constants: dict[str, Any], device: torch.device
) -> tuple[int, tuple[Tensor | None, ...]]:
    """Return the number of programs for a row's ``groups``, and the programs, segments and keys of random bits."""
    block, group = constants["BLOCK"], constants["GROUP"]
    if drawn is None:
        return cdiv(groups, block), (None, None, None)
    keys, key_indices = drawn.keys(device)
    table: list[int] = []
    for (first, last, _), key_index in zip(drawn.ranges, key_indices, strict=True):
        table += [first // group, (last - first) // group, key_index]
    programs = programs_on(device, table[1::3], block)
    return len(programs) // 2, (programs, uploaded(table, device), keys)


def quantize(rows: Tensor, format: Format, codes: Tensor, scales: Tensor, drawn: Seeds | None = None) -> None:
    groups, constants = scales.shape[1], _constants(format)
    programs, tables = _draw(drawn, groups, constants, rows.device)
    launch(
        _quantize, (programs, len(rows)), _words(rows), codes, scales, groups, *tables, STOCHASTIC=drawn is not None,
        WIRE=wire_alignment(codes, rows), **constants,
    )  # fmt: skip


def decode(codes: Tensor, scales: Tensor, format: Format, out: Tensor, peers: int, factor: float) -> None:
    """Decode ``peers`` rows of codes into each row of ``out`` (R, n); R or ``peers`` is 1."""
    groups, constants = scales.shape[1], _constants(format)
    launch(
        _dequantize, (cdiv(groups, constants["BLOCK"]), len(out)), codes, scales, out, factor, peers, groups,
        WIRE=wire_alignment(codes, out), **constants,
    )  # fmt: skip


def requantize(
    codes: Tensor, scales: Tensor, format: Format, codes_out: Tensor, scales_out: Tensor, factor: float,
    drawn: Seeds | None,
) -> None:  # fmt: skip
    groups, constants = scales.shape[1], _constants(format)
    programs, tables = _draw(drawn, groups, constants, codes.device)
    wire = min(wire_alignment(codes), wire_alignment(codes_out))
    launch(
        _requantize, (programs, 1), codes, scales, codes_out, scales_out[0], factor, len(codes), groups, *tables,
        STOCHASTIC=drawn is not None, WIRE=wire, **constants,
    )  # fmt: skip


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    count, n = rows.shape
    launch(
        _sum_rows, (cdiv(n, PER_PROGRAM),), _words(rows), out, scale, count, n, BLOCK=PER_PROGRAM,
        ALIGN=alignment(rows, out),
    )  # fmt: skip
