# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Triton, the same bits as ``reference``: launched without fusion, which would round once instead of twice."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import cdiv, kernel, launch, row_of, wire_alignment
from thinwire.ops.quant.triton import _load, _words

PER_PROGRAM = 4096  # elements of one row that one program handles


@triton.jit
def _group_elements(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return the program's groups, elements (BLOCK, 8, GROUP / 8), bytes (BLOCK, GROUP / 8) and bits (1, 8, 1)."""
    SIZE: tl.constexpr = GROUP // 8
    g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)[None, :, None]
    byte = tl.arange(0, SIZE)
    return g, g[:, None, None] * GROUP + bit * SIZE + byte[None, None, :], g[:, None] * SIZE + byte[None, :], bit


@kernel
def _pack(
    rows, rows_stride, shares, shares_stride, bits, bits_stride, scales, scales_stride, groups,
    GROUP: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    g, element, target, bit = _group_elements(BLOCK, GROUP)
    values = _load(row_of(rows, rows_stride, row, 16 if WIRE > 1 else 1) + element, (g < groups)[:, None, None])
    share = tl.load(shares + row * shares_stride + g, mask=g < groups, other=0.0)
    terms = tl.reshape((values * values if RMS else tl.abs(values)) * share[:, None, None], (BLOCK, GROUP))
    for level in tl.static_range(LEVELS):
        terms = tl.sum(tl.reshape(terms, (BLOCK, 2, GROUP >> (level + 1))), axis=1)
    scale = tl.sum(terms, axis=1)  # of one
    byte = tl.sum((values < 0).to(tl.int32) << bit, axis=1)
    tl.store(row_of(bits, bits_stride, row, WIRE) + target, byte.to(tl.uint8), mask=(g < groups)[:, None])
    tl.store(scales + row * scales_stride + g, tl.sqrt_rn(scale) if RMS else scale, mask=g < groups)


@triton.jit
def _signs(bits, scales, source, g, inside, bit):
    """Return + or - scale for every element."""
    byte = tl.load(bits + source, mask=inside[:, None], other=0).to(tl.int32)[:, None, :]
    scale = tl.load(scales + g, mask=inside, other=0.0)[:, None, None]
    return (1 - 2 * (byte >> bit & 1)).to(tl.float32) * scale


@kernel
def _unpack(
    bits, bits_stride, scales, scales_stride, out, out_stride, factor, peers, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Set every row of ``out`` to ``factor`` * the sum of ``peers`` rows of bits from its own on."""
    row = tl.program_id(1).to(tl.int64)
    g, element, source, bit = _group_elements(BLOCK, GROUP)
    inside = g < groups
    total = _signs(row_of(bits, bits_stride, row, WIRE), scales + row * scales_stride, source, g, inside, bit)
    for peer in range(1, peers):
        wire = row_of(bits, bits_stride, row + peer, WIRE)
        total += _signs(wire, scales + (row + peer) * scales_stride, source, g, inside, bit)
    out = row_of(out, out_stride, row, 16 if WIRE > 1 else 1)
    tl.store(out + element, total * factor, mask=inside[:, None, None])


def _blocks(rows: Tensor, group: int) -> tuple[int, int, tuple[int, int]]:
    """Return the groups of a row, groups per program, and the grid."""
    groups, block = rows.shape[1] // group, max(1, PER_PROGRAM // group)
    return groups, block, (cdiv(groups, block), len(rows))


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, rms: bool) -> None:
    groups, block, grid = _blocks(rows, group)
    launch(
        _pack, grid, _words(rows), shares, bits, scales, groups, GROUP=group, LEVELS=group.bit_length() - 1,
        BLOCK=block, RMS=rms, WIRE=wire_alignment(bits, rows),
    )  # fmt: skip


def _decode(bits: Tensor, scales: Tensor, peers: int, group: int, out: Tensor, factor: float) -> None:
    """Decode ``peers`` rows of bits into each row of ``out`` (R, n); R or ``peers`` is 1."""
    groups, block, grid = _blocks(out, group)
    launch(
        _unpack, grid, bits, scales, out, factor, peers, groups, GROUP=group, BLOCK=block,
        WIRE=wire_alignment(bits, out),
    )  # fmt: skip


def unpack(bits: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _decode(bits, scales, 1, group, out, 1.0)


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _decode(bits, scales, len(bits), group, out.unsqueeze(0), scale)
