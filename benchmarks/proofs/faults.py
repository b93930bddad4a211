"""Faults, what should happen then, and what does: one row each, and "survived" or the words that the user reads.

    python benchmarks/proofs/faults.py                   # all rows (some minutes)
    python benchmarks/proofs/faults.py 1 4 17            # these
    python benchmarks/proofs/faults.py --markdown        # as the table of docs/faults.md

Ranks are processes of their own, forked from this one. Faults of the network need namespaces (root); the disk that is
full is a tmpfs, which needs root too. The exit status is the number of rows that did not survive.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import forked
import thinwire
from forked import Job, log_of
from thinwire.base.errors import ThinwireError
from thinwire.lab.cluster import Cluster
from thinwire.train.checkpoint import format as checkpoint_format

TIMEOUT = 8
"""Seconds that a rank waits for another; everything has to end within ten more."""


class Got(NamedTuple):
    """What happened. ``seconds``: from the fault to the end of the last rank, where that is what is judged."""

    survived: bool
    text: str
    seconds: float | None = None


@dataclass(frozen=True)
class Row:
    number: str
    fault: str
    expected: str
    run: Callable[[Path], Got]


ROWS: list[Row] = []


def row(number: str, fault: str, expected: str) -> Callable[[Callable[[Path], Got]], Callable[[Path], Got]]:
    """Adds a function to the table. It is given an empty folder."""

    def add(run: Callable[[Path], Got]) -> Callable[[Path], Got]:
        ROWS.append(Row(number, fault, expected, run))
        return run

    return add


def ended(job: Job, seconds: float, *ranks: int) -> tuple[dict[int, tuple[int | str, float]], float]:
    """How the ranks ended within ``seconds``, the rest is killed; and the seconds that the last of ``ranks`` took."""
    job.wait(seconds, *ranks)
    ends = job.end()
    times = [ends[rank][1] if rank in ends else float("inf") for rank in ranks or job.pids]
    return ends, max(times)


def refused(job: Job, *words: str) -> Got:
    """Did all ranks end with status 2 and one line each, with ``words`` in it?"""
    ends, seconds = ended(job, 60)
    text = job.last()
    good = all(end[0] == 2 for end in ends.values()) and len(ends) == len(job.pids) and not job.tracebacks
    return Got(good and all(word in text for word in words), text, seconds)


def done(job: Job, seconds: float = 120) -> bool:
    """Did all ranks end with status 0?"""
    ends, _ = ended(job, seconds)
    return len(ends) == len(job.pids) and all(end[0] == 0 for end in ends.values())


def train(words: str, world: int, out: Path, **how: Any) -> Job:
    return forked.train([*words.split(), "--timeout", str(TIMEOUT)], world, out, **how)


def tensors_of(out: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, under the name of its file."""
    folder = out / "checkpoints" / f"step-{step:06d}"
    return {
        f"{file.name}:{name}": value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return bool(a) and a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def latest(out: Path) -> str | None:
    """What ``latest`` names, if that can be read whole."""
    try:
        name = (out / "checkpoints" / "latest").read_text().strip()
        json.loads((out / "checkpoints" / name / "meta.json").read_text())
        return name if tensors_of(out, int(name.removeprefix("step-"))) else None
    except (OSError, ValueError):
        return None


# --- checkpoints ------------------------------------------------------------------------------------------------------


@row("1", "a new run in a folder that holds a longer one", "refused; with --overwrite the new run's newest is kept")
def used_folder(box: Path) -> Got:
    out = box / "run"
    if not done(train("--steps 40 --checkpoint-every 5", 2, out)):
        return Got(False, "the first run failed")
    first = refused(train("--steps 15 --checkpoint-every 5", 2, out))
    again = train("--steps 15 --checkpoint-every 5 --overwrite", 2, out)
    good = done(again) and latest(out) == "step-000015"
    return Got(first.survived and good, f"{first.text}; after --overwrite latest is {latest(out)}")


@row("6", "two hosts without a shared folder", "each keeps its part, and resume works")
def two_hosts(box: Path) -> Got:
    def folder(rank: int) -> Path:
        return box / f"host{rank}" / "run"

    both = {"folder": folder, "environment": lambda rank: {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}}
    words = "--method topk(smallest=1000) --checkpoint-every 4"
    first = done(train(f"{words} --steps 8", 2, box / "hosts", **both))
    going_on = train(f"{words} --steps 12 --resume auto", 2, box / "hosts", **both)
    second = done(going_on)
    kept = [latest(folder(rank)) for rank in range(2)]
    return Got(first and second and kept == ["step-000012"] * 2, f"resumed; latest on the hosts: {kept}"
               if second else going_on.last())  # fmt: skip


@row("13", "one bit of a checkpoint flips", "refused by the name of the tensor")
def bit_flip(box: Path) -> Got:
    out = box / "run"
    done(train("--steps 4 --checkpoint-every 4 --method topk(smallest=1000)", 2, out))
    file = out / "checkpoints/step-000004/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 4
    file.write_bytes(data)
    return refused(train("--steps 8 --resume latest --method topk(smallest=1000)", 2, out), "model.safetensors")


@row("14", "resume with another seed, corpus, batch, layers, heads, optimizer", "each refused by name")
def other_settings(box: Path) -> Got:
    out, texts, good = box / "run", [], True
    done(train("--steps 4 --checkpoint-every 4", 2, out))
    other = box / "other.txt"
    other.write_text(forked.TEXT[1000:] + "And so on.\n" * 300)
    for words in ("--seed 1", "--batch-size 4", "--layers 2", "--heads 4", "--optimizer adams", f"--corpus {other}"):
        got = refused(train(f"--steps 8 --resume latest {words}", 2, out))
        good = good and got.survived
        texts.append(got.text.removeprefix("thinwire: ")[:70] if got.survived else f"{words} NOT REFUSED: {got.text}")
    return Got(good, " | ".join(texts))


@row("14b", "resume with another learning rate, or more threads", "goes on, and says that it is another run")
def other_rate(box: Path) -> Got:
    out = box / "run"
    done(train("--steps 4 --checkpoint-every 4", 2, out))
    job = train("--steps 8 --resume latest --lr 1e-3", 2, out)
    good = done(job)
    warned = [line for line in job.lines(0) if "lr" in line]
    return Got(good and bool(warned), warned[0] if warned else job.last())


@row("15", "a save that takes longer than --timeout; BPE training likewise", "the other ranks wait")
def slow(box: Path) -> Got:
    def slow_write(rank: int) -> None:
        write = checkpoint_format.write_tensors

        def slowly(*args: Any, **how: Any) -> Any:
            if rank == 0:
                time.sleep(TIMEOUT + 4)
            return write(*args, **how)

        checkpoint_format.write_tensors = slowly

    saved = train("--steps 4 --checkpoint-every 4", 2, box / "save", first=slow_write)
    good = done(saved)

    def slow_bpe(rank: int) -> None:
        from thinwire.train.data import tokenizer

        bpe = tokenizer._train_bpe

        def slowly(*args: Any) -> Any:
            if rank == 0:
                time.sleep(TIMEOUT + 4)
            return bpe(*args)

        tokenizer._train_bpe = slowly

    trained = train("--steps 4 --tokenizer bpe:300", 2, box / "bpe", first=slow_bpe)
    both = done(trained)
    return Got(good and both, f"both ended well after waiting {TIMEOUT + 4} s" if good and both
               else f"{saved.last()} / {trained.last()}")  # fmt: skip


@row("16", "files that are truncated, empty, missing, of another kind, not UTF-8", "one line on each rank")
def damaged(box: Path) -> Got:
    base = box / "base"
    done(train("--steps 4 --checkpoint-every 4 --method topk(smallest=1000)", 2, base))
    step = "checkpoints/step-000004"

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:100])

    harms: dict[str, Callable[[Path], object]] = {
        "rank 1's file cut": lambda out: cut(out / step / "rank-0001.safetensors"),
        "model file empty": lambda out: (out / step / "model.safetensors").write_bytes(b""),
        "rank 0's file missing": lambda out: (out / step / "rank-0000.safetensors").unlink(),
        "meta.json is a list": lambda out: (out / step / "meta.json").write_text("[]"),
        "meta.json no UTF-8": lambda out: (out / step / "meta.json").write_bytes(b"\xff\xfe{"),
        "config no UTF-8": lambda out: (out / "bad.yaml").write_bytes(b"method: \xff\xfe"),
    }
    bad = []
    for what, harm in harms.items():
        out = box / "harmed"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(base, out)
        harm(out)
        more = f"--config {out}/bad.yaml" if "config" in what else f"--resume {out}/{step}"
        got = refused(train(f"--steps 8 --method topk(smallest=1000) {more}", 2, out))
        if not got.survived:
            bad.append(f"{what}: {got.text}")
    return Got(not bad, " | ".join(bad) or f"{len(harms)} of {len(harms)} refused in one line on every rank")


