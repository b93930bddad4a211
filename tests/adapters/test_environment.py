"""THINWIRE_METHOD compresses in programs that do not know of Thinwire, as ``compress()`` in them would."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ranks
import thinwire
from frameworks import Sequences, gpt2, launched, needs, net
from models import flat, loss_of
from thinwire.adapters import environment
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.train.cli import begin_rank

ROOT = Path(__file__).resolve().parents[2]
METHOD = "topk:feedback:gradients:smallest:0:density:0.05"


def _sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def _own_loop(rank: int, model: nn.Module, compress: bool, scaler: Any = None) -> torch.Tensor:
    """A loop that its author wrote: an evaluation first, two micro-batches a step; the weights after six."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with torch.no_grad():
        loss_of(model, 99, rank)
    wire = thinwire.compress(model, optimizer, METHOD, scaler=scaler) if compress else None
    for step in range(6):
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
            loss = loss_of(model, 2 * step + micro, rank)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    found = flat(model)
    if wire is not None:
        wire.close()
    return found


def _loops(rank: int, world: int) -> dict[str, bool]:
    launched(rank, world)
    found = {}
    for name, wrap in (("ddp", DistributedDataParallel), ("fsdp2", _sharded), ("scaler", DistributedDataParallel)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if name == "scaler" else None
        expected = _own_loop(rank, wrap(net()), True, scaler)
        os.environ["THINWIRE_METHOD"] = METHOD
        environment.start()
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stderr(io.StringIO()) as said:
            warnings.simplefilter("always")
            found[name] = torch.equal(_own_loop(rank, wrap(net()), False, scaler), expected)
        lost = [w for w in warned if w.category is ThinwireWarning and "checkpoints do not save them" in str(w.message)]
        lines = said.getvalue().count(f"THINWIRE_METHOD={METHOD}: topk(")
        found[name] &= len(lost) == lines == (rank == 0) and not environment._hooks
    environment.start()
    found["by itself"] = torch.equal(_own_loop(rank, wrap(net()), True, scaler), expected)
    os.environ["THINWIRE_METHOD"] = "intt8"
    environment.start()
    with pytest.raises(ThinwireError, match="intt8"):
        _own_loop(rank, DistributedDataParallel(net()), False)
    return found


def test_a_loop_is_compressed_at_its_first_forward_pass_in_training():
    expected = dict.fromkeys(("ddp", "fsdp2", "scaler", "by itself"), True)
    assert ranks.run(_loops, 2, warm="warm_frameworks") == [expected, expected]


def _accelerate(rank: int, world: int, folder: str) -> bool:
    """Two lives of one loop; it does not know of Thinwire, and neither does its own checkpoint."""
    launched(rank, world)
    from accelerate import Accelerator

    def train(first: int, last: int) -> torch.Tensor:
        accelerator = Accelerator()
        optimizer = torch.optim.AdamW((model := net()).parameters(), lr=3e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if first:
            accelerator.load_state(folder)
        for step in range(first, last):
            accelerator.backward(loss_of(model, step, rank))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            if step == 3 and not first:
                accelerator.save_state(folder)
        return flat(accelerator.unwrap_model(model))

    ends = []
    for first in (0, 4):
        os.environ["THINWIRE_METHOD"] = METHOD
        environment.start()
        ends.append(train(first, 8))
    return torch.equal(*ends) and Path(folder, "thinwire", f"rank-{rank:04d}.safetensors").exists()


@needs("accelerate")
def test_a_loop_with_accelerate_saves_and_loads_what_waits(tmp_path):
    assert ranks.run(_accelerate, 2, str(tmp_path), warm="warm_frameworks") == [True, True]


def _trainer(rank: int, world: int, folder: str) -> tuple[list[torch.Tensor], list[str]]:
    launched(rank, world)
    import transformers
    from transformers import Trainer, TrainingArguments

    transformers.logging.set_verbosity_error()
    os.environ["THINWIRE_METHOD"] = METHOD
    environment.start()
    ends, logged = [], []
    for first in (0, 3):
        arguments = TrainingArguments(
            folder, max_steps=6, use_cpu=True, report_to=[], disable_tqdm=True, save_steps=3, logging_steps=1, seed=3,
        )  # fmt: skip
        trainer = Trainer(gpt2(), arguments, train_dataset=Sequences())
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if first else None)
        ends.append(flat(trainer.model).tolist())
        logged += [entry for entry in trainer.state.log_history if "wire_mb" in entry]
    return ends, [str(entry["wire_mb"]) for entry in logged]


@needs("transformers", "accelerate")
def test_a_trainer_gets_the_callback_and_its_checkpoints_the_state(tmp_path):
    for (straight, resumed), logged in ranks.run(_trainer, 2, str(tmp_path), warm="warm_frameworks"):
        assert straight == resumed
        assert len(logged) >= 6


def test_the_program_itself_takes_no_method_from_it(monkeypatch, capsys):
    """Its ranks inherit what it has; they would compress the model twice."""
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("THINWIRE_METHOD", "int8")
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
        begin_rank()
        assert "THINWIRE_METHOD" not in os.environ
        assert capsys.readouterr().err.count("THINWIRE_METHOD=int8 is for other programs, and left out") == lines


@needs("transformers")
def test_torch_calls_it_by_the_entry_point(tmp_path):
    """In a process of its own: transformers is imported before torch, and nobody imports Thinwire."""
    [(group, entries)] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].items()
    installed = tmp_path / "thinwire-0.dist-info"
    installed.mkdir()
    installed.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: thinwire\nVersion: 0\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    installed.joinpath("entry_points.txt").write_text("\n".join(lines))
    program = (
        "from transformers.trainer import DEFAULT_CALLBACKS as c; import torch; torch.nn.Linear(1, 1); "
        "print([each.__module__ for each in c], len(torch.nn.modules.module._global_forward_pre_hooks))"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    given = {**os.environ, "PYTHONPATH": path, "THINWIRE_METHOD": "int8"}
    ran = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=300)
    assert "'thinwire.adapters.environment'] 1" in ran.stdout, ran.stderr


def test_without_the_variable_it_does_nothing(monkeypatch):
    finders = list(sys.meta_path)
    for empty in (True, False):
        monkeypatch.setenv("THINWIRE_METHOD", "") if empty else monkeypatch.delenv("THINWIRE_METHOD")
        environment.start()
        assert sys.meta_path == finders and not environment._hooks
