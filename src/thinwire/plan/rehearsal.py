"""What a method will send, hold and launch: its own code on tensors without storage, over a network that only counts.

No method says what it needs. A rehearsal plays steps of its steady state: its own code, buckets, state and codecs, on
tensors that have a shape and no storage (torch's "meta" device), over groups whose size is a number. Nothing is
computed and nothing is sent; what would be is read off the ledger. On a real device, with one small parameter, the same
steps compile the kernels.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Bucket, Layout, Piece, Shard
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method, Parameter, Run, Step
from thinwire.core.road import Road, Stage
from thinwire.core.selection import keep_dense
from thinwire.core.state import State
from thinwire.core.weights import Ahead, Replica
from thinwire.network.comm import Comm, CountingComm, local
from thinwire.network.guard import Guard
from thinwire.network.ledger import Account, Ledger
from thinwire.ops.backends import every_variant
from thinwire.plan.memory import Memory
from thinwire.plan.watch import Watch

META = torch.device("meta")


@dataclass(frozen=True)
class Rehearsal:
    """One rank's steady state, per optimizer step: the average over the method's ``cycle``.

    Attributes:
        sent: bytes by link ("inter", "intra"), of gradients and all that goes with them (masks, the guard's flag).
        parameters: the same by parameter; what belongs to none alone is shared out by size.
        weights: bytes sent for one gathering of the weights, where the engine shards them.
        collectives: calls by kind, without those for the weights.
        launches: kernels by name: "aten.add_", "thinwire.ops.mask.topk_mask". What only makes a view is none.
        memory: see :class:`Memory`; None where only what is sent was asked for, and no kernel was counted either.
    """

    sent: Mapping[str, float]
    parameters: Mapping[str, float]
    weights: float
    collectives: Mapping[str, float]
    launches: Mapping[str, float]
    memory: Memory | None


def rehearse(
    layout: Layout, road: Road, run: Run, guards: Sequence[Comm] = (), *, watched: bool = True
) -> Rehearsal:
    """What the method of ``road`` needs in its steady state. Nothing of that size is allocated.

    Args:
        layout: the buffers that will come; what is sent is told by parameter where each holds one (:func:`apart`).
        guards: the groups on which ranks agree whether a step counts.
        watched: False: only what is sent, in a quarter of the time: neither kernels nor memory.

    Raises:
        ThinwireError: the method refuses one of the parameters. NotImplementedError: it reads values.
    """
    on_cpu = all(local(weight).device.type == "cpu" for weight in run.weights.values())
    watch, ledger = Watch() if watched else None, Ledger()

    def agree(comms: Iterable[Comm]) -> None:
        for comm in comms:
            CountingComm.like(comm, ledger).all_reduce(torch.empty(1, device=META), "max")

    play = _Play(layout, road, run, ledger, watch, None if on_cpu else watch, agree=lambda: agree(guards))
    method, average, peak = play.method, _Average(), 0
    cycle, launching = method.card.steady_steps, _launching(method)
    with torch.no_grad(), nullcontext() if watch is None else watch.counting():
        play.open()
        if watch is not None:
            watch.launches.clear()
        ledger.now = weights = Account()
        for number in _steps(method, watched=watched):
            play.gather(number)
            ledger.now = gradients = Account()
            parameters = play.exchange(number)
            agree(road.last.exchange.beside(guards) if method.card.alone(number) else guards)
            play.step(number)
            average.add(cycle.get(number, 0.0), gradients, weights, parameters)
            if watch is not None:
                average.launch(launching.get(number, 0.0), watch.launches)
                peak = max(peak, watch.peak) if number >= method.card.steady else 0
                watch.peak = watch.live
                watch.launches.clear()
            ledger.now = weights = Account()
            play.ahead(number + 1)
        if watch is not None:
            peak = max(peak, watch.peak)
        sizes = {name: parameter.local for name, parameter in run.parameters.items()}
        return average.result(sizes, None if watch is None else Memory(watch.live, peak))


def kept(layout: Layout, road: Road, run: Run) -> dict[str, Tensor]:
    """What the state of ``road``'s method will hold at its largest: key -> a tensor without storage, but for counters,
    which live on the host.

    Raises:
        ThinwireError: the method refuses one of the parameters, or reads values on the host.
    """
    card, found = road.last.method.card, dict[str, Tensor]()
    if not card.keeps_state and not card.encodes_weights:
        return found
    play = _Play(layout, road, run, Ledger(), None, None)
    try:
        with torch.no_grad():
            if card.alone(card.steady):  # its state holds what differs by rank, of the user's optimizers too
                play.own_moments(run)
            play.open()
            for number in sorted({0, card.steady, *card.steady_steps}):  # where a warm-up begins, most is sent
                play.gather(number)
                play.exchange(number)
                play.step(number)
                for key, value in play.method.state.state_dict().items():
                    if key not in found or value.numel() > found[key].numel():
                        found[key] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    except NotImplementedError:
        raise ThinwireError(
            f"{road.last.method.name} reads values on the host, so nobody knows what its state will be: it cannot be "
            "saved"
        ) from None
    return found


def compile_kernels(road: Road, run: Run, device: torch.device) -> None:
    """Play the steady state on ``device``, with zeros for the smallest parameters that are compressed and that are not.

    So no rank compiles in the first steps, while the others wait. Costs nothing where nothing is compressed.
    """
    method = road.last.method
    sent = [parameter for parameter in run.parameters.values() if keep_dense(method, parameter) is None]
    if method.card.native or not sent:
        return
    dense = [parameter for parameter in run.parameters.values() if keep_dense(method, parameter) is not None]
    least = [min(of, key=lambda parameter: (parameter.local, parameter.name)) for of in (sent, dense) if of]
    names = [parameter.name for parameter in least]
    only = replace(run, parameters=dict(zip(names, least, strict=True)), weights={n: run.weights[n] for n in names})
    # Groups of one rank: others would have to choose masks and scales that fit.
    ledger = Ledger()

    def lone(comm: Comm) -> Comm:
        one = CountingComm(0, 1, [0], ledger)
        one.one_node = comm.one_node  # a method may send something else inside a node
        return one

    alone = Road([replace(stage, exchange=stage.exchange.on(lone)) for stage in road.stages])
    end = [*itertools.accumulate((of.local for of in least), initial=0)]
    own = tuple(Piece(of.name, first, of.local) for of, first in zip(least, end, strict=False))
    shards = [Shard(own, (), end[-1], dtype) for dtype in run.gathers]
    layout = replace(apart(least, alone, torch.float32), shards=shards, comm=CountingComm(0, 1, [0], ledger))
    play = _Play(layout, alone, only, ledger, None, None, device)
    token = every_variant.set(True)
    try:
        with torch.no_grad():
            _move(device)
            play.open()
            for number in _steps(play.method):
                play.gather(number)
                play.read_own(number)
                play.exchange(number)
                play.step(number)
    finally:
        every_variant.reset(token)


def _move(device: torch.device) -> None:
    """Pack and unpack a buffer of each dtype: one that holds one small parameter may have the form of rows already."""
    bucket = Bucket([Piece("", 0, 3)], rows=2, owner=False, group=4, dtype=torch.float32, device=device)
    rows = torch.zeros(*bucket.shape, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        flat = torch.zeros(3, dtype=dtype, device=device)
        bucket.pack(flat, rows)
        bucket.unpack(rows, flat)


def apart(parameters: Iterable[Parameter], road: Road, dtype: torch.dtype | None) -> Layout:
    """A layout with one buffer for each of ``parameters``, as the engine would hand them out.

    ``dtype``: of all buffers; None: as the parameters.
    """
    known = list(parameters)
    return Layout([(road.piece(of),) for of in known], [dtype or of.dtype for of in known])


def stand_in(method: Method, parameters: Iterable[Parameter], exchange: Exchange, steps: int = 10_000) -> Run:
    """A run of ``method`` for plans without a user's model and optimizer: N can be any number in it."""
    known = {parameter.name: parameter for parameter in parameters}
    weights = {
        name: nn.Parameter(torch.empty(parameter.local, dtype=parameter.dtype, device=META))
        for name, parameter in known.items()
    }
    optimizers = (method.OPTIMIZER(list(weights.values()), lr=1e-3),) if weights else ()
    return Run(known, exchange, steps, optimizers=optimizers, weights=weights)


def _steps(method: Method, *, watched: bool = True) -> list[int]:
    """The last step before the steady state, its first, those that stand for all; before each of them the last one.

    A method may do more after a gap: SCAPE's message brings the weights from one step to the next, and no further.
    ``watched``: two steps more, in which memory may peak.
    """
    first, cycle = method.card.steady, method.card.steady_steps
    opening = range(first, first + (3 if watched else 1))
    due = (*cycle, *_launching(method)) if watched else tuple(cycle)
    return sorted({max(first - 1, 0), *opening, *due, *(max(n - 1, 0) for n in cycle)})


def _launching(method: Method) -> Mapping[int, float]:
    """``Card.steady_steps``, for launches: where all are alike, the second, which finds memory and weights there."""
    cycle = method.card.steady_steps
    return {number + 1: share for number, share in cycle.items()} if len(cycle) == 1 else cycle


class _Average:
    """Adds up accounts by their share of all steps."""

    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._parameters: Counter[str] = Counter()
        self._collectives: Counter[str] = Counter()
        self._launches: Counter[str] = Counter()
        self._weights = 0.0

    def add(self, share: float, account: Account, weights: Account, parameters: dict[str, float]) -> None:
        for total, part in (
            (self._sent, account.bytes), (self._collectives, account.calls), (self._parameters, parameters),
        ):  # fmt: skip
            for key, value in part.items():
                total[key] += share * value  # type: ignore[assignment]
        self._weights = sum(weights.bytes.values())  # the first of all gathers everything, the last is as all others

    def launch(self, share: float, kernels: Mapping[str, int]) -> None:
        for name, count in kernels.items() if share else ():
            self._launches[name] += share * count  # type: ignore[assignment]

    def result(self, sizes: Mapping[str, int], memory: Memory | None) -> Rehearsal:
        rest = sum(self._sent.values()) - sum(self._parameters.values())
        values = max(sum(sizes.values()), 1)
        parameters = {name: self._parameters[name] + rest * size / values for name, size in sizes.items()}
        calls = {kind: count for kind, count in self._collectives.items() if count}
        return Rehearsal(dict(self._sent), parameters, self._weights, calls, dict(self._launches), memory)


class _Play:
    """Doubles of a road, buffers, weights and optimizers, on which steps are played."""

    def __init__(
        self,
        layout: Layout,
        road: Road,
        run: Run,
        ledger: Ledger,
        watch: Watch | None,
        offloads: Watch | None,
        device: torch.device = META,
        agree: Callable[[], object] = lambda: None,
    ) -> None:
        """``watch`` is told what is the engine's own; ``offloads`` also what state lives elsewhere than on the device.

        ``agree``: all ranks agree on a flag beside a step's own.
        """
        self._layout, self._watch, self._device, self._ledger, self._agree = layout, watch, device, ledger, agree
        self._weights = {
            name: nn.Parameter(_zeros_like(local(weight), device)) for name, weight in run.weights.items()
        }
        known = {id(weight): self._weights[name] for name, weight in run.weights.items()}
        self._optimizers = tuple(_optimizer_like(optimizer, known) for optimizer in run.optimizers)
        self._gradients = {name: _zeros_like(weight) for name, weight in self._weights.items()}
        self._lend(*self._weights.values(), *self._gradients.values())
        for optimizer in self._optimizers:
            for moments in optimizer.state.values():
                self._lend(*moments.values())
        self._road = self._double(road, run, offloads)
        self.method = self._road.last.method
        self._buffers = [self._buffer(*of) for of in zip(layout.buffers, layout.dtypes, strict=True)]
        self._gathers: list[tuple[Replica, Tensor]] = []  # and where it puts everybody's weights
        self._ahead = Ahead()

    def own_moments(self, run: Run) -> None:
        """The optimizers keep what the user's do, instead of what any Adam does."""
        for double, original in zip(self._optimizers, run.optimizers, strict=True):
            _step_once(double, original)

    def open(self) -> None:
        """What the engine keeps for the method's sake."""
        if not self.method.card.encodes_weights or self._layout.comm is None:
            return
        comm = CountingComm.like(self._layout.comm, self._ledger)
        for shard in self._layout.shards:
            message = self.method.weight_message(shard, comm.rank)
            replica = Replica(message, self.method.state, shard, comm, self._device)
            out = replica.allocate()
            if not replica.message.resident:
                self._lend(out)
            self._gathers.append((replica, out))

    def gather(self, number: int) -> None:
        """One gathering of all weights in step ``number``."""
        for replica, out in self._gathers:
            self._ahead.asks(replica, functools.partial(self._send, replica, out))
            replica.gather(out, number)
            self._ahead.go_on()

    def read_own(self, number: int) -> None:
        """Write a message of each module, and read it: a rank without peers might have none to read."""
        for replica, out in self._gathers:
            rows = out.view(replica.comm.size, -1)
            held = rows[0].clone() if replica.message.resident and not replica.message.exact else None
            message = replica.message.write(rows[0], held, number)
            replica.message.read(slice(0, 1), message.view(1, -1), rows[:1], held)

    def ahead(self, number: int) -> None:
        """What leaves of the weights before step ``number`` gathers them."""
        self._ahead.begin(number)

    @staticmethod
    def _send(replica: Replica, out: Tensor, number: int) -> None:
        if replica.sends(number):
            replica.send(out.view(replica.comm.size, -1)[replica.comm.rank].clone(), number)

    def exchange(self, number: int) -> dict[str, float]:
        """All buffers take the road: bytes sent, by the first parameter of each."""
        found: dict[str, float] = defaultdict(float)
        self._road.step = number
        for flat, out, pieces in self._buffers:
            before = sum(self._ledger.now.bytes.values())
            self._road.carry(flat, pieces, out)
            found[pieces[0].name] += sum(self._ledger.now.bytes.values()) - before
        return found

    def step(self, number: int) -> None:
        """What the wire does around an optimizer's step."""
        method = self.method

        def agree(values: Iterable[Tensor]) -> bool:
            self._agree()
            return True

        step = Step(number, self._optimizers, self._weights, torch.ones((), device=self._device), agree)
        for name, weight in self._weights.items():
            weight.grad = self._gradients[name]
        method.state.commit()
        method.before_step(step)
        method.after_step(step)
        method.state.commit()
        method.finish()

    def _lend(self, *tensors: Tensor) -> None:
        if self._watch is not None:
            self._watch.lend(*tensors)

    def _double(self, road: Road, run: Run, offloads: Watch | None) -> Road:
        ledger = self._ledger

        def double(comm: Comm) -> Comm:
            return CountingComm.like(comm, ledger)

        stages = []
        for hop, stage in enumerate(road.stages, 1):
            method, exchange = replace(stage.method), stage.exchange.on(double)
            method.state = _State(method.card.offloaded_kinds, offloads)
            method.begin(
                replace(run, exchange=exchange, weights=self._weights, optimizers=self._optimizers, hop=hop)
            )
            stages.append(Stage(method, stage.dense, exchange, Guard([], False), ledger))
        return Road(stages, None if road.levels is None else road.levels.on(double))

    def _buffer(self, pieces: tuple[Piece, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Piece, ...]]:
        """A buffer of the engine's, where the means of it go, and what is in it."""
        device = self._device
        flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=dtype, device=device)
        out = torch.zeros(pieces[0].stride, dtype=dtype, device=device) if pieces[0].stride else flat
        self._lend(flat, out)
        return flat, out, pieces


