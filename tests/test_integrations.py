"""The frameworks that people train in: as theirs to the last bit, as planned, and resumed as if nothing had been."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import thinwire
from engines import build, same_on_all_ranks
from models import Net, flat, loss_of
from thinwire.errors import ThinwireError

STEPS, SAVED = 20, 10
LOSSY = ("int8(smallest=0)", "sdp4bit(smallest=0)")
KEEPS = "topk(smallest=0, density=0.05)"


def needs(*libraries: str) -> pytest.MarkDecorator:
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def launched(rank: int, world: int) -> None:
    """What torchrun tells frameworks."""
    os.environ.update({
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1",
    })  # fmt: skip
    warnings.simplefilter("ignore")


def surprise(wire: thinwire.Wire) -> float:
    """Bytes per step that the plan does not know. Weights are not exchanged on DDP."""
    return sum(wire.ledger.stats()["wire_bytes_per_step"].values()) - wire.plan.wire_bytes


Trained = tuple[Tensor, Any]
"""All weights after the last step, and the wire, or None."""


def whole(train: Callable[..., Trained], folder: str) -> dict[str, Any]:
    """One life of ``train(method, folder, save, resume)``: stock, dense, lossy, and a run that is saved midway."""
    stock, _ = train(None, folder, False, False)
    dense, wire = train("dense", folder, False, False)
    found: dict[str, Any] = {"dense": torch.equal(stock, dense), "steps": wire.step}
    for method in LOSSY:
        weights, wire = train(method, folder, False, False)
        found[method] = (surprise(wire), wire.plan.wire_bytes / wire.plan.dense_bytes, (weights - stock).norm().item())
    weights, wire = train(KEEPS, folder, True, False)
    start = flat(Net())
    return {**found, "moved": (stock - start).norm().item(), "end": weights.tolist()}


def resumed(train: Callable[..., Trained], folder: str) -> dict[str, Any]:
    """Another life, from where the last run of ``whole`` was saved."""
    weights, wire = train(KEEPS, folder, False, True)
    return {"end": weights.tolist(), "step": wire.step}


def check(train: Callable[[int, int, str, bool], dict], folder: Path) -> None:
    first = ranks.run(train, 2, str(folder), False, warm="warm_frameworks")
    second = ranks.run(train, 2, str(folder), True, warm="warm_frameworks")
    for one, other in zip(first, second, strict=True):
        assert one["dense"] and one["steps"] == STEPS
        for method in LOSSY:
            more, share, away = one[method]
            assert more == 0 and share < 0.55, method
            assert away < 0.2 * one["moved"], method  # 4 to 8 bits, beside what training moved
        assert other["step"] == STEPS and one["end"] == other["end"]


# ----------------------------------------------------------------------------------------------------------- Accelerate


class Batches(torch.utils.data.Dataset):
    """Two micro-batches of (8, 16) tokens for each of the ranks' ``STEPS`` steps."""

    def __len__(self) -> int:
        return 2 * 2 * STEPS

    def __getitem__(self, index: int) -> int:
        return index


def _accelerate(rank: int, world: int, folder: str, second: bool) -> dict[str, Any]:
    launched(rank, world)
    from accelerate import Accelerator

    from thinwire.integrations.accelerate import compress

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        loader = torch.utils.data.DataLoader(Batches(), batch_size=1)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        wire = None if method is None else compress(accelerator, model, optimizer, method, steps=STEPS)
        first = 0
        if resume:
            accelerator.load_state(folder)
            first = 2 * SAVED
        for micro, (index,) in enumerate(accelerator.skip_first_batches(loader, first), first):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, int(index), rank))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if save and micro + 1 == 2 * SAVED:
                accelerator.save_state(folder)
        if wire is not None:
            wire.close()
        return flat(model), wire

    return (resumed if second else whole)(train, folder)


@needs("accelerate")
def test_accelerate(tmp_path):
    check(_accelerate, tmp_path)


# ----------------------------------------------------------------------------------------------------- the core's share