@row("17", "disk full; read-only folder; --out is a file", "one line; older checkpoints stay whole")
def disk(box: Path) -> Got:
    small = box / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", small], check=True)
    try:
        full = train("--steps 40 --checkpoint-every 4 --keep 9", 2, small / "run", logs=box / "full")
        ends, _ = ended(full, 60)
        kept = latest(small / "run")
        good = all(end[0] == 2 for end in ends.values()) and not full.tracebacks and kept is not None
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        read_only = refused(train("--steps 4", 2, small / "other", logs=box / "ro"))
    finally:
        subprocess.run(["umount", small], check=True)
    (box / "file").write_text("x")
    file = refused(train("--steps 4", 2, box / "file"))
    return Got(good and read_only.survived and file.survived,
               f"{full.last()}; latest {kept}; {read_only.text}; {file.text}")  # fmt: skip


@row("19", "SIGTERM", "the last state is saved, and the run ends")
def sigterm(box: Path) -> Got:
    job = train("--steps 1000000", 2, box / "run")
    if not job.reach(5):
        return Got(False, f"did not start: {job.last()}")
    job.strike(signal.SIGTERM)
    ends, seconds = ended(job, 30)
    kept, steps = latest(box / "run"), job.steps()
    good = kept == f"step-{steps[-1]:06d}" and all(end[0] not in (0, 99) for end in ends.values())
    return Got(good, f"latest is {kept}, exit {[end[0] for end in ends.values()]}: {job.last()}", seconds)


