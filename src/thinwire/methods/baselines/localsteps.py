"""Local steps: each rank steps alone, and every H steps all meet (Stich, ICLR 2019, arXiv 1805.09767).

DiLoCo (Douillard et al., 2023, arXiv 2311.08105, Alg. 1), on rank n of N, round t, with the weights W that all share:

    w_n = W;  H steps of the user's optimizer on w_n, with this rank's own gradients     (l. 2-9)
    D   = mean_n (W - w_n), the outer gradient                                           (l. 10-11)
    u   = mu u + D;  W -= a (D + mu u)          SGD with Nesterov momentum                (l. 12)

Any method of ours makes the mean of l. 11, in a run whose weights are W, whose optimizer is that SGD, and whose steps
are the rounds. It therefore keeps its residual, mask or warm-up from round to round. Momenta and variances of the
user's optimizer stay with their rank, as in the paper.

LS1 sends one bit each way every 2 to 4 steps, and takes a rank's v as N times that of the mean (``second_moment``).
With the largest of D in place of signs (``local-steps:recommended``) a round brings nearly what it brings in fp32
(docs/quality.md), for fewer bytes than signs up to 4 ranks.

Where ours differs. In a ``start`` any method of ours averages gradients at every step (``start_with``); its last step
is dense and brings what waits, so that all ranks begin alike. Skipped steps count, too, so that all meet at the same
time. A round in which any rank's weights are not finite does not count: all go back to W. With 16-bit weights W is
float32, and a rank's difference is taken from W as rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Momentum, Steps, Within, refuse_idle
from thinwire.core.bucket import Bucket, Piece
from thinwire.core.card import EQUAL, MEAN, SHARD, Card, StateKind
from thinwire.core.exchange import Exchange
from thinwire.core.method import Fp32, Method, Start, bucket_of, first_step, send_all
from thinwire.core.promise import CONSERVES, Promise
from thinwire.core.run import Parameter, Run, Step
from thinwire.core.selection import dense_among, keep_dense
from thinwire.core.state import State, find_entries
from thinwire.methods.parts.feedback import Lossy
from thinwire.methods.parts.own_adam import MeanMomentView, check_adam, check_saved_shape, restore_moment
from thinwire.methods.parts.own_steps import refuse_chunks
from thinwire.network.comm import local

OWN_WEIGHT, OWN_MOMENT = "own weight", "own optimizer "
"""Kinds of state in checkpoints that differ by rank between two rounds."""
START = "start "
"""Prefix of the kinds of state of the method that averages gradients in the start."""


class _StartState:
    """The memory of the start's method: a part of the whole, in which its kinds begin with ``START``."""

    def __init__(self, whole: State) -> None:
        self._whole = whole

    def __getattr__(self, access: str) -> Callable[..., Any]:
        """Return ``read``, ``write``, ``get``, ``put``, ``keep`` or ``drop`` of the whole for a kind of the start."""
        method = getattr(self._whole, access)
        return lambda kind, *arguments, **options: method(f"{START}{kind}", *arguments, **options)


