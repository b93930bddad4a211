"""The site's page of each method, made of what stands elsewhere: no figure in it was typed by hand.

    python docs/pages.py FOLDER         # one Markdown file per method; `make docs` does it where something has changed

The description is the docstring of the method's module (of its class, where several methods share a module), the knobs
are the docstring of the class, bytes are planned by a dry run of the method, and measurements are rows of docs/data.
Papers are those of README and of docs/methods.md.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path

import figures
import torch

from thinwire.core.exchange import AllReduce, ReduceScatter
from thinwire.core.names import describe
from thinwire.methods import TABLE, Listed, Method, listed
from thinwire.network.comm import CountingComm
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import plan_of
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

HERE = Path(__file__).resolve().parent
PRESET = figures.setting(figures.SPEED[0])["preset"]
"""The model whose bytes are planned is the one whose speed was measured."""
HOSTS = (2, 16)
TITLES = {"ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP"}


def cite(name: str) -> str:
    """The method's paper, from README's list or from that of docs/methods.md; "" if it has none."""
    item = rf"^\* \*\*[^*]+\*\* \([^)]*`{re.escape(name)}`[^)]*\): (.*?)(?=^\*|\n\n|\Z)"
    for page in (figures.ROOT / "README.md", HERE / "methods.md"):
        if found := re.search(item, page.read_text(), re.DOTALL | re.MULTILINE):
            return found[1].strip()
    return ""


def description(cls: type[Method]) -> str:
    """The docstring of the method's module, or that of its class where others share it; without title and knobs."""
    module = sys.modules[cls.__module__]
    first = next(other for other in TABLE if other.__module__ == cls.__module__)
    text = (inspect.getdoc(module) or "").partition("\n\n")[2]
    if first is not cls or not text or not cls.__module__.startswith("thinwire.methods."):
        text = re.split(r"^Args:", inspect.getdoc(cls) or "", flags=re.MULTILINE)[0].partition("\n\n")[2]
    return markdown(text).strip()


def markdown(doc: str) -> str:
    """A docstring: what is indented becomes a block of text, and roles become code."""
    doc = re.sub(r":\w+:`~?(?:thinwire\.)?([^`]+)`", r"`\1`", doc).replace("``", "`")
    return re.sub(
        r"(?:^    .*\n?|^\n(?=    ))+",
        lambda found: "```text\n" + inspect.cleandoc("\n" + found[0]).rstrip() + "\n```\n",
        doc,
        flags=re.MULTILINE,
    )


def at_a_glance(name: str) -> str:
    """The method's rows of the table of bytes in docs/methods.md; "" if it has none."""
    section = (HERE / "methods.md").read_text().partition("\n## Bytes\n")[2]
    head, *rows = re.findall(r"^\|.*\|$", section.partition("\n## ")[0], re.MULTILINE)
    mine = [row for row in rows if re.match(rf"\| `{re.escape(name)}[`(:]", row)]
    return "\n".join([head, rows[0], *mine]) if mine else ""


@functools.cache
def model() -> torch.nn.Module:
    with torch.device("meta"):
        return Decoder(PRESETS[PRESET])


def planned(cls: type[Method]) -> str:
    """Bytes of gradients per step and rank, by engine and number of hosts."""
    lines = ["| engine | hosts of one rank | sent per step | dense | share of dense |", "|---|---:|---:|---:|---:|"]
    for engine in ("ddp", "fsdp2"):
        for hosts in HOSTS if engine in cls.engines else ():
            comm = CountingComm(0, list(range(hosts)), Ledger())
            sharded = engine == "fsdp2"
            parameters = describe(model(), chunks=hosts if sharded else 1).values()
            plan = plan_of(cls(), parameters, (ReduceScatter if sharded else AllReduce)(comm))
            lines.append(
                f"| {TITLES[engine]} | {hosts} | {plan.wire_bytes / 1e6:.2f} MB | {plan.dense_bytes / 1e6:.2f} MB | "
                f"{plan.wire_bytes / plan.dense_bytes:.1%} |"
            )
    return "\n".join(lines)


