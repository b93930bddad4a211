"""The runs of ``ladder.py`` as tables: each method at its best settings, its gap to the best dense runs, and its error.

A method's settings are told apart by the seeds that all of them have. Those within ``ALIKE`` of the best are not told
apart by these. Of all settings with as many seeds as any of them, the one with the lowest mean over its own is taken: a
seed that all have is often one alone. A gap is of the means over each side's seeds, all of them: a
seed gives both sides one beginning and one order of the text, and yet how far a method ends above dense varies from
seed to seed as much as if each side had drawn its own (``likeness``). Its ± is half of a 95% interval: of the held-out
text, from the differences in the same stretches, and of the seeds, as the root of the sum of their squares. How far
seeds lie apart is taken, for each optimizer, from the settings of all tables that have several (``bartlett``: seeds of
AdamW lie further apart than those of Muon). A gap that is below its ± is none: "=" stands before it; with "?" behind
it, nothing was run with two seeds, and ± is of the text alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

from thinwire.lab.verdict import NORMAL95, T95, Span, block_error

STRETCHES = 128
"""Of the held-out text, in each of which two runs are compared."""
ALIKE = 0.005
"""Share of a loss below which two settings are not told apart: the same run on another machine, whose sums are rounded
otherwise, was up to that far from itself."""
STABLE = 0.02
"""Share above a method's best setting beyond which another says nothing of how far seeds lie apart."""
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
    """How far seeds of a setting lie apart: the standard deviation, as a share of the loss, from ``count`` degrees."""

    deviation: float
    count: int


def stable(runs: Iterable[Run]) -> dict[tuple[Any, ...], dict[int, Run]]:
    """(setting, method, optimizer, tuned) -> its runs by seed, where these are several, but for those far above their
    method's best, which are unstable."""
    by_method: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[int, Run]]] = {}
    for run in runs:
        if has_loss(run):
            name = (tuple(run[key] for key in SETTING), run["method"], run["optimizer"])
            by_method.setdefault(name, {}).setdefault(tuple(run[key] for key in TUNED), {})[run["seed"]] = run
    found = {}
    for name, by_tuned in by_method.items():
        means = {tuned: fmean(run["valid"] for run in by_seed.values()) for tuned, by_seed in by_tuned.items()}
        least = min(means.values())
        for tuned, by_seed in by_tuned.items():
            if len(by_seed) > 1 and means[tuned] <= (1 + STABLE) * least:
                found[*name, tuned] = by_seed
    return found


Spreads = Mapping[str, Spread]
"""By optimizer; one that is missing has no setting with two seeds."""


def spreads_of(runs: Iterable[Run]) -> Spreads:
    """Of all settings of each optimizer together."""
    runs = list(runs)
    spreads = {name: spread_of(its) for name, its in _by_optimizer(runs).items()}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _by_optimizer(runs: Sequence[Run]) -> dict[str, list[Run]]:
    names = sorted({run["optimizer"] for run in runs})
    return {name: [run for run in runs if run["optimizer"] == name] for name in names}


def spread_of(runs: Iterable[Run]) -> Spread | None:
    """Of all settings together; None: none of them has two seeds."""
    squares, count = 0.0, 0
    for by_seed in stable(runs).values():
        losses = [run["valid"] for run in by_seed.values()]
        mean = fmean(losses)
        squares += sum((loss / mean - 1) ** 2 for loss in losses)
        count += len(losses) - 1
    return Spread(math.sqrt(squares / count), count) if count else None


def bartlett(spreads: Sequence[Spread]) -> float:
    """How likely spreads that are alike in truth would be found to differ as much as these do, or more."""
    count = sum(one.count for one in spreads)
    pooled = sum(one.count * one.deviation**2 for one in spreads) / count
    apart = count * math.log(pooled) - sum(one.count * math.log(one.deviation**2) for one in spreads)
    degrees = len(spreads) - 1
    apart /= 1 + (sum(1 / one.count for one in spreads) - 1 / count) / (3 * degrees)
    # Wilson and Hilferty: the cube root of chi squared over its degrees is near to normal.
    cube = (apart / degrees) ** (1 / 3)
    return NormalDist().cdf((1 - 2 / (9 * degrees) - cube) / math.sqrt(2 / (9 * degrees)))


