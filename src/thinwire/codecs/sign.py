"""The codec that sends one bit per value and one scale per group."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.grouped import GroupedBytes
from thinwire.errors import ThinwireError
from thinwire.ops import sign

SCALES = ("mean", "rms")


class Sign(GroupedBytes):
    """Signs with one float32 scale per group: 1 + 32 / group bits per value, 1.016 at group 2048.

    A value decodes to +scale or -scale; zero, having no sign, to +scale, and a group of zeros to zeros. Made for error
    feedback: what is left out is of the size of the values themselves. A group with a NaN or an infinity decodes to
    nothing finite.

    Attributes:
        shares: (R, n / group) float32, 1 / (number of values in the group that count), for rows in which some are
            padding (zeros); set before encoding rows of that shape. None: all count.
    """

    bits = 1

    def __init__(self, group: int = 2048, scale: str = "mean") -> None:
        """Values that share a scale, and which.

        Args:
            group: a power of two from 32 to 4096; larger => fewer bytes, and values of more different size sent alike.
            scale: "mean" of |x| (||x||_1 / n), which leaves the smallest error, always less than x itself; or "rms"
                (||x||_2 / sqrt(n)), never smaller, which keeps the norm; its squares overflow from 1.8e19 on.

        Raises:
            ThinwireError: another group or scale.
        """
        # From 32 on, the scales behind the bits start at a multiple of 4 bytes.
        if not isinstance(group, int) or not 32 <= group <= 4096 or group & (group - 1):
            raise ThinwireError(f"Sign: group must be a power of two from 32 to 4096 elements, got {group}; use 2048")
        super().__init__(group)
        if scale not in SCALES:
            raise ThinwireError(f"Sign: scale is mean or rms, not {scale}")
        self.scale = scale
        self.shares: Tensor | None = None

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        shape = (rows.shape[0], rows.shape[1] // self.group)
        shares = self.shares
        if shares is None:
            shares = torch.full(shape, 1 / self.group, device=rows.device)
        elif shares.shape != shape:
            raise ThinwireError(f"{self}: {tuple(rows.shape)} values have shares {shape}, got {tuple(shares.shape)}")
        sign.pack(rows, self.group, shares, *self._split(out, rows.shape[1]), rms=self.scale == "rms")
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        return sign.unpack(*self._split(wire, out.shape[1]), self.group, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self._check_sum(wire, out)
        return sign.unpack_sum(*self._split(wire, out.shape[0]), self.group, out, scale)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group={self.group}{'' if self.scale == 'mean' else ', scale=rms'})"
