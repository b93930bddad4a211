"""The generated parts of README and docs: tables and pictures, from the measurements in docs/data.

    python docs/figures.py                          # rewrite the marked blocks and the pictures
    python docs/figures.py --check                  # name what is stale; exit status 1 if anything is
    python docs/figures.py --take SETTING RUN       # add the report of a `thinwire compare` to docs/data
    python docs/figures.py --take-curves LINK RUN   # add its held-out losses by time

docs/data/settings.csv has one row per set of runs that can be compared with each other: what ran, when, at which
commit, and the command. speed.csv and loss.csv have one row per method and setting, losses.csv one per evaluation.
regimes.jsonl has one line per run of benchmarks/loss/regimes.py. draws.csv has the rows of benchmarks/predict/draws.py,
published.csv numbers that others have published, predicted.csv what benchmarks/predict/published.py predicts of them. A
block in a page begins with
``<!-- generated: NAME -->`` and ends with ``<!-- end -->``; ``BLOCKS`` says what stands between.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import hashlib
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from thinwire.lab.verdict import interval
from thinwire.methods import TABLE
from thinwire.train.checkpoint import run_settings as differences

HERE = Path(__file__).resolve().parent
DATA, ROOT = HERE / "data", HERE.parent
sys.path += [str(HERE), *(str(ROOT / "benchmarks" / room) for room in ("loss", "predict"))]
import draws  # noqa: E402
import gap_law  # noqa: E402
import ladder_tables  # noqa: E402
import regime_tables  # noqa: E402

Row = dict[str, str]

SPEED = ("ddp-500mbit-house", "ddp-500mbit")
"""The settings of speed whose link, model and engine are the same. A figure of the first is preferred: times of one
session can be compared."""

ALIASES = {
    "separate:recommended": "separate",
    "scape:paper": "scape",
    "scape:paper-d0.1": "scape(density=0.1)",
    "topk(density=0.01,feedback='updates')": "topk",
    "topk(density=0.01,feedback='gradients')": "topk(feedback='gradients')",
    "tagc(theta=0.9875,feedback='updates')": "tagc",
    "tagc(theta=0.9875,leftovers='median',select='non-attention',feedback='gradients')": "tagc:paper",
    "radius(density=0.5,T=50,residual_scale=0.25)": "radius",
    "separate(ratio=16,estimator='paper',beta=0.95,reset=128,restart='zero')": "separate:paper",
    "separate(ratio=16,beta=1.0)": "separate",
    "powersgd(feedback='updates(beta1=0.5)')": "powersgd",
    "powersgd(feedback='gradients')": "powersgd:paper",
    "powersgd(rank=4,feedback='gradients')": "powersgd:paper",
    "trickle(mask='merged',bits=4)": "trickle:merged",
    "trickle(mask='merged',bits=4,server_density=0.1)": "trickle:merged(server_density=0.1)",
    "trickle(density=0.003)": "trickle:d0.003",
    "local-steps:recommended(outer=\"trickle(density=0.05,bits=4,feedback='gradients')\")": "local-steps:recommended",
}
"""A form as it was recorded -> the shortest that means the same today. test_docs.py holds the two together."""

Regime = tuple[str, str, str, int]
"""(regime, model, text, ranks)."""

MAIN: Regime = ("scratch", "small", "wikitext", 4)
"""The regime of README's picture and of the picture of losses against bytes."""

REGIMES: dict[Regime, str] = {
    MAIN: "842k, text 2",
    ("scratch", "small", "peps", 4): "842k, text 1",
    ("scratch", "small", "wikitext", 16): "842k, text 2, 16 ranks",
    ("scratch", "small", "peps", 16): "842k, text 1, 16 ranks",
    ("scratch", "tiny", "peps", 4): "120k, text 1",
    ("long", "tiny", "peps", 4): "120k, text 1, longer",
    ("going-on", "tiny", "peps", 4): "120k, going on",
    ("finetune", "tiny", "wikitext", 4): "120k, fine-tuning on text 2",
}
"""The columns of the table in docs/quality.md."""

QUALITY = (
    "dense", "dense --optimizer adams", "bf16", "int8", "loco", "sdp4bit", "zeropp", "qsdp", "lhc", "dgc",
    "onebit-adam(warmup_bits=4)", "trickle", "trickle:d0.003", "trickle:merged", "topk", "tagc", "powersgd", "radius",
    "separate", "sign", "scape", "local-steps:recommended", "separate:paper", "tagc:paper",
    "topk(feedback='gradients')", "powersgd:paper", "radius(density=0.4,start=0,T=200,residual_scale=1.0)",
)  # fmt: skip
"""Its rows, in this order."""

EIGHT = ("bf16", "int8", "sdp4bit", "loco", "radius", "separate", "topk", "trickle")
"""The methods of the picture of losses against bytes; those of which the speed was measured, too, are README's."""

WITH_STEPS = ("trickle", "topk", "tagc", "radius", "powersgd", "scape", "separate", "sign")
"""The methods in the picture of the small model's losses."""

