"""The site's page of each method, made of what stands elsewhere: no figure in it was typed by hand.

    python docs/pages.py FOLDER         # one Markdown file per method; `make docs` does it where something has changed

The first line, the knobs and, where a paper has a module of its own, the formula are docstrings. Bytes are planned by a
rehearsal of the method. When to use it stands in docs/methods.md, measurements in docs/data, papers in README.md; what
is left is in docs/methods.toml.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import tomllib
from pathlib import Path

import figures
import torch

from thinwire.collectives import AllReduce, ReduceScatter
from thinwire.comm import CountingComm
from thinwire.ledger import Ledger
from thinwire.methods import TABLE, Listed, Method, listed, resolve
from thinwire.plan import describe
from thinwire.testing import plan_of
from thinwire.train.models import Decoder
from thinwire.train.shapes import PRESETS

HERE = Path(__file__).resolve().parent
PRESET = figures.setting(figures.SPEED[0])["preset"]
"""The model whose bytes are planned is the one whose speed was measured."""
HOSTS = (2, 16)
TITLES = {"ddp": "DDP", "fsdp2": "FSDP2", "hsdp": "HSDP"}


def texts() -> dict[str, dict[str, str]]:
    return tomllib.loads((HERE / "methods.toml").read_text())


def sections() -> dict[str, str]:
    """docs/methods.md by heading."""
    parts = re.split(r"^## (.+)\n", (HERE / "methods.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def use(name: str) -> str:
    """When to take the method: from "*Use it*" in its section of docs/methods.md to the end of the paragraph."""
    found = re.search(r"\*Use it\*(.*?)(?=\n\n|\n\*|\s*\Z)", sections().get(name, ""), re.DOTALL)
    return "" if found is None else "Use it" + found[1]


def cite(name: str) -> str:
    """The method's paper, from README's list, or else from methods.toml."""
    readme = (figures.ROOT / "README.md").read_text()
    item = rf"^\* \*\*[^*]+\*\* \(`{re.escape(name)}`\): (.*?)(?=^\*|\n\n|\Z)"
    found = re.search(item, readme, re.DOTALL | re.MULTILINE)
    return found[1].strip() if found else texts()[name].get("cite", "").strip()


def formula(cls: type[Method]) -> str:
    """As Markdown: from methods.toml, or else the docstring of the method's module, without its title."""
    given = texts()[cls.name].get("formula")
    if given:
        return f"```text\n{given.strip()}\n```"
    first = next(other for other in TABLE if other.__module__ == cls.__module__)
    doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
    return markdown(doc.partition("\n\n")[2]) if first is cls else ""


def markdown(doc: str) -> str:
    """A docstring: what is indented becomes a block of text, and roles become code."""
    doc = re.sub(r":\w+:`~?(?:thinwire\.)?([^`]+)`", r"`\1`", doc).replace("``", "`")
    return re.sub(
        r"(?:^    .*\n?|^\n(?=    ))+",
        lambda found: "```text\n" + inspect.cleandoc("\n" + found[0]).rstrip() + "\n```\n",
        doc,
        flags=re.MULTILINE,
    )


def glance(name: str) -> str:
    """The method's rows of the first table of docs/methods.md."""
    head, *rows = re.findall(r"^\|.*\|$", sections()["At a glance"], re.MULTILINE)
    return "\n".join([head, *rows[:1], *(row for row in rows if re.match(rf"\| `{re.escape(name)}[`(]", row))])


@functools.cache
def model() -> torch.nn.Module:
    with torch.device("meta"):
        return Decoder(PRESETS[PRESET])


def planned(cls: type[Method]) -> str:
    """Bytes of gradients per step and rank, by engine and number of hosts."""
    lines = ["| engine | hosts of one rank | sent per step | dense | share of dense |", "|---|---:|---:|---:|---:|"]
    for engine in ("ddp", "fsdp2"):
        for hosts in HOSTS if engine in cls.engines else ():
            comm = CountingComm(0, hosts, list(range(hosts)), Ledger())
            sharded = engine == "fsdp2"
            parameters = describe(model(), chunks=hosts if sharded else 1).values()
            plan = plan_of(cls(), parameters, (ReduceScatter if sharded else AllReduce)(comm))
            lines.append(
                f"| {TITLES[engine]} | {hosts} | {plan.wire_bytes / 1e6:.2f} MB | {plan.dense_bytes / 1e6:.2f} MB | "
                f"{plan.wire_bytes / plan.dense_bytes:.1%} |"
            )
    return "\n".join(lines)


def is_of(spec: str, name: str) -> bool:
    return " " not in spec and resolve(spec).name == name


