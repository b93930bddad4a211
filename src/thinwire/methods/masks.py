"""Masks that some ranks choose in one step, all get during the next passes, and all use from the next step on (SCAPE).

:class:`Schedule` says how many values and when, :class:`Masks` chooses, sends and unfolds them, :class:`AtMask` gathers
sharded weights by them. Lines are those of SCAPE's Alg. 1, or of its Alg. 2 where that is said.

Each parameter's mask has one chooser: a rank, or, where every rank owns a row of each parameter, the owner of the row.
All that a rank has chosen goes out as one message while the next forward and backward pass run: as bits, or, below a
density of 1/32, as positions.

A message is as long as the longest, and every rank gets them all: with many ranks, one large parameter would make N
long messages. So a parameter with more than ``LARGE`` / N of all values is cut into chunks of 1 / N of them, each of
which has a chooser of its own, and as many of its values on the mask as its size asks for. (The paper has one chooser
for each parameter, and 4 ranks.)
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.bucket import Bucket, Piece, Segment, padded
from thinwire.collectives import Exchange
from thinwire.comm import Work
from thinwire.errors import ThinwireError
from thinwire.methods.base import Method, count_of
from thinwire.ops import mask as masks
from thinwire.weights import Columns, Message, beside

WORD = masks.WORD
LISTED = 1 / 32
"""Density below which positions (4 bytes each) are fewer bytes than mask bits."""
LARGE = 3
"""Times its rank's share of all values, above which a parameter has several choosers. Higher => longer messages, with
more ranks alike; lower => fewer parameters whose largest values are found over all of them."""


class Chunk(NamedTuple):
    """Some of a parameter's columns: ``[start, start + width)``, multiples of 64; the first ``span`` hold values."""

    start: int
    width: int
    span: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    @property
    def groups(self) -> slice:
        """As mask words."""
        return slice(self.start // WORD, (self.start + self.width) // WORD)


def cut(span: int, most: int) -> tuple[Chunk, ...]:
    """``span`` columns in equal chunks, but for the last, of up to ``most`` (rounded up to whole words)."""
    width = padded(max(min(span, most), 1), WORD)
    return tuple(Chunk(at, min(width, padded(span, WORD) - at), min(width, span - at)) for at in range(0, span, width))


@dataclass(frozen=True)
class Schedule:
    """How many values are sent in which step, and which steps have a new mask.

    Attributes:
        density: share of values once warm. warm: steps of the warm-up. refresh: steps that share a mask once warm.
    """

    density: float
    warm: int
    refresh: int

    @property
    def steady(self) -> int:
        """The first step that is like all that follow."""
        return max(self.warm, 1)

    def density_at(self, step: int) -> float:
        """Share of values sent in ``step``: 1 at first, then geometrically to ``density`` at the end of the warm-up."""
        if step == 0:
            return 1.0
        return self.density if step >= self.warm else float(self.density ** (step / self.warm))

    def k(self, columns: int, step: int) -> int:
        """Values of ``columns`` that are sent in ``step``."""
        return count_of(self.density_at(step), columns)

    def refreshes(self, step: int) -> bool:
        """Is ``step`` the first with a new mask?"""
        return step <= self.steady or (step - self.steady) % self.refresh == 0

    def listed(self, step: int) -> bool:
        """Do the masks of ``step`` travel as positions?"""
        return self.density_at(step) < LISTED

    def mask_bytes(self, columns: int, step: int) -> int:
        """Bytes of the mask of ``columns`` values, a multiple of 8."""
        return padded(4 * self.k(columns, step), 8) if self.listed(step) else padded(columns, WORD) // 8


class Masks:
    """The masks in use and those to come, of all parameters that are sent. They live in the state of ``method``.

    State by parameter: "mask" (R, bytes) as it was gathered, row r's from its chooser; "chosen", the step for whose
    density it was chosen. A parameter without one has all ones; one that takes no part in a step keeps its last.
    """

    def __init__(self, method: Method, exchange: Exchange, sizes: Mapping[str, int], schedule: Schedule) -> None:
        """``sizes``: values of each parameter in one of its R rows."""
        self._method, self._exchange, self._sizes, self._schedule = method, exchange, sizes, schedule
        self._chosen: dict[str, int] = {}  # what "chosen" says, without a look at a tensor
        rows = exchange.bucket_rows(True)
        ranks, values = exchange.rows // rows, sum(sizes.values())
        self._chunks = {
            name: cut(size, -(-values // ranks) if ranks * size > LARGE * values else size)
            for name, size in sizes.items()
        }
        self._places: tuple[int, dict[str, list[tuple[slice, slice]]], int] | None = None
        self._message: Tensor | None = None  # what this rank has chosen for the next step
        self._work: Work | None = None  # everybody's messages, under way

    def words(self, bucket: Bucket) -> Tensor | None:
        """(R, n / 64) the masks in use of the bucket's rows; None while they are all ones."""
        found = [self._method.state.get("mask", segment.name) for segment in bucket.segments]
        if all(mask is None for mask in found):
            return None
        words = bucket.buffer("mask", (bucket.shape[0], bucket.shape[1] // WORD), torch.int64)
        counts = (self.count(segment) for segment in bucket.segments)
        bucket.once("masks", lambda: self._unfold(bucket, found, words), *found, *counts)
        return words

    def count(self, segment: Segment) -> int:
        """Values at the mask in use, in each row."""
        if self._method.state.get("mask", segment.name) is None:
            return segment.span
        step = self._chosen_for(segment.name)
        return sum(self._schedule.k(chunk.span, step) for chunk in self._chunks[segment.name])

    def choose(self, bucket: Bucket, segment: Segment, values: Tensor) -> None:
        """If it is this rank's to choose: the next step's mask is where |``values``| (1, width) are largest (l. 15)."""
        step = bucket.step + 1
        if not self._schedule.refreshes(step):
            return
        places, length = self._layout(step)
        if self._message is None or len(self._message) < length:
            self._message = torch.zeros(length, dtype=torch.uint8, device=bucket.device)
        for chunk, (choosers, at) in zip(self._chunks[segment.name], places[segment.name], strict=True):
            if self._exchange.rank in range(choosers.start, choosers.stop):
                self._choose(bucket, chunk, values[:, chunk.columns], self._message[at])

    def _choose(self, bucket: Bucket, chunk: Chunk, values: Tensor, mask: Tensor) -> None:
        """``mask``, bytes of the message = where |``values``| (1, width) of ``chunk`` are largest."""
        step = bucket.step + 1
        k = self._schedule.k(chunk.span, step)
        if not self._schedule.listed(step):
            masks.topk_mask(values, k, mask.view(torch.int64).view(1, -1))
            return
        words = bucket.scratch("words", (1, bucket.shape[1] // WORD), torch.int64)[:, : chunk.width // WORD]
        masks.topk_mask(values, k, words)
        positions = mask.view(torch.int32)
        masks.indices(words, positions[:k].view(1, -1))
        positions[k:].zero_()  # the padding travels and is saved

    def gather(self, names: Collection[str], step: int) -> None:
        """Start to gather the masks chosen for ``step``, if it has new ones; those of ``names`` come into use."""
        if not names or not self._schedule.refreshes(step):
            return
        assert self._message is not None
        self.finish()
        state, (places, length) = self._method.state, self._layout(step)
        everybody = self._message.new_empty((self._exchange.rows, length))
        self._work = self._exchange.gather(everybody, self._message[:length], async_op=True)
        for name, parts in places.items():
            if name in names:
                state.put("mask", name, self._joined([everybody[choosers, at] for choosers, at in parts]))
                state.put("chosen", name, torch.tensor(step))
                self._chosen[name] = step
            elif (kept := state.get("mask", name)) is not None and _is_part(kept):
                state.put("mask", name, kept.clone())  # the gathered masks of that step can then be freed

    def finish(self) -> None:
        """Wait for the masks that are under way."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def state_changed(self) -> None:
        """Another state was loaded."""
        self._chosen.clear()

    @staticmethod
    def _joined(parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _layout(self, step: int) -> tuple[dict[str, list[tuple[slice, slice]]], int]:
        """For the masks of ``step``: parameter -> for each chunk (the R ranks that choose its rows, bytes in their
        messages); length.

        The same on all ranks: the largest first, each to the ranks with the least so far. R = N: all choose their row.
        """
        if self._places is None or self._places[0] != step:
            rows = self._exchange.bucket_rows(True)
            load = [(0, rank) for rank in range(self._exchange.rows // rows)]  # a heap: values, and whose
            ends = [0] * len(load)
            places: dict[str, list[tuple[slice, slice]]] = {name: [] for name in self._sizes}
            pairs = [(name, chunk) for name, chunks in self._chunks.items() for chunk in chunks]
            for name, chunk in sorted(pairs, key=lambda pair: (-pair[1].span, pair[0], pair[1].start)):
                values, least = load[0]
                first, ends[least] = ends[least], ends[least] + self._schedule.mask_bytes(chunk.span, step)
                heapq.heapreplace(load, (values + chunk.span, least))
                places[name].append((slice(least * rows, (least + 1) * rows), slice(first, ends[least])))
            self._places = step, places, max(ends)
        return self._places[1:]

    def _chosen_for(self, name: str) -> int:
        """The step for whose density the mask of ``name`` was chosen."""
        if name not in self._chosen:
            saved = self._method.state.get("chosen", name)
            if saved is None:
                raise ThinwireError(
                    f"{self._method.name}: the saved state has a mask of {name}, but not when it was chosen"
                )
            self._chosen[name] = int(saved)
        return self._chosen[name]

    def _unfold(self, bucket: Bucket, found: Sequence[Tensor | None], words: Tensor) -> None:
        """``words`` (R, w) = the bits of ``found``, each as it was gathered; None: all of the parameter's values."""
        lists = []
        for segment, mask in zip(bucket.segments, found, strict=True):
            first = segment.start // WORD
            if mask is None:
                flags = torch.zeros((len(words), segment.width), dtype=torch.bool, device=words.device)
                flags[:, : segment.span] = True
                masks.pack(flags, words[:, segment.groups(WORD)])
                continue
            step, end = self._chosen_for(segment.name), 0
            for chunk in self._chunks[segment.name]:
                begin, end = end, end + self._schedule.mask_bytes(chunk.span, step)
                at = slice(first + chunk.groups.start, first + chunk.groups.stop)
                if self._schedule.listed(step):
                    positions = mask[:, begin:end].view(torch.int32)
                    lists.append((positions[:, : self._schedule.k(chunk.span, step)], at))
                else:
                    words[:, at].copy_(mask[:, begin:end].view(torch.int64))
        masks.from_lists(lists, words)


class Used(NamedTuple):
    """A parameter's last exchange: the step, the masks (R, w) of its rows or None for all ones, values at each."""

    step: int
    words: Tensor | None
    k: int


class AtMask(Message):
    """One module's weights at the mask, and all of what is dense or has no mask yet: float32 (Alg. 2, l. 3-5)."""

    exact = True

    def __init__(
        self, used: Mapping[str, Used], keep: Mapping[str, float], pieces: tuple[Piece, ...], rank: int
    ) -> None:
        """By parameter: ``used`` in the last step, unless it took no part; ``keep``, what decay left of a weight."""
        self._used, self._keep, self._pieces, self._rank = used, keep, pieces, rank
        self._layouts: dict[tuple[int | None, ...], _Layout] = {}
        self._layout = self._place([None] * len(pieces))  # of the last message
        self._words = torch.empty(0)  # its masks (R, w), beside each other

    def reaches(self, since: int, step: int) -> bool:
        used = (self._used.get(piece.name) for piece in self._pieces)
        return since == step - 1 and all(found is None or found.step == since for found in used)

    def write(self, own: Tensor, held: Tensor | None, step: int) -> Tensor:
        """w at the mask (Alg. 2, l. 3), and behind that what has none."""
        used = [self._used.get(piece.name) for piece in self._pieces]
        self._layout = layout = self._place([None if of is None or of.words is None else of.k for of in used])
        message = own.new_empty((1, layout.length))
        if layout.parts:
            words = [of.words for of in used if of is not None and of.words is not None]
            self._words = words[0] if len(words) == 1 else torch.cat(words, 1)
            values = layout.masked.take(own.view(1, -1), own.new_empty((1, WORD * self._words.shape[1])))
            masks.gather_keep(values, None, self._words[self._rank : self._rank + 1], message[:, : layout.k], None)
        layout.whole.take(own.view(1, -1), message)
        return message[0]

    def read(self, peers: slice, messages: Tensor, rows: Tensor) -> None:
        """w at the mask as it was sent (Alg. 2, l. 4); w = (1 - lr decay) w off the mask, where m' is 0 (l. 5)."""
        layout = self._layout
        if layout.parts:
            faded = [
                masks.Faded(of.offset, of.numel, padded(of.numel, WORD), k, self._keep[of.name])
                for of, k in layout.parts
            ]
            masks.renew(messages[:, : layout.k], self._words[peers], faded, rows)
        layout.whole.give(messages, rows)

    def _place(self, at: Sequence[int | None]) -> _Layout:
        """``at``: how many values of each piece are at its mask; None: it has none."""
        if (key := tuple(at)) not in self._layouts:
            parts = [(piece, k) for piece, k in zip(self._pieces, at, strict=True) if k is not None]
            others = [piece for piece, k in zip(self._pieces, at, strict=True) if k is None]
            masked, _ = beside((piece, padded(piece.numel, WORD)) for piece, _ in parts)
            k = sum(k for _, k in parts)
            whole, length = beside(((piece, piece.numel) for piece in others), k)
            self._layouts[key] = _Layout(parts, Columns(masked), k, Columns(whole), length)
        return self._layouts[key]


class _Layout(NamedTuple):
    """Of a message: first the values at masks, then the pieces that have none.

    Attributes:
        parts: those with a mask, and how many values are at it. masked: where they lie in words of masks beside each
            other. k: values at all masks. whole: the others, in the message. length: of that.
    """

    parts: list[tuple[Piece, int]]
    masked: Columns
    k: int
    whole: Columns
    length: int


def _is_part(tensor: Tensor) -> bool:
    """Does ``tensor`` keep more memory alive than its own?"""
    return tensor.untyped_storage().nbytes() > tensor.nbytes
