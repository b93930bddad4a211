"""Masks that some ranks choose in one step, all get during the next passes, and all use from the next step on (SCAPE).

:class:`Schedule` says how many values and when; :class:`Masks` chooses, sends and unfolds masks. Sharded weights are
gathered at them (``parts/atmask.py``). Lines are those of SCAPE's Alg. 1.

Each parameter's mask has one chooser: a rank, or, where every rank owns a row of each parameter, the owner of the row.
A rank sends all that it has chosen in one message while the next forward and backward passes run: as bits, or as
positions below a density of 1/32.

All messages have the length of the longest, and every rank gets them all, so that one large parameter would make N long
messages. A parameter with more than ``MAX_SHARES`` / N of all values is therefore cut into chunks of 1 / N of all
values, each with its own chooser and its share of the mask. (The paper has one chooser a parameter, and 4 ranks.)
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Bucket, Segment
from thinwire.core.exchange import Exchange, bucket_rows
from thinwire.core.method import Method, Parameter, count_of, first_step
from thinwire.core.state import LOOSE
from thinwire.methods.parts.atmask import BucketMasks
from thinwire.network.comm import Work
from thinwire.ops import mask as masks
from thinwire.ops import sparse

WORD = masks.WORD
LISTED = 1 / 32
"""Density below which positions (4 bytes each) are fewer bytes than mask bits."""
MAX_SHARES = 3
"""Parameters above this many times 1 / N of all values have several choosers. Higher => longer messages; lower => fewer
parameters whose largest values are found over the whole parameter."""


Slots = dict[str, list[tuple[slice, slice]]]
"""Parameter -> for each chunk, the R ranks that choose its rows, and its bytes in their messages."""


class Chunk(NamedTuple):
    """Some of a parameter's columns: ``[start, start + width)``, multiples of 64; the first ``span`` hold values."""

    start: int
    width: int
    span: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)


def cut(span: int, max_span: int) -> tuple[Chunk, ...]:
    """Cut ``span`` columns into chunks of up to ``max_span`` (rounded up to words), equal but for the last."""
    width = padded(max(min(span, max_span), 1), WORD)
    starts = range(0, span, width)
    return tuple(Chunk(start, min(width, padded(span, WORD) - start), min(width, span - start)) for start in starts)


@dataclass(frozen=True)
class Schedule:
    """A schedule of how many values each step sends, and of the steps that have a new mask.

    Attributes:
        method: has the knob ``warmup``. density: share of values once warm. refresh: steps that share a mask once warm.
    """

    method: Method
    density: float
    refresh: int

    warm = property(lambda self: first_step(self.method, "warmup"))

    @property
    def steady(self) -> int:
        """The first step that is like all that follow."""
        return max(self.warm, 1)

    def density_at(self, step: int) -> float:
        """Return the share of values sent in ``step``: from 1 geometrically to ``density`` at the warm-up's end."""
        if step == 0:
            return 1.0
        return self.density if step >= self.warm else float(self.density ** (step / self.warm))

    def k(self, columns: int, step: int) -> int:
        """Count the values of ``columns`` that are sent in ``step``."""
        return count_of(self.density_at(step), columns)

    def refreshes(self, step: int) -> bool:
        """Is ``step`` the first with a new mask?"""
        return step <= self.steady or (step - self.steady) % self.refresh == 0

    def listed(self, step: int) -> bool:
        """Do the masks of ``step`` travel as positions?"""
        return self.density_at(step) < LISTED

    def mask_bytes(self, columns: int, step: int) -> int:
        """Count the bytes of the mask of ``columns`` values, a multiple of 8."""
        return padded(4 * self.k(columns, step), 8) if self.listed(step) else padded(columns, WORD) // 8


