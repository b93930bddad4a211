"""Replicas that come and go, on torchft: ``compress(model, optimizer, method, manager=manager)``.

    manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=2,
                              use_async_quorum=False)
    wire = compress(model, optimizer, "trickle", manager=manager)
    for batch in batches:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()                # asks the quorum, exchanges, votes; a step that does not count changes nothing

torchft's manager knows who is there; it asks its lighthouse once for each step. Weights, moments and the method's state
travel to a replica that joins through the manager: it needs no state dict of yours.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from thinwire.base.errors import LostRank, ThinwireError
from thinwire.base.extras import load
from thinwire.core.members import Give, Members, Take
from thinwire.core.safety import Safety
from thinwire.core.step import unwrapped
from thinwire.engines.replicas import Replicas
from thinwire.methods import Method, resolve
from thinwire.network.comm import ManagedComm
from thinwire.network.ledger import Ledger
from thinwire.network.membership import Membership
from thinwire.wire import DEFAULT_SAFETY, Options, Wire, check_parameters, join

KEY = "thinwire"
"""The entry of the manager's state that is ours."""


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

    A replica is one rank with the whole model, or the ranks of one ``fully_shard`` over a 1-D mesh of their own. Not
    collective among replicas: each calls it when it starts, with the same arguments. The step's exchange begins when
    the optimizer steps (or ``wire.clip_grad_norm_`` is called). A step that does not count, as a replica was lost in
    it, leaves weights, optimizer and method as they were: ``wire.skipped`` counts it, and ``manager.current_step()``
    does not.

    Args:
        model: the bare module, or one that was sharded by ``fully_shard``; not DistributedDataParallel, since the
            manager's group is the only one between replicas.
        optimizer, method, steps, seed, safety: as for :func:`thinwire.compress`.
        manager: a ``torchft.Manager`` with ``use_async_quorum=False``, a ``ProcessGroupGloo``, and world size mode
            ``DYNAMIC``. Its timeout is how long a replica waits for the others in an exchange.

    Raises:
        ThinwireError: something cannot be carried; the message names it and the alternative.
    """
    torchft = load("torchft")
    _check(torchft, manager, model, safety)
    ledger = Ledger()
    across = ManagedComm(manager._pg, ledger, manager._timeout)
    engine = Replicas(model, ManagerMembers(manager), across)
    options = Options(resolve(method), tuple(unwrapped(optimizer)), False, None, steps, seed, None, None, safety)
    check_parameters(model, options.method)
    wire = join(engine, options, ledger)
    wire.attach()
    return wire


def _check(torchft: Any, manager: Any, model: nn.Module, safety: Safety) -> None:
    """Refuse what cannot be carried."""
    if not isinstance(manager, torchft.Manager):
        raise ThinwireError(f"manager must be a torchft.Manager, got {type(manager).__name__}")
    for name in ("_pg", "_quorum_id", "_timeout", "_use_async_quorum", "_replica_world_size_mode"):
        if not hasattr(manager, name):
            raise ThinwireError(f"torchft.Manager has no {name} in this version: thinwire is made for torchft 0.2")
    if manager._use_async_quorum:
        raise ThinwireError(
            "the manager asks its quorum beside the forward pass, and a replica that joins would take a step with "
            "weights that it does not have yet: pass use_async_quorum=False"
        )
    if manager._replica_world_size_mode != torchft.manager.WorldSizeMode.DYNAMIC:
        raise ThinwireError(
            "FIXED_WITH_SPARES is not carried: methods average over all replicas of the group, spares included; pass "
            "world_size_mode=WorldSizeMode.DYNAMIC"
        )
    if not isinstance(manager._pg, torchft.ProcessGroupGloo):
        raise ThinwireError(
            f"{type(manager._pg).__name__} is not carried: pass Manager(pg=torchft.ProcessGroupGloo(...)), on which "
            "alone messages between two replicas were tested"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ThinwireError(
            "under a manager pass the bare module, not DistributedDataParallel: replicas have no group but the "
            "manager's"
        )
    if safety.check_every is not None:
        raise ThinwireError("check_every is not carried under a manager, whose replicas may be lost in the comparison")
    if any(weight.device.type != "cpu" for weight in model.parameters()):
        raise ThinwireError("under a manager the weights must be on a CPU: gloo moves no device memory point to point")


class ManagerMembers(Members):
    """The replicas of a torchft manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._name = uuid.uuid4().hex
        self._membership = Membership.apart(0, 1, -1)

    def ask(self) -> Membership:
        manager = self._manager
        manager.start_quorum()
        self._raise_error()
        rank, size, number = manager.participating_rank(), manager.num_participants(), manager._quorum_id
        if number != self._membership.number:
            comm = ManagedComm(manager._pg, Ledger(), manager._timeout)
            comm.take(Membership.apart(rank, size, number))
            name = torch.frombuffer(bytearray(self._name.encode()), dtype=torch.uint8)
            names = torch.zeros(size, len(name), dtype=torch.uint8)
            comm.all_gather(names, name)
            self._membership = Membership.apart(rank, size, number, [bytes(row.tolist()).decode() for row in names])
        return self._membership

    def vote(self, counts: bool) -> bool:
        if not counts and self._manager.errored() is None:
            self._manager.report_error(RuntimeError("thinwire: the exchange failed"))
        counted = self._manager.should_commit()
        if not counted:
            self._manager._pg.abort()  # so that who still waits for this replica's messages is told at once
        return counted

    def fall_behind(self) -> None:
        self._manager.load_state_dict({"step": 0, "batches_committed": 0})

    def offer(self, give: Give, take: Take) -> None:
        self._manager.register_state_dict_fn(KEY, take, give)

    def _raise_error(self) -> None:
        error = self._manager.errored()
        if error is not None:
            raise LostRank(max(self._membership.rank, 0), [], "quorum", 0.0, str(error).splitlines()[0])
