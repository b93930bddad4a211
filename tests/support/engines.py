"""The engines under test, built alike, and one training loop for all of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from models import Net, flat, loss_of
from thinwire.base.errors import ThinwireError

warnings.simplefilter("ignore")


@functools.cache
def _mesh(world: dist.ProcessGroup, device: str, shape: tuple[int, ...]) -> DeviceMesh:
    """One for all models of a rank: each has groups, whose threads of gloo's wake a hundred times a second."""
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard") if shape[1:] else None)


def build(
    kind: str,
    world: int,
    *,
    net: Callable[[], nn.Module] = lambda: Net(layers=1),
    policy: MixedPrecisionPolicy | None = None,
    root: MixedPrecisionPolicy | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    device: str = "cpu",
    mesh: DeviceMesh | None = None,
    **options,
) -> nn.Module:
    """The same initial weights on every rank, wrapped for ``kind``: ddp, fsdp2, fsdp2-keep (no resharding), hsdp.

    ``policy``: of all modules; ``root``: of the root module, if another. ``mesh``: not the usual one.
    """
    torch.default_generator.manual_seed(0)  # torch.manual_seed seeds devices that are not there, which takes longer
    model = net() if device == "cpu" else net().to(device)
    prepare(model)
    if kind == "ddp":
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options})
    shape = {"hsdp": (2, world // 2), "hsdp-1": (world, 1)}.get(kind, (world,))
    mesh = mesh or _mesh(dist.group.WORLD, device, shape)
    options.setdefault("reshard_after_forward", kind != "fsdp2-keep")
    if policy is not None:
        options["mp_policy"] = policy
    for block in getattr(model, "blocks", ()):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **(options if root is None else {**options, "mp_policy": root}))


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    """In one operation for all weights: each by itself takes longer than a step of these models does otherwise."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(weights, lr=lr, fused=True)


def made(make: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """As a method wants it, at lr 1e-3; AdamW of shards is fused: weight by weight it is a third of a step."""
    fused = make is torch.optim.AdamW and not isinstance(model, DistributedDataParallel)
    return make(model.parameters(), lr=1e-3, weight_decay=0.01, **({"fused": True} if fused else {}))


def train(model, optimizer, rank: int, steps, wire=None, *, poison: tuple[int, int] | None = None, loss=loss_of):
    """One step per number in ``steps``. ``poison=(step, rank)``: that rank's loss is not finite at that step."""
    losses = []
    for step in steps:
        value = loss(model, step, rank)
        scale = float("nan") if poison == (step, rank) else 1.0
        (value * scale).backward()
        if wire is None:
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        else:
            wire.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


def stats_of(wire) -> dict:
    """``wire.stats()``; on other ranks than 0 without the memory, which takes as long to find out as some steps."""
    return wire.stats() if torch.distributed.get_rank() == 0 else wire.ledger.stats()


def shown(wire) -> bool:
    """Are plan and report there to print? Rank 0 tries, as programs do: drawing them takes as long as some steps."""
    return torch.distributed.get_rank() > 0 or bool(str(wire.plan) and str(wire.report()))


def same_on_all_ranks(model: nn.Module) -> bool:
    low = flat(model)
    high = low.clone()
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN)
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX)
    return torch.equal(low, high)


def refusal(call: Callable[..., object], *args: object, **more: object) -> str:
    """What is said, in one line; "" where nothing is."""
    try:
        call(*args, **more)
    except ThinwireError as error:
        return str(error) if "\n" not in str(error) else "several lines"
    return ""
