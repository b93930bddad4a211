"""A stand-in for NCCL where ranks share a GPU, which NCCL refuses: every message goes through the host, by gloo.

    import staged                            # knows the backend "staged" from now on
    torch.distributed.init_process_group("staged")

gloo's own collectives of GPU tensors end in a segmentation fault under FSDP2. Here a call waits for the current stream,
copies what is handed in to the host, and what arrived back on the current stream, before it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nccl_double import VERBS

NAME = "staged"


class StagedGroup(dist.ProcessGroup):
    """A process group of gloo's for tensors of a GPU."""

    def __init__(self, options: Any) -> None:
        """``options``: what torch tells the maker of a backend."""
        store, rank, size = options.store, options.group_rank, options.group_size
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch declares another one
        self._inner = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=options.timeout)
        gloo._set_sequence_number_for_group()
        self._inner._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> Any:
        return dist.distributed_c10d._world.pg_names[self]

    def collective(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Run ``name`` on copies; what it writes, its first argument, is copied back."""
        options = arguments[-1]
        averages = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG
        host = [_map(argument, lambda tensor: tensor.cpu()) for argument in arguments]  # a CPU's tensor is itself
        if averages:  # which gloo lacks
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        getattr(self._inner, name)(*host).wait()
        if averages:
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        for written, values in zip(_tensors(arguments[0]), _tensors(host[0]), strict=True):
            written.copy_(values / self.size() if averages else values)
        device = next(iter(_tensors(arguments[0])), torch.zeros(0)).device
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        future.set_result(list(_tensors(arguments[0])))
        return torch._C._distributed_c10d._create_work_from_future(future)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_map(item, change) for item in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _verb(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **options: self.collective(name, (*arguments, *options.values()))


for _name in VERBS:
    setattr(StagedGroup, _name, _verb(_name))

dist.Backend.register_backend(NAME, lambda options, _: StagedGroup(options), extended_api=True, devices=["cuda", "cpu"])
