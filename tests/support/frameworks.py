"""One life of a run inside a framework, and another that goes on from what it saved; what must be true of both."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import thinwire
from breadth import ALL, spread
from models import Net, flat, loss_of

STEPS, SAVED = 20, 10
LOSSY = ("int8(smallest=0)", "sdp4bit(smallest=0)")
FRAMEWORKS = (
    "accelerate", "accelerate-fsdp2", "trainer", "trainer-fsdp2", "lightning", "lightning-fsdp2", "torchtitan", "trl",
    "trl-grpo",
)  # fmt: skip
TRIED = spread(2, FRAMEWORKS, LOSSY)
KEEPS = ("topk(feedback='gradients', smallest=0, density=0.05)", "trickle(smallest=0, density=0.05)")
"""What is saved midway and resumed: what waits are gradients, and what waits are steps, made at a schedule's rates."""
if ALL:
    KEEPS += (
        "topk(smallest=0)", "tagc(smallest=0)", "powersgd(smallest=0, rank=1)", "onebit-adam(smallest=0, warmup=3)",
    )  # fmt: skip


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def launched(rank: int, world: int) -> None:
    """What torchrun tells frameworks."""
    assert "warm" in sys.modules, "ranks are born without what warm.py imports: it has raised an ImportError"
    os.environ.update({
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1",
    })  # fmt: skip
    warnings.simplefilter("ignore")


def surprise(wire: thinwire.Wire) -> float:
    """Bytes per step that the plan does not know, those of sharded weights aside; 0 where they follow the data.

    After a warm-up of other bytes the last step is looked at.
    """
    card = wire.method.card
    if card.bytes_follow_data:
        return 0
    stats = wire.ledger.stats(last=card.steady > 0)
    return sum(stats["wire_bytes_per_step"].values()) - stats["weight_bytes_per_step"] - wire.plan.wire_bytes


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def fixed(model: nn.Module) -> Tensor:
    """The loss on a batch that no step has."""
    return loss_of(model, 3 * STEPS, 0)


Trained = tuple[nn.Module, Any]
"""The model after the last step, not wrapped, and the wire, or None."""


def kept(framework: str) -> tuple[str, ...]:
    """The methods whose runs are saved midway and resumed; sharded runs are slow, and have the last one."""
    return KEEPS if ALL or not framework.endswith("fsdp2") else KEEPS[-1:]


def whole(
    framework: str, train: Callable[..., Trained], folder: str, loss: Callable[[nn.Module], Tensor]
) -> dict[str, Any]:
    """One life of ``train(method, folder, save, resume)``: stock, dense, lossy, and a run that is saved midway."""
    stock, _ = train(None, folder, False, False)
    dense, wire = train("dense", folder, False, False)
    found: dict[str, Any] = {"dense": torch.equal(flat(stock), flat(dense)), "steps": wire.step, "lossy": {}}
    for method in [method for where, method in TRIED if where == framework]:
        model, wire = train(method, folder, False, False)
        found["lossy"][method] = surprise(wire), wire.plan.wire_bytes / wire.plan.dense_bytes, loss(model).item()
    lives = {method: train(method, f"{folder}/{i}", True, False) for i, method in enumerate(kept(framework))}
    found["kept"] = {method: (surprise(wire), loss(model).item()) for method, (model, wire) in lives.items()}
    ends = {method: flat(model).tolist() for method, (model, _) in lives.items()}
    return {**found, "stock": loss(stock).item(), "ends": ends}


def resumed(framework: str, train: Callable[..., Trained], folder: str) -> dict[str, Any]:
    """Another life, from where the last runs of ``whole`` were saved."""
    lives = {method: train(method, f"{folder}/{i}", False, True) for i, method in enumerate(kept(framework))}
    ends = {method: flat(model).tolist() for method, (model, _) in lives.items()}
    return {"ends": ends, "steps": {wire.step for _, wire in lives.values()}}


def check(train: Callable[..., dict], folder: Path, start: float, *more: Any) -> None:
    """Hold ``train(rank, world, folder, second life, *more)`` to what every framework promises, on two ranks.

    ``start``: the loss before training, if the first life does not say.
    """
    first = ranks.run(train, 2, str(folder), False, *more, warm="warm_frameworks")
    second = ranks.run(train, 2, str(folder), True, *more, warm="warm_frameworks")
    for one, other in zip(first, second, strict=True):
        start = one.get("start", start)
        assert one["dense"] and one["steps"] == STEPS
        assert one["lossy"]
        for method, (more, share, loss) in one["lossy"].items():
            assert abs(more) < 1e-6 and share < 0.55, method  # means over the steps, of whole bytes
            assert start - loss > 0.8 * (start - one["stock"]) > 0, method
        for method, (more, loss) in one["kept"].items():
            assert abs(more) < 1e-6 and loss < start, (method, more, loss)
        assert other["steps"] == {STEPS}
        for method, end in one["ends"].items():
            assert end == other["ends"][method], method


def shard_on_cpu(accelerator: Any, plugin: Any = None, **settings: Any) -> None:
    """Let Accelerate shard a model with its own FSDP2 code on a CPU, where it takes DDP: its state is told so."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = plugin or FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=False, **settings)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # whence Accelerate takes it again


class Batches(torch.utils.data.Dataset):
    """Two micro-batches of (8, 16) tokens for each of the ranks' ``STEPS`` steps."""

    def __len__(self) -> int:
        return 2 * 2 * STEPS

    def __getitem__(self, index: int) -> int:
        return index


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def fixed_gpt2(model: nn.Module) -> Tensor:
    tokens = torch.stack([Sequences()[index]["input_ids"] for index in range(16)])
    with torch.no_grad():
        return model.eval()(input_ids=tokens, labels=tokens).loss


def untrained_gpt2(rank: int, world: int) -> float:
    return fixed_gpt2(gpt2()).item()


class Sequences(torch.utils.data.Dataset):
    """16 tokens each, for the Trainer to shuffle."""

    def __len__(self) -> int:
        return 4 * 2 * 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) * (index % 7 + 1) + index) % 64
        return {"input_ids": tokens, "labels": tokens}
