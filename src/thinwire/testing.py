"""Ranks as threads, and the laws that every codec and every method obeys: for our tests and for anybody's own methods.

    results = reduce_on_threads(MyMethod, my_gradients, topology="all_reduce", size=4, shapes={"w": 1000}, steps=100)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.bucket import Bucket, Piece
from thinwire.collectives import AllReduce, Exchange, ReduceScatter, TwoLevel
from thinwire.comm import Comm
from thinwire.guard import Guard
from thinwire.ledger import Ledger
from thinwire.methods.base import Method, Parameter, Run, Step
from thinwire.plan import Plan
from thinwire.rehearsal import stand_in
from thinwire.road import Road
from thinwire.state import State

T = TypeVar("T")


class Threads:
    """``size`` virtual ranks in one process. Exactly what the network does, in rank order, without a network."""

    def __init__(self, size: int, seconds: float = 60) -> None:
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=seconds)

    def swap(self, rank: int, value: T) -> list[T]:
        """Hand in ``value``; get everybody's, in rank order."""
        self._slots[rank] = value
        self._barrier.wait()
        everybody = list(self._slots)
        self._barrier.wait()
        return everybody

    def run(self, function: Callable[[int], T]) -> list[T]:
        """``[function(rank) for rank in range(size)]``, at once. The first rank's error is raised; nothing hangs."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        if self._barrier.broken:
            raise TimeoutError("a virtual rank waited for the others in vain: they did not call the same verbs")
        return results


class LockStep(Threads):
    """As :class:`Threads`, but one rank runs at a time, from one meeting to the next: cheaper for many small cases.

    Nobody waits for the interpreter's lock, and a rank that goes home where the others meet is noticed at once.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._present = list(range(size))
        self._arrived = self._meetings = 0
        self._everybody: list[Any] = []

    def swap(self, rank: int, value: T) -> list[T]:
        before = self._meetings
        self._slots[rank] = value
        self._arrived += 1
        if self._arrived == self.size:
            self._everybody, self._arrived, self._meetings = list(self._slots), 0, before + 1
        self._pass_on(rank)
        self._turns[rank].acquire()
        if self._meetings == before:  # it is our turn again, and not all have come
            self._barrier.abort()
            raise threading.BrokenBarrierError
        return self._everybody

    def run(self, function: Callable[[int], T]) -> list[T]:
        def body(rank: int) -> T:
            self._turns[rank].acquire()
            try:
                return function(rank)
            finally:
                self._present.remove(rank)
                self._pass_on(rank)

        self._turns[0].release()
        return super().run(body)

    def _pass_on(self, rank: int) -> None:
        """To the next rank that is still there."""
        if self._present:
            self._turns[min(self._present, key=lambda other: (other - rank - 1) % self.size)].release()


