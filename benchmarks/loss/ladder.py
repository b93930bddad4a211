"""Loss after several lengths of one run, to all held-out text: tuned baselines, methods, sizes and batches.

    python benchmarks/loss/ladder.py --corpora DIR --model 120k --text peps --lengths 800 2400 --seeds 0 1 2 \\
        --optimizer adamw --lrs 4e-3 5.7e-3 8e-3 --beta1s .8 .9 --clips .3 1 --warmups 40 160          dense, tuned
    python benchmarks/loss/ladder.py ... --optimizer muon --methods dense trickle:muon --lrs 8e-3 1.6e-2 --minutes 8
    python benchmarks/loss/ladder.py --table
    python benchmarks/loss/ladder.py --apart                                          how far seeds lie apart
    python benchmarks/loss/ladder.py --pairs trickle:muon "trickle(density=0.03)"     in runs that are alike in all else

The rate rises for --warmups steps and is then constant; for each of --lengths the run branches off, and the rate falls
in the last fifth of that length, on a line, to a tenth. So runs of 800, 2400 and 9600 steps cost 10,160 steps and not
12,800, and all have seen the same text in the same order. One process plays all ranks (``virtual.py``) on one thread.

Each run and length is a line of docs/data/ladder.jsonl, with the mean loss of each of 128 stretches of the held-out
text (2 million bytes of it at most): two runs are compared stretch by stretch. What is there is not run again; with
--minutes the program stops by then, keeps the played ranks under --out, and ends with status 75 while something is
left: the same command goes on, bit for bit.

--optimizer muon: ``torch.optim.Muon`` for the hidden matrices (scaled as AdamW's steps are), AdamW at --beside for the
rest.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ladder_tables
import regimes
import virtual
from thinwire.train.config import Config, from_arguments
from thinwire.train.data.windows import Windows
from thinwire.train.job import held_out

DATA = regimes.ROOT / "docs" / "data" / "ladder.jsonl"
MODELS = {
    "30k": "--preset tiny --layers 2 --width 32 --heads 2 --seq-len 64",
    "120k": regimes.MODELS["tiny"],
    "363k": "--preset tiny --layers 3 --width 96 --heads 3 --seq-len 64",
    "842k": regimes.MODELS["small"],
    "3.2M": "--preset small --layers 4 --width 256 --heads 8 --seq-len 128",
}
DECAY, LOWEST = 0.2, 0.1
"""Share of a length in which the rate falls, and the share of it that is left at the end."""
BETA2, WEIGHT_DECAY = 0.95, 0.1
clock = time.monotonic
CHUNK = 20
"""Steps between two looks at the clock."""
AGAIN = 75
"""Exit status while something is left to run."""


@dataclass(frozen=True)
class Job:
    """A run with all its lengths.

    Attributes:
        sequences: of a step, over all ranks. lr: of Muon's matrices or, with AdamW, of all. beside: AdamW's beside
            Muon; 0 with AdamW alone. warmup: steps.
    """

    model: str
    text: str
    ranks: int
    sequences: int
    method: str
    optimizer: str
    lr: float
    beside: float
    beta1: float
    clip: float
    warmup: int
    seed: int

    def config(self, steps: int) -> Config:
        return from_arguments([
            *MODELS[self.model].split(), "--method", regimes.with_smallest(self.method), "--ranks", str(self.ranks),
            "--batch-size", str(self.sequences // self.ranks), "--lr", str(self.beside or self.lr),
            "--seed", str(self.seed), "--steps", str(steps), "--ranks-per-node", "1", "--clip", str(self.clip),
            "--weight-decay", str(WEIGHT_DECAY), "--betas", str(self.beta1), str(BETA2),
            "--optimizer", self.optimizer, *(["--muon-lr", str(self.lr)] if self.optimizer == "muon" else []),
        ])  # fmt: skip

    def rate(self, length: int | None) -> Callable[[int], float]:
        """AdamW's rate by step, of the run that ends after ``length`` steps; None: of the trunk."""

        top = self.beside or self.lr

        def at(step: int) -> float:
            if step < self.warmup:
                return top * (step + 1) / self.warmup
            if length is None or step < (first := branch(length)):
                return top
            return top * (1 - (1 - LOWEST) * (step + 1 - first) / (length - first))

        return at

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def name(self) -> str:
        return hashlib.sha256(self.key.encode()).hexdigest()[:16]


