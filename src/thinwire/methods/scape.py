"""SCAPE: sparse first moments of AdamS (arXiv 2607.01678).

Alg. 1, for each tensor, on rank n, with last step's mask M (all ones at first):

    m~_n = b1 m + (1-b1) g_n + e_n                                              (l. 10)
    e_n  = m~_n off M, 0 on M                                                   (l. 11-12)
    b    = mean over n of m~_n on M: values only, no positions travel           (l. 13-14)
    next M = top-k of |m~_n| at the next step's density, chosen by one owner    (l. 15)
    m' = b on M, 0 off M                                                        (l. 16)
    g^ = (b - b1 m)/(1-b1) on M, 0 off M; clip g^                               (l. 17-18)
    v = b2 m^2 + (1-b2) g^2;  u = m'/(sqrt(v) + eps);  w -= lr (u + decay w)    (l. 19-21: thinwire.AdamS)

Where ours differs in form, not in result. m is the same on all ranks and need not travel: (1-b1) g_n + e_n is sent (up
to the rounding of m~, which l. 10 has too), and b is b1 m + the mean of that. Where weights are sharded (FSDP2), m
lives with the owner of the row alone. What falls off its mask cannot join everybody's e_n there: the owner keeps it
apart (x, "common"), and b is b1 m + x + the mean. The paper's Alg. 2 and its authors' code disagree at this point, and
the code drops the other ranks' gradients. The owner of a tensor's mask is a rank (DDP, HSDP) or the owner of the row
(FSDP2).

Sharded weights need not be gathered whole: off the mask m' is 0 and w only decays, which every rank can do to what it
gathered last. The owner sends w at the mask, whose positions all ranks know (Alg. 2, l. 6-7). That every rank took the
whole step instead would need b on all of them, which is as many bytes, and m on all of them, which is memory.

Masks are gathered while the next forward and backward pass run, as bits or, below a density of 1/32, as positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.bucket import Bucket, Piece, Segment, Shard, padded
from thinwire.codecs.base import Residual
from thinwire.codecs.intquant import Integers
from thinwire.codecs.mask import Masked, MaskedIntegers
from thinwire.collectives import Exchange
from thinwire.comm import Work, local
from thinwire.errors import ThinwireError
from thinwire.methods.base import (
    EXACT,
    SMALL,
    Method,
    Parameter,
    Promise,
    Rounding,
    Run,
    Step,
    check_density,
    check_smallest,
    check_start,
    columns_of,
    exempt_small,
    first_step,
    refuse_chunks,
)
from thinwire.ops import mask as masks
from thinwire.ops import moments
from thinwire.optim import AdamS
from thinwire.weights import Message

WORD = masks.WORD
LISTED = 1 / 32
"""Density below which positions (4 bytes each) are fewer bytes than mask bits."""


@dataclass
class SCAPE(Method):
    """First moments at a mask of the last step's largest, for AdamS; the rest waits in a residual (arXiv 2607.01678).

    The optimizer must be ``thinwire.AdamS``. Recommended betas: (0.9, 0.95); see AdamS for why not 0.999.

    Args:
        density: share of each tensor's values that is sent once warm (the paper's rho). Lower => fewer bytes, more of
            the moment waits. 1: dense AdamS, exactly.
        warmup: the density falls geometrically from 1 to ``density`` over this share of the run (below 1) or number of
            steps. Longer => more bytes, steadier start. The first step is always dense.
        refresh: steps for which a mask is used once warm (the paper: 1). Higher => fewer mask bytes, staler masks.
        clip: what clipping the gradient does to the moment. "paper": nothing, v alone sees the clipped gradient;
            "return": the moment too, and what was clipped off goes back to what waits.
        weights: what is gathered of weights that FSDP2 shards: "masked", the values at the mask (a copy of all weights
            stays in memory, float32), or "dense".
        payload: dtype of the values: "fp32", "bf16" (half the bytes, 8 significant bits; the rounding is lost), or
            "int8" and "int4" in groups of 64 (what quantization leaves out joins what waits; sent to everybody, so
            that on DDP and HSDP the bytes grow with the number of ranks). On FSDP2 moments that fell off the mask
            come back without rounding, on DDP and HSDP they come back by the wire.
        offload: keep what waits on each rank (8 bytes per value) in CPU memory, with two staging buffers of the largest
            bucket on the device: less device memory, one copy each way over PCIe per step.
        smallest: elements below which a tensor stays dense (higher => fewer tensors compressed).
    """

    name: ClassVar[str] = "scape"
    adds_up: ClassVar[bool] = False
    OPTIMIZER: ClassVar[Callable[..., torch.optim.Optimizer]] = AdamS
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"density": 0.01, "smallest": 0},
        "paper-d0.1": {"density": 0.1, "smallest": 0},
    }

    density: float = 0.01
    warmup: float = 0.1
    refresh: int = 1
    clip: str = "paper"
    payload: str = "fp32"
    weights: str = "masked"
    offload: bool = False
    smallest: int = SMALL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density("scape", self.density)
        check_smallest("scape", self.smallest)
        check_start("scape", "warmup", self.warmup)
        if self.refresh < 1:
            raise ThinwireError(f"scape: refresh is a number of steps, 1 or more, got {self.refresh}")
        if self.clip not in ("paper", "return"):
            raise ThinwireError(f"scape: clip is 'paper' or 'return', got '{self.clip}'")
        if self.payload not in ("fp32", "bf16", "int8", "int4"):
            raise ThinwireError(f"scape: payload is fp32, bf16, int8 or int4, got '{self.payload}'")
        if self.weights not in ("masked", "dense"):
            raise ThinwireError(f"scape: weights is 'masked' or 'dense', got '{self.weights}'")
        # Of a parameter's last exchange: step, masks (R, w) or None for all ones, values at each row's mask.
        self.used: dict[str, tuple[int, Tensor | None, int]] = {}
        self._chosen: dict[str, int] = {}  # the step for whose density a parameter's mask was chosen
        self.keep: dict[str, float] = {}  # what the last step left of a weight off the mask
        self._given: dict[str, Tensor] = {}  # what the moments become of the parameters exchanged in this step
        self._clipped: dict[object, tuple[Bucket, Tensor]] = {}  # this step's gradients, before they were clipped
        self._send: Tensor | None = None  # the masks that this rank has chosen for the next step
        self._work: Work | None = None  # everybody's, under way
        self._deciders: list[list[str]] = []

    @property
    def granule(self) -> int:
        return 1 if self.native else WORD  # no padding in what goes out as it is

    @property
    def promise(self) -> Promise:
        if self.density == 1:
            return EXACT
        waits = {"residual": 1.0, "common": 1.0}
        if self.payload != "bf16":
            return Promise("conserves", waits=waits, of="moments")
        what = "what bfloat16 cannot hold of the moments is not returned: payload='int8' returns it"
        return Promise("rounds", what, waits, "moments", Rounding("bfloat16", value=2.0**-8))

    @property
    def native(self) -> bool:
        return self.density == 1

    @property
    def keeps_state(self) -> bool:
        return self.density < 1

    @property
    def steady(self) -> int:
        return max(self.warm, 1)

    def policy(self, parameter: Parameter) -> str | None:
        return exempt_small(parameter, self.smallest)

    def begin(self, run: Run) -> None:
        super().begin(run)
        refuse_chunks(self.name, run)
        sent = {name: held for name, held in run.held.items() if self.keep_dense(run.parameters[name]) is None}
        for name, (optimizer, _) in sent.items():
            if not isinstance(optimizer, AdamS):
                raise ThinwireError(
                    f"scape is built on AdamS: pass thinwire.AdamS as the optimizer of {name}, got "
                    f"{type(optimizer).__name__}, or name it in dense="
                )
        betas = {group["betas"][0] for _, group in sent.values()}
        if len(betas) > 1:
            raise ThinwireError(f"scape needs one beta1 for all parameter groups, got {sorted(betas)}")
        self.beta1 = betas.pop() if betas else 0.0
        self.warm = first_step(self.name, "warmup", self.warmup, run.steps)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        if self.density == 1:
            exchange.mean(bucket)
            return
        self.finish()
        codec = self._codec(bucket, exchange)
        with exchange.span("encode", bucket.rows):
            self._add_up(bucket, exchange)  # l. 10
            self._choose(bucket, exchange)  # l. 15: from what is there before it is sent
            if not exchange.owner:
                for segment, at, words in self._segments(bucket, self._words(bucket, exchange, codec)):
                    moments.take(bucket.rows[0, at], self._moment(segment), words, self.beta1)
        waits = self.state.write("residual", bucket)
        exchange.mean(bucket, codec, residual=Residual(None, waits))  # l. 11-14
        self.state.put_back("residual", bucket)
        with exchange.span("decode", bucket.rows):
            self._settle(bucket, exchange, codec)  # l. 16-17

    def before_step(self, step: Step) -> None:
        """Hand the optimizer its moments (l. 16); with clip="return" as clipped, the rest to what waits."""
        if self.clip == "return" and step.clip_factor is not None:
            cut = (1 - step.clip_factor) * (1 - self.beta1)
            kind, rows = self._held
            for bucket, gradient in self._clipped.values():
                if bucket.step != step.number:  # DDP has made other buckets since
                    continue
                waiting = self.state.write(kind, bucket, rows)
                waiting.copy_(self.state.read(kind, bucket, rows)).addcmul_(gradient, cut)
                self.state.put_back(kind, bucket)
                for segment in bucket.segments:
                    given = self._given[segment.name]
                    given.addcmul_(gradient[0, segment.start : segment.start + given.numel()], cut, value=-1)
        for name, given in self._given.items():
            optimizer = step.held[name].optimizer
            assert isinstance(optimizer, AdamS)
            optimizer.given[step.weights[name]] = given
        for name, weight in step.weights.items():
            if weight.grad is None:  # it is not stepped, and does not decay either
                self.used.pop(name, None)
        self.keep = {
            name: 1 - float(group["lr"]) * group["weight_decay"] for name, (_, group) in step.held.items()
        }

    def after_step(self, step: Step) -> None:
        """Start the gathering of the next step's masks, of the parameters that took part in this one."""
        exchanged = set(self._given)
        self.undo()
        if self.density == 1 or not exchanged or not self._refreshes(step.number + 1):
            return
        assert self._send is not None
        self.finish()
        layout, width = self._layout(step.number + 1)
        exchange = self.run.exchange
        everybody = torch.empty((len(self._deciders), width), dtype=torch.uint8, device=self._send.device)
        self._work = exchange.gather(everybody, self._send[:width], async_op=True)
        rows = exchange.bucket_rows(True)
        for name, (decider, place, size) in layout.items():
            if name in exchanged:
                deciders = everybody if rows > 1 else everybody[decider : decider + 1]
                self._take_mask(name, deciders[:, place : place + size], step.number + 1)
            elif (kept := self.state.get("mask", name)) is not None and _is_part(kept):
                self.state.put("mask", name, kept.clone())  # the gathered masks of that step can then be freed

    def undo(self) -> None:
        self._given.clear()
        self._clipped.clear()

    def _take_mask(self, name: str, mask: Tensor, step: int) -> None:
        """``mask`` (R, bytes), still under way, is ``name``'s from ``step`` on, for as long as no other is chosen."""
        self.state.put("mask", name, mask)
        self.state.put("chosen", name, torch.tensor(step))
        self._chosen[name] = step

    def _chosen_for(self, name: str) -> int:
        """The step for whose density the mask of ``name`` was chosen: while unused, a parameter keeps its last mask."""
        if name not in self._chosen:
            saved = self.state.get("chosen", name)
            if saved is None:
                raise ThinwireError(f"scape: the saved state has a mask of {name}, but not when it was chosen")
            self._chosen[name] = int(saved)
        return self._chosen[name]

    def finish(self) -> None:
        """Wait for the masks that are under way."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    @property
    def offloads(self) -> tuple[str, ...]:
        return ("residual",) if self.offload else ()

    @property
    def encodes_weights(self) -> bool:
        """On HSDP a rank does not know the masks of the other shards of its node: there they are gathered whole."""
        return self.weights == "masked" and self.density < 1 and self.run.exchange.owner and self.run.hop == 1

    def state_changed(self) -> None:
        self._chosen.clear()
        self.used.clear()

    def weight_message(self, shard: Shard, rank: int) -> Message:
        if shard.dtype != torch.float32:
            raise ThinwireError(
                f"scape keeps gathered weights up to date in float32, and FSDP2 gathers them in {shard.dtype}: "
                "leave param_dtype out of MixedPrecisionPolicy, or use weights='dense'"
            )
        return _AtMask(self, shard.pieces, rank)

    @property
    def cycle(self) -> Mapping[int, float]:
        # Masks are sent at the end of the step before the one that they are for.
        rest = {self.steady: 1 - 1 / self.refresh} if self.refresh > 1 else {}
        return {**rest, self.steady + self.refresh - 1: 1 / self.refresh}

    def facts(self) -> dict[str, float]:
        return {"density": self.density_at(self._step)} if self.density < 1 else {}

    _step = 0

    def density_at(self, step: int) -> float:
        """Share of values sent in ``step``: 1 at first, then geometrically to ``density`` at the end of the warm-up."""
        if step == 0:
            return 1.0
        return self.density if step >= self.warm else float(self.density ** (step / self.warm))

    def _k(self, columns: int, step: int) -> int:
        return max(int(self.density_at(step) * columns), 1)

    def _refreshes(self, step: int) -> bool:
        """Is ``step`` the first with a new mask?"""
        return step <= max(self.warm, 1) or (step - max(self.warm, 1)) % self.refresh == 0

    def _mask_bytes(self, columns: int, step: int) -> int:
        """Bytes of one row's mask, a multiple of 8."""
        if self.density_at(step) < LISTED:
            return padded(4 * self._k(columns, step), 8)
        return padded(columns, WORD) // 8

    def _layout(self, step: int) -> tuple[dict[str, tuple[int, int, int]], int]:
        """For the masks of ``step``: parameter -> (rank that chooses, first byte, bytes) of its message; its length."""
        exchange = self.run.exchange
        rows = exchange.bucket_rows(True)
        sent = {name: p for name, p in self.run.parameters.items() if self.keep_dense(p) is None}
        sizes = {name: self._mask_bytes(columns_of(p, exchange, rows), step) for name, p in sent.items()}
        if not self._deciders:
            self._deciders = [[] for _ in range(exchange.rows)]
            # The largest first, each to the rank with the least so far: equal on all ranks.
            load = [0] * len(self._deciders)
            for name in sorted(sent, key=lambda name: (-sent[name].local, name)):
                rank = 0 if rows > 1 else load.index(min(load))
                self._deciders[rank].append(name)
                load[rank] += sent[name].local
        layout, width = {}, 0
        for rank, names in enumerate(self._deciders):
            place = 0
            for name in names:
                layout[name] = (rank, place, sizes[name])
                place += sizes[name]
            width = max(width, place)
        return layout, width

    @property
    def _held(self) -> tuple[str, int | None]:
        """What all ranks have in common waits in this state of so many rows: in every rank's residual, or apart."""
        return ("common", 1) if self.run.exchange.owner else ("residual", None)

    def _segments(self, bucket: Bucket, words: Tensor) -> Iterator[tuple[Segment, slice, Tensor]]:
        """Each parameter's segment, its columns, and its part of ``words`` (n / 64,)."""
        for segment in bucket.segments:
            yield segment, segment.columns, words[segment.groups(WORD)]

    def _words(self, bucket: Bucket, exchange: Exchange, codec: Masked | MaskedIntegers | None) -> Tensor:
        """This step's mask of what this rank gets of the mean, (n / 64,)."""
        if codec is None:
            return torch.full((bucket.shape[1] // WORD,), -1, dtype=torch.int64, device=bucket.device)
        return codec.words[exchange.rank if exchange.owner else 0]

    def _add_up(self, bucket: Bucket, exchange: Exchange) -> None:
        """``bucket.rows`` = m~; on FSDP2 without b1 m, which only the row's owner has."""
        residual = self.state.read("residual", bucket)
        if exchange.owner:
            rows = bucket.rows.view(-1)
            moments.add_up(rows, residual.view(-1), rows[:0], self.beta1)
            return
        for segment in bucket.segments:
            at = segment.columns
            moments.add_up(bucket.rows[0, at], residual[0, at], self._moment(segment), self.beta1)

    def _choose(self, bucket: Bucket, exchange: Exchange) -> None:
        """The masks of the next step, of the tensors (DDP) or rows (FSDP2) that are this rank's to choose."""
        following = bucket.step + 1
        self._step = bucket.step
        if not self._refreshes(following):
            return
        layout, width = self._layout(following)
        if self._send is None or len(self._send) < width:
            self._send = torch.zeros(width, dtype=torch.uint8, device=bucket.device)
        mine = exchange.rank if exchange.owner else 0
        listed = self.density_at(following) < LISTED
        common = self.state.read("common", bucket, rows=1) if exchange.owner else None
        for segment in bucket.segments:
            decider, place, size = layout[segment.name]
            if not exchange.owner and decider != exchange.rank:
                continue
            at = segment.columns
            values = bucket.rows[mine : mine + 1, at]
            if common is not None:
                scores = bucket.buffer("scores", (1, bucket.shape[1]), torch.float32)[:, : segment.width]
                values, moment = torch.add(values, common[:, at], out=scores), self._moment(segment)
                values[0, : moment.numel()].add_(moment, alpha=self.beta1)
            k = self._k(segment.span, following)
            target = self._send[place : place + size]
            words = bucket.buffer("words", (1, bucket.shape[1] // WORD), torch.int64)[:, : segment.width // WORD]
            words = words if listed else target.view(torch.int64).view(1, -1)
            masks.topk_mask(values, k, words)
            if listed:
                positions = target.view(torch.int32)
                masks.indices(words, positions[:k].view(1, -1))
                positions[k:].zero_()  # the padding travels and is saved

    def _quantizer(self) -> Integers | None:
        """Of the payload."""
        bits = {"int8": 8, "int4": 4}.get(self.payload)
        return None if bits is None else Integers(WORD, bits)

    def _codec(self, bucket: Bucket, exchange: Exchange) -> Masked | MaskedIntegers | None:
        """For the masks of the bucket's segments side by side; None while they are all ones."""
        found = [self.state.get("mask", segment.name) for segment in bucket.segments]
        if all(part is None for part in found):
            return None
        words = bucket.buffer("mask", (bucket.shape[0], bucket.shape[1] // WORD), torch.int64)
        counts = [self._count(segment) for segment in bucket.segments]
        for segment, part, count in zip(bucket.segments, found, counts, strict=True):
            at = words[:, segment.groups(WORD)]
            bucket.once(("mask", segment.name), partial(self._unfold, part, count, segment, at), part, count)
        owner, quantizer = exchange.rank if exchange.owner else None, self._quantizer()
        if quantizer is None:
            dtype = torch.float32 if self.payload == "fp32" else torch.bfloat16
            return Masked(words, sum(counts), owner_row=owner, dtype=dtype)
        widths = [segment.width // WORD for segment in bucket.segments]
        return MaskedIntegers(words, tuple(zip(widths, counts, strict=True)), quantizer, owner_row=owner)

    def _count(self, segment: Segment) -> int:
        """Values at the mask in one of the bucket's rows."""
        if self.state.get("mask", segment.name) is None:
            return segment.span
        return self._k(segment.span, self._chosen_for(segment.name))

    def _unfold(self, mask: Tensor | None, count: int, segment: Segment, words: Tensor) -> None:
        """``words`` (R, w) = the bits of ``mask`` as it was gathered; None: all of the parameter's values."""
        if mask is None:
            flags = torch.zeros((len(words), segment.width), dtype=torch.bool, device=words.device)
            flags[:, : segment.span] = True
            words.copy_(masks.pack(flags, torch.empty_like(words)))
        elif self.density_at(self._chosen_for(segment.name)) < LISTED:
            positions = mask.contiguous().view(torch.int32)[:, :count]
            words.copy_(masks.from_indices(positions, words.contiguous()))
        else:
            words.copy_(mask.contiguous().view(torch.int64))

    def _settle(self, bucket: Bucket, exchange: Exchange, codec: Masked | MaskedIntegers | None) -> None:
        given = bucket.buffer("given", (1, bucket.shape[1]), torch.float32)
        if exchange.owner:
            common, waits = self.state.read("common", bucket, rows=1), self.state.write("common", bucket, rows=1)
        for segment, at, words in self._segments(bucket, self._words(bucket, exchange, codec)):
            moment = self._moment(segment)
            masks_of_all = None if codec is None else codec.words[:, segment.groups(WORD)]
            self.used[segment.name] = bucket.step, masks_of_all, self._count(segment)
            if exchange.owner:
                moments.rejoin(bucket.mean[0, at], common[0, at], moment, words, self.beta1, waits[0, at])
            self._given[segment.name] = given[0, segment.start : segment.start + moment.numel()]
            moments.settle(bucket.mean[0, at], moment, words, self.beta1, self._given[segment.name])
        if self.clip == "return":
            kept = bucket.buffer("gradient", (1, bucket.shape[1]), torch.float32)
            self._clipped[bucket.key] = (bucket, kept.copy_(bucket.mean))

    def _moment(self, segment: Segment) -> Tensor:
        """m, this rank's part of it, (numel,) float32; zeros before the first step."""
        weight = self.run.weights[segment.name]
        found = self.run.held[segment.name].optimizer.state.get(weight, {}).get("exp_avg")
        if found is None:
            return torch.zeros(local(weight).numel(), device=local(weight).device)
        return local(found).reshape(-1).float()


class _AtMask(Message):
    """One module's weights at the mask, and all of what is dense or has no mask yet: float32 (Alg. 2, l. 6-7)."""

    exact = True

    def __init__(self, method: SCAPE, pieces: tuple[Piece, ...], rank: int) -> None:
        self._method, self._pieces, self._rank = method, pieces, rank
        self._parts: list[tuple[Piece, Tensor | None]] = []  # and its masks (R, w) in the last message
        self._sizes: list[int] = []  # values of each in a message

    def reaches(self, since: int, step: int) -> bool:
        used = (self._method.used.get(piece.name) for piece in self._pieces)
        return since == step - 1 and all(found is None or found[0] == since for found in used)

    def write(self, own: Tensor, held: Tensor | None, step: int) -> Tensor:
        self._parts, self._sizes = [], []
        for piece in self._pieces:
            _, words, count = self._method.used.get(piece.name, (step, None, piece.numel))
            self._parts.append((piece, words))
            self._sizes.append(piece.numel if words is None else count)
        message = own.new_empty(sum(self._sizes))
        for (piece, words), values in zip(self._parts, message.split(self._sizes), strict=True):
            if words is None:
                values.copy_(own[piece.columns])
            else:
                mine = words[self._rank : self._rank + 1]
                masks.gather_keep(_in_words(own[piece.columns].unsqueeze(0)), None, mine, values.unsqueeze(0), None)
        return message

    def read(self, peers: slice, messages: Tensor, rows: Tensor) -> None:
        """w at the mask as it was sent; off the mask m' is 0, and w = (1 - lr decay) w (l. 19-21)."""
        for (piece, words), values in zip(self._parts, messages.split(self._sizes, 1), strict=True):
            target = rows[:, piece.columns]
            if words is None:
                target.copy_(values)
                continue
            rest, payload = _in_words(target), torch.empty_like(values)
            masks.gather_keep(rest, None, words[peers], payload, rest)
            fresh = masks.scatter(payload.copy_(values), words[peers], torch.empty_like(rest))
            target.copy_(fresh.add_(rest, alpha=self._method.keep[piece.name])[:, : piece.numel])


def _in_words(values: Tensor) -> Tensor:
    """A copy of ``values`` (R, n) in rows of whole mask words, zeros behind."""
    rows = values.new_zeros((len(values), padded(values.shape[1], WORD)))
    rows[:, : values.shape[1]].copy_(values)
    return rows


def _is_part(tensor: Tensor) -> bool:
    """Does ``tensor`` keep more memory alive than its own?"""
    return tensor.untyped_storage().nbytes() > tensor.nbytes
