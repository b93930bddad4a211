"""The state of a wire beside a framework's checkpoint: of these weights, on all ranks, or of none."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import ranks
from engines import build
from frameworks import Sequences, gpt2, launched, needs, net
from models import loss_of
from thinwire.adapters import files
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.network.comm import local
from thinwire.wire import Wire, compress

STALE = "belongs to other weights than those that were loaded"


def _made(engine: str, world: int, method: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Wire]:
    model = build(engine, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, compress(model, optimizer, method, steps=40)


def _lives(rank: int, world: int, engine: str, method: str, folder: str) -> dict[str, object]:
    """Save after six steps; load beside the same weights, beside others, and where the file of rank 1 is gone."""
    model, optimizer, wire = _made(engine, world, method)
    for step in range(6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    files.save(wire, Path(folder))
    saved, weights = wire.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    if engine == "ddp":  # a framework keeps rank 0's
        for value in weights.values():
            torch.distributed.broadcast(value, 0)
    wire.close()
    facts: dict[str, object] = {}
    for case in ("same", "changed on one rank", "lost"):
        model, optimizer, wire = _made(engine, world, method)
        model.load_state_dict(weights)
        empty = {key: value.clone() for key, value in wire.state_dict().items()}
        if case.startswith("changed") and rank == 0:
            with torch.no_grad():
                last = [local(weight) for weight in model.parameters() if local(weight).numel()][-1]
                last.view(-1)[-1] += 1e-3
        if case == "lost" and rank == 1:
            next(Path(folder).glob("rank-0001*")).unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                files.load(wire, Path(folder))
            except ThinwireError as error:
                facts[f"{case}: refused"] = str(error)
        expected = saved if case == "same" else empty
        now = wire.state_dict()
        facts[case] = now.keys() == expected.keys() and all(torch.equal(now[key], expected[key]) for key in now)
        facts[f"{case}: said"] = [str(word.message) for word in caught if word.category is ThinwireWarning]
        wire.close()
    return facts


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("ddp", "topk(feedback='gradients',smallest=0,density=0.05)"),
        ("ddp", "local-steps(every=4)"),  # in the middle of a round: rank 1 has weights of its own
        ("fsdp2", "trickle(smallest=0,density=0.05)"),
    ],
)
def test_a_state_is_loaded_with_the_weights_that_it_was_saved_with_or_on_no_rank(tmp_path, engine, method):
    for rank, facts in enumerate(ranks.run(_lives, 2, engine, method, str(tmp_path))):
        assert facts["same"] and facts["same: said"] == []
        assert facts["changed on one rank"] and facts["lost"]
        said = facts["changed on one rank: said"]
        assert [STALE in line for line in said] == ([True] if rank == 0 else [])
        assert "is missing" in facts["lost: refused"]


def _shorter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _scribbled(file: Path) -> None:
    file.write_bytes(b"\0" * 8 + b"no table of tensors")


def _not_finite(file: Path) -> None:
    """Spoil the last tensor of numbers."""
    from safetensors.torch import load_file, save_file

    state = load_file(file)
    spoilt = [key for key, value in state.items() if value.is_floating_point() and value.dim()][-1]
    save_file({**state, spoilt: state[spoilt].fill_(torch.nan)}, file)


TORN = [_shorter, _scribbled, _not_finite]


def _torn(rank: int, world: int, engine: str, folder: str) -> list[str]:
    """The file of one rank is torn; then that of the next is, in another way."""
    said = []
    model, optimizer, wire = _made(engine, world, "topk(feedback='gradients',smallest=0,density=0.05)")
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    for torn, spoil in enumerate(TORN):
        files.save(wire, Path(folder))
        if rank == torn % world:
            spoil(files._file(Path(folder)))
        with pytest.raises(ThinwireError) as refused:
            files.load(wire, Path(folder))
        said.append(str(refused.value))
    wire.close()
    return said


@pytest.mark.parametrize(("engine", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_a_file_torn_on_any_one_rank_ends_all_ranks_with_one_line_that_names_it(tmp_path, engine, world):
    for rank, said in enumerate(ranks.run(_torn, world, engine, str(tmp_path), seconds=30)):
        for torn, line in enumerate(said):
            assert ("holds values that are not finite" if torn == 2 else "is damaged") in line and "\n" not in line
            assert line.startswith(f"rank {torn % world}: ") == (rank != torn % world)


def _torn_in(rank: int, world: int, framework: str, folder: str) -> str:
    """Save a run of ``framework``, tear one rank's file, and resume."""
    launched(rank, world)

    def tear() -> None:
        torch.distributed.barrier()
        if rank == 1:
            (file,) = Path(folder).glob("**/rank-0001.safetensors")
            _shorter(file)
        torch.distributed.barrier()

    if framework == "accelerate":
        from accelerate import Accelerator

        from thinwire.adapters import accelerate

        accelerator, model = Accelerator(), net()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        accelerate.compress(accelerator, model, optimizer, "int8", steps=20)
        accelerator.save_state(folder)
        tear()
        with pytest.raises(ThinwireError) as refused:
            accelerator.load_state(folder)
    elif framework == "trainer":
        from transformers import Trainer, TrainingArguments

        from thinwire.adapters.transformers import attach

        def trainer() -> Trainer:
            arguments = TrainingArguments(
                folder, max_steps=2, save_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[],
                disable_tqdm=True, save_total_limit=1, logging_strategy="no",
            )  # fmt: skip
            made = Trainer(gpt2(), arguments, train_dataset=Sequences())
            attach(made, "int8")
            return made

        trainer().train()
        tear()
        with pytest.raises(ThinwireError) as refused:
            trainer().train(resume_from_checkpoint=True)
    else:
        import lightning

        from thinwire.adapters.lightning import ThinwireModelParallelStrategy, ThinwireStrategy

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net()

            def configure_model(self) -> None:
                if framework == "lightning-fsdp2":
                    fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

            def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
                return loss_of(self.net, number, rank)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters())

        def fit(steps: int, **resume: str) -> lightning.Trainer:
            strategy = (
                ThinwireModelParallelStrategy("int8", data_parallel_size=world, tensor_parallel_size=1)
                if framework == "lightning-fsdp2"
                else ThinwireStrategy("int8")
            )
            trainer = lightning.Trainer(
                accelerator="cpu", devices=world, strategy=strategy, max_steps=steps, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                default_root_dir=folder,
            )  # fmt: skip
            trainer.fit(Module(), torch.utils.data.DataLoader(range(8)), **resume)
            return trainer

        fit(2).save_checkpoint(f"{folder}/last.ckpt")
        tear()
        with pytest.raises(ThinwireError) as refused:
            fit(4, ckpt_path=f"{folder}/last.ckpt")
    return str(refused.value)


