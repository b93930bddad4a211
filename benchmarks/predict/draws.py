"""Holds predictions against measured step times on the emulated network, in settings that a seed draws.

    python benchmarks/predict/draws.py --seed 1 --draws 24     # rate, preset, tokens, engine and methods by the seed
    python benchmarks/predict/draws.py --rates 50 125 500 --methods all --preset net20m --batch 8
    python benchmarks/predict/draws.py --rates 125 --methods twice    # a method of the user's: outsider.py

In each setting, on one emulated network of two nodes: `thinwire doctor` measures links, kernels and steps of none and
dense, and writes a cluster's file; from that file alone every method's step is predicted; then the methods train as
`thinwire compare` lets them, and their steps are measured. Nothing of a method's own steps is known to a prediction.
Rows are added to docs/data/draws.csv, in place of those of the same setting; docs/predictions.md shows them. Needs
network namespaces and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import outsider
from thinwire.base.errors import ThinwireError
from thinwire.lab.cluster import Cluster
from thinwire.lab.compare import Comparison, directory_name, train
from thinwire.lab.entries import Entry
from thinwire.lab.run import launch
from thinwire.lab.verdict import DENSE, SILENT
from thinwire.predict.cluster import read_cluster
from thinwire.predict.profile import profile_of
from thinwire.predict.simulate import Job, Simulation, simulate
from thinwire.predict.timeline import Timeline
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, str(Path(outsider.__file__).resolve()))
METHODS = (
    "bf16", "int8", "radius(start=0, T=200)", "scape(warmup=1)", "separate", "tagc", "sdp4bit", "lhc", "zeropp", "qsdp",
    "loco", "powersgd", "topk", "trickle", "dgc", "sign", "onebit-adam(warmup=1)", "local-steps(every=4)",
)  # fmt: skip
"""All methods, without the starts in which they are dense; their steady state is what is predicted."""
DRAWN = 3
"""Methods of a drawn setting, beside dense."""
PRESET_NAMES, BATCHES, ENGINES = ("net20m", "laptop", "llama-small"), (2, 4, 8, 16), ("ddp", "ddp", "fsdp2")
OPENING = 2
"""Steps that are left out: they compile kernels and fill caches."""
TIE = 0.05
"""Share of a step by which measured steps may differ and be in either order."""
LIMIT_S = 1800.0
COLUMNS = (
    "seed", "rate_mbit", "preset", "batch", "engine", "advice", "method", "predicted_s", "low_s", "high_s", "measured_s"
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A link's rate in Mbit/s, a run, and the methods to try. ``seed``: "" for one that was not drawn."""

    seed: str
    rate: int
    preset: str
    batch: int
    engine: str
    methods: tuple[str, ...]

    def __str__(self) -> str:
        tokens = self.batch * PRESETS[self.preset].context
        return f"{self.rate} Mbit/s, {self.preset}, {tokens} tokens per rank, {self.engine}"

    @property
    def key(self) -> tuple[str, ...]:
        return (self.seed, str(self.rate), self.preset, str(self.batch), self.engine)


@dataclass(frozen=True)
class Row:
    """A prediction beside its measurement, in seconds."""

    method: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def is_in_range(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True)
class Trial:
    """The rows of a setting. ``advice``: the method that is predicted to be worth it, or dense: do not compress."""

    key: tuple[str, ...]
    advice: str
    rows: Sequence[Row]

    @property
    def dense(self) -> float:
        return next(row.measured for row in self.rows if row.method == DENSE)

    @property
    def best(self) -> Row:
        """The method that was fastest."""
        return min((row for row in self.rows if row.method != DENSE), key=lambda row: row.measured)

    @property
    def is_in_order(self) -> bool:
        """Are the three that are predicted to be fastest the three that are, in this order? Ties may swap."""
        predicted = sorted(self.rows, key=lambda row: row.predicted)[:3]
        fastest = sorted(row.measured for row in self.rows)[:3]
        return all(row.measured <= (1 + TIE) * seconds for row, seconds in zip(predicted, fastest, strict=True))

    @property
    def agrees(self) -> bool:
        """Is it predicted not to compress where dense is at least as fast as all, and only where it nearly is?"""
        refuses = self.advice == DENSE
        if self.best.measured >= self.dense:
            return refuses
        return not refuses or self.best.measured >= (1 - 2 * TIE) * self.dense


