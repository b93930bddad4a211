"""Replicas that come and go, on torchft: gradients are exchanged between those that its manager says are there.

Weights, moments and the method's state reach a replica that joins through the manager, without a state dict of yours.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire.base.errors import LostRank, ThinwireError
from thinwire.base.extras import load
from thinwire.core.safety import Safety
from thinwire.core.step import unwrapped
from thinwire.engines.replicas import Replicas
from thinwire.methods import Method, resolve
from thinwire.network.comm import ManagedComm, Membership
from thinwire.network.ledger import Ledger
from thinwire.wire import DEFAULT_SAFETY, Options, Wire, check_parameters, join

NAME_BYTES = 64


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

    A replica is one rank with the whole model. Each calls this when it starts, with the same arguments; it is not
    collective. A step that does not count, as a replica was lost in it, leaves weights, optimizer and method as they
    were: ``wire.skipped`` counts it, and ``manager.current_step()`` does not.

    Args:
        model: the bare module, on a CPU. optimizer, method, steps, seed, safety: as for :func:`thinwire.compress`.
        manager: a ``torchft.Manager`` with ``use_async_quorum=False``, a ``ProcessGroupGloo``, and world size mode
            ``DYNAMIC``. Its timeout is how long a replica waits for the others in an exchange.
    """
    _check(load("torchft"), manager, model, safety)
    ledger, optimizers = Ledger(), tuple(unwrapped(optimizer))
    engine = Replicas(model, ManagerMembers(manager), ManagedComm(manager._pg, ledger, manager._timeout))
    options = Options(resolve(method), optimizers, False, None, steps, seed, None, None, safety)
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
    wrapped = any(isinstance(m, nn.parallel.DistributedDataParallel | FSDPModule) for m in model.modules())
    refused = {
        "the manager asks its quorum beside the forward pass, and who joins would step with weights that it does not "
        "have yet: pass use_async_quorum=False": manager._use_async_quorum,
        "FIXED_WITH_SPARES is not carried, as methods average over all replicas, spares included: pass "
        "world_size_mode=WorldSizeMode.DYNAMIC":
            manager._replica_world_size_mode != torchft.manager.WorldSizeMode.DYNAMIC,
        f"{type(manager._pg).__name__} is not carried: pass Manager(pg=torchft.ProcessGroupGloo(...))":
            not isinstance(manager._pg, torchft.ProcessGroupGloo),
        "a replica is one rank with the whole model, and the manager's group the only one: pass the bare module, not "
        "DistributedDataParallel or fully_shard's": wrapped,
        "check_every is not carried under a manager, whose replicas may be lost in a comparison":
            safety.check_every is not None,
        "under a manager the weights must be on a CPU: gloo sends no device memory from rank to rank":
            any(weight.device.type != "cpu" for weight in model.parameters()),
    }  # fmt: skip
    for reason, applies in refused.items():
        if applies:
            raise ThinwireError(reason)


class ManagerMembers:
    """The replicas of a torchft manager. A step is *attempted*, and counts or leaves no trace.

    A replica is named by its manager's ``replica_id``, if it has one, and by its process: "west-0:3fa9...".
    """

    def __init__(self, manager: Any) -> None:
        name = f"{getattr(manager, '_replica_id', None) or ''}:{uuid.uuid4().hex}"
        self._manager, self._name = manager, name.encode()[-NAME_BYTES:].rjust(NAME_BYTES)
        self._membership = Membership(0, (0,), -1)

    def ask(self) -> Membership:
        """Return who takes part in the attempt that now begins; if this replica is behind, call ``take`` first.

        After an attempt that failed on any replica ``number`` is another one. Raises LostRank. Collective.
        """
        manager = self._manager
        manager.start_quorum()
        if (error := manager.errored()) is not None:
            raise LostRank(self._membership.rank, [], "quorum", 0.0, str(error).splitlines()[0])
        rank, size, number = manager.participating_rank(), manager.num_participants(), manager._quorum_id
        if number != self._membership.number:
            comm, nodes = ManagedComm(manager._pg, Ledger(), manager._timeout), tuple(range(size))
            comm.take(Membership(rank, nodes, number))
            name = torch.frombuffer(bytearray(self._name), dtype=torch.uint8)
            names = torch.zeros(size, len(name), dtype=torch.uint8)
            comm.all_gather(names, name)
            spelt = (bytes(row.tolist()).decode(errors="replace").strip() for row in names)
            self._membership = Membership(rank, nodes, number, tuple(spelt))
        return self._membership

    def vote(self, counts: bool) -> bool:
        """Return whether the step counts for this replica; another may vote otherwise, and one is then behind."""
        if not counts and self._manager.errored() is None:
            self._manager.report_error(RuntimeError("thinwire: the exchange failed"))
        counted = self._manager.should_commit()
        if not counted:
            self._manager._pg.abort()  # so that who still waits for this replica's messages is told at once
        return counted

    def fall_behind(self) -> None:
        """Count as behind all others when this replica asks again, whatever steps it has counted."""
        self._manager.load_state_dict({"step": 0, "batches_committed": 0})

    def offer(self, give: Callable[[], dict[str, Any]], take: Callable[[Any], None]) -> None:
        """Let a replica that is behind get ``give()`` of one that is not, through its own ``take``."""
        self._manager.register_state_dict_fn("thinwire", take, give)
