"""Each rank's own largest values with their positions: in float32, 8 or 4 bits, positions in about 9; or in tiles."""

from __future__ import annotations

import functools
from abc import abstractmethod
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

TILE = 4096
"""Values of a tile: as many as 12 bits count."""
LEVELS = 4
"""Bins of a tile's values, which are 2 bits each."""


@dataclass(frozen=True)
class Positions:
    """The positions of ``k`` values in every segment of a row, in few bits each.

    9 + width / (256 k) bits, or 5 + width / (16 k), whichever is less: 9.4 for one in a hundred, 6.25 for one in 20.
    ``thinwire.ops.sparse`` says how they are packed. The size depends on width and k alone.

    Attributes:
        segments: (width, k) of each parameter's columns, side by side; widths are multiples of 64.
        group: their lists begin at multiples of it, for a quantizer's groups.

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
        """The segments, with the start of each one's positions in a row's list of all."""
        lists, start, list_start = [], 0, 0
        for width, k in self.segments:
            lists.append(sparse.ListSegment(start, width, k, list_start))
            start, list_start = start + width, list_start + padded(k, self.group)
        return tuple(lists)

    @property
    def size(self) -> int:
        """Length of a row's list, with the padding between segments."""
        return sum(padded(k, self.group) for _, k in self.segments)

    @property
    def nbytes(self) -> int:
        """Bytes of a row's packed positions: a multiple of 8, of each segment too."""
        return sparse.packed_bytes(self.lists)

    def memory(self, rows: int, space: Space) -> Tensor:
        """Memory for the lists of ``rows`` rows: (rows, size) int32."""
        return space(("positions", rows), (rows, self.size), torch.int32)

    def split(self, rows: Tensor, remainder: Tensor, space: Space) -> Tensor:
        """Keep the largest of ``rows`` (R, n), zeros elsewhere; ``remainder`` = the others. Return the positions."""
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
        """Write ``wire`` (R, nbytes) as masks to ``words`` (R, n / 64)."""
        return mask.from_indices(self.unpack(wire, space), words)


class LargestValues(Codec):
    """A wire that holds some values of each row, and where they are.

    Not linear: ranks choose different positions. The residual of an encoding is the values that were not sent, and what
    rounding leaves of those that were.
    """

    linear = False

    @abstractmethod
    def _positions(self, n: int) -> Positions:
        """Return the layout of the positions of a row of ``n`` columns."""

    @abstractmethod
    def _write(self, positions: Tensor, values: Tensor, out: Tensor, seed: Seeds | None) -> None:
        """Write the wire of ``values`` (R, m) float32 at ``positions`` (R, m) int32 to ``out``."""

    @abstractmethod
    def _positions_in(self, wire: Tensor, n: int, space: Space) -> Tensor:
        """Return the positions (R, m) int32 that ``wire`` holds: columns of a row of ``n``."""

    @abstractmethod
    def _values_in(self, wire: Tensor, n: int, space: Space) -> Tensor:
        """Return the values (R, m) float32 that ``wire`` holds."""

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual | None, seed: Seeds | None, space: Space
    ) -> None:
        """Send the largest in one pass over the values; all else is as short as the wire."""
        old, new = (None, None) if residual is None else (residual.old, residual.new)
        n, layout = rows.shape[1], self._positions(rows.shape[1])
        positions = layout.memory(len(rows), space)
        values = space(("values", len(rows)), positions.shape, torch.float32)
        sparse.largest(rows.float(), old, layout.lists, new, positions, values)
        self._write(positions, values, out, seed)
        if new is not None:
            sparse.put(values.sub_(self._values_in(out, n, space)), positions, new)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        n = out.shape[1]
        sparse.put(self._values_in(wire, n, space), self._positions_in(wire, n, space), out.zero_())

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        n = len(out)
        values, positions = self._values_in(wire, n, space), self._positions_in(wire, n, space)
        sparse.sum_at(values, positions, self._positions(n).lists, out, scale)


