"""The wire shared by codecs with a few bits per value and one float32 scale per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.alignment import viewable
from thinwire.base.errors import ThinwireError
from thinwire.codecs.base import Codec


@dataclass(frozen=True)
class GroupedBytes(Codec):
    """A row of uint8: ``n * bits / 8`` bytes of codes, then one float32 scale per group; one collective carries both.

    ``group`` (elements, a power of two up to 4096): a scale costs ``4 / group`` bytes per value. Smaller => follows
    local magnitudes better; larger => fewer bytes and a coarser step.
    """

    linear = False
    smallest_group: ClassVar[int] = 8

    group: int = 128

    def __post_init__(self) -> None:
        group, minimum = self.group, self.smallest_group
        if not isinstance(group, int) or not minimum <= group <= 4096 or group & (group - 1):
            raise ThinwireError(
                f"group must be a power of two from {minimum} to 4096 elements, got {group}; use {type(self).group}"
            )

    @property
    def bits(self) -> int:
        """Bits per value, without the scales."""
        return 8

    def wire_numel(self, n: int) -> int:
        return self._payload(n) + n // self.group * 4

    def part(self, wire: Tensor, n: int, columns: slice) -> Tensor:
        """Copy the part of ``wire`` (R, wire_numel(n)) that belongs to the segment ``columns`` of rows of ``n``."""
        head, (start, stop) = self._payload(n), (columns.start, columns.stop)
        scales = slice(head + start // self.group * 4, head + stop // self.group * 4)
        return torch.cat([wire[:, self._payload(start) : self._payload(stop)], wire[:, scales]], 1)

    def _payload(self, n: int) -> int:
        return n * self.bits // 8

    def codes_of(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return views of codes, (R, n) int8 or (R, n * bits / 8) uint8, and scales (R, n / group) float32."""
        if wire.storage_offset() % 4 or (wire.shape[0] > 1 and wire.stride(0) % 4):
            raise ThinwireError(f"{self}: wire rows must start at a multiple of 4 bytes, because they hold fp32 scales")
        codes, scales = viewable(wire).tensor_split([self._payload(n)], 1)
        return codes.view(torch.int8) if self.bits == 8 else codes, scales.view(torch.float32)
