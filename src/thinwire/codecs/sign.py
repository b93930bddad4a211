"""The codec that sends one bit per value and one scale per group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Space
from thinwire.codecs.grouped import GroupedBytes
from thinwire.ops import sign

SCALES = ("mean", "rms")


@dataclass(frozen=True)
class Sign(GroupedBytes):
    """Sends signs with one float32 scale per group: 1 + 32 / group bits per value, 1.016 at group 2048.

    A value decodes to +scale or -scale, zero to +scale, a group of zeros to zeros. Meant for error feedback: the error
    is as large as the values. A group with a NaN or an infinity decodes to nothing finite.

    Attributes:
        group: a power of two from 32 to 4096; larger => fewer bytes, and more unequal values sent as equal.
        scale: "mean" of |x| (||x||_1 / n), which leaves the smallest error, always less than x itself; or "rms"
            (||x||_2 / sqrt(n)), never smaller, which keeps the norm; its squares overflow from 1.8e19 on.
        shares: (R, n / group) float32, 1 / (the group's number of values without padding), for rows of this shape
            only. Padding is zeros. None: no padding.

    Raises:
        ThinwireError: another group or scale.
    """

    bits = 1
    smallest_group: ClassVar[int] = 32  # so that the scales behind the bits start at a multiple of 4 bytes

    group: int = 2048
    scale: str = "mean"
    shares: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale not in SCALES:
            raise ThinwireError(f"Sign: scale is mean or rms, not {self.scale}")

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        shape = (rows.shape[0], rows.shape[1] // self.group)
        shares = self.shares
        if shares is None:
            shares = torch.full(shape, 1 / self.group, dtype=torch.float32, device=rows.device)
        elif shares.shape != shape:
            raise ThinwireError(f"{self}: {tuple(rows.shape)} values have shares {shape}, got {tuple(shares.shape)}")
        sign.pack(rows, self.group, shares, *self.codes_of(out, rows.shape[1]), rms=self.scale == "rms")

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        sign.unpack(*self.codes_of(wire, out.shape[1]), self.group, out)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        sign.unpack_sum(*self.codes_of(wire, out.shape[0]), self.group, out, scale)
