"""Codecs that send some of the values."""

from __future__ import annotations

import functools
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
from thinwire.codecs.intquant import Integers
from thinwire.ops import mask
from thinwire.ops import rows as packing


@dataclass(frozen=True, eq=False)
class _AtMask(Codec):
    """What the codecs share whose mask all ranks have.

    Attributes:
        words: (R, n / 64) int64, the mask of a bucket's rows.
        owner_row: where each rank keeps one row of the result: the row whose mask a wire of one row is decoded with.
        before: the masks' directory, if somebody has kept it.
    """

    group: ClassVar[int] = mask.WORD
    words: Tensor = field(repr=False)

    owner_row: int | None = field(default=None, kw_only=True)
    before: Tensor | None = field(default=None, kw_only=True, repr=False)

    def _masks_of(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """The masks of a wire of ``rows`` rows, all or the owner's own, and their directory."""
        if rows < len(self.words) and self.owner_row is not None:
            own = slice(self.owner_row, self.owner_row + 1)
            return self.words[own], None if self.before is None else self.before[own]
        return self.words, self.before

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        self._gather(rows, out, None, None, seed, space)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual, seed: Seeds | None, space: Space
    ) -> None:
        self._gather(rows, out, residual.old, residual.new, seed, space)

    def _gather(
        self, rows: Tensor, out: Tensor, old: Tensor | None, new: Tensor | None, seed: Seeds | None, space: Space
    ) -> None:
        """The wire of rows + ``old``; what is left out goes to ``new``, if there is one, in the same pass."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Masked(_AtMask):
    """The values at a mask that all ranks share; no positions travel. Linear: the network may sum the wire.

    Attributes:
        words: every row with ``k`` bits set. k: values per row.
        dtype: of the wire: float32, or bfloat16 for half the bytes and 8 significant bits (the rounding is lost).
    """

    linear = True

    k: int
    dtype: torch.dtype = field(default=torch.float32, kw_only=True)

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"values at a mask travel in float32 or bfloat16, not in {self.dtype}")

    @property
    def wire_dtype(self) -> torch.dtype:
        return self.dtype

    def wire_numel(self, n: int) -> int:
        return self.k

    def _gather(
        self, rows: Tensor, out: Tensor, old: Tensor | None, new: Tensor | None, seed: Seeds | None, space: Space
    ) -> None:
        narrow = out.dtype != torch.float32
        payload = space(("payload", len(out)), out.shape, torch.float32) if narrow else out
        mask.gather_keep(rows, old, self.words, payload, new, self.before)
        if narrow:
            out.copy_(payload)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        if wire.dtype != torch.float32:
            wire = space(("payload", len(wire)), wire.shape, torch.float32).copy_(wire)
        words, before = self._masks_of(len(wire))
        mask.scatter(wire, words, out, before)


@dataclass(frozen=True, eq=False)
class MaskedIntegers(_AtMask):
    """The values at a shared mask, quantized: sparse and few bits at once. Not linear: ranks have scales of their own.

    What is kept of an encoding is what is off the mask, and what quantization leaves out.

    Attributes:
        parts: (mask words, values) of each parameter, in the order of the bucket; its values are padded to whole groups
            of the quantizer, so that none straddles two parameters.
    """

    linear = False

    parts: tuple[tuple[int, int], ...]
    quantizer: Integers

    def wire_numel(self, n: int) -> int:
        return self.quantizer.wire_numel(self._size)

    @property
    def _size(self) -> int:
        """Values of a row's payload, with padding."""
        return sum(padded(k, self.quantizer.group) for _, k in self.parts)

    def _gather(
        self, rows: Tensor, out: Tensor, old: Tensor | None, new: Tensor | None, seed: Seeds | None, space: Space
    ) -> None:
        words, before = self._masks_of(len(rows))
        values, payload = self._values(len(rows), space), self._payload("sent", len(rows), space)
        mask.gather_keep(rows.float(), old, words, values, new, before)
        packing.pack(values.view(-1), self._places(values), payload.view(-1))
        self.quantizer.encode(payload, out, seed=seed)
        if new is None:
            return
        left = self.quantizer.decode(out, self._payload("left", len(rows), space))
        torch.sub(payload, left, out=left)
        mask.write_at(self._unpadded(left, space), words, new, before)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        self._spread(self.quantizer.decode(wire, self._payload("got", len(wire), space)), out, space)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        total = self._payload("got", 1, space)
        self.quantizer.decode_sum(wire, total[0], scale)
        self._spread(total, out.unsqueeze(0), space)

    def _spread(self, payload: Tensor, out: Tensor, space: Space) -> None:
        words, before = self._masks_of(len(out))
        mask.scatter(self._unpadded(payload, space), words, out, before)

    def _unpadded(self, payload: Tensor, space: Space) -> Tensor:
        values = self._values(len(payload), space)
        packing.unpack(payload.view(-1), self._places(values), values.view(-1))
        return values

    def _places(self, values: Tensor) -> packing.CopyTable:
        counts = tuple(k for _, k in self.parts)
        return _padding(counts, self.quantizer.group, len(values), values.device)

    def _values(self, rows: int, space: Space) -> Tensor:
        return space(("values", rows), (rows, sum(k for _, k in self.parts)), torch.float32)

    def _payload(self, use: str, rows: int, space: Space) -> Tensor:
        return space((use, rows), (rows, self._size), torch.float32)


@functools.cache
def _padding(counts: tuple[int, ...], group: int, rows: int, device: torch.device) -> packing.CopyTable:
    """Values side by side, ``counts`` of each parameter in each of so many rows <-> in whole groups of each."""
    step, stride = sum(counts), sum(padded(k, group) for k in counts)
    parts, first, start = [], 0, 0
    for k in counts:
        parts.append(packing.CopySegment(first, rows * step, step, start, padded(k, group), k, stride, rows))
        first, start = first + k, start + padded(k, group)
    return packing.CopyTable(parts, device)


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
