"""The objects that torch calls for each FSDP2 module in place of its own all-gather of the weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.fingerprint import Fingerprint
from thinwire.core.road import Road
from thinwire.core.weights import Replica
from thinwire.engines.fsdp2_module import GroupLink, ShardedEngine
from thinwire.network.comm import Work
from thinwire.network.ledger import Ledger


class ModuleAllGather:
    """The callable in place of torch's own all-gather of the weights.

    torch asks for the buffer, copies this rank's shard to its place there, and calls. Where the method encodes weights,
    both are the replica's.
    """

    def __init__(self, link: GroupLink, road: Road) -> None:
        self.link, self.road, self.engine = link, road, link.engine
        self.replica: Replica | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._encoded:
            return torch.empty(*size, dtype=dtype, device=device)
        method = self.engine.method
        if dtype == torch.uint8:
            raise ThinwireError(
                f"{method} encodes weights, and the parameters of one FSDP module have several dtypes: give them one, "
                "or MixedPrecisionPolicy(param_dtype=...)"
            )
        comm = self.engine.comm(self.link.group.mesh_info.shard_process_group)
        shard = self.link.shard(math.prod(size) // comm.size, dtype)
        if self.replica is None or (self.replica.shard, self.replica.device) != (shard, device):
            message = method.weight_message(shard, comm.rank)
            if self.replica is not None:
                self.replica.drop()
            self.replica = Replica(
                message, method.state, shard, comm, device, self.link.version, Fingerprint(self.link.shards)
            )
        if self.link.copied is not None:  # a module may be called twice in one forward pass
            devices.streams(device).current_stream(device).wait_event(self.link.copied)
        return self.replica.allocate()

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> Work | None:
        comm, ledger = self.engine.comm(group), self.engine.ledger
        ledger.count_dense((comm.size - 1) * input_tensor.nbytes)
        began = time.perf_counter()
        with self._exchanging(), ledger.weights(), torch.no_grad():
            if self.replica is not None and self._encoded:
                # While some optimizers have stepped and others have not, weights change without a step being over.
                unsettled = self.link.turn.open
                if not unsettled:
                    self._look_at_weights(self.replica)
                self.engine.asks(self, self.replica)
                work = self.replica.gather(output_tensor, self.road.step, unsettled=unsettled, async_op=async_op)
            else:
                work = comm.all_gather(output_tensor, input_tensor, async_op=async_op)
        if (end := devices.mark(input_tensor.device)) is not None:
            self.link.gathered = end if work is None else None
            return work
        ledger.add("exposed", time.perf_counter() - began)
        return None if work is None else _TimedWork(work, ledger, self._exchanging)

    def _look_at_weights(self, replica: Replica) -> None:
        """Check that the weights are those that the last step has left. (On a GPU the host would wait.)

        Raises:
            ThinwireError: they have changed in the middle of training, and torch has not counted it.
        """
        if devices.streams(replica.device) is None and replica.changed_unseen():
            raise ThinwireError(
                f"the weights beside {replica.shard.names[0]} were given other values through .data, which torch does "
                "not count: call wire.weights_changed() after that, on all ranks, or write parameter.copy_(...)"
            )

    def send(self, step: int) -> None:
        """Let this rank's message of ``step`` leave, if one can; on a GPU, beside the stream that computes."""
        group = self.link.group
        if self.replica is None or not group.is_sharded or not self.replica.sends(step):
            return
        with self._exchanging(), self.engine.ledger.weights(), torch.no_grad():
            # A copy on the stream that computes: weights that change from now on need not wait for its reader.
            shard = torch.cat([values.view(-1) for param in group.fsdp_params for values in param.all_gather_inputs])
            with self._on_gather_stream(shard):
                self.replica.send(shard, step)

    @contextmanager
    def _on_gather_stream(self, shard: Tensor) -> Iterator[None]:
        if (backend := devices.streams(shard.device)) is None:
            yield
            return
        stream = self.link.group.comm_ctx.all_gather_stream
        stream.wait_stream(backend.current_stream(shard.device))
        with backend.stream(stream):
            devices.keep(shard)
            yield

    def _exchanging(self) -> AbstractContextManager[None]:
        names = (self.link.name(fsdp_param) for fsdp_param in self.link.group.fsdp_params)
        return self.link.turn.exchanging("weights", names)

    @property
    def _encoded(self) -> bool:
        """Whether torch asks for weights that the method encodes.

        After ``reshard_after_forward=<int>`` fewer ranks gather what the first gather of the step has left them.
        """
        return self.engine.method.card.encodes_weights and not self.link.group.is_sharded_post_forward


class ForwardPasses:
    """The forward passes: where evaluations begin and end, and whether the last step's weights are still there.

    Averaged weights, say, are put in for an evaluation and taken out after it, and classes that do so write them
    through ``.data``, which torch does not count. So before every forward pass that records no gradients, and where
    training goes on after it, ranks agree on whether anybody's have changed: evaluating is what they do together.
    """

    def __init__(self, engine: ShardedEngine) -> None:
        self._engine = engine
        self._mode: tuple[bool, bool] | None = None  # of the last one: is it training, does it record gradients?
        self._asked: set[int] = set()  # modules that have asked for their weights in it

    def begin(self, link: GroupLink) -> None:
        """Note that a module will ask for its weights in a forward pass. Collective where such a pass begins."""
        if not self._engine.replicas:
            return
        mode = bool(self._engine.model.training), torch.is_grad_enabled()
        if mode != self._mode or (not all(mode) and id(link) in self._asked):
            if self._mode is not None:
                self._agree_on_changes()
            self._asked.clear()
            self._mode = mode
        self._asked.add(id(link))

    def _agree_on_changes(self) -> None:
        """Have all ranks gather anew the weights that have changed on any rank."""
        replicas = self._engine.replicas
        changed = torch.zeros(1, device=self._engine.groups[0][1].device)
        changed.fill_(float(any([replica.changed_unseen() for replica in replicas])))
        self._engine.comms[0].all_reduce(changed, "max")
        if bool(changed):
            for replica in replicas:
                replica.changed = True


class _TimedWork(Work):
    """A work whose wait is written down as exposed time. (FSDP2 waits only for what is a ``Work``.)"""

    def __init__(self, work: Work, ledger: Ledger, exchanging: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._work, self._ledger, self._exchanging = work, ledger, exchanging

    def wait(self, *timeout: Any) -> bool:
        began = time.perf_counter()
        with self._exchanging(), self._ledger.span("wire"):
            completed = self._work.wait(*timeout)
        self._ledger.add("exposed", time.perf_counter() - began)
        return completed
