"""Replicas that come and go, on torchft: gradients are exchanged between those that its manager says are there.

Weights, moments and the method's state reach a replica that joins through the manager, without a state dict of yours.
"""

from __future__ import annotations

import functools
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire.adapters.transport import Transport, follow
from thinwire.base.errors import FailedExchange, LostRank, ThinwireError, Unanswered, first_line, refuse_any
from thinwire.base.extras import load
from thinwire.core.agreement import Agreement
from thinwire.core.optimizers import unwrapped
from thinwire.core.safety import Safety
from thinwire.engines.fsdp2 import FSDP2
from thinwire.engines.replicas import Replicas, any_of
from thinwire.engines.sharded_replicas import ShardedReplicas
from thinwire.methods import Method, resolve
from thinwire.network.comm import Comm, GroupComm, ManagedComm, Membership
from thinwire.network.ledger import Ledger
from thinwire.wire import DEFAULT_SAFETY, Options, Wire, check_parameters, join

NAME = 192
"""Bytes of a replica's name, with 65 to 74 that torchft and the trainer put behind it."""
FETCH_S = 120.0
"""Seconds for which fetching a state may stand still before a replica joins without it."""
CONNECT = timedelta(seconds=1)
"""The time that a replica waits for another's address when they connect: twice as long after each time that failed,
half as long after each that did not. gloo waits five times as long for an answer: so long a replica that dies in that
moment holds the others up."""


def compress(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    method: Method | str = "dense",
    *,
    manager: Any,
    steps: int | None = None,
    seed: int = 0,
    safety: Safety = DEFAULT_SAFETY,
) -> Wire:
    """Exchange ``model``'s gradients with ``method`` between the replicas of ``manager``, which may come and go.

    A replica is one rank with the whole model, or several ranks that ``fully_shard`` it (HSDP), which live and die
    together: one manager for each rank, with its ``rank`` and ``world_size`` in the replica. Each replica calls this
    when it starts, with the same arguments; it is collective inside the replica alone. A step that does not count, as a
    replica was lost in it, leaves weights, optimizer and method as they were: ``wire.skipped`` counts it, and
    ``manager.current_step()`` does not.

    Args:
        model: on a CPU: the bare module, or one after ``fully_shard`` on a 1-D mesh of all ranks of the replica.
            optimizer, method, steps, seed, safety: as for :func:`thinwire.compress`.
        manager: a ``torchft.Manager`` with ``use_async_quorum=False`` and a ``ProcessGroupGloo``, or a function that
            opens one, which is then ``wire.manager``: a replica that joins first fetches the others' state while they
            go on, and opens its manager when it has it; for an open one they wait. Its timeout is how long a replica
            waits for the others in an exchange. With world size mode ``FIXED_WITH_SPARES`` the first
            ``min_replica_size`` replicas train; further ones keep up with them and contribute nothing.
    """
    torchft, follower = load("torchft"), None
    if callable(manager) and not isinstance(manager, torchft.Manager):
        groups = FSDP2.process_groups(model) if isinstance(model, FSDPModule) else []
        inside = [GroupComm.aside(group, torch.device("cpu")) for group in groups]
        follower = follow(inside[0].rank if inside else 0, FETCH_S, inside)
        manager = manager()
    _check(torchft, manager, model, safety)
    ledger, optimizers = Ledger(), tuple(unwrapped(optimizer))
    across = ManagedComm(manager._pg, ledger, manager._timeout)
    options = Options(resolve(method), optimizers, False, None, steps, seed, None, None, safety)
    if not isinstance(model, FSDPModule):
        check_parameters(model, options.method)
        wire = join(Replicas(model, ManagerMembers(manager), across), options, ledger)
    else:
        wire = _join_sharded(model, manager, across, options, ledger)
    assert wire.turnover is not None
    wire.manager, wire.turnover.follows = manager, follower
    transport = manager._checkpoint_transport
    transport.tape, transport.holds = wire.turnover.tape, follower is not None
    wire.attach()
    return wire


