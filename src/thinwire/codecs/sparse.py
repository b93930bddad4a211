"""Each rank's own largest values in few bits: positions in about 9, values in 8 or 4."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bucket import padded
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.codecs.intquant import Integers
from thinwire.errors import ThinwireError
from thinwire.ops import mask, sparse
from thinwire.streams import Seeds


@dataclass(frozen=True)
class Positions:
    """The set bits of masks, ``k`` in every row of a part of ``width``, in 9 + width / (256 k) bits each.

    How they are packed is said in ``thinwire.ops.sparse``. The size depends on width and k alone.

    Attributes:
        parts: (width, k) of each parameter's columns, side by side; widths are multiples of 64.
        group: their lists begin at multiples of it, for a quantizer's groups.
    """

    parts: tuple[tuple[int, int], ...]
    group: int = 1

    @functools.cached_property
    def lists(self) -> tuple[sparse.Part, ...]:
        """Where the positions of each part stand in a row of all of them."""
        found, start, place = [], 0, 0
        for width, k in self.parts:
            found.append(sparse.Part(start, width, k, place))
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

    def write(self, words: Tensor, out: Tensor, space: Space) -> None:
        """``words`` (R, n / 64) int64 -> ``out`` (R, nbytes) uint8, rows at multiples of 8 bytes."""
        found = mask.indices(words, self.found(len(words), space))
        sparse.pack(found, self.lists, out)

    def read(self, wire: Tensor, words: Tensor, space: Space) -> Tensor:
        """``words`` (R, n / 64) from ``wire`` (R, nbytes)."""
        found = sparse.unpack(wire, self.lists, self.found(len(wire), space))
        return mask.from_indices(found, words)


@dataclass(frozen=True)
class TopKIntegers(Codec):
    """Each rank's own largest values with their positions: ``k`` of every segment of a row, exactly, as integers.

    With 8 bits in groups of 64, a value takes 17.9 bits at a density of 0.01 and 18.8 at 0.003. Not linear: ranks
    choose different positions. What is kept of an encoding is what was not sent, and what quantization leaves out.

    Attributes:
        segments: (start, width, k) of the row's columns, side by side, widths multiples of 64.
        quantizer: of the values; groups do not straddle two segments.
    """

    linear = False

    segments: tuple[tuple[int, int, int], ...]
    quantizer: Integers

    def __post_init__(self) -> None:
        place = 0
        for start, width, k in self.segments:
            if start != place or width % mask.WORD or not 0 <= k <= width:
                raise ThinwireError(f"top-k: {k} values of columns {start} to {start + width}: not multiples of 64")
            place += width

    @property
    def group(self) -> int:
        return mask.WORD

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

    def part(self, wire: Tensor, n: int, columns: slice) -> Tensor:
        """The wire of a top-k of this segment alone, which starts at 0."""
        positions, values = self._split(wire)
        before = [(width, k) for start, width, k in self.segments if start < columns.start]
        (own,) = ((width, k) for start, width, k in self.segments if start == columns.start)
        head, group = Positions(tuple(before)).nbytes, self.quantizer.group
        first, k = sum(padded(k, group) for _, k in before), padded(own[1], group)
        codes = self.quantizer.part(values, self._positions.size, slice(first, first + k))
        found = torch.cat([positions[:, head : head + Positions((own,)).nbytes], codes], 1)
        return torch.nn.functional.pad(found, (0, -found.shape[1] % 8))

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
