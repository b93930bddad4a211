"""A recording of the steady state: a dry run whose kernels and messages are written down in order.

The method's own code says what happens; nothing here knows any method. What the engine itself does beside the method
(copies, gathers of plain weights, broadcast buffers) is added, with kernels named "engine.*".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from thinwire.core.bucket import Layout, Shard
from thinwire.core.method import Run
from thinwire.core.optimizers import parameters
from thinwire.core.road import Road, Stage
from thinwire.network.comm import Comm, CountingComm
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.plan.dry_run import Playback, steps_of
from thinwire.predict.launches import LaunchWatch
from thinwire.predict.timeline import Group, Message, Pass, RecordedStep, Stretch

Names = tuple[str, ...]
Event = Pass | Message


class Recorder(LaunchWatch):
    """Writes every kernel and message to the stretch that was begun last."""

    def __init__(self, per_node: int) -> None:
        super().__init__()
        self._per_node = per_node
        self._doubles: dict[Comm, _RecordingComm] = {}
        self.clear()

    def clear(self) -> None:
        self._stretches: dict[tuple[str, Names], list[Event]] = {}
        self.begin("update")

    def begin(self, what: str, names: Sequence[str] = ()) -> None:
        """Begin the stretch of ``what`` and ``names``, or go on with it."""
        self._events = self._stretches.setdefault((what, tuple(names)), [])

    def take(self, what: str) -> dict[Names, tuple[Event, ...]]:
        """Remove the stretches of ``what``; return their events by names, in the order in which they were begun."""
        keys = [key for key in self._stretches if key[0] == what]
        return {key[1]: tuple(self._stretches.pop(key)) for key in keys}

    def launched(self, name: str, nbytes: float) -> None:
        self._events.append(Pass(name, nbytes))

    def sent(self, message: Message) -> None:
        self._events.append(message)

    def double(self, comm: Comm, ledger: Ledger) -> Comm:
        """Make a double of ``comm`` whose messages are recorded, once."""
        if comm not in self._doubles:
            double = self._doubles[comm] = _RecordingComm.like(comm, ledger)
            double.recorder, double.group = self, group_of(comm, self._per_node)
        return self._doubles[comm]


def group_of(comm: Comm, per_node: int) -> Group:
    """Describe the ranks of ``comm``, with as many groups beside it as its nodes of ``per_node`` ranks hold."""
    local = max(Counter(comm.nodes).values())
    return Group(comm.size, local, per_node // local if local < comm.size else 1)


class _RecordingComm(CountingComm):
    """A group that reports its messages."""

    recorder: Recorder
    group: Group

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.recorder.begin("beside")
        yield
        self.recorder.begin("update")

    def _count_ring(self, verb: str, nbytes: int) -> None:
        super()._count_ring(verb, nbytes)
        rounds = round(self.ring_bytes(verb, self.size))  # one for each share of a rank that a ring passes on
        self.recorder.sent(Message(verb, self.ring_bytes(verb, nbytes), self.group, rounds))

    def _count_peers(self, kind: str, nbytes: float) -> None:
        super()._count_peers(kind, nbytes)
        self.recorder.sent(Message(kind, (self.size - 1) * nbytes, self.group))


class GuardedStage(Stage):
    """A stage that looks at the values as ``Stage.reduce`` does, which a dry run leaves out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.guard = Guard([])

    def carry(self, flat, pieces, out, send=None, bound=None):
        if self.hides_what_is_not_finite:
            self.guard.observe(flat)
            self.guard.forget()
        super().carry(flat, pieces, out, send, bound)


class Recording(NamedTuple):
    """A recorded steady state.

    Attributes:
        method_peak: bytes that the method needs at its peak, beside the engine's.
        stepped: values of this rank that the optimizer steps, not the method in its place. held: that it has state of.
    """

    steps: tuple[RecordedStep, ...]
    method_peak: int
    stepped: int
    held: int


