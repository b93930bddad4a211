"""TAGC: sparsified gradients through lossless homomorphic compression (EuroMLSys 2025; LHC: arXiv 2402.07529).

Alg. 1 on rank n, for each compressed tensor, or shard of one:

    h = g + acc;   g = the largest |h| so that a share theta becomes zero;   acc = the rest              (l. 1-2)
    Index = where any rank's g is not zero;   CountSketch = sum over ranks of g in three hashed tables   (l. 3-6)
    peel the sketch with the index at the owner of the shard (all ranks on DDP)                          (l. 7-8)

Paper / ours. The index: the paper sums 1-bit fields, since NCCL has no OR, and carries corrupt it; ours is a true OR.
Left-overs: the paper guesses what peeling cannot recover by a median, which is about 100% off; ours returns it to the
accumulator of each rank that sent it, which every rank can do, because the index and the hashes alone say what is
recoverable. The sketch: the paper's size is fixed, and the union of the masks grows with the number of ranks until
peeling fails; ours is sized from the union that was measured. Threshold: exactly k values; the authors take the nearest
entry of a table. Rounding: to multiples of one power of two, so that sums are exact; the rest stays with the sender.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.bucket import Bucket, padded
from thinwire.codecs.mask import Masked
from thinwire.codecs.sketch import CountSketch, Part
from thinwire.collectives import Exchange
from thinwire.errors import ThinwireError
from thinwire.methods.base import ErrorFeedback, Parameter, columns_of
from thinwire.ops import mask as masks
from thinwire.ops import sketch
from thinwire.streams import seed_of

ATTENTION_INPUTS = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "qkv", "c_attn", "in_proj", "wq", "wk", "wv")
CELL_BITS = 24 - 4
"""A cell's sum is exact below 2^24 quanta; 2^4 elements per cell and rank are allowed for (at load 0.7 it has 2.1)."""


