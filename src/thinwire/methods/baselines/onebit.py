"""1-bit Adam: signs of the momentum, once the variance is frozen (Tang et al., ICML 2021, arXiv 2102.02888).

Alg. 1, on worker n, for each tensor, after T_w steps of Adam, whose last variance v stays:

    m_n = b1 m + (1-b1) g_n                                                     (l. 6)
    send C[m_n + e_n], chunk j to server j;  e_n = m_n + e_n - C[m_n + e_n]     (l. 7-8)
    x = mean_n C[m_n + e_n] + s, on each server;  m' = C[x];  s = x - m'        (l. 9-10)
    everybody gets m' from all servers and goes on from it                      (l. 11-12)
    w -= lr m' / (sqrt(v) + eps)                                                (l. 13)

C keeps the sign of each value and one scale per group. Rank j is the server of row j of the bucket. ``twoway.py`` says
why the two errors are kept apart. With sharded weights (FSDP2), too, every worker needs all of m for l. 6, so m' goes
to everybody and is kept as signs: one bit per value.

Beyond the paper, ``warmup_bits`` quantizes the warm-up's gradients, with feedback: (1-b1) g_n goes through l. 7-11 with
Q for C, and Adam gets the mean divided by (1-b1). e_n and s thus have the momentum's unit from the first step on, and
what waits at the end of the warm-up is the first e_n and s of l. 7-9: nothing is lost. (On FSDP2 a warm-up's mean stays
with its owner as it is: there is no s.)

Where ours differs. The paper and its authors' code have no bias corrections; the user's Adam has. That of m goes on,
and that of v is frozen with v, as the step would otherwise change size at T_w. In the optimizer's state the count is
frozen, too, and ``exp_avg`` is m' times (1 - b1^frozen) / (1 - b1^count), so that Adam alone would go on from there
with steps of the same size. Each ``group`` has a scale, where theirs is per tensor and server. Weight decay is
AdamW's. Where v is 0, in rows of an embedding that no batch used, Adam's step has no size and a sign has no zero: such
weights do not move (the authors ask their user for a mask of them), and embeddings are dense unless ``send`` names them
(dense is the authors' ``non_freeze``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.codecs.base import Codec
from thinwire.codecs.grouped import GroupedBytes
from thinwire.codecs.intquant import Integers
from thinwire.codecs.sign import Sign
from thinwire.core.bucket import Bucket
from thinwire.core.card import ANEW, EQUAL, Card
from thinwire.core.exchange import Exchange
from thinwire.core.method import SMALL, Method, Smallest, Start, exempt_small, first_step
from thinwire.core.promise import Promise
from thinwire.core.run import Holder, Parameter, Run, Step
from thinwire.core.selection import keep_dense
from thinwire.methods.parts.own_steps import OwnSteps, beta1_of, refuse_chunks, require_adam
from thinwire.methods.parts.twoway import mean_both_ways
from thinwire.network.comm import local

TINY = torch.finfo(torch.float32).tiny
"""The least bias correction of v."""


@dataclass
class OneBitAdam(Method):
    """Signs of Adam's momentum after a dense warm-up: 1 + 32 / group bits per value each way (arXiv 2102.02888).

    The optimizer must be ``torch.optim.Adam`` without weight decay, or ``AdamW``. After the warm-up the method takes
    its steps on the compressed parameters: the engine's ``grad`` is then the new momentum. As the frozen v is of
    clipped gradients, no more is left of it than ``wire.clip_grad_norm_`` left of the last of these, and less where its
    own norm, which is smaller than theirs, asks for less; what is kept of it is whole. So is ``exp_avg``, in the unit
    of v; ``exp_avg_sq`` and ``step`` do not change. Dense parameters keep their Adam.

    Args:
        warmup: length of the warm-up with dense Adam: below 1 a share of the run, else a number of optimizer steps, at
            least one. After it Adam's variance is frozen. Higher => more bytes, and a better estimate of the variance:
            the paper takes 15-20% of the run. After very few steps some variances are near 0: such weights take steps
            many times too long (after 2, steps of up to 70 times the rate).
        warmup_bits: bits of a gradient value in the warm-up: 32 (fp32, more than dense sends where ``smallest`` admits
            tensors of fewer than N * group values, which are padded), 8 or 4 (in groups of up to 128, with error
            feedback); lower => fewer bytes, and a variance that also holds what rounding adds.
        group: values that share a scale, a power of two from 32 to 4096; larger => fewer bytes, more error.
        scale: a group's scale: "mean" of |x| (the smallest error) or "rms" (the authors' code: the norm is kept).
        smallest: tensors of fewer elements stay dense (higher => fewer tensors compressed).

    Raises:
        ThinwireError: no Adam; amsgrad, maximize or coupled weight decay; more than one beta1; no warm-up.
    """

    name: ClassVar[str] = "onebit-adam"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"warmup": 0.15, "scale": "rms", "group": 4096, "smallest": 0, "send": ("*",)},
    }

    warmup: Start = 0.15
    group: int = 2048
    scale: Literal["mean", "rms"] = "mean"
    warmup_bits: Literal[4, 8, 32] = 32
    smallest: Smallest = SMALL

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps = OwnSteps(self.name)  # of parameters whose ``grad`` is a momentum in this step

    def make_codec(self) -> Codec:
        return Sign(self.group, self.scale)

    def describe(self) -> Card:
        card = super().describe()
        return replace(
            card, promise=Promise("conserves", waits={"residual": 1.0, "server": 1.0}, of="moments"),
            group=math.lcm(card.group, 1 if self.warmup_bits == 32 else self._warmup_codec.group),
            summed_by_network=False, keeps_state=True, adds_up=False, steady=self.first,
            cycle={1: 1.0},  # the very first also sends Adam's own moment, where that is sharded
            state_kinds={**card.state_kinds, "counted": EQUAL, "moment": ANEW, "clip": EQUAL},
        )  # fmt: skip

    @property
    def first(self) -> int:
        """T_w, 1 or more where the warm-up is a share of the run."""
        return max(first_step(self, "warmup"), int(self.warmup > 0))

    @property
    def _warmup_codec(self) -> Integers:
        return Integers(min(self.group, 128), self.warmup_bits)

    def policy(self, parameter: Parameter) -> str | None:
        if parameter.role == "embedding":
            return "embedding: unused rows have no variance"
        return exempt_small(parameter, self.smallest)

    def begin(self, run: Run) -> None:
        super().begin(run)
        refuse_chunks(self.name, run)
        if self.first < 1:
            raise ThinwireError(f"{self.name}: warmup=0 leaves no variance to freeze: warm up for 1 step or more")
        sent = [name for name, parameter in run.parameters.items() if keep_dense(self, parameter) is None]
        require_adam(self.name, run, sent)
        self.beta1 = beta1_of(self.name, run, sent)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        self.beta1 = beta1_of(self.name, self.run, (segment.name for segment in bucket.segments))
        if bucket.step < self.first:
            self._warm_up(bucket, exchange)
            return
        assert isinstance(self.codec, GroupedBytes)
        bucket.rows.mul_(1 - self.beta1).add_(self._moment(bucket, exchange), alpha=self.beta1)  # l. 6
        wires = mean_both_ways(bucket, exchange, self.codec, self.state)  # l. 7-11
        assert wires is not None
        for segment in bucket.segments:  # m, for the next l. 6
            self.state.put("moment", segment.name, self.codec.part(wires, bucket.shape[1], segment.columns))
            self._steps.names.add(segment.name)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        """Set m' to mean_n (m_n + e_n) + s. It has more than signs, so the next l. 6 reads m from the optimizer."""
        self.beta1 = beta1_of(self.name, self.run, (segment.name for segment in bucket.segments))
        warm = bucket.step < self.first
        if warm and self.warmup_bits == 32:
            exchange.mean(bucket)
            return
        bucket.rows.mul_(1 - self.beta1)
        if not warm:
            bucket.rows.add_(self._moment(bucket, exchange), alpha=self.beta1)
        super().deliver(bucket, exchange)
        if warm:
            bucket.mean.div_(1 - self.beta1)
            return
        for segment in bucket.segments:
            self.state.put("moment", segment.name, None)
            self._steps.names.add(segment.name)

    def before_step(self, step: Step) -> None:
        """Step the parameters whose momentum has arrived (l. 13), with Adam's arithmetic, in Adam's state."""
        alike: dict[object, list[tuple[str, Tensor, Tensor, Holder]]] = {}

        def collect(name: str, weight: Tensor, held: Holder) -> None:
            moments = held.optimizer.state.get(weight, {})
            if "exp_avg_sq" not in moments:
                raise ThinwireError(
                    f"{self.name}: the optimizer has no moments of {name}: it had no gradient in the warm-up (name it "
                    "in dense=), or optimizer.state was emptied since (wire.close() and compress() begin a new warm-up)"
                )
            # Of float32 all together, and else each alone, as its denominator takes memory.
            alone = None if moments["exp_avg"].dtype == torch.float32 else name
            gradient = local(weight.grad)  # type: ignore[arg-type]
            alike.setdefault((id(held.group), moments["step"].device, alone), []).append((name, weight, gradient, held))

        clip = self.state.get("clip", "")
        scale: Tensor | float = 1.0 if clip is None else clip
        if step.clip_factor is not None:  # it is in weight.grad
            scale = scale / step.clip_factor.clamp(min=TINY)
        self._steps.take(step, self.run, collect)
        for members in alike.values():
            names, weights, gradients, (held, *_) = zip(*members, strict=True)
            adams = [held.optimizer.state[weight] for weight in weights]
            averages, variances = ([local(adam[key]) for adam in adams] for key in ("exp_avg", "exp_avg_sq"))
            frozen = [adam["step"].detach() for adam in adams]
            known = (self.state.get("counted", name) for name in names)
            counted = torch._foreach_add([a if b is None else b for a, b in zip(frozen, known, strict=True)], 1)
            for name, count in zip(names, counted, strict=True):
                self.state.put("counted", name, count)
            shards = [local(weight.detach()) for weight in weights]
            _frozen_steps(shards, gradients, averages, variances, counted, frozen, held.group, scale)

    def after_step(self, step: Step) -> None:
        """In the warm-up, note what is left of clipped gradients: the mean over as many steps as m has."""
        self._steps.names.clear()
        if (factor := step.clip_factor) is None:
            return
        clip = self.state.get("clip", "")
        if step.number < self.first:
            self.state.put("clip", "", factor if clip is None else torch.lerp(factor, clip, self.beta1))
        elif clip is None:
            self.state.put("clip", "", torch.ones_like(factor))

    def undo(self) -> None:
        self._steps.names.clear()

    def _warm_up(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradient, dense or in few bits; what these leave out waits in the momentum's unit."""
        if self.warmup_bits == 32:
            exchange.mean(bucket)
            return
        bucket.rows.mul_(1 - self.beta1)
        mean_both_ways(bucket, exchange, self._warmup_codec, self.state, back=not exchange.owner)
        bucket.mean.div_(1 - self.beta1)

    def _moment(self, bucket: Bucket, exchange: Exchange) -> Tensor:
        """Return all of m, (R, n), as last received; at first the optimizer's own."""
        assert self.codec is not None
        moments = bucket.scratch("moment", bucket.shape, torch.float32)
        wires = {segment.name: self.state.get("moment", segment.name) for segment in bucket.segments}
        if any(wire is None for wire in wires.values()):
            self._adam_moment(bucket, exchange, moments)
        for segment in bucket.segments:
            wire = wires[segment.name]
            if wire is not None:
                self.codec.decode(wire, moments[:, segment.columns])
        return moments

    def _adam_moment(self, bucket: Bucket, exchange: Exchange, moments: Tensor) -> None:
        """Fill ``moments`` (R, n) with the optimizer's; where they are sharded, ranks send them once, in fp32."""
        rows = moments[exchange.own_rows]
        rows.zero_()
        for segment in bucket.segments:
            optimizer, group = self.run.holders[segment.name]
            adam = optimizer.state.get(self.run.weights[segment.name], {})
            if "exp_avg" not in adam:
                continue
            values = local(adam["exp_avg"]).reshape(-1)
            if (clip := self.state.get("clip", "")) is not None:
                values = values / clip
            if (counted := self.state.get("counted", segment.name)) is not None:
                beta1 = float(group["betas"][0])
                values = values / (_corrections(beta1, [adam["step"]])[0] / _corrections(beta1, [counted])[0])
            for row, chunk in zip(rows, values.split(max(segment.span, 1)), strict=False):
                row[segment.start : segment.start + chunk.numel()].copy_(chunk)
        exchange.share(moments)


def _corrections(beta: float, steps: Sequence[Tensor]) -> list[Tensor]:
    """Return 1 - beta^step for each of ``steps``, 0-dim, float64, in a few launches with the bits of one by one."""
    powers = torch._foreach_pow(beta, torch.stack(list(steps)).double().unbind())
    return list(torch._foreach_add(torch._foreach_neg(powers), 1))


def _move(numbers: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy ``numbers``, 0-dim, to ``device`` at once: operations on lists take those of one device alone."""
    same = numbers[0].device == device
    return numbers if same else list(torch.stack(numbers).to(device, non_blocking=True).unbind())


def _frozen_steps(
    weights: list[Tensor], moments: Sequence[Tensor], averages: Sequence[Tensor], variances: Sequence[Tensor],
    steps: Sequence[Tensor], frozen: Sequence[Tensor], group: dict[str, Any], scale: Tensor | float,
) -> None:  # fmt: skip
    """Set w = (1 - lr decay) w - lr m^ / (sqrt(v^) + eps), v^ = v / (1 - b2^frozen).

    m^ is m / (1 - b1^step), times ``scale`` if that is less than 1. Where v is 0, m does nothing. The averages become
    ``scale`` m (1 - b1^frozen) / (1 - b1^step), whole where a clip has left less of the step; before that, in float32,
    they hold the denominators. ``steps`` and ``frozen`` are 0-dim; the host does not read them.
    """
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), group["weight_decay"]
    counted, own = _corrections(beta1, steps), [a if a.dtype == torch.float32 else None for a in averages]
    shares = list(torch._foreach_div(_corrections(beta1, frozen), counted))
    if isinstance(scale, Tensor):  # counts are on the CPU, unless the optimizer is fused or capturable
        scale, counted, shares = scale.double(), _move(counted, scale.device), _move(shares, scale.device)
    shares = list(torch._foreach_mul(shares, scale))
    scale = scale.clamp(max=1) if isinstance(scale, Tensor) else min(scale, 1.0)
    # Of a parameter that has rested through the warm-up, v and the correction are 0.
    each = zip(variances, torch._foreach_clamp_min(_corrections(beta2, frozen), TINY), own, strict=True)
    denominators = [torch.div(variance.float(), correction, out=out) for variance, correction, out in each]
    torch._foreach_sqrt_(denominators)
    for denominator in denominators:
        torch.threshold_(denominator, 0, math.inf)
    torch._foreach_add_(denominators, group["eps"])
    for denominator, correction in zip(denominators, torch._foreach_div(counted, scale), strict=True):
        denominator.mul_(correction)
    if decay:
        torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_addcdiv_(weights, [moment.float() for moment in moments], denominators, value=-lr)
    for average, moment, share in zip(averages, moments, shares, strict=True):
        torch.mul(moment.to(average.dtype), share, out=average)
