"""Codecs that send some of the values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.alignment import padded, viewable
from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.ops import mask


@dataclass(frozen=True, eq=False)
class Masked(Codec):
    """The values at a mask that all ranks share; no positions travel. Linear: the network may sum the wire.

    Attributes:
        words: (R, n / 64) int64, the mask of a bucket's rows: every row with ``k`` bits set.
        k: values per row.
        owner_row: where each rank keeps one row of the result: the row whose mask a wire of one row is decoded with.
        before: the masks' directory, if it is known.
        dtype: of the wire: float32, or bfloat16 for half the bytes and 8 significant bits (the rounding is lost).
    """

    group: ClassVar[int] = mask.WORD
    linear = True

    words: Tensor = field(repr=False)
    k: int
    owner_row: int | None = field(default=None, kw_only=True)
    before: Tensor | None = field(default=None, kw_only=True, repr=False)
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"values at a mask travel in float32 or bfloat16, not in {self.dtype}")

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype

    def wire_numel(self, n: int) -> int:
        return self.k

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        self._gather(rows, out, None, None, space)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual, seed: Seeds | None, space: Space
    ) -> None:
        self._gather(rows, out, residual.old, residual.new, space)

    def _gather(self, rows: Tensor, out: Tensor, old: Tensor | None, new: Tensor | None, space: Space) -> None:
        """Write rows + ``old`` at the mask to ``out``, and off it, in the same pass, to ``new`` if there is one."""
        narrow = out.dtype != torch.float32
        payload = space(("payload", len(out)), out.shape, torch.float32) if narrow else out
        mask.gather_keep(rows, old, self.words, payload, new, self.before)
        if narrow:
            out.copy_(payload)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        if wire.dtype != torch.float32:
            wire = space(("payload", len(wire)), wire.shape, torch.float32).copy_(wire)
        words, before = self.words, self.before
        if len(wire) < len(words) and self.owner_row is not None:
            own = slice(self.owner_row, self.owner_row + 1)
            words, before = words[own], None if before is None else before[own]
        mask.scatter(wire, words, out, before)


class OwnMasks(Codec):
    """A wire that says, of every row, which values it holds: what is opened is scattered."""

    linear = False

    @abstractmethod
    def _open(self, wire: Tensor, n: int, space: Space) -> tuple[Tensor, Tensor]:
        """Mask words (R, n / 64) and values (R, k) of a received wire."""

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        words, values = self._open(wire, out.shape[1], space)
        mask.scatter(values, words, out)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        words, values = self._open(wire, out.shape[0], space)
        mask.scatter_add(values, words, out, scale)

    def _mask(self, shape: Sequence[int], space: Space) -> Tensor:
        rows, n = shape
        return space(("words", rows), (rows, n // mask.WORD), torch.int64)


@dataclass(frozen=True)
class TopK(OwnMasks):
    """Each rank's own largest values with their positions: ``k`` of every segment of a row, exactly.

    The wire of a row is the positions, then the values in fp32. Positions are mask bits (n / 8 bytes) or a list of
    int32 (4 k bytes: fewer below a density of 1/32). Not linear: ranks choose different positions.

    Attributes:
        segments: (start, width, k) of the row's columns, start and width multiples of 64.
        listed: positions are a list.
    """

    group: ClassVar[int] = mask.WORD
    segments: tuple[tuple[int, int, int], ...]
    listed: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        for start, width, k in self.segments:
            if start % mask.WORD or width % mask.WORD or not 0 <= k <= width:
                raise ThinwireError(f"top-k: {k} values of columns {start} to {start + width}: not multiples of 64")

    @property
    def k(self) -> int:
        """Values per row."""
        return sum(k for _, _, k in self.segments)

    def _head(self, n: int) -> int:
        """Bytes of positions."""
        return 4 * self.k if self.listed else n // 8

    def wire_numel(self, n: int) -> int:
        if self.listed:
            return 8 * self.k
        # Rows start at multiples of 8, as int64 words must; rounded by segment, so that a row is the sum of its parts.
        return n // 8 + sum(padded(4 * k, 8) for _, _, k in self.segments)

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        n, words = rows.shape[1], self._mask(rows.shape, space)
        for start, width, k in self.segments:
            first, last = start // mask.WORD, (start + width) // mask.WORD
            mask.topk_mask(rows[:, start : start + width], k, words[:, first:last])
        positions, values = self._split(out, n)
        if self.listed:
            mask.indices(words, positions)
        else:
            positions.copy_(words)
        mask.gather_keep(rows, None, words, values, None)

    def _open(self, wire: Tensor, n: int, space: Space) -> tuple[Tensor, Tensor]:
        """Mask words and values of a received wire."""
        positions, values = self._split(wire, n)
        if self.listed:
            return mask.from_indices(positions, self._mask((len(wire), n), space)), values
        return positions, values

    def _split(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Positions, (R, k) int32 or (R, n / 64) int64, and values (R, k) float32: views of ``wire``."""
        wire = viewable(wire)
        if wire.storage_offset() % 8 or wire.stride(0) % 8:
            raise ThinwireError(f"{self}: wire rows must start at a multiple of 8 bytes, because they hold mask words")
        head = self._head(n)
        positions = wire[:, :head].view(torch.int32 if self.listed else torch.int64)
        return positions, wire[:, head : head + 4 * self.k].view(torch.float32)