class Masks:
    """The masks in use and those to come, of all parameters that are sent. They live in the state of ``method``.

    State by parameter: "mask" (R, bytes), row r gathered from its chooser; "chosen", the step whose density the mask
    has. No mask means all ones. A parameter that takes no part in a step keeps its mask.
    """

    def __init__(
        self, method: Method, exchange: Exchange, parameters: Collection[Parameter], schedule: Schedule
    ) -> None:
        self._method, self._exchange, self._schedule = method, exchange, schedule
        ranks = exchange.ranks // bucket_rows(exchange, True)
        # Tensor-parallel ranks hold parts that differ in size, and must choose alike for what they hold in common.
        self._in_parts = {of.name for of in parameters if of.shape != of.rank_shape}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        for in_parts in (False, True):
            sizes = {of.name: of.local for of in parameters if (of.name in self._in_parts) == in_parts}
            values = sum(sizes.values())
            for name, size in sizes.items():
                shared = ranks * size > MAX_SHARES * values
                self._chunks[name] = cut(size, -(-values // ranks) if shared else size)
        self._slots: tuple[float, Slots, int] | None = None
        self._bit_slots, self._length = self._lay_out(0)  # as bits: one for each score
        self._anew = False  # masks were dropped, and the next step chooses them
        self._scores: Tensor | None = None  # by which this rank chooses; its chunks side by side
        self._message: Tensor | None = None  # what this rank has chosen for the next step
        self._work: Work | None = None  # everybody's messages, under way
        self._arriving: list[Tensor] = []  # (1, bytes) each: the chunks under way of masks that several ranks choose
        self._joined = torch.empty(0, dtype=torch.float32, device="cpu")  # these masks to come, one behind the other

    def used(self, bucket: Bucket) -> BucketMasks | None:
        """Return the masks in use of the bucket's rows; None: they are all ones."""
        saved_masks = [self._method.state.get("mask", segment.name) for segment in bucket.segments]
        if all(mask is None for mask in saved_masks):
            return None
        return bucket.once("masks", lambda: self._unpack_masks(bucket, saved_masks), *saved_masks)

    def _sections(self, name: str, step: int) -> Iterator[tuple[Chunk, int, slice]]:
        """Yield each chunk of ``name``, the values at its mask in ``step``, and its bytes in a row of the mask."""
        end, schedule = 0, self._schedule
        for chunk in self._chunks[name]:
            begin, end = end, end + schedule.mask_bytes(chunk.span, step)
            yield chunk, schedule.k(chunk.span, step), slice(begin, end)

    def scores(self, segment: Segment, device: torch.device) -> list[tuple[Chunk, Tensor | None]]:
        """List each chunk with the scores (width,) by which this rank chooses its mask; None: another rank chooses."""
        if self._scores is None:
            self._scores = torch.zeros(8 * self._length, dtype=torch.float32, device=device)
        chunk_scores: list[tuple[Chunk, Tensor | None]] = []
        slots = zip(self._chunks[segment.name], self._bit_slots[segment.name], strict=True)
        for chunk, (choosers, byte_range) in slots:
            chosen_here, first = self._exchange.rank in range(choosers.start, choosers.stop), 8 * byte_range.start
            chunk_scores.append((chunk, self._scores[first : first + chunk.width] if chosen_here else None))
        return chunk_scores

    def _choose(self, step: int) -> Tensor:
        """Return this rank's masks for ``step``, where scores are largest (l. 15): (m,) bytes."""
        slots, length = self._slots_of(step)
        scores, listed = self._scores, self._schedule.listed(step)
        assert scores is not None
        if self._message is None or len(self._message) != length:
            self._message = torch.zeros(length, dtype=torch.uint8, device=scores.device)
        segments = sorted(
            sparse.ListSegment(
                8 * bit_range.start, chunk.width, self._schedule.k(chunk.span, step), byte_range.start // 4
            )
            for name, chunks in self._chunks.items()
            for chunk, (choosers, bit_range), (_, byte_range) in zip(
                chunks, self._bit_slots[name], slots[name], strict=True
            )
            if self._exchange.rank in range(choosers.start, choosers.stop)
        )
        if not segments:
            return self._message
        rows = scores[: segments[-1].start + segments[-1].width].view(1, -1)
        if not listed:
            sparse.marked(rows, tuple(segments), self._message[: rows.shape[1] // 8].view(torch.int64).view(1, -1))
            return self._message
        ends = [*(segment.list_start for segment in segments[1:]), segments[-1].list_start + padded(segments[-1].k, 2)]
        positions = self._message[: 4 * ends[-1]].view(torch.int32).view(1, -1)
        sparse.largest(rows, None, tuple(segments), None, positions, torch.empty_like(positions, dtype=torch.float32))
        # Positions count from their chunk's start; the padding, which travels and is saved, is 0.
        positions.sub_(_first_columns(tuple(segments), tuple(ends), scores.device)).clamp_(min=0)
        return self._message

    def refreshes(self, step: int) -> bool:
        """Are masks for ``step`` chosen anew?"""
        return self._anew or self._schedule.refreshes(step)

    def gather(self, names: Collection[str], step: int) -> None:
        """Start to gather the masks for ``step``, if it has new ones; put those of ``names`` into use."""
        if not names or not self.refreshes(step):
            return
        self._anew = False
        self.finish()
        message = self._choose(step)
        state, (slots, length) = self._method.state, self._slots_of(step)
        messages = message.new_empty((self._exchange.ranks, length))
        self._work = self._exchange.gather(messages, message, async_op=True)
        sections = {
            name: [messages[choosers, byte_range] for choosers, byte_range in own_slots]
            for name, own_slots in slots.items()
            if name in names
        }
        joint = {name: chunks for name, chunks in sections.items() if len(chunks) > 1}
        self._arriving = [section for chunks in joint.values() for section in chunks]
        sizes = [sum(section.numel() for section in chunks) for chunks in joint.values()]
        self._joined = message.new_empty(sum(sizes))
        masks_to_come = dict(zip(joint, self._joined.split(sizes), strict=True)) if joint else {}
        for name in slots:
            if name in names:
                mask = masks_to_come[name].view(1, -1) if name in joint else sections[name][0]
                state.put("mask", name, mask)
                state.put("chosen", name, torch.tensor(step, device="cpu"))
            elif (mask_in_use := state.get("mask", name)) is not None and _shares_memory(mask_in_use):
                state.put("mask", name, mask_in_use.clone())  # the gathered masks of that step can then be freed

    def finish(self) -> None:
        """Wait for the masks under way, and join those that several ranks chose for one parameter."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._arriving:
            torch.cat([section.view(-1) for section in self._arriving], out=self._joined)
            devices.keep(self._arriving[0])  # with all messages, which nobody else may hold
            self._arriving = []

    def state_changed(self) -> None:
        """Choose masks in the next step, which is dense, if there are none, as on other ranks than before."""
        self._anew = all(self._method.state.get("mask", name) is None for name in self._chunks)

    def fault_of(self, saved: Mapping[str, Tensor]) -> str:
        """Find masks with a wrong number of bits, or a bit beyond their columns: see ``StateKind.fault``."""
        for name in self._chunks:
            key, chosen = f"{LOOSE}mask/{name}", saved.get(f"{LOOSE}chosen/{name}")
            if (mask := saved.get(key)) is None:
                continue
            if chosen is None or not 0 <= int(chosen) < 2**31:
                return f"{key} is there, and when it was chosen is not"
            step = int(chosen)
            for chunk, k, byte_range in self._sections(name, step):
                chunk_mask = mask[:, byte_range].cpu().contiguous()
                if chunk_mask.shape[1] != byte_range.stop - byte_range.start:
                    return f"{key} has {mask.shape[1]} bytes in a row, and its masks more"
                words = torch.zeros((len(chunk_mask), chunk.width // WORD), dtype=torch.int64, device="cpu")
                try:
                    if self._schedule.listed(step):
                        positions = chunk_mask.view(torch.int32)[:, :k].contiguous()
                        masks.from_lists([(positions, slice(0, words.shape[1]))], words)
                    else:
                        words.copy_(chunk_mask.view(torch.int64))
                except ThinwireError as error:
                    return f"{key}: {error}"
                if bool((masks.popcount(words) != k).any()):
                    return f"{key} has not {k} bits in each row"
                if chunk.span < chunk.width and bool((words[:, -1] >> chunk.span % WORD).any()):
                    return f"{key} has a bit beyond its {chunk.span} columns"
        return ""

    def _slots_of(self, step: int) -> tuple[Slots, int]:
        """Return ``_lay_out(step)``, cached while the density stays."""
        density = self._schedule.density_at(step)
        if self._slots is None or self._slots[0] != density:
            self._slots = density, *self._lay_out(step)
        return self._slots[1:]

    def _lay_out(self, step: int) -> tuple[Slots, int]:
        """Return the slots of the masks of ``step``, and the length of a message: the same on all ranks.

        Chunks go, largest first, those of what tensor-parallel ranks hold in parts last, to the ranks with the fewest
        values so far; with R = N each rank chooses its own row.
        """
        rows = bucket_rows(self._exchange, True)
        load = [(0, rank) for rank in range(self._exchange.ranks // rows)]  # a heap: values, and whose
        ends = [0] * len(load)
        slots: Slots = {name: [] for name in self._chunks}
        pairs = [(name, chunk) for name, chunks in self._chunks.items() for chunk in chunks]
        for name, chunk in sorted(pairs, key=lambda p: (p[0] in self._in_parts, -p[1].span, p[0], p[1].start)):
            values, lightest = load[0]
            first, ends[lightest] = ends[lightest], ends[lightest] + self._schedule.mask_bytes(chunk.span, step)
            heapq.heapreplace(load, (values + chunk.span, lightest))
            slots[name].append((slice(lightest * rows, (lightest + 1) * rows), slice(first, ends[lightest])))
        return slots, max(ends)

    def _unpack_masks(self, bucket: Bucket, saved_masks: Sequence[Tensor | None]) -> BucketMasks:
        """Unfold ``saved_masks``, as gathered, to bits; None: all of the parameter's values."""
        words = bucket.buffer("mask", (bucket.shape[0], bucket.shape[1] // WORD), torch.int64)
        counts, lists = [], []
        for segment, mask in zip(bucket.segments, saved_masks, strict=True):
            if mask is None:
                flags = torch.zeros((len(words), segment.width), dtype=torch.bool, device=words.device)
                flags[:, : segment.span] = True
                masks.pack(flags, words[:, segment.groups(WORD)])
                counts.append(segment.span)
                continue
            chosen = self._method.state.get("chosen", segment.name)
            assert chosen is not None  # of every mask: ``fault_of`` refuses others
            step = int(chosen)
            sections = list(self._sections(segment.name, step))
            counts.append(sum(k for _, k, _ in sections))
            for chunk, k, byte_range in sections:
                first = (segment.start + chunk.start) // WORD
                word_range = slice(first, first + chunk.width // WORD)
                if self._schedule.listed(step):
                    lists.append((mask[:, byte_range].view(torch.int32)[:, :k], word_range))
                else:
                    words[:, word_range].copy_(mask[:, byte_range].view(torch.int64))
        bit_offsets = masks.from_lists(lists, words)
        names = tuple(segment.name for segment in bucket.segments)
        return BucketMasks(names, tuple(counts), words, masks.directory(words) if bit_offsets is None else bit_offsets)


def all_ones(bucket: Bucket) -> BucketMasks:
    """Return masks of all of the bucket's values and its padding: the message is as long as dense's."""
    names, counts = zip(*((segment.name, segment.width) for segment in bucket.segments), strict=True)
    words = torch.full((bucket.shape[0], bucket.shape[1] // WORD), -1, dtype=torch.int64, device=bucket.device)
    return BucketMasks(names, counts, words, masks.directory(words))


@functools.lru_cache(maxsize=1)  # in a warm-up each step has other lists
def _first_columns(segments: tuple[sparse.ListSegment, ...], ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return (m,) int32: the start of its segment for each position in the lists, which end at ``ends``."""
    widths = torch.tensor([end - segment.list_start for segment, end in zip(segments, ends, strict=True)], device="cpu")
    starts = torch.tensor([segment.start for segment in segments], dtype=torch.int32, device="cpu")
    return starts.repeat_interleave(widths).to(device)


def _shares_memory(tensor: Tensor) -> bool:
    """Does ``tensor`` keep more memory alive than its own?"""
    return tensor.untyped_storage().nbytes() > tensor.nbytes