def _closures(rank, world):
    """By a closure as without, with a step that is skipped."""
    launched(rank, world)
    found = {}
    for method in ("dense", KEEPS):
        for closed in (False, True):
            model = build("ddp", world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            wire = thinwire.compress(model, optimizer, method)
            losses = []
            for step in range(6):

                def closure(step=step, model=model, optimizer=optimizer, wire=wire):
                    optimizer.zero_grad()
                    loss = loss_of(model, step, rank) * (float("nan") if (step, rank) == (3, 1) else 1.0)
                    loss.backward()
                    wire.clip_grad_norm_(1.0)
                    return loss

                if closed:
                    with torch.no_grad():
                        losses.append(optimizer.step(closure) if step % 2 else optimizer.step(closure=closure))
                else:
                    losses.append(closure())
                    optimizer.step()
            found[method, closed] = flat(model), wire.skipped, [loss.item() for loss in losses], wire.step
            wire.close()
    same = {
        method: torch.equal(found[method, False][0], found[method, True][0])
        and str(found[method, False][1:]) == str(found[method, True][1:])
        for method in ("dense", KEEPS)
    }
    model = build("ddp", world)
    searching = torch.optim.LBFGS(model.parameters(), max_iter=3)
    wire = thinwire.compress(model, searching)

    def again():
        searching.zero_grad()
        loss = loss_of(model, 0, rank)
        loss.backward()
        return loss

    with pytest.raises(ThinwireError, match="LBFGS calls its closure several times"):
        searching.step(again)
    wire.close()
    return {"same": same, "skipped": found[KEEPS, True][1], "finite": bool(found[KEEPS, True][0].isfinite().all())}


def test_a_closure_that_makes_the_gradients_is_carried():
    for found in ranks.run(_closures, 2):
        assert found == {"same": {"dense": True, KEEPS: True}, "skipped": 1, "finite": True}


class Wrapped:
    """As Accelerate's and Lightning's: no hook of its own is ever called."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


class Container(torch.optim.Optimizer):
    """As torchtitan's: an optimizer that holds several, and steps all."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for g in o.param_groups for p in g["params"]], {})

    def step(self, closure=None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def _inside(rank, world, folder):
    """Wrapped optimizers; and a checkpoint by torch's own functions, which take a step of nothing to make moments."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    launched(rank, world)

    def made(engine: str) -> tuple[nn.Module, Any, thinwire.Wire]:
        model = build(engine, world)
        matrices = [w for w in model.parameters() if w.dim() > 1]
        others = [w for w in model.parameters() if w.dim() == 1]
        both = Container([torch.optim.AdamW(matrices, lr=3e-3), torch.optim.AdamW(others, lr=1e-3)])
        return model, both, thinwire.compress(model, [Wrapped(both)], "int8(smallest=0)")

    def train(model: nn.Module, both: Any, steps: range) -> Tensor:
        for step in steps:
            loss_of(model, step, rank).backward()
            both.step()
            both.zero_grad()
        return flat(model)

    found = {}
    for engine in ("ddp", "fsdp2"):
        model, both, wire = made(engine)
        train(model, both, range(4))
        weights, moments = get_state_dict(model, both.optimizers)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{engine}")
        end = train(model, both, range(4, 7))
        found[engine] = {"steps": wire.step, "equal": same_on_all_ranks(model)}
        wire.close()
        model, both, wire = made(engine)
        weights, moments = get_state_dict(model, both.optimizers)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/{engine}")
        set_state_dict(model, both.optimizers, model_state_dict=weights, optim_state_dict=moments)
        found[engine]["resumed"] = torch.equal(train(model, both, range(4, 7)), end)
        found[engine]["counted"] = wire.step
        wire.close()
    return found


def test_wrapped_optimizers_are_opened_and_torchs_checkpoints_load_into_fresh_ones(tmp_path):
    for found in ranks.run(_inside, 2, str(tmp_path)):
        for engine in ("ddp", "fsdp2"):
            assert found[engine] == {"steps": 7, "equal": True, "resumed": True, "counted": 3}, engine
