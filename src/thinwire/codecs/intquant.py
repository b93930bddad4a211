"""Codecs that send small integers and one scale per group."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Space
from thinwire.codecs.grouped import GroupedBytes
from thinwire.ops import quant

ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class Integers(GroupedBytes):
    """Symmetric integers with one float32 scale per group: ``bits`` / 8 + 4 / group bytes per value.

    Codes are -127 to 127 in 8 bits and -7 to 7 in 4; a step is the group's max|x| / 127 or max|x| / 7. The absolute
    error is up to step / 2 with rounding to the nearest; up to a step, and zero on average, with stochastic rounding. A
    zero group has scale 1. A group with a NaN or an infinity decodes to NaN throughout.

    ``hadamard`` transforms every 32 neighbours first (``ops.quant``; SDP4Bit, arXiv 2410.15526, sections 3.2 and 3.3),
    which evens out their sizes: heavy-tailed values get a smaller error, Gaussian values the same. The transform is
    orthonormal: it keeps the norm of the error, but the bounds above hold for the transformed values only.
    ``decode_sum`` transforms the sum once, so it equals the sum of the decodes up to float32 rounding. Decoded or
    summed without ``hadamard``, the same wire gives the transformed values, which another hop may quantize.

    Attributes:
        group: values that share a scale, a power of two from 8 (with ``hadamard`` 32) to 4096.
        bits: 4 or 8. 4.25 bits per value in groups of 128, 4.016 in groups of 2048; 8.25 in groups of 128.
        rounding: "nearest" (ties to even, the smallest error) or "stochastic" (unbiased, twice the variance), which
            takes its random bits from the ``seed`` of ``encode``.
    """

    bits: int = 8
    hadamard: bool = False
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ROUNDINGS:
            raise ThinwireError(f"{type(self).__name__}: rounding is nearest or stochastic, not {self.rounding}")
        quant.Format(self.bits, self.group, self.hadamard)  # refuses formats without a kernel

    @property
    def format(self) -> quant.Format:
        return quant.Format(self.bits, self.group, self.hadamard)

    @property
    def draws(self) -> bool:
        return self.rounding == "stochastic"

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        n = rows.shape[1]
        quant.quantize(rows, self.format, *self.codes_of(out, n), self.drawn(n, seed))

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        quant.dequantize(*self.codes_of(wire, out.shape[1]), self.format, out)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        quant.dequantize_sum(*self.codes_of(wire, out.shape[0]), self.format, out, scale)

    def _encode_sum(self, wire: Tensor, out: Tensor, n: int, scale: float, seed: Seeds | None, space: Space) -> None:
        quant.requantize(*self.codes_of(wire, n), self.format, *self.codes_of(out, n), scale, self.drawn(n, seed))

    def drawn(self, n: int, seed: Seeds | None) -> Seeds | None:
        """Return the source of random bits for ``n`` columns, or None if rounding takes none."""
        if not self.draws:
            return None
        drawn = None if seed is None else seed.over(n)
        if drawn is None:
            raise ThinwireError(f"{self}: stochastic rounding needs random numbers: pass seeds for all {n} columns")
        return drawn


Int8 = functools.partial(Integers, bits=8)
Int4 = functools.partial(Integers, bits=4)


@dataclass(frozen=True)
class ShiftedInt8(GroupedBytes):
    """8-bit integers on a lattice shifted by one random fraction of a level for all values (QSDP).

    value = (code + shift) * step with step = max|x| / 126.5 of the group. The error is up to step / 2 and averages to
    zero over shifts: unbiased without a random number per value.

    Attributes:
        shift: from -1/2 to 1/2, the same on all ranks, another one for every exchange.
    """

    group: int = 1024
    shift: float = 0.0

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        codes, scales = self.codes_of(out, rows.shape[1])
        groups = rows.float().unflatten(1, (-1, self.group))
        scales.copy_(groups.abs().amax(2).div_(126.5))
        values = (groups / scales.unsqueeze(2)).sub_(self.shift).round_().clamp_(-127, 127)
        # A group of zeros has scale 0 and decodes to zeros; one that is not finite decodes to NaN throughout.
        scales.masked_fill_(~scales.isfinite(), torch.nan)
        codes.copy_(values.nan_to_num_(0).flatten(1))

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        codes, scales = self.codes_of(wire, out.shape[1])
        values = codes.float().add_(self.shift)
        out.copy_(values.unflatten(1, (-1, self.group)).mul_(scales.unsqueeze(2)).flatten(1))
