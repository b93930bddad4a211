"""Count sketch of chosen values, and its inversion by peeling, of all parts of a row at once.

A part's sketch is three tables of ``cells`` float32. Element i adds sign(i) * value to cell h_j(i) of table j = 0..2.
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
two, mixed once more for the third and the sign (``reference.hashes``); i is counted from the part's first column.

Values are (R, n) float32, masks (R, n / 64) int64; rows may be apart in memory, each is contiguous. What a rank sends
is listed as ``thinwire.ops.sparse`` does: ``found`` (R, m) int32 holds columns of the row, each part's from its
``place`` on, in order, and -1 behind them; payloads (R, m) hold what belongs to them. On a GPU every operation is a
number of launches that depends on nothing.
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

__all__ = ["ROUNDS", "Part", "Parts", "count", "encode", "gather", "peaks", "peel", "round_to", "settle"]

ROUNDS = 32
"""After which peeling stops on a GPU. Higher => more launches, of which the last have nothing to do. A million elements
take 12 at a load of 0.7, 17 at 0.75 and 27 at 0.79, and few elements rarely more (``benchmarks/speed/peeling.py``)."""

_backend = backend("thinwire.ops.sketch")


class Part(NamedTuple):
    """One parameter's columns ``[start, start + width)``, multiples of 64. Parts lie side by side, in order.

    Attributes:
        k: columns that a rank sends of each row, at most; in lists and payloads from ``place`` on.
        room: columns that all ranks together send, at most.
        first: where it begins on a wire. cells: of each of its three tables; 0: all of its columns travel as they are.
        seed: of its hashes, 63 bits.
    """

    start: int
    width: int
    k: int
    place: int
    room: int
    first: int
    cells: int
    seed: int

    @property
    def sent(self) -> int:
        """Values on the wire, per row."""
        return 3 * self.cells or self.width

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    @property
    def words(self) -> slice:
        """The columns counted in mask words."""
        return slice(self.start // 64, (self.start + self.width) // 64)

    @property
    def listed(self) -> slice:
        """Its place in lists and payloads."""
        return slice(self.place, self.place + self.k)

    @property
    def wire(self) -> slice:
        """Its place on a wire."""
        return slice(self.first, self.first + self.sent)


class Parts:
    """The parts of a row, as the host has them and, once a kernel needs it, as a device does."""

    def __init__(self, segments: Sequence[Part], device: torch.device) -> None:
        self.parts, self.device = tuple(segments), device

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def k(self) -> int:
        """Columns of a list, and of a payload."""
        return self.parts[-1].listed.stop

    @property
    def sent(self) -> int:
        """Columns of a wire."""
        return self.parts[-1].wire.stop

    @functools.cached_property
    def table(self) -> Tensor:
        """(parts, FIELDS) int64: of each what it says, then where its cells and its elements begin among those of all
        parts that have a sketch."""
        values, cells, elements = [], 0, 0
        for segment in self.parts:
            values += [*segment, cells, elements]
            cells, elements = cells + 3 * segment.cells, elements + segment.room * (segment.cells > 0)
        return upload(values, self.device, torch.int64).view(-1, FIELDS)


FIELDS = len(Part._fields) + 2


def rounds_on(device: torch.device) -> int:
    """After which peeling stops there."""
    return sys.maxsize if device.type == "cpu" else ROUNDS


def _check(segments: Parts, wire: Tensor | None = None, *payloads: Tensor) -> None:
    """Refuse what does not belong together, before a kernel reads or writes out of bounds."""
    if wire is not None and wire.shape[1] != segments.sent:
        need, cells = segments.sent, wire.shape[1]
        raise ThinwireError(f"sketches, each three tables of equal size, take {need} cells, got {cells}")
    for payload in payloads:
        if payload.shape[1] != segments.k:
            raise ThinwireError(f"what is listed of parts is {segments.k} values per row, got {payload.shape[1]}")


def gather(rows: Tensor, words: Tensor, segments: Parts, positions: Tensor, payload: Tensor) -> None:
    """``found`` (R, m) = the columns that ``words`` (R, n / 64) have, ``payload`` (R, m) = ``rows`` (R, n) there.

    Up to k of each part; behind them -1 and 0.
    """
    _check(segments, None, positions, payload)
    _backend(rows).gather(rows, words, segments, positions, payload)


def peaks(payload: Tensor, segments: Parts) -> Tensor:
    """(parts,) float32 the largest |``payload``| (R, m) of each part, of all rows; a NaN is the largest."""
    _check(segments, None, payload)
    magnitudes = payload.new_empty(len(segments))
    _backend(payload).peaks(payload, segments, magnitudes)
    return magnitudes


def round_to(payload: Tensor, quantum: Tensor, segments: Parts, residual: Tensor) -> Tensor:
    """``payload`` (R, m) becomes the nearest multiples of ``quantum`` (parts,), powers of two; ``rest`` what is left.

    Below 2^22 of them. Of parts without a sketch it stays as it is, and the rest is 0.
    """
    _check(segments, None, payload, residual)
    _backend(payload).round_to(payload, quantum, segments, residual)
    return payload


def encode(payload: Tensor, positions: Tensor, segments: Parts, whole: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, parts.sent) = the sketches of ``payload`` (R, m), the values at ``found`` (R, m).

    Of parts without a sketch: ``whole`` (R, n).
    """
    _check(segments, out, payload, positions)
    _backend(payload).encode(payload, positions, segments, whole, out)
    return out


def peel(
    wire: Tensor, index: Tensor, segments: Parts, row: int, out: Tensor, lost: Tensor, *, estimate: bool = False
) -> Tensor:
    """Recover what ``wire`` (W, parts.sent) holds at the rows from ``row`` on of ``index`` (R, n / 64).

    ``out`` (W, n) = the values recovered, 0 elsewhere; of parts without a sketch, what the wire says. ``left``
    (R, n / 64) = the elements of ``index`` that cannot be recovered, in all rows; with ``estimate`` they get the median
    of their three signed cells, as the paper does (about 100% off). ``index`` is the union of all masks that were
    added: it has up to ``room`` elements of each part.
    """
    _check(segments, wire)
    if row + len(wire) > len(index) or len(out) != len(wire):
        raise ThinwireError(f"a wire of {len(wire)} rows from {row} on does not go with an index of {len(index)}")
    _backend(index).peel(wire, index, segments, row, out, lost, estimate)
    return lost


def settle(sent: Tensor, residual: Tensor, positions: Tensor, lost: Tensor, segments: Parts, out: Tensor) -> Tensor:
    """At ``found``: ``out`` (R, n) = ``rest`` (R, m), or ``sent`` + ``rest`` where ``left`` (R, n / 64) says so.

    ``out`` elsewhere is unchanged: what was sent and could not be recovered is thus back where it came from. Of parts
    without a sketch all was sent: 0.
    """
    _check(segments, None, sent, residual, positions)
    _backend(out).settle(sent, residual, positions, lost, segments, out)
    return out


def count(words: Tensor, segments: Parts) -> Tensor:
    """(R, parts) int32 how many bits of ``words`` (R, n / 64) are set in each part."""
    counts = words.new_empty((len(words), len(segments)), dtype=torch.int32)
    _backend(words).count(words, segments, counts)
    return counts
