"""The runs of ``regimes.py`` as rows: each method at its best learning rate, and how far it ends from dense.

A gap's ± is half of the 95% t-interval over the seeds that both sides have. These runs ended on 256 held-out windows,
which by themselves do not resolve 0.5%, and one seed has no ± of its own: what is to be resolved is run by
``ladder.py``. In measured.csv one seed has the ± that the seeds of all other runs of its kind have (``error_of_one``).

    python benchmarks/loss/regime_tables.py > src/thinwire/plan/measured.csv    # what plans say of loss
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, variance
from typing import Any

import ladder_tables
from thinwire.base.terminal import counted
from thinwire.lab.verdict import T95, interval

Run = dict[str, Any]
SETTING = ("regime", "model", "text", "ranks", "steps", "base")
"""What runs in one table share."""
KEY = (*SETTING, "method", "lr", "seed")
TOKENS = {"tiny": 1024, "small": 2048, "llama-tiny": 1024, "llama-small": 2048}
"""Of a step, over all ranks, by model."""
PARTNER = {"adamw": "dense", "adams": "dense --optimizer adams", "sgd": "dense"}
"""A method's dense run, by the method's optimizer. What steps by SGD is held against AdamW, as the better choice."""


@dataclass(frozen=True)
class Row:
    """One method in one setting, at the best learning rate of those run.

    The best is that of the lowest mean loss over the seeds that all of the method's learning rates have; where they
    have none in common, it is the one with the most seeds. A run that diverged or failed counts as an infinite loss.

    Attributes:
        losses: validation loss (nats per token) by seed, at ``lr``; inf: none.
        tried: mean loss by learning rate, over the seeds that all of them have, or over each one's own.
        gaps: loss above dense at dense's own best learning rate, percent, of each seed that both have; inf: none. ():
            no such run of dense, or one without a loss.
        tokens_per_parameter: that the run was trained on; None: no run has ended.
        gap_same_lr: the mean of the same against dense at ``lr``. None: no such run of dense, or one without a loss.
        share: bytes sent for compressed tensors, percent of what dense sends for them; None: no run has ended.
        share_all: bytes sent in all, percent of dense's.
        failures: what became of the runs without a loss, at any learning rate.
    """

    regime: str
    model: str
    text: str
    ranks: int
    steps: int
    base: str
    method: str
    lr: float
    losses: dict[int, float]
    tried: dict[float, float]
    gaps: tuple[float, ...]
    tokens_per_parameter: float | None
    gap_same_lr: float | None
    share: float | None
    share_all: float | None
    failures: tuple[str, ...] = ()

    @property
    def setting(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in SETTING)

    @property
    def gap(self) -> float | None:
        """The mean of ``gaps``; None: there are none."""
        return fmean(self.gaps) if self.gaps else None

    @property
    def error(self) -> float | None:
        """Half of the 95% interval of ``gap`` over its seeds, percent; None: there are not two."""
        half = interval(self.gaps).half if self.gaps and math.inf not in self.gaps else 0.0
        return half or None


def read(file: Path) -> dict[str, Run]:
    """The runs in ``file``, by key; of several with one key the last."""
    lines = file.read_text().splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines if line.strip()]
    return {json.dumps({name: run[name] for name in KEY}, sort_keys=True): run for run in found}


def rows(data: Iterable[Run]) -> list[Row]:
    """One row per setting and method: settings in order of their first run; in each dense first, then by bytes."""
    settings: dict[tuple[Any, ...], dict[str, list[Run]]] = {}
    for run in data:
        settings.setdefault(tuple(run[name] for name in SETTING), {}).setdefault(run["method"], []).append(run)
    return [row for setting, methods in settings.items() for row in _rows_of(setting, methods)]


def _rows_of(setting: tuple[Any, ...], methods: dict[str, list[Run]]) -> list[Row]:
    losses = {method: _by_rate(runs) for method, runs in methods.items()}
    found = []
    for method, runs in methods.items():
        mine, tried = losses[method], _means(losses[method])
        lr = _best(mine)
        ended = [run for run in runs if run["lr"] == lr and run.get("dense_bytes_compressed")]
        dense = losses.get(PARTNER[next((run["optimizer"] for run in runs if "optimizer" in run), "adamw")], {})
        same_lr = _gaps(mine[lr], dense.get(lr, {}))
        found.append(
            Row(
                *setting, method=method, lr=lr, losses=mine[lr], tried=tried,
                gaps=_gaps(mine[lr], dense[_best(dense)]) if dense else (),
                tokens_per_parameter=_tokens(runs),
                gap_same_lr=fmean(same_lr) if same_lr else None,
                share=_share(ended, "bytes_compressed"),
                share_all=_share(ended, "bytes"),
                failures=tuple(
                    f"lr {run['lr']:g}, seed {run['seed']}: {run['error'] or 'diverged'}"
                    for run in runs if _loss(run) == math.inf
                ),
            )
        )  # fmt: skip
    return sorted(found, key=lambda row: (not row.method.startswith("dense"), -(row.share or 0), row.method))


def _loss(run: Run) -> float:
    return math.inf if run["error"] or run.get("diverged") or run["valid"] is None else run["valid"]


def _by_rate(runs: list[Run]) -> dict[float, dict[int, float]]:
    """Learning rate -> seed -> loss, both in ascending order."""
    found: dict[float, dict[int, float]] = {}
    for run in sorted(runs, key=lambda run: (run["lr"], run["seed"])):
        found.setdefault(run["lr"], {})[run["seed"]] = _loss(run)
    return found


def _common(losses: dict[float, dict[int, float]]) -> set[int]:
    return set.intersection(*(set(by_seed) for by_seed in losses.values()))


def _means(losses: dict[float, dict[int, float]]) -> dict[float, float]:
    common = _common(losses)
    return {lr: fmean(by_seed[seed] for seed in common or by_seed) for lr, by_seed in losses.items()}


def _best(losses: dict[float, dict[int, float]]) -> float:
    if _common(losses):
        means = _means(losses)
        return min(means, key=means.__getitem__)
    return max(losses, key=lambda lr: len(losses[lr]))


def _tokens(runs: list[Run]) -> float | None:
    """Tokens per parameter of a run that has ended."""
    ended = next((run for run in runs if "parameters" in run and run["model"] in TOKENS), None)
    return None if ended is None else ended["steps"] * TOKENS[ended["model"]] / ended["parameters"]


def _gaps(mine: dict[int, float], dense: dict[int, float]) -> tuple[float, ...]:
    seeds = sorted(mine.keys() & dense.keys())
    if any(dense[seed] == math.inf for seed in seeds):
        return ()
    return tuple(100 * (mine[seed] / dense[seed] - 1) for seed in seeds)


def error_of_one(found: Iterable[Row], *regimes: str) -> float | None:
    """Half of the 95% interval of a gap of one seed, percent, from how far seeds lie apart in all rows of ``regimes``
    that have several; None: none has."""
    several = [row.gaps for row in found if row.regime in regimes and row.error is not None]
    degrees = sum(len(gaps) - 1 for gaps in several)
    if not degrees:
        return None
    squares = sum((len(gaps) - 1) * variance(gaps) for gaps in several)
    return T95[min(degrees, len(T95)) - 1] * math.sqrt(squares / degrees)


def error_of(error: float | None) -> str:
    """``" ± 1.2%"``, or that nobody knows it."""
    return " ± ?" if error is None else f" ± {error:.1f}%"


def _share(ended: list[Run], kind: str) -> float | None:
    return 100 * fmean(run[kind] / run[f"dense_{kind}"] for run in ended) if ended else None


def markdown(chosen: Iterable[Row]) -> str:
    """Tables, one for each setting: what ran, the rows, and what became of runs without a loss."""
    return "\n\n".join(_table(list(of)) for _, of in groupby(chosen, key=lambda row: row.setting))


def title(row: Row) -> str:
    """What runs in a row's table, but for the number of steps and the checkpoint that it goes on from."""
    return f"{row.regime}: `{row.model}` on {row.text}, {counted(row.ranks, 'rank')}"


