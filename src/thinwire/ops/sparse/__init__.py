"""The largest values of rows, by lists of their positions: choose, pack the positions, put values back at them.

Values are (R, n) float32; rows may be apart in memory, each is contiguous. A row consists of *segments*, one of each
parameter, of whose columns ``k`` are chosen. ``positions`` (R, m) int32 holds the chosen columns of the row, rising
within a segment, from the segment's ``list_start`` on; -1, no column, fills what lies between the lists. ``reference``,
``cpu`` and ``triton`` give the same bits. Where a wire says something that no packing does, CPUs refuse it; GPUs, which
would have to wait for the answer, leave out what lies beyond its segment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.backends import backend

__all__ = ["LOW_BITS", "ListSegment", "largest", "marked", "pack", "packed_bytes", "put", "sum_at", "unpack"]

LOW_BITS = (8, 4)
"""Bits of a position that may be packed as they are; of those that take the fewest bytes the first."""

_backend = backend("thinwire.ops.sparse")


class ListSegment(NamedTuple):
    """``width`` columns from ``start`` on, of which ``k`` are chosen; these are listed from ``list_start`` on.

    Segments lie side by side, in order. ``width``: a multiple of 64.
    """

    start: int
    width: int
    k: int
    list_start: int

    @property
    def low_bits(self) -> int:
        """Bits of a position that are packed as they are: 8, or 4 from about one chosen column in 68 on."""
        return min(LOW_BITS, key=lambda low_bits: sum(self._sizes(low_bits)))

    @property
    def high_bytes(self) -> int:
        """Bytes of the packed high bits: a multiple of 8."""
        return self._sizes(self.low_bits)[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed positions: a multiple of 8."""
        return sum(self._sizes(self.low_bits))

    def _sizes(self, low_bits: int) -> tuple[int, int]:
        """Bytes of the high bits and of the ``low_bits`` lower ones."""
        return -(-(self.k + -(-self.width >> low_bits)) // 64) * 8, -(-self.k * low_bits // 64) * 8


FIELDS = len(ListSegment._fields) + 3


@functools.cache
def wire_table(segments: tuple[ListSegment, ...], device: torch.device) -> Tensor:
    """Return (segments, FIELDS) int64: the fields of each, the first bit of its high bits in a row's wire and how many
    they are, behind which the lower ones come, and how many of these a position has."""
    values, wire_start = [], 0
    for segment in segments:
        values += [*segment, 8 * wire_start, 8 * segment.high_bytes, segment.low_bits]
        wire_start += segment.nbytes
    return torch.tensor(values, dtype=torch.int64, device=device).view(-1, FIELDS)


def packed_bytes(segments: Sequence[ListSegment]) -> int:
    """Return the bytes of a row's packed positions."""
    return sum(segment.nbytes for segment in segments)


def _check(rows: Tensor, *companions: Tensor | None) -> None:
    for tensor in (rows, *companions):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ThinwireError(f"the largest values are chosen of float32, got {tensor.dtype}: convert them first")
        if tensor is not None and tensor.shape != rows.shape:
            raise ThinwireError(f"{tuple(tensor.shape)} values do not go with rows of {tuple(rows.shape)}")


def largest(
    rows: Tensor, residual: Tensor | None, segments: tuple[ListSegment, ...], total_out: Tensor | None,
    positions: Tensor, payload: Tensor,
) -> None:  # fmt: skip
    """List the ``k`` largest |h| of each segment, h = ``rows`` + ``residual``: ``positions`` and ``payload``, h there.

    Exactly k: of equals those of the lowest columns; a NaN is larger than everything. ``payload`` (R, m) float32 has
    zeros between the lists. ``residual`` None: h = ``rows``. ``total_out`` = h, and may be ``rows`` or ``residual``;
    None, which needs ``residual`` to be None: h is stored nowhere.
    """
    _check(rows, residual, total_out)
    _backend(rows).largest(rows, residual, segments, total_out, positions, payload)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> Tensor:
    """``words`` (R, n / 64) int64 = a mask of the ``k`` largest |``rows``| of each segment, as ``largest`` finds them.

    Columns that are in none of ``segments`` are not on it.
    """
    _check(rows)
    if not segments:
        return words.zero_()
    _backend(rows).marked(rows, segments, words)
    return words


def pack(positions: Tensor, segments: tuple[ListSegment, ...], wire: Tensor) -> Tensor:
    """Pack ``positions`` into ``wire`` (R, packed_bytes) uint8, rows at multiples of 8 bytes.

    The lower b = ``low_bits`` bits of a segment's i-th position p are written as they are. The high bits p >> b, which
    rise, become a one at bit (p >> b) + i of a string of k + width / 2^b bits: the number of zeros before it is
    p >> b (Elias 1974, Fano 1971). A position takes about 9 + width / (256 k) bits with b = 8 and 5 + width / (16 k)
    with b = 4. A segment's string comes first, then its lower bits; the first are in the lowest bits of a byte.
    """
    if wire.numel():
        _backend(wire).pack(positions, segments, wire)
    return wire


def unpack(wire: Tensor, segments: tuple[ListSegment, ...], positions: Tensor) -> Tensor:
    """Unpack ``positions`` from ``wire``: the reverse of ``pack``."""
    if positions.numel():
        _backend(wire).unpack(wire, segments, positions)
    return positions


def put(payload: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, n) = ``payload`` (R, m) at ``positions``, as it was elsewhere."""
    if payload.numel():
        _backend(out).put(payload, positions, out)
    return out


def sum_at(
    payload: Tensor, positions: Tensor, segments: tuple[ListSegment, ...], out: Tensor, scale: float = 1.0
) -> Tensor:
    """``out`` (n,) = ``scale`` * the sum over peers, in order, of ``payload`` (P, m) at their ``positions``; else 0."""
    if out.numel():
        _backend(out).sum_at(payload, positions, segments, out, scale)
    return out
