"""The wire shared by codecs with a few bits per value and one float32 scale per group."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import ThinwireError


class GroupedBytes(Codec):
    """One uint8 row: ``n * bits / 8`` payload bytes, then one float32 scale per group; one collective carries both.

    ``group`` (elements, a power of two from 8 to 4096): smaller follows local magnitudes better and costs
    ``4 / group`` more bytes per value; larger is fewer bytes and a coarser step.
    """

    linear = False
    wire_dtype = torch.uint8
    bits: ClassVar[int] = 8

    def __init__(self, group: int = 128) -> None:
        super().__init__()
        if not isinstance(group, int) or not 8 <= group <= 4096 or group & (group - 1):
            raise ThinwireError(
                f"{type(self).__name__}: group must be a power of two from 8 to 4096 elements, got {group}; use 128"
            )
        self.group = self.per_scale = group

    def wire_numel(self, n: int) -> int:
        return self._payload(n) + n // self.per_scale * 4

    def _payload(self, n: int) -> int:
        return n * self.bits // 8

    def _split(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Payload (R, n * bits / 8) uint8 and scales (R, n / per_scale) float32, views of ``wire``."""
        if wire.storage_offset() % 4 or (wire.shape[0] > 1 and wire.stride(0) % 4):
            raise ThinwireError(f"{self}: wire rows must start at a multiple of 4 bytes, because they hold fp32 scales")
        if wire.shape[0] == 1:  # a row of one has any stride, and view() to a wider dtype looks at it
            wire = wire.as_strided(wire.shape, (wire.shape[1], 1))
        size = self._payload(n)
        return wire[:, :size], wire[:, size:].view(torch.float32)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(group={self.per_scale})"
