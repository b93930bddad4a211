"""Laws of the gap: what the ladder's runs say of runs that were not made, and how far that can be trusted.

    python benchmarks/loss/gap_law.py                                  each law, its test on runs left out, forecasts
    python benchmarks/loss/gap_law.py --at 3.2M 3257856 1563 2048      of a run: name, parameters, steps, tokens a step

A point is a method's gap to dense in one setting of ``ladder_tables.py``, each side at its best rate; its standard
error is of the held-out text and of seeds. Each of ``FORMS`` is
fitted by weighted least squares; what the points lie apart beyond their errors is a spread of settings (the least with
which chi squared is its degrees of freedom). Then each model, text and batch is left out with all its lengths, which
share seeds, and the law of the others is asked for them.

Of a size beyond ``REACH`` times those that were run only forms speak that have the size in them, of such a batch those
that have the batch, since the others take for granted that it does not matter. A forecast is the union of the 95%
intervals of those among them whose error on what was left out is at most ``WORSE`` times the least of all forms, and of
all of them if none is: forms differ most where no run was made. A forecast that is uncertain by more than ``USEFUL`` on
either side says nothing.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import ladder_tables
from thinwire.lab.verdict import NORMAL95, T95, Span

DATA = Path(__file__).parents[2] / "docs" / "data" / "ladder.jsonl"
PAIRS = (
    ("trickle", "adamw"), ("trickle + beta2 0.99", "adamw"), ("trickle:merged(server_density=0.1)", "adamw"),
    ("trickle:muon", "muon"), ("trickle:muon + beta2 0.99", "muon"),
)  # fmt: skip
"""A method, and the optimizer that it and dense have."""
WORSE = 1.25
USEFUL = 0.01


class Setting(NamedTuple):
    """A run's size: parameters, steps, tokens of a step."""

    parameters: float
    steps: float
    tokens: float

    @property
    def length(self) -> float:
        """Tokens per parameter."""
        return self.steps * self.tokens / self.parameters


class Form(NamedTuple):
    """terms: of a setting, (c,). of: the quantities that are in them, "parameters" or "tokens" (a step's)."""

    terms: Callable[[Setting], list[float]]
    of: tuple[str, ...] = ()


def ln(value: float, usual: float) -> float:
    """0 at a usual value, so that a stands for a gap that was measured."""
    return math.log(value / usual)


FORMS = {
    "a": Form(lambda at: [1.0]),
    "a + b / steps": Form(lambda at: [1.0, 1e3 / at.steps]),
    "a + b ln(steps)": Form(lambda at: [1.0, ln(at.steps, 2400)]),
    "a + b ln(tokens per parameter)": Form(lambda at: [1.0, ln(at.length, 20)]),
    "a + b / steps + c ln(batch)": Form(lambda at: [1.0, 1e3 / at.steps, ln(at.tokens, 1024)], ("tokens",)),
    "a + b ln(tokens per parameter) + c ln(size)": Form(
        lambda at: [1.0, ln(at.length, 20), ln(at.parameters, 120e3)], ("parameters",)
    ),
    "a + b ln(steps) + c ln(size) + d ln(batch)": Form(
        lambda at: [1.0, ln(at.steps, 2400), ln(at.parameters, 120e3), ln(at.tokens, 1024)], ("parameters", "tokens")
    ),
}
REACH = 4
"""Times a quantity of the runs to which a form that lacks it is believed, as it was asked about in the test."""
RANKS = 4
"""Of the runs that a law is fitted to: no form has their number, and 16 with a sequence each are another matter."""
TARGETS = {
    "3.2M, 20 tokens per parameter": Setting(3257856, 31815, 2048),
    "100M, 20 tokens per parameter": Setting(1e8, 2e9 / 2**18, 2**18),
    "1B, 20 tokens per parameter": Setting(1e9, 2e10 / 2**20, 2**20),
}


@dataclass(frozen=True)
class Point:
    """A gap, as a share of dense's loss, and its standard error. group: what its other lengths share."""

    group: tuple[Any, ...]
    at: Setting
    gap: float
    error: float
    seeds: int


def points_of(runs: Iterable[ladder_tables.Run], method: str, optimizer: str) -> list[Point]:
    found = []
    for row, dense, spreads in ladder_tables.beside_dense(runs):
        span = row.above(dense, spreads)
        if span is None or (row.method, row.optimizer) != (method, optimizer):
            continue
        run = next(iter(row.runs.values()))
        if run["ranks"] != RANKS:
            continue
        *group, steps = row.setting
        length = round(run["tokens_per_parameter"] * run["parameters"] / steps / run["sequences"])  # of a sequence
        at = Setting(run["parameters"], steps, length * run["sequences"])
        found.append(Point(tuple(group), at, span.mean, span.half / NORMAL95, len(row.runs)))
    return found


@dataclass(frozen=True)
class Law:
    """A form that is fitted.

    Attributes:
        values: (c,) its coefficients. covariance: (c, c). spread: of settings, beyond the points' errors. left: degrees
            of freedom.
    """

    form: str
    values: np.ndarray
    covariance: np.ndarray
    spread: float
    left: int

    def forecast(self, at: Setting, error: float = 0.0) -> Span:
        """The gap of a setting, with its 95% interval. ``error``: the standard error of what it is held against."""
        terms = np.array(FORMS[self.form].terms(at))
        mean = float(terms @ self.values)
        deviation = math.sqrt(float(terms @ self.covariance @ terms) + self.spread**2 + error**2)
        half = T95[min(self.left, len(T95)) - 1] * deviation
        return Span(mean, mean - half, mean + half)


