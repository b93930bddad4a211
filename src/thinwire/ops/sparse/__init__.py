"""The largest values of rows, by lists of their positions: choose, pack the positions, put values back at them.

Values are (R, n) float32; rows may be apart in memory, each is contiguous. A row consists of *segments*, one for each
parameter, of whose columns ``k`` are chosen. ``positions`` (R, m) int32 holds the chosen columns of the row, rising
within a segment, from the segment's ``list_start`` on, and -1 between the lists. ``reference``, ``cpu`` and ``triton``
give the same bits. CPUs refuse a malformed wire; GPUs, where the check would stall the stream, ignore positions beyond
their segment.
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
"""Choices for the bits of a position that are packed unchanged: the fewest bytes win, on a tie the first choice."""

_backend = backend("thinwire.ops.sparse")


class ListSegment(NamedTuple):
    """``width`` columns (64 i) from ``start`` on, of which ``k`` are chosen; these are listed from ``list_start`` on.

    Segments lie side by side, in order.
    """

    start: int
    width: int
    k: int
    list_start: int

    @property
    def low_bits(self) -> int:
        """Bits of a position that are packed unchanged: 8, or 4 from about one chosen column in 68 on."""
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
        """Return the bytes of the high bits and of the ``low_bits`` lower ones."""
        return -(-(self.k + -(-self.width >> low_bits)) // 64) * 8, -(-self.k * low_bits // 64) * 8


FIELDS = len(ListSegment._fields) + 4


@functools.cache
def wire_table(segments: tuple[ListSegment, ...], device: torch.device) -> Tensor:
    """Return (segments, FIELDS) int64: each segment's fields, the first bit of its high bits in a row's wire, their
    number (the lower bits follow them), the number of lower bits per position, and the next list's start, or -1."""
    values, wire_start = [], 0
    ends = [*(segment.list_start for segment in segments[1:]), -1]
    for segment, end in zip(segments, ends, strict=True):
        values += [*segment, 8 * wire_start, 8 * segment.high_bytes, segment.low_bits, end]
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
    """List the ``positions`` of the ``k`` largest |h| of each segment, and h there in ``payload``.

    h = ``rows`` + ``residual``, or ``rows`` alone. Ties go to the lowest columns; a NaN is larger than everything.
    ``payload`` (R, m) float32 has zeros between the lists. ``total_out`` = h, and may be ``rows`` or ``residual``; None
    does not store h, and needs ``residual`` to be None.
    """
    _check(rows, residual, total_out)
    _backend(rows).largest(rows, residual, segments, total_out, positions, payload)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> Tensor:
    """Make ``words`` (R, n / 64) int64 a mask of the columns that ``largest`` lists, and of no others."""
    _check(rows)
    if not segments:
        return words.zero_()
    _backend(rows).marked(rows, segments, words)
    return words


def pack(positions: Tensor, segments: tuple[ListSegment, ...], wire: Tensor) -> Tensor:
    """Pack ``positions`` into ``wire`` (R, packed_bytes) uint8, rows at multiples of 8 bytes.

    The lower b = ``low_bits`` bits of a segment's i-th position p are written unchanged. The high bits p >> b, which
    rise, become a one at bit (p >> b) + i of a string of k + width / 2^b bits, with p >> b zeros before it (Elias 1974,
    Fano 1971). A position takes about 9 + width / (256 k) bits with b = 8 and 5 + width / (16 k) with b = 4. A
    segment's string comes first, then its lower bits; bytes fill from the lowest bit.
    """
    if wire.numel():
        _backend(wire).pack(positions, segments, wire)
    return wire


def unpack(wire: Tensor, segments: tuple[ListSegment, ...], positions: Tensor) -> Tensor:
    """Unpack ``positions`` from ``wire``."""
    if positions.numel():
        _backend(wire).unpack(wire, segments, positions)
    return positions


def put(payload: Tensor, positions: Tensor, out: Tensor, minus: Tensor | None = None) -> Tensor:
    """Write ``payload`` (R, m), less ``minus`` if given, at ``positions`` to ``out`` (R, n), which keeps the rest."""
    if payload.numel():
        _backend(out).put(payload, positions, out, minus)
    return out


def sum_at(
    payload: Tensor, positions: Tensor, segments: tuple[ListSegment, ...], out: Tensor, scale: float = 1.0
) -> Tensor:
    """Write ``scale`` * the sum of P peers' ``payload`` (P, m) at ``positions``, in order, else 0, to ``out`` (n,)."""
    if out.numel():
        _backend(out).sum_at(payload, positions, segments, out, scale)
    return out
