"""The runs of ``ladder.py`` as tables: each method at its best settings, its gap to the best dense runs, and its error.

A method's settings are told apart by the seeds that all of them have. Those within ``ALIKE`` of the best are not told
apart by these, and the one with the most seeds is taken. A gap is paired by seed. Its ± is half of a 95% interval: of
the held-out text, from the differences in the same stretches, and of the seeds, as the root of the sum of their
squares. How far seeds lie apart is taken from all settings of a table that have several, or of all tables where that is
fewer than ``ENOUGH`` degrees of freedom. A gap that is below its ± is none: "=" stands before it; with "?" behind it,
nothing was run with two seeds, and ± is of the text alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from thinwire.lab.verdict import NORMAL95, T95, Span, block_error, interval

STRETCHES = 128
"""Of the held-out text, in each of which two runs are compared."""
ALIKE = 0.005
"""Share of a loss below which two settings are not told apart: the same run on another machine, whose sums are rounded
otherwise, was up to that far from itself."""
STABLE = 0.02
"""Share above a method's best setting beyond which another says nothing of how far seeds lie apart."""
ENOUGH = 3
Run = dict[str, Any]
SETTING = ("model", "text", "ranks", "sequences", "steps")
"""What the runs in one table share."""
TUNED = ("lr", "beside", "beta1", "clip", "warmup")
"""What is chosen for each method: the best that was run."""
KEY = (*SETTING, "method", "optimizer", *TUNED, "seed")


def key_of(job: Run, steps: int) -> str:
    values = {**job, "steps": steps}
    return json.dumps({name: values[name] for name in KEY}, sort_keys=True)


def read(file: Path) -> dict[str, Run]:
    """The runs in ``file``, by key; of several with one key the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    runs = [json.loads(line) for line in lines if line.strip()]
    return {key_of(run, run["steps"]): run for run in runs}


class Spread(NamedTuple):
    """How far seeds of a setting lie apart: the standard deviation, as a share of the loss, from ``count`` degrees.

    ``pooled``: of all settings together."""

    deviation: float
    count: int
    pooled: bool = False


def spread_of(runs: Iterable[Run]) -> Spread | None:
    """Of all runs of a table: of its settings with several seeds, but for those far above their method's best, which
    are unstable. None: there are none."""
    by_method: dict[Any, dict[Any, list[float]]] = {}
    for run in runs:
        if has_loss(run):
            tuned = by_method.setdefault((run["method"], run["optimizer"]), {})
            tuned.setdefault(tuple(run[key] for key in TUNED), []).append(run["valid"])
    squares, count = 0.0, 0
    for settings in by_method.values():
        least = min(map(fmean, settings.values()))
        for losses in settings.values():
            mean = fmean(losses)
            if len(losses) > 1 and mean <= (1 + STABLE) * least:
                squares += sum((loss / mean - 1) ** 2 for loss in losses)
                count += len(losses) - 1
    return Spread(math.sqrt(squares / count), count) if count else None


def pooled_spread(runs: Iterable[Run]) -> Spread | None:
    """Of all settings together; None: none of them has two seeds."""
    return _pooled(_spreads_of(runs).values())


def _spreads_of(runs: Iterable[Run]) -> dict[tuple[Any, ...], Spread | None]:
    by_setting: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        by_setting.setdefault(tuple(run[key] for key in SETTING), []).append(run)
    return {setting: spread_of(of) for setting, of in by_setting.items()}


def _pooled(spreads: Iterable[Spread | None]) -> Spread | None:
    found = [spread for spread in spreads if spread is not None]
    count = sum(spread.count for spread in found)
    squares = sum(spread.count * spread.deviation**2 for spread in found)
    return Spread(math.sqrt(squares / count), count, pooled=True) if count else None


def spreads_in(runs: Iterable[Run]) -> dict[tuple[Any, ...], Spread | None]:
    """Of each setting: its own, or that of all together where its own has few degrees of freedom."""
    own = _spreads_of(runs)
    pooled = _pooled(own.values())
    return {setting: one if one is not None and one.count >= ENOUGH else pooled for setting, one in own.items()}


def gap(pairs: Sequence[tuple[Run, Run]], spread: Spread | None = None) -> Span:
    """How far the first run of each pair ends above the second, as a share of the second; a pair for each seed.

    ``spread``: of seeds; None: that of these pairs."""
    seeds = interval([mine["valid"] / dense["valid"] - 1 for mine, dense in pairs])
    if spread is not None:
        half = T95[min(spread.count, len(T95)) - 1] * spread.deviation * math.sqrt(2 / len(pairs))
        seeds = Span(seeds.mean, seeds.mean - half, seeds.mean + half)
    excess = [0.0] * len(pairs[0][1]["spans"])
    for mine, dense in pairs:
        ratio = mine["valid"] / dense["valid"]
        for at, (ours, theirs) in enumerate(zip(mine["spans"], dense["spans"], strict=True)):
            excess[at] += (ours - ratio * theirs) / dense["valid"] / len(pairs)
    half = math.hypot(seeds.half, NORMAL95 * block_error(excess, [1.0] * len(excess)))
    return Span(seeds.mean, seeds.mean - half, seeds.mean + half)


def written(span: Span, *, seeds: bool = True) -> str:
    """``+1.2% ± 0.3%``; with "= " before it, if it is below its error, and "?" behind it, if that lacks the seeds'."""
    none = span.low <= 0 <= span.high
    return f"{'= ' if none else ''}{100 * span.mean:+.2f}% ± {100 * span.half:.2f}%{'' if seeds else ' ?'}"


