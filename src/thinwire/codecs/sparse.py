"""Codecs of each rank's own largest values, in float32, 8 or 4 bits, with their positions in about 9 bits."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.alignment import padded, viewable
from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.codecs.intquant import Integers
from thinwire.ops import mask, sparse


@dataclass(frozen=True)
class Positions:
    """Packs the positions of ``k`` values in every segment of a row, as ``thinwire.ops.sparse`` describes.

    A position takes 9 + width / (256 k) bits, or 5 + width / (16 k), whichever is less: 9.4 for one in a hundred, 6.25
    for one in 20. The size depends on width and k alone.

    Attributes:
        segments: (width, k) of each parameter's columns, side by side; widths are multiples of 64.
        group: each segment's list begins at a multiple of it, for a quantizer's groups.

    Raises:
        ThinwireError: another width or k.
    """

    segments: tuple[tuple[int, int], ...]
    group: int = 1

    def __post_init__(self) -> None:
        for width, k in self.segments:
            if width % mask.WORD or not 0 <= k <= width:
                raise ThinwireError(f"top-k: {k} values of {width} columns, which are not a multiple of 64, or too few")

    @functools.cached_property
    def lists(self) -> tuple[sparse.ListSegment, ...]:
        """The segments, each with the start of its positions in a row's list."""
        lists, start, list_start = [], 0, 0
        for width, k in self.segments:
            lists.append(sparse.ListSegment(start, width, k, list_start))
            start, list_start = start + width, list_start + padded(k, self.group)
        return tuple(lists)

    @functools.cached_property
    def size(self) -> int:
        """Length of a row's list, with the padding between segments."""
        return sum(padded(k, self.group) for _, k in self.segments)

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of a row's packed positions: a multiple of 8, as each segment's are."""
        return sparse.packed_bytes(self.lists)

    def memory(self, rows: int, space: Space) -> Tensor:
        """Return memory for the lists of ``rows`` rows: (rows, size) int32."""
        return space(("positions", rows), (rows, self.size), torch.int32)

    def split(self, rows: Tensor, remainder: Tensor, space: Space) -> Tensor:
        """Keep the largest of ``rows`` (R, n), move the others to ``remainder``, zeros elsewhere. Return positions."""
        positions = space("chosen", (len(rows), self.size), torch.int32)
        values = space("their values", positions.shape, torch.float32)
        sparse.largest(rows, None, self.lists, remainder, positions, values)
        sparse.put(values, positions, rows.zero_())
        sparse.put(values.zero_(), positions, remainder)
        return positions

    def pack(self, positions: Tensor, out: Tensor) -> None:
        """Pack ``positions`` (R, size) into ``out`` (R, nbytes) uint8, rows at multiples of 8 bytes."""
        sparse.pack(positions, self.lists, out)

    def unpack(self, wire: Tensor, space: Space) -> Tensor:
        """Return the positions (R, size) of ``wire`` (R, nbytes)."""
        return sparse.unpack(wire, self.lists, self.memory(len(wire), space))

    def read(self, wire: Tensor, words: Tensor, space: Space) -> Tensor:
        """Write the positions in ``wire`` (R, nbytes) as masks to ``words`` (R, n / 64)."""
        return mask.from_indices(self.unpack(wire, space), words)


@dataclass(frozen=True)
class Sparse(Codec):
    """Sends each rank's own largest values with their positions: exactly ``k`` of every segment of a row.

    With one value in a hundred, each takes 41.4 bits in float32, 17.9 in 8 bits and groups of 64, 13.9 in 4. A row's
    wire is its positions (``Positions``), then its values, each segment's padded to 8 bytes, so that sizes add up over
    segments. Not linear: ranks choose different positions. The residual of an encoding is the values that were not
    sent, and the rounding errors of the others.

    Attributes:
        segments: (width, k) of the row's columns, side by side; widths are multiples of 64.
        integers: the format of the values, float32 if None; groups do not straddle two segments.
    """

    linear = False
    group: ClassVar[int] = mask.WORD

    segments: tuple[tuple[int, int], ...]
    integers: Integers | None = None

    def __post_init__(self) -> None:
        Positions(self.segments)  # refuses segments that cannot be sent

    @functools.cached_property
    def _layout(self) -> Positions:
        return Positions(self.segments, self._list_group)

    @property
    def _list_group(self) -> int:
        return 2 if self.integers is None else self.integers.group  # two float32 are 8 bytes

    def wire_numel(self, n: int) -> int:
        return self._wire_bytes

    @functools.cached_property
    def _wire_bytes(self) -> int:
        lists = (padded(k, self._list_group) for _, k in self.segments)
        return self._layout.nbytes + sum(padded(self._value_bytes(size), 8) for size in lists)

    def _value_bytes(self, count: int) -> int:
        """Return the bytes of ``count`` values, whole groups."""
        return 4 * count if self.integers is None else self.integers.wire_numel(count)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual | None, seed: Seeds | None, space: Space
    ) -> None:
        """Choose the largest in one pass over the values; all other steps run over lists as short as the wire."""
        old, new = (None, None) if residual is None else (residual.old, residual.new)
        positions = self._layout.memory(len(rows), space)
        values = space(("values", len(rows)), positions.shape, torch.float32)
        sparse.largest(rows.float(), old, self._layout.lists, new, positions, values)
        position_bytes, value_bytes = self._split(out)
        self._layout.pack(positions, position_bytes)
        if self.integers is None:
            value_bytes.view(torch.float32).copy_(values)
        else:
            self.integers.encode(values, value_bytes, seed=seed)
        if new is not None:
            sparse.put(values, positions, new, minus=self._values_in(value_bytes, space))

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        positions, values = self._read(wire, space)
        sparse.put(values, positions, out.zero_())

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        positions, values = self._read(wire, space)
        sparse.sum_at(values, positions, self._layout.lists, out, scale)

    def _read(self, wire: Tensor, space: Space) -> tuple[Tensor, Tensor]:
        """Read the positions (R, m) int32 and the values (R, m) float32 from ``wire``."""
        position_bytes, value_bytes = self._split(wire)
        return self._layout.unpack(position_bytes, space), self._values_in(value_bytes, space)

    def _values_in(self, value_bytes: Tensor, space: Space) -> Tensor:
        if self.integers is None:
            return value_bytes.view(torch.float32)
        values = space(("decoded", len(value_bytes)), (len(value_bytes), self._layout.size), torch.float32)
        return self.integers.decode(value_bytes, values)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the bytes of positions and of values in ``wire``."""
        head, tail = self._layout.nbytes, self._value_bytes(self._layout.size)
        wire = viewable(wire)
        return wire[:, :head], wire[:, head : head + tail]
