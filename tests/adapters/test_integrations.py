"""The frameworks that people train in: as theirs to the last bit, as planned, and resumed as if nothing had been."""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from dataclasses import fields
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import ranks
import thinwire
from breadth import ALL, spread
from engines import build, same_on_all_ranks
from frameworks import (
    KEEPS,
    SAVED,
    STEPS,
    Batches,
    Sequences,
    Trained,
    check,
    fixed,
    fixed_gpt2,
    gpt2,
    launched,
    needs,
    net,
    resumed,
    shard_on_cpu,
    untrained_gpt2,
    whole,
)  # fmt: skip
from models import flat, loss_of
from thinwire.base.errors import ThinwireError, ThinwireWarning

# ----------------------------------------------------------------------------------------------------------- Accelerate


BLOCKS = dict(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"], fsdp_version=2)


def _accelerate(rank: int, world: int, folder: str, second: bool, sharded: bool) -> dict[str, Any]:
    launched(rank, world)
    from accelerate import Accelerator

    from thinwire.adapters.accelerate import compress

    def train(method: str | None, folder: str, save: bool, resume: bool, scaled: bool = False) -> Trained:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        if sharded:
            shard_on_cpu(accelerator, **BLOCKS)
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

    name = "accelerate-fsdp2" if sharded else "accelerate"
    found = resumed(name, train, folder) if second else whole(name, train, folder, fixed)
    if second and ALL and not sharded:
        model, _ = train(KEEPS[0], folder, False, False, scaled=True)
        assert flat(model).tolist() == found["ends"][KEEPS[0]], (
            "a GradScaler changes what a method keeps, or what is clipped"
        )
    return found


@needs("accelerate")
@pytest.mark.parametrize("sharded", spread(2, [True, False]))
def test_accelerate(tmp_path, sharded):
    check(_accelerate, tmp_path, fixed(net()).item(), sharded)


def _two_models(rank: int, world: int, folder: str) -> list[bool]:
    """A loop of two models, one of which makes local steps, goes back to its checkpoint inside a round."""
    launched(rank, world)
    from accelerate import Accelerator

    from thinwire.adapters.accelerate import compress

    accelerator = Accelerator()
    models, optimizers = [net(), net()], []
    for model in models:
        optimizers.append(torch.optim.AdamW(model.parameters(), lr=3e-3))
    models, optimizers = (list(accelerator.prepare(*them)) for them in (models, optimizers))
    compress(accelerator, models[0], optimizers[0], "int8(smallest=0)").close()  # leaves nothing in checkpoints
    methods = ("topk(density=0.05,smallest=0)", "local-steps(every=4)")
    wires = [compress(accelerator, *them, steps=12) for them in zip(models, optimizers, methods, strict=True)]

    def train(first: int, last: int) -> Tensor:
        for step in range(first, last):
            for model, optimizer in zip(models, optimizers, strict=True):
                accelerator.backward(loss_of(model, step, rank))
                optimizer.step()
                optimizer.zero_grad()
            if step == 5 and first == 0:
                accelerator.save_state(folder)
        return torch.cat([flat(accelerator.unwrap_model(model)) for model in models])

    ends = [train(0, 10)]  # inside a round: ranks differ
    accelerator.load_state(folder)
    ends.append(train(6, 10))
    for wire in wires:
        wire.close()
    return [bool(torch.equal(*ends)), not torch.equal(*ends[0].chunk(2))]


@needs("accelerate")
def test_two_models_of_one_accelerator_each_get_their_own_state_and_each_rank_its_own_weights(tmp_path):
    assert ranks.run(_two_models, 2, str(tmp_path), warm="warm_frameworks") == [[True, True], [True, True]]


def _each_batch(rank: int, world: int) -> tuple[str, int]:
    launched(rank, world)
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    from thinwire.adapters.accelerate import compress

    def prepared(count: int) -> tuple[Any, ...]:
        accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=count, sync_each_batch=True)
        )
        model = net()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    with pytest.raises(ThinwireError) as refused:
        accelerator, model, optimizer = prepared(2)
        compress(accelerator, model, optimizer, "trickle(smallest=0)")
    for micro in range(2):  # the model is as it was, and trains without Thinwire
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, micro, rank))
    for method, count in (("int8(smallest=0)", 2), ("trickle(smallest=0)", 1)):
        accelerator, model, optimizer = prepared(count)
        wire = compress(accelerator, model, optimizer, method)
        for micro in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, micro, rank))
                optimizer.step()
                optimizer.zero_grad()
        wire.close()
    return str(refused.value), wire.step