@dataclass(frozen=True)
class Row:
    """A method with its optimizer at its best settings.

    Attributes:
        tuned: the values of ``TUNED``. tried: how many settings were run. runs: by seed. failed: runs without a loss.
        edge: "lowest" or "highest" of the rates that were run, so that a better one may lie beyond; "": neither.
    """

    setting: tuple[Any, ...]
    method: str
    optimizer: str
    tuned: tuple[float, ...]
    tried: int
    runs: dict[int, Run]
    failed: int
    edge: str

    @property
    def loss(self) -> float:
        return fmean(run["valid"] for run in self.runs.values())

    @property
    def share(self) -> float:
        return fmean(run["bytes"] / run["dense_bytes"] for run in self.runs.values())

    def above(self, dense: Row | None, spread: Spread | None = None) -> Span | None:
        seeds = sorted(self.runs.keys() & dense.runs.keys()) if dense is not None else []
        if dense is None or not seeds or dense is self:
            return None
        return gap([(self.runs[seed], dense.runs[seed]) for seed in seeds], spread)


def has_loss(run: Run) -> bool:
    return not run["error"] and not run.get("diverged") and run["valid"] is not None


def rows(runs: Iterable[Run]) -> list[Row]:
    """Settings in order of their first run; in each by optimizer, dense first."""
    by_method: dict[tuple[Any, ...], dict[tuple[float, ...], dict[int, Run]]] = {}
    for run in runs:
        name = (tuple(run[key] for key in SETTING), run["method"], run["optimizer"])
        by_method.setdefault(name, {}).setdefault(tuple(run[key] for key in TUNED), {})[run["seed"]] = run
    found = []
    for (setting, method, optimizer), by_tuned in by_method.items():
        common = set.intersection(*(set(by_seed) for by_seed in by_tuned.values()))
        seeds = {tuned: common or set(by_seed) for tuned, by_seed in by_tuned.items()}

        def mean(tuned: tuple[float, ...], by_tuned: Any = by_tuned, seeds: Any = seeds) -> float:
            chosen = [by_tuned[tuned][seed] for seed in seeds[tuned]]
            return fmean(run["valid"] if has_loss(run) else math.inf for run in chosen)

        least = min(map(mean, by_tuned))
        alike = [tuned for tuned in by_tuned if mean(tuned) <= (1 + ALIKE) * least]
        best = min(alike, key=lambda tuned: (-len(by_tuned[tuned]), mean(tuned)))
        rates = sorted({tuned[0] for tuned in by_tuned})
        edge = {rates[0]: "lowest", rates[-1]: "highest"}.get(best[0], "") if rates[1:] else ""
        kept = {seed: run for seed, run in sorted(by_tuned[best].items()) if has_loss(run)}
        failed = sum(not has_loss(run) for by_seed in by_tuned.values() for run in by_seed.values())
        if kept:
            found.append(Row(setting, method, optimizer, best, len(by_tuned), kept, failed, edge))
    order = list(dict.fromkeys(row.setting for row in found))
    return sorted(found, key=lambda row: (order.index(row.setting), row.optimizer, row.method != "dense", row.loss))