@pytest.mark.parametrize("framework", ["accelerate", "trainer", "lightning", "lightning-fsdp2"])
def test_a_torn_file_ends_all_ranks_of_a_run_inside_any_framework(tmp_path, framework):
    library = {"trainer": "transformers"}.get(framework, framework.partition("-")[0])
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    one, other = ranks.run(_torn_in, 2, framework, str(tmp_path), warm="warm_frameworks", seconds=60)
    assert one == f"rank 1: {other}" and "damaged" in other


def _overwritten(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    """A folder that each save overwrites, by a program with Thinwire, by one without, and again by one with it."""
    launched(rank, world)
    from accelerate import Accelerator

    from thinwire.adapters import accelerate

    for life, thin in enumerate((True, False, True)):
        accelerator = Accelerator()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        wire = accelerate.compress(accelerator, model, optimizer, "trickle(smallest=0)", steps=20) if thin else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if life:
                accelerator.load_state(folder)
        resumed = wire.step if wire else 0
        for step in range(3):
            accelerator.backward(loss_of(model, 3 * life + step, rank))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(folder)
        if wire is not None:
            wire.close()
        accelerator.free_memory()
    return resumed, [str(word.message) for word in caught if word.category is ThinwireWarning]


@needs("accelerate")
def test_a_checkpoint_that_a_program_without_thinwire_has_replaced_is_not_taken_for_ours(tmp_path):
    (step, said), (other, _) = ranks.run(_overwritten, 2, str(tmp_path), warm="warm_frameworks")
    assert step == other == 0
    assert len(said) == 1 and STALE in said[0]
