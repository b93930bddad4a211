"""A dry run finds out what a method will send and hold.

It plays steps of the method's steady state with the method's own code, buckets, state and codecs, on tensors without
storage (torch's "meta" device), over groups whose size is a number. It computes and sends nothing; the ledger counts
what would be sent. On a real device, with small parameters, the same steps compile the kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.base.extras import missing_for_triton
from thinwire.core.bucket import Bucket, Layout, Piece, Shard
from thinwire.core.card import Card
from thinwire.core.exchange import Exchange, on_comm
from thinwire.core.method import Method, Parameter, Run, Step
from thinwire.core.outliers import OutlierClip
from thinwire.core.road import Road, Stage
from thinwire.core.selection import keep_dense
from thinwire.core.state import dump_state
from thinwire.core.weights import EarlySender, Replica
from thinwire.network.comm import Comm, CountingComm, local
from thinwire.network.guard import Guard
from thinwire.network.ledger import Account, Ledger
from thinwire.ops.backends import every_variant
from thinwire.ops.norms import Statistics, bound
from thinwire.plan.doubles import CountedState, Watch, optimizer_like, step_once, zeros_like

META = torch.device("meta")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank's device, without those of engine, model and optimizer.

    ``resident``: bytes that stay from step to step in the steady state. ``peak``: the most bytes at one time, temporary
    ones included, also in the first steps.
    """

    resident: int
    peak: int


@dataclass(frozen=True)
class DryRun:
    """The steady state of one rank, per optimizer step: the average over the method's ``cycle``.

    Attributes:
        sent: bytes by link ("inter", "intra") of gradients and what goes with them (masks, the guard's flag).
        parameters: the same bytes by parameter; bytes of no single parameter are divided by size.
        weights: bytes sent to gather the weights in a forward and a backward pass, if the engine shards them. Exact
            with a ``watch`` only.
        collectives: calls by kind, without calls for the weights.
        memory: None without a ``watch``.
    """

    sent: Mapping[str, float]
    parameters: Mapping[str, float]
    weights: float
    collectives: Mapping[str, float]
    memory: Memory | None


def dry_run(
    layout: Layout, road: Road, run: Run, guards: Sequence[Comm] = (), watch: Watch | None = None,
    playback: type[Playback] | None = None,
) -> DryRun:  # fmt: skip
    """Play the method of ``road`` in its steady state, without allocating memory for tensors.

    Args:
        layout: the engine's buffers. Bytes by parameter need one buffer for each (:func:`separate_buffers`).
        guards: the groups on which ranks agree whether a step counts.
        watch: counts memory. None: count only bytes sent for gradients, in a quarter of the time.
        playback: plays the steps; None: ``Playback``, without what happens to a step beside the method.

    Raises:
        ThinwireError: the method refuses one of the parameters. NotImplementedError: it reads values.
    """
    play = (playback or Playback)(layout, road, run, watch=watch, guards=guards)
    ledger, card, peak = play.ledger, play.method.card, 0
    sent, parameters, collectives = (Counter[str]() for _ in range(3))
    with torch.no_grad(), watch or nullcontext():
        play.open()
        ledger.current = weights = Account()
        first = range(min(card.steady, 3) if watch is not None else 0)  # in which a warm-up sends most
        for number in sorted({*first, *steps_of(card, watched=watch is not None)}):
            play.gather(number)
            play.gather_again(number)
            ledger.current = gradients = Account()
            sent_by_parameter = Counter[str](play.exchange(number))  # type: ignore[arg-type]
            _add(sent_by_parameter, play.end_pass(), 1.0)
            alone = card.alone(number)
            play.agree([comm for comm in guards if comm is not road.last.exchange.comm] if alone else guards)
            play.step(number)
            share = card.steady_steps.get(number, 0.0)
            _add(sent, gradients.bytes, share)
            _add(parameters, sent_by_parameter, share)
            _add(collectives, gradients.calls, share)
            weight_bytes = sum(weights.bytes.values())  # the first step gathers everything, so the last one counts
            if watch is not None:
                peak = max(peak, watch.peak)
                watch.end_step(share)
            ledger.current = weights = Account()
            play.sender.begin(number + 1)
    values = max(sum(parameter.local for parameter in run.parameters.values()), 1)
    unassigned = sum(sent.values()) - sum(parameters.values())
    by_name = {name: parameters[name] + unassigned * p.local / values for name, p in run.parameters.items()}
    memory = None if watch is None else Memory(watch.live, max(peak, watch.peak))
    return DryRun(sent, by_name, weight_bytes, collectives, memory)


def _add(total: Counter[str], counts: Mapping[str, float], share: float) -> None:
    for name, count in counts.items() if share else ():
        total[name] += share * count  # type: ignore[assignment]


