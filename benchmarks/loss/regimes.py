"""Methods against dense in four regimes: from scratch, four times longer, going on from a checkpoint, fine-tuning.

    python benchmarks/loss/regimes.py --corpora DIR --regime scratch --model small --text peps \\
        --methods "dense" "topk(density=0.01)" --lrs 2e-3 4e-3 --seeds 0 1 2 --jobs 2
    python benchmarks/loss/regimes.py --corpora DIR --check "dense" "topk(density=0.01)"
    python benchmarks/loss/regimes.py --table

Each run is one line of docs/data/regimes.jsonl. A run that is there is not repeated, so the list can be made in pieces,
by several processes at once. One process plays all N ranks, with the real methods (``virtual.py``); --check holds it
against ``thinwire train`` on N processes, bit for bit.

    scratch    800 steps
    long       3200 steps
    going-on   300 steps from the end of a dense run (--base), with its moments
    finetune   300 steps from there with fresh moments, on another text
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import virtual
from regime_tables import markdown, read, rows
from thinwire.base.knobs import knobs_of
from thinwire.base.processes import die_with_parent
from thinwire.methods import resolve
from thinwire.train.config import Config, from_arguments
from thinwire.train.data.corpus import read_corpus
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.data.windows import Windows, batches

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "docs" / "data" / "regimes.jsonl"
STEPS = {"scratch": 800, "long": 3200, "going-on": 300, "finetune": 300}
SEQUENCES = 16
"""Of a step, over all ranks."""
EVALUATED = 256
"""Held-out sequences at the end; along the way, a quarter of them."""
SMALLEST = 1024
"""Elements below which a tensor stays dense: all matrices of these models are compressed."""
MODELS = {
    "tiny": "--preset tiny --layers 2 --width 64 --heads 2 --seq-len 64",  # 120k parameters
    "small": "--preset small --seq-len 128",  # 842k
    "llama-tiny": "--preset llama-tiny --layers 2 --width 64 --heads 2 --kv-heads 1 --hidden 172 --seq-len 64",
    "llama-small": "--preset llama-small --seq-len 128",
}
TEXTS = {
    "peps": ("peps-train.txt.xz", "peps-valid.txt.xz"),
    "wikitext": ("wikitext2-test.txt.xz", "wikitext2-valid.txt.xz"),
    "code": ("code-train.txt.xz", "code-valid.txt.xz"),  # code_text.py writes them
}
OPTIMIZERS = {"AdamW": "adamw", "AdamS": "adams", "SGD": "sgd"}


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        method: as ``thinwire train`` takes it; options of ``thinwire train`` may follow: "dense --optimizer adams".
        base: of the dense run whose end this one begins with, as text: "peps long lr=0.004".
    """

    regime: str
    text: str
    model: str
    ranks: int
    method: str
    lr: float
    seed: int
    steps: int
    base: str = ""

    def config(self) -> Config:
        spec, *options = self.method.split(" --")
        spec = with_smallest(spec)
        words = [word for option in options for word in f"--{option}".split()]
        if "--optimizer" not in words:
            words += ["--optimizer", OPTIMIZERS[resolve(spec).OPTIMIZER.__name__]]
        return from_arguments([
            *MODELS[self.model].split(), "--method", spec, "--ranks", str(self.ranks), "--batch-size",
            str(SEQUENCES // self.ranks), "--lr", str(self.lr), "--seed", str(self.seed), "--steps", str(self.steps),
            "--ranks-per-node", "1", *words,
        ])  # fmt: skip

    def before(self) -> Job | None:
        """The dense run that this one begins with."""
        if not self.base:
            return None
        text, regime, lr = self.base.split()
        optimizer = self.config().optimizer
        method = "dense" if optimizer == "adamw" else f"dense --optimizer {optimizer}"
        rate = float(lr.removeprefix("lr="))
        return Job(regime, text, self.model, self.ranks, method, rate, self.seed, STEPS[regime])

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def name(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


def with_smallest(spec: str) -> str:
    """``spec`` with ``SMALLEST``, if the method has that knob and the spec does not set it."""
    method = resolve(spec)
    if "smallest" in spec or ":" in spec or "smallest" not in [knob.name for knob in knobs_of(method)]:
        return spec
    spec = spec.strip()
    return f"{spec[:-1]}, smallest={SMALLEST})" if spec.endswith(")") else f"{spec}(smallest={SMALLEST})"


def append(file: Path, row: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(json.dumps(row) + "\n")


@contextmanager
def claimed(path: Path, *, wait: bool) -> Iterator[bool]:
    """Is this process the only one inside for ``path``? ``wait`` until it is. A process that dies lets go."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


_TOKENS: dict[str, torch.Tensor] = {}


def windows_of(corpora: Path, name: str, length: int, seed: int = 0) -> Windows:
    """Of the text in the file ``name``, byte by byte, read once per process."""
    if name not in _TOKENS:
        text = read_corpus([str(corpora / name)])
        _TOKENS[name] = Tokenizer("bytes", text).encode(text)
    return Windows(_TOKENS[name], length, seed)


@dataclass(frozen=True)
class Place:
    """Where everything is: the texts, the results, what need not be kept. How gradients are taken; what is repeated."""

    corpora: Path
    data: Path
    out: Path
    batched: bool = True
    again: bool = False


def run(job: Job, place: Place) -> dict[str, Any] | None:
    """Train, and add the row to the results; None if it is there already, or if another process is about to."""
    torch.set_num_threads(1)
    with claimed(place.out / "locks" / job.name, wait=False) as mine:
        known = read(place.data).get(job.key)
        if not mine or (known is not None and not (place.again and known["error"])):
            return None
        return _run(job, place)


def _run(job: Job, place: Place) -> dict[str, Any]:
    began, processor = time.perf_counter(), time.process_time()
    row: dict[str, Any] = {**asdict(job), "valid": None, "error": None}
    try:
        row |= _train(job, place)
    except Exception as error:  # a crash is a result, too
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    row |= {
        "seconds": round(time.perf_counter() - began, 1), "cpu_seconds": round(time.process_time() - processor, 1),
        "batched": place.batched, "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip
    append(place.data, row)
    return row


def _train(job: Job, place: Place) -> dict[str, Any]:
    config, before = job.config(), job.before()
    start = None if before is None else checkpoint(before, place)
    if job.regime == "finetune" and start is not None:
        start = {key: values for key, values in start.items() if key.startswith("model/")}
    train, valid = (windows_of(place.corpora, name, config.sequence_length, config.seed) for name in TEXTS[job.text])
    found = virtual.train(config, train, valid, batched=place.batched, start=start, sequences=EVALUATED // 4)
    first = found.ranks[0]
    loss = virtual.evaluate(first.replica.model, batches(valid.spread(EVALUATED), 16))
    if config.method == "dense":
        save_file(first.replica.state(), _ready(_checkpoint(job, place)))
    compressed = sum(of.numel for name, of in first.parameters.items() if name not in first.stage.dense)
    share = compressed / sum(of.numel for of in first.parameters.values())
    return {
        "valid": _number(loss),
        "train": _number(sum(found.losses[-50:]) / len(found.losses[-50:])),
        "curve": [[step, _number(value)] for step, value in found.curve],
        "diverged": found.diverged or not math.isfinite(loss),
        "skipped": found.skipped,
        "cut": 0 if first.bound is None else first.bound.facts()["cut"],
        "optimizer": config.optimizer,
        "parameters": sum(of.numel for of in first.parameters.values()),
        "compressed": compressed,
        "bytes": round(first.sent),
        "bytes_compressed": round(first.sent - first.side),
        "dense_bytes": round(first.dense),
        "dense_bytes_compressed": round(first.dense * share),
        "facts": {name: _number(value) for name, value in first.method.facts().items()},
    }


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return round(float(value), 6) if math.isfinite(value) else None


def _ready(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _checkpoint(job: Job, place: Place) -> Path:
    return place.out / "checkpoints" / f"{job.name}.safetensors"


def checkpoint(job: Job, place: Place) -> dict[str, torch.Tensor]:
    """Weights and moments at the end of the dense run ``job``, which is made if it is not there."""
    path = _checkpoint(job, place)
    with claimed(place.out / "locks" / job.name, wait=True):
        if not path.exists():
            known = job.key in read(place.data)
            made = _train(job, place) if known else _run(job, place)
            if made.get("error") or made["valid"] is None:
                raise RuntimeError(f"the dense run to begin with gave no weights: {job.key}")
    return load_file(path)


@functools.cache
def commit() -> str:
    """Of the repository, with a + behind it where files have changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git on this machine
        return ""


def check(method: str, args: argparse.Namespace, place: Place, steps: int = 20) -> str:
    """A short run here, and on processes: "equal", or what differs first."""
    job = Job("check", args.text, args.model, args.ranks, method, args.lrs[0], args.seeds[0], steps)
    config = job.config()
    train = windows_of(place.corpora, TEXTS[args.text][0], config.sequence_length, config.seed)
    found = virtual.train(config, train)
    out = place.out / "check" / job.name
    return differs(found, on_processes(config, str(place.corpora / TEXTS[args.text][0]), out))


SHAPE = (
    "preset", "layers", "width", "heads", "kv_heads", "hidden", "method", "ranks", "batch_size", "optimizer", "lr",
    "weight_decay", "clip", "warmup", "lr_end", "seed", "steps",
)  # fmt: skip
"""Settings that a run on processes takes over from one here."""


def on_processes(config: Config, text: str, out: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What :func:`finished` reads, of ``thinwire train`` with ``config`` on gloo."""
    command = [sys.executable, "-m", "thinwire", "train", *arguments(config, text, out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return finished(out, config.steps)


def arguments(config: Config, text: str, out: Path) -> list[str]:
    """Of ``thinwire train``, for the run that ``config`` is here, which trains on all of ``text``."""
    valid = out.with_name(f"{out.name}-valid.txt")  # else a part of the text were held out; nobody reads its loss
    valid.parent.mkdir(parents=True, exist_ok=True)
    valid.write_text("held out " * 1000)
    given = {name: getattr(config, name) for name in SHAPE if getattr(config, name) is not None} | {
        "seq_len": config.sequence_length, "ranks_per_node": 1, "eval_sequences": 0, "checkpoint_every": config.steps,
        "corpus": text, "valid": valid, "device": "cpu", "out": out,
    }  # fmt: skip
    words = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return ["--betas", *map(str, config.betas), *words]


def finished(out: Path, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses by step, and weights and moments at the end, of the ``thinwire train`` in ``out``."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in lines if "loss" in row][-steps:]
    saved = load_file(out / "checkpoints" / f"step-{steps:06d}" / "model.safetensors")
    ours = {}
    for key, values in saved.items():
        kind, _, name = key.partition("/")
        if kind == "optimizer":
            name, _, kind = name.rpartition("/")
        ours[f"{kind}/{name}"] = values
    return losses, ours


def differs(found: virtual.Trained, real: tuple[list[float], dict[str, torch.Tensor]]) -> str:
    """Losses, weights and moments: "equal" if they are, bit for bit; else what differs first."""
    losses, state = real
    for step, (mine, theirs) in enumerate(zip(found.losses, losses, strict=True), 1):
        if mine != theirs:
            return f"the loss of step {step} differs: {mine} here, {theirs} on processes"
    ours = found.ranks[0].replica.state()
    # A checkpoint holds moments of what the method steps, too, handed over for whoever goes on without it.
    moved = {key.partition("/")[2] for key in state if key.startswith("exp_avg/") and key not in ours}
    state = {key: of for key, of in state.items() if key.startswith("model/") or key.partition("/")[2] not in moved}
    if sorted(ours) != sorted(state):
        return f"not the same state: {sorted(set(ours) ^ set(state))}"
    for key, values in state.items():
        if not torch.equal(ours[key], values):
            return f"{key} differs"
    return "equal"


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that what is there can be read early."""
    based = args.regime in ("going-on", "finetune")
    base = f"{args.base_text} {args.base} lr={args.base_lr:g}" if based else ""
    steps = args.steps or STEPS[args.regime]
    return [
        Job(args.regime, args.text, args.model, args.ranks, method, lr, seed, steps, base)
        for seed in args.seeds
        for method in args.methods
        for lr in args.lrs
    ]


def line(job: Job, row: dict[str, Any] | None) -> str:
    what = f"{job.regime} {job.text} {job.model} N={job.ranks} {job.method} lr={job.lr:g} seed={job.seed}"
    if row is None:
        return f"{what}: there already, or under way elsewhere"
    if row["error"]:
        return f"{what}: {row['error']}"
    share = row["bytes"] / row["dense_bytes"] if row["dense_bytes"] else math.nan
    return f"{what}: {row['valid']} at {share:.2%} of the bytes, {row['cpu_seconds'] / job.steps * 1e3:.0f} ms per step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, help="the folder of the texts")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "regimes", help="checkpoints and locks")
    parser.add_argument("--regime", choices=STEPS, default="scratch")
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--text", choices=TEXTS, default="peps")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=["dense"])
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="instead of the regime's")
    parser.add_argument("--base", choices=("scratch", "long"), default="long", help="going-on, finetune: from which")
    parser.add_argument("--base-text", choices=TEXTS, default="peps")
    parser.add_argument("--base-lr", type=float, default=4e-3)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--sequential", action="store_true", help="gradients rank by rank: bit-equal to processes")
    parser.add_argument("--again", action="store_true", help="repeat runs that ended in an error")
    parser.add_argument("--table", action="store_true", help="print what is there, and train nothing")
    parser.add_argument("--check", nargs="+", metavar="METHOD", help="20 steps here and on processes")
    args = parser.parse_args()
    if args.table:
        print(markdown(rows(read(args.data).values())))
        return
    if args.corpora is None:
        parser.error("--corpora is needed to train")
    if SEQUENCES % args.ranks:
        parser.error(f"a step has {SEQUENCES} sequences, which {args.ranks} ranks cannot share evenly")
    place = Place(args.corpora.resolve(), args.data.resolve(), args.out.resolve(), not args.sequential, args.again)
    torch.set_num_threads(1)
    if args.check:
        for method in args.check:
            print(f"{method}: {check(method, args, place)}", flush=True)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    there = read(place.data)
    jobs = [job for job in jobs_of(args) if job.key not in there or (args.again and there[job.key]["error"])]
    print(f"{len(jobs)} runs to make", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, spawn, initializer=die_with_parent) as pool:
        for job, row in zip(jobs, pool.map(run, jobs, [place] * len(jobs)), strict=True):
            print(line(job, row), flush=True)


if __name__ == "__main__":
    main()
