"""Trickle: a few of the largest steps, in few bits, with error feedback behind the preconditioner (ours).

``parts/updates.py`` turns this rank's gradient into u_n, the step of Adam without momentum. Then

    h = u_n + e_n
    c = C[h];  e_n = h - c                  C: the k largest |h| of each tensor, as integers with a scale per group
    w = (1 - lr decay) w - mean_n c

Every rank chooses its own positions, which travel in about nine bits each: bytes grow with the number of ranks.

With ``mask="merged"`` rank j serves row j of a tensor's N rows (``parts/twoway.py``). Ranks send it their largest
values; it adds s, which waits there, to their mean, and sends the largest of the sum to all, more than one rank sent:

    c_n = C[h_n], row j to server j;  e_n = h_n - c_n
    y = mean_n c_n + s, on each server;  c = C'[y];  s = y - c
    w = (1 - lr decay) w - c, everywhere

On FSDP2 the owners of the weights are the servers. The step is zero off the mask of c, so that weights are gathered at
the mask, too (``weights``, ``parts/atmask.py``).

Matrices that the user's ``torch.optim.Muon`` holds take Muon's step of this rank's momentum for u_n
(``parts/muon.py``). Send three values of a hundred in 4 bits by way of servers then (``trickle:muon``), at one to two
times dense Muon's rate.

A share of what is sent is delivered, and the rest goes on waiting: at a density of 0.01 all is delivered, at 0.05 a
fourth, as many values delivered whole are mostly the last step's noise. Servers deliver all: take about 0.01 there.
Muon's steps are delivered whole, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base.knobs import refuse_idle
from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.intquant import Integers
from thinwire.codecs.sparse import Positions
from thinwire.core.bucket import Bucket, Shard
from thinwire.core.exchange import Exchange, scratch
from thinwire.core.method import Card, Density
from thinwire.core.run import Run, Step
from thinwire.core.weights import Message
from thinwire.methods.baselines.topk import TopK
from thinwire.methods.parts.atmask import BucketMasks, WeightsAtMask
from thinwire.methods.parts.feedback import UPDATES, Gradients, Updates
from thinwire.methods.parts.twoway import mean_both_ways, serve
from thinwire.ops import mask as masks

SERVER_DENSITY = 0.1
"""Share of the values that the servers of many ranks send."""


@dataclass
class Trickle(TopK):
    """Each rank sends the largest 1% of its Adam steps, 18 bits a value; the others wait (error feedback).

    Args:
        mask: "own": each rank sends its largest values and their positions to all; bytes grow with the number of ranks.
            "merged": each rank sends them to the rank that sums their row (its server), and servers send the largest
            of the mean to all; bytes do not grow.
        server_density: with mask="merged", the share of each tensor's values that servers send to all (with sharded
            weights: that their owners change). Higher => more bytes, and less waits at the servers. None: 0.1, or N
            times density where that is less; N ranks choose no more values (but of rows shorter than 1 / density, of
            which each chooses one), so that only rounding errors wait then.
        bits: bits per value, 8 or 4. Fewer => fewer bytes, and a larger share of what is sent waits.
        group: values that share a scale, a power of two from 8 to 4096 (larger => fewer bytes, more error).
        feedback: what is sent, and what waits: "updates" (the steps that Adam would take) or "gradients" (as in top-k's
            paper).
        weights: with mask="merged" and feedback="updates", which values of sharded weights FSDP2 gathers: "masked",
            only those that may have changed (each rank keeps a float32 copy of all weights), or "dense", all; the
            weights are the same bit for bit. "auto": "masked" if FSDP2 gathers float32; "dense" if
            MixedPrecisionPolicy(param_dtype=) makes it gather fewer bits: such a copy cannot be kept up to date.
    """

    name: ClassVar[str] = "trickle"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "d0.003": {"density": 0.003},
        "muon": {"density": 0.03, "mask": "merged", "bits": 4},
        "merged": {"mask": "merged", "bits": 4},
    }

    mask: Literal["own", "merged"] = "own"
    server_density: Density | None = None
    bits: Literal[4, 8] = 8
    group: int = 64
    feedback: Gradients | Updates = field(default=UPDATES, kw_only=True)
    weights: Literal["auto", "masked", "dense"] = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        self._encodes_weights, self._why_whole = False, ""
        super().__post_init__()
        if self.mask == "own":
            refuse_idle(self, "mask='own'", "server_density", "weights")
        if self.updates is None:
            refuse_idle(self, "feedback='gradients' (the optimizer moves all weights)", "weights")

    def make_codec(self) -> Codec | None:
        return Integers(self.group, self.bits)

    def describe(self) -> Card:
        by_own_masks, promise, instead = self.mask == "own", self.conserves, ""
        if self.mask == "merged":
            promise = replace(promise, waits={"residual": 1.0, "server": 1.0})
        if by_own_masks:  # merged by servers it has no ``delivered_share``
            feedback = self.feedback if self.updates is None else replace(self.updates, delivered_share=None)
            instead = str(replace(self, mask="merged", feedback=feedback))
        return replace(
            super().describe(), promise=promise, group=masks.WORD, summed_by_network=by_own_masks,
            grows_with_ranks=by_own_masks, instead_at_scale=instead,
            encodes_weights=self._encodes_weights, why_whole=self._why_whole,
        )  # fmt: skip

    @property
    def at_one_mask(self) -> bool:
        """Do all ranks share one mask of the step, and does it leave values out?"""
        return self.mask == "merged" and self.server_density != 1

    def begin(self, run: Run) -> None:
        masked = self.at_one_mask and self.updates is not None
        self._gathered = WeightsAtMask(self.name, self.weights if masked else "dense", run)
        self._encodes_weights, self._why_whole = self._gathered.encoded, self._gathered.why_whole
        super().begin(run)

    def weight_message(self, shard: Shard, rank: int) -> Message:
        return self._gathered.message(shard, rank)

    def before_step(self, step: Step) -> None:
        self._gathered.before_step(step, () if self.update_space is None else self.update_space.names)
        super().before_step(step)

    def state_changed(self) -> None:
        self._gathered.state_changed()

    def _exchange(self, bucket: Bucket, exchange: Exchange, send: Callable[[Bucket, Exchange], None]) -> None:
        self._gathered.note(bucket, None)  # unless it comes to a mask
        super()._exchange(bucket, exchange, send)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        if self.mask == "merged":
            self._merge(bucket, exchange)
            return
        super().compress(bucket, exchange)

    def density_of_servers(self, ranks: int) -> float:
        """Return the share of values that servers of N = ``ranks`` ranks send: ``server_density``, or its default."""
        if self.server_density is None:
            return min(SERVER_DENSITY, ranks * self.density)
        return self.server_density

    def _merge(self, bucket: Bucket, exchange: Exchange) -> None:
        codec = self.largest(bucket, self.density)
        server_codec = self.largest(bucket, self.density_of_servers(exchange.ranks))
        if not exchange.owner:
            mean_both_ways(bucket, exchange, codec, self.state, server_codec=server_codec)
            return
        served = serve(bucket, exchange, codec, self.state)  # in bucket.mean
        old, new = self.state.read("server", bucket, rows=1), self.state.write("server", bucket, rows=1)
        waits = Residual(old, new, None, bucket.guess("server", 1))
        layout = bucket.once("moved", lambda: Positions(server_codec.segments), server_codec)
        packed = bucket.scratch("chosen", (1, layout.nbytes), torch.uint8) if self.card.encodes_weights else None
        with exchange.span("encode", served):
            layout.split(served, waits, scratch(bucket), packed)
        if packed is not None:
            self._gather_masks(bucket, exchange, layout, packed)

    def _gather_masks(self, bucket: Bucket, exchange: Exchange, layout: Positions, packed: Tensor) -> None:
        """Send all ranks the ``packed`` positions (1, nbytes) that this owner moves: they gather weights at them."""
        wires = bucket.scratch("positions", (exchange.ranks, layout.nbytes), torch.uint8)
        exchange.gather(wires, packed[0])
        with exchange.span("decode", bucket.mean):
            rows, n = bucket.shape
            words = bucket.buffer("words", (rows, n // masks.WORD), torch.int64)  # until weights were gathered at them
            layout.read(wires, words, scratch(bucket))
            names = tuple(segment.name for segment in bucket.segments)
            counts = tuple(k for _, k in layout.segments)
            self._gathered.note(bucket, BucketMasks(names, counts, words, masks.directory(words)))