def largest_state(layout: Layout, road: Road, run: Run) -> dict[str, Tensor]:
    """Return the largest state of ``road``'s method: tensors without storage by key, and counters on the host.

    Raises:
        ThinwireError: the method refuses one of the parameters, or reads values on the host.
    """
    card, state = road.last.method.card, dict[str, Tensor]()
    if not card.keeps_state and not card.encodes_weights:
        return state
    play = Playback(layout, road, run)
    try:
        with torch.no_grad():
            if card.alone(card.steady):  # its state then includes that of the user's optimizers, which differs by rank
                holders = {name: holder.optimizer for name, holder in run.holders.items()}
                present = {play.weights[name]: holders[name].state.get(w, {}) for name, w in run.weights.items()}
                for double in play.optimizers:
                    step_once(double, present)
            play.open()
            for number in sorted({0, card.steady, *card.steady_steps}):  # step 0: a warm-up sends most where it begins
                play.gather(number)
                play.exchange(number)
                play.end_pass()
                play.step(number)
                for key, value in dump_state(play.method.state).items():
                    if key not in state or value.numel() > state[key].numel():
                        state[key] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    except NotImplementedError:
        raise ThinwireError(
            f"{road.last.method.name} reads tensor values on the host, so a dry run cannot tell its state, and the "
            "state cannot be saved"
        ) from None
    return state


def compile_kernels(road: Road, run: Run, device: torch.device) -> None:
    """Compile the kernels now, so that no rank compiles in the first steps while the others wait.

    Plays the steady state on ``device`` with zeros for two parameters: the smallest compressed and the smallest dense.
    """
    method = road.last.method
    by_size = sorted(run.parameters.values(), key=lambda parameter: (parameter.local, parameter.name), reverse=True)
    smallest_by_choice = {keep_dense(method, parameter) is None: parameter for parameter in by_size}
    if method.card.native or True not in smallest_by_choice:
        return
    smallest = [smallest_by_choice[sent] for sent in (True, False) if sent in smallest_by_choice]
    weights = {parameter.name: run.weights[parameter.name] for parameter in smallest}
    small = {parameter.name: parameter for parameter in smallest}
    small_run = replace(run, parameters=small, weights=weights)

    def lone(comm: Comm) -> Comm:
        """Make a group of one rank, because several would have to choose masks and scales that fit together."""
        counting = CountingComm(0, [0], Ledger())
        counting.one_node = comm.one_node  # a method may encode differently inside a node
        return counting

    lone_road = Road(
        [replace(stage, exchange=on_comm(stage.exchange, lone(stage.exchange.comm))) for stage in road.stages]
    )
    *offsets, numel = itertools.accumulate((parameter.local for parameter in smallest), initial=0)
    pieces = tuple(Piece(p.name, first, p.local) for p, first in zip(smallest, offsets, strict=True))
    layout = replace(
        separate_buffers(smallest, lone_road, torch.float32),
        shards=[Shard(pieces, (), numel, dtype) for dtype in run.gathers],
        comm=CountingComm(0, [0], Ledger()),
    )
    play = Playback(layout, lone_road, small_run, device, stage=_BothStages)
    token = every_variant.set(True)
    try:
        with torch.no_grad():
            _move(device)
            play.open()
            for number in steps_of(play.method.card):
                play.gather(number)
                play.read_own(number)
                play.exchange(number)
                play.end_pass()
                play.step(number)
    except ThinwireError:
        raise
    except Exception as error:
        if devices.streams(device) is not None and (lacks := missing_for_triton()):
            raise ThinwireError(lacks) from error
        raise
    finally:
        every_variant.reset(token)


class _BothStages(Stage):
    """A stage whose method makes steps of gradients that were cut, and then of such that it is to cut itself.

    So it compiles for both: which of them steps meet depends on how the engine's buffers will look.
    """

    def carry(self, flat, pieces, out, send=None, bound=None):
        super().carry(flat, pieces, out, send)
        if self.method.card.step_maker is not None:
            names = [piece.name for piece in pieces]
            super().carry(flat, pieces, out, send, OutlierClip(1.0, dict.fromkeys(names, 1)))

    def load(self, packed, buckets, flat, out, bound):
        super().load(packed, buckets, flat, out, None)
        method, first = buckets[0]
        if bound is not None and method is self.method:
            first.limit = bound.limit(first.names, flat, first.copies.stay_table)
            first.norms = first.limit.bounds.norms