def beside_dense(runs: Iterable[Run]) -> Iterator[tuple[Row, Row, Spread | None]]:
    """Each method's row, dense with the same optimizer in its setting, and how far seeds lie apart there."""
    runs = list(runs)
    every, spreads = rows(runs), spreads_in(runs)
    dense = {(row.setting, row.optimizer): row for row in every if row.method == "dense"}
    for row in every:
        if row.method != "dense" and (row.setting, row.optimizer) in dense:
            yield row, dense[row.setting, row.optimizer], spreads[row.setting]


def pairs(runs: Iterable[Run], method: str, other: str) -> list[tuple[Run, Run]]:
    """Runs of the two that are alike in all else."""
    rest = [key for key in KEY if key != "method"]
    kept = {(run["method"], *(run[key] for key in rest)): run for run in runs if has_loss(run)}
    return [
        (run, kept[other, *alike]) for (name, *alike), run in kept.items() if name == method and (other, *alike) in kept
    ]


def markdown(runs: Iterable[Run]) -> str:
    """A table for each setting."""
    runs = list(runs)
    every, spreads = rows(runs), spreads_in(runs)
    settings = dict.fromkeys(row.setting for row in every)
    return "\n\n".join(_table([row for row in every if row.setting == of], spreads[of]) for of in settings)


def _table(of: Sequence[Row], spread: Spread | None) -> str:
    model, text, ranks, sequences, steps = of[0].setting
    tokens = next(iter(of[0].runs.values()))["tokens_per_parameter"]
    dense = {row.optimizer: row for row in of if row.method == "dense"}
    seeds = "Seeds of all tables" if spread and spread.pooled else "Seeds"
    apart = "" if spread is None else f" {seeds}: {spread.deviation:.2%} apart (standard deviation)."
    lines = [
        f"{model} on {text}, {ranks} ranks, {sequences} sequences a step, {steps} steps: {tokens:.3g} tokens per "
        f"parameter.{apart}",
        "",
        "| method | optimizer | lr, beta1, clip, warm-up | settings run | seeds | loss | above dense AdamW | "
        "above dense Muon | all bytes |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in of:
        lr, beside, beta1, clip, warmup = row.tuned
        rate = f"{lr:g}" + (f" [{row.edge}]" if row.edge else "") + (f" ({beside:g})" if beside else "")
        gaps = [row.above(dense.get(optimizer), spread) for optimizer in ("adamw", "muon")]
        cells = " | ".join("-" if span is None else written(span, seeds=spread is not None) for span in gaps)
        lost = f" ({row.failed} without a loss)" if row.failed else ""
        lines.append(
            f"| `{row.method}` | {row.optimizer} | {rate}, {beta1:g}, {clip:g}, {warmup:g} | {row.tried}{lost} | "
            f"{len(row.runs)} | {row.loss:.4f} | {cells} | {row.share:.2%} |"
        )
    return "\n".join(lines)