def speeds(name: str) -> tuple[str, list[figures.Row]]:
    """The measured rows of the method, and their settings; "" if there are none."""
    rows = [row for row in figures.read("speed") if is_of(row["method"], name)]
    lines = [
        "| as | setting | step | share of the speed of `none` | `dense` there | exposed | sent per step |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        where = figures.setting(row["setting"])
        dense = next((of for of in figures.of("speed", row["setting"]) if of["method"] == "dense"), None)
        share = f"{dense['speed_percent']}%" if dense else "-"
        lines.append(
            f"| `{row['method']}` | {setting(where)} | {row['step_ms']} ms | {row['speed_percent']}% | {share} | "
            f"{row['exposed_ms']} ms | {row['sent_mb']} MB |"
        )
    return "\n".join(lines) if rows else "", used(rows)


def losses(name: str) -> tuple[str, list[figures.Row]]:
    """As :func:`speeds`."""
    rows = [row for row in figures.read("loss") if is_of(row["method"], name)]
    lines = [
        "| as | run | setting | validation loss above dense | bytes, share of dense |",
        "|---|---|---|---:|---:|",
    ]
    lines += [
        f"| `{row['method']}` | {row['label']} | {setting(figures.setting(row['setting']))} | {row['gap_percent']}% | "
        f"{row['share_percent']}% |"
        for row in rows
    ]
    return "\n".join(lines) if rows else "", used(rows)


def regimes(name: str) -> str:
    """Rows of benchmarks/regimes.py; "" if there are none."""
    rows = [row for row in figures.regime_rows() if row.gap is not None and is_of(row.method, name)]
    head = ("as", "regime", "model", "text", "ranks", "steps", "learning rate", "loss above dense", "share of bytes")
    lines = ["| " + " | ".join(head) + " |", "|---" * 4 + "|---:" * 5 + "|"]
    lines += [
        f"| `{row.method}` | {row.regime} | `{row.model}` | {row.text} | {row.ranks} | {row.steps} | {row.lr:g} | "
        f"{row.gap:+.2f}% | " + (f"{row.share_all:.1f}%" if row.share_all is not None else "-") + " |"
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
        link = "[regimes](../training.md#regimes)"
        parts += ["### Loss in other regimes", f"By `benchmarks/regimes.py`: see {link}.", table]
    if not parts:
        return "Neither the speed nor the loss of this method is in the results files."
    for where in settings:
        parts += [f"Measured {where['date']} at commit {where['commit']}:", f"```sh\n{where['command']}\n```"]
    return "\n\n".join(["On CPUs with gloo. Where a setting names hosts and a link, these are emulated.", *parts])


def page(of: Listed) -> str:
    name, cls = of.name, of.cls
    engines = ", ".join(TITLES[engine] for engine in cls.engines)
    delay = cls().delay
    rule = "" if delay is None else f"By the [rule behind the plan's warning](../training.md#{RULE}), it costs {delay}."
    aside = " [What differs from the paper, and more](../methods.md#" + name + ")."
    nested = re.sub(r"\]\((?=[\w-]+\.md)", "](../", use(name))
    return "\n\n".join(filter(None, [
        f"# {name}",
        of.does.replace("``", "`"),
        f"`thinwire.{cls.__name__}`, `--method {name}`; runs on {engines}. Promise: {of.card.promise}.",
        "## Idea", texts()[name]["idea"].strip(),
        "## Formula", formula(cls),
        "## Bytes",
        "P gradient values, N ranks; the other letters are knobs. [How to read it](../methods.md).", glance(name),
        f"Planned for {figures.MODELS[PRESET]}, {PLANNED}:", planned(cls),
        "## When to use it", nested + aside,
        "## Measured", measured(name), rule,
        "## Knobs", f"```{{eval-rst}}\n.. autoclass:: thinwire.{cls.__name__}\n```",
        "## Citation", cite(name),
    ])) + "\n"  # fmt: skip


PLANNED = (
    "gradients only, with the default knobs, as NCCL sends it (on FSDP2 gloo sends twice as much of what the network "
    "sums)"
)
RULE = "what-a-method-will-cost-the-rule-behind-the-plan-s-warning"


def index() -> str:
    """README's table of all methods, with links, and their order in the site."""
    table = re.sub(r"^\| `([^`]+)` \w+ \|", r"| [`\1`](\1.md) |", figures.methods(), flags=re.MULTILINE)
    order = "\n".join(cls.name for cls in TABLE)
    return f"# Each method\n\n{INTRODUCTION}\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{order}\n```\n"


INTRODUCTION = (
    "Idea, formula, bytes, when to use it, what was measured, and the paper. Speed and loss are those of the "
    "[first page](../index.md)."
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
