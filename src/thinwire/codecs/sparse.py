"""Each rank's own largest values in few bits: positions in about 9, values in 8 or 4."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.bucket import padded
from thinwire.codecs.base import Codec, Residual, Space, viewable
from thinwire.codecs.intquant import Integers
from thinwire.codecs.mask import MaskedIntegers
from thinwire.errors import ThinwireError
from thinwire.ops import mask
from thinwire.streams import Seeds

LOW = 8
"""Bits of a position that are sent as they are."""


@dataclass(frozen=True)
class Positions:
    """The set bits of masks, ``k`` in every row of a part of ``width``, in 9 + width / (256 k) bits each.

    Of the i-th position p of a part, in rising order, the lower byte travels as it is; of the rest, which rises too, a
    one at place (p >> 8) + i of a string of k + width / 256 bits: so many zeros before it as it is high (Elias 1974,
    Fano 1971). The size depends on width and k alone.

    Attributes:
        parts: (width, k) of each parameter's columns, side by side; widths are multiples of 64.
    """

    parts: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Of a row: of each part a multiple of 8."""
        return sum(8 * _string(*part) + padded(part[1], 8) for part in self.parts)

    def write(self, words: Tensor, out: Tensor, space: Space) -> None:
        """``words`` (R, n / 64) int64 -> ``out`` (R, nbytes) uint8, rows at multiples of 8 bytes."""
        for k, of, high, low in self._places(words, out):
            found = mask.indices(of, space(("positions", len(of), k), (len(of), k), torch.int32))
            low.copy_(found & (1 << LOW) - 1)
            mask.from_indices((found >> LOW) + _count(found), high)

    def read(self, wire: Tensor, words: Tensor, space: Space) -> Tensor:
        """``words`` (R, n / 64) from ``wire`` (R, nbytes)."""
        for k, of, high, low in self._places(words, wire):
            found = mask.indices(high, space(("positions", len(of), k), (len(of), k), torch.int32))
            mask.from_indices((found - _count(found) << LOW) + low, of)
        return words

    def _places(self, words: Tensor, wire: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Of each part: k, its mask words, its string of bits (R, words) int64, its lower bytes (R, k)."""
        wire, word, place = viewable(wire), 0, 0
        for width, k in self.parts:
            middle = place + 8 * _string(width, k)
            of = words[:, word : word + width // mask.WORD]
            yield k, of, wire[:, place:middle].view(torch.int64), wire[:, middle : middle + k]
            word, place = word + width // mask.WORD, middle + padded(k, 8)


def _string(width: int, k: int) -> int:
    """Words of 64 bits."""
    return -(-(k + -(-width >> LOW)) // mask.WORD)


def _count(found: Tensor) -> Tensor:
    return torch.arange(found.shape[1], dtype=torch.int32, device=found.device)


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

    @property
    def _positions(self) -> Positions:
        return Positions(tuple((width, k) for _, width, k in self.segments))

    def _values(self, words: Tensor | None) -> MaskedIntegers:
        """The codec of the values at the mask ``words``."""
        parts = tuple((width // mask.WORD, k) for _, width, k in self.segments)
        return MaskedIntegers(torch.empty(0) if words is None else words, parts, self.quantizer)

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        self._choose(rows, out, None, seed, space)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual, seed: Seeds | None, space: Space
    ) -> None:
        if residual.old is not None:
            rows.add_(residual.old)
        self._choose(rows, out, residual.new, seed, space)

    def _choose(self, rows: Tensor, out: Tensor, new: Tensor | None, seed: Seeds | None, space: Space) -> None:
        words, (positions, values) = self._mask(len(rows), space), self._split(out)
        for start, width, k in self.segments:
            at = slice(start // mask.WORD, (start + width) // mask.WORD)
            mask.topk_mask(rows[:, start : start + width], k, words[:, at])
        self._positions.write(words, positions, space)
        self._values(words).gather(rows, values, new, seed, space)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        words, values = self._open(wire, space)
        self._values(words).decode(values, out, space=space)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        words, values = self._open(wire, space)
        self._values(words).decode_apart(values, out, scale, space)

    def part(self, wire: Tensor, n: int, columns: slice) -> Tensor:
        """The wire of a top-k of this segment alone, which starts at 0."""
        positions, values = self._split(wire)
        before = [(width, k) for start, width, k in self.segments if start < columns.start]
        (own,) = ((width, k) for start, width, k in self.segments if start == columns.start)
        head, group = Positions(tuple(before)).nbytes, self.quantizer.group
        first, k = sum(padded(k, group) for _, k in before), padded(own[1], group)
        codes = self.quantizer.part(values, self._values(None).size, slice(first, first + k))
        found = torch.cat([positions[:, head : head + Positions((own,)).nbytes], codes], 1)
        return torch.nn.functional.pad(found, (0, -found.shape[1] % 8))

    def _open(self, wire: Tensor, space: Space) -> tuple[Tensor, Tensor]:
        """Mask words and values of a received wire."""
        positions, values = self._split(wire)
        return self._positions.read(positions, self._mask(len(wire), space), space), values

    def _mask(self, rows: int, space: Space) -> Tensor:
        return space(("words", rows), (rows, sum(w for _, w, _ in self.segments) // mask.WORD), torch.int64)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Positions and the quantizer's wire: views of ``wire``."""
        head, tail = self._positions.nbytes, self._values(None).wire_numel(0)
        return wire[:, :head], wire[:, head : head + tail]
