"""Each rank's own largest values in few bits: positions in about 9 or 6, values in 8 or 4; or in tiles, in 12 and 2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.codecs.intquant import Integers
from thinwire.codecs.mask import OwnMasks
from thinwire.ops import mask, sparse

TILE = 4096
"""Values of a tile: as many as 12 bits count."""
LEVELS = 4
"""Bins of a tile's values, which are 2 bits each."""


@dataclass(frozen=True)
class Positions:
    """The set bits of masks, ``k`` in every row of a part of ``width``, in few bits each.

    9 + width / (256 k) bits, or 5 + width / (16 k), whichever is less: 9.4 for one in a hundred, 6.25 for one in 20.
    How they are packed is said in ``thinwire.ops.sparse``. The size depends on width and k alone.

    Attributes:
        parts: (width, k) of each parameter's columns, side by side; widths are multiples of 64.
        group: their lists begin at multiples of it, for a quantizer's groups.
    """

    parts: tuple[tuple[int, int], ...]
    group: int = 1

    @functools.cached_property
    def lists(self) -> tuple[sparse.ListSegment, ...]:
        """Where the positions of each part stand in a row of all of them."""
        found, start, place = [], 0, 0
        for width, k in self.parts:
            found.append(sparse.ListSegment(start, width, k, place))
            start, place = start + width, place + padded(k, self.group)
        return tuple(found)

    @property
    def size(self) -> int:
        """Of a row's list, with what lies between its parts."""
        return sum(padded(k, self.group) for _, k in self.parts)

    @property
    def nbytes(self) -> int:
        """Of a row: of each part a multiple of 8."""
        return sparse.packed_bytes(self.lists)

    def found(self, rows: int, space: Space) -> Tensor:
        """Memory for the lists of so many rows."""
        return space(("positions", rows), (rows, self.size), torch.int32)

    def split(self, rows: Tensor, rest: Tensor, space: Space) -> Tensor:
        """``rows`` (R, n) keep their largest, the others go to ``rest`` (R, n); zeros in their place. Where these are.
        """
        found, values = self._largest(rows, rest, space)
        sparse.put(values, found, rows.zero_())
        sparse.put(values.zero_(), found, rest)
        return found

    def pack(self, found: Tensor, out: Tensor) -> None:
        """``found`` of ``split`` -> ``out`` (R, nbytes) uint8, rows at multiples of 8 bytes."""
        sparse.pack(found, self.lists, out)

    def _largest(self, rows: Tensor, new: Tensor | None, space: Space) -> tuple[Tensor, Tensor]:
        shape = len(rows), self.size
        found, values = space("chosen", shape, torch.int32), space("their values", shape, torch.float32)
        sparse.largest(rows, None, self.lists, new, found, values)
        return found, values

    def read(self, wire: Tensor, words: Tensor, space: Space) -> Tensor:
        """``words`` (R, n / 64) from ``wire`` (L R, nbytes): a row of it has what any of L rows says, which are next to
        each other."""
        found = sparse.unpack(wire, self.lists, self.found(len(wire), space))
        return mask.from_indices(found.view(len(words), -1), words)


@dataclass(frozen=True)
class TopKIntegers(Codec):
    """Each rank's own largest values with their positions: ``k`` of every segment of a row, exactly, as integers.

    With 8 bits in groups of 64, a value takes 18.8 bits at a density of 0.003, 17.9 at 0.01, 14.8 at 0.05 and 14.1 at
    0.1. Not linear: ranks choose different positions. What is kept of an encoding is what was not sent, and what
    quantization leaves out.

    Attributes:
        segments: (start, width, k) of the row's columns, side by side, widths multiples of 64.
        quantizer: of the values; groups do not straddle two segments.
    """

    group: ClassVar[int] = mask.WORD
    linear = False

    segments: tuple[tuple[int, int, int], ...]
    quantizer: Integers

    def __post_init__(self) -> None:
        place = 0
        for start, width, k in self.segments:
            if start != place or width % mask.WORD or not 0 <= k <= width:
                raise ThinwireError(f"top-k: {k} values of columns {start} to {start + width}: not multiples of 64")
            place += width

    def wire_numel(self, n: int) -> int:
        # Rounded by segment, so that a row is the sum of its parts.
        values = (self.quantizer.wire_numel(padded(k, self.quantizer.group)) for _, _, k in self.segments)
        return self._positions.nbytes + sum(padded(nbytes, 8) for nbytes in values)

    @functools.cached_property
    def _positions(self) -> Positions:
        return Positions(tuple((width, k) for _, width, k in self.segments), self.quantizer.group)

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        self._choose(rows, None, None, out, seed, space)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual, seed: Seeds | None, space: Space
    ) -> None:
        self._choose(rows, residual.old, residual.new, out, seed, space)

    def _choose(
        self, rows: Tensor, old: Tensor | None, new: Tensor | None, out: Tensor, seed: Seeds | None, space: Space
    ) -> None:
        """One pass over the values, in which ``rows`` + ``old`` becomes ``new``; what follows is as short as the wire.
        """
        (positions, values), lists = self._split(out), self._positions.lists
        found, payload = self._positions.found(len(rows), space), self._payload("sent", len(rows), space)
        sparse.largest(rows, old, lists, new, found, payload)
        sparse.pack(found, lists, positions)
        self.quantizer.encode(payload, values, seed=seed)
        if new is not None:
            left = self.quantizer.decode(values, self._payload("left", len(rows), space))
            sparse.put(torch.sub(payload, left, out=left), found, new)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        sparse.put(*self._open(wire, space), out.zero_())

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        sparse.sum_at(*self._open(wire, space), self._positions.lists, out, scale)

    def _open(self, wire: Tensor, space: Space) -> tuple[Tensor, Tensor]:
        """The values of a received wire (P, m) float32, and their positions."""
        positions, values = self._split(wire)
        found = sparse.unpack(positions, self._positions.lists, self._positions.found(len(wire), space))
        return self.quantizer.decode(values, self._payload("got", len(wire), space)), found

    def _payload(self, use: str, rows: int, space: Space) -> Tensor:
        return space((use, rows), (rows, self._positions.size), torch.float32)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and the quantizer's wire: views of ``wire``."""
        head, tail = self._positions.nbytes, self.quantizer.wire_numel(self._positions.size)
        return wire[:, :head], wire[:, head : head + tail]