def _move(device: torch.device) -> None:
    """Pack and unpack a buffer of each dtype, because a buffer with one small parameter may need no packing.

    With a bound of outliers, which these steps do not meet, and without.
    """
    usual = torch.zeros(2, 4, 1, dtype=torch.float32, device=device)
    statistics = Statistics(usual[0], usual[1], usual[0, 0], 1.0, 1.0, 0.0)
    bucket = Bucket([Piece("", 0, 3)], rows=2, owner=False, group=4, dtype=torch.float32, device=device)
    rows = torch.zeros(*bucket.shape, dtype=torch.float32, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.zeros(3, dtype=dtype, device=device)
        bucket.copies.pack(flat, rows)
        column = torch.zeros(1, dtype=torch.int64, device=device)
        bound(flat, bucket.copies.copy_table, rows.view(-1), column, statistics)
        bucket.copies.unpack(rows, flat)


def separate_buffers(parameters: Collection[Parameter], road: Road, dtype: torch.dtype | None = None) -> Layout:
    """Make a layout with one buffer for each of ``parameters``, in ``dtype``; None: in each parameter's own."""
    buffers = [(road.piece(parameter),) for parameter in parameters]
    return Layout(buffers, [dtype or parameter.dtype for parameter in parameters])


def stand_in_run(method: Method, parameters: Iterable[Parameter], exchange: Exchange) -> Run:
    """Make a run of ``method`` for plans without a user's model and optimizer."""
    by_name = {parameter.name: parameter for parameter in parameters}
    weights = {
        name: nn.Parameter(torch.empty(parameter.local, dtype=parameter.dtype, device=META))
        for name, parameter in by_name.items()
    }
    optimizers = (method.OPTIMIZER(list(weights.values()), lr=1e-3),) if weights else ()
    return Run(by_name, exchange, 10_000, optimizers=optimizers, weights=weights)


def steps_of(card: Card, *, watched: bool = True) -> list[int]:
    """List the last step before the steady state, its first, those of ``cycle``, and the step before each of them.

    The steps before are there because a method may do more after a gap: SCAPE's message brings the weights from one
    step to the next only. ``watched``: two steps more, in which memory may peak.
    """
    first, cycle = card.steady, card.steady_steps
    opening = range(first, first + (3 if watched else 1))
    return sorted({max(first - 1, 0), *opening, *cycle, *(max(number - 1, 0) for number in cycle)})


class Playback:
    """Doubles of a road, buffers, weights and optimizers, and steps on them."""

    def __init__(
        self,
        layout: Layout,
        road: Road,
        run: Run,
        device: torch.device = META,
        watch: Watch | None = None,
        guards: Sequence[Comm] = (),
        double: Callable[..., Comm] = CountingComm.like,
        stage: type[Stage] = Stage,
    ) -> None:
        """Make the doubles.

        Args:
            guards: the groups on which the method agrees on a flag. double: (a group, the ledger) -> its double.
            stage: the class of the road's stages.
        """
        self.ledger = Ledger()
        self._layout, self._device, self._guards, self._watch = layout, device, guards, watch or Watch()
        self._across = road.last.exchange.comm
        self._comm, self._stage = functools.partial(double, ledger=self.ledger), stage
        self.weights = {name: nn.Parameter(zeros_like(local(weight), device)) for name, weight in run.weights.items()}
        doubles = {id(weight): self.weights[name] for name, weight in run.weights.items()}
        self.optimizers = tuple(
            optimizer_like(optimizer, doubles, run.resting(optimizer)) for optimizer in run.optimizers
        )
        self.gradients = {name: zeros_like(weight) for name, weight in self.weights.items()}
        self._watch.lend(*self.weights.values(), *self.gradients.values())
        for optimizer in self.optimizers:
            for moments in optimizer.state.values():
                self._watch.lend(*moments.values())
        self._road = self._double(road, run)
        self.method = self._road.last.method
        self.buffers = [self._buffer(*pair) for pair in zip(layout.buffers, layout.dtypes, strict=True)]
        self._gathers: list[tuple[Replica, Tensor]] = []  # each with the buffer for all ranks' weights
        self.sender = EarlySender()

    def open(self) -> None:
        """Make the replicas of weights, if the method encodes weights."""
        if not self.method.card.encodes_weights or self._layout.comm is None:
            return
        comm = self._comm(self._layout.comm)
        for shard in self._layout.shards:
            message = self.method.weight_message(shard, comm.rank)
            replica = Replica(message, self.method.state, shard, comm, self._device)
            out = replica.allocate()
            if not replica.message.resident:
                self._watch.lend(out)
            self._gathers.append((replica, out))

    def gather(self, number: int) -> None:
        """Gather the weights of all modules."""
        for replica, out in self._gathers:
            self.mark("weights", replica.shard.names)
            self.sender.asks(replica, functools.partial(self._send, replica, out))
            replica.gather(out, number)
            self.sender.go_on()

    def gather_again(self, number: int) -> None:
        """Gather the weights that a backward pass gathers; those among fewer ranks travel whole."""
        for (replica, out), ranks in zip(self._gathers, self._layout.regathers, strict=False):
            if ranks == replica.comm.size:
                replica.gather(out, number)
            elif ranks:
                first, comm = replica.comm.rank // ranks * ranks, replica.comm
                fewer = CountingComm(comm.rank - first, comm.nodes[first : first + ranks], self.ledger)
                fewer.all_gather(out, out[: out.numel() // ranks])

    def mark(self, what: str, names: Sequence[str]) -> None:
        """Called before what follows is done: "weights" of a module, a buffer of "gradients"."""

    def read_own(self, number: int) -> None:
        """Write and read a message of each module, because a rank without peers may have none to read."""
        for replica, out in self._gathers:
            rows = out.view(replica.comm.size, -1)
            resident = rows[0].clone() if replica.message.resident and not replica.message.exact else None
            message = replica.message.write(rows[0], resident, number)
            replica.message.read(slice(0, 1), message.view(1, -1), rows[:1], resident)

    def _send(self, replica: Replica, out: Tensor, number: int) -> None:
        if replica.sends(number):
            self.mark("weights", replica.shard.names)
            replica.send(out.view(replica.comm.size, -1)[replica.comm.rank].clone(), number)

    def exchange(self, number: int) -> dict[str, float]:
        """Carry all buffers over the road. Return the bytes sent by the first parameter of each buffer."""
        sent: dict[str, float] = defaultdict(float)
        self._road.step = number
        for flat, out, pieces in self.buffers:
            self.mark("gradients", [piece.name for piece in pieces])
            sent_before = sum(self.ledger.current.bytes.values())
            self._road.carry(flat, pieces, out)
            sent[pieces[0].name] += sum(self.ledger.current.bytes.values()) - sent_before
        return sent

    def end_pass(self) -> dict[str, float]:
        """End the backward pass, whose ``gradients`` are those to step along. Return the bytes sent by parameter."""
        step_maker, sent_before = self.method.card.step_maker, sum(self.ledger.current.bytes.values())
        names = () if step_maker is None else tuple(step_maker.names)
        self._road.end_pass(self.gradients)
        return dict.fromkeys(names, (sum(self.ledger.current.bytes.values()) - sent_before) / max(len(names), 1))

    def step(self, number: int) -> None:
        """Call the method as the wire does around an optimizer's step."""
        method = self.method

        def agree(values: Iterable[Tensor]) -> bool:
            self.agree(self._guards)
            return True

        def agree_inside(values: Iterable[Tensor]) -> bool:
            self.agree(comm for comm in self._guards if comm is not self._across)
            return True

        clip_factor = torch.ones((), dtype=torch.float32, device=self._device)
        step = Step(
            number, self.optimizers, self.weights, clip_factor, agree, agree_inside=agree_inside, own_step=self.own_step
        )
        for name, weight in self.weights.items():
            weight.grad = self.gradients[name]
        method.state.commit()
        method.before_step(step)
        for optimizer in self.optimizers:
            self.own_step(optimizer)
        step.restore()
        method.after_step(step)
        method.state.commit()
        method.finish()

    def own_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called where ``optimizer`` steps its parameters that have a gradient; here they stay."""

    def agree(self, comms: Iterable[Comm]) -> None:
        for comm in comms:
            self._comm(comm).all_reduce(torch.empty(1, dtype=torch.float32, device=META), "max")

    def _double(self, road: Road, run: Run) -> Road:
        on_cpu = all(local(weight).device.type == "cpu" for weight in run.weights.values())
        stages: list[Stage] = []
        for hop, stage in enumerate(road.stages, 1):
            method, exchange = replace(stage.method), on_comm(stage.exchange, self._comm(stage.exchange.comm))
            method.state = CountedState(method.card.offloaded_kinds, None if on_cpu else self._watch)
            inside = stages[0].exchange if stages else None
            method.begin(replace(
                run, exchange=exchange, weights=self.weights, optimizers=self.optimizers, hop=hop, inside=inside
            ))  # fmt: skip
            stages.append(self._stage(method, stage.dense, exchange, Guard([], False), self.ledger))
        return Road(stages, None if road.levels is None else road.levels.on(self._comm))

    def _buffer(self, pieces: tuple[Piece, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Piece, ...]]:
        """Make a buffer, one for its means, and return both with the pieces."""
        device = self._device
        flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=dtype, device=device)
        out = torch.zeros(pieces[0].stride, dtype=dtype, device=device) if pieces[0].stride else flat
        self._watch.lend(flat, out)
        return flat, out, pieces
