"""Compares, every so many steps, hashes of the raw bits that ranks must hold alike.

It compares the weights (DDP: on all ranks; HSDP: on those with the same shard), the state that a method promises to be
equal (``StateKind.rank_equal``: masks), and what a sharded engine's ranks hold of each other's weights
(``weights.py``). Weights that are sharded over all ranks have one owner each and are not compared. Ranks that go their
own ways are compared when they have met.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.agreement import Agreement, find_difference
from thinwire.core.engine import Engine
from thinwire.core.road import Road
from thinwire.core.state import find_entries
from thinwire.network.comm import Comm, GroupComm, local

WIDTH = 1 << 20
"""Words that are hashed at once: the scratch memory is 8 bytes for each."""
STEP = 0x9E3779B97F4A7C1
"""An odd factor by which the hash of the earlier words is multiplied."""


def digest(values: Tensor) -> Tensor:
    """Hash the raw bits of ``values`` (any shape and dtype) to a 0-dim int64 on their device, without a host sync.

    ``WIDTH`` 32-bit words, each times an odd number of its place, are summed modulo 2^64; the hash is a polynomial in
    ``STEP`` of such sums. Integer sums do not depend on their order. It is no defence against an adversary.
    """
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for words in _words(values).split(WIDTH):
        total = total * STEP + (words * _odd(words.device)[: len(words)]).sum()
    return total


def _words(values: Tensor) -> Tensor:
    """View the bits of ``values``, padded with zeros, as int32 (n,)."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    if len(flat) % 4 or flat.storage_offset() % 4:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 4)])
    return flat.view(torch.int32)


@functools.cache
def _odd(device: torch.device) -> Tensor:
    """Draw odd numbers, (WIDTH,) int64, the same on all ranks."""
    limits = torch.iinfo(torch.int64)
    numbers = torch.randint(limits.min, limits.max, (WIDTH,), generator=torch.Generator().manual_seed(0), device="cpu")
    return (numbers | 1).to(device)


class ReplicaCheck:
    """Compares the replicas of a model every so many steps. All its calls are collective."""

    def __init__(self, engine: Engine, road: Road, weights: Mapping[str, Tensor], every: int) -> None:
        """``every``: optimizer steps, skipped ones included; higher => cheaper, differences are noticed later."""
        self._engine, self._weights, self.every, self._last = engine, weights, every, 0
        self._method, self._exchange = road.last.method, road.last.exchange
        self._comms = [_aside(comm) for comm in engine.comms]

    def look(self, number: int) -> None:
        """Compare after step ``number``, if a check is due and the ranks are together.

        Raises:
            ThinwireError: replicas differ. All ranks raise; those of the group that differs name the first difference.
        """
        if number - self._last < self.every or not self._method.rank_equal:
            return
        self._last = number
        with Agreement(self._comms), torch.no_grad():
            # Compare all before raising: the ranks of other groups do not know yet, and go on to the next comparison.
            wrong = [_compare(comm, tensors, number) for comm, tensors in self._tensors()]
            if difference := next(filter(None, wrong), None):
                raise ThinwireError(difference)

    def look_at_names(self, number: int, names: Sequence[str]) -> None:
        """Compare ``names``, whose gradients are about to be exchanged in step ``number``, if a check is due.

        No names: the optimizers are about to step. Parameters that only some ranks use make buffers of unlike sizes.

        Raises:
            ThinwireError: another rank exchanges others; raised on all ranks.
        """
        if number - self._last < self.every or self._engine.kind == "ddp":  # DDP exchanges all or none
            return
        comm = self._comms[0]
        if Agreement([comm]).collect({"names": "\n".join(names)}, {}) is not None:
            raise ThinwireError(
                f"step {number}: ranks have gradients of different parameters: rank {comm.ranks[comm.rank]} has "
                f"{', '.join(names) or 'none'}, another rank has others. Use the same parameters on all ranks in a step"
            )

    def _tensors(self) -> Iterator[tuple[GroupComm, dict[str, Tensor]]]:
        """Yield groups of ranks, and the tensors that must be the same within each."""
        engine, method, exchange = self._engine, self._method, self._exchange
        if engine.kind != "fsdp2":
            comm = engine.comms[0] if engine.kind == "ddp" else exchange.comm
            yield _aside(comm), {f"the weights {name}": local(weight) for name, weight in self._weights.items()}
        if kinds := [name for name, kind in method.card.state_kinds.items() if kind.rank_equal]:
            method.finish()
            entries = [entry for kind in kinds for entry in find_entries(method.state, kind)]
            entries.sort(key=lambda entry: entry[:2])
            yield _aside(exchange.comm), {f"{kind} of {name}": value for kind, name, value in entries}
        for replica in getattr(engine, "replicas", ()):
            if replica.resident is not None:
                yield _aside(replica.comm), {f"the gathered weights {replica.shard.names[0]}": replica.resident}


def _compare(comm: GroupComm, tensors: Mapping[str, Tensor], number: int) -> str:
    """Say what differs between the ranks of ``comm``, or ""."""
    if not tensors:
        return ""
    hashes = torch.stack([digest(values) for values in tensors.values()]).tolist()
    rows = Agreement([comm]).collect(dict(zip(tensors, map(str, hashes), strict=True)), {})
    if rows is None:
        return ""
    difference = find_difference([(rank, facts) for rank, facts, _ in rows])
    assert difference is not None
    return (
        f"after step {number}, {difference.name} on rank {difference.rank} differ from those of "
        f"{difference.other_ranks}: go back to a checkpoint, and look for what that rank does differently (its "
        "learning rate, its memory)"
    )


def _aside(comm: Comm) -> GroupComm:
    assert isinstance(comm, GroupComm)
    return GroupComm.aside(comm.group, comm.device)