def draw(seed: int, numbers: Iterable[int]) -> Iterator[Setting]:
    """Draw the settings of these ``numbers``: the rate evenly by its logarithm, from 20 to 800 Mbit/s."""
    for number in numbers:
        chance = random.Random(f"{seed}/{number}")
        rate = round(20 * 40 ** chance.random())
        engine = chance.choice(ENGINES)
        methods = [name for name in METHODS if engine == "ddp" or not name.startswith("local-steps")]
        yield Setting(
            f"{seed}/{number}", rate, chance.choice(PRESET_NAMES), chance.choice(BATCHES), engine,
            tuple(chance.sample(methods, DRAWN)),
        )  # fmt: skip


def measure(setting: Setting, folder: Path, steps: int, seconds: float) -> None:
    """Examine the cluster, then train without exchange, with dense and with every method of ``setting``.

    Raises:
        ThinwireError: the doctor failed. A method's failure is printed, and it has no row.
    """
    folder.mkdir(parents=True)
    extra = ("--batch-size", str(setting.batch), "--engine", setting.engine, "--eval-sequences", "0")
    names = [DENSE, *setting.methods]
    with Cluster(2, 1, f"{setting.rate}mbit") as cluster:
        log = folder / "doctor.log"
        command = [*PROGRAM, "doctor", "--preset", setting.preset, "--methods", ",".join(names), "--out",
                   str(folder / "cluster.toml"), "--seconds", str(seconds), "--", *extra]  # fmt: skip
        if launch(cluster, command, log=log, limit_s=LIMIT_S).returncode:
            raise ThinwireError(f"the doctor failed: see {log}")
        print("  " + "\n  ".join(log.read_text().splitlines()[:3]), flush=True)
        comparison = Comparison(preset=setting.preset, steps=steps, out=folder, extra=extra)
        for label in (SILENT, *names):
            directory = folder / directory_name(label)
            words = [*PROGRAM, *comparison.program[1:], *comparison.flags(Entry(label), None, directory)]
            try:
                train(words, directory, cluster, LIMIT_S)
            except ThinwireError as error:
                print(f"  {label}: {error}", flush=True)


def score(setting: Setting, folder: Path) -> Trial:
    """Predict from the cluster's file alone, and read what was measured beside it."""
    simulation = predict(setting, folder / "cluster.toml")
    if silent := steps_of(folder, SILENT):  # there is no such run of a sharded engine
        print(f"  none took {statistics.median(silent[OPENING:]):.3g} s of a step")
    rows = []
    for outcome in simulation.outcomes:
        if steps := steps_of(folder, outcome.method):
            made = outcome.prediction
            row = Row(outcome.method, made.seconds, made.low, made.high, typical(outcome.timeline, steps))
            rows.append(row)
            print(
                f"  {row.method:<24} predicted {row.predicted:7.3f} s ({row.low:.3f} to {row.high:.3f}), measured "
                f"{row.measured:7.3f} s: {row.error:+6.1%}{'' if row.is_in_range else ', outside'}"
            )
    return Trial(setting.key, simulation.best.method, rows)


def predict(setting: Setting, file: Path) -> Simulation:
    """Predict from the cluster's file alone."""
    shape = PRESETS[setting.preset].check()
    with torch.device("meta"):
        model, tokens = Decoder(shape), torch.zeros(1, shape.context, dtype=torch.int64)
    profile = profile_of(model, (tokens, tokens))
    job = Job(setting.preset, model, profile, read_cluster(file), setting.engine, 2, setting.batch)
    return simulate(job, setting.methods)


def steps_of(folder: Path, method: str) -> list[float]:
    """Read the seconds of each step of a run; none if it failed."""
    file = folder / directory_name(method) / "metrics.jsonl"
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["step_ms"] / 1e3 for row in rows if "loss" in row]


