"""The pictures of a comparison: where a step's time goes, loss against step, time and bytes, bytes per step.

They are SVG: text stays text, and colours follow the reader's light or dark mode.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from thinwire.base.files import write
from thinwire.lab.report import network
from thinwire.plan.plan import human

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, INK, GRID, SHADE = "#8A8A8A", "#333333", "#E6E6E6", "#F5F5F5"
PAPER = "#FFFFFE"  # white, but for what is white on a bar in dark mode, too
COMPUTE, EXPOSED, ON_BAR = "#56B4E9", "#D55D00", "#222222"
# One colour per method in every picture, distinct for any colour vision (after Paul Tol's muted palette and Okabe and
# Ito's). The baselines are grey.
COLOURS = {
    "none": "#A0A0A0", "dense": "#1A1A1A", "fp32": "#5C5C5C", "bf16": "#7A7A7A",
    "int8": "#0072B2", "loco": "#44AA99", "onebit-adam": "#117733",
    "sdp4bit": "#332288", "zeropp": "#332288", "qsdp": "#332288",
    "powersgd": "#8A7A00", "separate": "#E69F00", "scape": "#D55E00", "radius": "#CC6677",
    "tagc": "#AA4499", "lhc": "#AA4499", "topk": "#882255", "dgc": "#882255",
    "trickle": "#B22222", "sign": "#117733", "local-steps": "#44AA99",
}  # fmt: skip
OTHER = "#010101"
"""The colour of the user's own methods. (Matplotlib leaves pure black out of a file, where DARK cannot find it.)"""
DARK = {
    PAPER: "#131416", INK: "#D5D7DB", GREY: "#8F939A", GRID: "#32353B", SHADE: "#22252A", OTHER: "#FFFFFF",
    "#1A1A1A": "#F4F4F4", "#5C5C5C": "#B4B4B4", "#7A7A7A": "#9C9C9C", "#0072B2": "#4FA9E6", "#44AA99": "#5CC4B3",
    "#117733": "#3FB568", "#332288": "#9F92F2", "#8A7A00": "#C7B42A", "#D55E00": "#F0803C", "#CC6677": "#E88C9A",
    "#AA4499": "#D884CA", "#882255": "#D8709A", "#B22222": "#FF6B6B",
}  # fmt: skip
"""A colour -> what it is in dark mode; others stay as they are."""
DASHES = ("-", "--", ":", "-.")
"""Line styles of the first, second, ... run of one colour."""
PANEL_CURVES = 8
"""Most curves in one panel. More runs take more panels, each with the grey curves."""
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],  # Verdana is as wide
    "svg.fonttype": "none",
    "svg.hashsalt": "thinwire",  # the same picture is the same file
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
}


def colour(method: str) -> str:
    """Choose the colour of ``method``, as written on the command line; black for the user's own methods."""
    return COLOURS.get(plain(method), OTHER)


def plain(method: str) -> str:
    """Return the name of ``method`` without knobs and flags."""
    return re.split(r"[(: ]", method.strip(), maxsplit=1)[0]


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Write pictures of the methods in ``report`` that have not failed, if any, to ``out``; return their paths, the
    most important first."""
    report = report | {"runs": [run for run in report["runs"] if not run["failed"]]}
    if not report["runs"]:
        return []
    with plt.rc_context(STYLE):
        figures = {
            "step_time": step_time(report),
            "loss_by_time": loss(report, "wall_s", "seconds of training"),
            "loss_by_step": loss(report, "step", "optimizer step"),
            "loss_by_bytes": loss(report, "sent", "sent by a node (logarithmic)"),
            "bytes_per_step": traffic(report),
        }
        for name, figure in figures.items():
            save(figure, out / f"{name}.svg")
    return [out / f"{name}.svg" for name in figures]


def save(figure: Figure, path: Path, note: str | None = None) -> None:
    """Write an SVG with ``note`` as its description, and close the figure."""
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Description": note}
    figure.savefig(buffer, format="svg", bbox_inches="tight", facecolor=PAPER, metadata=metadata)
    plt.close(figure)
    head, body = buffer.getvalue().split("<defs>", 1)
    write(path, f"{head}{_dark_mode()}\n <defs>{body}")


def _dark_mode() -> str:
    """Write a style that turns colours into those of DARK: stronger than those that Matplotlib gives each element."""
    rules = [
        f'[style*="{property_name}: {light.lower()}"] {{ {property_name}: {dark} !important }}'
        for light, dark in DARK.items()
        for property_name in ("fill", "stroke")
    ]
    return "<style>@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}</style>"


def loss(report: dict[str, Any], x: str, label: str) -> Figure:
    """Draw the training loss of every method: the mean over seeds, and a band from the least to the largest.

    Earlier lines are wider, so that equal lines all show. The plot against bytes ("sent") leaves the silent run out.
    """
    runs = [run for run in report["runs"] if run["rows"] and (x != "sent" or run["method"] != "none")]
    grey = [run for run in runs if run["method"] in ("none", "dense")]
    coloured = [run for run in runs if run not in grey]
    capacity = PANEL_CURVES - len(grey)
    panels = [grey + coloured[first : first + capacity] for first in range(0, max(len(coloured), 1), capacity)]
    figure, axes_grid = plt.subplots(len(panels), sharex=True, figsize=(8.5, 4.8 * len(panels)), squeeze=False)
    for axes, panel in zip(axes_grid[:, 0], panels, strict=True):
        curves(axes, panel, x)
        axes.set_ylabel("training loss, mean over ranks\n(nats per token)")
        axes.margins(x=0.02)
        if x == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if x == "sent":
            if any(row[x] for run in panel for row in run["rows"]):  # on one node nothing is
                axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: human(value))
    seeds = f"\nmean and range of {len(report['seeds'])} seeds" if len(report["seeds"]) > 1 else ""
    axes_grid[0, 0].set_title(f"Training loss: {subtitle(report)}{seeds}", pad=12)
    axes_grid[-1, 0].set_xlabel(label)
    return figure


def curves(axes: Axes, runs: Sequence[dict[str, Any]], x: str) -> None:
    """Draw one panel of :func:`loss`."""
    tints: list[str] = []
    for index, run in enumerate(runs):
        xs, ys, lowest, largest = ([row[key] for row in run["rows"]] for key in (x, "loss", "least", "largest"))
        tint, silent = colour(run["method"]), run["method"] == "none"
        dashes = "--" if silent else DASHES[tints.count(tint) % len(DASHES)]
        tints.append(tint)
        width = 1.4 if silent else 1.6 + 0.35 * (len(runs) - 1 - index) if x == "step" else 2.0
        name = "none (no exchange)" if silent else run["method"]
        total = {"wall_s": f", {xs[-1]:.3g} s", "sent": f", {human(xs[-1])}"}.get(x, "")
        axes.plot(
            xs, ys, dashes, color=tint, linewidth=width, zorder=3 - 0.01 * width, label=name + total,
            marker="o", markevery=[-1], markersize=4 + width,
        )  # fmt: skip
        if lowest != largest:
            axes.fill_between(xs, lowest, largest, color=tint, alpha=0.12, linewidth=0)
    label_curves(axes)


def label_curves(axes: Axes) -> None:
    """Write the curves' names to the right of the axes, in the order of their ends from top to bottom."""
    lines = sorted(axes.lines, key=lambda line: np.asarray(line.get_ydata())[-1], reverse=True)
    axes.legend(handles=lines, labelcolor="linecolor", prop={"weight": "bold"}, frameon=False, handlelength=2.5,
                loc="center left", bbox_to_anchor=(1.01, 0.5))  # fmt: skip