@needs("accelerate")
def test_exchanging_each_micro_batch_is_refused_by_the_name_of_the_setting_where_a_method_may_not():
    for refused, steps in ranks.run(_each_batch, 2, warm="warm_frameworks"):
        assert "leave out sync_each_batch" in refused
        assert steps == 2


def _stopped_in_trainer(rank: int, world: int, folder: str) -> tuple[list[float], list[str]]:
    """A callback stops a run inside a round of local steps."""
    launched(rank, world)
    import transformers
    from transformers import Trainer, TrainingArguments

    from thinwire.adapters.transformers import attach

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 6

    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    data = Sequences()
    trainer = Trainer(gpt2(), arguments, train_dataset=data, eval_dataset=data, callbacks=[Stop()])
    trainer.remove_callback(transformers.PrinterCallback)
    thin = attach(trainer, "local-steps(every=4)")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
        trainer.evaluate()
        thin.wire.close()
    assert thin.wire.step == 6
    return flat(trainer.model).tolist(), [str(word.message) for word in caught if word.category is ThinwireWarning]


def _stopped_in_lightning(rank: int, world: int, folder: str, averages: bool = False) -> tuple[list[float], list[str]]:
    """``averages``: to the run's end, where a callback puts each rank's own average in place of the weights."""
    launched(rank, world)
    import lightning.pytorch as pl

    from thinwire.adapters.lightning import ThinwireStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.trainer.should_stop = index == 5 and not averages
            return loss_of(self.net, index, self.global_rank)

        def validation_step(self, batch: Tensor, index: int) -> Tensor:
            return loss_of(self.net, index, self.global_rank)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Average(pl.Callback):
        """As EMAWeightAveraging, and as StochasticWeightAveraging, do it."""

        def __init__(self) -> None:
            self.average: Any = None

        def on_train_batch_end(self, trainer: Any, module: Any, *_: object) -> None:
            self.average = self.average or torch.optim.swa_utils.AveragedModel(module)
            self.average.update_parameters(module)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            module.load_state_dict(self.average.module.state_dict())

    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=(strategy := ThinwireStrategy("local-steps(every=4)")),
        max_steps=STEPS, val_check_interval=2, limit_val_batches=1, callbacks=[Average()] if averages else [],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = torch.utils.data.DataLoader(Batches(), batch_size=1)
        trainer.fit(module := Module(), data, data)
    assert strategy.wire.step == (STEPS if averages else 6)
    said = [str(word.message) for word in caught if word.category is ThinwireWarning]
    return flat(module).tolist(), said


@pytest.mark.parametrize(
    "stopped",
    [
        pytest.param(_stopped_in_trainer, marks=needs("transformers", "accelerate")),
        pytest.param(_stopped_in_lightning, marks=needs("lightning")),
    ],
)
def test_ranks_that_step_alone_meet_where_a_framework_stops_inside_a_round(tmp_path, stopped):
    (one, said), (other, silent) = ranks.run(stopped, 2, str(tmp_path), warm="warm_frameworks")
    assert one == other
    assert not silent
    # Of steps 2, 4 and 6, and at the end: 4 ends a round.
    assert len(said) == 2 and all("evaluated inside a round of local-steps" in line for line in said)


@needs("lightning")
def test_a_callback_that_averages_the_weights_of_ranks_that_step_alone_leaves_them_equal(tmp_path):
    (one, _), (other, _) = ranks.run(_stopped_in_lightning, 2, str(tmp_path), True, warm="warm_frameworks")
    assert one == other