@dataclass(frozen=True)
class Surroundings:
    """The work of an engine around the method's exchange: its own kernels and messages, beside what was recorded.

    Attributes:
        per_node: ranks on a node of the job. guards: the groups on which ranks agree whether a step counts.
        broadcast: bytes of module buffers that rank 0 sends before each forward pass (DDP).
        reshards: weights are gathered again in the backward pass. keeps_root: but for the root module's.
        stored, computed: dtypes of this rank's weights, and of gradients before they go to the engine's buffers.
    """

    layout: Layout
    road: Road
    per_node: int
    guards: Sequence[Comm]
    broadcast: int
    reshards: bool
    keeps_root: bool
    stored: torch.dtype
    computed: torch.dtype

    def weights(self, recorded: Mapping[Names, tuple[Event, ...]]) -> list[Stretch]:
        """Return a gather of each module, in the layout's order, the last module first."""
        return [self._gather(shard, recorded.get(shard.names, ())) for shard in self.layout.shards]

    def _gather(self, shard: Shard, recorded: tuple[Event, ...]) -> Stretch:
        assert self.layout.comm is not None
        group, itemsize = group_of(self.layout.comm, self.per_node), shard.dtype.itemsize
        copy_in = Pass("engine.copy_in", shard.numel * (self.stored.itemsize + itemsize))
        copy_out = Pass("engine.copy_out", 2 * group.size * shard.numel * itemsize)
        plain = Message("all_gather", (group.size - 1) * shard.numel * itemsize, group)
        encodes = self.road.last.method.card.encodes_weights
        events = recorded if encodes else (plain,) if group.size > 1 else ()
        return Stretch(shard.names, (copy_in, *events, copy_out))

    def gradients(self, recorded: Mapping[Names, tuple[Event, ...]]) -> tuple[Stretch, ...]:
        """Return the buffers, each with the copies of the gradients into it."""
        stretches = []
        for pieces, dtype in zip(self.layout.buffers, self.layout.dtypes, strict=True):
            names, numel = tuple(piece.name for piece in pieces), sum(piece.numel for piece in pieces)
            copy_in = Pass("engine.copy_in", numel * (self.computed.itemsize + dtype.itemsize))
            stretches.append(Stretch(names, (copy_in, *recorded[names])))
        return tuple(stretches)

    def buffers(self) -> list[Stretch]:
        """Return the module buffers that rank 0 sends to all."""
        comm = self.road.last.exchange.comm if self.road.levels is None else self.road.levels.stock.comm
        if not self.broadcast or comm.size == 1:
            return []
        message = Message("broadcast", self.broadcast, group_of(comm, self.per_node), comm.size - 1)
        return [Stretch((), (message,))]


def record(run: Run, around: Surroundings) -> Recording:
    """Play the method of ``around.road`` in its steady state, and record the steps of its cycle.

    Raises:
        ThinwireError: the method refuses one of the parameters. NotImplementedError: it reads values.
    """
    recorder, steps, peak, observer = Recorder(around.per_node), list[RecordedStep](), 0, Guard([])
    play = Playback(
        around.layout, around.road, run, watch=recorder, guards=around.guards, double=recorder.double,
        stage=GuardedStage,
    )  # fmt: skip
    play.mark = recorder.begin  # type: ignore[method-assign]
    card, across = play.method.card, around.road.last.exchange.comm
    numbers, stepped = steps_of(card), Counter[int]()

    def own_step(optimizer: torch.optim.Optimizer) -> None:
        members = (weight for weight in parameters(optimizer) if weight.grad is not None)
        stepped[number] += sum(weight.numel() for weight in members)

    play.own_step = own_step  # type: ignore[method-assign]
    with torch.no_grad(), recorder:
        play.open()
        for number in numbers:
            play.gather(number)
            forward = around.weights(recorder.take("weights"))
            play.gather(number)
            regathered = around.weights(recorder.take("weights"))  # in the backward pass, and in further micro-batches
            play.exchange(number)
            play.end_pass()
            gradients = around.gradients(recorder.take("gradients"))
            recorder.begin("update")
            observer.observe_all(weight.grad for weight in play.weights.values())
            play.agree(comm for comm in around.guards if not (comm is across and card.alone(number)))
            play.step(number)
            observer.forget()
            update, beside = (Stretch((), recorder.take(what).get((), ())) for what in ("update", "beside"))
            share = card.steady_steps.get(number, 0.0)
            again = *(() if around.keeps_root else regathered[-1:]), *regathered[:-1]
            steps.append(RecordedStep(
                share, (*around.buffers(), *reversed(forward)),
                again if around.reshards else (), gradients,
                update, beside, card.delay, tuple(reversed(regathered)),
            ))  # fmt: skip
            peak = max(peak, recorder.peak) if number >= card.steady else 0
            recorder.end_step(share)
            recorder.clear()
            if number + 1 in numbers:
                play.sender.begin(number + 1)
    held = sum(weight.numel() for optimizer in play.optimizers for weight in optimizer.state)
    return Recording(_steady(steps), max(peak, recorder.peak), stepped[number], held)


def _steady(steps: Sequence[RecordedStep]) -> tuple[RecordedStep, ...]:
    """Return the steps with a share; where all are alike, the second, which finds memory ready."""
    shares = [step.share for step in steps]
    if 1.0 in shares:
        return (replace(steps[min(shares.index(1.0) + 1, len(steps) - 1)], share=1.0),)
    return tuple(step for step in steps if step.share)
