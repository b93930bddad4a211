"""The generated parts of README and docs: tables and pictures, from the measurements in docs/data.

    python docs/figures.py                          # rewrite the marked blocks and the pictures
    python docs/figures.py --check                  # name what is stale; exit status 1 if anything is
    python docs/figures.py --take SETTING RUN       # add the report of a `thinwire compare` to docs/data
    python docs/figures.py --take-curves LINK RUN   # add its held-out losses by time

docs/data/settings.csv has one row per set of runs that can be compared with each other: what ran, when, at which
commit, and the command. speed.csv and loss.csv have one row per method and setting, losses.csv one per evaluation.
regimes.jsonl has one line per run of benchmarks/regimes.py. A block in a page begins with ``<!-- generated: NAME -->``
and ends with ``<!-- end -->``; ``BLOCKS`` says what stands between.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.methods import TABLE, resolve
from thinwire.methods.delay import Delay
from thinwire.train import differences

HERE = Path(__file__).resolve().parent
DATA, ROOT = HERE / "data", HERE.parent
sys.path += [str(HERE), str(ROOT / "benchmarks")]
import regime_tables  # noqa: E402

Row = dict[str, str]

SPEED = ("ddp-500mbit", "ddp-500mbit-adams", "ddp-500mbit-trickle")
LOSS = ("small-ddp", "small-fsdp2", "small-ddp-adams")
"""The settings of README's picture and tables. A figure of the first is preferred; one of the others carries a mark."""


class Point(NamedTuple):
    """One method in README: which measured row has its speed, and which its loss ("": none)."""

    speed: str
    loss: str
    instead: str = ""
    """The row whose speed is shown, with a mark, where ``speed`` was not measured."""


POINTS = {
    "dense": Point("dense", "dense"),
    "fp32": Point("fp32", ""),
    "bf16": Point("bf16", "bf16"),
    "bf16-acc32": Point("bf16-acc32", ""),
    "int8": Point("int8(error_feedback=True)", "int8, error feedback", instead="int8"),
    "fp8": Point("fp8(error_feedback=True)", ""),
    "radius": Point(
        "radius", "Radius d=0.5, T=50, residual_scale=0.25",
        instead="radius(density=0.4,start=0,T=200,residual_scale=1.0)",
    ),
    "scape": Point("scape(warmup=1)", "SCAPE d=0.01 (paper)"),
    "separate": Point("separate:recommended", "SEPARATE 16x, cyclic SRHT, no feedback"),
    "tagc": Point("tagc(theta=0.95,mask='shared',feedback='gradient')", "TAGC d=0.05, shared mask"),
    "sdp4bit": Point("sdp4bit", "SDP4Bit (ours)"),
    "lhc": Point("lhc", ""),
    "zeropp": Point("zeropp", "ZeRO++ (8-bit weights)"),
    "qsdp": Point("qsdp", ""),
    "loco": Point("loco", "LoCo"),
    "powersgd": Point("powersgd(feedback='gradient')", "PowerSGD rank 4"),
    "topk": Point("topk(density=0.01,feedback='gradient')", "top-k d=0.01, error feedback"),
    "trickle": Point("trickle", "Trickle d=0.01"),
    "dgc": Point("dgc(density=0.01)", ""),
    "demo": Point("demo", ""),
    "onebit-adam": Point("onebit-adam(warmup=1)", "1-bit Adam"),
    "sign": Point("sign", ""),
    "frozen-adam": Point("frozen-adam", ""),
    "local-steps": Point("local-steps", ""),
    "none": Point("none", ""),
}