def _fsdp1(rank: int, world: int) -> tuple[str, list[str]]:
    launched(rank, world)
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from thinwire.adapters.accelerate import compress

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**BLOCKS))
    optimizer = torch.optim.AdamW((model := net()).parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        compress(accelerator, model, optimizer, "int8(smallest=0)").close()
    shard_on_cpu(accelerator, **BLOCKS | {"fsdp_version": 1})
    with pytest.raises(ThinwireError) as refused:
        compress(accelerator, model, optimizer)
    return str(refused.value), [str(warning.message) for warning in warned if warning.category is ThinwireWarning]


@needs("accelerate")
def test_a_sharding_that_accelerate_does_not_make_is_said_and_fsdp1_refused_with_the_setting_that_helps():
    (refused, warned), (_, elsewhere) = ranks.run(_fsdp1, 2, warm="warm_frameworks")
    assert "fsdp_version: 2" in refused
    assert any("FSDP was asked for, but Accelerate uses it on GPUs only" in message for message in warned)
    assert not elsewhere


# -------------------------------------------------------------------------------------------------------------- Trainer


def _trainer(rank: int, world: int, folder: str, second: bool, sharded: bool) -> dict[str, Any]:
    launched(rank, world)
    import transformers
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import Trainer, TrainingArguments

    from thinwire.adapters.transformers import ThinwireCallback, attach

    class Sharded(Trainer):
        """As with GPUs: its Accelerator shards as ``fsdp`` says."""

        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            shard_on_cpu(self.accelerator, FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args))
            self.is_fsdp_enabled = True

    transformers.logging.set_verbosity_error()
    logs: list[dict[str, float]] = []
    known = {setting.name for setting in fields(TrainingArguments)}
    recompute = "activation_checkpointing" if "activation_checkpointing" in known else "gradient_checkpointing"

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        rich = method in (None, "dense") and not sharded  # the way of most fine-tuning
        named = method == KEEPS[0]  # a callback that a program makes of a name
        trainer = (Sharded if sharded else Trainer)(
            gpt2(),
            TrainingArguments(
                folder, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
                learning_rate=3e-3, max_grad_norm=0.5, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=5,
                save_strategy="steps" if save else "no", save_steps=SAVED, seed=3,
                bf16=rich, **{recompute: rich}, fsdp=sharded,
            ),
            train_dataset=Sequences(), callbacks=[ThinwireCallback(method)] if named else [],
        )  # fmt: skip
        if method is None and not sharded:
            trainer.accelerator.ddp_handler.find_unused_parameters = False
        thin = trainer.callback_handler.callbacks[0] if named else method and attach(trainer, method)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{SAVED}" if resume else None)
        logs.extend(trainer.state.log_history)
        if thin is not None:
            thin.wire.close()
        return trainer.model, thin and thin.wire

    name = "trainer-fsdp2" if sharded else "trainer"
    found = resumed(name, train, folder) if second else whole(name, train, folder, fixed_gpt2)
    sent = [entry["wire_mb"] for entry in logs if "wire_mb" in entry]
    assert sent and min(sent) > 0 and all("exposed_ms" in entry for entry in logs if "wire_mb" in entry)
    return found


@needs("transformers", "accelerate")
@pytest.mark.parametrize("sharded", [False, True] if ALL else [False])  # it shards by Accelerate's code
def test_trainer(tmp_path, sharded):
    check(_trainer, tmp_path, *ranks.run(untrained_gpt2, 1, warm="warm_frameworks"), sharded)


# ------------------------------------------------------------------------------------------------------------ Lightning


