"""What becomes of the loss when what waits is delivered at once, dropped, or spread over the ranks, in the middle of a
run and at its end?

    python benchmarks/loss/flush.py --corpora DIR                                         120k parameters, all methods
    python benchmarks/loss/flush.py --corpora DIR --model small --methods trickle         842k parameters

Two ranks of this machine, DDP, steps of 16 sequences, clip 1. At one point of the run model, optimizer and wire are
saved, and put back for each way to go on:

    nothing         the run goes on as it is
    flush           wire.flush(): weights move by all that waits
    next            wire.flush(with_next=True): the next step is dense and delivers all of it, as resize="flush" does
    redistribute    every rank goes on with the mean of what waits, as resize="redistribute" gives it to other ranks
    reset           wire.reset(): it is dropped

Held-out loss (256 sequences) at the point and some steps later; the standard error is that of the mean over sequences.
What came of it is in docs/state.md and docs/data/flush.txt.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import ranks
import regimes
import thinwire
from thinwire.train.model.decoder import Decoder

METHODS = ("trickle", "trickle:merged", "topk", "tagc", "powersgd")
WAYS = ("nothing", "flush", "next", "redistribute", "reset")
LATER = (0, 1, 5, 20, 50)
RANKS = 2


def rate_of(schedule: str, lr: float, step: int, steps: int) -> float:
    """Twenty steps of warm-up, then ``lr``, or half a cosine from there to 0."""
    warm = min((step + 1) / 20, 1.0)
    return lr * warm * (1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / steps)))


def mean_waits(wire: thinwire.Wire) -> dict[str, torch.Tensor]:
    """The wire's state, in which every rank has the mean of what waits on all."""
    state = {key: value.clone() for key, value in wire.state_dict().items()}
    for key, value in sorted(state.items()):
        if key.split("/")[1] in wire.method.card.promise.waits:
            dist.all_reduce(value)
            value.div_(dist.get_world_size())
    return state


class Life:
    """A run on this rank that can be put back to where it was."""

    def __init__(self, rank: int, job: regimes.Job, corpora: Path, schedule: str, method: str, steps: int) -> None:
        self.config, self.rank, self.schedule, self.steps = job.config(), rank, schedule, steps
        names, length = regimes.TEXTS[job.text], self.config.sequence_length
        self.text, held_out = (regimes.windows_of(corpora, name, length, self.config.seed) for name in names)
        self.held_out = held_out.spread(regimes.EVALUATED)
        torch.manual_seed(self.config.seed)
        self.model = DistributedDataParallel(Decoder(self.config.shape(256)))
        (self.optimizer,) = regimes.virtual.make_optimizers(self.model, self.config)
        self.wire = thinwire.compress(self.model, self.optimizer, method, steps=steps + max(LATER))

    def step(self, number: int) -> None:
        share = regimes.SEQUENCES // RANKS
        inputs, targets = self.text.batch(number * regimes.SEQUENCES + self.rank * share, share)
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.schedule, self.config.lr, number, self.steps)
        self.model(inputs, targets).backward()
        self.wire.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def loss(self) -> tuple[float, float]:
        """Held out: the mean over sequences, and its standard error."""
        each = [
            float(self.model.module(inputs[i : i + 1], targets[i : i + 1]))
            for inputs, targets in regimes.batches(self.held_out, 16)
            for i in range(len(inputs))
        ]
        return statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each))

    def go(self, way: str) -> None:
        if way == "flush":
            self.wire.flush()
        elif way == "next":
            self.wire.flush(with_next=True)
        elif way == "redistribute":
            self.wire.load_state_dict(mean_waits(self.wire))
        elif way == "reset":
            self.wire.reset()


def branches(rank: int, world: int, job: regimes.Job, corpora: Path, schedule: str, method: str, points: list[int],
             steps: int) -> dict[int, dict[str, list[tuple[float, float]]]]:  # fmt: skip
    """By point and way: losses ``LATER``."""
    warnings.simplefilter("ignore")
    life = Life(rank, job, corpora, schedule, method, steps)
    found: dict[int, dict[str, list[tuple[float, float]]]] = {}
    for begun, point in zip([0, *points], points, strict=False):
        for number in range(begun, point):
            life.step(number)
        saved = copy.deepcopy((life.model.state_dict(), life.optimizer.state_dict(), life.wire.state_dict()))

        def put_back(saved=saved) -> None:
            life.model.load_state_dict(saved[0])
            life.optimizer.load_state_dict(saved[1])
            life.wire.load_state_dict(saved[2])

        found[point] = {}
        for way in WAYS:
            put_back()
            life.go(way)
            losses, taken = [], 0
            for later in LATER if point < steps or schedule == "constant" else (0,):
                while taken < later:
                    life.step(point + taken)
                    taken += 1
                losses.append(life.loss())
            found[point][way] = losses
        put_back()
    life.wire.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--model", choices=regimes.MODELS, default="tiny")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--schedules", nargs="+", default=["constant", "cosine"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()
    print(f"{args.model}, {args.steps} steps, lr {args.lr:g}, {RANKS} ranks, peps, seed 0; held-out loss")
    print("| schedule, method | at step | way | " + " | ".join(f"+{later}" for later in LATER) + " |")
    print("|---|---:|---|" + "---:|" * len(LATER))
    for schedule in args.schedules:
        for method in args.methods:
            job = regimes.Job("scratch", "peps", args.model, RANKS, method, args.lr, 0, args.steps)
            points = [args.steps] if schedule == "constant" else [args.steps // 2, args.steps]
            how = (job, args.corpora.resolve(), schedule, method, points, args.steps)
            for point, ways in ranks.run(branches, RANKS, *how, seconds=3600)[0].items():
                for way, losses in ways.items():
                    cells = " | ".join(f"{loss:.3f}" for loss, _ in losses)
                    print(f"| {schedule}, {method} | {point} | {way} | {cells} |", flush=True)
                error = next(iter(ways.values()))[0][1]
            print(f"| | | standard error of each | {error:.3f} |", flush=True)


if __name__ == "__main__":
    main()