@dataclass(frozen=True)
class TiledTopK(OwnMasks):
    """The ``k`` largest values of each tile in 2 bits, with their positions in 12 (SparseLoCo, arXiv 2508.15706).

    A tile is 4096 consecutive values of a row. The wire of a row is that of its tiles, one behind the other: k codes of
    2 bits, k positions of 12, in rising order, and four levels in bfloat16. A code is a sign, and whether the value is
    larger than the mean |x| of those sent; a level is the mean of the values with its code. Not linear: ranks choose
    different positions. What is kept of an encoding is what was not sent, and how far values lie from their level.
    A value that is not finite spoils its level.

    14.5 bits for a value at k = 128. Theirs: tiles of 64 x 64 of a matrix, bins of 1.5 standard deviations, and one
    table for a tensor.

    Attributes:
        k: values sent of each tile, a multiple of 4 from 4 to 4096; higher => more bytes, less left out.

    Raises:
        ThinwireError: another k.
    """

    group: ClassVar[int] = TILE
    k: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 4 <= self.k <= TILE or self.k % 4:
            raise ThinwireError(f"top-k in tiles: k is a multiple of 4 from 4 to {TILE}, got {self.k}")

    def wire_numel(self, n: int) -> int:
        return n // TILE * sum(self._parts)

    @property
    def _parts(self) -> tuple[int, int, int]:
        """Bytes of a tile's codes, positions and levels."""
        return self.k // 4, self.k // 2 * 3, 2 * LEVELS

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        self._choose(rows.float(), out, None, space)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual, seed: Seeds | None, space: Space
    ) -> None:
        if residual.old is not None:
            rows.add_(residual.old)
        self._choose(rows, out, residual.new, space)

    def _choose(self, rows: Tensor, out: Tensor, new: Tensor | None, space: Space) -> None:
        words = self._mask(rows.shape, space)
        for row, of in zip(rows, words, strict=True):
            mask.topk_mask(row.view(-1, TILE), self.k, of.view(-1, TILE // mask.WORD))
        payload = self._payload(rows.shape, space)
        mask.gather_keep(rows, None, words, payload, new)
        positions = mask.indices(words.view(-1, TILE // mask.WORD), self._found(rows.shape, space))
        values = payload.view(len(rows), -1, self.k)
        size, negative = values.abs(), values < 0
        codes = negative + 2 * (size > size.mean(2, keepdim=True))
        levels = torch.stack([_mean_where(values, codes == code) for code in range(LEVELS)], 2).bfloat16()
        parts = (_pack2(codes), _pack12(positions.view(codes.shape)), levels.view(torch.uint8))
        out.copy_(torch.cat(parts, 2).flatten(1))
        if new is not None:
            values.sub_(levels.float().gather(2, codes))
            mask.write_at(payload, words, new)

    def _open(self, wire: Tensor, n: int, space: Space) -> tuple[Tensor, Tensor]:
        """Mask words (R, n / 64) and values (R, k of each tile) of a received wire."""
        shape = len(wire), n
        codes, positions, levels = wire.unflatten(1, (n // TILE, sum(self._parts))).split(self._parts, 2)
        # A copy of a few bytes, and they lie where view() to a wider dtype wants them.
        table = levels.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        found = self._found(shape, space)
        found.view(*codes.shape[:2], self.k).copy_(_unpack12(positions))
        words = self._mask(shape, space)
        mask.from_indices(found, words.view(-1, TILE // mask.WORD))
        return words, self._payload(shape, space).copy_(table.gather(2, _unpack2(codes)).flatten(1))

    def _payload(self, shape: Sequence[int], space: Space) -> Tensor:
        rows, n = shape
        return space(("payload", rows), (rows, n // TILE * self.k), torch.float32)

    def _found(self, shape: Sequence[int], space: Space) -> Tensor:
        rows, n = shape
        return space(("positions", rows), (rows * n // TILE, self.k), torch.int32)


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """(R, tiles): the mean of the ``chosen`` ones of ``values`` (R, tiles, k); 0 of none."""
    return torch.where(chosen, values, 0).sum(2) / chosen.sum(2).clamp_(min=1)


def _pack2(codes: Tensor) -> Tensor:
    """(..., k) of 0 to 3 -> (..., k / 4) uint8, the first in the lowest bits."""
    a, b, c, d = codes.to(torch.uint8).unflatten(-1, (-1, 4)).unbind(-1)
    return a | b << 2 | c << 4 | d << 6


def _unpack2(wire: Tensor) -> Tensor:
    """Back, int64."""
    return torch.stack([wire >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2).long()


def _pack12(positions: Tensor) -> Tensor:
    """(..., k) of 0 to 4095 -> (..., 3 k / 2) uint8, two in three bytes."""
    a, b = positions.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a & 255, a >> 8 | (b & 15) << 4, b >> 4], -1).flatten(-2).to(torch.uint8)


def _unpack12(wire: Tensor) -> Tensor:
    """Back, int32."""
    low, middle, high = wire.unflatten(-1, (-1, 3)).int().unbind(-1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], -1).flatten(-2)