CHOICES = (
    ("any engine, any optimizer: try this first", "int8", SPEED[0], MAIN),
    ("FSDP2 on several nodes, where weights travel, too", "sdp4bit", "fsdp2-500mbit", "small-fsdp2-seeds"),
    ("AdamW, 2 to 4 ranks, a network too slow for 4 bits per value", "trickle", SPEED[0], MAIN),
    ("AdamW, more than 4 ranks, such a network", "trickle:merged", SPEED[0], ("scratch", "small", "wikitext", 16)),
)
"""README's table: what you have, what to take, the setting of its speed ("": not measured), and that of its loss."""


def form(spec: str) -> str:
    """The shortest form that means ``spec`` today, but for ``smallest``, which small models need to be compressed."""
    text = re.sub(r",?\s*smallest=\d+", "", spec).replace("()", "").replace("(,", "(").replace(", ", ",")
    return ALIASES.get(text, text)


def name_of(spec: str) -> str:
    """The method's name in ``spec``."""
    return re.match(r"[\w-]*", spec)[0]  # type: ignore[index]


def read(name: str) -> list[Row]:
    with (DATA / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: list[Row]) -> None:
    with (DATA / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def of(name: str, setting: str) -> list[Row]:
    return [row for row in read(name) if row["setting"] == setting]


def setting(name: str) -> Row:
    return next(row for row in read("settings") if row["setting"] == name)


def speed(method: str, settings: tuple[str, ...] = SPEED) -> Row | None:
    """The first row of ``settings`` that measured exactly ``method``."""
    rows = (row for name in settings for row in of("speed", name))
    return next((row for row in rows if form(row["method"]) == method), None)


class Loss(NamedTuple):
    """What a method costs: loss above dense and all bytes sent, in percent of dense's; seeds that both sides have, and
    half of the 95% interval over them."""

    gap: float
    share: float
    seeds: int
    error: float | None = None


def loss(method: str, where: Regime | str = MAIN) -> Loss | None:
    """What exactly ``method`` costs in a regime, or in a setting of loss/training.py; None: not run there."""
    if isinstance(where, str):
        row = next((row for row in of("loss", where) if form(row["method"]) == method), None)
        if row is None:
            return None
        share = float(row["share_percent"])
        return Loss(float(row["gap_percent"]), share, 1 + bool(row["seed1"]), seeds_error(row))
    found, dense = regime_row(method, where), regime_row(partner_of(method), where)
    if found is None or dense is None or found.gap is None or found.gap == math.inf:
        return None
    return Loss(found.gap, found.share_all or 0.0, len(found.losses.keys() & dense.losses.keys()), found.error)


def seeds_error(row: Row) -> float | None:
    """Half of the 95% interval of a row's gap over its seeds, percent; None: there are not two."""
    dense = next((other for other in of("loss", row["setting"]) if other["optimizer"] == row["optimizer"]
                  and name_of(other["method"]) == "dense"), None)  # fmt: skip
    seeds = [seed for seed in ("seed0", "seed1") if dense is not None and row[seed] and dense[seed]]
    if dense is None or len(seeds) < 2:
        return None
    return interval([100 * (float(row[seed]) / float(dense[seed]) - 1) for seed in seeds]).half


def partner_of(method: str) -> str:
    """The dense run that ``method`` is held against."""
    return "dense --optimizer adams" if name_of(method) == "scape" or method.endswith("adams") else "dense"


def regime_row(method: str, where: Regime) -> regime_tables.Row | None:
    """The row of exactly ``method`` in one regime; of several ends that were gone on from, the longest run's."""
    found = [
        row for row in regime_rows()
        if (row.regime, row.model, row.text, row.ranks) == where and form(row.method) == method
    ]  # fmt: skip
    return max(found, key=lambda row: "long" in row.base, default=None)


# The blocks.


def methods() -> str:
    """One row per method: its name and class, its docstring's first line, its promise, its figures."""
    lines = ["| method | what travels | promise | speed | loss |", "|---|---|---|---:|---:|"]
    for cls in TABLE:
        what = (inspect.getdoc(cls) or "").splitlines()[0].replace("``", "`").rstrip(".")
        fast, cost = speed(cls.name), loss(cls.name)
        cells = (
            f"{fast['speed_percent']}%" if fast else "-",
            _gap(cost) if cost and cls.name != "dense" else "-",
        )
        lines.append(f"| `{cls.name}` {cls.__name__} | {what} | {cls().card.promise.kind} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _gap(cost: Loss) -> str:
    return percent(cost.gap) + regime_tables.error_of(cost.error)


def percent(gap: float) -> str:
    return f"{gap:+.2f}%" if abs(gap) < 1 else f"{gap:+.1f}%"


def choices() -> str:
    lines = [
        "| you have | take | speed (`dense`) | bytes | loss gap (seeds) |",
        "|---|---|---:|---:|---:|",
    ]
    lines.append("| a step that hardly waits for the network | no compression | - | - | - |")
    for have, take, fast, where in CHOICES:
        found, cost = speed(take, (fast,)), loss(take, where)
        dense = speed("dense", (fast,))
        cell = f"{found['speed_percent']}% ({dense['speed_percent']}%)" if found and dense else "-"
        rest = f"{cost.share:.1f}% | {_gap(cost)} ({cost.seeds})" if cost else "- | -"
        lines.append(f"| {have} | `{take}` | {cell} | {rest} |")
    return "\n".join(lines)


def picture() -> str:
    """README's picture and what it was measured on."""
    apart = [f"`{name}`" for name, *_ in tradeoff() if speed(name, SPEED[:1]) is None]
    sessions = f"one session, but {', '.join(apart)} from another" if apart else "one session"
    return "\n".join([
        "![Loss against speed, one dot per method](docs/tradeoff.svg)\n",
        "**Speed** (right is better): the step time without any exchange, as a share of the step time with the method; "
        f"{world(setting(SPEED[0]))}; {sessions}.",
        "**Loss** (down is better): final validation loss relative to `dense`, which compresses nothing; a GPT of 0.84 "
        "million parameters, 4 ranks, 800 steps from scratch (1.9 tokens per parameter), both at the best learning "
        "rate that was run, one to three seeds. Seeds differ by about 2%: shaded is all below that.",
        "All on CPUs with gloo. Commands and all other methods: [docs/speed.md](docs/speed.md), "
        "[docs/quality.md](docs/quality.md).",
    ])  # fmt: skip


OPTIMIZERS = {"adamw": "AdamW", "adams": "AdamS", "sgd": "SGD"}
ENGINES = {"ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP"}
MODELS = {"net20m": "a GPT of 19 million parameters", "small": "a GPT of 0.84 million parameters"}


def world(where: Row) -> str:
    """A setting in words: model, engine, hosts, link."""
    model = MODELS.get(where["preset"], where["preset"])
    nodes, ranks = int(where["nodes"]), int(where["ranks_per_node"])
    if not where["link"]:
        return f"{model}, {ENGINES[where['engine']]}, {nodes * ranks} ranks"
    size = f"{nodes} emulated hosts of {ranks} rank" + "s" * (ranks > 1)
    link = where["link"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    frames = f", frames of {where['mtu']} bytes" if where["mtu"] != "1500" else ""
    return f"{model}, {ENGINES[where['engine']]}, {size}, {link}{frames}"


def speeds(name: str) -> str:
    """The whole table of one setting, as docs/speed.md shows it."""
    lines = [
        "| method | step | share of the speed of `none` | exposed | encode + decode | sent per step | link use |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in of("speed", name):
        codec = f"{row['codec_ms']} ms ({row['codec_percent']}%)"
        use = f"{row['link_use_percent']}%" if row["link_use_percent"] else "-"
        lines.append(
            f"| `{row['method']}` | {row['step_ms']} ms | {row['speed_percent']}% | {row['exposed_ms']} ms | {codec} | "
            f"{row['sent_mb']} MB | {use} |"
        )
    return "\n".join(lines)


def losses(name: str) -> str:
    """The whole table of one setting."""
    lines = [
        "| run | method | validation loss (by seed) | gap to dense | sent per step | share of dense | skipped |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in of("loss", name):
        seeds = ", ".join(value for value in (row["seed0"], row["seed1"]) if value)
        sent = f"{row['sent_mb']} MB | {row['share_percent']}% | {row['skipped']}" if row["sent_mb"] else "- | - | -"
        gap = f"{row['gap_percent']}%"
        if name_of(row["method"]) != "dense":
            gap += regime_tables.error_of(seeds_error(row))
        lines.append(f"| {row['label']} | `{row['method']}` | {seeds} | {gap} | {sent} |")
    return "\n".join(lines)


@functools.cache
def regime_rows() -> list[regime_tables.Row]:
    return regime_tables.rows(regime_tables.read(DATA / "regimes.jsonl").values())


REGIME_WORDS = {
    "scratch": "From scratch", "going-on": "Going on from a trained model", "long": "Longer runs",
    "finetune": "Fine-tuning on another text",
}  # fmt: skip


def runs() -> str:
    """Every table of losses: those of benchmarks/loss/training.py with their commands, then those of regimes.py."""
    parts: list[str] = []
    for where in read("settings"):
        if where["kind"] == "loss":
            title = f"## `{where['preset']}` on {ENGINES[where['engine']]}, {OPTIMIZERS[where['optimizer']]}"
            title += ", two seeds" * where["setting"].endswith("-seeds")
            when = f"Measured {where['date']} at commit {where['commit']}:"
            parts += [title, when, f"```sh\n{where['command']}\n```", losses(where["setting"])]
    titles: dict[str, list[regime_tables.Row]] = {}
    for row in regime_rows():
        titles.setdefault(regime_tables.title(row), []).append(row)
    for title, rows in titles.items():
        regime, _, rest = title.partition(": ")
        parts.append(f"## {REGIME_WORDS[regime]}: {rest}")
        parts.append(regime_tables.markdown(rows).replace(f"{title}, ", ""))
    headings = [part.removeprefix("## ") for part in parts if part.startswith("## ")]
    return "\n\n".join(["\n".join(f"* [{heading}](#{anchor(heading)})" for heading in headings), *parts])


def anchor(heading: str) -> str:
    """The place of a heading, as GitHub and the site name it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def ladder() -> str:
    """The tables of benchmarks/loss/ladder.py."""
    return ladder_tables.markdown(ladder_tables.read(DATA / "ladder.jsonl").values())


def rungs() -> str:
    """What they say of the methods that most people want."""
    return ladder_tables.short(ladder_tables.read(DATA / "ladder.jsonl").values())


def rungs_beta2() -> str:
    """The same with a slower second moment."""
    return ladder_tables.short(ladder_tables.read(DATA / "ladder.jsonl").values(), " + beta2 0.99")


def law() -> str:
    """The forecasts of benchmarks/loss/gap_law.py."""
    return gap_law.markdown(ladder_tables.read(DATA / "ladder.jsonl").values())


def regime_length(where: Regime) -> str:
    """Steps and tokens per parameter of a regime's runs."""
    row = next(row for row in regime_rows() if (row.regime, row.model, row.text, row.ranks) == where)
    tokens = f" ({row.tokens_per_parameter:.2g})" if row.tokens_per_parameter else ""
    return f"{row.steps} steps{tokens}"


def quality() -> str:
    """Methods by regimes: each cell has the gap to dense, the learning rate, and the number of seeds that both have."""
    lines = ["| method | " + " | ".join(REGIMES.values()) + " |", "|---" + "|---:" * len(REGIMES) + "|"]
    lines.append("| steps (tokens per parameter) | " + " | ".join(map(regime_length, REGIMES)) + " |")
    for method in QUALITY:
        cells = [quality_cell(method, where) for where in REGIMES]
        if set(cells) != {"-"}:
            lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quality_cell(method: str, where: Regime) -> str:
    row, cost = regime_row(method, where), loss(method, where)
    if row is None or cost is None:
        return "-"
    dense = name_of(method) == "dense"
    what = f"{fmean(row.losses.values()):.3f}" if dense else _gap(cost)
    return f"{what} ({row.lr:g}; {cost.seeds})"


OPENED = frozenset(
    "adapters base baselines checkpoint cli codecs core data engines job lab model network optim ours papers".split()  # noqa: SIM905
    + "parts plan predict proof saved train".split()  # noqa: SIM905
)
"""Packages of which the tree in docs/files.md shows each file."""
COLUMNS = 90
"""Letters in a line of that tree: a block of the site shows as many on a desk."""


def tree() -> str:
    """Where each file of the package is, with the first sentence of its own docstring: of the rooms that a reader
    looks for by name each file, of the others each folder."""
    package = ROOT / "src" / "thinwire"

    def below(folder: Path, indent: str) -> list[tuple[str, str]]:
        every_file = folder == package or folder.name in OPENED
        files = sorted(folder.glob("*.py")) if every_file else []
        entries = [(f"{indent}{path.name}", first_sentence(path)) for path in files if not path.name.startswith("_")]
        for init in sorted(folder.glob("*/__init__.py")):
            entries.append((f"{indent}{init.parent.name}/", first_sentence(init)))
            entries += below(init.parent, indent + "  ")
        return entries

    entries = [("src/thinwire/", ""), *below(package, "  "), *BESIDE]
    width = max(len(name) for name, _ in entries) + 2
    lines = []
    for name, what in entries:
        first, *rest = textwrap.wrap(what, COLUMNS - width, break_on_hyphens=False) or [""]
        lines += [f"{name:<{width}}{first}".rstrip(), *(" " * width + line for line in rest)]
    return "\n".join(["```", *lines, "```"])


def differing() -> str:
    """What becomes of each difference when a run of the training program goes on."""
    words = {
        differences.FITS: "refused", differences.DATA: "refused without `--resume-anyway`", differences.EXACT: "warned",
    }  # fmt: skip
    lines = ["| difference | what it is | on resume |", "|---|---|---|"]
    for name, (level, what) in differences.TABLE.items():
        word = "warned; what waits goes by `--resize`" if name in differences.LAYOUT else words[level]
        lines.append(f"| `{name}` | {what} | {word} |")
    return "\n".join(lines)


BESIDE = (
    ("benchmarks/", "timings and training runs, each file a program"),
    ("examples/", "whole training programs of 50 lines"),
    ("docs/", "the pages, their measurements (data/) and the script that makes tables and pictures of them"),
    ("tests/", "what must hold"),
)


def first_sentence(path: Path) -> str:
    """Of a module's docstring; of a long one as much as a line holds."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split()).replace("``", "`")
    text = re.split(r"(?<=[.?]) (?=[A-Z])", text)[0].rstrip(".")
    return text if len(text) <= 118 else text[: max(text.rfind(mark, 0, 118) for mark in (", ", ": ", "; "))]


Curve = list[tuple[float, float]]
"""Seconds of training, and the held-out loss then."""


def by_time() -> list[tuple[str, str, Curve]]:
    """(link, method, its curve) of every run whose losses were taken over."""
    found: dict[tuple[str, str], Curve] = {}
    for row in read("losses"):
        found.setdefault((row["link"], row["method"]), []).append((float(row["seconds"]), float(row["valid_loss"])))
    return [(link, method, curve) for (link, method), curve in found.items()]


def first_at(curve: Curve, loss: float) -> float | None:
    """When ``curve`` first comes down to ``loss``, on straight lines between its points; None: never."""
    for (began, above), (ended, below) in pairwise(curve):
        if below <= loss:
            return ended if above <= loss else began + (ended - began) * (above - loss) / (above - below)
    return None


def to_denses_loss() -> str:
    """For each method and link, when it has dense's last loss, and when its run ends."""
    runs = {(link, method): curve for link, method, curve in by_time()}
    links, methods = (list(dict.fromkeys(key[at] for key in runs)) for at in (0, 1))
    lines = ["| method | last loss | " + " | ".join(f"{link}: dense's loss after | end" for link in links) + " |"]
    lines.append("|---|---:|" + "---:|---:|" * len(links))
    for method in methods:
        cells = [f"{runs[links[0], method][-1][1]:.4f}"]
        for link in links:
            curve, goal = runs[link, method], runs[link, "dense"][-1][1]
            reached = first_at(curve, goal)
            cells += ["-" if method == "none" or reached is None else f"{reached:.1f} s", f"{curve[-1][0]:.1f} s"]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reports(paper: str) -> dict[str, str]:
    """Experiment -> the report that ``thinwire paper`` wrote of it for one paper, the headline's first."""
    files = sorted((DATA / "papers").glob(f"{paper}-*.md"), key=lambda path: ("headline" not in path.stem, path.stem))
    return {path.stem.removeprefix(f"{paper}-"): path.read_text() for path in files}


CLAIM = re.compile(
    r"\* (reached|NOT REACHED|not measured): (.+?)(?:[;:] (?:here (.+)|((?:predicted|our bytes allow) .+)))?"
)
"""A claim as a report prints it: the verdict, what the paper says, and what came out here."""
RATIO = "the ratio of communication to computing"
"""A claim that begins so is not the paper's: it says whether a headline's run may be held against it."""
VERDICTS = {"reached": "yes", "NOT REACHED": "**no**", "not measured": "not measured"}


def claims_of(report: str) -> list[tuple[str, str, str]]:
    """(claim, what came out here, reached or not) of every claim in a report."""
    found = map(CLAIM.fullmatch, report.splitlines())
    return [(claim[2], claim[3] or claim[4] or "", VERDICTS[claim[1]]) for claim in found if claim]


def title_of(report: str) -> str:
    """What a report's experiment measures."""
    return report.partition("\n")[0].partition(": ")[2]


def papers(paper: str, *shown: str) -> str:
    """Every claim of a paper beside what came out here, and the whole tables of the experiments ``shown``."""
    lines = ["| experiment | the paper's claim | here | reached |", "|---|---|---|---|"]
    for name, report in reports(paper).items():
        link = f"[{name.replace('-', ' ')}](data/papers/{paper}-{name}.md)"
        if name != "headline":
            link += f": {title_of(report)}"
        for claim, here, verdict in claims_of(report):
            lines.append(f"| {link} | {claim} | {here} | {verdict} |")
            link = ""
    for name in shown:
        report = reports(paper)[name]
        rows = [re.sub("-{3,}", "---", re.sub(" +", " ", row)) for row in report.splitlines() if row.startswith("|")]
        rows = [row.replace(" 4e-06 |", " 0 |") for row in rows]  # `none` sends 4 bytes a step
        lines += ["", f"### {name.capitalize().replace('-', ' ')}: {title_of(report)}", "", *rows]
    return "\n".join(lines)


def papers_in_short() -> str:
    """One row per paper: its headline's speedup, and how many of its claims were reached."""
    lines = [
        "| paper | headline speedup: paper | here | claims | reached | not measured |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for paper in ("radius", "scape", "tagc", "separate", "sdp4bit"):
        found = reports(paper)
        headline, here, _ = claims_of(found["headline"])[0]
        [claimed] = re.findall(r"[\d.]+x", headline)
        verdicts = [
            verdict
            for report in found.values() for claim, _, verdict in claims_of(report) if not claim.startswith(RATIO)
        ]  # fmt: skip
        counts = f"{len(verdicts)} | {verdicts.count('yes')} | {verdicts.count('not measured')}"
        [title] = re.findall(r"# (.+?),", found["headline"])
        lines.append(f"| {title} | {claimed} | {here} | {counts} |")
    return "\n".join(lines)


def errors_by_source(kind: str) -> dict[str, list[float]]:
    """The errors of benchmarks/predict/published.py in class ``kind``, by source, without the rows of the fit."""
    found: dict[str, list[float]] = {}
    for row in read("predicted"):
        if row["class"] == kind and not row["fitted"]:
            found.setdefault(row["source"], []).append(float(row["predicted"]) / float(row["published"]) - 1)
    return found


def published() -> str:
    """The score of each source, and of all."""
    lines = ["| source | a: rows | median | worst | b: rows | median | worst |", "|---|---:|---:|---:|---:|---:|---:|"]
    both = {kind: errors_by_source(kind) for kind in "ab"}
    medians = {kind: [median(map(abs, errors)) for errors in both[kind].values()] for kind in "ab"}
    for source in dict.fromkeys(row["source"] for row in read("predicted")):
        cells = []
        for kind in "ab":
            errors = both[kind].get(source)
            cells += (
                [f"{len(errors)}", f"{median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"]
                if errors
                else ["-"] * 3
            )
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    cells = []
    for kind in "ab":
        errors = [error for errors in both[kind].values() for error in errors]
        cells += [f"{len(errors)}", f"{median(medians[kind]):.1%}", f"{max(errors, key=abs):+.1%}"]
    lines.append("| **median of the sources** | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def predictions() -> str:
    """How far all predictions were off: a line for each kind of rows, and a sentence on the advice."""
    lines = ["| held against | rows | median error | worst |", "|---|---:|---:|---:|"]
    for kind, what in ("a", "published dense steps and communication times"), ("b", "published steps of a method"):
        by_source = errors_by_source(kind).values()
        errors = [error for errors in by_source for error in errors]
        middle = f"{median(median(map(abs, errors)) for errors in by_source):.1%} (of the sources' medians)"
        lines.append(f"| {what} (class {kind}) | {len(errors)} | {middle} | {max(errors, key=abs):+.1%} |")
    named, drawn = trials(drawn=False), trials(drawn=True)
    for some, what in (named, f"every method, {len(named)} links"), (drawn, f"{len(drawn)} drawn settings"):
        errors = [row.error for trial in some for row in trial.rows]
        middle = f"{median(map(abs, errors)):.1%}"
        lines.append(f"| measured: {what} | {len(errors)} | {middle} | {max(errors, key=abs):+.1%} |")
    right, both = sum(trial.agrees for trial in named + drawn), len(named + drawn)
    of_named, of_drawn = (sum(trial.is_in_order for trial in some) for some in (named, drawn))
    faster = sum(trial.best.measured < trial.dense for trial in named + drawn)
    advice = (
        f"Whether to compress was predicted right in {right} of {both} measured settings (compressing was faster in "
        f"{faster} of them)."
    )
    order = f"in {of_drawn} of the {len(drawn)} drawn settings, and in {of_named} of the {len(named)} with all methods."
    return "\n".join([*lines, "", f"{advice} The three fastest methods came in the predicted order {order}"])


def published_rows(kind: str) -> str:
    """Every published row of class ``kind`` beside its prediction, without the runs of diloco-measured."""
    lines = ["| row | published | predicted | error | inputs |", "|---|---:|---:|---:|---|"]
    rows = {row["row"]: row for row in read("published")}
    for row in read("predicted"):
        if row["class"] == kind and row["row"] in rows:
            error = f"{float(row['predicted']) / float(row['published']) - 1:+.1%}" if not row["fitted"] else "fitted"
            inputs = rows[row["row"]]["why"].removeprefix("inputs: ")
            lines.append(
                f"| {rows[row['row']]['paper']}, {rows[row['row']]['source']}: {row['what']} | {row['published']} "
                f"{row['unit']} | {row['predicted']} | {error} | {inputs} |"
            )
    return "\n".join(lines)


def unexplained() -> str:
    """The published rows of class c, by their reason."""
    reasons: dict[str, list[Row]] = {}
    for row in read("published"):
        if row["class"] == "c":
            reasons.setdefault(row["why"], []).append(row)
    lines = ["| rows | why |", "|---|---|"]
    for why, rows in reasons.items():
        names = "; ".join(f"{row['scheme']}, {row['quantity']}: {row['value']} {row['unit']}".rstrip() for row in rows)
        lines.append(f"| {rows[0]['paper']}, {rows[0]['source']}: {names} | {why} |")
    return "\n".join(lines)


def trials(*, drawn: bool) -> list[draws.Trial]:
    """The settings of benchmarks/predict/draws.py that a seed drew, or those that somebody named."""
    return [trial for trial in draws.read(DATA / "draws.csv") if bool(trial.key[0]) == drawn]


def lab() -> str:
    """Every method's predicted and measured step in each named setting."""
    named = trials(drawn=False)
    links = "".join(f" {trial.key[1]} Mbit/s | error |" for trial in named)
    lines = [f"| method |{links}", "|---|" + "---:|---:|" * len(named)]
    by_link = [{row.method: row for row in trial.rows} for trial in named]
    for method in dict.fromkeys(row.method for trial in named for row in trial.rows):
        rows = [rows.get(method) for rows in by_link]
        cells = [f"{row.predicted:.2f} / {row.measured:.2f} s | {row.error:+.0%}" if row else "- | -" for row in rows]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", draws.summary(named) + "."])


def lab_draws() -> str:
    """Each drawn setting in a line: its errors, and whether the answer was right."""
    lines = [
        "| draw | Mbit/s | model | sequences | engine | methods, predicted / measured | advice | right? | in order? |",
        "|---|---:|---|---:|---|---|---|---|---|",
    ]
    drawn = trials(drawn=True)
    if not drawn:
        return "None has been drawn on a quiet machine yet."
    for trial in drawn:
        rows = "; ".join(f"{row.method} {row.predicted:.2f} / {row.measured:.2f} s" for row in trial.rows)
        ends = [trial.advice, *("yes" if good else "**no**" for good in (trial.agrees, trial.is_in_order))]
        lines.append("| " + " | ".join([*trial.key, rows, *ends]) + " |")
    return "\n".join([*lines, "", draws.summary(drawn) + "."])


BLOCKS: dict[str, Callable[..., str]] = {
    "tree": tree,
    "picture": picture,
    "methods": methods,
    "choices": choices,
    "speed": speeds,
    "quality": quality,
    "ladder": ladder,
    "rungs": rungs,
    "rungs-beta2": rungs_beta2,
    "law": law,
    "runs": runs,
    "differences": differing,
    "to-denses-loss": to_denses_loss,
    "papers": papers,
    "papers-in-short": papers_in_short,
    "lab": lab,
    "lab-draws": lab_draws,
    "predictions": predictions,
    "published": published,
    "published-rows": published_rows,
    "unexplained": unexplained,
}
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fresh(text: str) -> str:
    """A page with its blocks made anew."""

    def made(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return found[1] + BLOCKS[name](*arguments) + "\n" + found[3]

    return BLOCK.sub(made, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(HERE.glob("*.md"))]


# The pictures.


def tradeoff() -> list[tuple[str, float, float]]:
    """(method, speed, gap) of README's picture: whatever has both figures, of exactly the form that its name means."""
    found = [(method, speed(method), loss(method)) for method in ("dense", *EIGHT)]
    return [(method, float(fast["speed_percent"]), cost.gap) for method, fast, cost in found if fast and cost]


def by_bytes() -> list[tuple[str, float, float]]:
    """(method, gap, bytes sent in all) of ``EIGHT``."""
    return [(method, cost.gap, cost.share) for method in EIGHT if (cost := loss(method))]


def step_times(name: str) -> dict[str, Any]:
    """One setting as the report that ``thinwire.lab.plots`` draws."""
    where = setting(name)
    runs = [
        {"method": shown_as(row["method"]),
         "summary": {"step_ms": float(row["step_ms"]), "exposed_ms": float(row["exposed_ms"])}}
        for row in of("speed", name) if shown_as(row["method"])
    ]  # fmt: skip
    size = {key: int(where[key]) for key in ("nodes", "ranks_per_node", "mtu")}
    return {"model": where["preset"], "link": where["link"], "emulated_network": True, "runs": runs, **size}


def shown_as(spec: str) -> str:
    """The name of ``spec`` in a picture of speed, if it is a name's own form once its warm-up is over; else ""."""
    text = form(re.sub(r",?warmup=\d+", "", spec).replace("()", ""))
    return text if "(" not in text and ":" not in text else ""


def gaps(where: Regime, *names: str) -> list[tuple[str, str, float, float]]:
    """(label, method, gap in percent, bytes sent in all in percent of dense's) of one regime."""
    return [(method, method, cost.gap, cost.share) for method in names if (cost := loss(method, where))]


def sharded() -> list[tuple[str, str, float, float]]:
    """As :func:`gaps`, of the methods on FSDP2 that are held against AdamW."""
    return [
        (form(row["method"]), row["method"], float(row["gap_percent"]), float(row["share_percent"]))
        for row in of("loss", "small-fsdp2")
        if row["optimizer"] == "adamw"
    ]


def by_name() -> list[tuple[str, str, Curve]]:
    """:func:`by_time` with names for labels; flags stand in brackets behind."""
    found = []
    for link, method, curve in by_time():
        spec, _, flags = method.partition(" --")
        found.append((link, form(spec) + (f" ({flags})" if flags else ""), curve))
    return found


CLOCK = ("120k", "peps", 4, 16)
"""Of the ladder: model, text, ranks and sequences of a step."""
CLOCKED = (("dense", "adamw"), ("trickle", "adamw"), ("dense", "muon"), ("trickle:muon", "muon"))


def by_clock() -> list[tuple[str, str, str, list[tuple[float, float]]]]:
    """(link, method, optimizer, (predicted seconds, loss) of each length that all have), of the ladder's runs at their
    best rate."""
    every = [row for row in ladder_tables.rows(ladder_tables.read(DATA / "ladder.jsonl").values())
             if row.setting[:4] == CLOCK]  # fmt: skip
    of = {one: {row.setting[4]: row.loss for row in every if (row.method, row.optimizer) == one} for one in CLOCKED}
    lengths = sorted(set.intersection(*(set(losses) for losses in of.values())))
    found = []
    for link in ("50mbit", "500mbit"):
        methods = json.loads((DATA / f"clock-{link}.json").read_text())["methods"]
        seconds = {one["method"].replace("(smallest=1024)", ""): one["seconds"] for one in methods}
        for method, optimizer in CLOCKED:
            losses = of[method, optimizer]
            curve = [(round(length * seconds[method], 3), round(losses[length], 4)) for length in lengths]
            found.append((link.replace("mbit", " Mbit/s"), method, optimizer, curve))
    return found


PICTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "tradeoff.svg": ("tradeoff", tradeoff),
    "speed.svg": ("step_time", lambda: step_times("ddp-500mbit")),
    "speed-adams.svg": ("step_time", lambda: step_times("ddp-125mbit-adams")),
    "training.svg": ("gaps", lambda: gaps(("scratch", "tiny", "peps", 4), *WITH_STEPS)),
    "training-fsdp2.svg": ("gaps", sharded),
    "walltime.svg": ("walltime", by_name),
    "regimes.svg": ("by_bytes", by_bytes),
    "clock.svg": ("clock", by_clock),
}
"""File -> the function of ``pictures.py`` that draws it, and what it draws."""


def digest(name: str) -> str:
    """Of what a picture shows; it stands in the file, so that a stale picture can be told without drawing it."""
    kind, data = PICTURES[name]
    return hashlib.sha256(json.dumps([kind, data()]).encode()).hexdigest()[:16]


def shown(path: Path) -> str:
    """The digest in a picture's file; "" if there is none."""
    found = re.search(r"thinwire-data: (\w+)", path.read_text()) if path.exists() else None
    return found[1] if found else ""


def draw(name: str) -> None:
    import matplotlib.pyplot as plt
    import pictures

    from thinwire.lab import plots

    kind, data = PICTURES[name]
    with plt.rc_context(plots.STYLE):
        plots.save(getattr(pictures, kind)(data()), HERE / name, f"thinwire-data: {digest(name)}")


# Taking measurements over.


def take(name: str, folder: Path) -> None:
    """Add (or replace) setting ``name`` by the report of a ``thinwire compare`` in ``folder``."""
    report = json.loads((folder / "report.json").read_text())
    methods = ",".join(run["method"] for run in report["runs"] if run["method"] != "none")
    extra = report["extra"]
    flags = dict(pairwise(extra))
    first = report["runs"][0]
    mtu = f"--mtu {report['mtu']} " if report["mtu"] != 1500 else ""
    command = (
        f'thinwire compare --methods "{methods}" --nodes {report["nodes"]} --ranks-per-node {report["ranks_per_node"]} '
        f"--link {report['link']} {mtu}--preset {report['preset']} --steps {report['steps']} --out {folder} -- "
        + shlex.join(extra)
    )
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=ROOT).strip()
    rows = [row for row in read("settings") if row["setting"] != name]
    row = json.loads((folder / first["directory"] / "metrics.jsonl").read_text().splitlines()[-1])
    tokens = row["tokens"] / row["step"] / report["nodes"] / report["ranks_per_node"]
    rows.append({
        "setting": name, "kind": "speed", "engine": flags.get("--engine", "ddp"),
        "optimizer": flags.get("--optimizer", "adamw"), "preset": report["preset"], "nodes": str(report["nodes"]),
        "ranks_per_node": str(report["ranks_per_node"]), "link": report["link"], "mtu": str(report["mtu"]),
        "tokens_per_rank": f"{tokens:.0f}",
        "steps": str(report["steps"]), "date": date.today().isoformat(), "commit": commit, "command": command,
    })  # fmt: skip
    write("settings", rows)
    kept = [row for row in read("speed") if row["setting"] != name]
    for run in report["runs"]:
        summary, use, sent = run["summary"], run["link_use"], run["bytes_per_step"]
        codec = summary["encode_ms"] + summary["decode_ms"]
        kept.append({
            "setting": name, "method": run["method"], "step_ms": f"{summary['step_ms']:.0f}",
            "speed_percent": f"{100 / run['step_to_none']:.0f}", "exposed_ms": f"{summary['exposed_ms']:.0f}",
            "codec_ms": f"{codec:.0f}", "codec_percent": f"{100 * codec / summary['step_ms']:.0f}",
            "sent_mb": f"{((sent['kernel'] or {}).get('tx') or sent['ledger']) / 1e6:.2f}",
            "link_use_percent": "" if use is None else f"{100 * use:.0f}",
        })  # fmt: skip
    write("speed", kept)


def take_curves(link: str, folder: Path) -> None:
    """Add (or replace) the held-out losses of a ``thinwire compare`` in ``folder``, run on ``link``."""
    kept = [row for row in read("losses") if row["link"] != link] if (DATA / "losses.csv").exists() else []
    for run in json.loads((folder / "report.json").read_text())["runs"]:
        for line in (folder / run["directory"] / "metrics.jsonl").read_text().splitlines():
            if (row := json.loads(line)).get("valid_loss") is not None:
                kept.append({
                    "link": link, "method": run["method"], "step": str(row["step"]), "seconds": f"{row['wall_s']:.2f}",
                    "valid_loss": f"{row['valid_loss']:.4f}",
                })  # fmt: skip
    write("losses", kept)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; name what is stale")
    parser.add_argument("--take", nargs=2, metavar=("SETTING", "RUN"), help="a name, and a comparison's folder")
    parser.add_argument("--take-curves", nargs=2, metavar=("LINK", "RUN"), help="of a comparison's folder")
    args = parser.parse_args()
    if args.take_curves:
        take_curves(args.take_curves[0], Path(args.take_curves[1]))
    if args.take:
        take(args.take[0], Path(args.take[1]))
    stale = [path for path in pages() if path.read_text() != fresh(path.read_text())]
    pictures = [name for name in PICTURES if shown(HERE / name) != digest(name)]
    if args.check:
        for path in [*stale, *(HERE / name for name in pictures)]:
            print(f"{path.relative_to(ROOT)} is stale: run python docs/figures.py")
        return int(bool(stale or pictures))
    for path in stale:
        path.write_text(fresh(path.read_text()))
    for name in PICTURES:
        draw(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