def _lightning(rank: int, world: int, folder: str, second: bool, sharded: bool) -> dict[str, Any]:
    launched(rank, world)
    import logging

    import lightning.pytorch as pl

    from thinwire.adapters.lightning import ThinwireModelParallelStrategy, ThinwireStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def configure_model(self) -> None:
            if sharded and not isinstance(self.net, FSDPModule):
                for block in self.net.blocks:
                    fully_shard(block, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            # By its number: Lightning resumes midway in an epoch with the number that is next, and the first batch.
            return loss_of(self.net, index, self.global_rank)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train(method: str | None, folder: str, save: bool, resume: bool) -> Trained:
        theirs = pl.strategies.ModelParallelStrategy if sharded else pl.strategies.DDPStrategy
        ours = ThinwireModelParallelStrategy if sharded else ThinwireStrategy
        sizes = dict(data_parallel_size=world, tensor_parallel_size=1) if sharded else {}
        strategy = theirs(**sizes) if method is None else ours(method, **sizes)
        # On FSDP2 Lightning exchanges in every micro-batch, and the sum has other bits.
        accumulated = 1 if sharded and method in (None, "dense") else 2
        saving = pl.callbacks.ModelCheckpoint(
            folder, "step-{step}", every_n_train_steps=SAVED, save_top_k=-1, auto_insert_metric_name=False
        )
        trainer = pl.Trainer(
            accelerator="cpu", devices=world, strategy=strategy, max_steps=STEPS,
            accumulate_grad_batches=accumulated,
            gradient_clip_val=0.5, logger=False, enable_progress_bar=False, enable_model_summary=False,
            callbacks=[saving] if save else [], enable_checkpointing=save, default_root_dir=folder,
        )  # fmt: skip
        module = Module()
        loader = torch.utils.data.DataLoader(Batches(), batch_size=1)
        trainer.fit(module, loader, ckpt_path=f"{folder}/step-{SAVED}.ckpt" if resume else None)
        return module.net, getattr(strategy, "wire", None)

    name = "lightning-fsdp2" if sharded else "lightning"
    return resumed(name, train, folder) if second else whole(name, train, folder, fixed)


@needs("lightning")
@pytest.mark.parametrize("sharded", spread(2, [False, True]))
def test_lightning(tmp_path, sharded):
    check(_lightning, tmp_path, fixed(net()).item(), sharded)


def _fabric(rank: int, world: int, sharded: bool) -> list[tuple[list[float], int]]:
    """Weights and steps of Fabric's own run, and of one with dense."""
    launched(rank, world)
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def sharding(model: nn.Module, mesh: Any) -> nn.Module:
        return fully_shard(model, mesh=mesh["data_parallel"])

    def train(method: str | None) -> tuple[list[float], int]:
        sizes = {"data_parallel_size": world, "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(sharding, **sizes) if sharded else "ddp"
        fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(net())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3))
        wire = thinwire.compress(model, optimizer, method) if method else None
        for index in range(6):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                fabric.backward(loss_of(model, index, rank))
            if index % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.2)
                optimizer.step()
                optimizer.zero_grad()
        steps = wire.step if wire else 3
        if wire:
            wire.close()
        return flat(model).tolist(), steps

    return [train(None), train("dense")]


@needs("lightning")
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_a_program_of_lightning_fabric(sharded):
    for theirs, ours in ranks.run(_fabric, 2, sharded, warm="warm_frameworks"):
        assert theirs == ours


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
    """Its model, its sharding, whose gradients are sums over ranks, its containers, its loss; saved as it saves."""
    launched(rank, world)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.components.checkpoint import ModelWrapper
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
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
        schedule = LRSchedulersContainer(optimizers, lambda step: 0.99**step)
        saved = {"model": ModelWrapper(model), "optimizer": optimizers, "lr_scheduler": schedule, "wire": wire}
        if resume:
            dcp.load(saved, checkpoint_id=folder)
        for step in range(SAVED if resume else 0, STEPS):
            (loss(model, 2 * step + rank) / world).backward()
            optimizers.step()
            schedule.step()
            optimizers.zero_grad()
            if save and step + 1 == SAVED:
                dcp.save(saved, checkpoint_id=folder)
        if wire:
            wire.close()
        return model, wire

    def fixed(model: nn.Module) -> Tensor:
        return loss(model, 2 * STEPS).detach()

    if second:
        return resumed("torchtitan", train, folder)
    torch.manual_seed(0)
    fresh = Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=256))
    with torch.no_grad():
        fresh.init_weights()
        start = fixed(fresh).item()
    return {**whole("torchtitan", train, folder, fixed), "start": start}


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
    check(_torchtitan, tmp_path, math.nan)


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


# ------------------------------------------------------------------------------------------------------- skipped steps


SPOILT = 3
"""The step in which rank 1's loss is not finite."""


def _skips_of_accelerate(rank: int, world: int, scaled: bool) -> tuple[list[bool], float]:
    launched(rank, world)
    from accelerate import Accelerator

    from thinwire.adapters.accelerate import compress

    accelerator = Accelerator()
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.AdamW((model := net()).parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step / world))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    wire = compress(accelerator, model, optimizer, "int8(smallest=0)")
    skipped = []
    for step in range(6):
        loss = loss_of(model, step, rank) * (math.nan if (step, rank) == (SPOILT, 1) else 1.0)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    wire.close()
    return skipped, schedule.get_last_lr()[0]