@row("20", "two jobs with one --out", "the second is refused")
def two_jobs(box: Path) -> Got:
    first = train("--steps 1000000", 2, box / "run")
    first.reach(3)
    second = forked.train(["--steps", "10", "--resume", "auto", "--out", str(box / "run")], 2, box / "second")
    got = refused(second)
    alive = not first.wait(0)
    first.end()
    return Got(got.survived and alive, got.text)


@row("22", "metrics.jsonl on resume", "one row per step")
def metrics(box: Path) -> Got:
    out = box / "run"
    job = train("--steps 1000000 --checkpoint-every 10", 2, out)
    job.reach(27)
    job.strike(signal.SIGKILL)
    job.end()
    done(train("--steps 40 --checkpoint-every 10 --resume auto", 2, out))
    return Got(forked.steps_of(out) == list(range(1, 41)), f"{len(forked.steps_of(out))} rows for 40 steps")


@row("23", "kill -9 of all ranks at random moments of saving and removing, 8 times", "`latest` is whole, and so is all")
def killed_while_saving(box: Path) -> Got:
    out, broken, random = box / "run", [], torch.Generator().manual_seed(11)
    for turn in range(8):
        before = len(forked.steps_of(out))
        job = train("--steps 1000000 --checkpoint-every 1 --keep 2 --resume auto --method topk(smallest=1000)", 2, out)
        while job.steps()[-1:] == [] or job.steps()[-1] < before + 3:
            if job.wait(0):
                return Got(False, f"turn {turn}: {job.last()}")
            time.sleep(0.02)
        time.sleep(float(torch.rand((), generator=random)) * 0.5)
        job.strike(signal.SIGKILL)
        job.end()
        for folder in (out / "checkpoints").glob("step-*"):
            try:
                json.loads((folder / "meta.json").read_text())
                [load_file(file) for file in folder.glob("*.safetensors")]
            except Exception as error:
                broken.append(f"{folder.name}: {error}")
        if latest(out) is None:
            broken.append(f"turn {turn}: latest is not whole")
    return Got(not broken, " | ".join(broken) or "8 of 8 went on")


