# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba, the same bits as ``reference``. Every inner loop runs over neighbours, so that LLVM vectorises it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.kernels import by_row, flat, njit


@njit
def _scale_of(values, share, rms, sums):
    """Return the group's scale; ``sums`` (group / 2,) is scratch."""
    half = sums.size
    low, high = values[:half], values[half:]
    if rms:
        for i in range(half):
            sums[i] = low[i] * low[i] * share + high[i] * high[i] * share
    else:
        for i in range(half):
            sums[i] = abs(low[i]) * share + abs(high[i]) * share
    while half > 1:
        half //= 2
        low, high = sums[:half], sums[half : 2 * half]
        for i in range(half):
            low[i] += high[i]
    return np.sqrt(sums[0]) if rms else sums[0]


@njit
def _signs(values, bits):
    size = bits.size
    bits[:] = 0
    for j in range(8):
        bit, eighth = np.uint8(1 << j), values[j * size : (j + 1) * size]
        for i in range(size):
            bits[i] |= bit if eighth[i] < 0 else np.uint8(0)


@njit
def _pack_group(values, g, shares, bits, scales, rms, sums):
    size = values.size // 8
    scales[g] = _scale_of(values, shares[g], rms, sums)
    _signs(values, bits[g * size : (g + 1) * size])


@by_row
def _pack(values, group, shares, bits, scales, rms):
    sums = np.empty(group // 2, np.float32)
    for g in range(scales.size):
        _pack_group(values[g * group : (g + 1) * group], g, shares, bits, scales, rms, sums)


@by_row
def _pack_bf16(narrow, group, shares, bits, scales, rms):
    sums, wide = np.empty(group // 2, np.float32), np.empty(group, np.int32)
    for g in range(scales.size):
        for i in range(group):
            wide[i] = np.int32(np.uint32(narrow[g * group + i]) << np.uint32(16))
        _pack_group(wide.view(np.float32), g, shares, bits, scales, rms, sums)


@njit
def _decode(bits, scale, out, add):
    """Write one group's values to ``out``, or ``add`` them."""
    size = bits.size
    for j in range(8):
        eighth = out[j * size : (j + 1) * size]
        for i in range(size):
            value = np.float32(1 - 2 * (np.int32(bits[i]) >> j & 1)) * scale
            eighth[i] = eighth[i] + value if add else value


@by_row
def unpack(bits, scales, group, out):
    size = group // 8
    for g in range(scales.size):
        _decode(bits[g * size : (g + 1) * size], scales[g], out[g * group : (g + 1) * group], False)


@njit
def _unpack_sum(bits, stride, scales, scales_stride, peers, group, out, factor):
    size, total = group // 8, np.empty(group, np.float32)
    for g in range(out.size // group):
        _decode(bits[g * size : (g + 1) * size], scales[g], total, False)
        for row in range(1, peers):
            start = row * stride + g * size
            _decode(bits[start : start + size], scales[row * scales_stride + g], total, True)
        for i in range(group):
            out[g * group + i] = total[i] * factor


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, rms: bool) -> None:
    kernel = _pack_bf16 if rows.dtype == torch.bfloat16 else _pack
    kernel(rows, group, shares, bits, scales, rms)


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _unpack_sum(*flat(bits), *flat(scales), len(bits), group, out.numpy(), np.float32(scale))
