"""Radius: reuse one top-k mask for T steps (Zheng et al., MLSys 2025).

Alg. 1 as printed, for each tensor, on rank n at step t:

    t < threshold        G = mean_n G_n                                              (l. 3-5)
    resample step        G_n += residual;  G = mean_n G_n;  residual = 0             (l. 7-11)
    other steps          G[idx] = mean_n G_n[idx]: values only, no indices travel    (l. 13-15)
                         residual += G_n outside idx;  G = 0 outside idx             (l. 16-17)
    then                 clip G; u = AdamW's direction of G (Alg. 2)                 (l. 20-21)
    resample step        idx = top-k of |u|                                          (l. 22-24)
    then                 w -= lr u                                                   (l. 25)

The clipping of l. 20 is ``wire.clip_grad_norm_``, and l. 25 is a step of the user's optimizer.

Where ours differs. The paper resamples when t % T == 0; ours at the first step at or after ``start`` and then every T
steps, so that no step of the sparse phase is without a mask. The paper's own AdamW computes u inside Alg. 1; ours reads
it from the user's optimizer after its step (Adam's moments hold it), and from the change of the weights for any other.
With the weights sharded (FSDP2) an owner knows the direction of its own rows only: top-k is taken per shard, and the
masks are all-gathered as bits. The authors' code does not save its mask and residual; ours are state.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.base.alignment import padded
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Share, Steps
from thinwire.codecs.base import Residual
from thinwire.codecs.mask import Masked
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange, bucket_rows, count_columns
from thinwire.core.method import ANEW, Card, Density, Run, Start, StateKind, Step, count_of
from thinwire.core.run import Holder
from thinwire.core.selection import keep_dense
from thinwire.core.state import LOOSE
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Lossy, Updates
from thinwire.network.comm import local
from thinwire.ops import mask as masks
from thinwire.ops import sparse

_BIASES: dict[str, Any] = {"send": ("*",), "dense": ("*bias",)}  # what the authors exempt
_PAPER = {"T": 200, "start": 0.15, "residual_scale": 1.0, **_BIASES}


@dataclass
class Radius(Lossy):
    """The values at a mask of the largest, chosen again every T steps; the rest waits (MLSys 2025, Alg. 1).

    Args:
        density: share of each tensor's values that the mask sends (the paper's D; its abstract calls density 0.4
            "40% sparsity"). Lower => fewer bytes, more of the gradient waits.
        T: steps for which a mask is used; each T-th step is dense and chooses a new mask (higher => fewer bytes,
            staler mask and residual; the paper found T = 10 worse than 200).
        start: length of the dense start (the paper's threshold): below 1 a share of the run, else a number of
            optimizer steps. Lower => fewer bytes; the paper needs 15-20% of the run, because masks are not stable
            before.
        residual_scale: share of the residual that each T-th step sends, in (0, 1]; the rest stays in the residual.
            1 is the paper's: the gradients of T steps at once, most of which clipping then removes (see "clip factor
            at the last resample" in the report). Lower => smaller bursts, longer delay.
    """

    name: ClassVar[str] = "radius"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {**_PAPER, "density": 0.4},
        "paper-d0.5": {**_PAPER, "density": 0.5},
        "paper-d0.1": {**_PAPER, "density": 0.1},
    }

    feedback: Gradients | Updates = GRADIENTS
    density: Density = 0.5
    T: Steps = 50
    start: Start = 0.15
    residual_scale: Share = 0.25

    def __post_init__(self) -> None:
        self._owns_rows = False  # does each rank own a row, and choose its mask alone?
        super().__post_init__()
        self._former_weights: dict[str, Tensor] = {}
        self._marked: dict[str, Tensor] = {}  # new masks, until all optimizers have stepped
        self._due_again = False  # the next step is a resample step, too

    def begin(self, run: Run) -> None:
        super().begin(run)
        self._owns_rows = run.exchange.owner

    def describe(self) -> Card:
        card, kinds = super().describe(), min(self.T, 3)
        # A resample, the step after it, which puts the new masks together, and all others.
        shares = [1 / self.T] * (kinds - 1) + [1 - (kinds - 1) / self.T]
        mask = StateKind(resized="anew", rank_equal=not self._owns_rows, fault=self._fault_of_masks)
        return replace(
            card, group=masks.WORD, cycle=dict(enumerate(shares)),
            state_kinds={**card.state_kinds, "mask": mask, "resampled": ANEW, "clip": ANEW},
        )  # fmt: skip

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        """Do l. 7-17 of Alg. 1. Before ``start``, ``Lossy._exchange`` has sent all and not called this (l. 3-6)."""
        old = self.state.read("residual", bucket)
        new = self.state.write("residual", bucket)
        if self._resamples(bucket.step):  # l. 7
            bucket.rows.add_(old, alpha=self.residual_scale)  # l. 8
            torch.mul(old, 1 - self.residual_scale, out=new)  # l. 10: 0, unless residual_scale is below 1
            exchange.mean(bucket)  # l. 9 and 11
        else:
            # l. 13       values = G_n[idx] (+ residual)     Masked.encode: in one pass the values,
            # l. 16       residual += G_n outside idx        and what waits. What residual_scale left at idx is sent
            # l. 14       All-reduce(values)                 the network sums
            # l. 15, 17   G[idx] = values, 0 outside idx     Masked.decode
            exchange.mean(bucket, self._codec(bucket, exchange), residual=Residual(old, new))

    def after_step(self, step: Step) -> None:
        """At a resample step: the mask of the next T steps, from the direction that the optimizer took (l. 21-24)."""
        super().after_step(step)
        if not self._resamples(step.number):  # l. 22
            return
        due_again, self._due_again = self._due_again, False
        for name, weight in step.weights.items():
            mask = self._marked.get(name)
            has_none = self._is_sent(name) and name in step.holders and self.state.get("mask", name) is None
            if mask is None and has_none and not due_again:
                mask = self._mask(name, torch.zeros_like(local(weight)).reshape(-1))
            if mask is not None:  # else it rests, with the mask that it has
                self.state.put("mask", name, self.run.exchange.share(mask))  # l. 24
        self._former_weights.clear()
        self._marked.clear()
        if due_again:
            return
        self.state.put("resampled", "", torch.tensor(step.number, device="cpu"))
        if step.clip_factor is not None:
            self.state.put("clip", "", step.clip_factor)

    def before_step(self, step: Step) -> None:
        """Let each optimizer's direction be taken right after its own step: then the user may change its groups and
        gradients. One that is not AdamW shows its direction by the change it makes."""
        super().before_step(step)
        if not self._resamples(step.number):
            return
        if self.update_space is None:
            self._former_weights |= {
                name: local(weight).detach().clone()
                for name, weight in step.weights.items()
                if self._is_sent(name) and not isinstance(step.holders[name].optimizer, torch.optim.AdamW)
                and weight.dtype.itemsize >= 4  # a small change does not reach bfloat16
            }
        # Others may not step at all; in after_step, the next pass may have begun to add to their gradients.
        self._mark(self.run.weights.keys() - step.weights.keys() - self._marked.keys())
        step.put_back.append(functools.partial(self._mark, step.weights))

    def _fault_of_masks(self, saved: Mapping[str, Tensor]) -> str:
        rows = bucket_rows(self.run.exchange, True)
        for name, parameter in self.run.parameters.items():
            key = f"{LOOSE}mask/{name}"
            if (words := saved.get(key)) is not None:
                k = self._k(count_columns(self.run.exchange, parameter.local, rows))
                if bool((masks.popcount(words.cpu().contiguous()) != k).any()):
                    return f"{key} has not {k} bits in each row"
        return ""

    def facts(self) -> dict[str, float]:
        figures = {}
        if (last := self.state.get("resampled", "")) is not None:
            figures["last resample, step"] = float(last)
        if (clip := self.state.get("clip", "")) is not None:
            figures["clip factor at the last resample"] = float(clip)
        return figures

    def _k(self, columns: int) -> int:
        return count_of(self.density, columns)

    def _is_sent(self, name: str) -> bool:
        return keep_dense(self, self.run.parameters[name]) is None

    def _resamples(self, number: int) -> bool:
        """l. 7 and 22, but T steps after the last time, whatever t is.

        A resample step that was skipped, because a gradient was not finite, is due again at the next.
        """
        if number < self.first:  # t < threshold
            return False
        last = self.state.get("resampled", "")
        return last is None or number - int(last) >= self.T

    def _direction(self, name: str, holder: Holder) -> Tensor | None:
        """u (local values, 1-D, l. 21): Alg. 2 for AdamW, up to a factor the change of the weight for any other.

        AdamW's own step has done Alg. 2, l. 1-2. With feedback="updates" what has come is the direction, and so it is
        where an optimizer has not stepped, or by 0, or weights of bfloat16. None: nothing has come, on no rank, or with
        feedback="updates" a step by 0.
        """
        weight, (optimizer, group) = self.run.weights[name], holder
        moments = optimizer.state.get(weight, {})
        if self.update_space is None and isinstance(optimizer, torch.optim.AdamW) and "exp_avg" in moments:
            return _adamw_direction(weight, group, moments)
        if weight.grad is None or (self.update_space is not None and float(group["lr"]) == 0):
            return None
        if name in self._former_weights and float(group["lr"]) != 0:
            return (self._former_weights[name] - local(weight).detach()).reshape(-1)
        return local(weight.grad).reshape(-1)

    def _mark(self, names: Iterable[str]) -> None:
        """Note the masks of those of ``names`` that have a direction, for the rows that this rank owns (l. 21-23)."""
        holders = self.run.holders
        for name in names:
            if name not in holders or not self._is_sent(name):
                continue
            if (direction := self._direction(name, holders[name])) is not None:
                self._marked[name] = self._mask(name, direction)
            elif self.run.weights[name].grad is not None and self.state.get("mask", name) is None:
                self._due_again = True  # a first mask of steps by 0 would be any

    def _mask(self, name: str, direction: Tensor) -> Tensor:
        """Mask words (R, width / 64) of the k largest |u| of the rows that this rank owns."""
        exchange = self.run.exchange
        rows = bucket_rows(exchange, True)
        columns = count_columns(exchange, self.run.parameters[name].local, rows)
        values = torch.zeros((1, padded(columns, masks.WORD)), dtype=torch.float32, device=direction.device)
        direction = self.run.travels(name, direction)
        values[0, : direction.numel()].copy_(direction)
        words = torch.zeros((rows, values.shape[1] // masks.WORD), dtype=torch.int64, device=direction.device)
        largest = sparse.ListSegment(0, values.shape[1], self._k(columns), 0)
        sparse.marked(values, (largest,), words[exchange.own_rows])
        return words

    def _codec(self, bucket: Bucket, exchange: Exchange) -> Masked:
        """For the masks of the bucket's segments side by side, put together once per resample."""
        segment_masks = [self.state.get("mask", segment.name) for segment in bucket.segments]

        def joined() -> Tensor:
            for segment, segment_mask in zip(bucket.segments, segment_masks, strict=True):
                if segment_mask is None:
                    raise ThinwireError(f"radius: {segment.name} has no mask, as no optimizer holds it")
            return torch.cat([segment_mask for segment_mask in segment_masks if segment_mask is not None], 1)

        k = sum(self._k(segment.span) for segment in bucket.segments)
        words = bucket.once("mask", joined, *segment_masks)
        bit_offsets = bucket.once("directory", lambda: masks.directory(words), words)
        return Masked(words, k, owner_row=exchange.own_row, bit_offsets=bit_offsets)


def _adamw_direction(weight: Tensor, group: Mapping[str, Any], moments: Mapping[str, Any]) -> Tensor:
    """Alg. 2, l. 3-5."""
    current = local(weight).detach()
    beta1, beta2 = group["betas"]
    t, lr, decay = float(moments["step"]), float(group["lr"]), group["weight_decay"]
    second = local(moments["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    denominator = (second / (1 - beta2**t)).sqrt_().add_(group["eps"])  # l. 4
    adam = local(moments["exp_avg"]) / (1 - beta1**t) / denominator  # l. 3
    former = (current + lr * adam) / (1 - lr * decay)  # the paper's w is the one that the gradient was taken at
    return adam.add_(former, alpha=decay).reshape(-1)  # l. 5
