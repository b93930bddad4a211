"""Fragments: parameters that meet in rounds of their own, while the ranks step alone (local-steps)."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.core.bucket import Bucket, Piece
from thinwire.core.exchange import Exchange
from thinwire.core.method import Fp32, Method, bucket_of
from thinwire.core.run import Parameter, Run, Step
from thinwire.core.selection import dense_among
from thinwire.core.state import State, move_entries
from thinwire.network.comm import local


class FragmentState:
    """The memory of a fragment's method: a part of the whole, in which its values without a parameter have a name.

    While the fragment is exchanged beside the ranks' steps, which commit or take back the whole, it is a ``State`` of
    its own.
    """

    def __init__(self, whole: State, label: str, names: Collection[str]) -> None:
        """``label``: stands for the parameter of values that belong to none. ``names``: the fragment's parameters."""
        self._whole = self._present = whole
        self._label, self._names = label, {*names, label}

    def __getattr__(self, member: str) -> Any:
        return getattr(self._present, member)

    def get(self, kind: str, name: str) -> Tensor | None:
        return self._present.get(kind, name or self._label)

    def put(self, kind: str, name: str, value: Tensor | None) -> None:
        self._present.put(kind, name or self._label, value)

    def keep(self, kind: str, name: str, value: Tensor | None) -> None:
        self._present.keep(kind, name or self._label, value)

    def leave(self, without: tuple[str, ...], offload: Collection[str]) -> None:
        """Take the fragment's values out of the whole, ``without`` the kinds that begin so."""
        self._present = State(offload)
        move_entries(self._whole, self._present, self._names, without)

    def come_back(self) -> None:
        """Put them back; what was not committed is forgotten."""
        self._present.rollback()
        move_entries(self._present, self._whole, self._names)
        self._present = self._whole

    def forget(self) -> None:
        """Forget what left the whole, which holds other values now."""
        self._present = self._whole