def _skips_of_trainer(rank: int, world: int, folder: str) -> tuple[int, float]:
    launched(rank, world)
    import transformers
    from transformers import Trainer, TrainingArguments

    from thinwire.adapters.transformers import attach

    class Spoilt(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            spoilt = (self.state.global_step, rank) == (SPOILT, 1)
            return super().compute_loss(*args, **kwargs) * (math.nan if spoilt else 1.0)

    transformers.logging.set_verbosity_error()
    arguments = TrainingArguments(
        folder, max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        lr_scheduler_type="linear", learning_rate=1.0,
    )  # fmt: skip
    trainer = Spoilt(gpt2(), arguments, train_dataset=Sequences())
    thin = attach(trainer, "int8(smallest=0)")
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    thin.wire.close()
    return thin.wire.skipped, trainer.lr_scheduler.get_last_lr()[0]


def _retries_of_trainer(rank: int, world: int, folder: str) -> list[list[float]]:
    """The weights after a smaller batch was tried, as memory ran out between a forward and a backward pass."""
    launched(rank, world)
    import transformers
    from transformers import Trainer, TrainingArguments

    from thinwire.adapters.transformers import attach

    class Short(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self._train_batch_size > 2 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")
            return loss

    transformers.logging.set_verbosity_error()
    weights = []
    for method in (None, "dense", "int8(smallest=0)"):
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=3, auto_find_batch_size=True, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = Short(gpt2(), arguments, train_dataset=Sequences())
        thin = method and attach(trainer, method)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        weights.append(flat(trainer.model).tolist())
        if thin:
            assert thin.wire.step == 2 and sum(thin.wire.last_step()["wire_bytes_per_step"].values()) > 0
            thin.wire.close()
    return weights


def _skips_of_lightning(rank: int, world: int, folder: str) -> tuple[int, list[float]]:
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
            return loss_of(self.net, index, rank) * (math.nan if (index, rank) == (SPOILT, 1) else 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
            halved = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) for _ in range(2)]
            return [optimizer], [{"scheduler": halved[0], "interval": "step"}, {"scheduler": halved[1]}]

    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy=(strategy := ThinwireStrategy("int8(smallest=0)")), max_epochs=1,
        limit_train_batches=6, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module := Module(), torch.utils.data.DataLoader(Batches(), batch_size=1))
    schedules = module.lr_schedulers()
    return strategy.wire.skipped, [schedule.last_epoch for schedule in schedules]


@needs("accelerate")
@pytest.mark.parametrize("scaled", [False, True])
def test_accelerate_is_told_of_a_skipped_step_and_its_schedule_waits(scaled):
    for skipped, rate in ranks.run(_skips_of_accelerate, 2, scaled, warm="warm_frameworks"):
        assert skipped == [step == SPOILT for step in range(6)]
        assert rate == 0.5**5


@needs("transformers", "accelerate")
def test_the_schedule_of_the_trainer_waits_for_a_skipped_step(tmp_path):
    for skipped, rate in ranks.run(_skips_of_trainer, 2, str(tmp_path), warm="warm_frameworks"):
        assert skipped == 1
        assert rate == pytest.approx(1 / 6)


@needs("transformers", "accelerate")
def test_the_trainer_tries_a_smaller_batch_when_memory_runs_out_with_a_method_too(tmp_path):
    """DDP of the first try, whose backward pass never came, has hooks on the same parameters."""
    (stock, dense, int8), other = ranks.run(_retries_of_trainer, 2, str(tmp_path), warm="warm_frameworks")
    assert dense == stock and int8 == other[2] != stock


@needs("lightning")
def test_a_schedule_by_steps_of_lightning_waits_for_a_skipped_step_and_one_by_epochs_does_not(tmp_path):
    for skipped, moved in ranks.run(_skips_of_lightning, 2, str(tmp_path), warm="warm_frameworks"):
        assert skipped == 1
        assert moved == [5, 1]
