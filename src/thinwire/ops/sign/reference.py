"""Plain torch, any device: the specification."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(rows: Tensor, group: int, shares: Tensor, bits: Tensor, scales: Tensor, rms: bool) -> None:
    values = rows.float().reshape(rows.shape[0], -1, group)
    terms = (values * values if rms else values.abs()) * shares.unsqueeze(2)
    while terms.shape[2] > 1:
        low, high = terms.chunk(2, 2)
        terms = low + high
    scale = terms[:, :, 0]
    # torch's float32 root on CPU is sometimes off in the last place; a float64 root, rounded, is not.
    scales.copy_(scale.double().sqrt().float() if rms else scale)
    negative = (values < 0).unflatten(2, (8, group // 8)).to(torch.int32)
    shifts = torch.arange(8, device=rows.device, dtype=torch.int32).view(8, 1)
    bits.copy_((negative << shifts).sum(2).flatten(1))


def unpack(bits: Tensor, scales: Tensor, group: int, out: Tensor) -> None:
    shifts = torch.arange(8, device=bits.device, dtype=torch.int32).view(8, 1)
    negative = bits.reshape(bits.shape[0], -1, 1, group // 8).to(torch.int32) >> shifts & 1
    out.copy_(((1 - 2 * negative).float().flatten(2) * scales.unsqueeze(2)).flatten(1))


def unpack_sum(bits: Tensor, scales: Tensor, group: int, out: Tensor, scale: float) -> None:
    rows = torch.empty((len(bits), out.numel()), dtype=torch.float32, device=out.device)
    unpack(bits, scales, group, rows)
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    out.copy_(total * scale)