CHOICES = (
    ("a step that hardly waits for the network under `dense`", (), ""),
    ("any engine and any optimizer, and a first try", ("bf16", "int8"), SPEED[0]),
    ("DDP with Adam or AdamW, and a slower network", ("loco", "onebit-adam"), SPEED[0]),
    ("AdamW, and a network for which 4 bits a value are too many", ("trickle",), SPEED[2]),
    ("FSDP2 across several nodes (weights travel too)", ("sdp4bit",), "fsdp2-500mbit"),
    ("a very slow network, a long run, and time to compare the loss with dense", ("powersgd", "separate"), SPEED[0]),
)
"""README's decision table: what you have, what to take, and the setting whose speed is shown."""
TAKE = {"int8": "int8(error_feedback=True)", "powersgd": "powersgd(feedback='gradient')"}


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
    """The first row of ``settings`` that has the point's speed."""
    point = POINTS.get(method, Point("", ""))
    for spec in (point.speed, point.instead):
        for row in (row for name in settings for row in of("speed", name)):
            if row["method"] == spec:
                return row
    return None


def loss(method: str) -> Row | None:
    point = POINTS.get(method, Point("", ""))
    return next((row for name in LOSS for row in of("loss", name) if row["label"] == point.loss), None)


def aside(method: str) -> str:
    """Why one of the method's two figures cannot be compared with the others'; "" if both can."""
    found, gap = speed(method), loss(method)
    if found and found["setting"] != SPEED[0]:
        return f"speed with {OPTIMIZERS[setting(found['setting'])['optimizer']]}"
    if found and found["method"] != POINTS[method].speed:
        return f"speed of `{found['method']}`, loss of `{POINTS[method].speed}`"
    if gap and gap["setting"] != LOSS[0]:
        return f"loss on {ENGINES[setting(gap['setting'])['engine']]}"
    return ""


def percent(row: Row | None, column: str, mark: bool = False) -> str:
    if row is None:
        return "-"
    value = float(row[column])
    text = f"{value:.0f}%" if column == "speed_percent" else f"{value:+.2f}%" if abs(value) < 10 else f"{value:+.0f}%"
    return text + (" \\*" if mark else "")


# The blocks.


