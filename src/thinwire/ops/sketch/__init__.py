"""Count sketch of chosen values, and its inversion by peeling, of all segments of a row at once.

A segment's sketch is three tables of ``cells`` float32. Element i adds sign(i) * value to cell h_j(i) of table
j = 0..2.
Who knows the *index* (the mask of all elements that were added, by anybody) knows how many elements every cell holds:
one that is alone in a cell is read there and taken out of its other two cells, and so on, in rounds: all that are alone
at once. This ends with nothing left as long as the elements are fewer than 0.818 of the cells (three hashes; Molloy
2005); beyond, most are left.

A value is recovered as a difference of differences, so rounding in the sums would grow from one to the next, ten
thousandfold near the limit. Therefore values are first rounded to multiples of one power of two (``round_to``) that is
coarse enough for every cell's sum to be exact in float32; what that leaves over stays with the sender.

Which elements can be recovered depends on the index and the hashes alone, so every rank knows it without values. A CPU
goes on until nothing more is found; a GPU, where nobody looks, stops after ``ROUNDS``, so that of a sketch at its limit
more may be left (``compress()`` refuses ranks with different devices). Hashes: 64 bits of splitmix64 at i for the first
two, mixed once more for the third and the sign (``reference.hashes``); i is counted from the segment's first column.

Values are (R, n) float32, masks (R, n / 64) int64; rows may be apart in memory, each is contiguous. What a rank sends
is listed as ``thinwire.ops.sparse`` does: ``positions`` (R, m) int32 holds columns of the row, each segment's from its
``list_start`` on, in order, and -1 behind them; payloads (R, m) hold what belongs to them. On a GPU every operation is
a number of launches that depends on nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.device import upload
from thinwire.base.errors import ThinwireError
from thinwire.ops.backends import backend

__all__ = ["ROUNDS", "SketchSegment", "SketchSegments", "count", "encode", "gather", "peaks", "peel", "restore",
           "round_to"]  # fmt: skip

ROUNDS = 32
"""After which peeling stops on a GPU. Higher => more launches, of which the last have nothing to do. A million elements
take 12 at a load of 0.7, 17 at 0.75 and 27 at 0.79, and few elements rarely more (``benchmarks/speed/peeling.py``)."""

_backend = backend("thinwire.ops.sketch")


class SketchSegment(NamedTuple):
    """A segment of a row: columns ``[start, start + width)``, multiples of 64. Segments lie side by side, in order.

    Attributes:
        k: columns that a rank sends of each row, at most; in lists and payloads from ``list_start`` on.
        room: columns that all ranks together send, at most.
        wire_start: first column on a wire.
        cells: size of each of its three tables; 0: all of its columns travel as they are.
        seed: 63 bits, from which its hashes are made.
    """

    start: int
    width: int
    k: int
    list_start: int
    room: int
    wire_start: int
    cells: int
    seed: int

    @property
    def wire_numel(self) -> int:
        """Count the values on the wire, per row."""
        return 3 * self.cells or self.width

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    @property
    def words(self) -> slice:
        """Return the columns, counted in mask words."""
        return slice(self.start // 64, (self.start + self.width) // 64)

    @property
    def listed(self) -> slice:
        """Return its columns in lists and payloads."""
        return slice(self.list_start, self.list_start + self.k)

    @property
    def wire(self) -> slice:
        """Return its columns on a wire."""
        return slice(self.wire_start, self.wire_start + self.wire_numel)


class SketchSegments:
    """The segments of a row, as the host has them and, once a kernel needs it, as a device does."""

    def __init__(self, segments: Sequence[SketchSegment], device: torch.device) -> None:
        self.segments, self.device = tuple(segments), device

    def __iter__(self) -> Iterator[SketchSegment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def k(self) -> int:
        """Count the columns of a list, and of a payload."""
        return self.segments[-1].listed.stop

    @property
    def wire_numel(self) -> int:
        """Count the columns of a wire."""
        return self.segments[-1].wire.stop

    @functools.cached_property
    def table(self) -> Tensor:
        """Return (segments, FIELDS) int64: the fields of each, then where its cells and its elements begin among those
        of all segments that have a sketch."""
        values, cells, elements = [], 0, 0
        for segment in self.segments:
            values += [*segment, cells, elements]
            cells, elements = cells + 3 * segment.cells, elements + segment.room * (segment.cells > 0)
        return upload(values, self.device, torch.int64).view(-1, FIELDS)


FIELDS = len(SketchSegment._fields) + 2


def rounds_on(device: torch.device) -> int:
    """Return the number of rounds after which peeling stops on ``device``."""
    return sys.maxsize if device.type == "cpu" else ROUNDS


def _check(segments: SketchSegments, wire: Tensor | None = None, *payloads: Tensor) -> None:
    """Refuse what does not belong together, before a kernel reads or writes out of bounds."""
    if wire is not None and wire.shape[1] != segments.wire_numel:
        need, cells = segments.wire_numel, wire.shape[1]
        raise ThinwireError(f"sketches, each three tables of equal size, take {need} cells, got {cells}")
    for payload in payloads:
        if payload.shape[1] != segments.k:
            raise ThinwireError(f"what is listed of segments is {segments.k} values per row, got {payload.shape[1]}")


def gather(rows: Tensor, words: Tensor, segments: SketchSegments, positions: Tensor, payload: Tensor) -> None:
    """List the columns that are set in ``words`` (R, n / 64), and the values of ``rows`` (R, n) at them.

    ``positions`` and ``payload`` (R, m) hold up to k of each segment; behind them -1 and 0.
    """
    _check(segments, None, positions, payload)
    _backend(rows).gather(rows, words, segments, positions, payload)


def peaks(payload: Tensor, segments: SketchSegments) -> Tensor:
    """Return (segments,) float32, the largest |``payload``| (R, m) of each in all rows; a NaN is the largest."""
    _check(segments, None, payload)
    magnitudes = payload.new_zeros(len(segments))
    _backend(payload).peaks(payload, segments, magnitudes)
    return magnitudes


def round_to(payload: Tensor, quantum: Tensor, segments: SketchSegments, residual: Tensor) -> None:
    """Round ``payload`` (R, m) to multiples of ``quantum`` (segments,), powers of two; ``residual`` takes the rest.

    Multiples are below 2^22. Segments without a sketch stay as they are, and their residual is 0.
    """
    _check(segments, None, payload, residual)
    _backend(payload).round_to(payload, quantum, segments, residual)


def encode(payload: Tensor, positions: Tensor, segments: SketchSegments, whole: Tensor, out: Tensor) -> None:
    """Write the sketches of ``payload`` (R, m), the values at ``positions`` (R, m), to ``out`` (R, wire_numel).

    Segments without a sketch: their columns of ``whole`` (R, n).
    """
    _check(segments, out, payload, positions)
    _backend(payload).encode(payload, positions, segments, whole, out)


def peel(
    wire: Tensor,
    index: Tensor,
    segments: SketchSegments,
    row: int,
    out: Tensor,
    lost: Tensor,
    *,
    estimate: bool = False,
) -> None:
    """Recover what ``wire`` (W, wire_numel) holds at the rows from ``row`` on of ``index`` (R, n / 64).

    ``out`` (W, n) = the values recovered, 0 elsewhere; of segments without a sketch, what the wire says. ``lost``
    (R, n / 64) = the elements of ``index`` that cannot be recovered, in all rows; with ``estimate`` they get the median
    of their three signed cells, as the paper does (about 100% off). ``index`` is the union of all masks that were
    added: it has up to ``room`` elements of each segment.
    """
    _check(segments, wire)
    if row + len(wire) > len(index) or len(out) != len(wire):
        raise ThinwireError(f"a wire of {len(wire)} rows from {row} on does not go with an index of {len(index)}")
    _backend(index).peel(wire, index, segments, row, out, lost, estimate)


def restore(
    sent: Tensor, residual: Tensor, positions: Tensor, lost: Tensor, segments: SketchSegments, out: Tensor
) -> None:
    """Give back at ``positions`` what did not arrive: the residual, and what was sent and is ``lost``.

    There ``out`` (R, n) = ``residual`` (R, m), or ``sent`` + ``residual`` where ``lost`` (R, n / 64) has a bit; ``out``
    elsewhere is unchanged. Of segments without a sketch all was sent: 0.
    """
    _check(segments, None, sent, residual, positions)
    _backend(out).restore(sent, residual, positions, lost, segments, out)


def count(words: Tensor, segments: SketchSegments) -> Tensor:
    """Count the set bits of ``words`` (R, n / 64) in each segment: (R, segments) int32."""
    counts = words.new_empty((len(words), len(segments)), dtype=torch.int32)
    _backend(words).count(words, segments, counts)
    return counts
