"""Is a run that was killed and resumed the run that was not, bit for bit? Every method, on every engine.

    python benchmarks/proofs/exact.py                         # all (tens of minutes)
    python benchmarks/proofs/exact.py topk sdp4bit --engines ddp --seed 3

Two ways each, on 4 ranks: 40 steps straight, against 20 steps, kill -9 of all ranks before a random micro-batch of a
random step, `--resume auto` and the rest, through `thinwire train` (two micro-batches per step); and through
torch.distributed.checkpoint into a fresh model in a fresh process, in a loop of our own. Compared are all weights,
moments and states of all ranks. The exit status is the number of those that differ.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import forked
import thinwire
from digests import KNOBS
from faults import same, tensors_of
from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.methods import TABLE as CLASSES
from thinwire.network.comm import GroupComm
from thinwire.network.ledger import Ledger
from thinwire.train.config import Config
from thinwire.train.data.windows import Windows
from thinwire.train.job.setup import Ranks, make_optimizers, rebuild_buckets, wrap
from thinwire.train.model.decoder import Decoder

WORLD, STEPS, HALF, LIMIT_S = 4, 40, 20, 300
ENGINES = ("ddp", "fsdp2", "hsdp")
TABLE = {method.name: method for method in CLASSES}


def method_of(name: str) -> str:
    """With knobs that make a model of 58 thousand parameters worth compressing, and phases change within 40 steps."""
    knobs = [KNOBS.get(name, "").replace(" ", "")]
    if "smallest" in {field.name for field in knobs_of(TABLE[name])}:
        knobs.append("smallest=1000")
    return f"{name}({','.join(filter(None, knobs))})" if any(knobs) else name


def optimizer_of(name: str) -> str:
    return {"AdamS": "adams", "SGD": "sgd"}.get(TABLE[name].OPTIMIZER.__name__, "adamw")


def words_of(name: str, engine: str) -> list[str]:
    words = f"--steps {STEPS} --checkpoint-every {HALF} --keep 9 --resume auto --engine {engine} --timeout 60"
    words += f" --method {method_of(name)} --optimizer {optimizer_of(name)} --accumulate 2"
    return [*words.split(), *(["--shard-size", "2"] if engine == "hsdp" else [])]


def through_train(name: str, engine: str, box: Path, at: tuple[int, int]) -> str:
    """ "exact", or what went wrong. ``at``: step and micro-batch before which all ranks are killed."""

    def dies(rank: int, step: int, micro: int) -> None:
        if (step, micro) == at:
            os.kill(os.getpid(), signal.SIGKILL)

    for out, fault, status in (("a", None, 0), ("b", dies, "SIGKILL"), ("b", None, 0)):
        job = forked.train(words_of(name, engine), WORLD, box / out, fault=fault)
        job.wait(LIMIT_S)
        if any(end[0] != status for end in job.end().values()):
            return f"refused: {job.last()}" if out == "a" and not job.tracebacks else f"run {out}: {job.last()}"
    return "exact" if same(tensors_of(box / "a", STEPS), tensors_of(box / "b", STEPS)) else "DIFFERS"


def through_dcp(names: list[str], engine: str) -> dict[str, str]:
    """For each method "exact", or what went wrong. The ranks of the second half are other processes."""
    with tempfile.TemporaryDirectory(prefix="thinwire-exact-") as folder:
        told: list[list[dict[str, str]]] = []
        for resumes in (False, True):
            body = functools.partial(_loops, names, engine, Path(folder), resumes)
            job = forked.start(body, WORLD, Path(folder, "ranks"))
            job.wait(LIMIT_S * len(names))
            job.end()
            told.append([dict(line.split("\t") for line in job.lines(rank) if "\t" in line) for rank in range(WORLD)])
            last = job.last()
    found = {}
    for name in names:
        straight, resumed = ([rank.get(name, f"ended before: {last}") for rank in ranks] for ranks in told)
        wrong = [digest for digest in straight + resumed if " " in digest]
        found[name] = wrong[0] if wrong else "exact" if straight == resumed else "DIFFERS"
    return found


def _loops(names: list[str], engine: str, box: Path, resumes: bool, rank: int) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in names:
        try:
            print(f"{name}\t{_loop(name, engine, box / name, resumes)}")
        except Exception as error:
            word = "refused" if isinstance(error, ThinwireError) else type(error).__name__
            print(f"{name}\t{word}: {' '.join(str(error).split())[:200]}")
    return 0


def _loop(name: str, engine: str, box: Path, resumes: bool) -> str:
    """One rank: 40 steps with a checkpoint after 20, or the 20 after it. Returns a digest of all that it holds."""
    assert dist.group.WORLD is not None
    comm = GroupComm(dist.group.WORLD, Ledger())
    ranks = Ranks(comm, comm.size, torch.device("cpu"))
    config = Config(
        preset="tiny", layers=1, width=64, heads=2, seq_len=32, batch_size=2, method=method_of(name), steps=STEPS,
        engine=engine, optimizer=optimizer_of(name), shard_size=2 if engine == "hsdp" else None,
    ).check()  # fmt: skip
    windows = Windows(torch.tensor(list(forked.TEXT.encode()), dtype=torch.uint8), 32)
    torch.manual_seed(0)
    model: Any = wrap(Decoder(config.shape(256)), config, ranks)
    (optimizer,) = make_optimizers(model, config)
    if engine == "ddp":
        rebuild_buckets(model, windows, config, ranks, lambda: torch.autocast("cpu", enabled=False))
    wire = thinwire.compress(model, optimizer, config.method, steps=STEPS)

    def parts() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    if resumes:
        state = parts()
        # Of a parameter that a method steps by itself the optimizer that was saved has no moments.
        dcp.load(state, checkpoint_id=str(box), planner=DefaultLoadPlanner(allow_partial_load=True))
        dcp.load({"wire": wire}, checkpoint_id=str(box))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(HALF if resumes else 0, STEPS):
        if step == HALF and not resumes:
            dcp.save({**parts(), "wire": wire}, checkpoint_id=str(box))
        inputs, targets = windows.batch((step * comm.size + comm.rank) * 2, 2)
        with wire.accumulate():
            model(inputs, targets).backward()
        wire.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    digest = hashlib.sha256()
    for _, value in sorted({**dict(model.named_parameters()), **wire.state_dict()}.items()):
        value = value.to_local() if hasattr(value, "to_local") else value
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    wire.close()
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", choices=[*TABLE, []], help="all if none is named")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--seed", type=int, default=0, help="of the steps at which ranks are killed")
    parser.add_argument("--only", choices=("train", "dcp"), help="one of the two ways")
    chosen = parser.parse_args()
    draw, differ, began = random.Random(chosen.seed), 0, time.monotonic()
    print(f"seed {chosen.seed}\n| method | engine | `thinwire train`, kill -9 | through DCP |\n|---|---|---|---|")
    for engine in chosen.engines:
        names = [name for name in chosen.methods or TABLE if engine in TABLE[name].engines and name != "none"]
        by_dcp = through_dcp(names, engine) if chosen.only != "train" else dict.fromkeys(names, "-")
        for name in names:
            at, cell = (draw.randrange(HALF + 1, STEPS + 1), draw.randrange(1, 3)), "-"
            if chosen.only != "dcp":
                with tempfile.TemporaryDirectory(prefix="thinwire-exact-") as folder:
                    cell = through_train(name, engine, Path(folder), at) + f" (step {at[0]}, micro-batch {at[1]})"
            cells = [cell, by_dcp[name]]
            differ += sum(not cell.startswith(("exact", "refused", "-")) for cell in cells)
            print(f"| {method_of(name)} | {engine} | {cells[0]} | {cells[1]} |", flush=True)
    print(f"{differ} differ; {time.monotonic() - began:.0f} s")
    return differ


if __name__ == "__main__":
    sys.exit(main())
