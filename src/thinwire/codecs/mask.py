"""The codec that sends the values at a mask that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.ops import mask


@dataclass(frozen=True, eq=False)
class Masked(Codec):
    """Sends the values at a mask that all ranks share, without positions. Linear: the network may sum the wire.

    Attributes:
        words: (R, n / 64) int64, the mask of a bucket's rows, with ``k`` bits set in every row.
        k: values per row.
        owner_row: the row whose mask decodes a wire of one row, if each rank keeps one row of the result.
        bit_offsets: the masks' directory (``ops.mask``), if it is known.
        dtype: of the wire: float32, or bfloat16 for half the bytes and 8 significant bits (the rounding is lost).
    """

    group: ClassVar[int] = mask.WORD
    linear = True

    words: Tensor = field(repr=False)
    k: int
    owner_row: int | None = field(default=None, kw_only=True)
    bit_offsets: Tensor | None = field(default=None, kw_only=True, repr=False)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"values at a mask travel in float32 or bfloat16, not in {self.dtype}")

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype

    def wire_numel(self, n: int) -> int:
        return self.k

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual | None, seed: Seeds | None, space: Space
    ) -> None:
        old, new = (None, None) if residual is None else (residual.old, residual.new)
        narrow = out.dtype != torch.float32
        payload = space(("payload", len(out)), out.shape, torch.float32) if narrow else out
        mask.gather_keep(rows, old, self.words, payload, new, self.bit_offsets)
        if narrow:
            out.copy_(payload)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        if wire.dtype != torch.float32:
            wire = space(("payload", len(wire)), wire.shape, torch.float32).copy_(wire)
        words, bit_offsets = self.words, self.bit_offsets
        if len(wire) < len(words) and self.owner_row is not None:
            owner = slice(self.owner_row, self.owner_row + 1)
            words, bit_offsets = words[owner], None if bit_offsets is None else bit_offsets[owner]
        mask.scatter(wire, words, out, bit_offsets)