@dataclass(frozen=True)
class Timetable:
    """The steps in which ``fragments`` meet, each once in ``every`` steps; a step's number counts from 1."""

    every: int
    fragments: int
    delay: int

    def offset(self, fragment: int) -> int:
        """Return the first step that ends with a round of ``fragment``; the last fragment's is ``every``."""
        return (fragment + 1) * self.every // self.fragments

    def due(self, step: int) -> list[int]:
        """List the fragments whose round ``step`` ends: one at most."""
        return [number for number in range(self.fragments) if (step - self.offset(number)) % self.every == 0]

    def round(self, fragment: int, step: int) -> int:
        """Number, from 0, the round of ``fragment`` that ends with ``step``, by itself or as the run ends."""
        return max(-(-(step - self.offset(fragment)) // self.every), 0)

    def cycle(self, rounds: Mapping[int, float]) -> dict[int, float]:
        """Return steps, counted from the first, that represent all, with each one's share.

        ``rounds``: the same for the rounds of a fragment. Where all are alike the second represents them, and a step
        without a round is one of it: the first step copies the weights, the first round begins the outer momentum.
        """
        rounds = rounds if len(rounds) > 1 else {1: 1.0}
        meeting = {(self.offset(number) - 1) % self.every for number in range(self.fragments)}
        merging = {(step + self.delay) % self.every for step in meeting} - meeting if self.delay else set()
        busy = {*meeting, *merging}
        quiet = [self.every + step for step in range(self.every) if step not in busy]
        shares = {quiet[0]: len(quiet) / self.every} if quiet else {}
        for number, share in rounds.items():
            for fragment in range(self.fragments):
                ends = number * self.every + self.offset(fragment) - 1
                shares[ends] = share / self.every
                if (ends + self.delay) % self.every in merging:
                    shares[ends + self.delay] = share / self.every
        return shares


class Fragment:
    """Some parameters that meet in rounds of their own: a run of ``method`` whose weights are W and steps the rounds.

    Attributes:
        anchors: W, the weights that all ranks share, by name, float32; without memory before the first local step.
        method: averages what the ranks have moved. sgd: the outer optimizer, of the anchors.
        label: of what belongs to this fragment and to no parameter. deliver_next: the next round to begin delivers all
            that waits.
    """

    def __init__(self, number: int, method: Method, run: Run, names: Collection[str], lr: float, mu: float) -> None:
        """``run``: the ranks' own; its steps are rounds. ``lr``, ``mu``: of the outer SGD, with Nesterov's momentum."""
        self.label, self._run = str(number) if number else "", run
        self.method, self.deliver_next, self._delivers = method, False, False
        # They have no memory of their own until the first local step.
        self.anchors = {
            name: nn.Parameter(
                torch.zeros((), dtype=torch.float32, device=local(weight).device).expand(local(weight).shape)
            )
            for name, weight in run.weights.items()
            if name in names
        }
        self.sgd = torch.optim.SGD([{"params": list(self.anchors.values())}], lr=lr, momentum=mu, nesterov=mu > 0)
        parameters = {name: parameter for name, parameter in run.parameters.items() if name in names}
        method.begin(replace(run, parameters=parameters, optimizers=(self.sgd,), weights=self.anchors))
        self._buckets: list[tuple[Method, Bucket, slice]] = []

    def remember(self, whole: State) -> None:
        """Let the method's memory be a part of ``whole``."""
        self.state = FragmentState(whole, self.label, self.anchors)
        self.method.state = cast(State, self.state)

    def begin_round(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Begin a round: return W - w_n of all parameters, (P,) float32, as the buckets lie; the padding is 0."""
        self._delivers, self.deliver_next = self.deliver_next, False
        if not self._buckets:
            self._buckets = self._make_buckets()
        moved = torch.zeros(self._buckets[-1][2].stop, dtype=torch.float32, device=self._buckets[0][1].device)
        for name, values in self._views(moved):
            weight = local(weights[name].detach())
            values.copy_(self.anchors[name].detach().to(weight.dtype)).sub_(weight)
        return moved

    def average(self, moved: Tensor, number: int, exchange: Exchange) -> Tensor:
        """Average ``moved`` (P,) over the ranks of ``exchange`` in round ``number``, in place."""
        with torch.no_grad():
            for method, bucket, columns in self._buckets:
                bucket.step = number
                bucket.load(moved[columns], moved[columns])
                delivers = self._delivers and method is self.method
                (method.deliver if delivers else method.reduce)(bucket, exchange)
                bucket.store(moved[columns])
                bucket.release()
        return moved

    def average_and_agree(self, moved: Tensor, norm: Tensor, number: int, exchange: Exchange) -> Tensor:
        """Average as ``average`` does; NaN on all ranks if the ``norm`` of its own, or a mean, is not finite on one.

        So no rank waits for the others once more as it takes up what has arrived.
        """
        mean = self.average(moved, number, exchange)
        spoilt = ~torch.stack([norm, torch.linalg.vector_norm(mean)]).isfinite().all()
        return mean.masked_fill_(exchange.all_max(spoilt.float().reshape(1)) > 0, torch.nan)

    def step(self, mean: Tensor, number: int) -> None:
        """Take the outer optimizer's step along ``mean`` (P,), with the method's hooks around it."""
        for name, values in self._views(mean):
            if self._run.weights[name].requires_grad:
                self.anchors[name].grad = values
            else:  # without its momentum, it is moved by what ranks had moved it before it was frozen
                self.anchors[name].data.sub_(values, alpha=self.sgd.param_groups[0]["lr"])
        step = Step(number, (self.sgd,), self.anchors)
        self.method.before_step(step)
        self.sgd.step()
        step.restore()
        self.method.after_step(step)
        self.sgd.zero_grad()
        self.state.commit()

    def undo(self) -> None:
        """Forget the round, which does not count."""
        self.state.rollback()
        self.method.undo()
        self.deliver_next |= self._delivers

    def momenta(self) -> dict[str, Tensor]:
        """Return the outer momentum by parameter; {} before the first step and without momentum."""
        buffers = {name: self.sgd.state.get(anchor, {}).get("momentum_buffer") for name, anchor in self.anchors.items()}
        return {name: momentum for name, momentum in buffers.items() if momentum is not None}

    def _make_buckets(self) -> list[tuple[Method, Bucket, slice]]:
        """Make a bucket of compressed and one of dense parameters, each with its method and slice of D."""
        pairs: list[tuple[Method, Bucket, slice]] = []
        end = 0
        parameters = [self._run.parameters[name] for name in self.anchors]
        dense_names = dense_among(self.method, parameters)
        sent = [parameter for parameter in parameters if parameter.name not in dense_names]
        for method, members in ((self.method, sent), (Fp32(), [p for p in parameters if p.name in dense_names])):
            first, pieces = end, []
            for parameter in members:
                pieces.append(Piece(parameter.name, end - first, parameter.local))
                end += parameter.local
            if pieces:
                bucket = bucket_of(method, pieces, self._run.exchange, self.anchors[pieces[0].name].device)
                pairs.append((method, bucket, slice(first, end)))
        return pairs

    def _views(self, flat: Tensor) -> list[tuple[str, Tensor]]:
        """List each parameter's name and its values in ``flat`` (P,), in its shape on this rank."""
        views = []
        for _, bucket, columns in self._buckets:
            for segment in bucket.segments:
                shape = self.anchors[segment.name].shape
                views.append((segment.name, flat[columns][segment.piece.offset :][: shape.numel()].view(shape)))
        return views


def split(parameters: Mapping[str, Parameter], count: int) -> list[list[str]]:
    """Split the names of ``parameters`` into ``count`` fragments by layer, or into as many as there are layers.

    A layer is all below the first number in a name (``layers.3``), or a module outside of such. Each goes to the
    fragment with the fewest values so far: layers of one size are dealt out in turn (strided).
    """
    if count == 1:
        return [list(parameters)]
    layers: dict[str, list[Parameter]] = {}
    for parameter in parameters.values():
        numbered = re.match(r"(.*?\.)?\d+(?=\.)", parameter.name)
        layer = numbered[0] if numbered else parameter.name.rpartition(".")[0] or parameter.name
        layers.setdefault(layer, []).append(parameter)
    fragments: list[list[str]] = [[] for _ in range(min(count, len(layers)))]
    sizes = [0] * len(fragments)
    for members in layers.values():
        smallest = sizes.index(min(sizes))
        fragments[smallest] += [parameter.name for parameter in members]
        sizes[smallest] += sum(parameter.numel for parameter in members)
    return fragments