def speeds(name: str) -> tuple[str, list[figures.Row]]:
    """The measured rows of the method, and their settings; "" if there are none."""
    rows = [row for row in figures.read("speed") if figures.name_of(row["method"]) == name]
    lines = [
        "| method | step | share of the speed of `none` | `dense` there | exposed | sent per step |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        dense = next((of for of in figures.of("speed", row["setting"]) if of["method"] == "dense"), None)
        share = f"{dense['speed_percent']}%" if dense else "-"
        lines.append(
            f"| `{row['method']}` | {row['step_ms']} ms | {row['speed_percent']}% | {share} | {row['exposed_ms']} ms | "
            f"{row['sent_mb']} MB |"
        )
    return set_out(lines, rows), used(rows)


def losses(name: str) -> tuple[str, list[figures.Row]]:
    """As :func:`speeds`."""
    rows = [row for row in figures.read("loss") if figures.name_of(row["method"]) == name]
    lines = [
        "| method | validation loss above dense | bytes, share of dense | run |",
        "|---|---:|---:|---|",
    ]
    for row in rows:
        share = f"{row['share_percent']}%" if row["share_percent"] else "-"
        lines.append(f"| `{row['method']}` | {row['gap_percent']}% | {share} | {row['label']} |")
    return set_out(lines, rows), used(rows)


def set_out(lines: list[str], rows: list[figures.Row]) -> str:
    """The table of ``lines`` for ``rows``: what their settings share stands above it, the rest in a last column."""
    if not rows:
        return ""
    settings = [setting(figures.setting(row["setting"])).split(", ") for row in rows]
    shared = [part for part in settings[0] if all(part in of for of in settings)]
    rest = [", ".join(part for part in of if part not in shared) for of in settings]
    if any(rest):
        lines = [f"{line} {cell} |" for line, cell in zip(lines, ["setting", "---", *rest], strict=True)]
    return f"In each row: {', '.join(shared)}.\n\n" + "\n".join(lines)


def regimes(name: str) -> str:
    """The method's rows of benchmarks/loss/regimes.py, each at its best learning rate; "" if there are none."""
    rows = [row for row in figures.regime_rows() if row.gap is not None and figures.name_of(row.method) == name]
    head = "method | loss above dense | share of bytes | regime | model | text | ranks | steps | learning rate"
    lines = [f"| {head} |", "|---" + "|---:" * 2 + "|---" * 3 + "|---:" * 3 + "|"]
    lines += [
        f"| `{row.method}` | {row.gap:+.2f}% | " + (f"{row.share_all:.1f}%" if row.share_all is not None else "-")
        + f" | {row.regime} | `{row.model}` | {row.text} | {row.ranks} | {row.steps} | {row.lr:g} |"
        for row in rows
    ]
    return "\n".join(lines) if rows else ""


def setting(where: figures.Row) -> str:
    optimizer = figures.OPTIMIZERS[where["optimizer"]]
    return f"{figures.world(where)}, {where['tokens_per_rank']} tokens per rank and step, {optimizer}"


def used(rows: list[figures.Row]) -> list[figures.Row]:
    return [figures.setting(name) for name in dict.fromkeys(row["setting"] for row in rows)]


def measured(name: str) -> str:
    """What was measured of the method: tables, and the command behind each."""
    parts: list[str] = []
    settings: list[figures.Row] = []
    for title, (table, where) in (("Speed", speeds(name)), ("Loss", losses(name))):
        if table:
            parts += [f"### {title}", table]
            settings += where
    if table := regimes(name):
        parts += ["### Loss by regime", "Measured with `benchmarks/loss/regimes.py` ([quality](../quality.md)).", table]
    if not parts:
        return "Neither the speed nor the loss of this method was measured."
    for where in settings:
        parts += [f"Measured {where['date']} at commit {where['commit']}:", f"```sh\n{where['command']}\n```"]
    return "\n\n".join(["All runs were on CPUs with gloo. Hosts and links are emulated.", *parts])


def page(of: Listed) -> str:
    name, cls = of.name, of.cls
    text = description(cls)
    engines = ", ".join(TITLES[engine] for engine in cls.engines)
    paper = cite(name)
    return "\n\n".join(filter(None, [
        f"# {name}",
        of.does.replace("``", "`"),
        f"`thinwire.{cls.__name__}`, `--method {name}`; runs on {engines}. Promise: {of.promise}.",
        *(("## How it works", text) if text else ()),
        "## Bytes", at_a_glance(name),
        "P is the number of gradient values and N the number of ranks ([methods](../methods.md#bytes)). "
        f"Planned for {figures.MODELS[PRESET]}, {PLANNED}:", planned(cls),
        "## Measured", measured(name),
        "## Knobs", f"```{{eval-rst}}\n.. autoclass:: thinwire.{cls.__name__}\n```",
        *(("## Paper", paper) if paper else ()),
    ])) + "\n"  # fmt: skip


PLANNED = (
    "gradients only, with the default knobs, as NCCL sends it (on FSDP2 gloo sends twice as much of what the network "
    "sums)"
)


def index() -> str:
    """The table of all methods, with links, and their order in the site."""
    table = re.sub(r"^\| `([^`]+)` \w+ \|", r"| [`\1`](\1.md) |", figures.methods(), flags=re.MULTILINE)
    order = "\n".join(of.name for of in listed())
    return f"# Each method\n\n{INTRODUCTION}\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{order}\n```\n"


INTRODUCTION = (
    "Each page has the method's equations, its bytes, what was measured of it, its knobs, and its paper. What speed "
    "and loss mean in this table stands in [methods](../methods.md)."
)


def write(folder: Path) -> None:
    """Files whose text has not changed keep their time, so that a second build is short."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"index": index(), **{of.name: page(of) for of in listed()}}.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
