"""What the experiments of all papers share: the command, their tables and pictures, and the headline on one network.

    thinwire paper                                   # all papers and their experiments
    thinwire paper radius table-2 --corpora DIR      # one experiment: its table beside the paper's, and a picture
    thinwire paper radius headline                   # its speedup, at its own ratio of communication to computing

A paper is a module beside this one (``PAPERS``) with a :class:`Paper`, whose experiments are functions of
:class:`Settings` that return a :class:`Result`. What a paper prints is in ``published/NAME.csv``, row by row with the
table or figure it stands in, and nowhere else.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.base.errors import ThinwireError
from thinwire.base.options import read_options
from thinwire.base.terminal import columns, note, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
PAPERS = tuple(name for name in ("radius", "scape", "tagc", "separate", "sdp4bit") if (HERE / f"{name}.py").exists())
PANELS = 3
"""Most pictures of one experiment, side by side."""


@dataclass
class Settings:
    """Repeat an experiment of a paper at a reduced size, and write its table (table.md, table.csv) and its picture."""

    corpora: Path | None = None
    """Folder of the texts to train on: peps-train.txt.xz, peps-valid.txt.xz, wikitext2-test.txt.xz and
    wikitext2-valid.txt.xz. Default: Python's standard library, whose losses compare with nobody else's."""
    out: Path = Path("runs/papers")
    """Folder of the results. Training runs that are in it are not repeated."""
    steps: int | None = None
    """Optimizer steps of every run (more: slower, and nearer to the paper). Default: the experiment's own."""
    seeds: int = 1
    """Runs of each method that trains, with the seeds 0, 1, ..."""
    dry: bool = False
    """Two steps of every training run and nothing on the network: to see that an experiment runs. Its figures say
    nothing."""

    @property
    def flags(self) -> str:
        """The options that change results, as typed."""
        chosen = {
            "corpora": self.corpora and "DIR",
            "steps": self.steps,
            "seeds": self.seeds if self.seeds > 1 else None,
        }
        words = [f" --{name} {value}" for name, value in chosen.items() if value] + [" --dry"] * self.dry
        return "".join(words)

    def length(self, steps: int) -> int:
        """Return the optimizer steps of a run that has ``steps`` of them if nobody asks for others."""
        return 2 if self.dry else self.steps or steps


@dataclass(frozen=True)
class Claim:
    """What the paper claims. ``reached``: by what was measured here; None: it was not measured."""

    text: str
    reached: bool | None

    def __str__(self) -> str:
        return (
            f"{'not measured' if self.reached is None else 'reached' if self.reached else 'NOT REACHED'}: {self.text}"
        )


@dataclass
class Result:
    """What an experiment gives.

    Attributes:
        rows: of the table; the first row's keys are its columns. None: neither measured nor printed.
        differs: sentences on what differs from the paper's set-up.
        panels: functions that draw on one pair of axes each, at most ``PANELS``, at most 8 curves to one.
    """

    rows: list[dict[str, Any]]
    differs: Sequence[str]
    claims: Sequence[Claim] = ()
    panels: Sequence[Callable[[Axes], None]] = ()


@dataclass(frozen=True)
class Experiment:
    """One table or figure. ``minutes``: about how long it takes on two cores."""

    name: str
    about: str
    minutes: float
    run: Callable[[Settings], Result]


@dataclass
class Paper:
    """A paper and its experiments. ``name``: of its module and of its figures."""

    name: str
    title: str
    experiments: dict[str, Experiment] = field(default_factory=dict)

    def experiment(self, name: str, *, minutes: float) -> Callable[[Callable[[Settings], Result]], Callable]:
        """Decorate the function of an experiment; the first line of its docstring describes it."""

        def add(run: Callable[[Settings], Result]) -> Callable[[Settings], Result]:
            about = (inspect.getdoc(run) or "").partition("\n")[0].rstrip(".")
            self.experiments[name] = Experiment(name, about, minutes, run)
            return run

        return add


@dataclass(frozen=True)
class Published:
    """The figures that a paper prints: (table or figure, row, quantity) -> value."""

    values: dict[tuple[str, str, str], float]

    @classmethod
    def read(cls, paper: str) -> Published:
        with (HERE / "published" / f"{paper}.csv").open(newline="") as file:
            return cls(
                {(row["source"], row["row"], row["quantity"]): float(row["value"]) for row in csv.DictReader(file)}
            )

    def __call__(self, source: str, row: str, quantity: str) -> float:
        """Return a figure that is in the file."""
        return self.values[source, row, quantity]

    def get(self, source: str, row: str, quantity: str) -> float | None:
        """Return a figure, or None if the paper does not print it."""
        return self.values.get((source, row, quantity))