def branch(length: int) -> int:
    """The step in which the rate of a run of ``length`` steps begins to fall."""
    return round((1 - DECAY) * length)


class OutOfTime(Exception):
    """The time of --minutes is over; what was done is saved."""


@dataclass(frozen=True)
class Place:
    """Where texts, results and played ranks are, until when to run (seconds of ``clock``), and on what."""

    corpora: Path
    data: Path
    out: Path
    until: float = math.inf
    device: torch.device = virtual.CPU


class Life:
    """A job under way."""

    def __init__(self, job: Job, longest: int, place: Place) -> None:
        self.job, self.place, config = job, place, job.config(longest)
        self.train, self.valid = (
            regimes.windows_of(place.corpora, name, config.sequence_length, config.seed)
            for name in regimes.TEXTS[job.text]
        )
        self.tokens_per_step = job.sequences * config.sequence_length
        self.played = virtual.Played(config, self.train, batched=True, device=place.device)

    def file(self, length: int | None) -> Path:
        """Of the played ranks of the trunk (None), or of the branch that ends after ``length`` steps."""
        return self.place.out / "played" / f"{self.job.name}-{'trunk' if length is None else length}.safetensors"

    def save(self, length: int | None) -> None:
        path = self.file(length)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({key: value.contiguous() for key, value in self.played.save().items()}, partial)
        partial.replace(path)

    def load(self, length: int | None) -> bool:
        if not self.file(length).exists():
            return False
        self.played.load(load_file(self.file(length), device=str(self.place.device)))
        return True

    def go(self, until: int, length: int | None) -> None:
        """Raise OutOfTime, with the ranks saved, if there is none left."""
        played, rate = self.played, self.job.rate(length)
        while played.turn < until and not played.found.diverged:
            if clock() > self.place.until:
                self.save(length)
                raise OutOfTime
            played.run(min(played.turn + CHUNK, until), rate)

    def end(self, length: int) -> dict[str, Any]:
        """Go to the end of ``length`` steps, and measure there."""
        if not self.load(length):
            self.load(None)
            self.go(branch(length), None)
            self.save(None)
        self.go(length, length)
        self.played.finish()
        return self.measure(length)

    def measure(self, length: int) -> dict[str, Any]:
        found, first = self.played.found, self.played.found.ranks[0]
        spans = stretches(first.replica.model, self.valid)
        compressed = sum(of.numel for name, of in first.parameters.items() if name not in first.stage.dense)
        parameters = sum(of.numel for of in first.parameters.values())
        loss = statistics.fmean(spans)
        return {
            "valid": regimes._number(loss),
            "spans": [regimes._number(value) for value in spans],
            "train": regimes._number(statistics.fmean(found.losses[-50:])),
            "diverged": found.diverged or not math.isfinite(loss),
            "skipped": found.skipped,
            "parameters": parameters,
            "compressed": compressed,
            "tokens_per_parameter": round(length * self.tokens_per_step / parameters, 2),
            "bytes": round(first.sent),
            "dense_bytes": round(first.dense),
        }


