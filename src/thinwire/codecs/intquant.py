"""Codecs that send small integers and one scale per group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.codecs.grouped import GroupedBytes
from thinwire.errors import ThinwireError
from thinwire.ops import quant
from thinwire.streams import seed_of

ROUNDINGS = ("nearest", "stochastic")


class Integers(GroupedBytes):
    """What the integer codecs share: a rounding, and where its random bits come from.

    Attributes:
        streams: (first column, last column, seed) of each parameter in a row, for stochastic rounding; set by the
            method before it encodes, another seed for every step and rank, because the same seed rounds the same
            places the same way. In rows that are longer the parameters come again, with seeds of their own. Every
            ``encode`` moves the seeds on, so that the hops of one exchange draw different bits.
    """

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        """``rounding``: "nearest" (ties to even, the smallest error) or "stochastic" (unbiased, twice the variance)."""
        super().__init__(group)
        if rounding not in ROUNDINGS:
            raise ThinwireError(f"{type(self).__name__}: rounding is nearest or stochastic, not {rounding}")
        self.rounding = rounding
        self.streams: Sequence[tuple[int, int, int]] = ()

    def _quantize(self, quantize: Callable[..., None], rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        n = rows.shape[1]
        codes, scales = self._parts(out, n)
        if self.rounding == "nearest":
            quantize(rows, self.per_scale, codes, scales, None)
            return out
        length = self.streams[-1][1] if self.streams else 0
        if not length or n % length:
            raise ThinwireError(f"{self}: set streams for all {n} columns before encoding: stochastic rounding draws")
        for again in range(n // length):
            for first, last, seed in self.streams:
                a, b = first + again * length, last + again * length
                group, bits = self.per_scale, self.bits
                quantize(
                    rows[:, a:b], group, codes[:, a * bits // 8 : b * bits // 8], scales[:, a // group : b // group],
                    _following(seed, again * 0x9E3779B97F4A7C15),
                )  # fmt: skip
        self.streams = [(first, last, _following(seed)) for first, last, seed in self.streams]
        return out

    def try_out(self, device: torch.device) -> None:
        self.streams = [(0, self.group, 0)]
        super().try_out(device)
        self.streams = ()

    def _parts(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Codes, int8 or uint8 pairs, and scales: views of ``wire``."""
        codes, scales = self._split(wire, n)
        return codes.view(torch.int8) if self.bits == 8 else codes, scales

    def __repr__(self) -> str:
        rounding = "" if self.rounding == "nearest" else f", rounding={self.rounding}"
        return f"{type(self).__name__}(group={self.per_scale}{rounding})"


def _following(seed: int, by: int = 1) -> int:
    """Another seed, unrelated in the 32 bits that the kernels make of it."""
    return seed_of(seed, str(by)) if by else seed


class Int8(Integers):
    """Symmetric integers from -127 to 127 with one float32 scale per group: 1 + 4 / group bytes per value.

    The step is max|x| / 127 of the group. Rounded to the nearest the absolute error is up to step / 2, stochastically
    up to a step and zero on average. A zero group has scale 1. A group with a NaN or an infinity decodes to NaN
    throughout.
    """

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        return self._quantize(quant.quantize_int8, rows, out)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        return quant.dequantize_int8(*self._parts(wire, out.shape[1]), self.per_scale, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self._check_sum(wire, out)
        return quant.dequantize_sum_int8(*self._parts(wire, out.shape[0]), self.per_scale, out, scale)


class ShiftedInt8(Int8):
    """8-bit integers on a lattice that is shifted by the same random part of a level for all values (QSDP).

    value = (code + shift) * step with step = max|x| / 126.5 of the group. The error is up to step / 2 and, over the
    shift, zero on average: unbiased without a random number per value. All who encode and decode take the same shift.

    Attributes:
        shift: from -1/2 to 1/2, set by the method before each exchange.
    """

    def __init__(self, group: int = 1024) -> None:
        super().__init__(group)
        self.shift = 0.0

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        codes, scales = self._parts(out, rows.shape[1])
        groups = rows.float().unflatten(1, (-1, self.per_scale))
        scales.copy_(groups.abs().amax(2).div_(126.5))
        values = (groups / scales.unsqueeze(2)).sub_(self.shift).round_().clamp_(-127, 127)
        # A group of zeros has scale 0 and decodes to zeros; one that is not finite decodes to NaN throughout.
        scales.masked_fill_(~scales.isfinite(), torch.nan)
        codes.copy_(values.nan_to_num_(0).flatten(1))
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        codes, scales = self._parts(wire, out.shape[1])
        values = codes.float().add_(self.shift).unflatten(1, (-1, self.per_scale)).mul_(scales.unsqueeze(2))
        return out.copy_(values.flatten(1))

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        return GroupedBytes.decode_sum(self, wire, out, scale)


class Int4(Integers):
    """Symmetric integers from -7 to 7 with one float32 scale per group: 1/2 + 4 / group bytes per value.

    The step is max|x| / 7 of the group; all else is as for :class:`Int8`. 4.25 bits per value in groups of 128, 4.016
    in groups of 2048.
    """

    bits = 4

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        return self._quantize(quant.quantize_int4, rows, out)

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        return quant.dequantize_int4(*self._parts(wire, out.shape[1]), self.per_scale, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self._check_sum(wire, out)
        return quant.dequantize_sum_int4(*self._parts(wire, out.shape[0]), self.per_scale, out, scale)