def methods() -> str:
    """One row per entry of TABLE: its name and class, its docstring's first line, its promise, its figures."""
    promises = {cls: cls().card.promise.kind for cls in TABLE if hasattr(cls, "card")}
    head = ["method", "what travels", *(["promise"] if promises else []), "speed", "loss"]
    lines = ["| " + " | ".join(head) + " |", "|---" * (len(head) - 2) + "|---:|---:|"]
    for cls in TABLE:
        what = (inspect.getdoc(cls) or "").splitlines()[0].replace("``", "`").rstrip(".")
        found, gap, why = speed(cls.name), loss(cls.name), aside(cls.name)
        if (found or gap) and POINTS[cls.name].speed != cls.name:
            what += f". Measured as `{POINTS[cls.name].speed}`"
        cells = [f"`{cls.name}` {cls.__name__}", what, *([promises[cls]] if promises else [])]
        cells += [
            percent(found, "speed_percent", why.startswith("speed")),
            percent(gap, "gap_percent", why[:4] == "loss"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def choices() -> str:
    lines = ["| you have | take | speed | loss |", "|---|---|---:|---:|"]
    for have, take, where in CHOICES:
        if not take:
            lines.append(f"| {have} | nothing: compression cannot help | - | - |")
            continue
        dense = next(row for row in of("speed", where) if row["method"] == "dense")
        speeds = ", ".join(
            percent(fast, "speed_percent", bool(fast) and fast["method"] != POINTS[method].speed)
            for method in take
            for fast in [speed(method, (where,))]
        )
        gaps = ", ".join(percent(loss(method), "gap_percent") for method in take)
        names = ", ".join(f"`{TAKE.get(method, method)}`" for method in take)
        lines.append(f"| {have} | {names} | {speeds} (dense: {percent(dense, 'speed_percent')}) | {gaps} |")
    return "\n".join(lines)


def tradeoff_note() -> str:
    """What README's picture and tables were measured on."""
    fast, long = setting(SPEED[0]), setting(LOSS[0])
    texts = (
        f"**Speed**: {world(fast)}, {fast['tokens_per_rank']} tokens per rank and step, "
        f"{OPTIMIZERS[fast['optimizer']]}; as a share of the speed of the same run without any exchange. Measured "
        f"{fast['date']} at commit {fast['commit']}.",
        f"**Loss**: {world(long)}, {long['tokens_per_rank']} tokens per rank and step, {long['steps']} steps from "
        f"scratch; validation loss above dense, mean of one or two seeds. Measured {long['date']} at commit "
        f"{long['commit']}.",
        "Both ran on CPUs with gloo. An open ring, and a \\* in the tables, marks a method of which one figure is from "
        f"another setting: {marks()}. The commands: [docs/results.md](docs/results.md), "
        "[docs/training.md](docs/training.md).",
    )
    wrapped = (textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) for text in texts)
    return "\n\n".join(["![Loss against speed, one dot per method](docs/tradeoff.png)", *wrapped])


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


def marks() -> str:
    """The methods with a mark, and why."""
    return ", ".join(f"`{method}` ({aside(method)})" for method in POINTS if aside(method))


def speeds(name: str) -> str:
    """The whole table of one setting, as docs/results.md shows it."""
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
    """The whole table of one setting, as docs/training.md shows it."""
    lines = [
        "| method | validation loss (by seed) | gap to dense | sent per step | share of dense | skipped |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in of("loss", name):
        seeds = ", ".join(value for value in (row["seed0"], row["seed1"]) if value)
        lines.append(
            f"| {row['label']} | {seeds} | {row['gap_percent']}% | {row['sent_mb']} MB | {row['share_percent']}% | "
            f"{row['skipped']} |"
        )
    return "\n".join(lines)


def regime_rows() -> list[regime_tables.Row]:
    return regime_tables.rows(regime_tables.read(DATA / "regimes.jsonl").values())


def regimes(regime: str, model: str, text: str, ranks: str) -> str:
    """The tables of benchmarks/regimes.py for one regime, model, text and number of ranks."""
    wanted = (regime, model, text, int(ranks))
    chosen = [row for row in regime_rows() if (row.regime, row.model, row.text, row.ranks) == wanted]
    return regime_tables.markdown(chosen) or f"{regime}: `{model}` on {text}, {ranks} ranks: not run yet."


def rule() -> str:
    """What ``thinwire.methods.delay`` predicts beside what was measured, in all runs from scratch."""
    found = [
        (f"842k, {row['label']}", row["method"], 800, float(row["gap_percent"])) for row in of("loss", LOSS[0])
    ]
    found += [
        (f"`{row.method}`, `{row.model}`, {row.text}, {row.ranks} ranks", row.method, row.steps, row.gap)
        for row in regime_rows()
        if row.regime in ("scratch", "long") and row.gap is not None and " " not in row.method
    ]
    lines = ["| run | steps | measured | predicted |", "|---|---:|---:|---:|"]
    for label, spec, steps, gap in found:
        delay = resolve(spec).delay
        if delay is not None and (delay != Delay() or abs(gap) > 1):
            lines.append(f"| {label} | {steps} | {gap:+.1f}% | {100 * delay.gap(steps):+.1f}% |")
    return "\n".join(lines)


def tree() -> str:
    """Where each file of the package is, with the first sentence of its own docstring."""
    package = ROOT / "src" / "thinwire"
    files = [(f"  {path.name}", path) for path in sorted(package.glob("*.py")) if not path.name.startswith("__")]
    folders = [(f"  {path.parent.name}/", path) for path in sorted(package.glob("*/__init__.py"))]
    entries = [("src/thinwire/", ""), *((name, first_sentence(path)) for name, path in files + folders), *BESIDE]
    width = max(len(name) for name, _ in entries) + 2
    return "\n".join(["```", *(f"{name:<{width}}{what}".rstrip() for name, what in entries), "```"])


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
    ("docs/", "the pages above, their measurements (data/) and the script that makes tables and pictures of them"),
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


BLOCKS: dict[str, Callable[..., str]] = {
    "tree": tree,
    "picture": tradeoff_note,
    "methods": methods,
    "choices": choices,
    "speed": speeds,
    "loss": losses,
    "regimes": regimes,
    "rule": rule,
    "differences": differing,
    "to-denses-loss": to_denses_loss,
}
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def fresh(text: str) -> str:
    """A page with its blocks made anew."""

    def made(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return found[1] + BLOCKS[name](*arguments) + "\n" + found[3]

    return BLOCK.sub(made, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(HERE.glob("*.md"))]


# The pictures.


def tradeoff() -> list[tuple[Any, ...]]:
    """(method, speed, gap, is it a ring) of README's picture."""
    found = [(method, speed(method), loss(method)) for method in POINTS if method != "none"]

    def named(method: str) -> str:
        """Where a method sends updates, what was measured may send gradients."""
        other = {resolve(spec).card.promise.of for spec in (method, POINTS[method].speed)} == {"updates", "gradients"}
        return f"{method} (gradients)" if other else method

    return [
        (
            named(method),
            float(fast["speed_percent"]),
            float(gap["gap_percent"]),
            bool(aside(method)),
        )
        for method, fast, gap in found
        if fast and gap
    ]


def step_times(name: str) -> dict[str, Any]:
    """One setting as the report that ``thinwire.lab.plots`` draws."""
    where = setting(name)
    runs = [
        {"method": row["method"], "summary": {"step_ms": float(row["step_ms"]), "exposed_ms": float(row["exposed_ms"])}}
        for row in of("speed", name)
    ]
    size = {key: int(where[key]) for key in ("nodes", "ranks_per_node", "mtu")}
    return {"preset": where["preset"], "link": where["link"], "emulated_network": True, "runs": runs, **size}


def gaps(name: str, *labels: str) -> list[tuple[str, str, float, float]]:
    """(label, method, gap in percent, share of dense's bytes in percent) of one setting."""
    return [
        (row["label"], row["method"], float(row["gap_percent"]), float(row["share_percent"]))
        for row in of("loss", name)
        if not labels or row["label"] in labels
    ]


SHOWN = (
    "int8, error feedback", "bf16", "1-bit Adam", "LoCo", "top-k d=0.4 from 15%, error feedback",
    "Radius d=0.5, T=50, residual_scale=0.25", "Radius d=0.5, T=200 (paper)", "PowerSGD rank 4",
    "SEPARATE 16x, cyclic SRHT, no feedback", "SEPARATE 16x (paper)", "SEPARATE 16x, cyclic SRHT (ours)",
    "TAGC d=0.05, shared mask, from 15%", "TAGC d=0.05, shared mask", "TAGC 10x (ours)", "top-k d=0.01, error feedback",
)  # fmt: skip
"""Of the table with thirty rows, those in its picture."""

PICTURES: dict[str, tuple[str, Callable[[], Any]]] = {
    "tradeoff.png": ("tradeoff", tradeoff),
    "speed.png": ("step_time", lambda: step_times("ddp-500mbit")),
    "speed-adams.png": ("step_time", lambda: step_times("ddp-125mbit-adams")),
    "training.png": ("gaps", lambda: gaps("small-ddp", *SHOWN)),
    "training-fsdp2.png": ("gaps", lambda: gaps("small-fsdp2")),
    "walltime.png": ("walltime", by_time),
    "regimes.png": ("regimes", lambda: regime_tables.points(regime_rows())),
}
"""File -> the function of ``pictures.py`` that draws it, and what it draws."""


def digest(name: str) -> str:
    """Of what a picture shows; it stands in the file, so that a stale picture can be told without drawing it."""
    kind, data = PICTURES[name]
    return hashlib.sha256(json.dumps([kind, data()]).encode()).hexdigest()[:16]


def shown(path: Path) -> str:
    """The digest in a picture's file."""
    from PIL import Image

    if not path.exists():
        return ""
    with Image.open(path) as image:
        return str(image.info.get("thinwire-data", ""))


def draw(name: str) -> None:
    import matplotlib.pyplot as plt
    import pictures

    from thinwire.lab import plots

    kind, data = PICTURES[name]
    with plt.rc_context(plots.STYLE):
        plots.save(getattr(pictures, kind)(data()), HERE / name, {"thinwire-data": digest(name)})


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
