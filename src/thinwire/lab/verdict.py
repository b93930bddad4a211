"""The verdict of a comparison in one line: each method's speed and loss against dense."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.network.ledger import settled_rounds

SILENT = "none"  # the method that exchanges nothing
DENSE = "dense"
WORSE = 0.05
"""Default limit: the share above dense's loss beyond which the verdict advises against a method (lower: stricter)."""
SAME = 0.01
"""Largest half interval of a loss that is called the same as dense's."""
WORTH = 1.1
"""Dense's step over the silent run's: below this no method can gain much."""
# The 97.5% quantile of Student's t at 1 to 30 degrees of freedom; beyond 30 the last is a little too wide.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

WINDOWS = "valid_losses.csv"
"""In a run's folder, if its program writes it: window, targets, loss."""
NORMAL95 = 1.96
BLOCKS = 128
"""Stretches of held-out text whose mean losses are compared (fewer: safer where text is alike over long stretches)."""

Run = dict[str, Any]
Pairs = Sequence[tuple[Run, Run]]
"""For each seed, a method's run and dense's."""


class Span(NamedTuple):
    """A mean over seeds with its 95% t-interval."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


def interval(values: Sequence[float]) -> Span:
    """Return the mean of one or more values with its interval, of width 0 for one value."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Span(mean, mean, mean)
    half = T95[min(len(values) - 1, len(T95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return Span(mean, mean - half, mean + half)


def read_windows(path: Path) -> dict[int, tuple[float, float]]:
    """Read a run's losses on held-out text, window -> (targets, mean loss); {}: it wrote none."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {int(row["window"]): (float(row["targets"]), float(row["loss"])) for row in csv.DictReader(file)}


def final_loss(summary: dict[str, Any]) -> float:
    """Return the loss on held-out text if there was an evaluation, otherwise the training loss."""
    return summary["train_loss"] if summary.get("valid_loss") is None else summary["valid_loss"]


def faster(pairs: Pairs) -> Span:
    """Divide dense's step by a method's (above 1: the method is faster). Of several seeds it is the geometric mean, so
    that neither of the two gains by the order, with its interval; otherwise the interval is from the quartiles of the
    steps, without bounds where a run has fewer than two rounds."""
    ratios = [dense["summary"]["step_ms"] / run["summary"]["step_ms"] for run, dense in pairs]
    if len(ratios) > 1:
        return Span(*map(math.exp, interval([math.log(ratio) for ratio in ratios])))
    (fast, slow), (dense_fast, dense_slow) = (_quartiles(run) for run in pairs[0])
    return Span(ratios[0], dense_fast / slow, dense_slow / fast if fast else math.inf)


def _quartiles(run: Run) -> tuple[float, float]:
    """Return the quartiles of a run's steps, or of their means over whole rounds; 0 and infinity: they are too few."""
    times, length = [row["step_ms"] for row in run["rows"]], round_steps(run)
    settled = settled_rounds(times, length)  # as the median in summary.json
    if len(settled) < 2:
        return (0.0, math.inf) if length > 1 else (settled[0], settled[0])
    cuts = statistics.quantiles(settled, n=4)
    return cuts[0], cuts[-1]


def round_steps(run: Run) -> int:
    """Return how many steps a round of a run's method has; 1: its steps are alike."""
    return int(run["summary"].get("round_steps", 1))


def above(pairs: Pairs) -> Span:
    """Return how far a method's final loss is above dense's, as a share of dense's, with its 95% interval.

    The interval is that of the held-out text, paired window by window, and of the seeds, if there are several, as the
    root of the sum of their squares. Without windows (and of one seed) it has no width.
    """
    seeds = interval([final_loss(run["summary"]) / final_loss(dense["summary"]) - 1 for run, dense in pairs])
    half = math.hypot(seeds.half, NORMAL95 * (text_error(pairs) or 0.0))
    return Span(seeds.mean, seeds.mean - half, seeds.mean + half)


def text_error(pairs: Pairs) -> float | None:
    """Return the standard error of ``above`` from the choice of the held-out text; None: it is not known.

    The differences of both runs on the same windows are averaged over seeds and over ``BLOCKS`` stretches of the text,
    as neighbours are alike; what these means scatter around their own mean says how far that is to be trusted.
    """
    common = set.intersection(*(set(seed_run.get("windows", ())) for pair in pairs for seed_run in pair))
    if len(common) < 2:
        return None
    order = sorted(common)
    excess, weights = [0.0] * len(order), [0.0] * len(order)
    for run, dense in pairs:
        losses, base = run["windows"], dense["windows"]
        total = sum(base[window][0] for window in order)
        level = sum(math.prod(base[window]) for window in order) / total
        ratio = sum(losses[window][0] * losses[window][1] for window in order) / total / level
        for index, window in enumerate(order):
            targets, loss = base[window]
            excess[index] += targets * (losses[window][1] - ratio * loss) / level / len(pairs)
            weights[index] = targets
    return block_error(excess, weights)


def block_error(excess: Sequence[float], weights: Sequence[float]) -> float:
    """Return the standard error of sum(excess) / sum(weights), where the sum is 0, from up to ``BLOCKS`` stretches."""
    count = min(BLOCKS, len(excess))
    cuts = [len(excess) * number // count for number in range(count + 1)]
    sums = [sum(excess[begin:end]) for begin, end in pairwise(cuts)]
    return math.sqrt(count / (count - 1) * sum(value * value for value in sums)) / sum(weights)


def worse(report: dict[str, Any], limit: float) -> list[str]:
    """List the methods whose loss is more than ``limit`` above dense's, each with its percentage."""
    gaps = {run["method"]: run["loss_gap"] for run in report["runs"] if run["loss_gap"] and run["method"] != SILENT}
    return [f"{method} {percent(gap.mean)}" for method, gap in gaps.items() if gap.mean > limit]


def percent(share: float) -> str:
    """Write ``0.0031`` as ``+0.3%``."""
    return f"{100 * share:+.0f}%" if abs(share) >= 0.1 else f"{100 * share:+z.1f}%"


def shown(gap: Span) -> str:
    """Write a share of dense's loss with its interval: ``+0.3% ± 0.1%``."""
    return percent(gap.mean) + (f" ± {gap.half:.1%}" if gap.half else "")


def line(report: dict[str, Any]) -> str:
    """Sum up ``report`` in one line, after ``compare.measure``."""
    runs = {run["method"]: run for run in report["runs"]}
    compared = [run for run in report["runs"] if run["method"] not in (SILENT, DENSE) and not run["failed"]]
    failed = [f"{run['method']} failed: {run['failed']}" for run in report["runs"] if run["failed"]]
    dense = runs.get(DENSE)
    if dense is None or dense["failed"]:
        reason = "failed" if dense else "is not among the methods"
        return "; ".join([f"no verdict: dense, which the others are measured against, {reason}", *failed])
    limit = WORSE if report["fail_above"] is None else report["fail_above"]
    seeds = len(dense["parts"])
    good: list[str] = []
    bad: list[str] = []
    for run in compared:
        speed, gap = run["faster"], run["loss_gap"]
        against = [f"loss {shown(gap)}"] if gap.low > limit else []
        if speed.high < 1:
            against.append(f"slower than dense ({speed.mean:.2f}x)")
        if against:
            bad.append(f"do not use {run['method']} here: {' and '.join(against)}")
            continue
        than = "" if any("than dense" in words for words in good) else " than dense"
        if math.isinf(speed.high):
            pace = f"{speed.mean:.2f}x dense's speed in too few rounds to tell"
        elif not runs[SILENT]["failed"] and speed.low > WORTH * runs[SILENT]["faster"].high:
            pace = "its speed is not known (it took less time than the run without communication: a busy machine)"
        elif speed.low > 1:
            pace = f"{speed.mean:.1f}x faster{than}"
        elif 1 / WORTH < speed.low <= speed.high < WORTH:
            pace = f"as fast as dense ({speed.mean:.2f}x)"
        else:
            pace = f"speed not told apart from dense's ({speed.mean:.2f}x, {speed.low:.2f} to {speed.high:.2f})"
        good.append(f"{run['method']}: {pace}, {_loss_words(gap, seeds)}")
    words = [*_ceiling(runs[SILENT]), *good, *bad, *failed] or ["dense alone was run"]
    if good or bad:
        words.append(f"losses are after {length(report, dense)}" + ", of one seed" * (seeds == 1))
    return "; ".join(words)


def length(report: dict[str, Any], run: Run) -> str:
    """Write how long the runs were: steps and, if the program says it, tokens per parameter."""
    tokens = run["summary"].get("tokens_per_parameter")
    return f"{report['steps']} steps" + (f" ({tokens:.2g} tokens per parameter)" if tokens else "")


def _ceiling(silent: Run) -> list[str]:
    speed = silent["faster"]
    if silent["failed"] or speed.mean >= WORTH:
        return []
    if speed.mean <= 1:
        return ["compression is not worth it here: dense is as fast as the run without communication"]
    return [f"compression is not worth it here: without any communication a step is only {speed.mean:.2f}x faster"]


def _loss_words(gap: Span, seeds: int) -> str:
    has_interval = gap.half > 0 or seeds > 1
    if not has_interval or not gap.low <= 0 <= gap.high:
        return f"loss {shown(gap)}"
    if gap.half <= SAME:
        return f"same loss ({shown(gap)})"
    return f"loss not told apart from dense's ({shown(gap)})"


def reached(run: Run, dense: Run) -> dict[str, Any] | None:
    """Return the first row whose smoothed training loss is at or below dense's at the end; None if there is none."""
    targets = _smooth(dense["rows"])[-1:]
    return next((row for row in _smooth(run["rows"]) if targets and row["loss"] <= targets[0]["loss"]), None)


def _smooth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average each row's loss over the steps up to it that were not skipped, as many as a tenth of the run."""
    width = max(1, len(rows) // 10)
    rows = [row for row in rows if math.isfinite(row["loss"]) and not row.get("skipped")]
    losses = [row["loss"] for row in rows]
    means = [statistics.fmean(losses[end - width : end]) for end in range(width, len(rows) + 1)]
    return [row | {"loss": mean} for row, mean in zip(rows[width - 1 :], means, strict=True)]