@dataclass
class Tagc(ErrorFeedback):
    """Each rank's own largest values, merged by the network in one count sketch and one index of bits.

    Args:
        theta: share of each tensor's values that is zeroed (higher => fewer bytes, longer waits); 0 is dense.
        load: elements of the union per cell of the sketch that its size aims at, below 0.8 (higher => fewer bytes, and
            left-overs beyond 0.8).
        resize: steps after which the sketches are sized anew, from the largest union since the last time; early in
            a run more often.
        select: "non-attention" (the paper: every matrix but those that make queries, keys and values), "all", or a
            pattern of names.
        mask: "local": each rank's own largest values; "shared": one rank's, in turn, for all: then the union does
            not grow with the ranks, and the values travel without a sketch.
        leftovers: "accumulate": what cannot be recovered returns to the accumulator; "median": the paper's guess.
        accumulate: keep what was not sent for the next step (8 bytes per element). False: it is lost.
    """

    name: ClassVar[str] = "tagc"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"theta": 0.9875, "select": "non-attention", "leftovers": "median"},
        "recommended": {"theta": 0.95, "mask": "shared", "select": "all"},
    }

    theta: float = 0.9875
    load: float = 0.7
    resize: int = 50
    select: str = "all"
    mask: str = "local"
    leftovers: str = "accumulate"
    accumulate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.theta < 1:
            raise ThinwireError(f"{self.name}: theta is the share of values zeroed, 0 to below 1, got {self.theta}")
        if not 0 < self.load < 0.8:
            raise ThinwireError(f"{self.name}: peeling fails above a load of 0.8 elements per cell, got {self.load}")
        if self.resize < 1:
            raise ThinwireError(f"{self.name}: resize is a number of steps, 1 or more, got {self.resize}")
        for knob, allowed in (("mask", ("local", "shared")), ("leftovers", ("accumulate", "median"))):
            if getattr(self, knob) not in allowed:
                raise ThinwireError(f"{self.name}: {knob} is {' or '.join(allowed)}, got '{getattr(self, knob)}'")
        self._codecs: dict[object, CountSketch | Masked] = {}

    @property
    def granule(self) -> int:
        return masks.WORD

    def warm_up(self, device: torch.device) -> None:
        values = torch.ones((1, masks.WORD), device=device)
        words = torch.zeros((1, 1), dtype=torch.int64, device=device)
        masks.topk_mask(values, 1, words)
        payload, wire = torch.ones((1, 1), device=device), torch.zeros((1, 6), device=device)
        masks.gather_keep(values, None, words, payload, values)
        masks.popcount(words)
        masks.scatter(payload, words, values)
        sketch.sketch_encode(payload, words, 0, wire)
        sketch.sketch_peel(wire, words, 0, values, words.clone())
        sketch.settle(payload, payload, words, words, values)

    def policy(self, parameter: Parameter) -> str | None:
        why = super().policy(parameter)
        if why or self.select == "all":
            return why
        if self.select != "non-attention":
            return None if fnmatchcase(parameter.name, self.select) else "not selected"
        parts = parameter.name.lower().split(".")
        return "attention input" if any(part in ATTENTION_INPUTS for part in parts) else None

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        assert self.state is not None
        if self.theta == 0:
            exchange.mean(bucket)
            return
        acc = self.state.write("residual", bucket)
        if self.accumulate:
            bucket.rows.add_(self.state.read("residual", bucket))  # h, l. 1
        if self.mask == "shared":
            self._at_shared_mask(bucket, exchange, acc)
        else:
            self._sketched(bucket, exchange, acc)
        if not self.accumulate:
            acc.zero_()

    def _sketched(self, bucket: Bucket, exchange: Exchange, acc: Tensor) -> None:
        codec = self._sketch(bucket, exchange)
        ledger = exchange._group().ledger
        with ledger.span("encode", bucket.rows):
            for part, columns, words, _, _ in codec.places():
                masks.topk_mask(bucket.rows[:, columns], part.k, codec.words[:, words])
            masks.gather_keep(bucket.rows, None, codec.words, codec.sent, acc)  # l. 2
        exchange.union(codec.index.copy_(codec.words))  # l. 3-4
        self._round(codec, exchange)
        codec.seeds = {s.name: seed_of(self._seed, s.name, bucket.step) for s in bucket.segments}
        codec.estimate = self.leftovers == "median"
        codec.left.zero_()
        exchange.mean(bucket, codec)  # l. 5-8
        with ledger.span("decode", bucket.rows):
            back = codec.left if self.leftovers == "accumulate" else torch.zeros_like(codec.left)
            sketch.settle(codec.sent, codec.rest, codec.words, back, acc)
            self._measure(bucket, codec)

    def _round(self, codec: CountSketch, exchange: Exchange) -> None:
        """Kept values become multiples of a power of two that all ranks share, coarse enough for exact sums."""
        places = codec.places()
        largest = torch.stack([codec.sent[:, kept].abs().amax() for _, _, _, kept, _ in places])
        _, exponent = torch.frexp(exchange.all_max(largest))
        spare = CELL_BITS - math.ceil(math.log2(exchange.rows))
        quantum = torch.ldexp(torch.ones_like(largest), exponent - spare)
        for i, (part, _, _, kept, _) in enumerate(places):
            if part.cells:
                sketch.round_to(codec.sent[:, kept], quantum[i].view(1, 1), codec.rest[:, kept])

    def _measure(self, bucket: Bucket, codec: CountSketch) -> None:
        """Count what was left, and the union: now and then its peak decides how large the next sketches are."""
        assert self.state is not None
        for part, _, words, _, _ in codec.places():
            left = masks.popcount(codec.left[:, words]).sum()
            before = self.state.get("left", part.name)
            self.state.put("left", part.name, left if before is None else before + left)
            peak, seen = masks.popcount(codec.index[:, words]).amax(), self.state.get("peak", part.name)
            peak = peak if seen is None else torch.maximum(peak, seen)
            # early in a run the masks of the ranks still drift apart: after steps 0, 1, 2, 4, 8, ... as well
            due = bucket.step % self.resize == 0 or bucket.step & (bucket.step - 1) == 0
            if due:
                self.state.put("union", part.name, peak)
            self.state.put("peak", part.name, torch.zeros_like(peak) if due else peak)

    def _at_shared_mask(self, bucket: Bucket, exchange: Exchange, acc: Tensor) -> None:
        """One rank's mask for all: its bits, OR-ed with the zeros of the others, are the union."""
        codec = self._codecs.get(bucket.key)
        if not isinstance(codec, Masked):
            shape = (len(bucket.rows), bucket.shape[1] // masks.WORD)
            words = torch.zeros(shape, dtype=torch.int64, device=bucket.device)
            k = sum(self._k(segment.span) for segment in bucket.segments)
            codec = self._codecs[bucket.key] = Masked(words, k, owner_row=exchange.rank if exchange.owner else None)
        codec.words.zero_()
        with exchange._group().ledger.span("encode", bucket.rows):
            for segment in bucket.segments:
                if seed_of(self._seed, segment.name, bucket.step) % exchange.rows == exchange.rank:
                    words = codec.words[:, segment.start // masks.WORD : (segment.start + segment.width) // masks.WORD]
                    masks.topk_mask(bucket.columns(bucket.rows, segment), self._k(segment.span), words)
        exchange.union(codec.words)
        codec.residual = (torch.zeros_like(acc), acc)
        exchange.mean(bucket, codec)

    def sent_bytes(self, parameter: Parameter, exchange: Exchange) -> float:
        """With sketches of their present size: they follow the union."""
        rows = exchange.bucket_rows(True)
        columns = columns_of(parameter, exchange, rows)
        width = padded(columns, masks.WORD)
        if self.theta == 0:
            return exchange.sent_bytes(4 * width, 4 * width, rows, on_wire=True)
        index = exchange.union_bytes(rows * width / 8)
        if self.mask == "shared":
            return index + exchange.sent_bytes(4 * self._k(columns), 4 * width, rows, on_wire=True)
        part = self._part(parameter.name, 0, width, columns, exchange)
        return index + exchange.union_bytes(4) + exchange.sent_bytes(4 * part.sent, 4 * width, rows, on_wire=True)

    def facts(self) -> dict[str, float]:
        assert self.state is not None and self.run is not None
        if self.mask == "shared" or self.theta == 0:
            return {}
        found: dict[str, float] = {"left-overs so far": 0, "union, share of values": 0, "tensors sent dense": 0}
        values = 0
        for name, parameter in self.run.parameters.items():
            union, left = self.state.get("union", name), self.state.get("left", name)
            if union is None or left is None:
                continue
            rows = self.run.exchange.bucket_rows(True)
            columns = columns_of(parameter, self.run.exchange, rows)
            part = self._part(name, 0, padded(columns, masks.WORD), columns, self.run.exchange)
            found["left-overs so far"] += int(left)
            found["union, share of values"] += int(union)
            found["tensors sent dense"] += part.cells == 0
            values += columns
        found["union, share of values"] /= max(values, 1)
        return found

    @property
    def _seed(self) -> int:
        return 0 if self.run is None else self.run.seed

    def _k(self, columns: int) -> int:
        return max(columns - int(self.theta * columns), 1)

    def _part(self, name: str, start: int, width: int, span: int, exchange: Exchange) -> Part:
        """A parameter's sketch: for the union last measured, or for disjoint masks before any was."""
        assert self.state is not None
        k = self._k(span)
        measured = self.state.get("union", name)
        union = min(exchange.rows * k, span) if measured is None else int(measured)
        cells = math.ceil(union / self.load / 3) + 8  # a few more: small tables fail at lower loads
        if 3 * cells >= width:
            return Part(name, start, width, width, 0)
        return Part(name, start, width, k, cells)

    def _sketch(self, bucket: Bucket, exchange: Exchange) -> CountSketch:
        parts = tuple(self._part(s.name, s.start, s.width, s.span, exchange) for s in bucket.segments)
        codec = self._codecs.get(bucket.key)
        if not isinstance(codec, CountSketch) or codec.parts != parts:
            owner = exchange.rank if exchange.owner else None
            codec = CountSketch(parts, len(bucket.rows), bucket.shape[1], owner, bucket.device)
            self._codecs[bucket.key] = codec
        return codec


@dataclass
class Lhc(Tagc):
    """LHC on plain DDP: index and sketch of everything, without an accumulator: what is not sent is lost."""

    name: ClassVar[str] = "lhc"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    accumulate: bool = False
