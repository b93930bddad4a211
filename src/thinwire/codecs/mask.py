"""Codecs that send some of the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from thinwire.bucket import padded
from thinwire.codecs.base import Codec
from thinwire.codecs.intquant import Integers
from thinwire.errors import ThinwireError
from thinwire.ops import mask


class Masked(Codec):
    """The values at a mask that all ranks share; no positions travel. Linear: the network may sum the wire.

    Attributes:
        words: (R, n / 64) int64, the mask of a bucket's rows, every row with ``k`` bits set; may be written to.
        k: values per row.
        owner_row: where each rank keeps one row of the result: the row whose mask a wire of one row is decoded with.
        residual: (read, write), both (R, n): with it, h = rows + read is encoded and what is off the mask goes to
            write, in the same pass. They may be the same tensor; read None: h = rows. None: nothing is kept.
    """

    linear = True
    group = mask.WORD

    def __init__(
        self, words: Tensor, k: int, *, owner_row: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """``dtype`` of the wire: float32, or bfloat16 for half the bytes and 8 significant bits."""
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"values at a mask travel in float32 or bfloat16, not in {dtype}")
        self.words, self.k, self.owner_row, self.wire_dtype = words, k, owner_row, dtype
        self.residual: tuple[Tensor | None, Tensor] | None = None

    def wire_numel(self, n: int) -> int:
        return self.k

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        old, new = (None, None) if self.residual is None else self.residual
        if out.dtype == torch.float32:
            return mask.gather_keep(rows, old, self.words, out, new)
        payload = self._payload(len(out), out.device)
        return out.copy_(mask.gather_keep(rows, old, self.words, payload, new))

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        words = _masks_of(self, len(wire))
        if wire.dtype != torch.float32:
            wire = self._payload(len(wire), wire.device).copy_(wire)
        return mask.scatter(wire, words, out)

    def _payload(self, rows: int, device: torch.device) -> Tensor:
        key = (rows, device)
        if key not in self._scratch:
            self._scratch[key] = torch.empty((rows, self.k), dtype=torch.float32, device=device)
        return self._scratch[key]


def _masks_of(codec: Masked | MaskedIntegers, rows: int) -> Tensor:
    """The masks of a wire of ``rows`` rows: all, or the owner's own."""
    if rows < len(codec.words) and codec.owner_row is not None:
        return codec.words[codec.owner_row : codec.owner_row + 1]
    return codec.words


