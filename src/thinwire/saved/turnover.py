"""Replicas that come and go: what becomes of a wire's state when they do.

* Who stays keeps what waits on it (``resize.regroup``). Who leaves takes it along: it is counted as lost.
* Who joins gets weights, moments, the step, what all hold alike, and averages from a replica that goes on, and no
  residual. Who is behind, because it alone did not count a step that others counted, keeps its own: the one *after*
  that step if the others counted this very attempt, with what it sent in it, else the one before.
* Who joins may hold a state already, which it fetched while the others went on (``saved/tape.py``): before it asks, it
  takes their steps again, as a spare that hears one of them; what is missing or differs then comes as if it held none.

An attempt is named by the step's number and the membership's, which changes after every failure (``_history``).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from thinwire.base.errors import FailedExchange, ThinwireError, Unanswered
from thinwire.core.card import StateKind
from thinwire.core.optimizers import parameters
from thinwire.core.road import Stage
from thinwire.core.run import Run
from thinwire.core.state import dump_state, load_state, written_rows
from thinwire.core.step import StepLoop, split_counts
from thinwire.engines.replicas import any_of, fewest, without_frames
from thinwire.network.comm import Comm, Membership, local
from thinwire.saved.format import Header
from thinwire.saved.resize import has_rows, kind_of, regroup
from thinwire.saved.tape import Entry, Tape

SHARE = 8
"""The messages of a step are to be so much smaller than the state, or it takes longer to follow than to fetch it."""
FORMS = ("foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer by which no step differs, but for rounding."""
History = Sequence[tuple[int, int]]  # (steps over before, number of the membership) of attempts that counted


class Loss(NamedTuple):
    """The values that waited on a replica that left. step: after which it was missed. norm: of the values."""

    name: str
    step: int
    norm: float


class Held(NamedTuple):
    """The state that who joins has already: ``equal``, where it should equal the others', and ``apart``, where each has
    its own. Both as ``Turnover.give`` returns it."""

    equal: Mapping[str, Any]
    apart: Mapping[str, Any]


class _WentAnotherWay(Exception):
    """A step that is taken again is not what was heard of it."""


class _Heard:
    """The members of a step that is taken again: as ``entry`` says, and it has counted."""

    def __init__(self, entry: Entry) -> None:
        self._membership, self.counted = _spare_of(*entry.membership), False
        self._asked = False

    def ask(self) -> tuple[Membership, None]:
        if self._asked:  # a round that failed asks again, until it counts
            raise _WentAnotherWay
        self._asked = True
        return self._membership, None

    def vote(self, counts: bool) -> bool:
        self.counted = counts
        return counts

    def fall_behind(self) -> None: ...


def _seat(member: Membership) -> tuple[int, tuple[int, ...], int, tuple[str, ...]]:
    return member.rank, member.nodes, member.number, member.names


def _spare_of(rank: int, nodes: Sequence[int], number: int, names: Sequence[str]) -> Membership:
    """Make the membership of a spare that hears ``rank``."""
    return Membership(rank, tuple(nodes), number, tuple(names), 1, 0)