def _join_sharded(model: Any, manager: Any, across: ManagedComm, options: Options, ledger: Ledger) -> Wire:
    """Make the wire of a replica that is sharded over several ranks, which compare their settings. Collective."""
    FSDP2.renew(model)
    inside = [GroupComm.aside(group, torch.device("cpu")) for group in FSDP2.process_groups(model)]
    with Agreement(inside) as agreement:
        meet = functools.partial(agreement.compare, *options.facts(FSDP2, model))
        check_parameters(model, options.method)
        members = ManagerMembers(manager, inside)
        engine = ShardedReplicas(model, options.method, members, across, ledger, meet)
        agreement.undo = engine.close
        return join(engine, options, ledger)


def _check(torchft: Any, manager: Any, model: nn.Module, safety: Safety) -> None:
    """Refuse what is not supported."""
    if not isinstance(manager, torchft.Manager):
        raise ThinwireError(f"manager must be a torchft.Manager, got {type(manager).__name__}")
    private = ("_pg", "_quorum_id", "_timeout", "_use_async_quorum", "_replica_world_size_mode", "_min_replica_size",
               "_group_rank", "_group_world_size", "_checkpoint_transport")  # fmt: skip
    for name in private:
        if not hasattr(manager, name):
            raise ThinwireError(f"torchft.Manager has no {name} in this version: thinwire is made for torchft 0.2")
    fixed = manager._replica_world_size_mode != torchft.manager.WorldSizeMode.DYNAMIC
    modules = list(model.modules())
    refused = {
        "with use_async_quorum=True a replica that joins would take a step before it has the weights: pass "
        "use_async_quorum=False": manager._use_async_quorum,
        "FIXED_WITH_SPARES with min_replica_size=1 leaves one replica at work, with nobody to exchange with: set 2 "
        "or more, or use WorldSizeMode.DYNAMIC": fixed and manager._min_replica_size < 2,
        f"{type(manager._pg).__name__} is not supported: pass Manager(pg=torchft.ProcessGroupGloo(...))":
            not isinstance(manager._pg, torchft.ProcessGroupGloo),
        f"checkpoint_transport={type(manager._checkpoint_transport).__name__} is not supported: leave it out, for "
        "state travels by HTTP": urlsplit(manager._checkpoint_transport.metadata()).hostname is None,
        "the manager already connects the replicas: pass the bare module, not DistributedDataParallel":
            any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules),
        "parts of the model are sharded, but the root is not: call fully_shard(model) after its parts":
            any(isinstance(module, FSDPModule) for module in modules[1:]) and not isinstance(model, FSDPModule),
        f"the manager says that a replica has {manager._group_world_size} ranks, but this rank holds the whole "
        "model: call fully_shard(model) on a mesh of those ranks, or pass world_size=1":
            manager._group_world_size > 1 and not isinstance(model, FSDPModule),
        "check_every is not supported with a torchft manager: replicas may be lost in the middle of a comparison":
            bool(safety.check_every),
        "with a torchft manager the weights must be on a CPU: gloo cannot send a GPU's memory":
            any(weight.device.type != "cpu" for weight in model.parameters()),
    }  # fmt: skip
    refuse_any(refused)
    for name in ("set_timeout", "abort", "parent", "_timeout", "_pg"):  # the parent is there once it has connected
        if not hasattr(type(manager._pg), name) and not hasattr(manager._pg, name):
            raise ThinwireError(f"ProcessGroupGloo has no {name} in this version: thinwire is made for torchft 0.2")
    if isinstance(model, FSDPModule):
        _check_mesh(manager, FSDP2.process_groups(model))


def _check_mesh(manager: Any, groups: Sequence[Any]) -> None:
    """Refuse a mesh that is not one dimension of the ranks that the manager counts as this replica's."""
    if len(groups) > 1:
        raise ThinwireError(
            "with a torchft manager, shard over a 1-D mesh of the replica's own ranks: the manager takes the place "
            "of a second dimension, and tensor parallelism inside a replica is not supported"
        )
    placed, counted = (groups[0].rank(), groups[0].size()), (manager._group_rank, manager._group_world_size)
    if placed != counted:
        raise ThinwireError(
            f"the model's mesh says that this is rank {placed[0]} of {placed[1]}, and the manager says rank "
            f"{counted[0]} of {counted[1]}: pass Manager(rank=..., world_size=...) that match the mesh"
        )
    if placed[1] == 1:  # torch would not tell of its backward passes
        raise ThinwireError("a replica of one rank has nothing to shard: pass the bare module, without fully_shard")