# --- the network and the other ranks ----------------------------------------------------------------------------------


@row("2", f"link cut, --timeout {TIMEOUT}: DDP, FSDP2, HSDP", "all end within the timeout + 10 s and say who and what")
def link_cut(box: Path) -> Got:
    texts, good, worst = [], True, 0.0
    for engine in ("ddp", "fsdp2", "hsdp"):
        with Cluster(2, 1, "200mbit") as cluster:
            method = "int8(smallest=1000)"
            job = train(f"--steps 1000000 --engine {engine} --method {method}", 2, box / engine, cluster=cluster)
            if not job.reach(5):
                return Got(False, f"{engine} did not start: {job.last()}")
            cluster.popen(1, ["ip", "link", "set", "eth0", "down"]).wait()
            job.since = time.monotonic()
            ends, seconds = ended(job, TIMEOUT + 20)
            good = good and seconds < TIMEOUT + 10 and all(end[0] == 2 for end in ends.values())
            worst = max(worst, seconds)
            texts.append(f"{engine} {seconds:.0f} s: {job.last()}")
    return Got(good, " | ".join(texts), worst)


@row("2b", f"one rank is stopped (SIGSTOP), --timeout {TIMEOUT}: DDP, FSDP2, HSDP", "the others end in time and say so")
def stopped(box: Path) -> Got:
    texts, good, worst = [], True, 0.0
    for engine in ("ddp", "fsdp2", "hsdp"):
        job = train(f"--steps 1000000 --engine {engine} --method int8(smallest=1000) "
                    f"{'--shard-size 1' if engine == 'hsdp' else ''}", 2, box / engine)  # fmt: skip
        if not job.reach(5):
            return Got(False, f"{engine} did not start: {job.last()}")
        job.strike(signal.SIGSTOP, 1)
        _, seconds = ended(job, TIMEOUT + 20, 0)
        good = good and seconds < TIMEOUT + 10
        worst = max(worst, seconds)
        texts.append(f"{engine} {seconds:.0f} s: {job.last(0)}")
    return Got(good, " | ".join(texts), worst)


@row("2c", "link down for 3 s; 4 flaps of 1 s; a queue so short that packets are lost", "goes on")
def flaps(box: Path) -> Got:
    with Cluster(2, 1, "200mbit") as cluster:

        def eth(state: str, seconds: float) -> None:
            cluster.popen(1, ["ip", "link", "set", "eth0", state]).wait()
            time.sleep(seconds)

        job = forked.train(["--steps", "1000000", "--timeout", "60"], 2, box / "run", cluster=cluster)
        job.reach(5)
        eth("down", 3)
        eth("up", 1)
        for _ in range(4):
            eth("down", 1)
            eth("up", 1)
        short = "tc qdisc replace dev eth0 root tbf rate 30mbit burst 4kb limit 7kb"  # netem is not in every kernel
        cluster.popen(1, short.split()).wait()
        there = job.steps()[-1]
        good = job.reach(there + 20, 60)
        show = ["tc", "-s", "-j", "qdisc", "show", "dev", "eth0"]
        queue = json.loads(cluster.popen(1, show, stdout=subprocess.PIPE).communicate()[0])[0]
        lost = queue["drops"] / (queue["drops"] + queue["packets"])
        job.end()
    text = f"step {there} -> {job.steps()[-1]} with {lost:.1%} of packets lost"
    return Got(good and lost > 0.01, text if good else job.last())


