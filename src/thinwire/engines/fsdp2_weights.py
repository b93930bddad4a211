"""The objects that torch calls for each FSDP2 module in place of its own all-gather of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.core.weights import Replica
from thinwire.engines.fsdp2_module import GroupLink
from thinwire.network.comm import Work


class ModuleAllGather:
    """The callable in place of torch's own all-gather of the weights.

    torch calls ``allocate``, copies this rank's shard into the buffer, and calls the object. If the method encodes
    weights, the replica does both.
    """

    def __init__(self, link: GroupLink) -> None:
        self.link, self.engine = link, link.engine

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._encoded:
            return torch.empty(*size, dtype=dtype, device=device)
        method = self.engine.method
        if dtype == torch.uint8:
            raise ThinwireError(
                f"{method} encodes weights, and the parameters of one FSDP module have several dtypes: convert them "
                "to one, or pass MixedPrecisionPolicy(param_dtype=...)"
            )
        comm = self.engine.comm(self.link.group.mesh_info.shard_process_group)
        link, replica = self.link, self.link.replica
        shard, numel = link.shard(dtype), math.prod(size) // comm.size
        if shard.numel != numel:
            names = ", ".join(piece.name for piece in shard.pieces)
            raise ThinwireError(f"FSDP2 gathers {numel} values per rank, but the shards of {names} have {shard.numel}")
        if replica is None or (replica.shard, replica.device) != (shard, device):
            message = method.weight_message(shard, comm.rank)
            if replica is not None:
                replica.drop()
            replica = link.replica = Replica(message, method.state, shard, comm, device, link.version, link.shards)
        if link.copied is not None:  # a module may be called twice in one forward pass
            devices.streams(device).current_stream(device).wait_event(link.copied)
        return replica.allocate()

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> Work | None:
        comm, ledger, link = self.engine.comm(group), self.engine.ledger, self.link
        replica = link.replica if self._encoded else None
        ledger.count_dense((comm.size - 1) * input_tensor.nbytes)
        stay = replica is not None and replica.message.resident
        with self.engine.waited(), self.exchanging(), ledger.weights(stay=stay), torch.no_grad():
            if replica is not None:
                # While only some of the optimizers have stepped, weights change before the step is over.
                unsettled = link.step_loop.open
                self.engine.sender.asks(replica, self.send)
                work = replica.gather(output_tensor, link.road.step, unsettled=unsettled, async_op=async_op)
                self.engine.note_missed(replica)
            else:
                work = comm.all_gather(output_tensor, input_tensor, async_op=async_op)
        if (end := devices.mark(input_tensor.device)) is not None:
            link.gathered = end if work is None else None
            return work
        return None if work is None else _TimedWork(work, self)

    def send(self, step: int) -> None:
        """Send this rank's message of ``step``, if possible; on a GPU, beside the computing stream."""
        group, replica = self.link.group, self.link.replica
        if replica is None or not group.is_sharded or not replica.sends(step):
            return
        with self.exchanging(), self.engine.ledger.weights(stay=replica.message.resident), torch.no_grad():
            # A copy on the computing stream: weights may change from now on without waiting for its reader.
            shard = torch.cat([values.view(-1) for param in group.fsdp_params for values in param.all_gather_inputs])
            with self._on_gather_stream(shard):
                replica.send(shard, step)

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

    def exchanging(self) -> AbstractContextManager[None]:
        """Tell the step loop that the module's weights are exchanged inside."""
        names = (self.link.name(fsdp_param) for fsdp_param in self.link.group.fsdp_params)
        return self.link.step_loop.exchanging("weights", names)

    @property
    def _encoded(self) -> bool:
        """Whether torch asks for weights that the method encodes.

        With ``reshard_after_forward=<int>``, the later gathers of a step, among fewer ranks, are not encoded.
        """
        return self.engine.method.card.encodes_weights and not self.link.group.is_sharded_post_forward


class _TimedWork(Work):
    """A work whose wait counts as exposed time. (FSDP2 waits only for instances of ``Work``.)"""

    def __init__(self, work: Work, gather: ModuleAllGather) -> None:
        super().__init__()
        self._work, self._gather = work, gather

    def wait(self, *timeout: Any) -> bool:
        engine = self._gather.engine
        with engine.waited(), self._gather.exchanging(), engine.ledger.span("wire"):
            return self._work.wait(*timeout)
