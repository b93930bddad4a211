"""TAGC: sparsified gradients through lossless homomorphic compression (EuroMLSys 2025; LHC: arXiv 2402.07529).

Alg. 1 on rank n, for each compressed tensor, or shard of one:

    h = g + acc;   g = the largest |h| so that a share theta becomes zero;   acc = the rest              (l. 1-2)
    Index = where any rank's g is not zero                                                               (l. 3-4)
    CountSketch = sum over ranks of g in three hashed tables                                             (l. 5-6)
    peel the sketch with the index at the owner of the shard (all ranks on DDP)                          (l. 8-10)

Paper / ours. The index: NCCL has no OR, so the paper sums fields, of 1 bit, which carries corrupt, or of 4 bits (Sec.
2.2); ours is a true OR. The sum: the paper's l. 6 is for the owner of a shard; on DDP ours is for all, as LHC's is, and
all peel. Left-overs: the paper guesses what peeling cannot recover by a median, which is about 100% off; ours returns
it to the accumulator of each rank that sent it, which every rank can do, because the index and the hashes alone say
what is recoverable. The sketch: the paper's size is fixed, and the union of the masks grows with the number of ranks
until peeling fails; ours is sized from the union that was measured. Threshold: exactly k values; the authors take the
nearest entry of a table. Rounding: to multiples of one power of two, so that sums are exact; the rest stays with the
sender.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Within
from thinwire.base.random import seed_of
from thinwire.codecs.sketch import CountSketch
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange, bucket_rows, count_columns
from thinwire.core.method import ANEW, Card, Parameter, Promise
from thinwire.methods.parts.feedback import GRADIENTS, UPDATES, Gradients, Lossy, Updates, share_of
from thinwire.ops import mask as masks
from thinwire.ops import sketch, sparse

ATTENTION_INPUTS = re.compile(
    r"(to_)?(w?(q|k|v|kv|qkv)|query|key|value|key_value|query_key_value)(_proj)?(_weight)?|c_attn|in_proj(_weight)?"
)
"""The words of a dotted parameter name, in lower case, that make queries, keys and values in the usual models."""
CELL_BITS = 24 - 4
"""A cell's sum is exact below 2^24 quanta; 2^4 elements per cell and rank are allowed for (at load 0.7 it has 2.1)."""
LOAD = 0.7
"""Elements of the union per cell that a sketch's size aims at: peeling fails above 0.8, and the union grows between two
sizes."""
RESIZE = 50
"""Steps after which sketches are sized anew, from the largest union since the last time."""
SMALLEST_EXPONENT = -126
"""The least exponent of the quantum: below, it would become 0. Smaller values stay with their sender."""


