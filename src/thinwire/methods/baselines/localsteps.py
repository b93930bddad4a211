"""Local steps: each rank steps alone, and every H steps all meet (Stich, ICLR 2019, arXiv 1805.09767).

DiLoCo (Douillard et al., 2023, arXiv 2311.08105, Alg. 1), on rank n of N, round t, with the weights W that all share:

    w_n = W;  H steps of the user's optimizer on w_n, with this rank's own gradients     (l. 2-9)
    D   = mean_n (W - w_n), the outer gradient                                           (l. 10-11)
    u   = mu u + D;  W -= a (D + mu u)          SGD with Nesterov momentum                (l. 12)

Any method of ours makes the mean of l. 11, in a run whose weights are W, whose optimizer is that SGD, and whose steps
are the rounds. It therefore keeps its residual, mask or warm-up from round to round. Momenta and variances of the
user's optimizer stay with their rank, as in the paper.

Streaming DiLoCo (Douillard et al., 2025, arXiv 2501.18512, Alg. 2), on the fragment p of the layers, tau = ``delay``:

    every H steps, each fragment at a time of its own:   D_p = mean_n (W_p - w_n,p), under way beside the next steps
    tau steps later:   W_p -= a (D_p + mu u_p);   w_n,p = alpha w_n,p + (1 - alpha) W_p          alpha = ``mix``

LS1 sends one bit each way every 2 to 4 steps, and takes a rank's v as N times that of the mean (``second_moment``).
With the largest of D in place of signs (``local-steps:recommended``) a round brings nearly what it brings in fp32
(docs/quality.md), for fewer bytes than signs up to 4 ranks.

Where ours differs. In a ``start`` any method of ours averages gradients at every step (``start_with``); its last step
is dense and brings what waits, so that all ranks begin alike. Skipped steps count, too, so that all meet at the same
time. A round in which any rank's weights are not finite does not count: all go back to W. With 16-bit weights W is
float32, and a rank's difference is taken from W as rounded. One fragment at a time is under way, so tau is at most
H / P. The run's last step ends all rounds at once, so that all ranks end with W.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Momentum, Steps, Within, refuse_idle
from thinwire.core.bucket import Bucket
from thinwire.core.card import EQUAL, MEAN, SHARD, Card, StateKind
from thinwire.core.exchange import Exchange, on_comm
from thinwire.core.fingerprint import Fingerprint
from thinwire.core.method import Method, Start, first_step, send_all
from thinwire.core.promise import CONSERVES, Promise
from thinwire.core.run import NO_SCALER, Parameter, Run, Step
from thinwire.core.selection import keep_dense
from thinwire.core.state import State, find_entries
from thinwire.core.worker import Worker
from thinwire.methods.parts.feedback import Lossy
from thinwire.methods.parts.fragments import Fragment, Timetable, split
from thinwire.methods.parts.own_adam import (
    OwnNumbers,
    check_adam,
    check_patchwork,
    check_saved_shape,
    own_moments,
    restore_moment,
    step_by_mean_moment,
)
from thinwire.methods.parts.own_steps import refuse_chunks
from thinwire.network.comm import Comm, local

OWN_WEIGHT, OWN_MOMENT = "own weight", "own optimizer "
OWN_NUMBERS = f"{OWN_MOMENT}numbers in groups"
"""Kinds of state in checkpoints that differ by rank between two rounds."""
START = "start "
"""Prefix of the kinds of state of the method that averages gradients in the start."""
OWN_KINDS = ("anchor", "outer momentum", OWN_WEIGHT, OWN_MOMENT, "missed", "lost", "due", "merge at", START)
"""First words of the kinds of state that are not the outer method's."""


class Averaged(NamedTuple):
    """The mean D of the round ``number``, (P,), and the norm of this rank's own, 0-dim."""

    number: int
    norm: Tensor
    mean: Tensor