def likeness(runs: Iterable[Run]) -> tuple[Spread, float]:
    """How far apart a method's gaps to dense lie from seed to seed, and how far they would if the two sides had nothing
    in common: of all pairs of stable settings of a method and of dense with its optimizer."""
    of = stable(runs)
    paired, alone, count = 0.0, 0.0, 0
    for (setting, method, optimizer, _), mine in of.items():
        for (other, dense, its, _), theirs in of.items():
            seeds = sorted(mine.keys() & theirs.keys())
            if (other, dense, its) == (setting, "dense", optimizer) and method != "dense" and len(seeds) > 1:
                ours, his = ([math.log(side[seed]["valid"]) for seed in seeds] for side in (mine, theirs))
                count += len(seeds) - 1
                paired += (len(seeds) - 1) * variance([a - b for a, b in zip(ours, his, strict=True)])
                alone += (len(seeds) - 1) * (variance(ours) + variance(his))
    return Spread(math.sqrt(paired / count), count), math.sqrt(alone / count)


def seeds_apart(runs: Iterable[Run]) -> str:
    """What ``likeness`` and ``bartlett`` say, a line each."""
    runs = list(runs)
    gaps, alone = likeness(runs)
    lines = [
        f"gaps to dense from seed to seed: {gaps.deviation:.2%} apart; {alone:.2%} if sides had nothing in common "
        f"({gaps.count} degrees)"
    ]
    tables = [(f"tables of {name}", its, SETTING) for name, its in _by_optimizer(runs).items()]
    for what, these, of in [("optimizers", runs, ("optimizer",)), *tables]:
        groups: dict[tuple[Any, ...], list[Run]] = {}
        for by_seed in stable(these).values():
            first = next(iter(by_seed.values()))
            groups.setdefault(tuple(first[key] for key in of), []).extend(by_seed.values())
        spreads = {group: spread for group, its in groups.items() if (spread := spread_of(its)) is not None}
        lines += [f"{spread.deviation:.2%} ({spread.count} degrees): {group}" for group, spread in spreads.items()]
        lines.append(f"{what} alike in truth would differ so much with probability {bartlett([*spreads.values()]):.3f}")
    return "\n".join(lines)


def gap(mine: Sequence[Run], dense: Sequence[Run], spreads: Spreads | None = None) -> Span:
    """How far the mean of runs ``mine`` (of other seeds) ends above that of ``dense``, as a share of the latter.

    ``spreads``: of seeds; of an optimizer that is not in it ± lacks the seeds."""
    level = fmean(run["valid"] for run in dense)
    ratio = fmean(run["valid"] for run in mine) / level
    seeds = 0.0
    for side in (mine, dense):
        spread = (spreads or {}).get(side[0]["optimizer"])
        if spread is not None:
            half = T95[min(spread.count, len(T95)) - 1] * spread.deviation / math.sqrt(len(side))
            seeds = math.hypot(seeds, half)
    ours, theirs = ([fmean(at) for at in zip(*(run["spans"] for run in side), strict=True)] for side in (mine, dense))
    excess = [(a - ratio * b) / level for a, b in zip(ours, theirs, strict=True)]
    half = math.hypot(seeds, NORMAL95 * block_error(excess, [1.0] * len(excess)))
    return Span(ratio - 1, ratio - 1 - half, ratio - 1 + half)


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

    def above(self, dense: Row | None, spreads: Spreads | None = None) -> Span | None:
        """None: there is no dense run, or this is one."""
        if dense is None or dense is self:
            return None
        return gap([*self.runs.values()], [*dense.runs.values()], spreads)


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
        known = max(len(by_tuned[tuned]) for tuned in alike)
        own = {tuned: set(by_seed) for tuned, by_seed in by_tuned.items() if len(by_seed) >= known}
        best = min(own, key=lambda tuned: mean(tuned, seeds=own))
        rates = sorted({tuned[0] for tuned in by_tuned})
        edge = {rates[0]: "lowest", rates[-1]: "highest"}.get(best[0], "") if rates[1:] else ""
        kept = {seed: run for seed, run in sorted(by_tuned[best].items()) if has_loss(run)}
        failed = sum(not has_loss(run) for by_seed in by_tuned.values() for run in by_seed.values())
        if kept:
            found.append(Row(setting, method, optimizer, best, len(by_tuned), kept, failed, edge))
    order = list(dict.fromkeys(row.setting for row in found))
    return sorted(found, key=lambda row: (order.index(row.setting), row.optimizer, row.method != "dense", row.loss))


def beside_dense(runs: Iterable[Run]) -> Iterator[tuple[Row, Row, Spreads]]:
    """Each method's row, dense with the same optimizer in its setting, and how far seeds lie apart."""
    runs = list(runs)
    every, spreads = rows(runs), spreads_of(runs)
    dense = {(row.setting, row.optimizer): row for row in every if row.method == "dense"}
    for row in every:
        if row.method != "dense" and (row.setting, row.optimizer) in dense:
            yield row, dense[row.setting, row.optimizer], spreads