@row("3", "one rank's user code raises; or leaves out step()", "all end, naming the rank and the step")
def user_code(box: Path) -> Got:
    def raises(rank: int, step: int, micro: int) -> None:
        if (rank, step) == (1, 7):
            (box / "raised").touch()
            raise ValueError("a fault of the user's own code")

    job = train("--steps 1000000 --method int8(smallest=1000)", 2, box / "raises", fault=raises)
    job.struck(box / "raised")
    _, first = ended(job, TIMEOUT + 20)
    skips = forked.start(lambda rank: leaves_out_a_step(rank, box / "left out"), 2, box / "skips")
    skips.struck(box / "left out")
    _, second = ended(skips, TIMEOUT + 20)
    text = f"{job.last(0)} | {skips.last()}"
    good = max(first, second) < TIMEOUT + 10 and "Unable to cast" not in text and "step 6" in skips.last()
    return Got(good, text, max(first, second))


def small_run(method: str = "dense", world: int = 2, **how: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model of two layers under DDP, in a group with our timeout; ``compress()``ed."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, thinwire.compress(model, optimizer, method, **how)


def take(model: Any, optimizer: Any, steps: Iterable[int], scale: float = 1.0) -> None:
    for step in steps:
        torch.manual_seed(100 * step + dist.get_rank())
        (model(torch.randn(16, 64)).square().mean() * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def leaves_out_a_step(rank: int, struck: Path) -> int:
    model, optimizer, _ = small_run("topk(smallest=0)")
    take(model, optimizer, range(3))
    for step in range(3, 20):
        model(torch.randn(16, 64)).square().mean().backward()
        if (rank, step) == (1, 5):
            struck.touch()
        else:
            optimizer.step()
        optimizer.zero_grad()
    return 0


@row("4", "torchrun --max-restarts 2, kill -9 of one rank", "goes on from the last checkpoint, exactly")
def elastic(box: Path) -> Got:
    words = "--steps 60 --checkpoint-every 10 --method topk(smallest=1000) --timeout 30"
    if not done(train(words, 2, box / "straight")):
        return Got(False, "the undisturbed run failed")
    out = box / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2",
        "-m", "thinwire", "train", *forked.SMALL, "--corpus", str(box / "text.txt"), "--out", str(out),
        *words.split(), "--resume", "auto",
    ]  # fmt: skip
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with log_of(out, 0).open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        began = time.monotonic()
        while len(forked.steps_of(out)) < 25 and process.poll() is None and time.monotonic() - began < 120:
            time.sleep(0.02)
        os.kill(_ranks_of(process.pid)[1], signal.SIGKILL)
        began = time.monotonic()
        status = process.wait(180)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    equal = same(tensors_of(box / "straight", 60), tensors_of(out, 60))
    text = f"exit {status}, bit-equal to the undisturbed run: {equal}"
    return Got(status == 0 and equal and forked.steps_of(out) == list(range(1, 61)), text, time.monotonic() - began)


def _ranks_of(parent: int) -> dict[int, int]:
    """RANK -> process, of the children of ``parent``."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                variables = (entry / "environ").read_bytes().split(b"\0")
                found |= {int(v[5:]): int(entry.name) for v in variables if v.startswith(b"RANK=")}
        except (OSError, IndexError):
            continue
    return found


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8 / sign": ({"method": "int8"}, {"method": "sign"}),
    "seed": ({"method": "separate", "seed": 0}, {"method": "separate", "seed": 1}),
    "group": ({"method": "int8(group=64)"}, {"method": "int8"}),
    "theta": ({"method": "tagc(theta=0.9)"}, {"method": "tagc(theta=0.8)"}),
    "dense=": ({"method": "int8(dense='0.weight')"}, {"method": "int8"}),
    "dense / bf16": ({"method": "dense"}, {"method": "bf16"}),
    "guard": ({"guard": True}, {"guard": False}),
}


@row("5", "ranks disagree on method, settings, seed, lr, guard", "refused in compress(): which rank, what differs")
def disagree(box: Path) -> Got:
    def body(rank: int) -> int:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        for what, cases in MISMATCHES.items():
            try:
                small_run(**cases[rank])
                print(f"{what}: NOT REFUSED")
            except ThinwireError as error:
                print(f"{what}: {error}")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 4))
        try:
            thinwire.compress(model, torch.optim.AdamW(model.parameters(), lr=1e-3 * (1 + rank)), "bf16")
            print("lr: NOT REFUSED")
        except ThinwireError as error:
            print(f"lr: {error}")
        return 0

    job = forked.start(body, 2, box / "run")
    ends, seconds = ended(job, 60)
    lines = job.lines(0)
    good = len(lines) == len(MISMATCHES) + 1 and all("rank" in line and "NOT" not in line for line in lines)
    return Got(good and all(end[0] == 0 for end in ends.values()), " | ".join(lines), seconds)


@row("21", "kill -9 of one rank of three", "the others end at once, and name the rank")
def killed(box: Path) -> Got:
    job = train("--steps 1000000 --method int8(smallest=1000)", 3, box / "run")
    job.reach(5)
    job.strike(signal.SIGKILL, 1)
    _, seconds = ended(job, TIMEOUT + 20)
    text = job.last(0, 2)
    good = "Unable to cast" not in text and "rank 1" in text and "step" in text and seconds < TIMEOUT + 10
    return Got(good, text, seconds)


# --- numbers ----------------------------------------------------------------------------------------------------------


@row("7", "a spoilt batch (loss x 1e4 once, clip 1): dense, topk, tagc, scape", "no method loses more than 5%")
def spoilt_batch(box: Path) -> Got:
    import spoilt

    texts, good = [], True
    for method in ("dense", "topk(", "tagc(", "scape(smallest=1000, density=0.01"):
        name = next(name for name in spoilt.METHODS if name.startswith(method))
        plain, after, _, _ = spoilt.cost(name, 10.0)
        good = good and after < 1.05 * plain
        texts.append(f"{method.partition('(')[0]} {plain:.2f} / {after:.2f}")
    return Got(good, "loss 70 steps later without / with it: " + ", ".join(texts))


@row("8", "a run that diverges (--lr 1e30)", "ends with a message; the checkpoints from before it are kept")
def diverges(box: Path) -> Got:
    out = box / "run"
    job = train("--steps 300 --lr 1e30 --clip 0 --checkpoint-every 5 --warmup 0.2", 2, out)
    ends, seconds = ended(job, 120)
    good = all(end[0] == 2 for end in ends.values()) and len(job.steps()) < 300
    return Got(good, f"after {len(job.steps())} steps, latest {latest(out)}: {job.last()}", seconds)


@row("9", "a finite gradient that overflows on the way; NaN in a loaded residual", "a skipped step; refused by name")
def overflows(box: Path) -> Got:
    def body(rank: int) -> int:
        for method in ("bf16", "int8(smallest=0)", "topk(smallest=0)", "sdp4bit(smallest=0)", "separate(smallest=0)"):
            model, optimizer, wire = small_run(method)
            take(model, optimizer, range(2))
            take(model, optimizer, [2], scale=1e38)
            take(model, optimizer, range(3, 6))
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            print(f"{method}: skipped {wire.skipped}, finite {finite}")
        state = wire.state_dict()
        name = next(name for name, value in state.items() if value.is_floating_point())
        state[name].view(-1)[0] = float("nan")
        try:
            wire.load_state_dict(state)
            print("a NaN was loaded")
        except ThinwireError as error:
            print(error)
        return 0

    job = forked.start(body, 2, box / "run")
    ended(job, 60)
    lines = job.lines(0)
    good = len(lines) == 6 and all("skipped 1, finite True" in line for line in lines[:5]) and "finite" in lines[5]
    return Got(good, " | ".join(lines))


# --- the library's own state ------------------------------------------------------------------------------------------


def attempt(what: str, load: Callable[[], object]) -> None:
    """Prints how loading went."""
    try:
        load()
        print(f"{what}: LOADED")
    except ThinwireError as error:
        print(f"{what}: {error}")


@row("10", "state of 4 ranks loaded on 2; of another rank", "refused by name unless resize= says how")
def resized(box: Path) -> Got:
    def saves(rank: int) -> int:
        model, optimizer, wire = small_run("topk(smallest=0)")
        take(model, optimizer, range(4))
        save_file({k: v.contiguous() for k, v in wire.state_dict().items()}, box / f"{rank}.safetensors")
        return 0

    def loads(rank: int) -> int:
        _, _, wire = small_run("topk(smallest=0)")
        attempt("two ranks", lambda: wire.load_state_dict(load_file(box / f"{rank}.safetensors")))
        return 0

    def other(rank: int) -> int:
        _, _, wire = small_run("topk(smallest=0)")
        attempt("another rank's", lambda: wire.load_state_dict(load_file(box / f"{(rank + 1) % 4}.safetensors")))
        return 0

    good, lines = done(forked.start(saves, 4, box / "saves")), []
    for function, world in ((loads, 2), (other, 4)):
        job = forked.start(function, world, box / function.__name__)
        good = done(job) and good
        lines.append(job.last())
    return Got(good and not any("LOADED" in line for line in lines), " | ".join(lines))


@row("11", "`dcp.save({'wire': wire})`, loaded into a fresh wire", "every rank has all of its own back, bit for bit")
def through_dcp(box: Path) -> Got:
    def body(rank: int) -> int:
        model, optimizer, wire = small_run("topk(smallest=0)")
        take(model, optimizer, range(4))
        before = {name: value.clone() for name, value in wire.state_dict().items()}
        dcp.save({"wire": wire}, checkpoint_id=str(box / "dcp"))
        wire.close()
        _, _, fresh = small_run("topk(smallest=0)")
        dcp.load({"wire": fresh}, checkpoint_id=str(box / "dcp"))
        after = fresh.state_dict()
        print(f"rank {rank}: {'equal' if same(before, after) else 'DIFFERS'}")
        return 0

    job = forked.start(body, 3, box / "run")
    good = done(job)
    return Got(good and "DIFFERS" not in job.last() and job.last().count("equal") == 3, job.last())


@row("12", "state of another method, of other names, without residuals; {}", "each refused by name")
def foreign_state(box: Path) -> Got:
    def body(rank: int) -> int:
        model, optimizer, wire = small_run("topk(smallest=0)")
        take(model, optimizer, range(4))
        state = wire.state_dict()
        attempt("nothing", lambda: wire.load_state_dict({}))
        attempt("names", lambda: wire.load_state_dict({k.replace("0.weight", "9.weight"): v for k, v in state.items()}))
        bare = {k: v for k, v in state.items() if "residual" not in k}
        attempt("no residual", lambda: wire.load_state_dict(bare))
        wire.close()
        _, _, tagc = small_run("tagc(smallest=0)")
        attempt("another method's", lambda: tagc.load_state_dict(state))
        return 0

    job = forked.start(body, 2, box / "run")
    good = done(job)
    return Got(good and len(job.lines(0)) == 4 and "LOADED" not in " ".join(job.lines(0)), " | ".join(job.lines(0)))


@row("18", "GradScaler overflow, without accumulate()", "one step is lost, with the same result")
def scaler(box: Path) -> Got:
    def body(rank: int) -> int:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scale = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
        wire = thinwire.compress(model, optimizer, "topk(smallest=0)", scaler=scale)
        for step in range(6):
            torch.manual_seed(100 * step + rank)
            scale.scale(model(torch.randn(16, 64)).square().mean() * (1e3 if step == 0 else 1.0)).backward()
            scale.step(optimizer)
            scale.update(8.0 if step == 0 else None)
            optimizer.zero_grad()
        print(f"skipped {wire.skipped} of {wire.step}")
        return 0

    job = forked.start(body, 2, box / "run")
    good = done(job)
    return Got(good and job.last() == "skipped 1 of 6", job.last())


@row("24", "masks as positions, odd k, resumed", "the saved state is that of the run that was not stopped")
def odd_masks(box: Path) -> Got:
    words = "--steps 8 --checkpoint-every 4 --keep 9 --optimizer adams --resume auto"
    words += " --method scape(smallest=1000,density=0.021,warmup=3)"

    def dies(rank: int, step: int, micro: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGKILL)

    good = done(train(words, 2, box / "a"))
    ended(train(words, 2, box / "b", fault=dies), 60)
    good = done(train(words, 2, box / "b")) and good
    equal = same(tensors_of(box / "a", 8), tensors_of(box / "b", 8))
    return Got(good and equal, f"equal: {equal}")


@row("25", "lr: .nan, betas: [2, 3], timeout: 0, scape(warmup='x'), dense=5, ...", "each refused in one line")
def senseless(box: Path) -> Got:
    from thinwire.train.config import from_yaml

    bad = []
    texts = (
        "lr: .nan", "lr: .inf", "clip: .nan", "betas: [2, 3]", "betas: [.nan, 0.9]", "timeout: 0", "timeout: 1e300",
        "seed: 1e300", "steps: 1e400", "method: scape(warmup='x')", "method: int8(dense=5)", "a: &a [*a]",
        "method: !!python/object/apply:os.system ['true']", "method: {a: 1}",
    )  # fmt: skip
    for text in texts:
        path = box / "config.yaml"
        path.write_text(text)
        try:
            from_yaml(path).check()
            bad.append(f"{text}: accepted")
        except ThinwireError as error:
            if "\n" in str(error):
                bad.append(f"{text}: several lines")
        except Exception as error:
            bad.append(f"{text}: {type(error).__name__}")
    return Got(not bad, " | ".join(bad) or f"{len(texts)} of {len(texts)} refused")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help="numbers of rows; all if none is named")
    parser.add_argument("--markdown", action="store_true", help="print a table for the docs")
    chosen = parser.parse_args()
    unknown = set(chosen.rows) - {of.number for of in ROWS}
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))}; there are: {', '.join(of.number for of in ROWS)}")
    lost = 0
    if chosen.markdown:
        print("| # | fault | expected | result | what was seen | seconds |\n|---|---|---|---|---|---|")
    for of in sorted(ROWS, key=lambda of: (int("".join(c for c in of.number if c.isdigit())), of.number)):
        if chosen.rows and of.number not in chosen.rows:
            continue
        with tempfile.TemporaryDirectory(prefix="thinwire-faults-") as box:
            try:
                got = of.run(Path(box))
            except Exception as error:
                got = Got(False, f"{type(error).__name__}: {error}")
            text = " ".join(got.text.replace(box, "BOX").split())
        lost += not got.survived
        word, seconds = "survived" if got.survived else "**lost**", "" if got.seconds is None else f"{got.seconds:.0f}"
        if chosen.markdown:
            shown = text.replace("|", "/").replace("<", "&lt;")
            print(f"| {of.number} | {of.fault} | {of.expected} | {word} | {shown[:400]} | {seconds} |", flush=True)
        else:
            print(f"{of.number:>4} {word:<9} {seconds:>4}  {of.fault}\n     {text[:600]}", flush=True)
    return lost


if __name__ == "__main__":
    sys.exit(main())
