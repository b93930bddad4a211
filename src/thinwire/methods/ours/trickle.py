"""Trickle: a few of the largest steps, in few bits, with error feedback behind the preconditioner (ours).

``methods/update.py`` turns this rank's gradient into the step u_n that Adam without momentum would take along it. Then

    h = u_n + e_n
    c = C[h];  e_n = h - c                  C: the k largest |h| of each tensor, as integers with a scale per group
    w = (1 - lr decay) w - mean_n c

Every rank chooses positions of its own, which travel in about nine bits each: bytes grow with the number of ranks. Or
(``mask="shared"``) ranks share one mask, and only its values travel: of the N rows of a tensor each rank chooses a
quarter of the positions in four, others every step, by its own |h|. That is as much as all positions in one, whatever N
is. (One chooser for a row costs more of the loss: another rank's large values are not always where its own are.)

Or (``mask="merged"``) rank j is server j, of row j of the N rows of a tensor (``twoway.py``): ranks send it their own
largest, and of their mean and what waits with it, s, it sends the largest to all, some times as many as one rank has
sent:

    c_n = C[h_n], row j to server j;  e_n = h_n - c_n
    y = mean_n c_n + s, on each server;  c = C'[y];  s = y - c
    w = (1 - lr decay) w - c, everywhere

On FSDP2 servers are the owners of the weights, and weights are gathered at the mask of such a c, too (``weights``): off
it c is 0.

Of what is sent, a ``portion`` is delivered, and the rest goes on waiting: at a density of 0.01 all of it, at 0.05 a
fourth, with a shared mask a half. Delivered whole, what is sent of many values is mostly the last step's noise. Servers
deliver all of c: take a density of about 0.01 with them, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import must, refuse_idle
from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.intquant import Integers
from thinwire.codecs.mask import Masked, MaskedIntegers
from thinwire.codecs.sparse import TILE, Positions, TiledTopK, TopKIntegers
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange, scratch
from thinwire.core.method import Card, check_density, count_of
from thinwire.methods.parts.feedback import portion_of
from thinwire.methods.parts.shared import SharedMask, choosers_of
from thinwire.methods.parts.twoway import mean_both_ways, serve
from thinwire.ops import mask as masks

OF_MASKS = {"choosers": ("shared",), "answer": ("merged",), "weights": ("shared", "merged")}
"""Knobs that go with some masks only."""


@dataclass
class Trickle(SharedMask):
    """The largest steps of each rank, 18 bits for one value in a hundred, with feedback behind Adam's preconditioner.

    Args:
        density: share of each tensor's values that is sent (k = max(int(density * numel), 1)); lower => fewer bytes,
            longer waits. With weights sharded, of each shard's; with servers, of each row's.
        mask: "own": each rank its own largest values with their positions; bytes grow with the number of ranks.
            "shared": values at one mask for all, whose bytes do not grow; takes a larger density (0.05).
            "merged": each rank's own go to the server of their row, and the largest of the mean from there to all; the
            bytes do not grow either.
        answer: with mask="merged", the share of each tensor's values that servers send to all (owners of sharded
            weights: that they move); higher => more bytes, and less waits with them: what all ranks together choose,
            N density at most, leaves nothing but what is rounded off.
        choosers: with mask="shared", ranks that choose each part of it, a share of the positions each; more => what
            is large on any rank is sent sooner; with 16 ranks 8 lose less than 4 do, and servers less than either.
        bits: of a value: 8, 4, or with a shared mask 32 (the network's own sum of fp32). Fewer => fewer bytes, and a
            larger share of what is sent waits. 2, with masks of their own, is SparseLoCo's wire (arXiv 2508.15706): of
            every 4096 values k = int(density * 4096), down to a multiple of 4, as the means of four bins, with
            positions in 12 bits.
        group: values that share a scale, a power of two from 8 to 4096 (larger => fewer bytes, more error).
        feedback: "update", or "gradient": the same values of gradients, as top-k's.
    """

    name: ClassVar[str] = "trickle"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "d0.003": {"density": 0.003},
        "shared": {"density": 0.05, "mask": "shared"},
        "merged": {"mask": "merged", "bits": 4},
    }

    density: float = 0.01
    mask: Literal["own", "shared", "merged"] = "own"
    answer: float = 0.1
    choosers: int = 4
    bits: Literal[2, 4, 8, 32] = 8
    group: int = 64
    feedback: Literal["gradient", "update"] = field(default="update", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.name, self.density)
        must(self, self.choosers >= 1, "choosers", "is a number of ranks, 1 or more")
        check_density(self.name, self.answer, "answer")
        for knob, fits in OF_MASKS.items():
            if self.mask not in fits:
                refuse_idle(self, f"mask='{self.mask}'", knob)
        if self.bits in (2, 32):
            refuse_idle(self, f"bits={self.bits}", "group")
        if self.mask != "shared" and self.bits == 32:
            raise ThinwireError("trickle: bits=32 is for mask='shared'; topk(feedback='update') sends values so")
        if self.mask != "own" and self.bits == 2:
            most = "4, 8 or 32" if self.mask == "shared" else "4 or 8"
            raise ThinwireError(f"trickle: bits=2 is for mask='own': take {most} with mask='{self.mask}'")

    def make_codec(self) -> Codec | None:
        if self.bits == 2:
            if self.density * TILE < 4:
                raise ThinwireError(
                    f"trickle: bits=2 sends 4 of every {TILE} values at least: density is 4/{TILE} or more"
                )
            return TiledTopK(int(self.density * TILE) // 4 * 4)
        return None if self.bits == 32 else Integers(self.group, self.bits)

    def describe(self) -> Card:
        own, promise, instead = self.mask == "own", self.conserves, ""
        if self.mask == "merged":
            promise = replace(promise, waits={"residual": 1.0, "server": 1.0})
        if own:  # merged by servers it has no 2 bits and no ``portion``
            instead = str(replace(self, mask="merged", bits=max(self.bits, 4), portion=None))
        return replace(
            super().describe(), promise=promise, group=TILE if self.bits == 2 else masks.WORD, summed_by_network=own,
            grows_with_ranks=own, instead_at_scale=instead,
        )  # fmt: skip

    @property
    def at_one_mask(self) -> bool:
        return self.mask != "own" and (self.answer if self.mask == "merged" else self.density) < 1

    @property
    def usual_portion(self) -> float:
        return portion_of(self.density / (2 if self.mask == "shared" else 1))

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        if self.mask == "merged":
            self._merge(bucket, exchange)
            return
        residual = Residual(self.state.read("residual", bucket), self.state.write("residual", bucket))
        if self.bits == 2:
            exchange.mean(bucket, self.codec, residual=residual)
            bucket.clear_padding(residual.new)  # nobody reads it, and a level may stand where a zero was sent
            return
        if self.mask == "own":
            exchange.mean(bucket, self._largest(bucket, self.density), residual=residual)
            return
        bucket.rows.add_(residual.old)  # type: ignore[arg-type]
        codec = self._at_shared_mask(bucket, exchange)
        exchange.mean(bucket, codec, on_wire=codec.linear, residual=Residual(None, residual.new))

    @property
    def _quantizer(self) -> Integers:
        assert isinstance(self.codec, Integers)
        return self.codec

    def _largest(self, bucket: Bucket, density: float) -> TopKIntegers:
        counts = zip(bucket.segments, _counts(bucket, density), strict=True)
        return TopKIntegers(tuple((segment.start, segment.width, k) for segment, k in counts), self._quantizer)

    def _merge(self, bucket: Bucket, exchange: Exchange) -> None:
        own = self._largest(bucket, self.density)
        if not exchange.owner:
            mean_both_ways(bucket, exchange, own, self.state, answer=self._largest(bucket, self.answer))
            return
        served = serve(bucket, exchange, own, self.state)  # in bucket.mean
        served.add_(self.state.read("server", bucket, rows=1))
        counts = _counts(bucket, self.answer)
        positions = _positions(bucket, counts)
        with exchange.span("encode", served):
            found = positions.split(served, self.state.write("server", bucket, rows=1), scratch(bucket))
        if self._encodes_weights:
            wires = bucket.scratch("positions", (exchange.rows, positions.nbytes), torch.uint8)
            wire = bucket.scratch("chosen", (1, positions.nbytes), torch.uint8)
            with exchange.span("encode", served):
                positions.pack(found, wire)
            exchange.gather(wires, wire[0])
            with exchange.span("decode", served):
                self.settle(bucket, positions.read(wires, self.words_of(bucket), scratch(bucket)), counts, choosers=1)

    def _at_shared_mask(self, bucket: Bucket, exchange: Exchange) -> Masked | MaskedIntegers:
        """In step t rank r chooses its share of the positions of rows r + t, r + t + 1, ...; everybody gets all."""
        rows, space = bucket.shape[0], scratch(bucket)
        choosers = choosers_of(self.choosers, self.density, rows)
        counts = _counts(bucket, self.density)
        positions = _positions(bucket, [max(k // choosers, 1) for k in counts])
        wires = bucket.scratch("positions", (rows, choosers, positions.nbytes), torch.uint8)
        wire = bucket.scratch("chosen", wires.shape[1:], torch.uint8)
        with exchange.span("encode", bucket.rows):
            first = (exchange.rank + bucket.step) % rows
            positions.choose(bucket.rows[first : first + choosers], wire[: rows - first], space)
            if first + choosers > rows:
                positions.choose(bucket.rows[: first + choosers - rows], wire[rows - first :], space)
        exchange.gather(wires.view(rows, -1), wire.view(-1))
        with exchange.span("decode", bucket.rows):
            order = bucket.once("order", lambda: _order(rows, choosers).to(bucket.device), choosers)
            lists = wires.view(-1, positions.nbytes)[order[-bucket.step % rows :][:rows].flatten()]
            words = positions.read(lists, self.words_of(bucket), space)
            before = self.settle(bucket, words, counts, choosers)
        if self.bits == 32:
            return Masked(words, sum(counts), owner_row=exchange.rank, before=before)
        at = tuple((segment.width // masks.WORD, k) for segment, k in zip(bucket.segments, counts, strict=True))
        return MaskedIntegers(words, at, self._quantizer, owner_row=exchange.rank, before=before)


def _counts(bucket: Bucket, density: float) -> list[int]:
    """How many values of each of the bucket's segments are sent, in each row."""
    return [count_of(density, segment.span) for segment in bucket.segments]


def _positions(bucket: Bucket, counts: Sequence[int]) -> Positions:
    """Of so many values of each of the bucket's segments."""
    return Positions(tuple((segment.width, k) for segment, k in zip(bucket.segments, counts, strict=True)))


def _order(rows: int, choosers: int) -> Tensor:
    """(2 R, choosers): of all ranks' lists, one behind the other, those that choose row q in step t are q + (-t % R).

    Rank r's i-th list is of row r + t + i.
    """
    i = torch.arange(choosers)
    return (torch.arange(2 * rows).unsqueeze(1) - i) % rows * choosers + i