def fit(points: Sequence[Point], form: str) -> Law | None:
    """None: there are too few points, or they do not tell the coefficients apart."""
    terms = np.array([FORMS[form].terms(point.at) for point in points])
    left = len(points) - terms.shape[1] if len(points) else 0
    if left < 1 or np.linalg.matrix_rank(terms) < terms.shape[1]:
        return None
    gaps, errors = (np.array([getattr(point, name) for point in points]) for name in ("gap", "error"))

    def solve(spread: float) -> tuple[np.ndarray, np.ndarray, float]:
        weights = 1 / (errors**2 + spread**2)
        covariance = np.linalg.inv(terms.T @ (weights[:, None] * terms))
        values = covariance @ (terms.T @ (weights * gaps))
        return values, covariance, float(weights @ (gaps - terms @ values) ** 2)

    low, high = 0.0, float(np.abs(gaps).max()) + 1e-6
    if solve(low)[2] <= left:
        high = low
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if solve(middle)[2] > left else (low, middle)
    values, covariance, _ = solve(high)
    return Law(form, values, covariance, high, left)


@dataclass(frozen=True)
class Tested:
    """A law, and what it said of each point whose group it was not fitted on. missed: how often its interval, with the
    point's error, did not hold the point."""

    law: Law
    off: float
    asked: int
    missed: int


def test(points: Sequence[Point], form: str) -> Tested | None:
    law = fit(points, form)
    residuals, missed = [], 0
    for group in dict.fromkeys(point.group for point in points):
        rest = fit([point for point in points if point.group != group], form)
        if law is None or rest is None:
            return None
        for point in points:
            if point.group == group:
                said = rest.forecast(point.at, point.error)
                residuals.append(point.gap - said.mean)
                missed += not said.low <= point.gap <= said.high
    return None if law is None else Tested(law, math.sqrt(float(np.mean(np.square(residuals)))), len(residuals), missed)


@dataclass
class Study:
    """All forms of one method. kept: those that its forecasts are made of."""

    points: list[Point]
    tested: dict[str, Tested] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tested = {form: found for form in FORMS if (found := test(self.points, form)) is not None}

    def asked(self, at: Setting) -> list[Tested]:
        """The forms that may speak of ``at``."""
        beyond = {name for name in ("parameters", "tokens") if self.is_beyond(name, getattr(at, name))}
        return [one for form, one in self.tested.items() if beyond <= set(FORMS[form].of)]

    def kept(self, at: Setting) -> list[Tested]:
        """Those of them that a forecast is made of."""
        least = min((one.off for one in self.tested.values()), default=0.0)
        return [one for one in self.asked(at) if one.off <= WORSE * least] or self.asked(at)

    def is_beyond(self, name: str, value: float) -> bool:
        run = [getattr(point.at, name) for point in self.points]
        return not min(run) / REACH <= value <= max(run) * REACH

    def forecast(self, at: Setting) -> Span | None:
        """From the lowest to the highest gap that a form kept holds possible, and their middle. None: there is none."""
        spans = [one.law.forecast(at) for one in self.kept(at)]
        if not spans:
            return None
        low, high = min(span.low for span in spans), max(span.high for span in spans)
        return Span((low + high) / 2, low, high)


def written(span: Span) -> str:
    return f"{100 * span.low:+.1f}% to {100 * span.high:+.1f}%"


def says(span: Span | None) -> str:
    """The interval, or that it says nothing."""
    if span is None:
        return "nothing"
    return written(span) if span.half <= USEFUL else f"nothing ({written(span)})"


def markdown(runs: Iterable[ladder_tables.Run], targets: dict[str, Setting] = TARGETS) -> str:
    """For each method its forms, how far each was off on what was left out, and what it says; "-": it may not."""
    runs = list(runs)
    names = " | ".join(targets)
    lines = [
        f"| method | law of the gap | a, b, c, d | off on what was left out | {names} |",
        "|---|---|---|---:|" + "---:|" * len(targets),
    ]
    for method, optimizer in PAIRS:
        study = Study(points_of(runs, method, optimizer))
        of = f"`{method}`, {len(study.points)} settings"
        for form, one in study.tested.items():
            values = ", ".join(f"{100 * value:+.2f}" for value in one.law.values)
            spans = " | ".join(
                written(one.law.forecast(at)) if one in study.asked(at) else "-" for at in targets.values()
            )
            off = f"{100 * one.off:.2f}%" + (f", {one.missed} of {one.asked} missed" if one.missed else "")
            lines.append(f"| {of} | {form} | {values} | {off} | {spans} |")
        spans = " | ".join(f"**{says(study.forecast(at))}**" for at in targets.values())
        lines.append(f"| {of} | **the forecast** | | | {spans} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--at", nargs=4, metavar=("NAME", "PARAMETERS", "STEPS", "TOKENS"), action="append")
    args = parser.parse_args()
    targets = {name: Setting(*map(float, sizes)) for name, *sizes in args.at or ()} or TARGETS
    print(markdown(ladder_tables.read(args.data).values(), targets))


if __name__ == "__main__":
    main()
