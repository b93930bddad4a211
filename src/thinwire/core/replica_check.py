"""Compares, after the first step and every so many steps, hashes of the raw bits that ranks must hold alike.

Before the first exchange after ``compress()``, or after a state was loaded, it compares the step from which ranks go
on, which masks, warm-ups and rounds follow: else they would misread each other's messages, or wait for ever.

After the first step that moves weights it compares these, which are alike only if weights and moments were so before,
wherever they came from and whenever they were loaded. Every so many steps it compares the weights (DDP: on all ranks;
HSDP: on those with the same shard), the state that a method promises to be equal (``StateKind.rank_equal``: masks), and
what a sharded engine's ranks hold of each other's weights (``weights.py``). Weights that are sharded over all ranks
have one owner each and are not compared. Ranks that go their own ways are compared when they have met.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.agreement import Agreement, Difference, Facts, find_difference
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


_DRIFTED = "go back to a checkpoint, and look for what that rank does differently (its learning rate, its memory)"
_BEGAN = (
    "it was the first step, so ranks began with different weights, moments or learning rates: load the same files on "
    "all ranks, and leave local-steps with wire.hand_over() before wire.close() (Safety(check_every=0): no check)"
)


def describe_start(step: int, skipped: int, flush_at: int | None, *, alone: bool) -> str:
    """Say from which step a rank goes on; ``alone``: ranks may have skipped steps of their own, which it leaves out."""
    words = f"step {step + skipped}"
    if not alone:
        words += f", {skipped} of them skipped" if skipped else ""
        words += ", with a flush to come" if flush_at == step else ""
    return words


class ReplicaCheck:
    """Compares the replicas of a model every so many steps. All that compares is collective."""

    def __init__(self, engine: Engine, road: Road, weights: Mapping[str, Tensor], every: int | None) -> None:
        """``every``: optimizer steps, skipped ones included; higher => cheaper, differences are noticed later. None:
        after the first step alone. 0: never. Where ranks go on from is compared in any case."""
        self._engine, self._weights, self._every, self._last = engine, weights, every, 0
        self._method, self._exchange = road.last.method, road.last.exchange
        self._comms = [aside(comm) for comm in engine.comms]
        self.begin()

    def begin(self) -> None:
        """Let the next step be a first one, before which all ranks compare where they go on from."""
        comm, self._groups_compared = self._replica_comm, 0
        self._first = self._every != 0 and comm is not None and comm.size > 1

    def start_is_compared(self, *, gathers: bool) -> bool:
        """Have ranks compared from which step they go on, or, ``gathers``, those that gather weights together?"""
        return self._groups_compared >= (1 if gathers else len(self._comms))

    def compare_start(self, start: str, *, gathers: bool) -> None:
        """Compare ``start``, the step from which ranks go on, in words; ``gathers``: in the engine's first group alone.

        Raises:
            ThinwireError: another rank goes on from another step; raised on all ranks.
        """
        self._groups_compared = 1 if gathers else len(self._comms)
        if difference := _gather_difference(self._comms[: self._groups_compared], {"start": start}):
            raise ThinwireError(
                f"rank {difference.rank} goes on from {difference.value}, and {difference.other_ranks} from "
                f"{difference.usual}: load the states of one checkpoint on all ranks"
            )

    def _is_due(self, number: int) -> bool:
        return bool(self._every) and number - self._last >= self._every  # type: ignore[operator]

    def look(self, number: int, rates: Iterable[float | Tensor]) -> None:
        """Compare after step ``number``, if a check is due and the ranks are together; ``rates``: the step's.

        Raises:
            ThinwireError: replicas differ. All ranks raise; those of the group that differs name the first difference.
        """
        due = self._is_due(number)
        if not (due or self._first) or not self._method.rank_equal:
            return
        first, self._last = self._first, number if due else self._last
        with Agreement(self._comms) as agreement, torch.no_grad():
            if first:  # ranks must agree on whether the next step is one, too
                self._first = not any(float(rate) != 0 for rate in rates)
                agreement.compare({"weights that stay in its first step (learning rates of 0)": str(self._first)})
            # Compare all before raising: the ranks of other groups do not know yet, and go on to the next comparison.
            tensors = self._tensors() if due else self._replicas()
            advice = _BEGAN if first else _DRIFTED
            wrong = [_compare(comm, of, f"after step {number}, {{}}: {advice}") for comm, of in tensors]
            if difference := next(filter(None, wrong), None):
                raise ThinwireError(difference)

    def look_at_names(self, number: int, names: Sequence[str], *, alone: bool) -> None:
        """Compare ``names``, whose gradients are about to be exchanged in step ``number``, if a check is due.

        No names: the optimizers are about to step. Parameters that only some ranks use make buffers of unlike sizes.
        ``alone``: the nodes step without each other.

        Raises:
            ThinwireError: another rank exchanges others; raised on all ranks.
        """
        if not self._is_due(number) or self._engine.kind == "ddp":  # DDP exchanges all or none
            return
        comm, *between = self._comms
        if Agreement([comm, *([] if alone else between)]).collect({"names": "\n".join(names)}, {}) is not None:
            raise ThinwireError(
                f"step {number}: ranks have gradients of different parameters: rank {comm.ranks[comm.rank]} has "
                f"{', '.join(names) or 'none'}, another rank has others. Use the same parameters on all ranks in a step"
            )

    @property
    def _replica_comm(self) -> Comm | None:
        """The group of the ranks that hold the same weights; None: each weight has one owner."""
        of_engine = {"fsdp2": None, "ddp": self._engine.comms[0]}
        return of_engine.get(self._engine.kind, self._exchange.comm)

    def _replicas(self) -> Iterator[tuple[GroupComm, dict[str, Tensor]]]:
        """Yield the group of ranks that hold the same weights, and these; nothing if none do."""
        if (comm := self._replica_comm) is not None:
            yield aside(comm), {f"the weights {name}": local(weight) for name, weight in self._weights.items()}

    def _tensors(self) -> Iterator[tuple[GroupComm, dict[str, Tensor]]]:
        """Yield groups of ranks, and the tensors that must be the same within each."""
        engine, method, exchange = self._engine, self._method, self._exchange
        yield from self._replicas()
        if kinds := [name for name, kind in method.card.state_kinds.items() if kind.rank_equal]:
            method.finish()
            entries = [entry for kind in kinds for entry in find_entries(method.state, kind)]
            entries.sort(key=lambda entry: entry[:2])
            yield aside(exchange.comm), {f"{kind} of {name}": value for kind, name, value in entries}
        for replica in getattr(engine, "replicas", ()):
            if replica.resident is not None:
                yield aside(replica.comm), {f"the gathered weights {replica.shard.names[0]}": replica.resident}


def _compare(comm: GroupComm, tensors: Mapping[str, Tensor], words: str) -> str:
    """Say what differs between the ranks of ``comm`` with ``words``, or ""."""
    if not tensors:
        return ""
    hashes = torch.stack([digest(values) for values in tensors.values()]).tolist()
    difference = _gather_difference([comm], dict(zip(tensors, map(str, hashes), strict=True)))
    if difference is None:
        return ""
    return words.format(f"{difference.name} on rank {difference.rank} differ from those of {difference.other_ranks}")


def _gather_difference(comms: Sequence[GroupComm], facts: Facts) -> Difference | None:
    """Find the first of ``facts`` in which the ranks of ``comms`` differ; None: they agree. Collective."""
    rows = Agreement(comms).collect(facts, {}) or ()
    return find_difference([(rank, facts_of_rank) for rank, facts_of_rank, _ in rows])


def aside(comm: Comm) -> GroupComm:
    """Return a communicator of the same ranks whose bytes are counted in no step."""
    assert isinstance(comm, GroupComm)
    return GroupComm.aside(comm.group, comm.device)