class ManagerMembers:
    """The replicas of a torchft manager. A step is *attempted*, and counts or leaves no trace.

    The ranks of a replica (``inside``: their groups) decide alike. Each exchanges with the same rank of the others.
    A replica is named by its manager's ``replica_id``, if it has one, and by its process: "west-0:3fa9...".
    """

    def __init__(self, manager: Any, inside: Sequence[Comm] = ()) -> None:
        self._manager, self._inside = manager, inside
        self._place = f"{manager._group_rank} of {manager._group_world_size}"
        name = f"{getattr(manager, '_replica_id', None) or ''}:{uuid.uuid4().hex}".replace(" ", "_")
        self._name = f"{name[-NAME:]:>{NAME}} {self._place:24}"  # as long on all
        self._membership = Membership(0, (0,), -1)
        self._hold: Callable[[], Any]
        self._received: Any = None  # of a peer, not taken yet
        self._late = False
        self._patience = CONNECT
        if not isinstance(former := manager._checkpoint_transport, Transport):
            host = urlsplit(former.metadata()).hostname
            assert host is not None  # it has been checked
            manager._checkpoint_transport = Transport(host, manager._timeout)
            former.shutdown()
            former._server.server_close()
        self.transport: Transport = manager._checkpoint_transport

    def ask(self) -> tuple[Membership, Any]:
        """Return who takes part in the attempt that now begins, and another's state if this replica is behind, or None.

        After an attempt that failed on any replica ``number`` is another one. Raises LostRank. Collective.
        """
        manager, membership, error = self._manager, self._membership, None
        counts = manager.state_dict()
        try:
            self._start_quorum()
        except (TimeoutError, RuntimeError) as refusal:
            raise Unanswered(
                f"this replica found no quorum ({first_line(refusal)}): is the lighthouse running, can it be reached "
                "from here, and are at least min_replicas replicas running?"
            ) from refusal
        try:
            if (reported := manager.errored()) is not None:
                raise LostRank(membership.rank, [], "quorum", 0.0, first_line(reported))
            if manager._quorum_id != membership.number:
                membership = self._meet(manager)
        except FailedExchange as failure:
            error = failure
        received, self._received = self._received, None
        self._late |= received is not None
        failed = any_of(self._inside, error is not None)
        if not failed and received is not None:
            try:
                received = received.complete(self._hold())
            except Exception as broken:  # whatever it is: the other ranks of this replica are told
                words = f"the state of another replica did not arrive: {broken!r}"
                error = LostRank(membership.rank, [], "quorum", 0.0, words)
        if failed or any_of(self._inside, error is not None):
            manager.load_state_dict(counts)  # as far behind as before, on all ranks of the replica
            raise error or LostRank(membership.rank, [], "quorum", 0.0, "another rank of this replica could not join")
        self._membership = membership
        return membership, received

    def _start_quorum(self) -> None:
        """Ask the lighthouse, and connect to who takes part if that has changed, with a patience of its own.

        The group's own timeout, which its exchanges have, is as it was."""
        manager, group, number = self._manager, self._manager._pg, self._manager._quorum_id
        usual = group._timeout
        group.set_timeout(min(self._patience, usual))
        self.transport.asks_since = time.monotonic()
        try:
            manager.start_quorum()
        finally:
            self.transport.asks_since = math.inf
            group.set_timeout(usual)
        if manager._quorum_id == number:
            return
        if group._pg is None:  # as connecting failed
            self._patience = min(2 * self._patience, usual)
            return
        self._patience = max(self._patience / 2, CONNECT)
        group.parent._get_backend(torch.device("cpu"))._set_default_timeout(usual)

    def _meet(self, manager: Any) -> Membership:
        """Learn the names of all who take part."""
        rank, size, present = manager.participating_rank(), manager.num_participants(), manager._pg.size()
        spare = None if rank is not None else manager._pg.parent.rank() - size
        heard = rank if spare is None else spare % size
        membership = Membership(heard, tuple(range(size)), manager._quorum_id, (), present - size, spare)
        comm = ManagedComm(manager._pg, Ledger(), manager._timeout)
        comm.take(membership)
        text = bytearray(self._name.encode("ascii", "replace"))
        text.append(self._late or self._received is not None)
        row = torch.frombuffer(text, dtype=torch.uint8)
        rows = torch.zeros(size, len(row), dtype=torch.uint8, device="cpu")
        comm.all_gather(rows, row)
        late_ranks = tuple(rank for rank, flag in enumerate(rows[:, -1].tolist()) if flag)
        pairs = [bytes(row).decode().strip().split(" ", 1) for row in rows[:, :-1].tolist()]
        if unlike := sorted({seat for _, seat in pairs} - {self._place}):
            raise ThinwireError(
                f"this is rank {self._place} of its replica, and it met rank {unlike[0]} of another: all replicas must "
                "have the same number of ranks"
            )
        return membership._replace(names=tuple(name for name, _ in pairs), late=late_ranks)

    def vote(self, counts: bool) -> bool:
        """Return whether the step counts for this replica; another may vote otherwise, and one is then behind."""
        if not counts and self._manager.errored() is None:
            self._manager.report_error(RuntimeError("thinwire: the exchange failed"))
        patience = 2 * self._manager._timeout  # for this replica's other ranks, which may still wait for a peer
        try:
            counted = self._manager.should_commit(timeout=patience)
        except (TimeoutError, RuntimeError) as refusal:
            raise Unanswered(
                f"this replica's vote on a step failed ({first_line(refusal)}): has one of its ranks ended, or stood "
                f"still for {patience.total_seconds():g} s? Start the replica again"
            ) from refusal
        self._late &= not counted
        if not counted:
            self._manager._pg.abort()  # so that who still waits for this replica's messages is told at once
        return counted

    def fall_behind(self) -> None:
        """Count as behind all others when this replica asks again, whatever steps it has counted."""
        self._manager.load_state_dict({"step": 0, "batches_committed": 0})

    def offer(self, give: Callable[[], dict[str, Any]], hold: Callable[[], Any]) -> None:
        """Let one that is behind get another's ``give()``, but for what its own ``hold`` returns."""
        self._hold = hold
        self._manager.register_state_dict_fn("thinwire", functools.partial(setattr, self, "_received"), give)


