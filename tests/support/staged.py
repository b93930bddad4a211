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

from nccl_double import VERBS, OverGloo, tensors_in

NAME = "staged"


class StagedGroup(OverGloo):
    """A process group of gloo's for tensors of a GPU."""

    NAME = NAME

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
        for written, values in zip(tensors_in(arguments[:1]), tensors_in(host[:1]), strict=True):
            written.copy_(values / self.size() if averages else values)
        device = next(tensors_in(arguments[:1]), torch.zeros(0)).device
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        future.set_result(list(tensors_in(arguments[:1])))
        return torch._C._distributed_c10d._create_work_from_future(future)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    return [_map(item, change) for item in value] if isinstance(value, list | tuple) else value


def _verb(name: str) -> Callable[..., Any]:
    return lambda self, *arguments, **options: self.collective(name, (*arguments, *options.values()))


for _name in VERBS:
    setattr(StagedGroup, _name, _verb(_name))

dist.Backend.register_backend(NAME, lambda options, _: StagedGroup(options), extended_api=True, devices=["cuda", "cpu"])