@dataclass(frozen=True)
class Sparse(LargestValues):
    """Each rank's own largest values with their positions: exactly ``k`` of every segment of a row.

    With one value in a hundred, each takes 41.4 bits in float32, 17.9 in 8 bits and groups of 64, 13.9 in 4. The wire
    of a row is its positions (``Positions``), then the values, each segment's rounded up to 8 bytes, so that a row is
    the sum of its segments.

    Attributes:
        segments: (width, k) of the row's columns, side by side, widths multiples of 64.
        integers: what values travel as, float32 if None; groups do not straddle two segments.
    """

    group: ClassVar[int] = mask.WORD

    segments: tuple[tuple[int, int], ...]
    integers: Integers | None = None

    def __post_init__(self) -> None:
        Positions(self.segments)  # refuses what cannot be sent

    @functools.cached_property
    def _layout(self) -> Positions:
        return Positions(self.segments, self._list_group)

    @property
    def _list_group(self) -> int:
        """Two values of float32 are 8 bytes."""
        return 2 if self.integers is None else self.integers.group

    def wire_numel(self, n: int) -> int:
        lists = (padded(k, self._list_group) for _, k in self.segments)
        return self._layout.nbytes + sum(padded(self._value_bytes(size), 8) for size in lists)

    def _value_bytes(self, count: int) -> int:
        """Bytes of ``count`` values, whole groups."""
        return 4 * count if self.integers is None else self.integers.wire_numel(count)

    def _positions(self, n: int) -> Positions:
        return self._layout

    def _write(self, positions: Tensor, values: Tensor, out: Tensor, seed: Seeds | None) -> None:
        position_bytes, value_bytes = self._split(out)
        self._layout.pack(positions, position_bytes)
        if self.integers is None:
            value_bytes.view(torch.float32).copy_(values)
        else:
            self.integers.encode(values, value_bytes, seed=seed)

    def _positions_in(self, wire: Tensor, n: int, space: Space) -> Tensor:
        return self._layout.unpack(self._split(wire)[0], space)

    def _values_in(self, wire: Tensor, n: int, space: Space) -> Tensor:
        value_bytes = self._split(wire)[1]
        if self.integers is None:
            return value_bytes.view(torch.float32)
        values = space(("decoded", len(wire)), (len(wire), self._layout.size), torch.float32)
        return self.integers.decode(value_bytes, values)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of positions, and those of the values: views of ``wire``."""
        head, tail = self._layout.nbytes, self._value_bytes(self._layout.size)
        wire = viewable(wire)
        return wire[:, :head], wire[:, head : head + tail]


@dataclass(frozen=True)
class TiledTopK(LargestValues):
    """The ``k`` largest values of each tile in 2 bits, with their positions in 12 (SparseLoCo, arXiv 2508.15706).

    A tile is 4096 consecutive values of a row. The wire of a row is that of its tiles, one behind the other: k codes of
    2 bits, k positions of 12, in rising order, and four levels in bfloat16. A code is a sign, and whether the value is
    larger than the mean |x| of those sent; a level is the mean of the values with its code. A value that is not finite
    spoils its level.

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
        return n // TILE * sum(self._sizes)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of a tile's codes, positions and levels."""
        return self.k // 4, self.k // 2 * 3, 2 * LEVELS

    def _positions(self, n: int) -> Positions:
        return _tiles(n // TILE, self.k)

    def _write(self, positions: Tensor, values: Tensor, out: Tensor, seed: Seeds | None) -> None:
        values = values.view(len(values), -1, self.k)
        size, negative = values.abs(), values < 0
        codes = negative + 2 * (size > size.mean(2, keepdim=True))
        levels = torch.stack([_mean_where(values, codes == code) for code in range(LEVELS)], 2).bfloat16()
        columns = positions.view(values.shape) % TILE
        out.copy_(torch.cat((_pack2(codes), _pack12(columns), levels.view(torch.uint8)), 2).flatten(1))

    def _positions_in(self, wire: Tensor, n: int, space: Space) -> Tensor:
        columns = _unpack12(self._split(wire, n)[1])
        if wire.device.type == "cpu" and bool((columns[..., 1:] <= columns[..., :-1]).any()):  # a GPU is not waited for
            raise ThinwireError("a tile of positions that came does not rise")
        starts = torch.arange(0, n, TILE, dtype=torch.int32, device=wire.device)
        return (columns + starts.unsqueeze(1)).flatten(1)

    def _values_in(self, wire: Tensor, n: int, space: Space) -> Tensor:
        codes, _, levels = self._split(wire, n)
        # A copy of a few bytes, and they lie where view() to a wider dtype wants them.
        table = levels.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
        return table.gather(2, _unpack2(codes)).flatten(1)

    def _split(self, wire: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """The bytes of each tile's codes, positions and levels, (R, tiles, bytes): views of ``wire``."""
        codes, positions, levels = wire.unflatten(1, (n // TILE, sum(self._sizes))).split(self._sizes, 2)
        return codes, positions, levels


@functools.cache
def _tiles(count: int, k: int) -> Positions:
    """``k`` values of each of ``count`` tiles."""
    return Positions(((TILE, k),) * count)


def _mean_where(values: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the ``chosen`` ones of ``values`` (R, tiles, k), or 0 where none is: (R, tiles)."""
    return torch.where(chosen, values, 0).sum(2) / chosen.sum(2).clamp_(min=1)


def _pack2(codes: Tensor) -> Tensor:
    """Pack (..., k) of 0 to 3 into (..., k / 4) uint8, the first in the lowest bits."""
    a, b, c, d = codes.to(torch.uint8).unflatten(-1, (-1, 4)).unbind(-1)
    return a | b << 2 | c << 4 | d << 6


def _unpack2(wire: Tensor) -> Tensor:
    """Reverse ``_pack2``: int64."""
    return torch.stack([wire >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2).long()


def _pack12(positions: Tensor) -> Tensor:
    """Pack (..., k) of 0 to 4095 into (..., 3 k / 2) uint8, two in three bytes."""
    a, b = positions.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a & 255, a >> 8 | (b & 15) << 4, b >> 4], -1).flatten(-2).to(torch.uint8)


def _unpack12(wire: Tensor) -> Tensor:
    """Reverse ``_pack12``: int32."""
    low, middle, high = wire.unflatten(-1, (-1, 3)).int().unbind(-1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], -1).flatten(-2)
