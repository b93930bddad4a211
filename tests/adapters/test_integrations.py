"""The frameworks that people train in: as theirs to the last bit, as planned, and resumed as if nothing had been."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import thinwire
from breadth import ALL, spread
from engines import build, same_on_all_ranks
from models import Net, flat, loss_of
from thinwire.base.errors import ThinwireError

STEPS, SAVED = 20, 10
LOSSY = ("int8(smallest=0)", "sdp4bit(smallest=0)")
FRAMEWORKS = ("accelerate", "trainer", "lightning", "torchtitan")
TRIED = spread(2, FRAMEWORKS, LOSSY)
KEEPS = ("topk(feedback='gradient', smallest=0, density=0.05)", "trickle(smallest=0, density=0.05)")
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
    """Bytes per step that the plan does not know, those of sharded weights aside."""
    stats = wire.ledger.stats()
    return sum(stats["wire_bytes_per_step"].values()) - stats["weight_bytes_per_step"] - wire.plan.wire_bytes


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def fixed(model: nn.Module) -> Tensor:
    """The loss on a batch that no step has."""
    return loss_of(model, 3 * STEPS, 0)


Trained = tuple[nn.Module, Any]
"""The model after the last step, not wrapped, and the wire, or None."""


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
    ends = [flat(train(method, f"{folder}/{i}", True, False)[0]).tolist() for i, method in enumerate(KEEPS)]
    return {**found, "stock": loss(stock).item(), "ends": ends}


def resumed(train: Callable[..., Trained], folder: str) -> dict[str, Any]:
    """Another life, from where the last runs of ``whole`` were saved."""
    lives = [train(method, f"{folder}/{i}", False, True) for i, method in enumerate(KEEPS)]
    return {"ends": [flat(model).tolist() for model, _ in lives], "steps": {wire.step for _, wire in lives}}


def check(train: Callable[[int, int, str, bool], dict], folder: Path, start: float) -> None:
    """``start``: the loss before training."""
    first = ranks.run(train, 2, str(folder), False, warm="warm_frameworks")
    second = ranks.run(train, 2, str(folder), True, warm="warm_frameworks")
    for one, other in zip(first, second, strict=True):
        assert one["dense"] and one["steps"] == STEPS
        assert one["lossy"]
        for method, (more, share, loss) in one["lossy"].items():
            assert more == 0 and share < 0.55, method
            assert start - loss > 0.8 * (start - one["stock"]) > 0, method
        assert other["steps"] == {STEPS}
        for method, end, again in zip(KEEPS, one["ends"], other["ends"], strict=True):
            assert end == again, method


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

    from thinwire.adapters.accelerate import compress

    def train(method: str | None, folder: str, save: bool, resume: bool, scaled: bool = False) -> Trained:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        if scaled:  # theirs is for float16, which they have for GPUs only; by powers of 2, so that no bit is lost
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        loader = torch.utils.data.DataLoader(Batches(), batch_size=1)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        if scaled:
            accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
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
        accelerator.state._mixed_precision = "no"
        return accelerator.unwrap_model(model), wire

    found = resumed(train, folder) if second else whole("accelerate", train, folder, fixed)
    if second and ALL:
        model, _ = train(KEEPS[0], folder, False, False, scaled=True)
        assert flat(model).tolist() == found["ends"][0], "a GradScaler changes what a method keeps, or what is clipped"
    return found


@needs("accelerate")
def test_accelerate(tmp_path):
    check(_accelerate, tmp_path, fixed(net()).item())


# -------------------------------------------------------------------------------------------------------------- Trainer


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


def _untrained(rank: int, world: int) -> float:
    return fixed_gpt2(gpt2()).item()


class Sequences(torch.utils.data.Dataset):
    """16 tokens each, for the Trainer to shuffle."""

    def __len__(self) -> int:
        return 4 * 2 * 2 * STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) * (index % 7 + 1) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def _trainer(rank: int, world: int, folder: str, second: bool) -> dict[str, Any]:
    launched(rank, world)
    import transformers
    from transformers import Trainer, TrainingArguments

    from thinwire.adapters.transformers import attach

    transformers.logging.set_verbosity_error()
    logs: list[dict[str, float]] = []
    known = {setting.name for setting in fields(TrainingArguments)}
    recompute = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        rich = method in (None, "dense")  # the way of most fine-tuning
        trainer = Trainer(
            gpt2(),
            TrainingArguments(
                folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                learning_rate=3e-3, max_grad_norm=0.5, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=5,
                save_strategy="steps" if save else "no", save_steps=SAVED, seed=3,
                bf16=rich, **{recompute: rich},
            ),
            train_dataset=Sequences(),
        )  # fmt: skip
        if rich and method is None:
            trainer.accelerator.ddp_handler.find_unused_parameters = False
        thin = None if method is None else attach(trainer, method)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
        logs.extend(trainer.state.log_history)
        if thin is not None:
            thin.wire.close()
        return trainer.model, thin and thin.wire

    found = resumed(train, folder) if second else whole("trainer", train, folder, fixed_gpt2)
    sent = [entry["wire_mb"] for entry in logs if "wire_mb" in entry]
    assert sent and min(sent) > 0 and all("exposed_ms" in entry for entry in logs if "wire_mb" in entry)
    return found


@needs("transformers", "accelerate")
def test_trainer(tmp_path):
    check(_trainer, tmp_path, *ranks.run(_untrained, 1, warm="warm_frameworks"))


# ------------------------------------------------------------------------------------------------------------ Lightning


def _lightning(rank: int, world: int, folder: str, second: bool) -> dict[str, Any]:
    launched(rank, world)
    import logging

    import lightning.pytorch as pl

    from thinwire.adapters.lightning import ThinwireStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            # By its number: Lightning resumes midway in an epoch with the number that is next, and the first batch.
            return loss_of(self.net, index, self.global_rank)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        strategy = pl.strategies.DDPStrategy() if method is None else ThinwireStrategy(method)
        saving = pl.callbacks.ModelCheckpoint(
            folder, "step-{step}", every_n_train_steps=SAVED, save_top_k=-1, auto_insert_metric_name=False
        )
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, max_steps=STEPS, accumulate_grad_batches=2,
            gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[saving] if save else [], enable_checkpointing=save, default_root_dir=folder,
        )  # fmt: skip
        module = Module()
        loader = torch.utils.data.DataLoader(Batches(), batch_size=1)
        trainer.fit(module, loader, ckpt_path=f"{folder}/step-{SAVED}.ckpt" if resume else None)
        return module.net, getattr(strategy, "wire", None)

    return resumed(train, folder) if second else whole("lightning", train, folder, fixed)


@needs("lightning")
def test_lightning(tmp_path):
    check(_lightning, tmp_path, fixed(net()).item())


# ----------------------------------------------------------------------------------------------------- the core's share


def _closures(rank, world):
    """By a closure as without, with a step that is skipped."""
    frameworks = {"accelerate", "lightning", "peft", "transformers"}
    assert not frameworks & set(sys.modules), "the library imports a framework of its own accord"
    launched(rank, world)
    found = {}
    for method in ("dense", KEEPS[0]):
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
        for method in ("dense", KEEPS[0])
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
    weights, skipped = found[KEEPS[0], True][:2]
    return {"same": same, "skipped": skipped, "finite": bool(weights.isfinite().all())}


def test_a_closure_that_makes_the_gradients_is_carried():
    for found in ranks.run(_closures, 2):
        assert found == {"same": {"dense": True, KEEPS[0]: True}, "skipped": 1, "finite": True}


@pytest.mark.parametrize(("library", "extra"), [("transformers", "hf"), ("lightning", "lightning")])
def test_without_its_library_an_adapter_names_the_command(library, extra, monkeypatch):
    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == library:
                raise ModuleNotFoundError(f"No module named '{library}'", name=library)

    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, f"thinwire.adapters.{library}", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ThinwireError, match=rf"'{library}' is not installed: pip install 'thinwire\[{extra}\]'"):
        importlib.import_module(f"thinwire.adapters.{library}")


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


def _torchtitan(rank: int, world: int, folder: str, second: bool) -> dict[str, Any]:
    """Its model, its sharding, whose gradients are sums over ranks, its container of optimizers; its loss."""
    launched(rank, world)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.components.optimizer import OptimizersContainer
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs
    from torchtitan.models.llama3.infra.parallelize import apply_fsdp

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))

    def loss(model: nn.Module, seed: int) -> Tensor:
        inputs = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(seed))
        losses = nn.functional.cross_entropy(model(inputs).flatten(0, 1), (inputs + 1).flatten() % 256, reduction="sum")
        return losses / inputs.numel()

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        torch.manual_seed(0)
        model = Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=256))
        with torch.no_grad():
            model.init_weights()
        apply_fsdp(model, mesh, param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False)
        optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 3e-3})
        if method is None:  # gloo has no sum with a factor, which torch takes here even for the factor 1
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        wire = method and thinwire.compress(model, optimizers, method)
        saved = {"model": ModelWrapper(model), "optimizer": optimizers, "wire": wire}  # as its CheckpointManager has it
        if resume:
            dcp.load(saved, checkpoint_id=folder)
        for step in range(SAVED if resume else 0, STEPS):
            (loss(model, 2 * step + rank) / world).backward()
            optimizers.step()
            optimizers.zero_grad()
            if save and step + 1 == SAVED:
                dcp.save(saved, checkpoint_id=folder)
        if wire:
            wire.close()
        return model, wire

    def fixed(model: nn.Module) -> Tensor:
        return loss(model, 2 * STEPS).detach()

    return resumed(train, folder) if second else whole("torchtitan", train, folder, fixed)


def without_torchtitan() -> str:
    """Why torchtitan cannot be tried here; "": it can."""
    try:
        version = metadata.version("torchtitan")
    except metadata.PackageNotFoundError:
        return "needs torchtitan"
    if importlib.util.find_spec("triton") is None:
        return "torchtitan needs triton, which torch for CPUs does not bring"
    return "" if version.startswith("0.2.") else f"torchtitan {version} has other names than 0.2"


@pytest.mark.skipif(bool(without_torchtitan()), reason=without_torchtitan())
def test_torchtitan_s_model_sharding_and_container(tmp_path):
    check(_torchtitan, tmp_path, math.log(256))


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