def main(argv: list[str]) -> int:
    """Run ``thinwire paper ...``. Return the exit status: 0, also where a claim is not reached."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: thinwire paper PAPER EXPERIMENT [options]\n")
        say("Repeat an experiment of a paper on this machine, beside the paper's own figures.\n", indent="")
        for name in PAPERS:
            say(listed(load(name)), indent=" " * 22)
        print("thinwire paper PAPER EXPERIMENT --help: the options.")
        return 0
    paper = load(argv[0])
    if len(argv) == 1 or argv[1] in ("-h", "--help"):
        print(f"usage: thinwire paper {paper.name} EXPERIMENT [options]\n")
        say(listed(paper), indent=" " * 22)
        return 0
    if argv[1] not in paper.experiments:
        raise ThinwireError(f"{paper.name} has no experiment '{argv[1]}'; there are: {', '.join(paper.experiments)}")
    settings = read_options(Settings, argv[2:], f"thinwire paper {paper.name} {argv[1]}")
    if settings.seeds < 1 or (settings.steps is not None and settings.steps < 1):
        raise ThinwireError("--seeds and --steps are 1 or more")
    return perform(paper, paper.experiments[argv[1]], settings)


def load(name: str) -> Paper:
    """Return the paper ``name``."""
    if name not in PAPERS:
        raise ThinwireError(f"unknown paper '{name}'; there are: {', '.join(PAPERS)}")
    return importlib.import_module(name).PAPER


def listed(paper: Paper) -> str:
    """List the experiments of ``paper``, with about how long each takes."""
    lines = [f"{paper.name}: {paper.title}"]
    for experiment in paper.experiments.values():
        minutes = f"{experiment.minutes:g} min" if experiment.minutes >= 1 else "seconds"
        lines.append(f"  {experiment.name:<12}{minutes:>8}  {experiment.about}")
    return "\n".join([*lines, ""])


def perform(paper: Paper, experiment: Experiment, settings: Settings) -> int:
    """Run one experiment, print it, and write its table and its picture."""
    note(f"{paper.name} {experiment.name}: about {experiment.minutes:g} min on two cores, with a line for each run")
    result = experiment.run(settings)
    out = settings.out / paper.name / experiment.name
    out.mkdir(parents=True, exist_ok=True)
    claims = [f"* {Claim(claim.text, None) if settings.dry else claim}" for claim in result.claims]
    differs = [f"* {sentence}" for sentence in result.differs]
    command = f"thinwire paper {paper.name} {experiment.name}{settings.flags}"
    text = "\n".join([
        f"# {paper.title}, {experiment.name}: {experiment.about}", "", f"`{command}`", "", *markdown(result.rows), "",
        *(["The paper's claims:", "", *claims, ""] if claims else []), "What differs from the paper:", "", *differs,
    ])  # fmt: skip
    if settings.dry:
        text += "\n* A dry pass of two steps: the figures say nothing."
    (out / "table.md").write_text(text + "\n")
    with (out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(result.rows[0]))
        writer.writeheader()
        writer.writerows(result.rows)
    draw(result, out / "picture.svg", f"{paper.title}, {experiment.name}")
    width = columns()
    if width is not None and any(len(line) > width for line in markdown(result.rows)):
        text = text.replace("\n".join(markdown(result.rows)), "\n\n".join(map(record, result.rows)))
    say(f"{text}\n\n{out}: table.md, table.csv, picture.svg")
    return 0


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Write ``rows`` as a table, numbers to the right."""
    columns = list(rows[0])
    right = {column for column in columns if all(not isinstance(row[column], str) for row in rows)}
    cells = [[column for column in columns], *([number(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        padded = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        )
        lines.append(f"| {' | '.join(padded)} |")
    rule = "|".join(
        "-" * (width + 1) + (":" if column in right else "-") for width, column in zip(widths, columns, strict=True)
    )
    return [lines[0], f"|{rule}|", *lines[1:]]


def record(row: dict[str, Any]) -> str:
    """Write a row as lines, for a terminal that the table does not fit on."""
    (_, name), *cells = row.items()
    return "\n".join([f"{name}:", *(f"  {number(value):>10}  {column}" for column, value in cells)])


def number(value: Any) -> str:
    """Write a cell: four digits of a number, ``-`` for what there is not."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "diverged"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def draw(result: Result, path: Path, title: str) -> None:
    """Draw the panels of ``result`` beside each other."""
    import matplotlib.pyplot as plt

    from thinwire.lab import plots

    with plt.rc_context(plots.STYLE):
        count = len(result.panels)
        figure, grid = plt.subplots(1, count, figsize=(8 if count == 1 else 6.5 * count, 4.8), squeeze=False)
        for axes, panel in zip(grid[0], result.panels, strict=True):
            panel(axes)
        figure.suptitle(title, x=0.01, ha="left")
        figure.tight_layout()
        plots.save(figure, path)


def curves(
    lines: dict[str, Sequence[tuple[float, float]]], x: str, y: str, title: str = "", *, log: bool = False
) -> Callable[[Axes], None]:
    """Return a panel with a curve of (x, y) pairs for each label, 8 at most. ``log``: both axes are logarithmic."""
    if len(lines) > 8:
        raise ValueError(f"{len(lines)} curves in one panel: nobody can tell them apart")

    def panel(axes: Axes) -> None:
        for label, pairs in lines.items():
            axes.plot(*zip(*pairs, strict=True), marker=".", label=label, linestyle="--" if "paper" in label else "-")
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.legend(frameon=False, fontsize=9)

    return panel


def bars(
    rows: Sequence[dict[str, Any]], label: str, columns: Sequence[str], y: str, title: str = ""
) -> Callable[[Axes], None]:
    """Return a panel with a group of bars for each row, one bar for each of ``columns`` ("... (paper)": paler)."""

    def panel(axes: Axes) -> None:
        width = 0.8 / len(columns)
        for index, column in enumerate(columns):
            heights = [row[column] if _finite(row[column]) else 0.0 for row in rows]
            left = [place + index * width for place in range(len(rows))]
            bar = axes.bar(left, heights, width, label=column, alpha=0.45 if "paper" in column else 1.0)
            texts = [number(row[column]) for row in rows]
            axes.bar_label(bar, texts, fontsize=7, rotation=90 if len(rows) * len(columns) > 8 else 0, padding=2)
        middle = 0.4 - width / 2
        axes.set_xticks([place + middle for place in range(len(rows))], [str(row[label]) for row in rows], fontsize=8)
        if len(rows) > 3:
            axes.tick_params(axis="x", rotation=20)
        axes.set(ylabel=y, title=title)
        axes.margins(y=0.2)
        axes.legend(frameon=False, fontsize=9)

    return panel


def in_proportion(rank: int, paper_width: int, width: int) -> int:
    """Return the rank that is to ``width`` what ``rank`` is to ``paper_width``."""
    return max(round(rank * width / paper_width), 1)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@dataclass(frozen=True)
class Headline:
    """A paper's speedup.

    Attributes:
        method, dense: as ``thinwire compare`` takes them, with flags of ``thinwire train`` behind.
        dense_ms, none_ms: the paper's step with the dense exchange, and what it would be without one.
        speedup: dense's step over the method's, as the paper claims it.
        derived: how ``none_ms`` follows from what the paper prints, and where that stands.
    """

    method: str
    dense_ms: float
    none_ms: float
    speedup: float
    derived: str
    dense: str = "dense"

    @property
    def ratio(self) -> float:
        """The time that the dense exchange adds to a step, over the step without it."""
        return self.dense_ms / self.none_ms - 1

    def find_rate(self, settings: Settings, name: str, guess_mbit: float = 500.0, **lab: Any) -> float:
        """Return the link's rate, in Mbit/s, at which dense's exchange adds ``ratio`` to a step (dry: the guess)."""
        from measures import compared

        rate, tried = guess_mbit, list[tuple[float, float]]()
        settings = replace(settings, steps=min(settings.steps or TRIAL_STEPS, TRIAL_STEPS))
        for trial in range(TRIALS):
            report = compared(settings, f"{name}-link-{trial}", [self.dense], f"{rate:.0f}mbit", TRIAL_STEPS, **lab)
            if report is None:
                break
            tried.append((rate, ratio_of(report)))
            if abs(tried[-1][1] / self.ratio - 1) <= CLOSE:
                break
            rate = next_rate(tried, self.ratio)
        return rate


CLOSE, NEAR = 0.05, 0.1
"""How near the ratio of communication to computing is to the paper's, relatively: when the search ends, and at most in
the comparison, which runs later."""
TRIALS, TRIAL_STEPS = 4, 8
"""Most short comparisons that look for the link's rate, and the steps of each."""


def headline(
    settings: Settings, paper: str, claim: Headline, *, steps: int = 30, guess_mbit: float = 500.0, **lab: Any
) -> Result:
    """Compare the method and dense on a link where dense's exchange costs as much of a step as it does in the paper.

    First ``none`` and dense run for a few steps on a guessed link; what dense waits for goes with 1 / rate, so the next
    rate is the last one times the ratio of the two waits, until dense's wait is the paper's. ``lab``: arguments of
    ``compared``.
    """
    from measures import compared

    rate = claim.find_rate(settings, paper, guess_mbit, **lab)
    report = compared(settings, f"{paper}-headline", [claim.dense, claim.method], f"{rate:.0f}mbit", steps, **lab)
    return judged(claim, report, rate)


def ratio_of(report: dict[str, Any]) -> float:
    """Return the time that dense's exchange adds to a step, over the step of `none`."""
    silent, dense = (run["summary"]["step_ms"] for run in report["runs"][:2])
    return dense / silent - 1


def next_rate(tried: Sequence[tuple[float, float]], ratio: float) -> float:
    """Return the rate at which the wait should be ``ratio``.

    The wait is taken for a line over 1 / rate: through the last two trials, or through 0 after the first one.
    """
    (last, waited) = tried[-1]
    if len(tried) == 1 or math.isclose(waited, tried[-2][1]):
        return last * max(waited, 0.01) / ratio
    (before, waited_before) = tried[-2]
    slope = (waited - waited_before) / (1 / last - 1 / before)
    inverse = 1 / last + (ratio - waited) / slope
    return 1 / inverse if slope > 0 and inverse > 0 else last * max(waited, 0.01) / ratio


def judged(claim: Headline, report: dict[str, Any] | None, rate: float) -> Result:
    """Return the result of a headline. ``report``: of none, dense and the method, in this order; None: not measured."""
    labels = ("none", claim.dense, claim.method)
    step, final, sent = ([None] * 3 for _ in range(3)) if report is None else measured(report)
    ours = None if report is None else ratio_of(report)
    paper_steps = (claim.none_ms, claim.dense_ms, claim.dense_ms / claim.speedup)
    rows = [
        {
            "run": label,
            "step, ms": step[i],
            "step, ms (paper)": paper_steps[i],
            "faster than dense": step[1] / step[i] if step[i] else None,
            "faster than dense (paper)": claim.dense_ms / paper_steps[i],
            "final loss": final[i],
            "sent a step, MB": sent[i],
        }
        for i, label in enumerate(labels)
    ]
    speedup = rows[2]["faster than dense"]
    gap = None if report is None else f"{100 * (final[2] / final[1] - 1):+.1f}%"
    here = "not measured" if ours is None else f"{ours:.2f} here, at {rate:.0f} Mbit/s"
    return Result(
        rows,
        [
            f"In the paper dense's exchange lengthens a step by {claim.ratio:.2f} times its time without an exchange "
            f"(`none`; {claim.derived}); {here}. "
            f"So no method can be more than {1 + (ours or claim.ratio):.2f}x as fast as dense here.",
            "A model of 19 million parameters on CPU cores and gloo, in place of the paper's GPUs and NCCL: a codec "
            "takes more of a step here, and all ranks compute on the same few cores.",
            f"The loss is that of this short run: {gap or 'not measured'} against dense. The loss tables train longer.",
        ],
        [
            Claim(
                f"{claim.method} {claim.speedup:.2f}x as fast as dense" + (f"; here {speedup:.2f}x" if speedup else ""),
                None if speedup is None else speedup >= claim.speedup,
            ),
            Claim(
                f"the ratio of communication to computing is within {NEAR:.0%} of the paper's",
                None if ours is None else abs(ours / claim.ratio - 1) <= NEAR,
            ),
        ],
        [
            bars(rows, "run", ["faster than dense", "faster than dense (paper)"], "dense's step / this step", "speed"),
            bars(rows, "run", ["final loss"], "nats per token", "loss after these steps"),
        ],
    )  # fmt: skip


def measured(report: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Return step times in ms, final losses, and MB that a rank sends in a step, run by run."""
    runs = [run["summary"] for run in report["runs"]]
    losses = [run["train_loss"] if run.get("valid_loss") is None else run["valid_loss"] for run in runs]
    return [run["step_ms"] for run in runs], losses, [sum(run["wire_bytes_per_step"].values()) / 1e6 for run in runs]
