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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire import device as devices
from thinwire.bucket import Bucket, padded
from thinwire.codecs.base import Residual
from thinwire.codecs.mask import Masked
from thinwire.codecs.sketch import CountSketch
from thinwire.collectives import Exchange
from thinwire.errors import ThinwireError
from thinwire.methods.base import Delay, Parameter, Promise, Resized, portion_of
from thinwire.methods.shared import SharedMask, choosers_of
from thinwire.ops import mask as masks
from thinwire.ops import sketch, sparse
from thinwire.streams import seed_of

ATTENTION_INPUTS = re.compile(
    r"(to_)?(w?(q|k|v|kv|qkv)|query|key|value|key_value|query_key_value)(_proj)?(_weight)?|c_attn|in_proj(_weight)?"
)
"""One part of a dotted parameter name, in lower case: what makes queries, keys and values in the usual models."""
CELL_BITS = 24 - 4
"""A cell's sum is exact below 2^24 quanta; 2^4 elements per cell and rank are allowed for (at load 0.7 it has 2.1)."""
LHC_LEAST = 2.0**-14
SMALLEST_EXPONENT = -126
"""Of the quantum: below, it would leave float32 and become 0. Smaller values stay with their sender."""


@dataclass
class TAGC(SharedMask):
    """Each rank's own largest values, merged in one count sketch and one index of bits (EuroMLSys 2025, Alg. 1).

    By default they are the values of the step that AdamW would take (``feedback``), and the union of the masks, with it
    the bytes, grows with the ranks; "tagc:shared" sends values at one mask for all. "tagc:paper" sends gradients, for
    any optimizer.

    Args:
        theta: share of each tensor's values that is zeroed (higher => fewer bytes, longer waits); 0 is dense.
        load: elements of the union per cell of the sketch that its size aims at, below 0.8 (higher => fewer bytes, and
            left-overs beyond 0.8).
        resize: steps after which the sketches are sized anew, from the largest union since the last time; early in
            a run more often.
        limit: share of a union left over from which its sketch is resized at once (lower => fewer left-overs where
            the union grows between sizes, more bytes). 1: never.
        on_overload: a tensor whose sketch would be no smaller than itself goes "dense" for as long as that lasts, and
            is counted, or the step is refused ("refuse").
        select: "non-attention" (the paper: every matrix but those that make queries, keys and values), "all", or a
            pattern (``fnmatch``) of names.
        mask: "local": each rank's own largest values; "shared": those of a few ranks, in turn, for all: then the union
            does not grow with the ranks, and the values travel without a sketch.
        choosers: with mask="shared", how many choose it, a share of the positions each; more => what is large on any
            rank is sent sooner.
        leftovers: "accumulate": what cannot be recovered returns to the accumulator; "median": the paper's guess.
        accumulate: keep what was not sent for the next step (8 bytes per element). False: it is lost.
    """

    name: ClassVar[str] = "tagc"
    granule: ClassVar[int] = masks.WORD
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "recommended": {},
        "shared": {"mask": "shared", "theta": 0.95},
        "paper": {"feedback": "gradient", "theta": 0.9875, "select": "non-attention", "leftovers": "median"},
    }

    feedback: Literal["gradient", "update"] = "update"
    theta: float = 0.9875
    load: float = 0.7
    resize: int = 50
    limit: float = 1
    on_overload: Literal["dense", "refuse"] = "dense"
    select: str = "all"
    mask: Literal["local", "shared"] = "local"
    choosers: int = 4
    leftovers: Literal["accumulate", "median"] = "accumulate"
    accumulate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.must(0 <= self.theta < 1, "theta", "is the share of values zeroed, 0 to below 1")
        if not 0 < self.load < 0.8:
            raise ThinwireError(f"{self.name}: peeling fails above a load of 0.8 elements per cell, got {self.load}")
        self.must(self.resize >= 1, "resize", "is a number of steps, 1 or more")
        self.must(0 < self.limit <= 1, "limit", "is a share of the union, above 0 to 1 (never)")
        self.must(self.choosers >= 1, "choosers", "is a number of ranks, 1 or more")
        if self.mask == "local":
            self.refuse_idle("mask='local'", "choosers", "weights")
        if self.theta == 0:
            self.refuse_idle("theta=0 (nothing waits)", "portion", "weights")
        if self.mask == "shared":
            self.refuse_idle("mask='shared' (no sketch)", "load", "resize", "limit", "on_overload", "leftovers")
        self._copied: Any = None  # an event: the last "counts" are on the host when it is over

    @property
    def promise(self) -> Promise:
        if not self.accumulate and self.theta:
            return Promise("lossy", "what is not among the largest values is dropped: accumulate=True keeps it")
        if self.leftovers == "median" and self.theta:
            return Promise("lossy", "values that cannot be recovered are guessed: leftovers='accumulate' returns them")
        return self.conserves

    @property
    def delay(self) -> Delay | None:
        if self.promise.kind != "conserves":
            return None
        if self.feedback == "update":
            one = self.mask == "shared" and self.choosers == 1
            return Delay.of_steps(1 - self.theta, self.start, self.delivered, one=one)
        return Delay.of_largest(1 - self.theta, self.start)

    @property
    def usual_portion(self) -> float:
        if self.theta == 0:
            return 1.0
        return portion_of((1 - self.theta) / (2 if self.mask == "shared" else 1))

    @property
    def resized(self) -> Mapping[str, Resized]:
        return {**super().resized, "left": "anew", "peak": "anew", "union": "anew", "counts": "anew"}

    @property
    def at_one_mask(self) -> bool:
        return self.mask == "shared" and self.theta > 0

    @property
    def adapts(self) -> bool:
        return self.mask == "local" and self.theta > 0

    def policy(self, parameter: Parameter) -> str | None:
        why = super().policy(parameter)
        if why or self.select == "all":
            return why
        if self.select != "non-attention":
            return None if fnmatchcase(parameter.name, self.select) else "not selected"
        parts = parameter.name.lower().split(".")
        return "attention input" if any(ATTENTION_INPUTS.fullmatch(part) for part in parts) else None

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        if self.theta == 0:
            exchange.mean(bucket)
            return
        old = self.state.read("residual", bucket) if self.accumulate else None
        acc = self.state.write("residual", bucket)  # the paper's acc_next
        if self.mask == "shared":
            self._at_shared_mask(bucket, exchange, old, acc)
        else:
            self._sketched(bucket, exchange, old, acc)
        if not self.accumulate:
            acc.zero_()

    def _sketched(self, bucket: Bucket, exchange: Exchange, old: Tensor | None, acc: Tensor) -> None:
        parts = self._parts(bucket, exchange)
        rows, n = bucket.shape
        words, left = (bucket.scratch(use, (rows, n // masks.WORD), torch.int64) for use in ("words", "left"))
        found = bucket.scratch("found", (rows, parts.k), torch.int32)
        sent, rest = (bucket.scratch(use, (rows, parts.k), torch.float32) for use in ("sent", "rest"))
        with exchange.span("encode", bucket.rows):
            self._choose(bucket.rows, old, parts, acc, found, sent, words)  # l. 2: g; acc is h yet
        index = exchange.union(bucket, words)  # l. 3-4
        self._round(parts, sent, rest, exchange)  # ours, so that sums are exact
        estimate = self.leftovers == "median"
        # l. 5-6 and 8-10: CountSketch._encode, the network's sum, CountSketch._decode. (l. 7 is a comment.)
        codec = CountSketch(parts, acc, sent, found, index, left, exchange.mine, estimate)
        exchange.mean(bucket, codec)
        with exchange.span("decode", bucket.rows):
            self._measure(bucket, parts, index, left)
            # l. 2: acc = h without what arrived. Not the exchange's residual: what cannot be recovered of a sum depends
            # on everybody's masks, and an encoding knows its own rank's.
            sketch.settle(sent, rest, found, left.zero_() if estimate else left, parts, acc)

    def _choose(
        self, rows: Tensor, old: Tensor | None, parts: sketch.Parts, h: Tensor, found: Tensor, sent: Tensor,
        words: Tensor,
    ) -> None:  # fmt: skip
        """``h`` = ``rows`` + ``old``; of it ``sent`` is sent, from the columns ``found``, whose mask is ``words``.

        Where all of a tensor is sent, this is still what its sketch would be sized from.
        """
        listed = tuple(sparse.Part(part.start, part.width, part.k, part.place) for part in parts)
        sparse.largest(rows, old, listed, h, found, sent)
        masks.from_indices(found, words)

    def _round(self, parts: sketch.Parts, sent: Tensor, rest: Tensor, exchange: Exchange) -> None:
        """Kept values become multiples of a power of two that all ranks share, coarse enough for exact sums."""
        largest = exchange.all_max(sketch.peaks(sent, parts))
        _, exponent = torch.frexp(largest)
        spare = CELL_BITS - math.ceil(math.log2(exchange.rows))
        quantum = torch.ldexp(torch.ones_like(largest), (exponent - spare).clamp_(min=SMALLEST_EXPONENT))
        sketch.round_to(sent, quantum, parts, rest)

    def _measure(self, bucket: Bucket, parts: sketch.Parts, index: Tensor, left: Tensor) -> None:
        """Count what was left, and the union, on the way to the host, which needs it in the next step."""
        lost, union = sketch.count(left, parts), sketch.count(index, parts)
        counts = [lost.sum(0, dtype=torch.int32), union.amax(0)]
        if self.limit < 1:
            counts.append((lost > self.limit * union).amax(0))
        host = devices.host_memory((4, len(parts)), bucket.device, torch.int32)
        if index.is_meta:
            room = zip(parts, bucket.segments, strict=True)
            host.numpy()[1] = [min(part.room, segment.span) for part, segment in room]  # a plan is a bound
        else:
            host[: len(counts)].copy_(torch.stack(counts), non_blocking=True)
            self._copied = devices.mark(bucket.device)
        # early in a run the masks of the ranks still drift apart: after steps 0, 1, 2, 4, 8, ... as well
        host.numpy()[3] = bucket.step % self.resize == 0 or bucket.step & (bucket.step - 1) == 0
        for i, segment in enumerate(bucket.segments):
            for kind, value in zip(("left", "peak", "union"), self._measured(segment.name), strict=True):
                self.state.put(kind, segment.name, torch.tensor(value))
            self.state.put("counts", segment.name, host[:, i])

    def _measured(self, name: str) -> tuple[int, int, int]:
        """Of a parameter's steps so far: what was left over, the largest union since its sketch was last sized, and the
        union that it is sized for; -1: none was measured."""
        left, peak, sized = (
            -(kind == "union") if (value := self.state.get(kind, name)) is None else int(value)
            for kind in ("left", "peak", "union")
        )
        counts = self.state.get("counts", name)  # of the last step, which those do not know of
        if counts is None:
            return left, peak, sized
        if self._copied is not None:
            self._copied.synchronize()  # over, unless nobody has waited for the step's flag
        lost, union, over, due = counts.tolist()
        left, peak = left + lost, max(peak, union)
        return (left, 0, peak) if over or due or sized < 0 else (left, peak, sized)

    def _at_shared_mask(self, bucket: Bucket, exchange: Exchange, old: Tensor | None, acc: Tensor) -> None:
        """One mask for all, by a few ranks in turn: of the values of each tensor that are sent, each chooses a part."""
        if old is not None:
            bucket.rows.add_(old)  # l. 1: h
        words = self.words_of(bucket)
        choosers = choosers_of(self.choosers, 1 - self.theta, exchange.rows)
        counts = [self._k(segment.span) for segment in bucket.segments]
        mine, place = [], 0
        for segment, k in zip(bucket.segments, counts, strict=True):
            if (exchange.rank - seed_of(self.run.seed, segment.name, bucket.step)) % exchange.rows < choosers:
                mine.append(sparse.Part(segment.start, segment.width, max(k // choosers, 1), place))
                place += mine[-1].k
        with exchange.span("encode", bucket.rows):
            sparse.marked(bucket.rows, tuple(mine), words)  # l. 2
        words.copy_(exchange.union(bucket, words))  # l. 3-4
        before = self.settle(bucket, words, counts, choosers)
        codec = Masked(words, sum(counts), owner_row=exchange.mine, before=before)
        exchange.mean(bucket, codec, residual=Residual(None, acc))  # values at the mask in place of l. 5-10; l. 2: acc

    def facts(self) -> dict[str, float]:
        if self.mask == "shared" or self.theta == 0:
            return {}
        found: dict[str, float] = {"left-overs so far": 0, "union, share of values": 0, "tensors sent dense": 0}
        values, exchange = 0, self.run.exchange
        for name, parameter in self.run.parameters.items():
            if self.state.get("counts", name) is None:
                continue
            left, _, union = self._measured(name)
            columns = exchange.columns(parameter.local, exchange.bucket_rows(True))
            found["left-overs so far"] += left
            found["union, share of values"] += union
            found["tensors sent dense"] += self._cells(name, columns, exchange) == 0
            values += columns
        found["union, share of values"] /= max(values, 1)
        return found

    def _k(self, columns: int) -> int:
        return max(columns - int(self.theta * columns), 1)

    def _cells(self, name: str, columns: int, exchange: Exchange) -> int:
        """Of each table of a parameter's sketch: for the union last measured, or for disjoint masks before any was.

        0: it would be no smaller than the parameter.
        """
        _, _, union = self._measured(name)
        if union < 0:
            union = min(exchange.rows * self._k(columns), columns)
        cells = math.ceil(union / self.load / 3) + 8  # a few more: small tables fail at lower loads
        return cells if 3 * cells < padded(columns, masks.WORD) else 0

    def _parts(self, bucket: Bucket, exchange: Exchange) -> sketch.Parts:
        parts, place, first = list[sketch.Part](), 0, 0
        for segment in bucket.segments:
            name, width, k = segment.name, segment.width, self._k(segment.span)
            cells, seed = self._cells(name, segment.span, exchange), seed_of(self.run.seed, name, bucket.step)
            if not cells and self.on_overload == "refuse":
                raise ThinwireError(
                    f"{self.name}: the sketch of {name} would be no smaller than its {width} values: "
                    f"raise theta above {self.theta}, keep it dense with dense=, or take on_overload='dense'"
                )
            room = min(exchange.rows * k, width)
            parts.append(sketch.Part(segment.start, width, k, place, room, first, cells, seed))
            place, first = parts[-1].listed.stop, parts[-1].wire.stop
        return sketch.Parts(parts, bucket.device)


@dataclass
class LHC(TAGC):
    """LHC on plain DDP: index and sketch of whatever is not zero, no sparsification of its own (arXiv 2402.07529).

    For gradients that are sparse by themselves (LHC's paper names 80-95% zeros; those of embeddings are). Others go
    dense, at 1/32 more than dense itself for the index that finds this out, and are counted. The accumulator holds what
    peeling left, what rounding to exact sums cut off, and values below 2^-14 of the rank's largest until they have
    grown: else the rounding would fill every zero.
    """

    name: ClassVar[str] = "lhc"
    delay: ClassVar[None] = None
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("theta", "accumulate", "mask", "choosers", "weights"), "lhc sends whatever is not zero: tagc has it"
    )

    feedback: Literal["gradient", "update"] = "gradient"

    def _choose(
        self, rows: Tensor, old: Tensor | None, parts: sketch.Parts, h: Tensor, found: Tensor, sent: Tensor,
        words: Tensor,
    ) -> None:  # fmt: skip
        torch.add(rows, 0 if old is None else old, out=h)
        least = (sketch.peaks(h, parts) * LHC_LEAST).clamp_(max=torch.finfo(torch.float32).max)
        widths = devices.uploaded([part.width // masks.WORD for part in parts], h.device, torch.int64)
        least = least.repeat_interleave(widths, output_size=words.shape[1]).unsqueeze(1)
        flags = ~(h.abs().view(*words.shape, masks.WORD) <= least)  # with infinities and NaN
        flags = flags.view(h.shape)
        masks.pack(flags, words)
        sketch.gather(h, words, parts, found, sent)

    def _k(self, columns: int) -> int:
        return padded(columns, masks.WORD)  # room for all: how many are not zero is not known beforehand
