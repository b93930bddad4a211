"""SCAPE: sparse first moments of AdamS (arXiv 2607.01678).

Alg. 1, for each tensor, on rank n, with last step's mask M (all ones at first, l. 5) and e_n (0 at first, l. 6):

    m~_n = b1 m + (1-b1) g_n + e_n                                              (l. 10)
    e_n  = m~_n off M, 0 on M                                                   (l. 11-12)
    b    = mean over n of m~_n on M: values only, no positions travel           (l. 13-14)
    next M = top-k of |m~_n| at the next step's density, chosen by one owner    (l. 15)
    m' = b on M, 0 off M                                                        (l. 16)
    g^ = (b - b1 m)/(1-b1) on M, 0 off M; clip g^                               (l. 17-18)
    v = b2 m^2 + (1-b2) g^2;  u = m'/(sqrt(v) + eps);  w -= lr (u + decay w)    (l. 19-21: thinwire.AdamS)

The clipping of l. 18 is ``wire.clip_grad_norm_``, or torch's. On the mask AdamS takes m' = b1 m + (1-b1) g^ of what is
left of g^ then, as the authors' code does: as printed, v alone would be clipped, and the smaller the clip the larger u.
Alg. 1 has no bias corrections; AdamS has them by default. l. 15 is before l. 13 here, as it reads this rank's values
alone.

Ours differs in form, not in result. m is the same on all ranks and need not travel: ranks send (1-b1) g_n + e_n (up to
the rounding of m~, which l. 10 has too), and b is b1 m + the mean of that. Where weights are sharded (FSDP2), only the
owner of the row has m. What falls off the mask of m cannot join every rank's e_n there: the owner keeps it apart (x,
"common"), and b is b1 m + x + the mean. The paper's Alg. 2 and its authors' code disagree here: the code drops the
other ranks' gradients. A rank (DDP, HSDP) or the owner of the row (FSDP2) owns a tensor's mask.

Sharded weights are not gathered whole: off the mask m' is 0 and w only decays, which every rank applies to its last
copy. The owner sends w at the mask, whose positions all ranks know (Alg. 2, l. 3-5). If each rank took the whole step
instead, as many bytes (b) would travel, and every rank would need m.

Masks are gathered while the next forward and backward passes run (Sec. IV-A; Alg. 2, l. 9 starts with the backward
pass): see :mod:`thinwire.methods.parts.masks`.

In runs from scratch that costs much of the loss: last step's masks miss what is large now, and AdamS moves a value that
returns by 0.45 lr, however much it has collected (docs/quality.md). ``trickle`` has this step's masks and Adam's scale
for each value, and keeps dense's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Steps
from thinwire.core.bucket import Bucket, Shard
from thinwire.core.card import ANEW, Card, StateKind
from thinwire.core.exchange import Exchange, Payload, prescale
from thinwire.core.method import SMALL, Density, Method, Smallest, Start, exempt_small
from thinwire.core.promise import EXACT, Promise
from thinwire.core.run import Holder, Parameter, Run, Step
from thinwire.core.selection import keep_dense
from thinwire.core.state import put_back
from thinwire.core.weights import Message
from thinwire.methods.parts.atmask import WeightsAtMask
from thinwire.methods.parts.masks import WORD, Masks, Schedule, all_ones
from thinwire.methods.parts.own_steps import beta1_of, refuse_chunks
from thinwire.network.comm import local
from thinwire.ops import moments
from thinwire.optim import AdamS


@dataclass
class SCAPE(Method):
    """AdamS's first moments, where the last step's were largest; the rest waits (arXiv 2607.01678, Alg. 1).

    The optimizer must be ``thinwire.AdamS``. Recommended betas: (0.9, 0.95); see AdamS for why not 0.999.

    Args:
        density: share of each tensor's values sent after the warm-up (the paper's rho). Lower => fewer bytes, and more
            of the moment waits. 1: dense AdamS, exactly.
        warmup: length of the warm-up, in which the density falls geometrically from 1: below 1 a share of the run, else
            a number of steps. Longer => more bytes, steadier start. The first step is always dense.
        refresh: steps for which a mask is used after the warm-up (the paper: 1). Higher => fewer bytes, staler masks.
        weights: which values of sharded weights FSDP2 gathers: "masked", those at the mask (each rank keeps a float32
            copy of all weights), or "dense", all. "auto": "masked" if FSDP2 gathers float32; "dense" if
            MixedPrecisionPolicy(param_dtype=) makes it gather fewer bits: such a copy cannot be kept up to date.
        offload: keep what waits on each rank in CPU memory (8 bytes per value; with a GPU up to 16, because torch pins
            powers of two). The device then has two staging buffers of the largest bucket: less device memory, one copy
            each way over PCIe per step.
        smallest: tensors of fewer elements stay dense (higher => fewer tensors compressed).
    """

    name: ClassVar[str] = "scape"
    OPTIMIZER: ClassVar[Callable[..., torch.optim.Optimizer]] = AdamS
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"density": 0.01, "smallest": 0},
        "paper-d0.1": {"density": 0.1, "smallest": 0},
    }

    density: Density = 0.01
    warmup: Start = 0.1
    refresh: Steps = 1
    weights: Literal["auto", "masked", "dense"] = "auto"
    offload: bool = False
    smallest: Smallest = SMALL

    def __post_init__(self) -> None:
        super().__post_init__()
        self._next_moments: dict[str, Tensor] = {}  # m' of the parameters exchanged in this step
        self._step = 0
        self._encodes_weights, self._why_whole = False, ""
        self._schedule = Schedule(self, self.density, self.refresh)

    def describe(self) -> Card:
        if self.density == 1:
            card = replace(super().describe(), promise=EXACT)
        else:
            promise = Promise("conserves", waits={"residual": 1.0, "common": 1.0}, of="moments")
            card = replace(super().describe(), promise=promise, group=WORD, native=False, keeps_state=True)
        # Masks are sent at the end of the step before their own.
        masked_steps = {0: 1 - 1 / self.refresh} if self.refresh > 1 else {}
        kinds = {
            "residual": StateKind(offloaded=self.offload), "chosen": ANEW,
            "mask": StateKind(resized="anew", rank_equal=True, fault=self._fault_of_masks),
        }  # fmt: skip
        return replace(
            card, adds_up=False, same_arithmetic=True, encodes_weights=self._encodes_weights, why_whole=self._why_whole,
            steady=self._schedule.steady, cycle={**masked_steps, self.refresh - 1: 1 / self.refresh},
            state_kinds={**card.state_kinds, **kinds},
        )  # fmt: skip

    def begin(self, run: Run) -> None:
        super().begin(run)
        refuse_chunks(self.name, run)
        self._gathered = WeightsAtMask(self.name, self.weights if self.density < 1 else "dense", run)
        sent = {name: holder for name, holder in run.holders.items() if keep_dense(self, run.parameters[name]) is None}
        for name, (optimizer, _) in sent.items():
            if not isinstance(optimizer, AdamS):
                raise ThinwireError(
                    f"scape is built on AdamS: pass thinwire.AdamS as the optimizer of {name}, got "
                    f"{type(optimizer).__name__}, or name it in dense="
                )
        self.beta1 = beta1_of(self.name, run, sent)
        self._masks = Masks(self, run.exchange, [run.parameters[name] for name in sent], self._schedule)
        self._encodes_weights, self._why_whole = self._gathered.encoded, self._gathered.why_whole

    def reduce(self, bucket: Bucket, exchange: Exchange, *, whole: bool = False) -> None:
        """Take a bucket through Alg. 1, l. 10-17 (``ops/moments/reference.py``). ``whole``: M is all ones (l. 5)."""
        if self.density == 1:
            exchange.mean(bucket)
            return
        self._step = bucket.step
        self.beta1 = beta1_of(self.name, self.run, (segment.name for segment in bucket.segments))
        self._masks.finish()
        chosen = None if whole else self._masks.used(bucket)
        if chosen is None:  # M is all ones (l. 5): what is sent is as long as the gradients, and takes their place
            mask, payload, b = all_ones(bucket), bucket.rows, bucket.mean
        else:  # M of l. 15 in an earlier step
            mask, payload = chosen, bucket.scratch("wire", (bucket.shape[0], chosen.k), torch.float32)
            b = bucket.scratch("row", (1, chosen.k), torch.float32) if exchange.owner else payload
        next_m = bucket.buffer("given", (1, bucket.shape[1]), torch.float32)
        x, next_x = None, None
        with exchange.span("encode", bucket.rows):
            m = self._first_moments(bucket)
            e, next_e = self.state.read("residual", bucket), self.state.write("residual", bucket)
            if exchange.owner:
                x, next_x = self.state.read("common", bucket, rows=1)[0], self.state.write("common", bucket, rows=1)[0]
            moments.add_up(
                bucket.rows, e, m, self.beta1, common=x, own_row=exchange.own_row,  # l. 10: m~_n = b1 m + (1-b1) g + e
                sent=moments.Sent(
                    mask.words, mask.bit_offsets, share=prescale(exchange),
                    residual_out=next_e,  # l. 11-12: e_n = m~_n off M, 0 on M
                    payload=payload,  # l. 13: m~_n on M, without b1 m
                ),
                choose=self._masks.refreshes(bucket.step + 1),  # l. 15: the scores |m~_n|
            )  # fmt: skip
        put_back(self.state, "residual", bucket)
        exchange.mean(Payload(payload, b, bucket), shared=True)  # l. 13-14: b = mean over n of m~_n on M
        # l. 15: the next M = top-k of the scores: ``after_step``, of all buckets at once. l. 18: clip_grad_norm_.
        # l. 19-21: AdamS.step.
        with exchange.span("decode", bucket.mean):
            words, bit_offsets = mask.of_rows(exchange.own_row)
            moments.advance(
                b[0], m, words, self.beta1, bit_offsets=bit_offsets, common=x,  # b += b1 m, and x
                next_moment=next_m[0],  # l. 16: m' = b on M, 0 off M
                gradient=bucket.mean[0],  # l. 17: g^ = (b - b1 m)/(1-b1) on M, 0 off M
                common_out=next_x,  # l. 11-12, for what is common: x = x + b1 m off M, 0 on M
            )  # fmt: skip
        for segment in bucket.segments:  # m', for ``before_step``
            numel = local(self.run.weights[segment.name]).numel()
            self._next_moments[segment.name] = next_m[0, segment.start : segment.start + numel]
        self._gathered.note(bucket, chosen)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        self.reduce(bucket, exchange, whole=True)

    def _first_moments(self, bucket: Bucket) -> moments.Moments:
        """Find m of all of the bucket's parameters, and the memory of the scores by which this rank chooses masks."""
        holders = self.run.holders
        first_moments = [self._first_moment(segment.name, holders) for segment in bucket.segments]

        def moment_segments() -> Iterator[moments.MomentSegment]:
            for segment, moment in zip(bucket.segments, first_moments, strict=True):
                for chunk, scores in self._masks.scores(segment, bucket.device):
                    yield moments.MomentSegment(segment.start + chunk.start, chunk.width, moment[chunk.columns], scores)

        addresses = (moment.data_ptr() for moment in first_moments)
        return bucket.once("moments", lambda: moments.Moments(tuple(moment_segments()), bucket.device), *addresses)

    def _first_moment(self, name: str, holders: Mapping[str, Holder]) -> Tensor:
        """Return this rank's part of m of ``name``, (numel,) float32; zeros before the first step."""
        weight = self.run.weights[name]
        exp_avg = holders[name].optimizer.state.get(weight, {}).get("exp_avg")
        if exp_avg is None:
            return torch.zeros(local(weight).numel(), dtype=torch.float32, device=local(weight).device)
        return local(exp_avg).reshape(-1).float()

    def before_step(self, step: Step) -> None:
        """Hand the optimizer m' (l. 16)."""
        for name in step.weights.keys() & self._next_moments.keys():
            optimizer = step.holders[name].optimizer
            assert isinstance(optimizer, AdamS)
            optimizer.next_moments[step.weights[name]] = self._next_moments[name]
        self._gathered.before_step(step, self._next_moments)

    def after_step(self, step: Step) -> None:
        """Choose the next M (l. 15) of the parameters that took part, and start to gather it (Sec. IV-A)."""
        exchanged = set(self._next_moments)
        self.undo()
        if self.density < 1:
            self._masks.gather(exchanged, step.number + 1)  # Alg. 2, l. 9

    def undo(self) -> None:
        self._next_moments.clear()

    def finish(self) -> None:
        self._masks.finish()

    def _fault_of_masks(self, saved: Mapping[str, Tensor]) -> str:
        return self._masks.fault_of(saved)

    def state_changed(self) -> None:
        self._masks.state_changed()
        self._gathered.state_changed()

    def weight_message(self, shard: Shard, rank: int) -> Message:
        return self._gathered.message(shard, rank)  # Alg. 2, l. 3-5

    def policy(self, parameter: Parameter) -> str | None:
        return exempt_small(parameter, self.smallest)

    def facts(self) -> dict[str, float]:
        return {"density": self._schedule.density_at(self._step)} if self.density < 1 else {}
