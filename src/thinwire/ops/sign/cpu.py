# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba kernels for CPU tensors, the same bits as ``reference``.

Each tensor is one flat array with a distance between its rows; bfloat16, which numba lacks, arrives as uint16 and is
widened by a shift. Every inner loop runs over neighbours, which LLVM vectorises.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.ops.kernels import flat, njit


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
def _pack(values, stride, rows, n, group, shares, shares_stride, bits, bits_stride, scales, scales_stride, rms):
    size, sums = group // 8, np.empty(group // 2, np.float32)
    for row in range(rows):
        for g in range(n // group):
            start, byte = row * stride + g * group, row * bits_stride + g * size
            group_values = values[start : start + group]
            scales[row * scales_stride + g] = _scale_of(group_values, shares[row * shares_stride + g], rms, sums)
            _signs(group_values, bits[byte : byte + size])


@njit
def _pack_bf16(narrow, stride, rows, n, group, shares, shares_stride, bits, bits_stride, scales, scales_stride, rms):
    size, sums = group // 8, np.empty(group // 2, np.float32)
    wide = np.empty(group, np.int32)
    group_values = wide.view(np.float32)
    for row in range(rows):
        for g in range(n // group):
            start, byte = row * stride + g * group, row * bits_stride + g * size
            for i in range(group):
                wide[i] = np.int32(np.uint32(narrow[start + i]) << np.uint32(16))
            scales[row * scales_stride + g] = _scale_of(group_values, shares[row * shares_stride + g], rms, sums)
            _signs(group_values, bits[byte : byte + size])


@njit
def _decode(bits, scale, out, add):
    """Write one group's values to ``out``, or ``add`` them."""
    size = bits.size
    for j in range(8):
        eighth = out[j * size : (j + 1) * size]
        for i in range(size):
            value = np.float32(1 - 2 * (np.int32(bits[i]) >> j & 1)) * scale
            eighth[i] = eighth[i] + value if add else value


@njit
def _unpack(bits, stride, scales, scales_stride, rows, n, group, out, out_stride):
    size = group // 8
    for row in range(rows):
        for g in range(n // group):
            start, offset = row * stride + g * size, row * out_stride + g * group
            _decode(bits[start : start + size], scales[row * scales_stride + g], out[offset : offset + group], False)


@njit
def _unpack_sum(bits, stride, scales, scales_stride, peers, n, group, out, factor):
    size, total = group // 8, np.empty(group, np.float32)
    for g in range(n // group):
        _decode(bits[g * size : (g + 1) * size], scales[g], total, False)
        for row in range(1, peers):
            start = row * stride + g * size
            _decode(bits[start : start + size], scales[row * scales_stride + g], total, True)
        for i in range(group):
            out[g * group + i] = total[i] * factor


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, rms: bool) -> None:
    kernel = _pack_bf16 if rows.dtype == torch.bfloat16 else _pack
    kernel(*flat(rows), *rows.shape, group, *flat(shares), *flat(bits), *flat(scales), rms)


def unpack(bits: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    _unpack(*flat(bits), *flat(scales), *out.shape, group, *flat(out))


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    _unpack_sum(*flat(bits), *flat(scales), len(bits), out.numel(), group, out.numpy(), np.float32(scale))
