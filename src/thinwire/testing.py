"""Ranks as threads, and the laws that every codec and every method obeys: for our tests and for anybody's own methods.

    results = reduce_on_threads(MyMethod, my_gradients, topology="all_reduce", size=4, shapes={"w": 1000}, steps=100)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.bucket import Bucket, Piece
from thinwire.collectives import AllReduce, Exchange, ReduceScatter, TwoLevel
from thinwire.comm import Comm
from thinwire.ledger import Ledger
from thinwire.methods.base import Method
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
    inside = ThreadComm(world, rank, ledger, range(node * per_node, (node + 1) * per_node), per_node)
    across = ThreadComm(world, rank, ledger, range(local, world.size, per_node), per_node)
    return TwoLevel(inside, across, owner=topology == "two_level_owner")


def bucket_for(method: Method, exchange: Exchange, shapes: dict[str, int]) -> tuple[Bucket, int]:
    """A bucket of parameters ``name -> numel`` as the engine of ``exchange`` would make it, and the flat's numel."""
    rows = exchange.bucket_rows(method.on_wire)
    pieces, offset = [], 0
    if exchange.owner:
        spans = {name: -(-numel // rows) for name, numel in shapes.items()}
        total = sum(spans.values())
        for name, span in spans.items():
            pieces.append(Piece(name, offset, span * rows, rows, total))
            offset += span
        numel = total * rows
    else:
        for name, size in shapes.items():
            pieces.append(Piece(name, offset, size))
            offset += size
        numel = offset
    device = torch.device("cpu")
    bucket = Bucket(
        pieces, rows=rows, owner=exchange.owner, group=method.granule, dtype=torch.float32, device=device
    )
    return bucket, numel


def reduce_on_threads(
    make: Callable[[], Method],
    gradients: Callable[[int, int, int], Tensor],
    *,
    topology: str,
    size: int,
    shapes: dict[str, int],
    steps: int = 1,
    per_node: int = 1,
) -> list[list[dict[str, Tensor]]]:
    """Run a method for ``steps`` steps on ``size`` virtual ranks.

    Args:
        make: a new method for one rank.
        gradients: (rank, step, numel) -> that rank's flat gradient.
        shapes: parameter name -> number of elements.

    Returns:
        per rank, per step: ``input`` (flat), ``mean`` (flat, or this rank's row of it), ``bytes`` (sent by this rank),
        and the method's state as ``kind/parameter`` (R, span).
    """
    world = Threads(size)

    def body(rank: int) -> list[dict[str, Tensor]]:
        ledger, method = Ledger(), make()
        state = method.state = State()
        exchange = exchange_on(topology, world, rank, ledger, per_node)
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
            state.commit()
            sent = torch.tensor(sum(ledger.now.bytes.values()))
            ledger.close_step()
            found.append({"input": given, "mean": out.clone(), "bytes": sent, **state.state_dict()})
        return found

    return world.run(body)