def _table(of: list[Row]) -> str:
    seeds = sorted({seed for row in of for seed in row.losses})
    first = of[0]
    base = f", from the end of dense on {first.base}" if first.base else ""
    tokens = next((row.tokens_per_parameter for row in of if row.tokens_per_parameter), None)
    length = f"{first.steps} steps" + (f" ({tokens:.2g} tokens per parameter)" if tokens else "")
    what = f"{title(first)}, {length}{base}"
    lines = [
        f"{what}; seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}.",
        "",
        "| method | lr | validation loss (by seed) | gap to dense | at the same lr | bytes of compressed tensors | "
        "all bytes | other lr: mean loss |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in of:
        losses = ", ".join(_number(row.losses.get(seed), "{:.4f}") for seed in seeds if seed <= max(row.losses))
        others = ", ".join(f"{lr:g}: {_number(loss, '{:.4f}')}" for lr, loss in row.tried.items() if lr != row.lr)
        lines.append(
            f"| `{row.method}` | {row.lr:g} | {losses} | {_with_error(row)} | "
            f"{_number(row.gap_same_lr, '{:+z.2f}%')} | {_number(row.share, '{:.2f}%')} | "
            f"{_number(row.share_all, '{:.2f}%')} | {others or '-'} |"
        )
    failures = [f"* `{row.method}`, {failure}" for row in of for failure in row.failures]
    return "\n".join([*lines, *([""] if failures else []), *failures])


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else "none" if value == math.inf else form.format(value)


def _with_error(row: Row) -> str:
    text = _number(row.gap, "{:+z.2f}%")
    return text if row.gap in (None, math.inf) or row.method in PARTNER.values() else text + error_of(row.error)


DENSE = {"adamw": "AdamW", "adams": "AdamS", "sgd": "AdamW", "muon": "Muon"}
"""The optimizer of the dense run that a method is held against, by the method's."""


def measured(regimes: Iterable[Run], ladder: Iterable[Run]) -> str:
    """What a plan says of loss, as CSV: each method's gap to dense by setting, without rows that have none.

    First those of the ladder, whose dense runs were tuned and which ended on all held-out text; then those of
    ``regimes.py`` in settings that the ladder has not run. Of several runs that were gone on from, the longest counts.
    """
    regimes, found = list(regimes), [*_of_ladder(list(ladder))]
    tuned = {line[:7] for line in found}
    parameters = {run["model"]: run["parameters"] for run in regimes if "parameters" in run}
    optimizers = {run["method"]: run["optimizer"] for run in regimes if "optimizer" in run}
    every = rows(regimes)
    kinds = [("scratch", "long"), ("going-on",), ("finetune",)]
    of_one = {regime: error_of_one(every, *kind) for kind in kinds for regime in kind}
    others: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in sorted(every, key=lambda row: "long" in row.base):
        if row.gap is None or row.gap == math.inf or " --" in row.method or row.method.startswith("dense"):
            continue
        error = row.error or of_one[row.regime]
        name = (row.method, DENSE[optimizers.get(row.method, "adamw")], row.regime, row.text, row.ranks,
                parameters[row.model], row.steps)  # fmt: skip
        if name not in tuned:
            others[name] = (*name, len(row.gaps), f"{row.gap:.2f}", "nan" if error is None else f"{error:.2f}",
                            f"{row.tokens_per_parameter or 0:.2f}")  # fmt: skip
    found += others.values()
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(("method", "dense", "regime", "text", "ranks", "parameters", "steps", "seeds", "gap_percent",
                    "error_percent", "tokens_per_parameter"))  # fmt: skip
    table.writerows(found)
    return out.getvalue()


def _of_ladder(runs: list[Run]) -> Iterator[tuple[Any, ...]]:
    for row, dense, spreads in ladder_tables.beside_dense(runs):
        span = row.above(dense, spreads)
        if span is None or " + " in row.method:  # what has a name of its own is no method of the library
            continue
        run = next(iter(row.runs.values()))
        error = f"{100 * span.half:.2f}" if row.optimizer in spreads else "nan"
        yield (row.method, DENSE[row.optimizer], "scratch", run["text"], run["ranks"], run["parameters"], run["steps"],
               len(row.runs), f"{100 * span.mean:.2f}", error, f"{run['tokens_per_parameter']:.2f}")  # fmt: skip


if __name__ == "__main__":
    DATA = Path(__file__).parents[2] / "docs" / "data"
    ladder = ladder_tables.read(DATA / "ladder.jsonl").values()
    print(measured(read(DATA / "regimes.jsonl").values(), ladder), end="")
