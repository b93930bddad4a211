# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"
"""Triton kernels for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``), the same bits as ``reference``.

Launched without floating-point fusion: a product contracted into an addition would round once instead of twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.quant.triton import _load

PER_PROGRAM = 4096  # elements of one row that one program handles


@triton.jit
def _places(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Of the program's groups: numbers; elements (BLOCK, 8, GROUP / 8); bytes (BLOCK, GROUP / 8); places of bits."""
    PART: tl.constexpr = GROUP // 8
    g = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 8)[None, :, None]
    byte = tl.arange(0, PART)
    return g, g[:, None, None] * GROUP + place * PART + byte[None, None, :], g[:, None] * PART + byte[None, :], place


@triton.jit
def _pack(
    rows, rows_stride, shares, shares_stride, bits, bits_stride, scales, scales_stride, groups,
    GROUP: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, RMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    g, at, to, place = _places(BLOCK, GROUP)
    values = _load(rows + row * rows_stride + at, (g < groups)[:, None, None])
    share = tl.load(shares + row * shares_stride + g, mask=g < groups, other=0.0)
    terms = tl.reshape((values * values if RMS else tl.abs(values)) * share[:, None, None], (BLOCK, GROUP))
    for level in tl.static_range(LEVELS):
        terms = tl.sum(tl.reshape(terms, (BLOCK, 2, GROUP >> (level + 1))), axis=1)
    scale = tl.sum(terms, axis=1)  # of one
    byte = tl.sum((values < 0).to(tl.int32) << place, axis=1)
    tl.store(bits + row * bits_stride + to, byte.to(tl.uint8), mask=(g < groups)[:, None])
    tl.store(scales + row * scales_stride + g, tl.sqrt_rn(scale) if RMS else scale, mask=g < groups)


@triton.jit
def _unpack(
    bits, bits_stride, scales, scales_stride, out, out_stride, factor, peers, groups,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every row of ``out``: ``factor`` * the sum of ``peers`` rows of bits from there on."""
    row = tl.program_id(1).to(tl.int64)
    g, at, to, place = _places(BLOCK, GROUP)
    inside = g < groups
    bits += row * bits_stride
    scales += row * scales_stride
    byte = tl.load(bits + to, mask=inside[:, None], other=0).to(tl.int32)[:, None, :]
    scale = tl.load(scales + g, mask=inside, other=0.0)[:, None, None]
    total = (1 - 2 * (byte >> place & 1)).to(tl.float32) * scale
    for _ in range(1, peers):
        bits += bits_stride
        scales += scales_stride
        byte = tl.load(bits + to, mask=inside[:, None], other=0).to(tl.int32)[:, None, :]
        scale = tl.load(scales + g, mask=inside, other=0.0)[:, None, None]
        total += (1 - 2 * (byte >> place & 1)).to(tl.float32) * scale
    tl.store(out + row * out_stride + at, total * factor, mask=inside[:, None, None])


def _launch(kernel: Any, count: int, groups: int, group: int, out: Tensor, *arguments: Any, **constants: int) -> None:
    block = max(1, PER_PROGRAM // group)
    with torch.cuda.device_of(out):
        kernel[(triton.cdiv(groups, block), count)](
            *arguments, groups, GROUP=group, BLOCK=block, **constants, enable_fp_fusion=False
        )


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, rms: bool) -> None:
    words = rows.view(torch.int16) if rows.dtype == torch.bfloat16 else rows
    arguments = [each for tensor in (words, shares, bits, scales) for each in (tensor, tensor.stride(0))]
    levels = group.bit_length() - 1
    _launch(_pack, len(rows), rows.shape[1] // group, group, bits, *arguments, LEVELS=levels, RMS=rms)


def _decode(bits: Tensor, scales: Tensor, peers: int, group: int, out: Tensor, factor: float) -> None:
    """``out`` (R, n) of ``peers`` rows of bits each; R or ``peers`` is 1."""
    arguments = [each for tensor in (bits, scales, out) for each in (tensor, tensor.stride(0))]
    _launch(_unpack, len(out), out.shape[1] // group, group, out, *arguments, factor, peers)


def unpack(bits: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _decode(bits, scales, 1, group, out, 1.0)


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _decode(bits, scales, len(bits), group, out.unsqueeze(0), scale)