def traffic(report: dict[str, Any]) -> Figure:
    """Draw the bytes that node 0 sent per step: the ledger's payload as bars, the kernel's count as marks."""
    runs = [run for run in report["runs"] if run["method"] != "none"]
    figure, axes = bars([run["method"] for run in runs])
    ledger = [run["bytes_per_step"]["ledger"] for run in runs]
    kernel = [(run["bytes_per_step"]["kernel"] or {}).get("tx") for run in runs]
    for index, (run, payload, sent) in enumerate(zip(runs, ledger, kernel, strict=True)):
        axes.barh(index, payload, color=colour(run["method"]), height=0.6)
        if sent is not None:
            axes.plot([sent] * 2, [index - 0.38, index + 0.38], color=INK, linewidth=2, solid_capstyle="butt")
        text = human(payload) + (f"  (kernel {human(sent)})" if sent is not None else "")
        axes.annotate(text, (max(payload, sent or 0), index), xytext=(8, 0), textcoords="offset points", va="center",
                      color=INK)  # fmt: skip
    axes.set_xlim(0, 1.3 * max([1, *ledger, *filter(None, kernel)]))
    axes.xaxis.set_major_formatter(lambda value, _: human(value))
    legend = ": payload (bar), and the kernel's count with headers (mark)" if any(kernel) else ""
    axes.set_xlabel(f"sent by node 0 per step{legend}")
    axes.set_title(f"Bytes per step: {subtitle(report)}", pad=12)
    return figure


def step_time(report: dict[str, Any]) -> Figure:
    """Draw a step's time: computation, and exposed communication."""
    runs = report["runs"]
    figure, axes = bars([run["method"] for run in runs])
    totals = [run["summary"]["step_ms"] for run in runs]
    exposed = [min(run["summary"]["exposed_ms"], total) for run, total in zip(runs, totals, strict=True)]
    hidden = [total - waited for total, waited in zip(totals, exposed, strict=True)]
    for widths, starts, tint, ink, label in (
        (hidden, [0.0] * len(runs), COMPUTE, ON_BAR, "computation, and communication hidden behind it"),
        (exposed, hidden, EXPOSED, "white", "exposed communication"),
    ):
        spans = axes.barh(range(len(runs)), widths, left=starts, color=tint, height=0.6, label=label)
        texts = [f"{width:.0f}" if width > 0.07 * max(totals) else "" for width in widths]
        axes.bar_label(spans, texts, label_type="center", color=ink)
    axes.bar_label(spans, [f"{total:.0f} ms" for total in totals], padding=8, color=INK, fontweight="bold")
    for silent in (run for run in runs if run["method"] == "none"):
        axes.axvline(silent["summary"]["step_ms"], color=GREY, linestyle="--", linewidth=1.2, zorder=0.5)
    axes.set_xlim(0, max(totals) * 1.15)
    axes.set_xlabel("milliseconds per optimizer step (median); dashed: the run that exchanges nothing")
    axes.set_title(f"Where a step's time goes: {subtitle(report)}", pad=30)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, frameon=False, borderaxespad=0.2,
                handlelength=1.2)  # fmt: skip
    return figure


def bars(methods: Sequence[str]) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8.5, 1.6 + 0.55 * len(methods)))
    axes.grid(axis="y", visible=False)
    names(axes, methods)
    return figure, axes


def names(axes: Axes, methods: Sequence[str]) -> None:
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def subtitle(report: dict[str, Any]) -> str:
    return f"{report['model']}, {network(report)}"