class MaskedIntegers(Codec):
    """The values at a shared mask, quantized: sparse and few bits at once. Not linear: ranks have scales of their own.

    Attributes:
        words, residual: as for :class:`Masked`. To the residual also goes what quantization leaves out.
        segments: (first word, last word, k, place) of each parameter: its k values start at ``place`` of a row's
            payload, so that no group straddles two parameters.
    """

    linear = False
    group = mask.WORD
    wire_dtype = torch.uint8

    def __init__(
        self, words: Tensor, parts: Sequence[tuple[int, int]], quantizer: Integers, *, owner_row: int | None = None
    ) -> None:
        """``parts``: (mask words, values) of each parameter, in the order of the bucket. ``owner_row``: as there."""
        super().__init__()
        self.words, self.quantizer, self.owner_row = words, quantizer, owner_row
        self.residual: tuple[Tensor | None, Tensor] | None = None
        self._kept: dict[tuple[str, tuple[int, int], torch.device], Tensor] = {}
        self.segments: list[tuple[int, int, int, int]] = []
        word = place = 0
        for width, k in parts:
            self.segments.append((word, word + width, k, place))
            word, place = word + width, place + padded(k, quantizer.group)
        self.k, self._size = sum(k for _, k in parts), place

    def wire_numel(self, n: int) -> int:
        return self.quantizer.wire_numel(self._size)

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        values = rows.float()
        old, new = (None, None) if self.residual is None else self.residual
        payload = self._payload("sent", len(rows), rows.device)
        for columns, words, at in self._parts(self.words):
            kept = None if new is None else new[:, columns]
            mask.gather_keep(values[:, columns], None if old is None else old[:, columns], words, payload[:, at], kept)
        self.quantizer.encode(payload, out)
        if new is not None:
            left = self.quantizer.decode(out, self._payload("left", len(rows), rows.device))
            torch.sub(payload, left, out=left)
            rest = self._buffer("rest", (rows.shape[0], rows.shape[1]), rows.device)
            for columns, words, at in self._parts(self.words):
                mask.scatter(left[:, at], words, rest[:, columns])
            new.add_(rest)
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        return self._spread(self.quantizer.decode(wire, self._payload("got", len(wire), wire.device)), out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self._check_sum(wire, out)
        total = self._payload("got", 1, wire.device)
        self.quantizer.decode_sum(wire, total[0], scale)
        return self._spread(total, out.unsqueeze(0))[0]

    def _spread(self, payload: Tensor, out: Tensor) -> Tensor:
        for columns, part, at in self._parts(_masks_of(self, len(out))):
            mask.scatter(payload[:, at], part, out[:, columns])
        return out

    def _parts(self, words: Tensor) -> Iterator[tuple[slice, Tensor, slice]]:
        for first, last, k, place in self.segments:
            yield slice(first * mask.WORD, last * mask.WORD), words[:, first:last], slice(place, place + k)

    def _payload(self, name: str, rows: int, device: torch.device) -> Tensor:
        """(rows, values with their padding), zeros in the padding."""
        return self._buffer(name, (rows, self._size), device)

    def _buffer(self, name: str, shape: tuple[int, int], device: torch.device) -> Tensor:
        key = (name, shape, device)
        if key not in self._kept:
            self._kept[key] = torch.zeros(shape, device=device)
        return self._kept[key]


class TopK(Codec):
    """Each rank's own largest values with their positions: ``k`` of every segment of a row, exactly.

    The wire of a row is the positions, then the values in fp32. Positions are mask bits (n / 8 bytes) or a list of
    int32 (4 k bytes: fewer below a density of 1/32). Not linear: ranks choose different positions.
    """

    linear = False
    wire_dtype = torch.uint8
    group = mask.WORD

    def __init__(self, segments: Sequence[tuple[int, int, int]], *, listed: bool) -> None:
        """``segments``: (start, width, k) of the row's columns, start and width multiples of 64."""
        super().__init__()
        self.segments, self.listed = tuple(segments), listed
        for start, width, k in self.segments:
            if start % mask.WORD or width % mask.WORD or not 0 <= k <= width:
                raise ThinwireError(f"top-k: {k} values of columns {start} to {start + width}: not multiples of 64")
        self.k = sum(k for _, _, k in self.segments)
        self._words: dict[object, Tensor] = {}

    def _head(self, n: int) -> int:
        """Bytes of positions."""
        return 4 * self.k if self.listed else n // 8

    def wire_numel(self, n: int) -> int:
        if self.listed:
            return 8 * self.k
        # Rows start at multiples of 8, as int64 words must; rounded by segment, so that a row is the sum of its parts.
        return n // 8 + sum(padded(4 * k, 8) for _, _, k in self.segments)

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        n, words = rows.shape[1], self._mask(rows)
        for start, width, k in self.segments:
            first, last = start // mask.WORD, (start + width) // mask.WORD
            mask.topk_mask(rows[:, start : start + width], k, words[:, first:last])
        positions, values = self._split(out, n)
        if self.listed:
            mask.indices(words, positions)
        else:
            positions.copy_(words)
        mask.gather_keep(rows, None, words, values, None)
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        words, values = self._open(wire, out)
        return mask.scatter(values, words, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self._check_sum(wire, out)
        words, values = self._open(wire, out)
        return mask.scatter_add(values, words, out, scale)

    def _open(self, wire: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Mask words and values of a received wire."""
        n = out.shape[-1]
        positions, values = self._split(wire, n)
        if self.listed:
            return mask.from_indices(positions, self._mask(wire, n)), values
        return positions, values

    def _mask(self, rows: Tensor, n: int | None = None) -> Tensor:
        shape = (len(rows), (rows.shape[1] if n is None else n) // mask.WORD)
        key = (shape, rows.device)
        if key not in self._words:
            self._words[key] = torch.zeros(shape, dtype=torch.int64, device=rows.device)
        return self._words[key]

    def _split(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Positions, (R, k) int32 or (R, n / 64) int64, and values (R, k) float32: views of ``wire``."""
        if len(wire) == 1 or not wire.numel():  # such rows have any stride, and view() to a wider dtype looks at it
            wire = wire.as_strided(wire.shape, (wire.shape[1], 1))
        if wire.storage_offset() % 8 or wire.stride(0) % 8:
            raise ThinwireError(f"{self}: wire rows must start at a multiple of 8 bytes, because they hold mask words")
        head = self._head(n)
        positions = wire[:, :head].view(torch.int32 if self.listed else torch.int64)
        return positions, wire[:, head : head + 4 * self.k].view(torch.float32)
