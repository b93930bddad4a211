"""Count sketches of chosen values, and their inversion by peeling, for all segments of a row at once.

A segment's sketch is three tables of ``cells`` float32. Element i adds sign(i) * value to cell h_j(i) of table
j = 0..2. The *index*, the mask of all elements that any rank added, tells how many elements every cell holds. An
element alone in a cell is read there and subtracted from its other two cells; a round does so for all that are alone.
Rounds recover everything as long as elements are fewer than 0.818 of the cells (three hashes; Molloy 2005); beyond,
most are left.

A value is recovered as a difference of differences, so rounding errors in the sums would grow, ten thousandfold near
the limit. Therefore values are first rounded to multiples of one power of two (``round_to``), coarse enough for every
cell's sum to be exact in float32; the remainder stays with the sender.

The index and the hashes alone decide which elements can be recovered, so every rank knows it without values. A CPU
goes on until nothing more is found; a GPU stops after ``ROUNDS``, so more may be left of a sketch at its limit
(``compress()`` refuses ranks with different devices). Hashes: 64 bits of splitmix64 at i for the first two, mixed once
more for the third and the sign (``reference.hashes``); i is counted from the segment's first column.

Values are (R, n) float32, masks (R, n / 64) int64; rows may be apart in memory, each is contiguous. A rank's elements
are listed as in ``thinwire.ops.sparse``: ``positions`` (R, m) int32 holds columns of the row, each segment's from its
``list_start`` on, in order, then -1; payloads (R, m) hold their values. On a GPU the number of launches is fixed.
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
"""Rounds of peeling on a GPU. Higher => more launches, of which the last have nothing to do. A million elements take 12
at a load of 0.7, 17 at 0.75 and 27 at 0.79, and few elements rarely more (``benchmarks/speed/peeling.py``)."""

_backend = backend("thinwire.ops.sketch")


class SketchSegment(NamedTuple):
    """Columns ``[start, start + width)`` of a row, multiples of 64. Segments lie side by side, in order.

    Attributes:
        k: the most columns that a rank sends of each row; in lists and payloads from ``list_start`` on.
        room: the most columns that all ranks together send.
        wire_start: first column on a wire.
        cells: size of each of the three tables; 0: no sketch, all columns travel unchanged.
        seed: 63 bits for the hashes.
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
        """Return the values on the wire, per row."""
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
        """Return the segment's columns in lists and payloads."""
        return slice(self.list_start, self.list_start + self.k)

    @property
    def wire(self) -> slice:
        return slice(self.wire_start, self.wire_start + self.wire_numel)


class SketchSegments:
    """The segments of a row, on the host and, after first use by a kernel, on a device."""

    def __init__(self, segments: Sequence[SketchSegment], device: torch.device) -> None:
        self.segments, self.device = tuple(segments), device

    def __iter__(self) -> Iterator[SketchSegment]:
        return iter(self.segments)

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def k(self) -> int:
        """Return the columns of a list or a payload."""
        return self.segments[-1].listed.stop

    @property
    def wire_numel(self) -> int:
        return self.segments[-1].wire.stop

    @functools.cached_property
    def table(self) -> Tensor:
        """(segments, FIELDS) int64: each segment's fields, then its first cell and first element among all sketches."""
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
    """Refuse tensors that do not match, before a kernel reads or writes out of bounds."""
    if wire is not None and wire.shape[1] != segments.wire_numel:
        need, cells = segments.wire_numel, wire.shape[1]
        raise ThinwireError(f"sketches, each three tables of equal size, take {need} cells, got {cells}")
    for payload in payloads:
        if payload.shape[1] != segments.k:
            raise ThinwireError(f"the segments list {segments.k} values per row, the payload has {payload.shape[1]}")


def gather(rows: Tensor, words: Tensor, segments: SketchSegments, positions: Tensor, payload: Tensor) -> None:
    """List the set bits of ``words`` (R, n / 64), up to k per segment, and the values of ``rows`` (R, n) at them.

    -1 and 0 fill up ``positions`` and ``payload`` (R, m).
    """
    _check(segments, None, positions, payload)
    _backend(rows).gather(rows, words, segments, positions, payload)


def peaks(payload: Tensor, segments: SketchSegments) -> Tensor:
    """Return each segment's largest |``payload``| (R, m) over all rows: (segments,) float32; NaN is the largest."""
    _check(segments, None, payload)
    magnitudes = payload.new_zeros(len(segments))
    _backend(payload).peaks(payload, segments, magnitudes)
    return magnitudes


def round_to(payload: Tensor, quantum: Tensor, segments: SketchSegments, residual: Tensor) -> None:
    """Round ``payload`` (R, m) to multiples of ``quantum`` (segments,), powers of two; ``residual`` takes the rest.

    Multiples are below 2^22. Segments without a sketch do not change; their residual is 0.
    """
    _check(segments, None, payload, residual)
    _backend(payload).round_to(payload, quantum, segments, residual)


def encode(payload: Tensor, positions: Tensor, segments: SketchSegments, whole: Tensor, out: Tensor) -> None:
    """Write the sketches of ``payload`` (R, m), the values at ``positions`` (R, m), to ``out`` (R, wire_numel).

    Segments without a sketch send their columns of ``whole`` (R, n).
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
    """Recover the values of ``wire`` (W, wire_numel), which holds the rows of ``index`` (R, n / 64) from ``row`` on.

    ``out`` (W, n) = the values recovered, 0 elsewhere; segments without a sketch are copied. ``lost`` (R, n / 64) = the
    elements of ``index`` that cannot be recovered, in all rows; with ``estimate`` they get the median of their three
    signed cells, as in the paper (about 100% off). ``index`` has up to ``room`` elements of each segment.
    """
    _check(segments, wire)
    if row + len(wire) > len(index) or len(out) != len(wire):
        raise ThinwireError(f"a wire of {len(wire)} rows from {row} on does not go with an index of {len(index)}")
    _backend(index).peel(wire, index, segments, row, out, lost, estimate)


def restore(
    sent: Tensor, residual: Tensor, positions: Tensor, lost: Tensor, segments: SketchSegments, out: Tensor
) -> None:
    """Write to ``out`` (R, n), at ``positions``, the part of each value that did not arrive.

    This is ``residual`` (R, m), or ``sent`` + ``residual`` where ``lost`` (R, n / 64) has a bit. In segments without a
    sketch ``out`` becomes 0; elsewhere it does not change.
    """
    _check(segments, None, sent, residual, positions)
    _backend(out).restore(sent, residual, positions, lost, segments, out)


def count(words: Tensor, segments: SketchSegments) -> Tensor:
    """Count the set bits of ``words`` (R, n / 64) in each segment: (R, segments) int32."""
    counts = words.new_empty((len(words), len(segments)), dtype=torch.int32)
    _backend(words).count(words, segments, counts)
    return counts
