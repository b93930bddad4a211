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
                raise ThinwireError(
                    f"top-k: cannot send {k} of {width} values: the length must be a multiple of 64, and k at most that"
                )

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

    def split(self, rows: Tensor, residual: Residual, space: Space, wire: Tensor | None = None) -> None:
        """Keep the largest of ``rows`` (R, n) + ``residual.old``, the others in ``residual.new``; zeros elsewhere.

        Pack their positions into ``wire`` (R, nbytes) uint8, rows at multiples of 8 bytes; None: nobody asks for them.
        """
        positions = space("chosen", (len(rows), self.size), torch.int32)
        values = space("their values", positions.shape, torch.float32)
        sparse.largest(
            rows, residual.old, self.lists, residual.new, positions, values, wire, guess=residual.guess
        )
        sparse.put(values, positions, rows.zero_())
        sparse.put(values.zero_(), positions, residual.new)

    def read(self, wire: Tensor, words: Tensor, space: Space) -> Tensor:
        """Write the positions in ``wire`` (R, nbytes) as masks to ``words`` (R, n / 64)."""
        return sparse.read(wire, self.lists, words, positions=self.memory(len(wire), space))


@dataclass(frozen=True)
class Sparse(Codec):
    """Sends each rank's own largest values with their positions: exactly ``k`` of every segment of a row.

    With one value in a hundred, each takes 41.4 bits in float32, 17.9 in 8 bits and groups of 64, 13.9 in 4. A row's
    wire is its positions (``Positions``), then its values, each segment's padded to 8 bytes, so that sizes add up over
    segments. Not linear: ranks choose different positions. The residual of an encoding is the values that were not
    sent, and the rounding errors of the others.

    Attributes:
        segments: (width, k) of the row's columns, side by side; widths are multiples of 64.
        integers: the format of the values, float32 if None; groups do not straddle two segments. They are rounded to
            the nearest, without a transform, which would spread a value over others' positions.
    """

    linear = False
    takes_steps = True
    word = 8
    group: ClassVar[int] = mask.WORD

    segments: tuple[tuple[int, int], ...]
    integers: Integers | None = None

    def __post_init__(self) -> None:
        Positions(self.segments)  # refuses segments that cannot be sent
        if self.integers is not None and (self.integers.draws or self.integers.hadamard):
            raise ThinwireError(f"top-k: integers must round to the nearest, without a transform, got {self.integers}")

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
        old, new, step, guess = None, None, None, None
        if residual is not None:
            old, new, step, guess = residual.old, residual.new, residual.step, residual.guess
        positions, decoded = self._memory(len(rows), space)
        payload = space(("values", len(rows)), positions.shape, torch.float32)
        position_bytes, values = self._split(out)
        sparse.largest(
            rows.float(), old, self._layout.lists, new, positions, payload, position_bytes, step, values, decoded,
            guess,
        )  # fmt: skip

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        self._decode_to(wire, out, None, space)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        self._decode_to(wire, out.unsqueeze(0), scale, space)

    def _decode_to(self, wire: Tensor, out: Tensor, scale: float | None, space: Space) -> None:
        position_bytes, values = self._split(wire)
        positions, decoded = self._memory(len(wire), space)
        sparse.decode(position_bytes, values, self._layout.lists, out, scale, positions=positions, decoded=decoded)

    def _memory(self, rows: int, space: Space) -> tuple[Tensor, Tensor | None]:
        """Return memory for the positions of ``rows`` rows and, where values are integers, for what these decode to."""
        positions = self._layout.memory(rows, space)
        decoded = None if self.integers is None else space(("decoded", rows), positions.shape, torch.float32)
        return positions, decoded

    def _split(self, wire: Tensor) -> tuple[Tensor, sparse.WireValues]:
        """Return views of the bytes of positions and of the values in ``wire``."""
        head, size = self._layout.nbytes, self._layout.size
        wire = viewable(wire)
        value_bytes = wire[:, head : head + self._value_bytes(size)]
        if self.integers is None:
            return wire[:, :head], sparse.WireValues(value_bytes.view(torch.float32))
        codes, scales = self.integers.codes_of(value_bytes, size)
        return wire[:, :head], sparse.WireValues(codes, scales, self.integers.format)
