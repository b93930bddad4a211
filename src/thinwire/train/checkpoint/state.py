"""What a checkpoint holds of a run, and how a run takes it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from thinwire.base.errors import ThinwireError
from thinwire.core.names import bare_name
from thinwire.network.comm import local
from thinwire.train.checkpoint.format import MODEL, WIRE, Checkpoint, Damaged, States, rank_file, read_tensors
from thinwire.wire import Wire

Resize = Literal["flush", "redistribute", "reset"]


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this rank alone has, and what all have alike. Collective: the optimizer gets the moments of all that the
    method steps in its place, so that the checkpoint is one to go on from without the method, too."""
    wire.hand_over()
    own = {WIRE + key: value for key, value in wire.state_dict().items()}
    tensors: dict[str, Tensor] = {}
    for key, parameter in _named(model).items():
        tensors[f"model/{key}"] = local(parameter)
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{key}/{kind}"] = local(value)
    return (own, tensors) if wire.engine.kind == "ddp" else (own | tensors, {})


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that are trained: others are what the run began with."""
    return {bare_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}


@dataclass
class Resumed:
    """A checkpoint to go on from, and what of it this rank takes: its own tensors, and those that all have alike.

    Attributes:
        resize: what becomes of what waits on the ranks of the checkpoint, where they are not those of this run; None:
            they are. Then nothing is read before ``put_back``.
    """

    checkpoint: Checkpoint
    own: dict[str, Tensor]
    common: dict[str, Tensor]
    resize: Resize | None = None

    def put_back(self, *, model: nn.Module, optimizer: torch.optim.Optimizer, wire: Wire) -> None:
        """Weights, moments and the method's state are as they were.

        Raises:
            ThinwireError: they are not those of this model.
        """
        path, named = self.checkpoint.path, _named(model)
        missing = set(named)
        with torch.no_grad():
            for name, saved in whole(self.checkpoint) if self.resize else (self.common or self.own).items():
                kind, _, key = name.partition("/")
                if kind == "wire":
                    continue
                key, _, moment = key.rpartition("/") if kind == "optimizer" else (key, "", "")
                if key not in named:
                    raise ThinwireError(f"{path} holds {key}, which this model has not")
                parameter = named[key]
                if kind == "optimizer":
                    optimizer.state[parameter][moment] = self._like(saved, parameter)
                    continue
                needed = parameter.shape if self.resize else local(parameter).shape
                if saved.shape != needed:
                    raise ThinwireError(
                        f"{path}: {key} has shape {tuple(saved.shape)}, this model needs {tuple(needed)}"
                    )
                local(parameter).copy_(local(self._like(saved, parameter)))
                missing.remove(key)
        if missing:
            raise ThinwireError(f"{path} holds no {min(missing)}, which this model has")
        if self.resize:
            ranks = range(self.checkpoint.meta["world_size"])
            wire.load_state_dict(States(path / rank_file(rank) for rank in ranks), resize=self.resize)
            return
        own = {name.removeprefix(WIRE): value for name, value in self.own.items() if name.startswith(WIRE)}
        wire.load_state_dict(own)

    def _like(self, saved: Tensor, parameter: nn.Parameter) -> Tensor:
        """A weight or a moment as ``parameter`` is held; a scalar (AdamW's step count) stays on the CPU."""
        if saved.dim() == 0:
            return saved
        saved = saved.to(parameter.device)
        if not isinstance(parameter, DTensor):
            return saved
        mesh, placements = parameter.device_mesh, parameter.placements
        if self.resize:  # each rank has all of it, and keeps its part
            return DTensor.from_local(saved, mesh, [Replicate()] * mesh.ndim, run_check=False).redistribute(
                placements=placements
            )
        return DTensor.from_local(
            saved, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )


def whole(
    checkpoint: Checkpoint, kinds: Iterable[str] = ("model/", "optimizer/")
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Weights ("model/NAME") and moments ("optimizer/NAME/KIND"), one by one, whatever engine they were sharded by.

    Shards of FSDP2 lie side by side along dim 0; of HSDP's copies the first is read.
    """
    files = [checkpoint.path / MODEL]
    if MODEL not in checkpoint.meta["files"]:
        share = int(checkpoint.meta["about"]["mesh"].split()[0])
        files = [checkpoint.path / rank_file(rank) for rank in range(share)]
    for begins in kinds:
        for parts in zip(*(read_tensors(path, begins) for path in files), strict=True):
            (name, first), *rest = parts
            if any(other != name for other, _ in rest):
                raise Damaged(f"{checkpoint.path}: the ranks' files do not hold the same tensors")
            yield name, torch.cat([first, *(part for _, part in rest)]) if rest and first.dim() else first
