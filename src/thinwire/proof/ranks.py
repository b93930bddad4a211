"""Ranks as threads: a method on an engine's road, with meetings of threads for a network."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Piece
from thinwire.core.exchange import AllReduce, Exchange, ReduceScatter
from thinwire.core.method import Method, Parameter, Run, Step, intra_of
from thinwire.core.road import Levels, Regroup, Road, ScatterAndShare, Stage
from thinwire.core.selection import dense_among
from thinwire.core.state import State
from thinwire.network.comm import Comm
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger

T = TypeVar("T")


class Threads:
    """``size`` virtual ranks in one process, which exchange values in rank order.

    One rank runs at a time, from one meeting to the next: no rank waits for the interpreter's lock, and a rank that
    ends while the others meet is noticed at once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._running = list(range(size))
        self._slots: list[Any] = [None] * size
        self._swapped: list[Any] = []
        self._arrived = self._meetings = 0

    def swap(self, rank: int, value: T) -> list[T]:
        """Return the ``value`` of every rank, in rank order. Collective."""
        meeting = self._meetings
        self._slots[rank] = value
        self._arrived += 1
        if self._arrived == self.size:
            self._swapped, self._arrived, self._meetings = list(self._slots), 0, meeting + 1
        self._pass_on(rank)
        self._turns[rank].acquire()
        if self._meetings == meeting:  # it is this rank's turn again, and some ranks have not come
            raise TimeoutError("a virtual rank waited for the others in vain: they did not call the same verbs")
        return self._swapped

    def run(self, function: Callable[[int], T]) -> list[T]:
        """Return ``[function(rank) for rank in range(size)]``; raise the first error, and never hang."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
            self._running.remove(rank)
            self._pass_on(rank)

        self._running, self._arrived = list(range(self.size)), 0
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise next((error for error in errors if not isinstance(error, TimeoutError)), errors[0])
        return results

    def _pass_on(self, rank: int) -> None:
        """Give the turn to the next running rank."""
        if self._running:
            self._turns[min(self._running, key=lambda peer: (peer - rank - 1) % self.size)].release()


class ThreadComm(Comm):
    """The verbs of :class:`Comm` between the threads of ``world``; ``members`` are the world ranks of this group.

    All ranks of a world must use their groups in the same order, since every verb is a meeting of the whole world.
    """

    def __init__(
        self, world: Threads, world_rank: int, ledger: Ledger, members: Sequence[int] | None = None, per_node: int = 1
    ) -> None:
        members = range(world.size) if members is None else members
        super().__init__(list(members).index(world_rank), [m // per_node for m in members], ledger)
        self._world, self._world_rank, self._members = world, world_rank, list(members)

    def _swap(self, tensor: Tensor) -> list[Tensor]:
        values = self._world.swap(self._world_rank, tensor.clone())
        return [values[member] for member in self._members]

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        tensor.copy_(_reduced(self._swap(tensor), op))

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None:
        out.copy_(_reduced([peer_rows[self.rank] for peer_rows in self._swap(rows)], op))

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> None:
        out.copy_(torch.stack(self._swap(row.reshape(-1))).view_as(out))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        for peer, peer_rows in enumerate(self._swap(rows)):
            out[peer].copy_(peer_rows[self.rank])


def _reduced(values: Sequence[Tensor], op: str) -> Tensor:
    if len({value.shape for value in values}) > 1:  # gloo would end the process
        sizes = ", ".join(str(message.numel()) for message in values)
        raise ThinwireError(f"ranks reduce messages of unlike sizes: {sizes}")
    total = reduce(torch.maximum if op == "max" else torch.add, values)
    return total / len(values) if op == "mean" else total


Shapes = dict[str, int | tuple[int, ...]]
"""Parameter name -> its shape, or its number of elements."""


def parameters_for(exchange: Exchange, shapes: Shapes) -> dict[str, Parameter]:
    """Describe parameters of ``shapes`` (role: matrix) as the engine of ``exchange`` holds them: FSDP2 cuts dim 0 in
    equal chunks, the last ones padded."""
    parameters, chunks = {}, exchange.ranks if exchange.owner else 1
    for name, size in shapes.items():
        shape = (size,) if isinstance(size, int) else tuple(size)
        local = -(-shape[0] // chunks) * math.prod(shape[1:])
        parameters[name] = Parameter(name, shape, math.prod(shape), "matrix", torch.float32, local)
    return parameters


def _lay_out(parameters: Collection[Parameter], exchange: Exchange) -> tuple[tuple[Piece, ...], int]:
    """Lay ``parameters`` out in a row as the engine of ``exchange`` does; return the flat buffer's numel, too."""
    pieces, offset, width = [], 0, sum(parameter.local for parameter in parameters)
    for parameter in parameters:
        if exchange.owner:
            rows = exchange.ranks
            pieces.append(Piece(parameter.name, offset, parameter.local * rows, rows, width))
        else:
            pieces.append(Piece(parameter.name, offset, parameter.numel))
        offset += pieces[-1].numel // pieces[-1].rows
    return tuple(pieces), sum(piece.numel for piece in pieces)


class ThreadEngine:
    """The buffers of an engine on one virtual rank of ``world``.

    ``topology``: "all_reduce" (DDP), "reduce_scatter" (FSDP2), or with a first hop inside nodes of ``per_node`` ranks:
    "hsdp", "two_level" (DDP), "two_level_owner" (FSDP2).

    Attributes:
        parameters: by name. pieces: their places in the flat buffer of ``numel`` values.
        hops, levels, chunk: as for :class:`thinwire.core.engine.Engine`.
        owner: the rank keeps its row of the mean, ``numel / rows`` values; else all of it.
    """

    def __init__(
        self, topology: str, world: Threads, rank: int, ledger: Ledger, shapes: Shapes, per_node: int = 1
    ) -> None:
        whole = ThreadComm(world, rank, ledger, per_node=per_node)
        self.rank, self.ledger = rank, ledger
        self.levels: Levels | None = None
        self.chunk: tuple[int, int] | None = None
        entry: Exchange = AllReduce(whole) if topology in ("all_reduce", "two_level") else ReduceScatter(whole)
        self.hops: tuple[Exchange, ...] = (entry,)
        if topology not in ("all_reduce", "reduce_scatter"):
            node, local = divmod(rank, per_node)
            intra = ThreadComm(world, rank, ledger, range(node * per_node, (node + 1) * per_node), per_node)
            inter = ThreadComm(world, rank, ledger, range(local, world.size, per_node), per_node)
            last = ReduceScatter(inter) if topology == "two_level_owner" else AllReduce(inter, divide="after")
            self.hops = ReduceScatter(intra), last
        if topology == "hsdp":
            entry = self.hops[0]
        self.parameters = parameters_for(entry if entry.owner else self.hops[0], shapes)
        if topology == "two_level":
            self.chunk = rank % per_node, per_node
            widths = {name: parameter.local for name, parameter in self.parameters.items()}
            self.levels = ScatterAndShare(entry, intra, widths)
        elif topology == "two_level_owner":
            self.levels = Regroup(entry, per_node, world.size // per_node)
        self.owner, self.rows = entry.owner, entry.ranks if entry.owner else 1
        self.pieces, self.numel = _lay_out(self.parameters.values(), entry)

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """Make zeros for this rank's values of each parameter."""
        return {
            name: torch.nn.Parameter(torch.zeros(parameter.local if self.owner else parameter.numel))
            for name, parameter in self.parameters.items()
        }

    def run(self, steps: int | None = None, **options: Any) -> Run:
        """Make the run as ``compress()`` does; ``options``: optimizers, weights, seed."""
        return Run(
            self.parameters,
            self.hops[-1],
            steps,
            rank=self.rank,
            hop=len(self.hops),
            chunk=self.chunk,
            inside=self.hops[0] if len(self.hops) > 1 else None,
            **options,
        )

    def road(self, method: Method, run: Run, *, all_sent: bool = False, stage: type[Stage] = Stage) -> Road:
        """Make the road of ``method``, which has begun, with its own method for a hop inside the node.

        ``all_sent``: nothing is kept dense, whatever the method's policy. ``stage``: the class of its stages.
        """
        stages = []
        for hop, exchange in enumerate(self.hops, 1):
            stage_method = method if hop == len(self.hops) else intra_of(method)
            if stage_method is not method:
                stage_method.begin(replace(run, exchange=exchange, hop=hop))
            dense = frozenset() if all_sent else dense_among(stage_method, self.parameters.values())
            stages.append(stage(stage_method, dense, exchange, Guard([], False), self.ledger, self.levels is None))
        return Road(stages, self.levels)


class VirtualRank:
    """A thread as a rank: a method on its engine's road, and weights that start at zero and follow the mean.

    Attributes:
        run: what the method was told. optimizer: of ``weights``, one for each parameter; None: nothing is stepped.
        out: the last exchange's mean, flat, or this rank's row of it. stepped: the weights after the optimizer, flat.
    """

    out: Tensor
    stepped: Tensor

    def __init__(
        self, method: Method, engine: ThreadEngine, steps: int, *, seed: int = 0, all_sent: bool = False,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None, stage: type[Stage] = Stage,
    ) -> None:  # fmt: skip
        self.method, self.engine, self.ledger, self.weights = method, engine, engine.ledger, engine.weights()
        self.optimizer: Any = None if optimizer is None else optimizer(list(self.weights.values()))
        optimizers = () if optimizer is None else (self.optimizer,)
        self.run = engine.run(steps, seed=seed, optimizers=optimizers, weights=self.weights)
        method.state = State(method.card.offloaded_kinds)
        method.begin(self.run)
        self.road = engine.road(method, self.run, all_sent=all_sent, stage=stage)

    @torch.no_grad()
    def exchange(self, step: int, flat: Tensor) -> None:
        """Carry the gradient ``flat`` (numel,) over the road."""
        self.road.step, engine = step, self.engine
        self.out = torch.full((engine.numel // engine.rows,), torch.nan) if engine.owner else flat
        self.road.carry(flat, engine.pieces, self.out)
        self.road.end_pass()

    def undo(self) -> None:
        """Forget the last exchange, whose step does not count."""
        self.method.state.rollback()
        self.method.undo()
        self.method.finish()

    @torch.no_grad()
    def finish(self, number: int, clip: Tensor) -> None:
        """Take the optimizer's step with the mean times ``clip`` (0-dim), and show it to the method."""
        method, weights = self.method, self.weights
        method.state.commit()
        if self.optimizer is not None:
            sizes = [weight.numel() for weight in weights.values()]
            for weight, values in zip(weights.values(), self.out.split(sizes), strict=True):
                weight.grad = values * clip
            step = Step(number, (self.optimizer,), weights, clip)
            method.before_step(step)
            self.optimizer.step()
            step.restore()
            self.stepped = flat_copy(weights)
            method.after_step(step)
            method.state.commit()
        method.finish()


def flat_copy(weights: Mapping[str, Tensor]) -> Tensor:
    """Copy ``weights`` into one 1-D tensor in their order."""
    return torch.cat([weight.detach() for weight in weights.values()])