class _State(State):
    """The state of a rehearsal. What it keeps elsewhere than on the device does not count."""

    def __init__(self, offload: Collection[str], watch: Watch | None) -> None:
        super().__init__(offload)
        self._watch = watch

    def _new(self, kind: str, shape: Sequence[int], device: torch.device) -> Tensor:
        values = torch.zeros(shape, dtype=torch.float32, device=device)
        if kind in self._offload and self._watch is not None:
            self._watch.lend(values)
        return values


def _zeros_like(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """As torch's, which on the meta device takes fifty times as long."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device)
    return empty if empty.is_meta else empty.zero_()


def _optimizer_like(original: torch.optim.Optimizer, known: dict[int, nn.Parameter]) -> Any:
    """One of the user's class that holds the doubles ``known`` and Adam's moments of them, and is never stepped."""
    double: Any = object.__new__(type(original))
    double.__dict__.update({name: copy.copy(v) if isinstance(v, dict) else v for name, v in vars(original).items()})
    double.param_groups = [
        {**group, "params": [known[id(weight)] for weight in group["params"] if id(weight) in known]}
        for group in original.param_groups
    ]
    moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    double.state = {
        weight: {"step": torch.tensor(1.0), **{name: _zeros_like(weight) for name in moments}}
        for group in double.param_groups
        for weight in group["params"]
    }
    return double


def _step_once(double: Any, original: torch.optim.Optimizer) -> None:
    """Leave in ``double`` what ``original`` keeps after a step, if it can be found out without values."""
    double._optimizer_step_pre_hooks, double._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    stand_in, double.state = double.state, defaultdict(dict)
    for group in double.param_groups:
        group.update({knob: False for knob in ("foreach", "fused", "capturable") if knob in group})
        for weight in group["params"]:
            weight.grad = _zeros_like(weight)
    try:
        double.step()
    except Exception:  # somebody's own optimizer, which reads values
        double.state = stand_in