@dataclass
class LocalSteps(Method):
    """Each rank takes ``every`` steps alone; then an outer method averages what they moved (DiLoCo, arXiv 2311.08105).

    Between rounds nothing travels, no rank waits for another, and a gradient that is not finite costs its rank alone
    one step. ``wire.clip_grad_norm_`` then clips each rank's gradient by its own norm. Weights and the optimizer's
    moments differ by rank: ``wire.state_dict()`` holds them, and ``wire.load_state_dict()`` restores them, so call it
    after the model's and the optimizer's own. All ranks hold the same weights after each round, and after the last step
    of a run whose ``steps`` are known: evaluate and export there. On HSDP a node takes the place of a rank, and
    averages its gradients inside at every step.

    Args:
        every: H, optimizer steps in a round, taken or skipped; higher => fewer bytes, and ranks drift further apart.
        outer: the method that averages what the weights have moved, once a round: ``"int8(feedback='gradients')"``,
            ``thinwire.TopK(density=0.03, feedback="gradients")``. What it keeps dense goes in fp32.
        outer_lr: a, the factor of the average by which all move; 1 with ``outer_momentum=0`` is plain averaging.
        outer_momentum: mu of Nesterov's momentum over rounds, 0 to below 1; higher => more momentum, for long rounds.
        start: length of the start, in which gradients are averaged: a share of the run below 1, or a number of
            optimizer steps. Higher => more bytes, and ranks begin to drift later.
        start_with: the method that averages gradients in the start, whose steps must all be alike; what the outer
            method keeps dense goes in fp32.
        second_moment: Adam's v as it is on each rank ("own"), or divided by N ("mean"): one rank's gradient has N times
            the variance of the mean, which makes steps too small. For ``AdamW`` and ``Adam``.

    Raises:
        ThinwireError: weights sharded over all ranks (FSDP2), two levels on DDP, a GradScaler, an outer method that
            works on an optimizer's moments.
    """

    name: ClassVar[str] = "local-steps"
    engines: ClassVar[tuple[str, ...]] = ("ddp", "hsdp")
    ELSEWHERE: ClassVar[str] = (
        "each weight has one owner there, so no replica could step alone: shard inside nodes only, with fully_shard on "
        "a ('replicate', 'shard') mesh (HSDP)"
    )
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("dense", "send"), "the outer method has: outer=\"int8(dense='*bias')\""
    )
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "recommended": {
            "every": 4, "start": 0.1, "start_with": "loco(beta=0,reset=0)",
            "outer": "trickle(density=0.05,bits=4,feedback='gradient')",
            "outer_lr": 1.0, "outer_momentum": 0.0, "second_moment": "mean",
        },
    }  # fmt: skip

    every: Steps = 20
    outer: Method | str = "dense"
    outer_lr: Annotated[float, Within(lambda lr: lr > 0, "must be above 0")] = 0.7
    outer_momentum: Momentum = 0.9
    start: Start = 0
    start_with: Method | str = "dense"
    second_moment: Literal["own", "mean"] = "own"

    def __post_init__(self) -> None:
        from thinwire.methods import resolve  # not above: it imports this module

        super().__post_init__()
        if not self.start:
            refuse_idle(self, "start=0", "start_with")
        # Other objects than the user's, which a dry run would share.
        self._outer, self._starter = replace(resolve(self.outer)), replace(resolve(self.start_with))
        self._check_averages("outer", self._outer)
        self._check_averages("start_with", self._starter)
        if self._starter.card.steady or len(self._starter.card.cycle) > 1:
            raise ThinwireError(f"{self.name}: start_with={self._starter.name}: take one whose steps are all alike")
        self.first = 0
        self._missed = self._lost = 0  # steps not taken, rounds that did not count
        self._round = 0  # the number of the round that ends
        self._ranks_differ = False  # do the ranks' weights differ?
        self._deliver_next = False  # is all that waits to be delivered in the next round?
        self._anchors: dict[str, nn.Parameter] = {}  # W
        self._adam_view = MeanMomentView()

    def _check_averages(self, knob: str, method: Method) -> None:
        """Refuse a ``method`` that does not just average gradients for any optimizer."""
        label = f"{self.name}: {knob}={method.name}"
        if isinstance(method, LocalSteps) or not method.rank_equal:
            raise ThinwireError(f"{label} leaves ranks apart: take one that averages")
        if isinstance(method, Lossy) and method.updates is not None:
            raise ThinwireError(
                f"{label} sends AdamW's steps (feedback='updates'), and the outer optimizer is SGD: write "
                f"{method.for_gradients}"
            )
        if method.card.promise.of != "gradients":
            raise ThinwireError(
                f"{label} works in an Adam's place, and the outer optimizer is SGD: take a method that averages "
                "gradients, such as int8 or topk(feedback='gradients')"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            self._outer.state = value  # one memory: it is saved, committed and taken back together
            self._starter.state = cast(State, _StartState(value))

    def begin(self, run: Run) -> None:
        super().begin(run)
        refuse_chunks(self.name, run)
        if run.scaled:
            raise ThinwireError(
                f"{self.name} does not run under a GradScaler, which skips a rank's steps without a word, so that it "
                "would miss the others: train in bfloat16"
            )
        if self.second_moment == "mean":
            check_adam(self.name, run)
        self.first = first_step(self.name, "start", self.start, run.steps)
        # They have no memory of their own until the first local step.
        self._anchors = {
            name: nn.Parameter(torch.zeros((), device=local(weight).device).expand(local(weight).shape))
            for name, weight in run.weights.items()
        }
        mu = self.outer_momentum
        self._sgd = torch.optim.SGD(
            [{"params": list(self._anchors.values())}], lr=self.outer_lr, momentum=mu, nesterov=mu > 0
        )
        rounds = None if run.steps is None else -(-(run.steps - self.first) // self.every)
        self._outer.begin(replace(run, steps=rounds, optimizers=(self._sgd,), weights=self._anchors))
        self._starter.begin(replace(run, steps=self.first))
        self._buckets: list[tuple[Method, Bucket, slice]] = []

    # What other parts ask.

    def describe(self) -> Card:
        outer, start = self._outer.card, self._starter.card
        between = {0: 1 - 1 / self.every} if self.every > 1 else {}
        rounds = {(number + 1) * self.every - 1: share / self.every for number, share in outer.cycle.items()}
        of_weights = StateKind(resized="shard", of_weights=True)
        own = {
            "anchor": of_weights, "outer momentum": of_weights, OWN_WEIGHT: replace(SHARD, own="anchor"),
            f"{OWN_MOMENT}*": replace(MEAN, own="none"),
            "missed": EQUAL, "lost": EQUAL, "due": EQUAL,
        }  # fmt: skip
        own |= {f"{START}{kind}": word for kind, word in start.state_kinds.items()}
        shared = {kind: replace(word, rank_equal=False) for kind, word in outer.state_kinds.items()}
        return replace(
            outer, promise=self._promise(outer.promise), group=start.group,
            summed_by_network=start.summed_by_network, bytes_follow_data=outer.bytes_follow_data or
            start.bytes_follow_data, keeps_state=True, adds_up=True, encodes_weights=False,
            native=False,  # of the kernels, which are the outer method's
            takes_dense=True,  # what stays dense waits for the round, too
            instead_at_scale=str(replace(self, outer=instead)) if (instead := outer.instead_at_scale) else "",
            alone_from=self.first, steady=self.first + outer.steady * self.every, cycle={**between, **rounds},
            state_kinds={**shared, **own}, intra=None, carrier=self._outer,
        )  # fmt: skip

    def _promise(self, outer: Promise) -> Promise:
        return replace(CONSERVES if outer.kind == "exact" else outer, of="weights")

    @property
    def rank_equal(self) -> bool:
        return not (self._ranks_differ and find_entries(self.state, "anchor"))

    def policy(self, parameter: Parameter) -> str | None:
        return keep_dense(self._outer, parameter)

    def facts(self) -> dict[str, float]:
        lost = {"rounds that did not count": float(self._lost)} if self._lost else {}
        return {**lost, **self._outer.facts()}

    # A step.

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradients in the start; leave each rank its own after it."""
        if bucket.step < self.first - 1:
            self._starter.reduce(bucket, exchange)
        elif bucket.step < self.first:
            self._end_start(bucket, exchange)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradients in the start; after it, let the round's end deliver what waits."""
        if bucket.step < self.first:
            self._end_start(bucket, exchange)
        else:
            self._deliver_next = True

    def _end_start(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradients in fp32, together with all that waits."""
        waits = {f"{START}{kind}": weight for kind, weight in self._starter.card.promise.waits.items()}
        send_all(waits, self.state, bucket, exchange)

    def before_step(self, step: Step) -> None:
        if step.number < self.first:
            return
        self._copy_shared_weights(step)
        if self.second_moment == "mean":
            self._adam_view.enter(step, self.run.exchange.ranks)

    def after_step(self, step: Step) -> None:
        self._adam_view.leave(step)
        if step.number >= self.first:
            self._count_step(step)

    def after_skip(self, step: Step) -> None:
        """Count the skipped step as one of the round's (in the start all ranks skip it)."""
        if step.number >= self.first:
            self._copy_shared_weights(step)
            self._count_step(step)
        self._missed += 1

    def _copy_shared_weights(self, step: Step) -> None:
        """Copy W, which all ranks hold, before the run's first local step."""
        self._drop_saved()
        if find_entries(self.state, "anchor") or not self._anchors:
            return
        for kind in self._starter.card.promise.waits:
            self._starter.state.drop(kind)
        for kind, name, _ in find_entries(self.state, START):
            self.state.keep(kind, name, None)
        self._sgd.state.clear()  # of weights that are no more
        weights = {name: local(weight).detach() for name, weight in step.weights.items()}
        for name, weight in weights.items():
            self._anchors[name].data = weight.to(torch.float32, copy=True).contiguous()
            self.state.keep("anchor", name, self._anchors[name].detach())
        if self.second_moment == "mean":
            for name, weight in step.weights.items():
                moment = step.holders[name].optimizer.state.get(weight, {}).get("exp_avg")
                if moment is not None:
                    local(moment).div_(math.sqrt(self.run.exchange.ranks))

    def _count_step(self, step: Step) -> None:
        """Count a step, taken or skipped; end the round with its last one."""
        past = step.number + self._missed + 1 - self.first
        ends = past % self.every == 0 or self.first + past == self.run.steps
        self._ranks_differ = not ends
        if ends and self._anchors:
            with self.run.exchange.span("exposed", next(iter(self._anchors.values()))):
                self._end_round(step)

    # A round.

    def _end_round(self, step: Step) -> None:
        """Average D (l. 10-11), take the outer step (l. 12), and set w_n = W."""
        averaged = step.attempt(partial(self._average_moves, step))
        if step.agree(averaged or []) and averaged is not None:
            self.state.commit()
            self._outer_step(averaged[1], self._round)
            self._deliver_next = False
        else:
            self.state.rollback()
            self._outer.undo()
            self._lost += 1
        for name, weight in step.weights.items():
            local(weight.detach()).copy_(self._anchors[name].detach())

    def _average_moves(self, step: Step, number: int) -> list[Tensor]:
        """Average D (l. 10-11) after ``number`` steps; return its norm on this rank, 0-dim, and the mean, (P,)."""
        self._round = (number + self._missed - self.first) // self.every
        if not self._buckets:
            self._buckets = self._make_buckets()
        moved = self._differences(step)
        norm = torch.linalg.vector_norm(moved)  # before a codec hides what is not finite
        for method, bucket, columns in self._buckets:
            bucket.step = self._round
            bucket.load(moved[columns], moved[columns])
            deliver_waiting = self._deliver_next and method is self._outer
            (method.deliver if deliver_waiting else method.reduce)(bucket, self.run.exchange)
            bucket.store(moved[columns])
            bucket.release()
        return [norm, moved]

    def _make_buckets(self) -> list[tuple[Method, Bucket, slice]]:
        """Make a bucket of compressed and one of dense parameters, each with its method and slice of D."""
        pairs: list[tuple[Method, Bucket, slice]] = []
        end = 0
        parameters = [self.run.parameters[name] for name in self._anchors]
        dense_names = dense_among(self._outer, parameters)
        sent = [parameter for parameter in parameters if parameter.name not in dense_names]
        for method, members in ((self._outer, sent), (Fp32(), [p for p in parameters if p.name in dense_names])):
            first, pieces = end, []
            for parameter in members:
                pieces.append(Piece(parameter.name, end - first, parameter.local))
                end += parameter.local
            if pieces:
                bucket = bucket_of(method, pieces, self.run.exchange, self._anchors[pieces[0].name].device)
                pairs.append((method, bucket, slice(first, end)))
        return pairs

    def _differences(self, step: Step) -> Tensor:
        """Return W - w_n (l. 10) of all parameters, (P,) float32, in the buckets' order; zeros in the padding."""
        moved = torch.zeros(self._buckets[-1][2].stop, dtype=torch.float32, device=self._buckets[0][1].device)
        for name, values in self._views(moved):
            weight = local(step.weights[name].detach())
            values.copy_(self._anchors[name].detach().to(weight.dtype)).sub_(weight)
        return moved

    def _views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """List each parameter's name and its values in ``flat`` (P,), in its shape on this rank."""
        views = []
        for _, bucket, columns in self._buckets:
            for segment in bucket.segments:
                shape = self._anchors[segment.name].shape
                views.append((segment.name, flat[columns][segment.piece.offset :][: shape.numel()].view(shape)))
        return views

    def _outer_step(self, mean: Tensor, number: int) -> None:
        """Take the outer optimizer's step (l. 12), with the outer method's hooks around it."""
        for name, values in self._views(mean):
            self._anchors[name].grad = values
        step = Step(number, (self._sgd,), self._anchors)
        self._outer.before_step(step)
        self._sgd.step()
        self._outer.after_step(step)
        self._sgd.zero_grad()
        for name, anchor in self._anchors.items():
            if (momentum := self._sgd.state.get(anchor, {}).get("momentum_buffer")) is not None:
                self.state.keep("outer momentum", name, momentum)
        self.state.commit()

    # Taking a step back, saving and loading.

    def undo(self) -> None:
        self._outer.undo()

    def finish(self) -> None:
        """Put this rank's own weights and moments into the state: the model's checkpoint does not hold them."""
        self._outer.finish()
        self.state.keep("missed", "", torch.tensor(self._missed))
        self.state.keep("lost", "", torch.tensor(self._lost))
        self.state.keep("due", "", torch.tensor(int(self._deliver_next)))
        if not find_entries(self.state, "anchor"):
            return
        for name, weight in self.run.weights.items():
            self.state.keep(OWN_WEIGHT, name, local(weight.detach()))
            for kind, value in self.run.holders[name].optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor):
                    self.state.keep(f"{OWN_MOMENT}{kind}", name, local(value.detach()))

    def _drop_saved(self) -> None:
        """Drop the weights and moments that ``finish`` put there: the model and the optimizer hold them."""
        for kind, name, _ in [*find_entries(self.state, OWN_WEIGHT), *find_entries(self.state, OWN_MOMENT)]:
            self.state.keep(kind, name, None)

    def state_changed(self) -> None:
        """Restore W, its momentum, and this rank's own weights and moments from a checkpoint."""
        self._outer.state_changed()
        counts = (self.state.get(kind, "") for kind in ("missed", "lost", "due"))
        self._missed, self._lost, deliver_next = (0 if count is None else int(count) for count in counts)
        self._deliver_next = bool(deliver_next)
        self._sgd.state.clear()
        for kind, name, saved in find_entries(self.state):
            if kind in ("anchor", "outer momentum", OWN_WEIGHT):
                check_saved_shape(self.run, kind, name, saved)
        for _, name, saved in find_entries(self.state, "anchor"):
            self._anchors[name].data = saved
        for _, name, saved in find_entries(self.state, "outer momentum"):
            self._sgd.state[self._anchors[name]]["momentum_buffer"] = saved
        self._ranks_differ = False
        for _, name, saved in find_entries(self.state, OWN_WEIGHT):
            local(self.run.weights[name].detach()).copy_(saved)
            self._ranks_differ |= not torch.equal(saved, self._anchors[name].detach().to(saved.dtype))
        for kind, name, saved in find_entries(self.state, OWN_MOMENT):
            restore_moment(self.run, kind.removeprefix(OWN_MOMENT), name, saved)
        self._drop_saved()
