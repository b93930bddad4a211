"""Plain torch, any device: the specification."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds, key_of

INT4_LEVELS = 7
INT8_LEVELS = 127
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: a denormal scale would have an infinite reciprocal

ORDER = 32  # of the Hadamard matrix
NORM = ORDER**-0.5

MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B


@dataclass(frozen=True)
class Format:
    """Symmetric integers of ``bits`` (4 or 8), ``group`` of which share a scale; ``hadamard``: transformed first."""

    bits: int
    group: int
    hadamard: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ThinwireError(f"integers have 4 or 8 bits, not {self.bits}")
        if self.hadamard and self.group % ORDER:
            raise ThinwireError(f"the transform needs a group that is a power of two from {ORDER} to 4096 "
                                f"elements, got {self.group}; use 128")  # fmt: skip

    @property
    def norm(self) -> float:
        """The factor of a sum of values before the transform, whose matrix has elements +-1."""
        return NORM if self.hadamard else 1.0


def _mix(words: Tensor) -> Tensor:
    """Return 32 random bits for every int32: "lowbias32" (Ellis 2018), a bijection whose products wrap around."""
    words = (words ^ words >> 16 & 0xFFFF) * MIX_1
    words = (words ^ words >> 15 & 0x1FFFF) * (MIX_2 - 2**32)
    return words ^ words >> 16 & 0xFFFF


def _random(rows: int, groups: int, group: int, seed: int, device: torch.device) -> Tensor:
    """Return 16 random bits for every element, int32 (rows, groups, group).

    Pair ``p`` of the rows laid end to end, elements i and i + group / 2 of one group, takes the hash of p ^ key: its
    low half is for the first element, its high half for the second.
    """
    pairs = torch.arange(rows * groups * (group // 2), device=device).to(torch.int32).view(rows, groups, group // 2)
    words = _mix(pairs ^ key_of(seed))
    return torch.cat([words & 0xFFFF, words >> 16 & 0xFFFF], 2)


def _scaled(rows: Tensor, group: int, levels: int, scales: Tensor) -> Tensor:
    """Write ``scales`` (R, g); return ``rows`` in units of them, (R, g, group), 0 where the scale is NaN."""
    groups = rows.float().reshape(rows.shape[0], -1, group)
    largest = groups.abs().amax(2)
    scale = (largest * (1 / levels)).clamp_min(SMALLEST_SCALE)
    scale = torch.where(largest == 0, 1.0, scale)
    finite = largest.isfinite()
    scales.copy_(torch.where(finite, scale, torch.nan))
    return torch.where(finite.unsqueeze(2), groups * scale.reciprocal().unsqueeze(2), 0.0)


def _stochastic(scaled: Tensor, levels: int, drawn: Seeds) -> Tensor:
    """Round ``scaled`` (R, g, group): add 16 random bits in units of 2^-16 of a level, and drop them again.

    The clamp is for the largest value, which may be scaled to a hair above ``levels``.
    """
    fine = (scaled * 65536 + 0.5).floor().clamp(-levels * 65536, levels * 65536).to(torch.int32)
    count, _, group = scaled.shape
    bits = [_random(count, (last - first) // group, group, seed, scaled.device) for first, last, seed in drawn.ranges]
    return (fine + torch.cat(bits, 1)) >> 16


def _packed(integers: Tensor) -> Tensor:
    """Pack integers -7 .. 7 (R, g, group) into bytes (R, n / 2)."""
    low, high = (integers.to(torch.uint8) + 8).chunk(2, 2)
    return (low | high << 4).flatten(1)


def _unpacked(codes: Tensor, group: int) -> Tensor:
    """Unpack bytes (R, n / 2) to integers -7 .. 7 (R, n), float32."""
    halves = codes.reshape(codes.shape[0], -1, group // 2)
    return (torch.cat([halves & 15, halves >> 4], 2).float() - 8).flatten(1)


def _rotated(rows: Tensor) -> Tensor:
    """Multiply the Hadamard matrix of +-1, Sylvester's order, with every 32 neighbours of ``rows`` (R, n) float32."""
    blocks = rows.reshape(-1, ORDER)
    step = 1
    while step < ORDER:
        a, b = blocks.reshape(-1, ORDER // (2 * step), 2, step).unbind(2)
        blocks = torch.stack([a + b, a - b], 2)
        step *= 2
    return blocks.reshape(rows.shape)


def quantize(rows: Tensor, format: Format, codes: Tensor, scales: Tensor, drawn: Seeds | None = None) -> None:
    values = _rotated(rows.float() * NORM) if format.hadamard else rows
    levels = INT4_LEVELS if format.bits == 4 else INT8_LEVELS
    scaled = _scaled(values, format.group, levels, scales)
    integers = scaled.round() if drawn is None else _stochastic(scaled, levels, drawn)
    codes.copy_(_packed(integers) if format.bits == 4 else integers.flatten(1))


def decode(codes: Tensor, scales: Tensor, format: Format, out: Tensor, peers: int, factor: float) -> None:
    """Set every row of ``out`` to ``factor`` * the sum of ``peers`` rows of values, or to its transform."""
    integers = _unpacked(codes, format.group) if format.bits == 4 else codes.float()
    values = (integers.unflatten(1, (-1, format.group)) * scales.unsqueeze(2)).flatten(1)
    total = functools.reduce(operator.add, values.unflatten(0, (-1, peers)).unbind(1)) * factor
    out.copy_(_rotated(total) if format.hadamard else total)


def requantize(
    codes: Tensor, scales: Tensor, format: Format, codes_out: Tensor, scales_out: Tensor, factor: float,
    drawn: Seeds | None,
) -> None:  # fmt: skip
    total = torch.empty((1, scales.shape[1] * format.group), dtype=torch.float32, device=codes.device)
    decode(codes, scales, format, total, len(codes), factor)
    quantize(total, format, codes_out, scales_out, drawn)


def sum_rows(rows: Tensor, out: Tensor, scale: float) -> None:
    out.copy_(functools.reduce(operator.add, rows.float()) * scale)
