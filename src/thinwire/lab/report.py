"""The report of a comparison: a table for the terminal, report.md and report.html."""

from __future__ import annotations

import base64
import html
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from markdown_it import MarkdownIt  # rich brings it
from rich import box
from rich.console import Console
from rich.table import Table

from thinwire.base.terminal import counted
from thinwire.lab import framing, verdict
from thinwire.lab.verdict import DENSE, SILENT, Run, Span
from thinwire.plan.plan import human


def network(report: dict[str, Any]) -> str:
    """Describe the network of the runs in one line."""
    per_node = report["ranks_per_node"]
    world = f"{counted(report['nodes'], 'node')} of {counted(per_node, 'rank')}"
    if not report["emulated_network"]:
        return f"{world}, plain loopback, NO rate limit"
    frames = f", MTU {report['mtu']}" if report["mtu"] != 1500 else ""
    distance = f", {report['distance']} (by {report['delayed_by']})" if report.get("distance") else ""
    return f"{world}, {report['link']} per node{frames}{distance}"


def _shown(value: float | None, digits: str) -> str:
    return "-" if value is None else f"{value:{digits}}"


def _faster(run: Run) -> str:
    span = run["faster"]
    if span is None or run["method"] == DENSE:
        return "-"
    is_bounded = math.isfinite(span.high)
    return f"{span.mean:.2f}x ({span.low:.2f} to {span.high:.2f})" if is_bounded else f"{span.mean:.2f}x (not known)"


def _final(run: Run) -> str:
    span: Span | None = run["final"]
    spread = f" ± {span.half:.4f}" if span is not None and len(run["parts"]) > 1 else ""
    return _shown(run["summary"].get("valid_loss"), ".4f") + spread


def _gap(run: Run) -> str:
    span = run["loss_gap"]
    if span is None or run["method"] in (SILENT, DENSE):
        return "-"
    return verdict.shown(span)


def _reached(run: Run, key: str, digits: str) -> str:
    """Show the mean over seeds of ``key`` where a run reached dense's final loss, or the number of seeds that did."""
    points = run["to_dense"]
    if run["method"] == SILENT or not points:
        return "-"
    reached = [point[key] for point in points if point]
    if len(reached) < len(points):
        return f"{len(reached)} of {len(points)} seeds" if reached else "not reached"
    return f"{statistics.fmean(reached):{digits}}"


COLUMNS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("method", lambda run: run["method"]),
    ("step, ms", lambda run: f"{run['summary']['step_ms']:.0f}"),
    ("x none", lambda run: _shown(run["step_to_none"], ".2f")),
    ("x dense", lambda run: _shown(run["step_to_dense"], ".2f")),
    ("faster than dense", _faster),
    ("exposed, ms", lambda run: f"{run['summary']['exposed_ms']:.0f}"),
    ("codec, ms", lambda run: f"{run['summary']['encode_ms'] + run['summary']['decode_ms']:.0f}"),
    ("compressed values", lambda run: _shown(run["summary"].get("compressed_values"), ".1%")),
    ("sent/step", lambda run: human(run["bytes_per_step"]["ledger"])),
    ("kernel", lambda run: human(count["tx"]) if (count := run["bytes_per_step"]["kernel"]) else "-"),
    ("kernel/framed", lambda run: _shown(run["bytes_per_step"]["kernel_to_framed"], ".3f")),
    ("link use", lambda run: _shown(run["link_use"], ".0%")),
    ("train loss", lambda run: f"{run['summary']['train_loss']:.4f}"),
    ("valid loss", _final),
    ("loss to dense", _gap),
    ("s to dense's loss", lambda run: _reached(run, "wall_s", ".1f")),
    ("tokens to it", lambda run: _reached(run, "tokens", ",.0f")),
)
SHORT = ("method", "step, ms", "x none", "faster than dense", "exposed, ms", "sent/step", "valid loss",
         "loss to dense", "s to dense's loss")  # fmt: skip
"""The columns on a terminal that is wide enough."""
BRIEF = ("method", "faster", "loss", "to dense", "sent/step")
"""The columns on a narrow one: the speed without its interval."""
ALL = tuple(name for name, _ in COLUMNS)
CELLS = {
    **dict(COLUMNS),
    "faster": lambda run: _faster(run).partition(" ")[0],
    "loss": _final,
    "to dense": _gap,
}


def cells(run: Run, columns: Sequence[str]) -> list[str]:
    if run["failed"]:
        return [run["method"], "failed", *["-"] * (len(columns) - 2)]
    return [CELLS[name](run) for name in columns]


def title(report: dict[str, Any]) -> str:
    seeds = f", {len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else ""
    ended = next((run for run in reversed(report["runs"]) if not run["failed"]), None)
    long = f"{report['steps']} steps" if ended is None else verdict.length(report, ended)
    return f"{report['model']}, {long}{seeds}, {network(report)}"