def pairs(runs: Iterable[Run], method: str, other: str) -> list[tuple[Run, Run]]:
    """Runs of the two that are alike in all else."""
    rest = [key for key in KEY if key != "method"]
    kept = {(run["method"], *(run[key] for key in rest)): run for run in runs if has_loss(run)}
    return [
        (run, kept[other, *alike]) for (name, *alike), run in kept.items() if name == method and (other, *alike) in kept
    ]


SHORT = (("trickle", "adamw", "adamw"), ("trickle:merged", "adamw", "adamw"), ("dense", "muon", "adamw"),
         ("trickle:muon", "muon", "muon"), ("trickle:muon", "muon", "adamw"))  # fmt: skip
"""The columns of the short table: a method, its optimizer, and that of the dense run that it is held against."""
FORMER = {"trickle:merged": "trickle:merged(server_density=0.1)"}
"""What a method was by default, with 4 ranks, until 2026-11-27: cells with a star, where nothing else ran."""


def short(runs: Iterable[Run], suffix: str = "") -> str:
    """A line for each setting that has one of ``SHORT``, the most tokens per parameter first: gaps, seeds and bytes.

    ``suffix``: of the methods' names, as ``fleet.py`` writes it: " + beta2 0.99". Dense has none."""
    runs, columns = list(runs), [column for column in SHORT if not suffix or column[0] != "dense"]
    spreads, of = spreads_of(runs), {(row.setting, row.method, row.optimizer): row for row in rows(runs)}
    names = {"adamw": "dense AdamW", "muon": "dense Muon"}
    heads = [
        f"{names[optimizer] if method == 'dense' else f'`{method}`'} above {names[dense]}"
        for method, optimizer, dense in columns
    ]
    lines = [f"| tokens per parameter | model, text, ranks, batch, length | {' | '.join(heads)} |"]
    lines.append("|---:|---|" + "---:|" * len(columns))
    length = {setting: next(iter(row.runs.values()))["tokens_per_parameter"] for (setting, *_), row in of.items()}
    for setting in sorted(length, key=lambda setting: -length[setting]):
        cells = []
        for method, optimizer, dense in columns:
            now, former = (of.get((setting, f"{name}{suffix}", optimizer)) for name in (method, FORMER.get(method)))
            row = now or former
            span = None if row is None else row.above(of.get((setting, "dense", dense)), spreads)
            star = "" if now else "*"
            cells.append(
                "-" if row is None or span is None else f"{written(span)} ({len(row.runs)}; {row.share:.1%}{star})"
            )
        model, text, ranks, sequences, steps = setting
        what = f"{model} on {text}, {ranks} ranks, {sequences} sequences a step, {steps} steps"
        if set(cells) != {"-"}:
            lines.append(f"| {length[setting]:.3g} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(runs: Iterable[Run]) -> str:
    """A table for each setting, after a line that says how far seeds lie apart."""
    runs = list(runs)
    every, spreads = rows(runs), spreads_of(runs)
    settings = dict.fromkeys(row.setting for row in every)
    tables = [_table([row for row in every if row.setting == of], spreads) for of in settings]
    if not spreads:
        return "\n\n".join(tables)
    each = ", ".join(f"{spread.deviation:.2%} with {name} ({spread.count})" for name, spread in spreads.items())
    return "\n\n".join([f"Seeds lie apart (standard deviation, and degrees of freedom): {each}.", *tables])


def _table(of: Sequence[Row], spreads: Spreads) -> str:
    model, text, ranks, sequences, steps = of[0].setting
    tokens = next(iter(of[0].runs.values()))["tokens_per_parameter"]
    dense = {row.optimizer: row for row in of if row.method == "dense"}
    lines = [
        f"{model} on {text}, {ranks} ranks, {sequences} sequences a step, {steps} steps: {tokens:.3g} tokens per "
        "parameter.",
        "",
        "| method | optimizer | lr, beta1, clip, warm-up | settings run | seeds | loss | above dense AdamW | "
        "above dense Muon | all bytes |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in of:
        lr, beside, beta1, clip, warmup = row.tuned
        rate = f"{lr:g}" + (f" [{row.edge}]" if row.edge else "") + (f" ({beside:g})" if beside else "")
        gaps = {name: row.above(dense.get(name), spreads) for name in ("adamw", "muon")}
        cells = " | ".join(
            "-" if span is None else written(span, seeds={row.optimizer, name} <= spreads.keys())
            for name, span in gaps.items()
        )
        lost = f" ({row.failed} without a loss)" if row.failed else ""
        lines.append(
            f"| `{row.method}` | {row.optimizer} | {rate}, {beta1:g}, {clip:g}, {warmup:g} | {row.tried}{lost} | "
            f"{len(row.runs)} | {row.loss:.4f} | {cells} | {row.share:.2%} |"
        )
    return "\n".join(lines)
