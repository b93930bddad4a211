"""Many of the ladder's runs in a few minutes of one machine with a GPU: stacks on it, ``ladder.py`` on its cores.

    python benchmarks/loss/fleet.py --corpora DIR --list FILE --out DIR --minutes 5 --tf32 --cores 12

The list has a JSON object per line, the most important first. {"stack": {...}}: a run for each combination of its
lists "lrs", "beside", "beta1s", "clips", "warmups" and "seeds" (or of those in each of "grids"), all in one batch on
the GPU (``stacked.py``). They have "model", "text", "ranks", "sequences", "method", "optimizer" and "lengths" in
common, and what is no knob of the library's method: "owner" (the decay of a momentum of what arrives), "momentum"
(Muon's), "shared" (after so many steps the ranks take the mean of their Muon's momenta), "late" (times the densities
while the rate falls), and "second", "every" and "beta2" (what Adam's v is a mean of: ``stacked.Way``); the bytes of a
row are those of the method without them. --together stacks share the GPU.
{"ladder": "..."}: the words of a ``ladder.py``, on one core; --cores of them run at a time. What has not begun when
--minutes are over is left out, and what is under way stops.

Each run and length is a line of OUT/rows.jsonl, as ladder.py writes it. Bytes are not played on a GPU:

    python benchmarks/loss/fleet.py --corpora DIR --add OUT/rows.jsonl

plays two steps of the library's method for them, and puts what is new into --data.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import ladder
import ladder_tables
import regimes
import stacked
import virtual
from thinwire.train.job import held_out


@dataclass(frozen=True)
class Order:
    """A stack's runs: all that they share, and what differs."""

    jobs: tuple[ladder.Job, ...]
    way: stacked.Way
    lengths: tuple[int, ...]


def order_of(given: dict[str, Any]) -> Order:
    jobs = tuple(job for grid in given.pop("grids", [{}]) for job in _jobs_of(given | grid))
    lengths = tuple(sorted(given["lengths"]))
    besides = {name: given[name] for name in BESIDES if name in given}
    return Order(jobs, stacked.way_of(given["method"], jobs[0].ranks, **besides), lengths)


def _jobs_of(given: dict[str, Any]) -> list[ladder.Job]:
    of = {
        "text": "peps", "ranks": 4, "sequences": 16, "optimizer": "adamw", "beside": [4e-3], "beta1s": [0.9],
        "clips": [1.0], "warmups": [40], "seeds": [0],
    } | given  # fmt: skip
    muon = of["optimizer"] == "muon"
    settings = itertools.product(of["seeds"], of["beside"] if muon else [0.0], of["beta1s"], of["clips"],
                                 of["warmups"], of["lrs"])  # fmt: skip
    return [
        ladder.Job(of["model"], of["text"], of["ranks"], of["sequences"], of["method"], of["optimizer"], lr, beside,
                   beta1, clip, warmup, seed)
        for seed, beside, beta1, clip, warmup, lr in settings
    ]  # fmt: skip


