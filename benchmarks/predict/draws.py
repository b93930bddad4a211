"""Holds predictions against measured step times on the emulated network, in settings that a seed draws.

    python benchmarks/predict/draws.py --seed 1 --draws 24     # rate, preset, tokens, engine and methods by the seed
    python benchmarks/predict/draws.py --rates 50 125 500 --methods all --preset net20m --batch 4

In each setting, on one emulated network of two nodes: `thinwire doctor` measures links, kernels and steps of none and
dense, and writes a cluster's file; from that file alone every method's step is predicted; then the methods train as
`thinwire compare` lets them, and their steps are measured. Nothing of a method's own steps is known to a prediction.
Rows go to docs/data/draws.csv. Needs network namespaces and a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from thinwire.base.errors import ThinwireError
from thinwire.lab.cluster import Cluster
from thinwire.lab.compare import Comparison, Entry, directory_name, train
from thinwire.lab.run import launch
from thinwire.lab.verdict import DENSE, SILENT
from thinwire.predict.cluster import read_cluster
from thinwire.predict.profile import profile_of
from thinwire.predict.simulate import Job, Simulation, simulate
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

ROOT = Path(__file__).resolve().parents[2]
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
    "seed", "rate_mbit", "preset", "batch", "engine", "method", "predicted_s", "low_s", "high_s", "measured_s", "error"
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


def draw(seed: int, count: int) -> Iterator[Setting]:
    """Draw ``count`` settings: the rate evenly by its logarithm, from 20 to 800 Mbit/s."""
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        rate = round(20 * 40 ** chance.random())
        engine = chance.choice(ENGINES)
        methods = [name for name in METHODS if engine == "ddp" or not name.startswith("local-steps")]
        yield Setting(
            f"{seed}/{number}", rate, chance.choice(PRESET_NAMES), chance.choice(BATCHES), engine,
            tuple(chance.sample(methods, DRAWN)),
        )  # fmt: skip


def hold(setting: Setting, out: Path, steps: int, seconds: float) -> tuple[Simulation, list[Row]]:
    """Examine, predict and measure in one setting.

    Raises:
        ThinwireError: the doctor or the dense run failed. A method's failure is printed, and it has no row.
    """
    folder = out / directory_name(f"{setting.seed}-{setting}")
    folder.mkdir(parents=True)
    extra = ("--batch-size", str(setting.batch), "--engine", setting.engine, "--eval-sequences", "0")
    names = [DENSE, *setting.methods]
    rows = []
    with Cluster(2, 1, f"{setting.rate}mbit") as cluster:
        file, log = folder / "cluster.toml", folder / "doctor.log"
        command = ["thinwire", "doctor", "--preset", setting.preset, "--methods", ",".join(names), "--out", str(file),
                   "--seconds", str(seconds), "--", *extra]  # fmt: skip
        if launch(cluster, command, log=log, limit_s=LIMIT_S).returncode:
            raise ThinwireError(f"the doctor failed: see {log}")
        print("  " + "\n  ".join(log.read_text().splitlines()[:3]), flush=True)
        simulation = predict(setting, file)
        comparison = Comparison(preset=setting.preset, steps=steps, out=folder, extra=extra)
        for label in (SILENT, *names):
            entry, directory = Entry(label), folder / directory_name(label)
            words = [*comparison.program, *comparison.flags(entry, None, directory)]
            try:
                run = train(words, directory, cluster, LIMIT_S)
            except ThinwireError as error:
                print(f"  {label}: {error}", flush=True)
                continue
            times = [row["step_ms"] / 1e3 for row in run["rows"][OPENING:]]
            if label == SILENT:
                print(f"  none took {statistics.median(times):.3g} s of a step", flush=True)
                continue
            rows += list(beside(simulation, label, times))
    return simulation, rows


def predict(setting: Setting, file: Path) -> Simulation:
    """Predict from the cluster's file alone."""
    shape = PRESETS[setting.preset].check()
    with torch.device("meta"):
        model, tokens = Decoder(shape), torch.zeros(1, shape.context, dtype=torch.int64)
    profile = profile_of(model, (tokens, tokens))
    job = Job(setting.preset, model, profile, read_cluster(file), setting.engine, 2, setting.batch)
    return simulate(job, setting.methods)