class Turnover:
    """The state of one wire over the changes of its membership.

    Attributes:
        met: has it ever asked who takes part? asked: has it, since the last vote? meets_round: were the others, when it
            last asked, at the end of a round in which this replica has no part? healed: how often it took over the
            state of another. losses: by name, of replicas that left and did not come back.
        tape: for those that are about to join. follows: the tape of a replica that goes on
            (``adapters.transport.Follower``), which this one is to follow before it first asks. clip: takes part in
            a step as ``wire.clip_grad_norm_`` does. run_settings: the program's own that must be alike on all.
    """

    clip: Callable[[float, float], Any]
    follows: Any = None
    run_settings = ""

    def __init__(
        self, members: Any, comm: Comm, step_loop: StepLoop, run: Run, header: Header,
        renew: Callable[[Header, Run], None],
    ) -> None:  # fmt: skip
        """``renew`` is called with the new header and run when the membership has changed."""
        self._members, self._comm, self._loop, self._run = members, comm, step_loop, run
        self._stage: Stage = step_loop.road.last
        self._header, self._renew, self._method, self._model = header, renew, self._stage.method, step_loop.engine.model
        self._history: list[tuple[int, int]] = []
        self._doubt: tuple[int, int, Mapping[str, Tensor]] | None = None  # step, number, and our rows if others counted
        self._resumed: Mapping[str, Any] | None = None
        self._norms: dict[str, float] = {}  # by replica: the norm of what waited after the last step
        self.losses: dict[str, Loss] = {}
        self.met = self.meets_round = self.asked = self._ends_round = False
        self.healed = 0
        self.tape = Tape()
        self._entry: Entry | None = None  # of the attempt under way
        self._voted = False
        self._clips: list[tuple[float, ...]] = []  # of the step under way
        self._begun: Mapping[str, Any] | None = None  # the state from which this replica follows another
        members.offer(self.give, self._hold)

    def meet(self, unsent: FailedExchange | None = None, *, ends_round: bool = False) -> bool:
        """Ask who takes part, and go on as they say. Return whether gradients were taken at weights that are gone.

        ``unsent``: the error of what the method sent when its last step counted already. Others may have received it,
        so all have to find it anew: a change of the membership sees to it, or else this attempt fails, and changes it.
        ``ends_round``: this replica has taken steps alone, and now averages them.
        """
        if self.asked:  # an exchange in two parts is one attempt
            return False
        try:
            self._method.finish()
        except FailedExchange as error:
            unsent = error
        self._ends_round = ends_round
        if self.follows is not None and self._begun is None:
            self._catch_up()
        membership, fetched = self._members.ask()
        caught_up = not isinstance(self._members, _Heard) and self._arrive(fetched)
        self.meets_round = fetched is not None and fetched["ends_round"]
        received, self._resumed = self._resumed if fetched is None else fetched, None
        changed = not self.met or membership.number != self._comm.membership.number or received is not None
        if unsent is not None and not changed:
            raise unsent
        former, present = set(self._comm.membership.names), set(membership.names)
        self.losses |= {name: Loss(name, self._stage.step, self._norms.get(name, 0.0)) for name in former - present}
        self.losses = {name: loss for name, loss in self.losses.items() if name not in present}
        stale = changed and self._change(membership, received, from_peer=fetched is not None)
        self.met = self.asked = True
        self.healed += fetched is not None
        self._begin_entry()
        return stale or caught_up

    @property
    def _over(self) -> int:
        """The steps that are over: as many on all replicas, also where each skips steps alone."""
        return self._stage.step + self._method.missed

    @property
    def branch(self) -> tuple[int, int]:
        """The steps that are over here, and the number of the membership in which the last of them counted: who counted
        a step, and was then away while others took it again, has as many as they."""
        return self._over, self._history[-1][1] if self._history else -1

    def settings(self) -> dict[str, str]:
        """Return what must be alike on all replicas that take the step under way, by its name in an error."""
        settings = {"settings of the run": self.run_settings}
        if not self._method.card.alone(self._stage.step):
            groups = [{key: group[key] for key in optimizer.defaults if key in group and key not in FORMS}
                      for optimizer in self._run.optimizers for group in optimizer.param_groups]  # fmt: skip
            settings["settings of the optimizer"] = str(tree_map_only(Tensor, Tensor.tolist, groups))
            settings["limits of clip_grad_norm_"] = str(self._clips)
        return settings

    def waiting(self) -> float:
        """Return the norm of what waits on this rank if the step counts: of its part of the mean times N."""
        waits, squares = self._method.card.promise.waits, 0.0
        for key, rows in written_rows(self._method.state).items():
            if (kind := key.partition("/")[0]) in waits:
                times = self._comm.size if kind_of(self._method.card.state_kinds, kind).served else 1
                squares += (times * waits[kind] * float(torch.linalg.vector_norm(rows))) ** 2
        return math.sqrt(squares)

    def agreed(self, counted: bool, waiting: Sequence[float], *, voted: bool = False) -> None:
        """Note the outcome of an attempt, with the norm of what waits on each rank. voted: skipped, it has counted."""
        self.asked, membership, self._voted = False, self._comm.membership, voted
        if voted and self._entry is not None:
            settings = [[{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
                        for optimizer in self._run.optimizers]  # fmt: skip
            self._entry.groups = copy.deepcopy(settings)
            self._entry.delivers = self._stage.flush_at == self._stage.step or self._stage.round_delivers
        if counted:
            if not self._history or self._history[-1][1] != membership.number:
                self._history.append((self._over, membership.number))
            self._norms = dict(zip(membership.names, waiting, strict=True))

    def note_clip(self, *limits: float) -> None:
        """Note a call of ``wire.clip_grad_norm_``."""
        self._clips.append(tuple(map(float, limits)))
        if self._entry is not None:
            self._entry.clips.append((limits[0], limits[1]))

    def _begin_entry(self) -> None:
        """Begin to keep what is heard in the attempt under way, if somebody is about to join."""
        member, self._voted = self._comm.membership, False
        self._entry, self._comm.heard, self._comm.alike = None, None, 0
        if self.tape.runs and member.spare is None:
            self._entry = Entry(_seat(member), self._stage.step, self._loop.skipped)
            self._comm.heard = self._entry.heard

    def end_step(self) -> None:
        """Keep what was heard in the step that is over, if it has counted."""
        entry, self._entry, self._comm.heard, self._clips = self._entry, None, None, []
        if self._voted:
            self._voted = self._stage.round_delivers = False
            self.tape.add(entry, self._snapshot)

    def _snapshot(self) -> dict[str, Any] | None:
        """Return what who joins begins with, before it has met the others; None: it is better off without, as a step's
        messages are nearly as large, or this is a spare, which keeps none."""
        alone = self._method.card.alone(self._stage.step)
        moments = (entry for optimizer in self._run.optimizers for entry in optimizer.state.values())
        tensors = [value for value in tree_leaves([*moments, *self._run.weights.values()]) if isinstance(value, Tensor)]
        large = not alone and SHARE * self._comm.alike > sum(local(tensor).nbytes for tensor in tensors)
        if large or self._comm.membership.spare is not None:
            return None
        try:
            self._method.finish()
        except FailedExchange as error:  # for the next attempt
            self._loop.engine.unsent = without_frames(error)  # type: ignore[attr-defined]
            return None
        return {**self.give(), "alone": alone, "ends_round": False, "member": _seat(self._comm.membership)}

    # What a replica that joins does first.

    def _catch_up(self) -> None:
        """Take over the state that was fetched, and take the steps again that the others have counted since."""
        self._begun, self._resumed = self.follows.tree, None
        # An optimizer goes on with the very tensors that it is given.
        copied = {**self._begun, "optimizers": copy.deepcopy(self._begun["optimizers"])}
        self._change(_spare_of(*self._begun["member"]), copied, from_peer=True, hears=True)
        self._follow(10)

    def _follow(self, times: int) -> None:
        """Take the steps again that have been heard, ``times`` in a row if meanwhile there are more. If one of them
        goes another way, cease to follow: the others' state will come whole."""
        engine: Any = self._loop.engine
        gradients = [(weight, weight.grad) for weight in self._run.weights.values()]
        self.met = True
        for _ in range(times):
            entries, failed = self.follows.next(), False
            few = fewest(engine.inside, len(entries))
            try:
                for entry in entries[:few]:
                    self._take_again(entry)
                    self.follows.count += 1
            except Exception:  # whatever it is, on any rank
                failed = True
            if any_of(engine.inside, failed):
                self.follows.close()
            if not few or failed:
                break
        self.met, engine.unsent = False, None  # it has not asked the others yet
        for weight, gradient in gradients:
            weight.grad = gradient

    def _take_again(self, entry: Entry) -> None:
        """Take the step of ``entry`` as a spare does. Raises an error if what was heard does not fit."""
        engine: Any = self._loop.engine
        stage, optimizers = self._stage, self._run.optimizers
        heard, members = _Heard(entry), self._members
        self._members = engine.members = heard
        self._comm.played = iter(entry.heard)
        for optimizer, groups in zip(optimizers, entry.groups, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        if self._method.card.alone(entry.step):  # the round's other steps have no part in what all hold
            self._loop.road.step = entry.step + entry.skipped - self._loop.skipped
        stage.flush_at = stage.step if entry.delivers else None
        try:
            for weight in self._run.weights.values():
                weight.grad = torch.zeros_like(weight)
            for limits in entry.clips:
                self.clip(*limits)
            for optimizer in optimizers:
                optimizer.step()
            if not heard.counted or engine.unsent is not None or next(self._comm.played, None) is not None:
                raise _WentAnotherWay
        finally:
            self._members = engine.members = members
            self._comm.played, stage.round_delivers = None, False

    def _hold(self) -> Held | None:
        """Take the others' last steps again, and return what this replica has of their state."""
        if self._begun is None:
            return None
        self._follow(1)
        self._method.finish()
        state, alone = self.give(), self._method.card.alone(self._stage.step)
        if self.follows.closed:  # what it began with may be old
            return Held(state, {})
        values = {key: value for key, value in self._begun["values"].items() if self._entry_of(key).apart}
        apart = {"values": values, "weights": state["weights"], "optimizers": self._begun["optimizers"]}
        return Held(state, apart if alone else {"values": values})

    def _arrive(self, received: Mapping[str, Any] | None) -> bool:
        """Cease to follow another replica once this one is among them. Return whether it has followed one."""
        if self._begun is None:
            return False
        if received is None:
            raise Unanswered("the replicas that this one was about to join are gone: start it again")
        self.follows.close()
        self.follows = self._begun = None
        self._history.clear()  # nothing of what it sent waits
        self._comm.ledger.reset()  # of the others' steps
        return True

    def doubt(self) -> None:
        """Keep what this rank's rows will be if it turns out that others have counted the attempt."""
        rows = {key: value.clone() for key, value in written_rows(self._method.state).items()}
        self._doubt = self._over, self._comm.membership.number, rows

    def give(self) -> dict[str, Any]:
        """Return what a replica that joins needs of this one."""
        return {
            "about": self._header.dump(), "history": list(self._history), "counts": self._loop.counts(),
            "ends_round": self._ends_round, "over": self._over,
            "values": {k: value for k, value in dump_state(self._method.state).items() if not self._is_own(k)},
            "weights": {name: local(value).clone() for name, value in self._model.state_dict().items()},
            "optimizers": [_state_of(optimizer) for optimizer in self._run.optimizers],
        }  # fmt: skip

    def saved(self) -> dict[str, Tensor]:
        """Return what a run that has ended needs to go on, beside weights and moments: what who joins gets, as tensors.
        What waits on the replicas is not in it."""
        state = self.give()
        return {"about": state["about"], **state["counts"], **state["values"]}

    def resume(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from ``saved()``, with the weights and moments that are here, unless others turn out to be ahead."""
        values = dict(saved)
        header, counts = values.pop("about"), split_counts(values)
        self._resumed = self.give() | {"about": header, "history": [], "counts": counts, "values": values}

    def _is_own(self, key: str) -> bool:
        """Does a replica that joins begin without what is at ``key``: what waits, and what is one rank's alone?"""
        return self._waits(key) or bool(self._entry_of(key).own)

    def _waits(self, key: str) -> bool:
        """Is what is at ``key`` still to be delivered?"""
        kind = key.partition("/")[0]
        return has_rows(key) and (kind in self._method.card.promise.waits or self._entry_of(key).served)

    def _entry_of(self, key: str) -> StateKind:
        return kind_of(self._method.card.state_kinds, key.removeprefix("=").partition("/")[0])

    def _first_own(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy, from the ``values`` of a peer, those with which what is this rank's alone begins."""
        return {
            key.replace(entry.own, kind, 1): value.clone()
            for kind, entry in self._method.card.state_kinds.items()
            for key, value in values.items()
            if entry.own and key.removeprefix("=").partition("/")[0] == entry.own
        }

    def _change(
        self, membership: Membership, received: Mapping[str, Any] | None, *, from_peer: bool, hears: bool = False
    ) -> bool:
        """Go on in ``membership``, with ``received``, from a peer or a checkpoint, or with what is here. ``hears``: as
        a spare in the peer's place. Return whether the weights are others than before."""
        ranks, stale, stage, (inside, shards) = len(membership.nodes), False, self._stage, self._header.shard
        rank = membership.rank * shards + inside
        hops = (*self._header.hops[:-1], (membership.rank, ranks, False))
        new = replace(self._header, rank=rank, ranks=ranks * shards, hops=hops)
        values = dump_state(self._method.state)
        if not (self._comm.membership.spare is None is membership.spare):  # what a spare did not send does not wait
            values = {key: value for key, value in values.items() if not self._waits(key)}
            self._doubt = None
        counts = self._loop.counts()
        if received is None:
            values = regroup(values, self._header, new, self._method)
        else:
            peer = Header.load("about", received["about"])
            new = replace(new, steps=peer.steps)
            if unlike := new.unlike_run(peer):
                raise ThinwireError(f"this replica does not fit the run that it wants to join: {unlike}")
            counts = received["counts"]
            own_rows = self._own_rows(received["history"], received["over"], values)
            values = {key: value for key, value in received["values"].items() if key not in own_rows}
            if not hears:  # in the very place of the peer all is as it is there
                values = regroup(values, peer, new, self._method) | regroup(own_rows, self._header, new, self._method)
            values |= self._first_own(values) if from_peer else {}  # a checkpoint's own weights are loaded already
            self._history, stale = list(received["history"]), self._load(received)
            self.tape.cut()
        self._doubt, self._header = None, new
        self._comm.take(membership)
        self._loop.reset()
        self._loop.take_counts(counts)
        self._run, self._loop.engine.rank = replace(self._run, rank=rank, began=new.steps), rank
        for hop, inner in enumerate(self._loop.road.stages[:-1], 1):
            inner.method.begin(replace(self._run, exchange=inner.exchange, hop=hop, inside=None))
        stage.renew()
        self._method.begin(self._run)
        load_state(self._method.state, values)
        self._method.state_changed()
        self._loop.weight_watch.trust()
        self._renew(new, self._run)
        return stale

    def _own_rows(self, history: History, reached: int, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's own rows, of ``values`` or of the attempt in doubt, given the ``history`` of those ahead,
        with ``reached`` steps over. Empty: it has none, or what it counted was taken again."""
        step = self._over
        attempted, number, rows = (reached, 0, values) if self._doubt is None else self._doubt
        if attempted < reached and number_at(history, attempted) == number:
            values = rows
        elif not self._history:
            return {}
        elif number_at(history, step - 1) != self._history[-1][1]:
            former = self._comm.membership
            if former.spare is None:
                name = f"{former.names[former.rank]}, whose steps were taken again"
                self.losses[name] = Loss(name, step, self._norms.get(former.names[former.rank], 0.0))
            return {}
        return {key: value for key, value in values.items() if has_rows(key)}

    @torch.no_grad()
    def _load(self, received: Mapping[str, Any]) -> bool:
        """Load weights and moments; return whether the weights are others than before."""
        pairs = [(local(weight), received["weights"][name]) for name, weight in self._model.state_dict().items()]
        changed = not all(torch.equal(weight, peer_weight) for weight, peer_weight in pairs)
        for weight, peer_weight in pairs:
            weight.copy_(peer_weight)
        for optimizer, state in zip(self._run.optimizers, received["optimizers"], strict=True):
            optimizer.load_state_dict(state)
            for weight, entry in optimizer.state.items():
                entry.update({kind: _sharded_like(weight, value) for kind, value in entry.items()})
        return changed


def number_at(history: History, step: int) -> int | None:
    """Return the number of the membership in which ``step`` counted."""
    return next((number for first, number in reversed(history) if first <= step), None)


def _state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy ``optimizer.state_dict()``, without moments that are made for it, of parameters that the method steps."""
    state = optimizer.state_dict()
    weights = parameters(optimizer)
    moments = {number: entry for number, entry in state["state"].items() if weights[number] in optimizer.state}
    return copy.deepcopy({**state, "state": tree_map_only(Tensor, local, moments)})


def _sharded_like(weight: Tensor, value: Any) -> Any:
    """Make this rank's part of a moment, ``value``, a moment of a sharded ``weight``."""
    if not isinstance(weight, DTensor) or not isinstance(value, Tensor) or value.shape != local(weight).shape:
        return value
    return DTensor.from_local(
        value, weight.device_mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
    )