class ThreadComm(Comm):
    """The verbs of :class:`Comm` between the threads of ``world``; ``members`` are the world ranks of this group.

    Groups of one world must not be used at the same time by different ranks in different order: every verb is a
    meeting of all ranks of the world.
    """

    def __init__(
        self, world: Threads, world_rank: int, ledger: Ledger, members: Sequence[int] | None = None, per_node: int = 1
    ) -> None:
        members = range(world.size) if members is None else members
        super().__init__(list(members).index(world_rank), len(members), [m // per_node for m in members], ledger)
        self._world, self._world_rank, self._members = world, world_rank, list(members)

    def _swap(self, tensor: Tensor) -> list[Tensor]:
        everybody = self._world.swap(self._world_rank, tensor.clone())
        return [everybody[member] for member in self._members]

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        tensor.copy_(_reduced(self._swap(tensor), op))

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None:
        out.copy_(_reduced([theirs[self.rank] for theirs in self._swap(rows)], op))

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> None:
        out.copy_(torch.stack(self._swap(row.reshape(-1))).view_as(out))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        for peer, theirs in enumerate(self._swap(rows)):
            out[peer].copy_(theirs[self.rank])


def _reduced(values: Sequence[Tensor], op: str) -> Tensor:
    result = values[0].clone()
    for value in values[1:]:
        if op == "max":
            result = torch.maximum(result, value)
        elif op == "or":
            result |= value
        else:
            result += value
    return result / len(values) if op == "mean" else result


def exchange_on(topology: str, world: Threads, rank: int, ledger: Ledger, per_node: int = 1) -> Exchange:
    """``all_reduce``, ``reduce_scatter``, ``two_level`` or ``two_level_owner``, between the threads of ``world``."""
    if topology == "all_reduce":
        return AllReduce(ThreadComm(world, rank, ledger, per_node=per_node))
    if topology == "reduce_scatter":
        return ReduceScatter(ThreadComm(world, rank, ledger, per_node=per_node))
    node, local = divmod(rank, per_node)
    intra = ThreadComm(world, rank, ledger, range(node * per_node, (node + 1) * per_node), per_node)
    inter = ThreadComm(world, rank, ledger, range(local, world.size, per_node), per_node)
    return TwoLevel(intra, inter, owner=topology == "two_level_owner")


Shapes = dict[str, int | tuple[int, ...]]
"""Parameter name -> its shape, or its number of elements."""


def parameters_for(exchange: Exchange, shapes: Shapes) -> dict[str, Parameter]:
    """What is known of the parameters ``shapes`` where the engine of ``exchange`` holds them (role: matrix)."""
    found = {}
    for name, given in shapes.items():
        shape = (given,) if isinstance(given, int) else tuple(given)
        # FSDP2 cuts dim 0 in equal chunks, the last of them padded
        local = -(-shape[0] // exchange.rows) * math.prod(shape[1:]) if exchange.owner else math.prod(shape)
        found[name] = Parameter(name, shape, math.prod(shape), "matrix", torch.float32, local)
    return found


def bucket_for(method: Method, exchange: Exchange, shapes: Shapes) -> tuple[Bucket, int]:
    """A bucket of the parameters ``shapes`` as the engine of ``exchange`` would make it, and the flat's numel."""
    rows = exchange.bucket_rows(method.on_wire)
    pieces, offset = [], 0
    parameters = parameters_for(exchange, shapes).values()
    total = sum(parameter.local for parameter in parameters)
    for parameter in parameters:
        if exchange.owner:
            pieces.append(Piece(parameter.name, offset, parameter.local * rows, rows, total))
        else:
            pieces.append(Piece(parameter.name, offset, parameter.numel))
        offset += parameter.local
    numel = total * rows if exchange.owner else total
    device = torch.device("cpu")
    bucket = Bucket(
        pieces, rows=rows, owner=exchange.owner, group=method.granule, dtype=torch.float32, device=device
    )
    return bucket, numel


def plan_of(method: Method, parameters: Iterable[Parameter], *exchanges: Exchange, intra: Method | None = None) -> Plan:
    """The plan of ``method`` on the last of ``exchanges``, and of ``intra`` on the one before, if there are two.

    As ``compress()`` makes it, for a method that may or may not have begun; without an engine and its layout.
    """
    known = list(parameters)
    run = method.run if hasattr(method, "run") else stand_in(method, known, exchanges[-1])
    return Plan(roads_of(method, known, *exchanges, intra=intra), run, "ddp" if intra is None else "hsdp")


def roads_of(
    method: Method, parameters: Iterable[Parameter], *exchanges: Exchange, intra: Method | None = None
) -> list[Road]:
    """The roads of ``method`` and, if there is one, of ``intra``; arguments as for :func:`plan_of`."""
    known, made = list(parameters), [method] if intra is None else [method, intra]
    return [
        Road(of, of.dense_among(known), exchange, Guard([], False), Ledger())
        for of, exchange in zip(made, reversed(exchanges), strict=True)
    ]


def reduce_on_threads(
    make: Callable[[], Method],
    gradients: Callable[[int, int, int], Tensor],
    *,
    topology: str,
    size: int,
    shapes: Shapes,
    steps: int = 1,
    per_node: int = 1,
    seed: int = 0,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    max_norm: float = math.inf,
    skip: Sequence[int] = (),
) -> list[list[dict[str, Any]]]:
    """Run a method for ``steps`` steps on ``size`` virtual ranks.

    Args:
        make: a new method for one rank.
        gradients: (rank, step, numel) -> that rank's flat gradient.
        shapes: parameter name -> shape, or number of elements.
        optimizer: of zero weights that follow the mean, as an engine's would: each rank holds all of a parameter
            ("all_reduce") or its chunk. max_norm: their gradients are clipped to it.
        skip: steps that turn out not to count (a value was not finite): nothing of them may remain.

    Returns:
        per rank, per step: ``input`` (flat), ``mean`` (flat, or this rank's row of it), ``bytes`` (sent by this rank),
        ``facts``, ``weights`` (name -> this rank's values), and the method's state as ``kind/parameter`` (R, span).
    """
    world = Threads(size)

    def body(rank: int) -> list[dict[str, Any]]:
        ledger, method = Ledger(), make()
        state = method.state = State(method.offloads)
        exchange = exchange_on(topology, world, rank, ledger, per_node)
        parameters = parameters_for(exchange, shapes)
        weights = {name: torch.nn.Parameter(torch.zeros(parameter.local)) for name, parameter in parameters.items()}
        stepper = None if optimizer is None else optimizer(list(weights.values()))
        steppers = () if stepper is None else (stepper,)
        method.begin(Run(parameters, exchange, steps, seed, steppers, weights, rank))
        bucket, numel = bucket_for(method, exchange, shapes)
        found = []
        for step in range(steps):
            flat = gradients(rank, step, numel)
            given = flat.clone()
            out = torch.full((numel // bucket.shape[0],), torch.nan) if exchange.owner else flat
            bucket.step = step
            bucket.load(flat, out)
            method.reduce(bucket, exchange)
            bucket.store(out)
            if step in skip:
                state.rollback()
                method.undo()
            else:
                state.commit()
                _optimize(method, exchange, stepper, weights, out, step, max_norm)
                state.commit()
            method.finish()
            found.append({
                "input": given,
                "mean": out.clone(),
                "bytes": torch.tensor(sum(ledger.now.bytes.values())),
                "facts": method.facts(),
                "weights": {name: weight.detach().clone() for name, weight in weights.items()},
                **state.state_dict(),
            })  # fmt: skip
            ledger.close_step()
        return found

    return world.run(body)


def _optimize(
    method: Method,
    exchange: Exchange,
    optimizer: torch.optim.Optimizer | None,
    weights: dict[str, torch.nn.Parameter],
    mean: Tensor,
    number: int,
    max_norm: float,
) -> None:
    """Clip, step, and let the method see it. Without an optimizer the method sees nothing."""
    if optimizer is None:
        return
    squares = mean.double().square().sum()
    if exchange.owner:
        squares = torch.stack(exchange._group()._world.swap(exchange.rank, squares)).sum()  # type: ignore[attr-defined]
    clip = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()
    for weight, values in zip(weights.values(), mean.split([w.numel() for w in weights.values()]), strict=True):
        weight.grad = values * clip
    step = Step(number, (optimizer,), weights, clip)
    method.before_step(step)
    optimizer.step()
    method.after_step(step)
