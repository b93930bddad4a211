"""The measured loss of a method against dense, in the runs nearest to a plan's method. Nothing is predicted.

``benchmarks/loss/regime_tables.py`` makes ``measured.csv`` from docs/data/ladder.jsonl and regimes.jsonl. What these
runs say of longer runs and larger models, ``benchmarks/loss/gap_law.py`` asks them: too little to be said here.
"""

from __future__ import annotations

import csv
import functools
import math
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import get_type_hints

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import own_knobs_of
from thinwire.base.terminal import counted
from thinwire.core.method import Method
from thinwire.methods import resolve

REGIMES = {"scratch": "from scratch", "long": "from scratch", "going-on": "going on", "finetune": "fine-tuning"}


@dataclass(frozen=True)
class MeasuredLoss:
    """The loss of one method in one setting, each side at its best learning rate.

    Attributes:
        method: with its knobs. regime: "scratch", "long", "going-on" or "finetune". ranks: number of ranks.
        parameters: number in the model. gap_percent: loss above dense's (negative: below), mean over ``seeds`` runs.
        error_percent: half of the 95% interval of that. Of a tuned run on all held-out text: of the text and of seeds,
            whose spread is that of all settings with its optimizer; of others: over the seeds, and of one seed from
            the spread that the seeds of other such runs have. NaN: not known.
        tokens_per_parameter: that the run was trained on. dense: the optimizer of the dense run, "AdamW", "AdamS" or
            "Muon".
    """

    method: str
    regime: str
    text: str
    ranks: int
    parameters: int
    steps: int
    seeds: int
    gap_percent: float
    error_percent: float = math.nan
    tokens_per_parameter: float = 0.0
    dense: str = "AdamW"

    @property
    def highest_percent(self) -> float:
        """The upper end of the 95% interval of the gap; NaN: not known."""
        return self.gap_percent + self.error_percent

    def __str__(self) -> str:
        seeds = counted(self.seeds, "seed")
        error = "" if math.isnan(self.error_percent) else f" ± {self.error_percent:.1f}%"
        length = f" ({self.tokens_per_parameter:.2g} tokens per parameter)" if self.tokens_per_parameter else ""
        return (
            f"{self.gap_percent:+.1f}%{error} ({self.method} and dense {self.dense}, {self.ranks} ranks, "
            f"{self.parameters / 1000:.0f}k parameters, {self.text}, {self.steps} steps{length} "
            f"{REGIMES[self.regime]}, {seeds})"
        )


@functools.cache
def read_measured() -> tuple[MeasuredLoss, ...]:
    text = files("thinwire.plan").joinpath("measured.csv").read_text()
    types = get_type_hints(MeasuredLoss)
    return tuple(
        MeasuredLoss(**{name: types[name](value) for name, value in row.items()})
        for row in csv.DictReader(text.splitlines())
    )


def nearest_measured(method: Method, ranks: int, count: int = 2) -> list[MeasuredLoss]:
    """Return up to ``count`` rows of ``method`` with the fewest different knobs, each of another text: from scratch
    first, beside AdamW where there is such a run, and of these the one with the most tokens per parameter."""
    knobs = own_knobs_of(method)  # without knobs that choose parameters, which suit the model that was measured
    differing: dict[MeasuredLoss, int] = {}
    for row in read_measured():
        with suppress(ThinwireError):  # this version lacks the method or the knob
            measured = resolve(row.method)
            if measured.name == method.name:
                differing[row] = sum(getattr(measured, knob) != getattr(method, knob) for knob in knobs)

    def distance(row: MeasuredLoss) -> tuple[bool, bool, bool, float, int, int]:
        far = max(row.ranks, ranks) // max(min(row.ranks, ranks), 1)
        length = row.tokens_per_parameter
        later = REGIMES[row.regime] != REGIMES["scratch"]
        return later, far > 2, row.dense == "Muon", -length, -row.parameters, -row.seeds

    fewest = min(differing.values(), default=0)
    nearest: dict[str, MeasuredLoss] = {}
    for row in sorted((row for row in differing if differing[row] == fewest), key=distance):
        nearest.setdefault(row.text, row)
    return list(nearest.values())[:count]


def describe_measured(method: Method, ranks: int) -> str:
    """Write a plan's line about the longest runs of such settings, or that there are none."""
    rows = nearest_measured(method, ranks)
    if not rows:
        return f"loss: no run of {method.name} has been compared with dense; compare one of your own"
    return "loss beside dense's in the longest measured runs of such settings: " + "; ".join(map(str, rows))
