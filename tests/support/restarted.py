"""A run that keeps a checkpoint of every step and loses a rank in its first attempt, started as torchrun does it."""

from __future__ import annotations

import os
import signal
import uuid
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

import thinwire
import thinwire.base.elastic
from models import Net, flat, loss_of

STEPS, DIES = 6, 3


def train(rank: int, world: int, folder: str, *, dies: bool = False) -> list[float]:
    """The weights after ``STEPS`` steps, from the newest checkpoint on. ``dies``: rank 1 does, after ``DIES`` steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wire = thinwire.compress(model, optimizer, "topk(feedback='gradients', smallest=100,density=0.1)")
    whole = [step for step in range(STEPS) if all(_file(folder, step, r).exists() for r in range(world))]
    saved = max(whole, default=0)
    if saved:
        state = torch.load(_file(folder, saved, rank))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
    for step in range(saved, STEPS):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if dies and step + 1 == DIES and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
        partial = _file(folder, step + 1, rank).with_suffix(".partial")
        torch.save(state, partial)
        partial.rename(_file(folder, step + 1, rank))
    return flat(model).tolist()


def _file(folder: str, step: int, rank: int) -> Path:
    return Path(folder, f"{step}-{rank}.pt")


def under_an_agent(folder: str) -> None:
    """Two ranks under torchrun's agent, which starts them once more; forked, so that they need not import torch."""
    config = LaunchConfig(
        1, 1, 2, run_id=uuid.uuid4().hex, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1,
        start_method="fork",
    )  # fmt: skip
    elastic_launch(config, _rank)(folder)


def _rank(folder: str) -> None:
    thinwire.base.elastic.init_process_group("gloo", timeout=timedelta(seconds=120))
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    weights = train(number, ranks, folder, dies=os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    torch.save(torch.tensor(weights), Path(folder, f"end-{number}.pt"))