@dataclass
class TAGC(Lossy):
    """Each rank's largest values, summed in one count sketch, and a bitmap of their places (EuroMLSys 2025, Alg. 1).

    By default they are the values of the step that AdamW would take (``feedback``), and the union of the masks, with it
    the bytes, grows with the ranks. "tagc:paper" sends gradients, for any optimizer.

    Args:
        theta: share of each tensor's values that waits on a rank (higher => fewer bytes, longer waits); 0 is dense.
        select: "non-attention" (the paper: every matrix but those that make queries, keys and values), "all", or a
            pattern (``fnmatch``) of names.
        leftovers: "accumulate": what cannot be recovered returns to the accumulator; "median": the paper's guess.
    """

    name: ClassVar[str] = "tagc"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"feedback": GRADIENTS, "theta": 0.9875, "select": "non-attention", "leftovers": "median"},
    }

    feedback: Gradients | Updates = UPDATES
    theta: Annotated[float, Within(lambda theta: 0 <= theta < 1, "is the share of values zeroed, below 1")] = 0.9875
    select: str = "all"
    leftovers: Literal["accumulate", "median"] = "accumulate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta == 0 and self.updates is not None and self.updates.delivered_share is not None:
            raise ThinwireError("tagc: delivered_share does nothing with theta=0 (nothing waits): leave it out")
        self._copied: dict[str, Any] = {}  # by parameter, an event: its last "counts" are on the host when it is over

    def describe(self) -> Card:
        card, promise = super().describe(), self.conserves
        if self.leftovers == "median" and self.theta:
            lost = "values that cannot be recovered are guessed: leftovers='accumulate' keeps them"
            promise = Promise("lossy", lost)
        counted = dict.fromkeys(("left", "peak", "union", "counts"), ANEW)
        return replace(
            card, promise=promise, group=masks.WORD, bytes_follow_data=self.theta > 0,
            state_kinds={**card.state_kinds, **counted},
        )  # fmt: skip

    @property
    def default_share(self) -> float:
        if self.theta == 0:
            return 1.0
        return share_of(1 - self.theta)

    def policy(self, parameter: Parameter) -> str | None:
        reason = super().policy(parameter)
        if reason or self.select == "all":
            return reason
        if self.select != "non-attention":
            return None if fnmatchcase(parameter.name, self.select) else "not selected"
        words = parameter.name.lower().split(".")
        return "attention input" if any(ATTENTION_INPUTS.fullmatch(word) for word in words) else None

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        if self.theta == 0:
            exchange.mean(bucket)
            return
        old, acc = self.state.read("residual", bucket), self.state.write("residual", bucket)  # acc, acc_next
        segments = self._segments(bucket, exchange)
        rows, n = bucket.shape
        words, lost_words = (bucket.scratch(use, (rows, n // masks.WORD), torch.int64) for use in ("words", "left"))
        positions = bucket.scratch("found", (rows, segments.k), torch.int32)
        sent, remainder = (bucket.scratch(use, (rows, segments.k), torch.float32) for use in ("sent", "rest"))
        with exchange.span("encode", bucket.rows):
            self._choose(bucket.rows, old, segments, acc, positions, sent, words)  # l. 1: acc = h; l. 2: g; l. 3: words
        index = exchange.union(bucket, words)  # l. 4
        self._round(segments, sent, remainder, exchange)  # ours, so that sums are exact
        estimate = self.leftovers == "median"
        # l. 5       CountSketch.encode
        # l. 6, 9    the network sums: to the row's owner, which is d (l. 8), or on DDP to all
        # l. 10      CountSketch.decode; l. 11-12: bucket.mean is g, at its owner only
        codec = CountSketch(segments, acc, sent, positions, index, lost_words, exchange.own_row, estimate)
        exchange.mean(bucket, codec)
        with exchange.span("decode", bucket.rows):
            self._measure(bucket, segments, index, lost_words)
            # l. 2: acc = h without what arrived. Not the exchange's residual: what cannot be recovered of a sum
            # depends on everybody's masks, and an encoding knows its own rank's.
            sketch.restore(sent, remainder, positions, lost_words.zero_() if estimate else lost_words, segments, acc)

    def _choose(
        self, rows: Tensor, old: Tensor | None, segments: sketch.SketchSegments, h: Tensor, positions: Tensor,
        sent: Tensor, words: Tensor,
    ) -> None:  # fmt: skip
        """``h`` = ``rows`` + ``old``; of it ``sent`` is sent, from the columns ``positions``, whose mask is ``words``.

        Where all of a tensor is sent, this is still what its sketch would be sized from.
        """
        lists = tuple(sparse.ListSegment(s.start, s.width, s.k, s.list_start) for s in segments)
        sparse.largest(rows, old, lists, h, positions, sent)
        masks.from_indices(positions, words)

    def _round(self, segments: sketch.SketchSegments, sent: Tensor, remainder: Tensor, exchange: Exchange) -> None:
        """Kept values become multiples of a power of two that all ranks share, coarse enough for exact sums."""
        largest = exchange.all_max(sketch.peaks(sent, segments))
        _, exponent = torch.frexp(largest)
        spare = CELL_BITS - math.ceil(math.log2(exchange.ranks))
        quantum = torch.ldexp(torch.ones_like(largest), (exponent - spare).clamp_(min=SMALLEST_EXPONENT))
        sketch.round_to(sent, quantum, segments, remainder)

    def _measure(self, bucket: Bucket, segments: sketch.SketchSegments, index: Tensor, lost_words: Tensor) -> None:
        """Count what was left, and the union, on the way to the host, which needs it in the next step."""
        lost_counts, union = sketch.count(lost_words, segments), sketch.count(index, segments)
        counts = [lost_counts.sum(0, dtype=torch.int32), union.amax(0)]
        host = devices.host_memory((3, len(segments)), bucket.device, torch.int32)
        if index.is_meta:
            rooms = zip(segments, bucket.segments, strict=True)
            host[1].numpy()[:] = [min(room.room, segment.span) for room, segment in rooms]  # a plan is a bound
        else:
            host[: len(counts)].copy_(torch.stack(counts), non_blocking=True)
        copied = devices.mark(bucket.device)
        # Early in a run the ranks' masks still drift apart: sketches are sized anew after steps 0, 1, 2, 4, 8, ... too.
        is_power_of_two = bucket.step & (bucket.step - 1) == 0
        host[2].numpy()[:] = is_power_of_two or bucket.step % RESIZE == 0
        for i, segment in enumerate(bucket.segments):
            for kind, value in zip(("left", "peak", "union"), self._measured(segment.name), strict=True):
                self.state.put(kind, segment.name, torch.tensor(value, device="cpu"))
            self.state.put("counts", segment.name, host[:, i])
            self._copied[segment.name] = copied

    def _measured(self, name: str) -> tuple[int, int, int]:
        """Count over a parameter's steps: what was left over, the largest union since its sketch was sized, and the
        union that it is sized for; -1: none was measured."""

        def read(kind: str, default: int) -> int:
            value = self.state.get(kind, name)
            return default if value is None else int(value)

        lost_before, peak, sized = read("left", 0), read("peak", 0), read("union", -1)
        counts = self.state.get("counts", name)  # of the last step, which those do not know of
        if counts is None:
            return lost_before, peak, sized
        self._wait_for_counts(name)
        lost, union, resized = counts.tolist()
        lost_before, peak = lost_before + lost, max(peak, union)
        return (lost_before, 0, peak) if resized or sized < 0 else (lost_before, peak, sized)

    def _wait_for_counts(self, name: str) -> None:
        if (copied := self._copied.get(name)) is not None:
            copied.synchronize()  # over, unless nobody has waited for the flag of the step that counted

    def finish(self) -> None:
        super().finish()
        for name in self._copied:  # the state has the host's memory
            self._wait_for_counts(name)

    def facts(self) -> dict[str, float]:
        if self.theta == 0:
            return {}
        figures: dict[str, float] = {"left-overs so far": 0, "union, share of values": 0, "tensors sent dense": 0}
        values, exchange = 0, self.run.exchange
        for name, parameter in self.run.parameters.items():
            if self.state.get("counts", name) is None:
                continue
            lost, _, union = self._measured(name)
            columns = count_columns(exchange, parameter.local, bucket_rows(exchange, True))
            figures["left-overs so far"] += lost
            figures["union, share of values"] += union
            figures["tensors sent dense"] += self._cells(name, columns, exchange) == 0
            values += columns
        figures["union, share of values"] /= max(values, 1)
        return figures

    def _k(self, columns: int) -> int:
        return max(columns - int(self.theta * columns), 1)

    def _cells(self, name: str, columns: int, exchange: Exchange) -> int:
        """Size each table of a parameter's sketch: for the union last measured, or for disjoint masks before any was.

        0: it would be no smaller than the parameter.
        """
        _, _, union = self._measured(name)
        if union < 0:
            union = min(exchange.ranks * self._k(columns), columns)
        cells = math.ceil(union / LOAD / 3) + 8  # a few more: small tables fail at lower loads
        return cells if 3 * cells < padded(columns, masks.WORD) else 0

    def _segments(self, bucket: Bucket, exchange: Exchange) -> sketch.SketchSegments:
        segments, list_start, wire_start = list[sketch.SketchSegment](), 0, 0
        for segment in bucket.segments:
            name, width, k = segment.name, segment.width, self._k(segment.span)
            cells, seed = self._cells(name, segment.span, exchange), seed_of(self.run.seed, name, bucket.step)
            room = min(exchange.ranks * k, width)
            segments.append(sketch.SketchSegment(segment.start, width, k, list_start, room, wire_start, cells, seed))
            list_start, wire_start = segments[-1].listed.stop, segments[-1].wire.stop
        return sketch.SketchSegments(segments, bucket.device)
