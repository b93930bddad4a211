"""The engines under test, built alike, and one training loop for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from models import Net, flat, loss_of
from thinwire.base.errors import ThinwireError

warnings.simplefilter("ignore")


def build(
    kind: str,
    world: int,
    *,
    net: Callable[[], nn.Module] = lambda: Net(layers=1),
    policy: MixedPrecisionPolicy | None = None,
    root: MixedPrecisionPolicy | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    device: str = "cpu",
    **options,
) -> nn.Module:
    """The same initial weights on every rank, wrapped for ``kind``: ddp, fsdp2, fsdp2-keep (no resharding), hsdp.

    ``policy``: of all modules; ``root``: of the root module, if another.
    """
    torch.default_generator.manual_seed(0)  # torch.manual_seed seeds devices that are not there, which takes longer
    model = net() if device == "cpu" else net().to(device)
    prepare(model)
    if kind == "ddp":
        return DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options})
    if kind == "hsdp":
        mesh = init_device_mesh(device, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "hsdp-1":
        mesh = init_device_mesh(device, (world, 1), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device, (world,))
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
