"""Replicas that come and go: what becomes of a wire's state when they do.

* Who stays keeps what waits on it (``resize.regroup``): the sum over those that stay is conserved.
* Who leaves takes what waited on it along. It is counted as lost, by the last norm that all had agreed on.
* Who joins gets weights, moments, the step, and what all hold alike from a replica that goes on; its own residual is
  zero, and its averages begin as that replica's.
* Who is behind, because it alone did not count a step that others counted, gets the same, and keeps its own residual:
  the one *after* that step if the others had counted this very attempt, with what it sent in it, else the one before.

An attempt has a name: the step's number and the membership's, which changes after every failure. Each replica keeps
the names of those that counted (``_history``), and hands them to who joins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import FailedExchange, ThinwireError
from thinwire.core.members import Members
from thinwire.core.road import Stage
from thinwire.core.run import Run
from thinwire.core.state import dump_state, load_state, written_rows
from thinwire.core.step import StepLoop
from thinwire.network.comm import Comm, local
from thinwire.network.membership import Membership
from thinwire.saved.format import Header
from thinwire.saved.resize import has_rows, kind_of, regroup


@dataclass(frozen=True)
class _Doubt:
    """An attempt that others may have counted: its step, its membership's number, and this rank's rows after it."""

    step: int
    number: int
    rows: Mapping[str, Tensor]


@dataclass(frozen=True)
class Loss:
    """What waited on a replica that left: its name, the step after which it was missed, and the norm that was lost."""

    name: str
    step: int
    norm: float


class Turnover:
    """The state of one wire over the changes of its membership.

    Attributes:
        met: has it ever asked who takes part? asked: has it, since the last vote? behind: was this replica behind the
            others when it last asked? healed: how often it was.
    """

    def __init__(
        self, members: Members, comm: Comm, step_loop: StepLoop, stage: Stage, run: Run, header: Header,
        renew: Callable[[Header, Run], None],
    ) -> None:  # fmt: skip
        """``renew`` is called with the new header and run when the membership has changed."""
        self._members, self._comm, self._loop, self._stage, self._run = members, comm, step_loop, stage, run
        self._header, self._renew, self._method = header, renew, stage.method
        self._engine: Any = step_loop.engine
        self._history: list[tuple[int, int]] = []  # (first step, number) of the attempts that counted
        self._doubt: _Doubt | None = None
        self._received: Mapping[str, Any] | None = None
        self._norms: dict[str, float] = {}  # by replica: the norm of what waited after the last step
        self._losses: dict[str, Loss] = {}
        self.met = self.behind = self.asked = False
        self.healed = 0
        members.offer(self.give, self._take)

    @property
    def losses(self) -> list[Loss]:
        """What replicas that left, and did not come back, took along."""
        return list(self._losses.values())

    # Around an attempt.

    def meet(self, unsent: FailedExchange | None = None) -> bool:
        """Ask who takes part, and go on as they say. Return whether gradients were taken at weights that are gone.

        ``unsent``: the error of what the method sent when its last step counted already. Others may have received it,
        so all have to find it anew: a change of the membership sees to it, or else this attempt fails, and changes it.

        Raises:
            FailedExchange: a replica was lost meanwhile.
        """
        if self.asked:  # an exchange in two parts is one attempt
            return False
        try:
            self._method.finish()
        except FailedExchange as error:
            unsent = error
        membership = self._members.ask()
        if self.met and membership.number == self._comm.membership.number and self._received is None:
            if unsent is not None:
                raise unsent
            self.asked, self.behind = True, False
            return False
        received, self._received = self._received, None
        self._count_losses(membership)
        stale = self._change(membership, received)
        self.met = self.asked = True
        self.behind = received is not None and self._stage.step > 0
        self.healed += self.behind
        return stale

    @property
    def branch(self) -> tuple[int, int]:
        """The steps that have counted here, and the number of the membership in which the last of them did.

        A manager tells replicas apart by their steps alone. A replica that counted a step and was then away comes back
        with as many as the others, who took that step again without it.
        """
        return self._stage.step, self._history[-1][1] if self._history else -1

    def waiting(self) -> float:
        """Return the norm of what waits on this rank if the step counts: of its part of the mean times N."""
        waits, kinds, squares = self._method.card.promise.waits, self._method.card.state_kinds, 0.0
        for key, rows in written_rows(self._method.state).items():
            kind = key.partition("/")[0]
            if kind in waits:
                times = self._comm.size if kind in kinds and kinds[kind].served else 1
                squares += (times * waits[kind] * float(torch.linalg.vector_norm(rows))) ** 2
        return math.sqrt(squares)

    def agreed(self, counted: bool, finite: bool, waiting: Sequence[float]) -> None:
        """Note the outcome of an attempt, with the norm of what waits on each rank."""
        self.asked = False
        if counted and finite:
            membership = self._comm.membership
            if not self._history or self._history[-1][1] != membership.number:
                self._history.append((self._stage.step, membership.number))
            self._norms = dict(zip(membership.names, waiting, strict=True))

    def doubt(self) -> None:
        """Keep what this rank's rows will be if it turns out that others have counted the attempt."""
        rows = {key: value.clone() for key, value in written_rows(self._method.state).items()}
        self._doubt = _Doubt(self._stage.step, self._comm.membership.number, rows)

    # What a replica gives to one that is behind.

    def give(self) -> dict[str, Any]:
        """Return what a replica that joins needs of this one, on the CPU."""
        values = {key: value for key, value in dump_state(self._method.state).items() if not self._is_own(key)}
        values = {key: value.cpu() for key, value in values.items()}
        model = self._engine.model
        return {
            "about": self._header.dump(), "values": values, "history": list(self._history), "step": self._stage.step,
            "skipped": self._loop.skipped, "flush": self._stage.flush_at, "bound": self._bound(),
            "weights": {name: local(value).detach().cpu().clone() for name, value in _tensors(model)},
            "optimizers": [_to_cpu(_state_of(optimizer)) for optimizer in self._run.optimizers],
        }  # fmt: skip

    def _take(self, received: Mapping[str, Any]) -> None:
        self._received = received

    def _is_own(self, key: str) -> bool:
        """Does a replica that joins begin without what is at ``key``: what waits, and what is one rank's alone?"""
        kind = key.removeprefix("=").partition("/")[0]
        entry = kind_of(self._method.card.state_kinds, kind)
        return (has_rows(key) and (kind in self._method.card.promise.waits or entry.served)) or entry.own

    def _bound(self) -> dict[str, Tensor]:
        return {} if self._stage.bound is None else self._stage.bound.state_dict()

    # A change.

    def _change(self, membership: Membership, received: Mapping[str, Any] | None) -> bool:
        self._comm.take(membership)
        rank, ranks = self._engine.place
        hops = (*self._header.hops[:-1], (membership.rank, membership.size, False))
        new = replace(self._header, rank=rank, ranks=ranks, hops=hops)
        values, bound, stale = dump_state(self._method.state), self._bound(), False
        step, skipped, flush = self._stage.step, self._loop.skipped, self._stage.flush_at
        if received is None:
            values = regroup(values, self._header, new, self._method)
        else:
            peer = Header.load("about", received["about"])
            if unlike := new.unlike_run(peer):
                raise ThinwireError(f"this replica does not fit the run that it wants to join: {unlike}")
            own_rows = self._own_rows(received["history"], received["step"], values)
            peer_values = {key: value for key, value in received["values"].items() if key not in own_rows}
            values = regroup(peer_values, peer, new, self._method) | regroup(own_rows, self._header, new, self._method)
            step, skipped, flush = received["step"], received["skipped"], received["flush"]
            bound, self._history = received["bound"], list(received["history"])
            stale = self._load(received)
        self._doubt, self._header = None, new
        self._loop.reset()
        self._stage.step, self._loop.skipped, self._stage.flush_at = step, skipped, flush
        if self._stage.bound is not None:
            self._stage.bound.load_state_dict(dict(bound))
        self._run = replace(self._run, rank=rank)
        self._stage.renew()
        self._method.begin(self._run)
        device = next(iter(self._run.weights.values())).device
        load_state(self._method.state, {key: _place(key, value, device) for key, value in values.items()})
        self._method.state_changed()
        self._loop.weight_watch.trust()
        self._renew(new, self._run)
        return stale

    def _own_rows(
        self, history: Sequence[tuple[int, int]], reached: int, values: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return this rank's own rows, of ``values`` or of the attempt in doubt, given the attempts that counted for
        those who are ahead, with ``reached`` steps. Empty: it has none, or what it counted was taken again."""
        doubt, step = self._doubt, self._stage.step
        if doubt is not None and doubt.step < reached and number_at(history, doubt.step) == doubt.number:
            values = doubt.rows
        elif not self._history:
            return {}
        elif number_at(history, step - 1) != self._history[-1][1]:
            name = f"{self._comm.membership.names[self._comm.rank]}, whose steps were taken again"
            self._losses[name] = Loss(name, step, self._norms.get(self._comm.membership.names[self._comm.rank], 0.0))
            return {}
        return {key: value for key, value in values.items() if has_rows(key)}

    @torch.no_grad()
    def _load(self, received: Mapping[str, Any]) -> bool:
        """Load weights and moments; return whether the weights are others than before."""
        changed = False
        for name, value in _tensors(self._engine.model):
            weight, peer_weight = local(value).detach(), received["weights"][name]
            if not torch.equal(weight.cpu(), peer_weight):
                changed = True
                weight.copy_(peer_weight)
        for optimizer, state in zip(self._run.optimizers, received["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        return changed

    def _count_losses(self, membership: Membership) -> None:
        former, present = set(self._comm.membership.names), set(membership.names)
        for name in former - present:
            self._losses[name] = Loss(name, self._stage.step, self._norms.get(name, 0.0))
        for name in present:
            self._losses.pop(name, None)


def number_at(history: Sequence[tuple[int, int]], step: int) -> int | None:
    """Return the number of the membership in which ``step`` counted."""
    return next((number for first, number in reversed(history) if first <= step), None)


def _tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return local(value).detach().cpu().clone()
    if isinstance(value, dict):
        return {key: _to_cpu(entry) for key, entry in value.items()}
    return type(value)(_to_cpu(entry) for entry in value) if isinstance(value, list | tuple) else value


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` without moments that are made for it, of parameters that the method steps."""
    state = optimizer.state_dict()
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    moments = {number: entry for number, entry in state["state"].items() if weights[number] in optimizer.state}
    return {**state, "state": moments}


def _place(key: str, value: Tensor, device: torch.device) -> Tensor:
    """Put a value where its method wants it: counters, which it reads, on the host."""
    counts = key.startswith("=") and value.numel() == 1 and not value.is_floating_point()
    return value.cpu() if counts else value.to(device)
