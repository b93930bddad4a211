"""Checkpoints that resume a run bit for bit: safetensors, no pickle, written whole or not at all.

    DIR/checkpoints/step-000100/   meta.json   model.safetensors (DDP: rank 0's)   rank-0000.safetensors ...
    DIR/checkpoints/latest         the name of the newest

Each rank's file holds what differs by rank: the method's state, and under FSDP2 and HSDP the shards of weights and
moments. All ranks write into one folder: on several hosts it has to be a shared one.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from thinwire.comm import Comm
from thinwire.errors import ThinwireError
from thinwire.plan import clean_name
from thinwire.wire import Wire

FORMAT = 1


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {clean_name(name).removeprefix("module."): parameter for name, parameter in model.named_parameters()}


def barrier(comm: Comm) -> None:
    """Wait until every rank is here."""
    comm.all_reduce(torch.zeros(1, device="cpu" if not torch.cuda.is_available() else "cuda"))


def save(
    folder: Path, *, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire, comm: Comm,
    about: dict[str, Any], keep: int,
) -> Path:  # fmt: skip
    """Write ``folder``/step-``step``; collective. ``about``: engine, method and what else to show. Returns the path."""
    name = f"step-{step:06d}"
    final, partial = folder / name, folder / f".{name}.partial"
    if comm.rank == 0 and partial.exists():
        shutil.rmtree(partial)
    barrier(comm)
    partial.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for key, parameter in _named(model).items():
        tensors[f"model/{key}"] = _local(parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{kind}"] = _local(value)
    mine = {f"wire/{key}": value.contiguous() for key, value in wire.state_dict().items()}
    sharded = wire.engine.kind != "ddp"
    if sharded:
        mine.update(tensors)
    elif comm.rank == 0:
        _write(tensors, partial / "model.safetensors")
    _write(mine, partial / f"rank-{comm.rank:04d}.safetensors")
    barrier(comm)
    if comm.rank == 0:
        meta = {"format": FORMAT, "step": step, "world_size": comm.size, **about}
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        os.replace(partial, final)
        latest = folder / ".latest.partial"
        latest.write_text(name + "\n")
        os.replace(latest, folder / "latest")
        for old in sorted(folder.glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    barrier(comm)
    return final


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)


def find(resume: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The checkpoint that ``--resume`` means, and its meta.json."""
    path = Path(resume)
    if resume == "latest":
        pointer = folder / "latest"
        if not pointer.exists():
            raise ThinwireError(f"there is no checkpoint in {folder} to resume from")
        path = folder / pointer.read_text().strip()
    try:
        meta = json.loads((path / "meta.json").read_text())
    except (OSError, json.JSONDecodeError):
        raise ThinwireError(f"{path} is not a checkpoint: it has no readable meta.json") from None
    if meta.get("format") != FORMAT:
        raise ThinwireError(f"{path} has format {meta.get('format')}, this version reads {FORMAT}")
    return path, meta


def check(meta: dict[str, Any], *, world_size: int, engine: str, method: str, steps: int) -> None:
    """Refuse a checkpoint that this run cannot go on from bit for bit."""
    if meta["world_size"] != world_size:
        raise ThinwireError(
            f"the checkpoint was made by {meta['world_size']} ranks, this run has {world_size}: start as many"
        )
    for name, ours in (("engine", engine), ("method", method)):
        if meta[name] != ours:
            raise ThinwireError(f"the checkpoint was made with --{name} {meta[name]}, this run has {ours}")
    if meta["step"] >= steps:
        raise ThinwireError(
            f"the checkpoint is at step {meta['step']}, the run ends at {steps}: nothing is left to do; raise --steps"
        )


def load(path: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire, rank: int) -> None:
    """Put weights, moments and the method's state back."""
    mine = load_file(path / f"rank-{rank:04d}.safetensors")
    tensors = mine if wire.engine.kind != "ddp" else load_file(path / "model.safetensors")
    with torch.no_grad():
        for key, parameter in _named(model).items():
            saved = tensors.get(f"model/{key}")
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if saved is None or saved.shape != local.shape:
                shape = None if saved is None else tuple(saved.shape)
                raise ThinwireError(f"{path}: {key} has shape {shape}, this model needs {tuple(local.shape)}")
            local.copy_(saved)
            prefix = f"optimizer/{key}/"
            for name in [name for name in tensors if name.startswith(prefix)]:
                optimizer.state[parameter][name.removeprefix(prefix)] = _like(tensors[name], parameter)
    own = {name.removeprefix("wire/"): value for name, value in mine.items() if name.startswith("wire/")}
    wire.load_state_dict(own)


def _like(saved: Tensor, parameter: nn.Parameter) -> Tensor:
    """A moment as the optimizer holds it: sharded as its parameter; a scalar (AdamW's step count) stays on the CPU."""
    if saved.dim() == 0:
        return saved
    saved = saved.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return saved
    return DTensor.from_local(
        saved, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip
