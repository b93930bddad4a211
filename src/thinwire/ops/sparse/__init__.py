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
from thinwire.ops.direction import Adam
from thinwire.ops.programs import check_width
from thinwire.ops.quant import Format

__all__ = [
    "LOW_BITS", "ListSegment", "WireValues", "decode", "largest", "marked", "packed_bytes", "put", "read",
]  # fmt: skip

LOW_BITS = (8, 4)
"""Choices for the bits of a position that are packed unchanged: the fewest bytes win, on a tie the first choice."""
BLOCK = 1024
"""Columns of a segment that one program of a GPU decodes."""

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


class WireValues(NamedTuple):
    """Lists of values (R, m) on a wire, in the order of their positions.

    Attributes:
        codes: (R, m) float32; or integers as in ``thinwire.ops.quant``, of whole groups that no list shares.
        scales: (R, m / group) float32, with integers. format: of the integers, rounded to the nearest, without a
            transform; None: float32.
    """

    codes: Tensor
    scales: Tensor | None = None
    format: Format | None = None


FIELDS = len(ListSegment._fields) + 5


@functools.cache
def wire_table(segments: tuple[ListSegment, ...], device: torch.device) -> Tensor:
    """Return (segments, FIELDS) int64: each segment's fields, the first bit of its high bits in a row's wire, their
    number (the lower bits follow them), the number of lower bits per position, the next list's start, or -1, and the
    ``BLOCK`` columns before the segment."""
    values, wire_start, blocks = [], 0, 0
    ends = [*(segment.list_start for segment in segments[1:]), -1]
    for segment, end in zip(segments, ends, strict=True):
        values += [*segment, 8 * wire_start, 8 * segment.high_bytes, segment.low_bits, end, blocks]
        wire_start, blocks = wire_start + segment.nbytes, blocks + -(-segment.width // BLOCK)
    return torch.tensor(values, dtype=torch.int64, device=device).view(-1, FIELDS)


def packed_bytes(segments: Sequence[ListSegment]) -> int:
    """Return the bytes of a row's packed positions."""
    return sum(segment.nbytes for segment in segments)


def _check(rows: Tensor, *companions: Tensor | None) -> None:
    check_width(rows)
    for tensor in (rows, *companions):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ThinwireError(f"the largest values are chosen of float32, got {tensor.dtype}: convert them first")
        if tensor is not None and tensor.shape != rows.shape:
            raise ThinwireError(f"{tuple(tensor.shape)} values do not go with rows of {tuple(rows.shape)}")


def largest(
    rows: Tensor, residual: Tensor | None, segments: tuple[ListSegment, ...], total_out: Tensor | None,
    positions: Tensor, payload: Tensor, wire: Tensor | None = None, adam: Adam | None = None,
    values: WireValues | None = None, decoded: Tensor | None = None, guess: Tensor | None = None,
) -> None:  # fmt: skip
    """List the ``positions`` of the ``k`` largest |h| of each segment, and h there in ``payload``.

    h = ``rows`` + ``residual``, or ``rows`` alone; with ``adam``, whose segments are these, the rows are gradients, of
    which it makes steps first: afterwards they are either. Ties go to the lowest columns; a NaN is larger than all.
    ``payload`` (R, m) float32 has zeros between the lists. ``total_out`` = h, and may be ``rows`` or ``residual``; None
    does not store h, which is ``rows`` then: without ``residual`` and ``adam``.

    With ``values`` the ``payload`` goes to that wire, too, and what it is there is taken from ``total_out`` (None: what
    that leaves out is lost). ``decoded``: scratch memory for integers (R, m) float32.

    ``guess`` (R, segments) int32: the bits of the k-th |h| of the last time, which a GPU replaces by those of now. What
    is chosen does not depend on it; a good guess saves a pass over the values.

    The positions are packed into ``wire`` (R, packed_bytes) uint8, too, unless it is None; its rows begin at multiples
    of 8 bytes. The lower b = ``low_bits`` bits of a segment's i-th position p are written unchanged. The high bits
    p >> b, which rise, become a one at bit (p >> b) + i of a string of k + width / 2^b bits, with p >> b zeros before
    it (Elias 1974, Fano 1971). A position takes about 9 + width / (256 k) bits with b = 8 and 5 + width / (16 k) with
    b = 4. A segment's string comes first, then its lower bits; bytes fill from the lowest bit.
    """
    _check(rows, residual, total_out)
    if total_out is None and (residual is not None or adam is not None):
        raise ThinwireError("with a residual or Adam's steps, name total_out (or rows) to keep the sum in")
    _backend(rows).largest(rows, residual, segments, total_out, positions, payload, wire, adam, values, decoded, guess)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> Tensor:
    """Make ``words`` (R, n / 64) int64 a mask of the columns that ``largest`` lists, and of no others.

    Nothing is listed: any ``list_start`` will do, the same for all segments too.
    """
    _check(rows)
    if not segments:
        return words.zero_()
    _backend(rows).marked(rows, segments, words)
    return words


def put(payload: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    """Write ``payload`` (R, m) at ``positions`` to ``out`` (R, n), which keeps the rest."""
    if payload.numel():
        _backend(out).put(payload, positions, out)
    return out


def decode(
    wire: Tensor, values: WireValues, segments: tuple[ListSegment, ...], out: Tensor, scale: float | None, *,
    positions: Tensor, decoded: Tensor | None,
) -> Tensor:  # fmt: skip
    """Write the ``values`` of R peers at the positions that are packed in ``wire``, and zeros elsewhere, to ``out``.

    Args:
        out: (R, n) float32, a row for each peer; or, with ``scale``, (1, n): ``scale`` * their sum in order.
        positions, decoded: scratch memory (R, m) int32 and, for integers, float32.
    """
    if out.numel():
        _backend(out).decode(wire, values, segments, out, scale, positions, decoded)
    return out


def read(wire: Tensor, segments: tuple[ListSegment, ...], words: Tensor, *, positions: Tensor) -> Tensor:
    """Make ``words`` (R, n / 64) int64 masks of the positions packed in ``wire``. ``positions``: scratch memory."""
    if words.numel():
        _backend(words).read(wire, segments, words, positions)
    return words