def beside(simulation: Simulation, method: str, times: Sequence[float]) -> Iterator[Row]:
    """Yield the row of ``method``, if it was predicted. Measured: the mean of a cycle, or the median of like steps."""
    for outcome in simulation.outcomes:
        if outcome.method == method:
            measured = statistics.fmean(times) if len(outcome.timeline.steps) > 1 else statistics.median(times)
            made = outcome.prediction
            row = Row(method, made.seconds, made.low, made.high, measured)
            print(
                f"  {method:<24} predicted {row.predicted:7.3f} s ({row.low:.3f} to {row.high:.3f}), measured "
                f"{measured:7.3f} s: {row.error:+6.1%}{'' if row.is_in_range else ', outside'}", flush=True,
            )  # fmt: skip
            yield row


def is_in_order(rows: Sequence[Row]) -> bool:
    """Are the three that are predicted to be fastest the three that are, in this order? Ties (``TIE``) may swap."""
    predicted = sorted(rows, key=lambda row: row.predicted)[:3]
    fastest = sorted(row.measured for row in rows)[:3]
    return all(row.measured <= (1 + TIE) * seconds for row, seconds in zip(predicted, fastest, strict=True))


def agrees(simulation: Simulation, rows: Sequence[Row]) -> bool:
    """Is it predicted not to compress where dense is at least as fast as all, and only where it nearly is?"""
    dense = next(row.measured for row in rows if row.method == DENSE)
    best = min((row.measured for row in rows if row.method != DENSE), default=dense)
    refuses = simulation.best.method == DENSE
    return refuses if best >= dense else not refuses or best >= (1 - 2 * TIE) * dense


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1, help="settings to draw")
    parser.add_argument("--rates", type=int, nargs="+", default=[], help="Mbit/s, in place of draws")
    parser.add_argument("--methods", default="all", help="of --rates: all, or comma-separated names without knobs")
    parser.add_argument("--preset", default="net20m", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank, of --rates")
    parser.add_argument("--engine", default="ddp", choices=("ddp", "fsdp2"))
    parser.add_argument("--steps", type=int, default=6, help="steps of each run; the first two are left out")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the doctor")
    parser.add_argument("--out", type=Path, default=Path("runs/draws"), help="a new folder for the runs")
    parser.add_argument("--csv", type=Path, default=ROOT / "docs" / "data" / "draws.csv")
    options = parser.parse_args()
    names = METHODS if options.methods == "all" else tuple(
        next((form for form in METHODS if form.split("(")[0] == name), name) for name in options.methods.split(",")
    )  # fmt: skip
    settings = [Setting("", rate, options.preset, options.batch, options.engine, names) for rate in options.rates]
    rows, orders, agreements = list[Row](), list[bool](), list[bool]()
    with options.csv.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for setting in settings or draw(options.seed, options.draws):
            print(f"{setting.seed} {setting}".strip(), flush=True)
            try:
                simulation, new = hold(setting, options.out, options.steps, options.seconds)
                orders.append(is_in_order(new))
                agreements.append(agrees(simulation, new))
            except (ThinwireError, StopIteration) as error:
                print(f"  failed: {error}", flush=True)
                continue
            rows += new
            for row in new:
                values = (row.predicted, row.low, row.high, row.measured, row.error)
                table.writerow([
                    setting.seed, setting.rate, setting.preset, setting.batch, setting.engine, row.method,
                    *(f"{value:.4f}" for value in values),
                ])  # fmt: skip
            file.flush()
            print(
                f"  the fastest three in order: {'yes' if orders[-1] else 'no'}; to compress or not: "
                f"{'agrees' if agreements[-1] else 'DISAGREES'}", flush=True,
            )  # fmt: skip
    if not rows:
        return 1
    print(summary(rows, orders, agreements))
    return 0


def summary(rows: Sequence[Row], orders: Sequence[bool], agreements: Sequence[bool]) -> str:
    errors = [abs(row.error) for row in rows]
    close, inside = sum(error <= 0.25 for error in errors), sum(row.is_in_range for row in rows)
    return (
        f"{len(rows)} rows: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}, {close} within 25%, "
        f"{inside} within the range; {len(orders)} settings: the fastest three in order in {sum(orders)}, to compress "
        f"or not right in {sum(agreements)}"
    )


if __name__ == "__main__":
    sys.exit(main())