def play(order: Order, corpora: Path, device: torch.device) -> Iterator[Any]:
    """The rows of an order's runs, length by length, and, where others may go on, what ``stacked.Stack.go`` yields."""
    first, longest, began = order.jobs[0], order.lengths[-1], time.monotonic()
    config = first.config(longest)
    train, valid = (regimes.windows_of(corpora, name, config.sequence_length) for name in regimes.TEXTS[first.text])
    members = [stacked.member(job, None) for job in order.jobs]
    decays = order.way.beta2 or ladder.BETA2, ladder.WEIGHT_DECAY
    stack = stacked.Stack(config, order.way, members, train, longest, device, decays)
    number = min(valid.count, held_out.LONGEST // valid.length)
    each = max(number // ladder_tables.STRETCHES, 1)
    indices = valid.positions(each * min(ladder_tables.STRETCHES, number))
    for length in order.lengths:
        stack.set_rates([job.rate(None) for job in order.jobs])
        yield from stack.go(ladder.branch(length))
        trunk = stack.snapshot()
        stack.set_rates([job.rate(length) for job in order.jobs])
        stack.change(order.way.decaying)
        yield from stack.go(length)
        spans = stack.stretches(valid, indices, each)
        losses = stack.losses[:, max(length - 50, 0) : length].mean(1).tolist()
        tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        shared = {"tf32": tf32, "stack_seconds": round(time.monotonic() - began, 1), **ladder.where(device)}
        for job, own, ended in zip(order.jobs, spans, losses, strict=True):
            yield _row(order, job, length, stack, own, ended) | shared
        stack.restore(trunk)
        stack.change(order.way)


def _row(
    order: Order, job: ladder.Job, length: int, stack: stacked.Stack, spans: list[float], ended: float
) -> dict[str, Any]:
    """As ``ladder.py`` writes it, without bytes. ``ended``: the loss of training in the last steps."""
    loss, tokens = statistics.fmean(spans), length * job.sequences * stack.length
    return {
        **asdict(job),
        "method": named(job.method, order.way),
        "steps": length,
        "error": None,
        "valid": regimes._number(loss),
        "spans": [regimes._number(value) for value in spans],
        "train": regimes._number(ended),
        "diverged": not math.isfinite(loss),
        "skipped": 0,
        "parameters": stack.numel,
        "compressed": sum(piece.numel for piece in stack.sent) or stack.numel,
        "tokens_per_parameter": round(tokens / stack.numel, 2),
        "bytes": None,
        "dense_bytes": None,
        "stacked": len(order.jobs),
        "torch": torch.__version__,
        "commit": regimes.commit(),
    }


@dataclass
class UnderWay:
    """A stack that is played on a stream of its own (None: on the CPU). event: what it waits for; None: nothing."""

    number: int
    stream: Any
    steps: Iterator[Any]
    event: Any = None
    began: float = field(default_factory=time.monotonic)

    def go_on(self) -> dict[str, Any] | None:
        """The row that is finished, if one is. Raises StopIteration at the end."""
        with contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            made = next(self.steps)
        row = made if isinstance(made, dict) else None
        self.event = None if row is not None else made
        return row


def work(orders: Sequence[Order], done: Any, args: argparse.Namespace, together: int, until: float) -> None:
    """Play what is not ``done``, ``together`` stacks at a time on a stream each; end at the first failure."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    device = torch.device(args.device)
    waiting = [number for number in range(len(orders)) if not done[number]]
    under_way: list[UnderWay] = []
    while (waiting or under_way) and time.monotonic() < until:
        while waiting and len(under_way) < together:
            number = waiting.pop(0)
            stream = torch.cuda.Stream(device) if device.type == "cuda" else None
            under_way.append(UnderWay(number, stream, play(orders[number], args.corpora, device)))
            say(f"{what(orders[number])}: begins")
        ready = [one for one in under_way if one.event is None or one.event.query()]
        for one in ready:
            try:
                row = one.go_on()
                if row is not None:
                    regimes.append(args.out / "rows.jsonl", row)
                    say(f"{what(orders[one.number])}: {line(row)}")
            except StopIteration:
                done[one.number] = True
                under_way.remove(one)
                say(f"{what(orders[one.number])}: {time.monotonic() - one.began:.1f} s")
            except Exception:
                done[one.number] = together == 1  # alone it gets another try
                say(f"{what(orders[one.number])}: failed\n{traceback.format_exc()}")
                sys.exit(1)
        if not ready:
            time.sleep(0.001)
    say(f"left out: {len(waiting)}; under way: {', '.join(what(orders[one.number]) for one in under_way) or 'nothing'}")


def on_device(orders: Sequence[Order], args: argparse.Namespace, until: float) -> None:
    """Have the orders played in a process, and after a failure in another one, which plays one at a time."""
    context, together = multiprocessing.get_context("spawn"), args.together
    done = context.Array("b", len(orders))
    while not all(done) and time.monotonic() < until:
        process = context.Process(target=work, args=(orders, done, args, together, until))
        process.start()
        process.join()
        together = 1


def what(order: Order) -> str:
    first = order.jobs[0]
    name = f"{named(first.method, order.way)} {first.optimizer} x {len(order.jobs)}"
    return f"{first.model} {first.text} N={first.ranks} batch={first.sequences} {name}"


BESIDES = {
    "owner": (0.0, " + owner momentum {:g}"),
    "momentum": (stacked.MOMENTUM, " + Muon's momentum {:g}"),
    "shared": (0, " + momenta shared every {} steps"),
    "late": (1.0, " + density x {:g} in the decay"),
    "second": ("own", " + v of {}"),
    "every": (1, " every {} steps"),
    "beta2": (0.0, " + beta2 {:g}"),
}
"""What is no knob of the library's method: its usual value, and what it adds to the name of a row's method."""


def named(method: str, way: stacked.Way) -> str:
    differing = {name: getattr(way, name) for name, (usual, _) in BESIDES.items() if getattr(way, name) != usual}
    return method + "".join(BESIDES[name][1].format(value) for name, value in differing.items())


def line(row: dict[str, Any]) -> str:
    return f"lr {row['lr']:g} seed {row['seed']} {row['steps']} steps: {row['valid']}"


_BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _BEGAN:6.1f} {text}", flush=True)


def on_cores(commands: Sequence[str], args: argparse.Namespace, until: float) -> None:
    """Run ``ladder.py`` with the words of each command, ``args.cores`` at a time."""
    waiting, running = list(commands), []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    log = (args.out / "ladder.log").open("a")
    while waiting or running:
        running = [one for one in running if one.poll() is None]
        left = (until - time.monotonic()) / 60
        if left <= 0:
            waiting = []
        while waiting and len(running) < args.cores:
            words = [
                sys.executable, str(Path(ladder.__file__)), "--corpora", str(args.corpora), "--data",
                str(args.out / "rows.jsonl"), "--out", str(args.played), "--minutes", f"{left:.2f}",
                *waiting.pop(0).split(),
            ]  # fmt: skip
            running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        time.sleep(0.2)
    log.close()


def add(args: argparse.Namespace) -> int:
    """Put the rows of a fleet into the data, with their bytes; the number that was new."""
    known, new = ladder_tables.read(args.data), 0
    per_step: dict[str, tuple[float, float]] = {}
    for key, row in ladder_tables.read(args.add).items():
        if key in known or row["error"]:
            continue
        row["commit"] = row["commit"] or regimes.commit()  # there was no repository
        if row["bytes"] is None:
            job = ladder.Job(**{name: row[name] for name in ladder.Job.__dataclass_fields__})
            job = replace(job, method=job.method.partition(" + ")[0])
            what = json.dumps([row[name] for name in ("model", "ranks", "sequences", "method", "optimizer")])
            if what not in per_step:
                per_step[what] = bytes_of(job, args.corpora)
            sent, dense = per_step[what]
            row["bytes"], row["dense_bytes"] = round(sent * row["steps"]), round(dense * row["steps"])
        regimes.append(args.data, row)
        new += 1
    print(f"{new} rows are new")
    return 0


def bytes_of(job: ladder.Job, corpora: Path) -> tuple[float, float]:
    """Bytes that a rank sends in a step, and those of dense: as the library's method is played for two steps."""
    config = job.config(2)
    train = regimes.windows_of(corpora, regimes.TEXTS[job.text][0], config.sequence_length, config.seed)
    played = virtual.Played(config, train, batched=True)
    played.run(2, job.rate(None))
    return played.found.ranks[0].sent / 2, played.found.ranks[0].dense / 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=Path, required=True, help="the folder of the texts")
    parser.add_argument("--list", type=Path, help="what to run")
    parser.add_argument("--out", type=Path, default=regimes.ROOT / "runs" / "fleet")
    parser.add_argument("--played", type=Path, default=Path("/tmp/fleet"), help="played ranks of ladder.py, and locks")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--together", type=int, default=3, help="stacks that share the GPU at a time")
    parser.add_argument("--cores", type=int, default=max((os.cpu_count() or 2) - 3, 1), help="ladder.py at a time")
    parser.add_argument("--tf32", action="store_true", help="products of matrices in TF32")
    parser.add_argument("--add", type=Path, help="rows of a fleet to put into --data")
    parser.add_argument("--data", type=Path, default=ladder.DATA)
    return parser.parse_args()


def main() -> int:
    args = parse()
    args.corpora = args.corpora.resolve()
    if args.add:
        return add(args)
    until = time.monotonic() + 60 * args.minutes
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    entries = [json.loads(line) for line in args.list.read_text().splitlines() if line.strip()]
    orders = [order_of(entry["stack"]) for entry in entries if "stack" in entry]
    device = threading.Thread(target=on_device, args=(orders, args, until))
    device.start()
    on_cores([entry["ladder"] for entry in entries if "ladder" in entry], args, until)
    device.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