def typical(timeline: Timeline, steps: Sequence[float]) -> float:
    """Return a step's seconds: the median, or the mean of whole cycles up to the last step, which ends a round early.

    A cycle that is longer than the run (radius draws places every 200 steps) shows only its usual step.
    """
    cycle = round(1 / min(step.share for step in timeline.steps))
    whole = (len(steps) - 2) // cycle * cycle
    return statistics.fmean(steps[-1 - whole : -1]) if cycle > 1 and whole else statistics.median(steps[OPENING:])


def write(trial: Trial, file: Path) -> None:
    """Put the rows of ``trial`` into ``file``, in place of those of the same setting."""
    trials = [other for other in read(file) if other.key != trial.key]
    with file.open("w", newline="") as out:
        table = csv.writer(out, lineterminator="\n")
        table.writerow(COLUMNS)
        for each in [*trials, trial]:
            for row in each.rows:
                seconds = (row.predicted, row.low, row.high, row.measured)
                table.writerow([*each.key, each.advice, row.method, *(f"{value:.4f}" for value in seconds)])


def read(file: Path) -> list[Trial]:
    """Read the trials of ``file``, in its order."""
    if not file.exists():
        return []
    trials: dict[tuple[str, ...], Trial] = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            key = tuple(row[name] for name in COLUMNS[:5])
            trial = trials.setdefault(key, Trial(key, row["advice"], []))
            seconds = (float(row[name]) for name in COLUMNS[7:])
            trials[key] = Trial(key, trial.advice, [*trial.rows, Row(row["method"], *seconds)])
    return list(trials.values())


def summary(trials: Sequence[Trial]) -> str:
    """Say in a sentence how far predictions were off."""
    rows = [row for trial in trials for row in trial.rows]
    errors = [abs(row.error) for row in rows]
    close, inside = sum(error <= 0.25 for error in errors), sum(row.is_in_range for row in rows)
    ordered, agreed = sum(trial.is_in_order for trial in trials), sum(trial.agrees for trial in trials)
    return (
        f"{len(trials)} settings, {len(rows)} rows: median error {statistics.median(errors):.1%}, worst "
        f"{max(errors):.1%}, {close} rows within 25%, {inside} ({inside / len(rows):.0%}) within their predicted "
        f"range. The fastest three came in order in {ordered} settings; whether to compress was right in {agreed}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1, help="settings to draw")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them, to go on where one stopped")
    parser.add_argument("--rates", type=int, nargs="+", default=[], help="Mbit/s, in place of draws")
    parser.add_argument("--methods", default="all", help="of --rates: all, or names without knobs")
    parser.add_argument("--preset", default="net20m", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank, of --rates")
    parser.add_argument("--engine", default="ddp", choices=("ddp", "fsdp2"))
    parser.add_argument("--steps", type=int, default=7, help="steps of each run; the first two are left out")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the doctor")
    parser.add_argument("--out", type=Path, default=Path("runs/draws"), help="folder of the runs")
    parser.add_argument("--again", action="store_true", help="predict again beside the runs in --out; nothing is run")
    parser.add_argument("--csv", type=Path, default=ROOT / "docs" / "data" / "draws.csv")
    options = parser.parse_args()
    outsider.register()
    names = METHODS if options.methods == "all" else tuple(
        next((form for form in METHODS if form.split("(")[0] == name), name) for name in options.methods.split(",")
    )  # fmt: skip
    settings = [Setting("", rate, options.preset, options.batch, options.engine, names) for rate in options.rates]
    trials = []
    for setting in settings or draw(options.seed, range(options.first, options.first + options.draws)):
        print(f"{setting.seed} {setting}".strip(), flush=True)
        folder = options.out / directory_name(f"{setting.seed}-{setting}")
        try:
            if not options.again:
                measure(setting, folder, options.steps, options.seconds)
            trial = score(setting, folder)
        except (ThinwireError, OSError) as error:
            print(f"  failed: {error}", flush=True)
            continue
        trials.append(trial)
        write(trial, options.csv)
        print(
            f"  the fastest three in order: {'yes' if trial.is_in_order else 'no'}; to compress or not: "
            f"{'agrees' if trial.agrees else 'DISAGREES'}", flush=True,
        )  # fmt: skip
    if trials:
        print(summary(trials))
    return not trials


if __name__ == "__main__":
    sys.exit(main())
