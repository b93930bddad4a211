"""A run's state: what a checkpoint holds of it, and how a run restores it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.names import bare_name, persistent_buffers
from thinwire.core.run import find_holders
from thinwire.network.comm import local
from thinwire.train.checkpoint.format import MODEL, WIRE, Checkpoint, Damaged, States, rank_file, read_tensors
from thinwire.wire import Wire

Resize = Literal["flush", "redistribute", "reset"]


def collect_tensors(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], wire: Wire
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors that belong to this rank alone, and those that are the same on all ranks. Collective."""
    if wire.method.card.alone_from is None and wire.method.rank_equal:  # else it would change the run
        wire.hand_over()  # the optimizer gets the method's moments: the run can resume without the method, too
    of_rank = {WIRE + key: value for key, value in wire.state_dict().items()}
    tensors = {f"buffer/{key}": local(buffer) for key, buffer in persistent_buffers(model).items()}
    for key, parameter in _trained(model).items():
        tensors[f"model/{key}"] = local(parameter)
        for optimizer in optimizers:
            for kind, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{key}/{kind}"] = local(value)
    return (of_rank, tensors) if wire.engine.kind == "ddp" else (of_rank | tensors, {})


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Map names to trained parameters; the others stay what the run began with."""
    return {bare_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad}


@dataclass
class ResumedState:
    """A checkpoint to resume from, and the tensors that this rank takes from it.

    Attributes:
        tensors: by their names in the files; {} with ``resize``, which reads them one by one.
        resize: the fate of values that the checkpoint's ranks have yet to send; None: this run has the same ranks.
    """

    checkpoint: Checkpoint
    tensors: dict[str, Tensor]
    resize: Resize | None = None

    def restore(self, *, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], wire: Wire) -> None:
        """Set weights, moments and the method's state to what the checkpoint holds.

        Raises:
            ThinwireError: the checkpoint is not of this model.
        """
        path, parameters = self.checkpoint.path, _trained(model)
        holders = find_holders(optimizers, parameters)
        kept: dict[str, Tensor] = {**parameters, **persistent_buffers(model)}
        missing = set(kept)
        tensors = read_whole_tensors(self.checkpoint) if self.resize else self.tensors.items()
        with torch.no_grad():
            for name, saved in tensors:
                kind, _, key = name.partition("/")
                if kind == "wire":
                    continue
                key, _, moment = key.rpartition("/") if kind == "optimizer" else (key, "", "")
                if key not in kept:
                    raise ThinwireError(f"{path} holds {key}, which this model does not have")
                tensor = kept[key]
                if kind == "optimizer":
                    holders[key].optimizer.state[parameters[key]][moment] = self._like(saved, tensor)
                    continue
                needed = tensor.shape if self.resize else local(tensor).shape
                if saved.shape != needed:
                    raise ThinwireError(
                        f"{path}: {key} has shape {tuple(saved.shape)}, this model needs {tuple(needed)}"
                    )
                local(tensor).copy_(local(self._like(saved, tensor)))
                missing.remove(key)
        if missing:
            raise ThinwireError(f"{path} holds no {min(missing)}, which this model has")
        state: Mapping[str, Tensor] = {
            name.removeprefix(WIRE): value for name, value in self.tensors.items() if name.startswith(WIRE)
        }
        if self.resize:
            state = States(path / rank_file(rank) for rank in range(self.checkpoint.meta["world_size"]))
        wire.load_state_dict(state, resize=self.resize)

    def _like(self, saved: Tensor, tensor: Tensor) -> Tensor:
        """Lay out a weight, buffer or moment like ``tensor``; a scalar (AdamW's step count) stays on the CPU."""
        if saved.dim() == 0:
            return saved
        saved = saved.to(tensor.device)
        if not isinstance(tensor, DTensor):
            return saved
        mesh, placements = tensor.device_mesh, tensor.placements
        if self.resize:  # each rank has the whole tensor, and keeps its shard
            return distribute_tensor(saved, mesh, placements, src_data_rank=None)
        return DTensor.from_local(saved, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def read_whole_tensors(
    checkpoint: Checkpoint, kinds: Iterable[str] = ("model/", "buffer/", "optimizer/")
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yield weights ("model/NAME"), buffers ("buffer/NAME") and moments ("optimizer/NAME/KIND"), unsharded.

    FSDP2's shards are joined along dim 0; of HSDP's copies, and of buffers, which are whole, the first is read.
    """
    files = [checkpoint.path / MODEL]
    if MODEL not in checkpoint.meta["files"]:
        sharing = int(checkpoint.meta["about"]["mesh"].split()[0])
        files = [checkpoint.path / rank_file(rank) for rank in range(sharing)]
    for prefix in kinds:
        holders = files[:1] if prefix == "buffer/" else files
        for tensors in zip(*(read_tensors(path, prefix) for path in holders), strict=True):
            names, shards = zip(*tensors, strict=True)
            if len({*names}) > 1:
                raise Damaged(f"{checkpoint.path}: the ranks' files do not hold the same tensors")
            yield names[0], torch.cat(shards) if len(shards) > 1 and shards[0].dim() else shards[0]
