"""Plain torch, any device: the specification of every operation, and the oracle of its tests."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_LEVELS = 127
FP8_LEVELS = 448  # the largest E4M3 number
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a denormal scale would have an infinite reciprocal


def _scaled(rows: Tensor, group: int, levels: int, scales: Tensor) -> Tensor:
    """Write ``scales`` (R, g); return ``rows`` in units of them, (R, g, group), 0 where the scale is NaN."""
    groups = rows.float().reshape(rows.shape[0], -1, group)
    largest = groups.abs().amax(2)
    scale = (largest * (1 / levels)).clamp_min(SMALLEST_SCALE)
    scale = torch.where(largest == 0, 1.0, scale)
    finite = largest.isfinite()
    scales.copy_(torch.where(finite, scale, torch.nan))
    return torch.where(finite.unsqueeze(2), groups * scale.reciprocal().unsqueeze(2), 0.0)


def _dequantize(values: Tensor, scales: Tensor, group: int) -> Tensor:
    return (values.float().reshape(values.shape[0], -1, group) * scales.unsqueeze(2)).flatten(1)


def quantize_int8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    codes.copy_(_scaled(rows, group, INT8_LEVELS, scales).round().flatten(1))


def dequantize_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    out.copy_(_dequantize(codes, scales, group))


def dequantize_sum_int8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    sum_rows(_dequantize(codes, scales, group), out, scale)


def quantize_fp8(rows: Tensor, group: int, codes: Tensor, scales: Tensor) -> None:
    scaled = _scaled(rows, group, FP8_LEVELS, scales).clamp(-FP8_LEVELS, FP8_LEVELS)
    codes.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1))


def dequantize_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    out.copy_(_dequantize(codes.view(torch.float8_e4m3fn), scales, group))


def dequantize_sum_fp8(codes: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    sum_rows(_dequantize(codes.view(torch.float8_e4m3fn), scales, group), out, scale)


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    out.copy_(rows[0])
    for row in rows[1:]:
        out.add_(row)
    if scale != 1.0:
        out.mul_(scale)
