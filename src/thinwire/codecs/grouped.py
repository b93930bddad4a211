"""The wire shared by codecs with one byte per value and one float32 scale per group."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import ThinwireError


class GroupedBytes(Codec):
    """One uint8 row: ``n`` payload bytes, then ``n / group`` float32 scales; one collective carries both.

    ``group`` (elements, a power of two from 8 to 4096): smaller follows local magnitudes better and costs
    ``4 / group`` more bytes per value; larger is fewer bytes and a coarser step.
    """

    linear = False
    wire_dtype = torch.uint8

    def __init__(self, group: int = 128) -> None:
        super().__init__()
        if not isinstance(group, int) or not 8 <= group <= 4096 or group & (group - 1):
            raise ThinwireError(
                f"{type(self).__name__}: group must be a power of two from 8 to 4096 elements, got {group}; use 128"
            )
        self.group = group

    def wire_numel(self, n: int) -> int:
        return n + n // self.group * 4

    def _split(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Payload (R, n) uint8 and scales (R, n / group) float32, views of ``wire``."""
        if wire.storage_offset() % 4 or (wire.shape[0] > 1 and wire.stride(0) % 4):
            raise ThinwireError(f"{self}: wire rows must start at a multiple of 4 bytes, because they hold fp32 scales")
        if wire.shape[0] == 1:  # a row of one has any stride, and view() to a wider dtype looks at it
            wire = wire.as_strided(wire.shape, (wire.shape[1], 1))
        return wire[:, :n], wire[:, n:].view(torch.float32)