def open_manager(name: str, address: str, *, min_replicas: int, timeout_s: float, longest_s: float) -> Any:
    """Open a ``torchft.Manager``, which tells the lighthouse (TORCHFT_LIGHTHOUSE) from now on that this replica lives.

    Its attribute ``asking`` says whether it waits for the lighthouse's answer. torch's store of this replica's one rank
    must be there (MASTER_ADDR, MASTER_PORT).

    Args:
        name: of the replica. address: this machine's, by which the others reach it.
        min_replicas: fewest replicas that take a step.
        timeout_s: seconds to wait for the others in an exchange. longest_s: for so many that a step can be taken.

    Raises:
        ThinwireError: the lighthouse does not answer.
    """
    torchft: Any = load("torchft")

    class Manager(torchft.Manager):
        asking = False

        def start_quorum(self) -> None:  # wait_quorum, which it calls, is what a vote calls, too
            self.asking = True
            try:
                super().start_quorum()
            finally:
                self.asking = False

    patience = timedelta(seconds=timeout_s)
    try:
        return Manager(
            pg=torchft.ProcessGroupGloo(timeout=patience), load_state_dict=None, state_dict=None,
            min_replica_size=min_replicas, use_async_quorum=False, timeout=patience,
            quorum_timeout=timedelta(seconds=longest_s), connect_timeout=patience, rank=0, world_size=1,
            replica_id=name, hostname=address, checkpoint_transport=Transport(address, patience),
        )  # fmt: skip
    except (RuntimeError, TimeoutError) as error:
        line = f"the lighthouse at {os.environ['TORCHFT_LIGHTHOUSE']} does not answer"
        raise Unanswered(f"{line}: {first_line(error)}") from None
