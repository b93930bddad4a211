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

from thinwire.bucket import Bucket, padded
from thinwire.codecs.base import Residual
from thinwire.codecs.mask import Masked
from thinwire.codecs.sketch import CountSketch, Part, places
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
        return {**super().resized, "left": "anew", "peak": "anew", "union": "anew"}

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
        if self.accumulate:
            bucket.rows.add_(self.state.read("residual", bucket))  # l. 1: h
        acc = self.state.write("residual", bucket)  # the paper's acc_next
        if self.mask == "shared":
            self._at_shared_mask(bucket, exchange, acc)
        else:
            self._sketched(bucket, exchange, acc)
        if not self.accumulate:
            acc.zero_()

    def _sketched(self, bucket: Bucket, exchange: Exchange, acc: Tensor) -> None:
        parts = tuple(self._part(s.name, s.start, s.width, s.span, exchange, bucket.step) for s in bucket.segments)
        self._refuse_overload(parts)
        shape, flags = bucket.shape, (bucket.shape[0], bucket.shape[1] // masks.WORD)
        words, left = (bucket.scratch(use, flags, torch.int64) for use in ("words", "left"))
        k = sum(part.k for part in parts)
        sent, rest = (bucket.scratch(use, (shape[0], k), torch.float32) for use in ("sent", "rest"))
        with exchange.span("encode", bucket.rows):
            sent.zero_()
            for part, kept, _ in places(parts):
                values, columns = bucket.rows[:, part.columns], acc[:, part.columns]
                self._sparsify(values, part, words[:, part.words], sent[:, kept], columns)  # l. 2: g and acc
                if not part.cells:
                    columns.zero_()  # all of it is sent
        index = exchange.union(bucket, words)  # l. 3-4
        self._round(parts, sent, rest, exchange)  # ours, so that sums are exact
        estimate = self.leftovers == "median"
        # l. 5-6 and 8-10: CountSketch._encode, the network's sum, CountSketch._decode. (l. 7 is a comment.)
        exchange.mean(bucket, CountSketch(parts, sent, words, index, left.zero_(), exchange.mine, estimate))
        # acc gets back what did not arrive. Not the exchange's residual: what cannot be recovered of a sum depends on
        # everybody's masks, and an encoding knows its own rank's.
        with exchange.span("decode", bucket.rows):
            back = left if self.leftovers == "accumulate" else torch.zeros_like(left)
            # Part by part: where a rank sends fewer than k values of one (LHC), its slots of the payload are not full.
            for part, kept, _ in places(parts):
                at = part.words
                sketch.settle(sent[:, kept], rest[:, kept], words[:, at], back[:, at], acc[:, part.columns])
            self._measure(bucket, parts, index, left)

    def _sparsify(self, rows: Tensor, part: Part, words: Tensor, sent: Tensor, rest: Tensor) -> None:
        """``words`` = what is sent of ``rows``: ``sent``; ``rest`` = the rows without it.

        Where all of a tensor is sent, this is still what its sketch would be sized from.
        """
        masks.topk_mask(rows, part.k, words)
        masks.gather_keep(rows, None, words, sent, rest)

    def _round(self, parts: tuple[Part, ...], sent: Tensor, rest: Tensor, exchange: Exchange) -> None:
        """Kept values become multiples of a power of two that all ranks share, coarse enough for exact sums."""
        largest = torch.stack([sent[:, kept].abs().amax() for _, kept, _ in places(parts)])
        _, exponent = torch.frexp(exchange.all_max(largest))
        spare = CELL_BITS - math.ceil(math.log2(exchange.rows))
        quantum = torch.ldexp(torch.ones_like(largest), (exponent - spare).clamp_(min=SMALLEST_EXPONENT))
        for i, (part, kept, _) in enumerate(places(parts)):
            if part.cells:
                sketch.round_to(sent[:, kept], quantum[i].view(1, 1), rest[:, kept])
            else:
                rest[:, kept].zero_()

    def _measure(self, bucket: Bucket, parts: tuple[Part, ...], index: Tensor, remains: Tensor) -> None:
        """Count what was left, and the union: now and then its peak decides how large the next sketches are."""
        for part in parts:
            left, union = masks.popcount(remains[:, part.words]), masks.popcount(index[:, part.words])
            total, peak, sized = (self.state.get(kind, part.name) for kind in ("left", "peak", "union"))
            self.state.put("left", part.name, left.sum() if total is None else total + left.sum())
            peak = union.amax() if peak is None else torch.maximum(peak, union.amax())
            # early in a run the masks of the ranks still drift apart: after steps 0, 1, 2, 4, 8, ... as well
            due = (left > self.limit * union).any()
            if sized is None or bucket.step % self.resize == 0 or bucket.step & (bucket.step - 1) == 0:
                due.fill_(True)
            self.state.put("union", part.name, peak if sized is None else torch.where(due, peak, sized))
            self.state.put("peak", part.name, torch.where(due, 0, peak))

    def _at_shared_mask(self, bucket: Bucket, exchange: Exchange, acc: Tensor) -> None:
        """One mask for all, by a few ranks in turn: of the values of each tensor that are sent, each chooses a part."""
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
        values = 0
        for name, parameter in self.run.parameters.items():
            union, left = self.state.get("union", name), self.state.get("left", name)
            if union is None or left is None:
                continue
            rows = self.run.exchange.bucket_rows(True)
            columns = self.run.exchange.columns(parameter.local, rows)
            part = self._part(name, 0, padded(columns, masks.WORD), columns, self.run.exchange)
            found["left-overs so far"] += int(left)
            found["union, share of values"] += int(union)
            found["tensors sent dense"] += part.cells == 0
            values += columns
        found["union, share of values"] /= max(values, 1)
        return found

    def _k(self, columns: int) -> int:
        return max(columns - int(self.theta * columns), 1)

    def _part(self, name: str, start: int, width: int, span: int, exchange: Exchange, step: int = 0) -> Part:
        """A parameter's sketch: for the union last measured, or for disjoint masks before any was."""
        k = self._k(span)
        measured = self.state.get("union", name)
        union = min(exchange.rows * k, span) if measured is None or measured.is_meta else int(measured)
        cells = math.ceil(union / self.load / 3) + 8  # a few more: small tables fail at lower loads
        return Part(name, start, width, k, cells if 3 * cells < width else 0, seed_of(self.run.seed, name, step))

    def _refuse_overload(self, parts: tuple[Part, ...]) -> None:
        for part in parts if self.on_overload == "refuse" else ():
            if not part.cells:
                raise ThinwireError(
                    f"{self.name}: the sketch of {part.name} would be no smaller than its {part.width} values: "
                    f"raise theta above {self.theta}, keep it dense with dense=, or take on_overload='dense'"
                )


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

    def _sparsify(self, rows: Tensor, part: Part, words: Tensor, sent: Tensor, rest: Tensor) -> None:
        magnitudes = rows.abs()
        least = (magnitudes.amax() * LHC_LEAST).clamp_(max=torch.finfo(torch.float32).max)
        flags = ~(magnitudes <= least)  # with infinities and NaN
        masks.pack(flags, words)
        rest.copy_(torch.where(flags, 0, rows))
        for values, of, to in () if rows.is_meta else zip(rows, flags, sent, strict=True):
            found = values[of]
            to[: len(found)] = found

    def _k(self, columns: int) -> int:
        return padded(columns, masks.WORD)  # room for all: how many are not zero is not known beforehand
