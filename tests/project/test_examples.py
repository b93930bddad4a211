"""Each program in examples/ runs as its first line says, learns, and reports."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from breadth import spread
from thinwire.base.processes import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "accelerate_loop": ("accelerate",), "lightning_fit": ("lightning",), "lora": ("peft", "transformers"),
    "trainer": ("transformers", "accelerate"),
}  # fmt: skip
TRIED = [path for path in sorted(EXAMPLES.glob("*.py")) if path.stem not in set(NEEDS) - set(spread(4, NEEDS))]
LOSS = re.compile(r"loss'?:? '?([0-9.]+)")


def _program(rank: int, world: int, program: str, folder: str, port: int, arguments: list[str]) -> str:
    """As torchrun starts it; returns what it printed."""
    dist.destroy_process_group()
    os.environ.update({
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    })  # fmt: skip
    os.chdir(folder)
    sys.argv = [program, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(program, run_name="__main__")
    if not dist.is_initialized():  # for ``ranks``, which ends what it began
        return printed.getvalue()
    dist.barrier()
    return printed.getvalue()


@pytest.mark.parametrize("path", TRIED, ids=lambda path: path.stem)
def test_an_example_runs_as_it_says(path, tmp_path):
    missing = [name for name in NEEDS.get(path.stem, ()) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    if path.stem == "muon_adamw" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    command = path.read_text().split("\n")[0]
    world = int(re.search(r"torchrun --nproc-per-node (\d) examples/" + path.name, command)[1])
    arguments = command.split(path.name)[1].split() if "--" in command.split(path.name)[1] else []
    warm = "warm_frameworks" if path.stem in NEEDS else "warm"
    printed, *others = ranks.run(_program, world, str(path), str(tmp_path), free_port(), arguments, warm=warm)
    losses = [float(loss) for loss in LOSS.findall(printed)]
    assert len(losses) > 2 and losses[-1] < losses[0] - 0.2, printed
    assert "wire" in printed and "ms" in printed, printed
    assert not any(map(LOSS.findall, others))