def stretches(model: nn.Module, valid: Windows) -> list[float]:
    """The mean loss of each of ``ladder_tables.STRETCHES`` stretches of the held-out text, of as many windows each."""
    number = min(valid.count, held_out.LONGEST // valid.length)
    each = max(number // ladder_tables.STRETCHES, 1)
    indices = valid.positions(each * min(ladder_tables.STRETCHES, number))
    device = next(model.parameters()).device
    losses = [row.loss for row in held_out.window_losses(model, valid, indices, 32, device)]
    return [statistics.fmean(losses[at : at + each]) for at in range(0, len(losses), each)]


def run(job: Job, lengths: Sequence[int], place: Place) -> list[dict[str, Any]]:
    """Make what is missing of ``lengths``, and add it to the results. Another process at the same job: nothing."""
    made: list[dict[str, Any]] = []
    with regimes.claimed(place.out / "locks" / job.name, wait=False) as mine:
        known = ladder_tables.read(place.data)
        missing = [length for length in sorted(lengths) if ladder_tables.key_of(asdict(job), length) not in known]
        if not mine or not missing:
            return made
        began, life = time.process_time(), Life(job, max(lengths), place)
        for length in missing:
            row: dict[str, Any] = {**asdict(job), "steps": length, "error": None, "valid": None}
            try:
                row |= life.end(length)
            except OutOfTime:
                raise
            except Exception as error:  # a crash is a result, too
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            row |= {
                "cpu_seconds": round(time.process_time() - began, 1), "torch": torch.__version__,
                "commit": regimes.commit(), **where(place.device),
            }  # fmt: skip
            regimes.append(place.data, row)
            made.append(row)
            life.file(length).unlink(missing_ok=True)
        life.file(None).unlink(missing_ok=True)
    return made


def where(device: torch.device) -> dict[str, str]:
    """What a row says of the device: nothing of a CPU."""
    return {"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def jobs_of(args: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that what is there can be read early."""
    settings = itertools.product(args.seeds, args.methods, args.beta1s, args.clips, args.warmups, args.lrs)
    beside = args.beside if args.optimizer == "muon" else 0.0
    return [
        Job(args.model, args.text, args.ranks, args.sequences, method, args.optimizer, lr, beside, beta1, clip,
            warmup, seed)
        for seed, method, beta1, clip, warmup, lr in settings
    ]  # fmt: skip


def line(row: dict[str, Any]) -> str:
    what = (
        f"{row['model']} {row['text']} N={row['ranks']} batch={row['sequences']} {row['method']} {row['optimizer']} "
        f"lr={row['lr']:g} beta1={row['beta1']:g} clip={row['clip']:g} warmup={row['warmup']} seed={row['seed']}, "
        f"{row['steps']} steps"
    )
    if row["error"]:
        return f"{what}: {row['error']}"
    share = row["bytes"] / row["dense_bytes"]
    return f"{what} ({row['tokens_per_parameter']:g} tokens per parameter): {row['valid']} at {share:.2%} of the bytes"


def print_pairs(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """How far the first of each ends above the second (± is of the text alone), and their mean."""
    spans = [ladder_tables.gap([run], [other]) for run, other in pairs]
    for (run, _), span in zip(pairs, spans, strict=True):
        print(f"{ladder_tables.written(span)}  {line(run)}")
    if means := [span.mean for span in spans]:
        print(f"{len(means)} pairs: {min(means):+.2%} to {max(means):+.2%}, {statistics.fmean(means):+.2%} in the mean")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, help="the folder of the texts")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=regimes.ROOT / "runs" / "ladder", help="played ranks and locks")
    parser.add_argument("--model", choices=MODELS, default="120k")
    parser.add_argument("--text", choices=regimes.TEXTS, default="peps")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=16, help="of a step, over all ranks")
    parser.add_argument("--methods", nargs="+", default=["dense"])
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--lrs", type=float, nargs="+", default=[4e-3])
    parser.add_argument("--beside", type=float, default=4e-3, help="AdamW's rate beside Muon")
    parser.add_argument("--beta1s", type=float, nargs="+", default=[0.9])
    parser.add_argument("--clips", type=float, nargs="+", default=[1.0])
    parser.add_argument("--warmups", type=int, nargs="+", default=[40], help="steps")
    parser.add_argument("--lengths", type=int, nargs="+", default=[800])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", type=torch.device, default=virtual.CPU, help="cpu, or cuda: a process per run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop by then")
    parser.add_argument("--table", action="store_true", help="print what is there, and train nothing")
    parser.add_argument("--apart", action="store_true", help="print how far seeds lie apart, and train nothing")
    parser.add_argument("--pairs", nargs=2, metavar="METHOD", help="print how far the first ends above the second")
    args = parser.parse_args()
    if args.corpora is None and not (args.table or args.apart or args.pairs):
        parser.error("--corpora is needed to train")
    if args.sequences % args.ranks:
        parser.error(f"a step has {args.sequences} sequences, which {args.ranks} ranks cannot share evenly")
    return args


def main() -> int:
    args = parse()
    if args.table or args.apart:
        said = ladder_tables.markdown if args.table else ladder_tables.seeds_apart
        print(said(ladder_tables.read(args.data).values()))
        return 0
    if args.pairs:
        print_pairs(ladder_tables.pairs(ladder_tables.read(args.data).values(), *args.pairs))
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    until = clock() + 60 * args.minutes
    place = Place(args.corpora.resolve(), args.data.resolve(), args.out.resolve(), until, args.device)
    for job in jobs_of(args):
        try:
            for row in run(job, args.lengths, place):
                print(line(row), flush=True)
        except OutOfTime:
            print(f"{args.minutes:g} minutes are over: the same command goes on", flush=True)
            return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