def table(report: dict[str, Any], columns: Sequence[str] = ALL, lines: box.Box = box.SIMPLE_HEAD) -> Table:
    """Make the table of ``report``. Only the names of methods are broken where the width is short."""
    out = Table(title=title(report), title_justify="left", box=lines)
    for index, name in enumerate(columns):
        out.add_column(name, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    for run in report["runs"]:
        out.add_row(*cells(run, columns))
    return out


def fitting(report: dict[str, Any], width: int) -> Table:
    """Return the table with as many columns as a terminal of this ``width`` has room for."""
    console = Console(width=1000)
    wide = table(report, SHORT)
    if console.measure(wide).maximum <= width:
        return wide
    brief = table(report, BRIEF)
    brief.caption, brief.caption_justify = "All columns are in report.md.", "left"
    return brief


def notes(report: dict[str, Any]) -> list[str]:
    """List each method's own flags, and why it failed or its plan's note."""
    lines = []
    for run in report["runs"]:
        method = run["method"]
        if run["flags"]:
            lines.append(f"{method}: trained with {' '.join(run['flags'])}, which dense was not")
        if run["failed"]:
            lines.append(f"{method} failed: {run['failed']}")
            continue
        if run["faster"] and math.isinf(run["faster"].high):
            enough = 2 * verdict.round_steps(run) + 2
            lines.append(f"{method}: its speed takes at least two whole rounds to tell: --steps {enough} or more")
        if note := run["summary"].get("note"):
            lines.append(note if note.startswith(method) else f"{method}: {note}")
    return lines


def explained(report: dict[str, Any]) -> list[str]:
    sources = [run["bytes_per_step"]["kernel_source"] for run in report["runs"] if not run["failed"]]
    return [
        "step: median milliseconds per optimizer step; where they differ, as with rounds of local steps, the median of "
        "the means of whole rounds. x none, x dense: against the run that exchanges nothing (its ranks drift apart; it "
        "is there for its speed, not for its loss), and against dense.",
        "faster than dense: dense's step over the method's; in parentheses "
        + ("the 95% t-interval over seeds." if len(report["seeds"]) > 1 else
           "what the quartiles of both runs' steps leave possible."),
        "exposed: communication that computation did not hide. codec: encoding and decoding, hidden or not.",
        "compressed values: share of the model's values that the method compresses; the others are sent in fp32.",
        "sent/step: payload bytes that a node's ranks sent to other nodes, by Thinwire's ledger.",
        f"kernel: bytes that node 0's interface sent per step ({sources[-1] if sources else 'no counters'}).",
        "kernel/framed: against the ledger's bytes of the same steps in full frames "
        f"({framing.frame(report['mtu'])} bytes for {framing.segment(report['mtu'])} of payload); "
        "above 1: acknowledgements and small messages.",
        "link use: kernel bytes over what the link could carry while a collective was in flight (small messages can "
        "pass 100%: a burst of 66 kB, or 1 ms of the rate, goes through at once).",
        "loss to dense: the final loss on held-out text (on training text where there was no evaluation) above "
        "dense's. ±: half of a 95% interval, 1.96 standard errors of the difference on the same stretches of that text"
        + (", and the t-interval over seeds, each method with the same ones." if len(report["seeds"]) > 1 else
           "; it says nothing of other seeds. None: the run has no losses by window."),
        "s to dense's loss, tokens to it: seconds of training, and tokens of all ranks, until the training loss was "
        "down at dense's at the end; both averaged over as many steps as are a tenth of the run.",
    ]  # fmt: skip


def markdown(report: dict[str, Any], pictures: Sequence[Path]) -> str:
    """Write report.md. The first of ``pictures`` stands before the table, the others behind it."""

    def bullets(lines: Sequence[str]) -> str:
        return "\n".join(f"* {line}" for line in lines)

    def grid(columns: Sequence[str]) -> str:
        head, *rows = (
            "| " + " | ".join(row) + " |" for row in (columns, *(cells(run, columns) for run in report["runs"]))
        )
        return "\n".join([head, "|---" + "|---:" * (len(columns) - 1) + "|", *rows])

    shown = [f"![{path.stem.replace('_', ' ')}]({path.name})" for path in pictures]
    loopback = "**No network was emulated: the ranks ran on plain loopback without a rate limit.**"
    blocks = [
        f"# {title(report)}", f"**{report['verdict']}**", "" if report["emulated_network"] else loopback,
        *shown[:1], grid(SHORT), bullets(notes(report)), *shown[1:],
        "## All columns", grid(ALL), bullets(explained(report)),
        "## How it was measured", f"`{report['command']}`", report["machine"],
    ]  # fmt: skip
    return "\n\n".join(filter(None, blocks)) + "\n"


PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>thinwire compare: $title</title>
<style>
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 + p { font-size: 1.2rem; border-left: 4px solid #0072b2; padding-left: 1rem }
table { display: block; overflow-x: auto; border-collapse: collapse }
th, td { padding: .3rem .6rem; font-size: .85rem; white-space: nowrap; border-bottom: 1px solid #8884 }
td { font-variant-numeric: tabular-nums }
img { max-width: 100%; border-radius: .4rem; margin: .5rem 0 }
code { overflow-wrap: anywhere }
li { font-size: .9rem }
@property --fade { syntax: "<length>"; inherits: false; initial-value: 0px }
@keyframes fade { from { --fade: 2rem } to { --fade: 0px } }
table, p:has(> img) { animation: fade linear; animation-timeline: scroll(self inline);
  mask-image: linear-gradient(to left, #0003, #000 var(--fade)) }
@media (max-width: 46em) { p:has(> img) { overflow-x: auto } p > img { max-width: none; min-width: 36rem } }
</style>
$body
</html>
""")


def page(report: dict[str, Any], pictures: Sequence[Path]) -> str:
    """Write report.html: :func:`markdown` with the pictures, in one file."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown(report, pictures))
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        body = body.replace(f'src="{path.name}"', f'src="data:image/svg+xml;base64,{data}"')
    return PAGE.substitute(title=html.escape(title(report)), body=body)