class Journey(NamedTuple):
    """The round ``number`` of a ``fragment``, under way on another thread over the group ``twin``.

    ``moved``: what this rank sends, of this ``norm``; the ``mean``, a future, takes its place. ``agree``:
    ``agree_inside`` of the step that sent it.
    """

    fragment: Fragment
    number: int
    twin: Comm
    moved: Tensor
    norm: Tensor
    mean: torch.futures.Future[Tensor]
    agree: Callable[..., bool]


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
    """Ranks step alone; every H steps an outer method averages how far they moved (DiLoCo, arXiv 2311.08105).

    Between rounds nothing travels, no rank waits for another, and a gradient that is not finite costs its rank alone
    one step. ``wire.clip_grad_norm_`` then clips each rank's gradient by its own norm. Weights and the optimizer's
    moments differ by rank: ``wire.state_dict()`` holds them, and ``wire.load_state_dict()`` restores them, so call it
    after the model's and the optimizer's own. All ranks hold the same weights after each round, and after the last step
    of a run whose ``steps`` are known: evaluate and export there. On HSDP a node takes the place of a rank, and
    averages its gradients inside at every step.

    Args:
        every: H, optimizer steps in a round, taken or skipped; higher => fewer bytes, and ranks drift further apart.
        outer: the method that averages how far the weights have moved, once a round: ``"int8(feedback='gradients')"``,
            ``thinwire.TopK(density=0.03, feedback="gradients")``. What it keeps dense goes in fp32.
        outer_lr: a, the factor of the average; 1 with ``outer_momentum=0`` is plain averaging.
        outer_momentum: mu of Nesterov's momentum over rounds, 0 to below 1; higher => more momentum, for long rounds.
        start: length of a start in which gradients are averaged in every step: below 1 a share of the run, else a
            number of optimizer steps. Higher => more bytes, and ranks begin to drift later.
        start_with: the method that averages gradients in the start, whose steps must all be alike; what the outer
            method keeps dense goes in fp32.
        fragments: P, parts of the model by layer, which are averaged one after the other; higher => smaller messages,
            sent more often. From 2 on, all ranks hold the same weights only at the end of the run.
        delay: tau, optimizer steps that ranks take during the exchange of a round; higher => slower links are hidden,
            and what arrives is older. 0: all wait for the exchange. At most every / fragments.
        mix: alpha, the share of its own weights that a rank keeps when the merged ones arrive (with delay above 0).
            Higher => more of the steps in the delay survives, and ranks drift further apart.
        second_moment: Adam's v as it is on each rank ("own"), or divided by N ("mean"): one rank's gradient has N times
            the variance of the mean, which makes steps too small. For ``AdamW`` and ``Adam``.

    Raises:
        ThinwireError: weights sharded over all ranks (FSDP2), two levels on DDP, a GradScaler, an outer method that
            works on an optimizer's moments; fragments or a delay where replicas come and go, or more fragments than
            layers.
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
            "outer": "trickle(density=0.05,bits=4,feedback='gradients')",
            "outer_lr": 1.0, "outer_momentum": 0.0, "second_moment": "mean",
        },
    }  # fmt: skip

    every: Steps = 20
    outer: Method | str = "dense"
    outer_lr: Annotated[float, Within(lambda lr: lr > 0, "must be above 0")] = 0.7
    outer_momentum: Momentum = 0.9
    start: Start = 0
    start_with: Method | str = "dense"
    fragments: Annotated[int, Within(lambda fragments: fragments >= 1, "is 1 or more")] = 1
    delay: Annotated[int, Within(lambda steps: steps >= 0, "is a number of steps, or 0")] = 0
    mix: Annotated[float, Within(lambda share: 0 <= share < 1, "is at least 0 and below 1")] = 0.5
    second_moment: Literal["own", "mean"] = "own"

    def __post_init__(self) -> None:
        from thinwire.methods import resolve  # not above: it imports this module

        super().__post_init__()
        if not self.start:
            refuse_idle(self, "start=0", "start_with")
        if not self.delay:
            refuse_idle(self, "delay=0", "mix")
        if self.fragments > self.every:
            raise ThinwireError(f"{self.name}: fragments must be at most every={self.every}, got {self.fragments}")
        if self.delay > (longest := self.every // self.fragments):
            raise ThinwireError(
                f"{self.name}: delay must be at most every / fragments = {longest}, because one fragment at a time is "
                f"under way; got {self.delay}"
            )
        # Other objects than the user's, which a dry run would share.
        self._outer, self._starter = replace(resolve(self.outer)), replace(resolve(self.start_with))
        self._check_averages("outer", self._outer)
        self._check_averages("start_with", self._starter)
        if getattr(self._starter, "start", 0) or self._starter.card.steady or len(self._starter.card.cycle) > 1:
            raise ThinwireError(
                f"{self.name}: start_with={self._starter.name} does not do the same in each step (it has a start, "
                "or keeps a mask): choose a method that does, such as int8"
            )
        self.missed = self._lost = 0  # steps not taken, rounds that did not count
        self._ranks_differ = False  # do the ranks' weights differ?
        self._timetable = Timetable(self.every, self.fragments, self.delay)
        self._fragments: list[Fragment] = []
        self._journey: Journey | None = None  # a round under way on another thread
        self._merge_at = 0  # the local step in which a round that was sent arrives; 0: none; below 0: it does not count

    def _check_averages(self, knob: str, method: Method) -> None:
        """Refuse a ``method`` that does not just average gradients for any optimizer."""
        label = f"{self.name}: {knob}={method.name}"
        if isinstance(method, LocalSteps) or not method.rank_equal:
            raise ThinwireError(
                f"{label} leaves ranks with different weights: choose a method that averages, such as int8"
            )
        if isinstance(method, Lossy) and method.updates is not None:
            raise ThinwireError(
                f"{label} sends AdamW's steps (feedback='updates'), and the outer optimizer is SGD: write "
                f"{method.for_gradients}"
            )
        if method.card.promise.of != "gradients":
            raise ThinwireError(
                f"{label} needs an Adam, and the outer optimizer is SGD: choose a method that averages gradients, "
                "such as int8 or topk(feedback='gradients')"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "state":
            for fragment in getattr(self, "_fragments", ()):  # one memory: it is saved and taken back together
                fragment.remember(value)
            self._starter.state = cast(State, _StartState(value))
        elif name == "run" and self._fragments:
            for number, fragment in enumerate(self._fragments):
                fragment.method.run = self._in_rounds(fragment.method.run, number)

    def begin(self, run: Run) -> None:
        self._fragments = []
        super().begin(run)
        self._restored: Fingerprint | None = None  # this rank's moments, from a load to the first step after it
        self._is_checked: dict[torch.optim.Optimizer, Callable[[object], bool]] = {}  # was this state looked at?
        refuse_chunks(self.name, run)
        if run.scaled:
            raise ThinwireError(NO_SCALER.format(name=self.name))
        if self.second_moment == "mean":
            check_adam(self.name, run)
        for optimizer in run.optimizers:
            if callable(getattr(optimizer, "eval", None)):
                raise ThinwireError(
                    f"{self.name}: {type(optimizer).__name__}.eval() makes the weights to evaluate and to save from a "
                    "state that each rank would have of its own: take AdamW and a schedule, or another method"
                )
        if run.exchange.comm.elastic and (self.fragments > 1 or self.delay):
            raise ThinwireError(
                f"{self.name}: fragments and delay are for a fixed number of ranks: leave them out where replicas come "
                "and go"
            )
        layers = split(run.parameters, self.fragments)
        if len(layers) < self.fragments and run.exchange.ranks > 1:  # a lone rank may try some of a model's kernels
            raise ThinwireError(
                f"{self.name}: fragments={self.fragments} of a model with {len(layers)} layers (modules with trained "
                f"parameters): take {len(layers)} at most"
            )
        for number, names in enumerate(layers):
            method = self._outer if number == 0 else replace(self._outer)
            in_rounds = self._in_rounds(run, number)
            self._fragments.append(Fragment(number, method, in_rounds, names, self.outer_lr, self.outer_momentum))
        if hasattr(self, "state"):
            self.state = self.state  # which the fragments share
        if self.first:  # else a share of a few steps is none, and nothing asks for it
            self._starter.begin(replace(run, steps=self.first))
        self._numbers = OwnNumbers(run)
        self._worker = Worker(run.exchange.comm.ledger)
        if self.delay and run.exchange.ranks > 1:  # now, or the first ranks to send would wait for the others then
            run.exchange.comm.twin().release()

    first = property(lambda self: first_step(self, "start"))

    def _in_rounds(self, run: Run, number: int) -> Run:
        """Give ``run`` the length of this one in rounds of fragment ``number``."""
        lengths = (self.run.steps, self.run.began)
        steps, began = (length and self._timetable.round(number, length - self.first) + 1 for length in lengths)
        return replace(run, steps=steps, began=began)

    # What other parts ask.

    def describe(self) -> Card:
        outer, start = self._outer.describe(), self._starter.card
        streams = self.fragments > 1 or self.delay > 0
        of_weights = StateKind(resized="shard", of_weights=True)
        kinds = {
            "anchor": of_weights, "outer momentum": of_weights,
            OWN_WEIGHT: replace(MEAN if streams else SHARD, own="anchor"), f"{OWN_MOMENT}*": replace(MEAN, own="none"),
            "missed": EQUAL, "lost": EQUAL, "due": EQUAL, "merge at": EQUAL,
        }  # fmt: skip
        of_start = {**start.state_kinds, "*": StateKind()}
        kinds |= {f"{START}{kind}": replace(entry, one_row=start.summed_by_network) for kind, entry in of_start.items()}
        shared = {kind: replace(word, rank_equal=False) for kind, word in outer.state_kinds.items()}
        return replace(
            outer, promise=self._promise(outer.promise), group=start.group,
            summed_by_network=start.summed_by_network, bytes_follow_data=outer.bytes_follow_data or
            start.bytes_follow_data, keeps_state=True, adds_up=True, encodes_weights=False,
            native=False,  # of the kernels, which are the outer method's
            takes_dense=True,  # what stays dense waits for the round, too
            instead_at_scale=str(replace(self, outer=instead)) if (instead := outer.instead_at_scale) else "",
            alone_from=self.first, round_steps=self.every, steady=self.first + outer.steady * self.every,
            cycle=self._timetable.cycle(outer.cycle), common="anchor" if streams else "", delay=self.delay,
            state_kinds={**shared, **kinds}, intra=None, carrier=self._outer,
        )  # fmt: skip

    def _promise(self, outer: Promise) -> Promise:
        waits = {f"{START}{kind}": weight for kind, weight in self._starter.card.promise.waits.items()}
        replaced = f"{1 - self.mix:.0%} of how far a rank moves in the delay, which what arrives replaces"
        lost = "; ".join(filter(None, (outer.lost, replaced if self.delay else "")))
        outer = CONSERVES if outer.kind == "exact" else outer
        return replace(outer, of="weights", lost=lost, waits={**outer.waits, **(waits if self.start else {})})

    @property
    def rank_equal(self) -> bool:
        return not (self._ranks_differ and find_entries(self.state, "anchor"))

    def policy(self, parameter: Parameter) -> str | None:
        return keep_dense(self._outer, parameter)

    def facts(self) -> dict[str, float]:
        lost = {"rounds that did not count": float(self._lost)} if self._lost else {}
        values: dict[str, list[float]] = {}
        for fragment in self._fragments:
            for name, value in fragment.method.facts().items():
                values.setdefault(name, []).append(value)
        return {**lost, **{name: fmean(of_fragments) for name, of_fragments in values.items()}}

    # A step.

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradients in the start; after it each rank keeps its own, and nothing is reduced."""
        if bucket.step < self.first - 1:
            self._starter.reduce(bucket, exchange)
        else:
            self._end_start(bucket, exchange)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradients in the start; after it, let the round's end deliver what waits."""
        if bucket.step < self.first:
            self._end_start(bucket, exchange)
        else:
            for fragment in self._fragments:
                fragment.deliver_next = True

    def _end_start(self, bucket: Bucket, exchange: Exchange) -> None:
        """Average the gradients in fp32, together with all that waits."""
        waits = {f"{START}{kind}": weight for kind, weight in self._starter.card.promise.waits.items()}
        send_all(waits, self.state, bucket, exchange)

    def before_step(self, step: Step) -> None:
        if step.number < self.first:
            return
        self._check_restored()
        for optimizer in step.optimizers:
            is_checked = self._is_checked.get(optimizer)
            if is_checked is None or not is_checked(optimizer.state):  # at first, and where one was loaded
                self._is_checked[optimizer] = partial(operator.is_, optimizer.state)
                check_patchwork(self.name, optimizer, self.run.exchange.ranks if self.second_moment == "mean" else 1)
        self._copy_shared_weights()
        self._numbers.watch(step)
        if self.second_moment == "mean":
            step_by_mean_moment(step, self.run.exchange.ranks)

    def after_step(self, step: Step) -> None:
        if step.number in (self.first, self.first + 1):  # some optimizers add to their state behind all hooks
            list(own_moments(self.run))  # refuses what cannot be saved
        if step.number >= self.first:
            self._count_step(step)

    def after_skip(self, step: Step) -> None:
        """Count the skipped step as one of the round's. (In the start all ranks skip it, or it is taken again.)"""
        if step.number >= self.first:
            self._copy_shared_weights()
            self._count_step(step)
        elif step.failed():
            return
        self.missed += 1

    def _copy_shared_weights(self) -> None:
        """Copy W, which all ranks hold, before the run's first local step and the first one after ``reset``."""
        self._drop_saved()
        if find_entries(self.state, "anchor") or not any(fragment.anchors for fragment in self._fragments):
            return
        for kind in self._starter.card.promise.waits:
            self._starter.state.drop(kind)
        for kind, name, _ in find_entries(self.state, START):
            self.state.keep(kind, name, None)
        self._merge_at = 0
        for fragment in self._fragments:
            fragment.sgd.state.clear()  # of weights that are no more
            for name, anchor in fragment.anchors.items():
                anchor.data = local(self.run.weights[name]).detach().to(torch.float32, copy=True).contiguous()
                self.state.keep("anchor", name, anchor.detach())

    def _local_step(self, number: int) -> int:
        """Number, from 1, the local step that is the optimizer's step ``number``; skipped ones count."""
        return number + self.missed + 1 - self.first

    def _count_step(self, step: Step) -> None:
        """Count a step, taken or skipped; end the rounds that end with it."""
        past = self._local_step(step.number)
        last = self.first + past == self.run.steps
        ending = range(len(self._fragments)) if last else self._due(past)
        arrives = self._merge_at != 0 and (last or past >= abs(self._merge_at))
        differ = not (last or (ending and len(self._fragments) == 1 and not self.delay))
        self._ranks_differ = differ
        anchor = next((anchor for fragment in self._fragments for anchor in fragment.anchors.values()), None)
        if anchor is None or not (ending or arrives):
            return
        with self.run.exchange.span("exposed", anchor):
            if arrives:
                self._merge(step)
            for number in ending:
                if last or not self.delay:
                    self._end_round(step, number)
                else:
                    self._send(step, number, past)
        self._ranks_differ = differ  # whatever was loaded meanwhile, as replicas came or went

    def _due(self, past: int) -> Sequence[int]:
        """List the numbers of the fragments whose round the local step ``past`` ends: one at most."""
        return [number for number in self._timetable.due(past) if number < len(self._fragments)]

    # A round.

    def _end_round(self, step: Step, number: int) -> None:
        """Average D of fragment ``number`` (l. 10-11), take the outer step (l. 12), and set w_n = W.

        If a replica is lost in it, those that are left try again with the same D, until it counts.
        """

        def average(steps: int) -> Averaged:
            fragment = self._fragments[number]  # a new one where replicas have just met
            rounds = self._timetable.round(number, self._local_step(steps))
            moved = fragment.begin_round(step.weights)
            norm = torch.linalg.vector_norm(moved)  # before a codec hides what is not finite
            return Averaged(rounds, norm, fragment.average(moved, rounds, self.run.exchange))

        while True:
            averaged = step.attempt(average)
            if self._conclude(self._fragments[number], averaged, step.agree):
                break
            if not step.failed():
                self._lost += 1
                break
        self._set(step, self._fragments[number], 0.0)

    def _conclude(self, fragment: Fragment, averaged: Averaged | None, agree: Callable[..., bool]) -> bool:
        """Take the outer step (l. 12) if the round counts; return whether it does."""
        if agree([] if averaged is None else [averaged.norm, averaged.mean]) and averaged is not None:
            fragment.state.commit()
            fragment.step(averaged.mean, averaged.number)
            for name, momentum in fragment.momenta().items():
                self.state.keep("outer momentum", name, momentum)
            return True
        fragment.undo()
        return False

    def _set(self, step: Step, fragment: Fragment, mix: float) -> None:
        """Set w_n to ``mix`` w_n + (1 - ``mix``) W."""
        for name, anchor in fragment.anchors.items():
            weight = local(step.weights[name].detach())
            weight.copy_(torch.lerp(anchor.detach(), weight.float(), mix) if mix else anchor.detach())

    # A round beside the next steps.

    def _send(self, step: Step, number: int, past: int) -> None:
        """Let D of fragment ``number`` leave, which is back ``delay`` steps after the local step ``past``."""
        fragment, exchange = self._fragments[number], self.run.exchange
        rounds = self._timetable.round(number, past)
        moved = fragment.begin_round(step.weights)
        norm = torch.linalg.vector_norm(moved)  # before a codec hides what is not finite
        self._merge_at = past + self.delay
        twin = exchange.comm.twin() if exchange.ranks > 1 else exchange.comm
        if twin is exchange.comm:
            with twin.beside():
                mean = fragment.average_and_agree(moved, norm, rounds, exchange)
            if not self._conclude(fragment, Averaged(rounds, norm, mean), step.agree_inside):
                self._lost, self._merge_at = self._lost + 1, -self._merge_at
            return
        fragment.state.leave(OWN_KINDS, self._outer.card.offloaded_kinds)
        average = partial(fragment.average_and_agree, moved, norm, rounds, on_comm(exchange, twin))
        future = self._worker.submit(average, moved.device, last=False)
        self._journey = Journey(fragment, rounds, twin, moved, norm, future, step.agree_inside)

    def _land(self, *, forget: bool = False) -> None:
        """Wait for the round under way, if any, and take its outer step, or ``forget`` what it brings. Collective."""
        if self._journey is None:
            return
        journey, self._journey = self._journey, None
        fragment = journey.fragment
        try:
            averaged = Averaged(journey.number, journey.norm, journey.mean.wait())
            journey.twin.release()
            if not forget and not self._conclude(fragment, averaged, journey.agree):
                self._lost, self._merge_at = self._lost + 1, -self._merge_at
        finally:
            if forget:
                fragment.method.undo()
                fragment.state.forget()
            else:
                fragment.state.come_back()
            self._worker.close()

    def _merge(self, step: Step) -> None:
        """Mix the merged weights of the round that was sent into this rank's own."""
        self._land()
        for number in self._due(abs(self._merge_at) - self.delay):
            self._set(step, self._fragments[number], self.mix if self._merge_at > 0 else 0.0)
        self._merge_at = 0

    # Taking a step back, saving and loading.

    def undo(self) -> None:
        for fragment in self._fragments:
            if self._journey is None or self._journey.fragment is not fragment:
                fragment.method.undo()

    def finish(self) -> None:
        """Put this rank's own weights and moments into the state: the model's checkpoint does not hold them."""
        self._land()
        for kind, count in (("missed", self.missed), ("lost", self._lost), ("merge at", self._merge_at)):
            self.state.keep(kind, "", torch.tensor(count, device="cpu"))
        for fragment in self._fragments:
            fragment.method.finish()
            self.state.keep("due", fragment.label, torch.tensor(int(fragment.deliver_next), device="cpu"))
        if not find_entries(self.state, "anchor"):
            return
        for name, weight in self.run.weights.items():
            self.state.keep(OWN_WEIGHT, name, local(weight.detach()))
        for kind, name, value in own_moments(self.run):
            self.state.keep(f"{OWN_MOMENT}{kind}", name, value)
        self.state.keep(OWN_NUMBERS, "", self._numbers.save())

    def _drop_saved(self) -> None:
        """Drop the weights and moments that ``finish`` put there: the model and the optimizer hold them."""
        for kind, name, _ in [*find_entries(self.state, OWN_WEIGHT), *find_entries(self.state, OWN_MOMENT)]:
            self.state.keep(kind, name, None)

    def state_changed(self) -> None:
        """Restore W, its momentum, and this rank's own weights and moments from a checkpoint."""
        self._land(forget=True)
        counts = (self.state.get(kind, "") for kind in ("missed", "lost", "merge at"))
        self.missed, self._lost, self._merge_at = (0 if count is None else int(count) for count in counts)
        for kind, name, saved in find_entries(self.state):
            if kind in ("anchor", "outer momentum", OWN_WEIGHT):
                check_saved_shape(self.run, kind, name, saved)
        for fragment in self._fragments:
            fragment.method.state_changed()
            deliver_next = self.state.get("due", fragment.label)
            fragment.deliver_next = deliver_next is not None and bool(deliver_next)
            fragment.sgd.state.clear()
            for name, anchor in fragment.anchors.items():
                if (saved_anchor := self.state.get("anchor", name)) is not None:
                    anchor.data = saved_anchor
                if (momentum := self.state.get("outer momentum", name)) is not None:
                    fragment.sgd.state[anchor]["momentum_buffer"] = momentum
        self._ranks_differ = False
        self._restored = None
        anchors = {name: anchor for fragment in self._fragments for name, anchor in fragment.anchors.items()}
        for _, name, saved in find_entries(self.state, OWN_WEIGHT):
            local(self.run.weights[name].detach()).copy_(saved)
            self._ranks_differ |= not torch.equal(saved, anchors[name].detach().to(saved.dtype))
        holders = self.run.holders
        for kind, name, saved in find_entries(self.state, OWN_MOMENT):
            if kind == OWN_NUMBERS:
                self._numbers.restore(saved)
                continue
            restore_moment(self.run.weights[name], holders[name], kind.removeprefix(OWN_MOMENT), name, saved)
        if find_entries(self.state, OWN_MOMENT):
            self._restored = Fingerprint(lambda: [value for _, _, value in own_moments(self.run) if value.dim()])
            self._restored.take()
        self._drop_saved()

    def _check_restored(self) -> None:
        """Refuse the first step after a load if the moments are no more those that it has restored."""
        if self._restored is not None and self._restored.differs():
            raise ThinwireError(
                f"{self.name}: the optimizer's moments are not those of this rank, as its state was loaded after the "
                "wire's, which holds them: load the wire last"
            )
        self._restored = None
