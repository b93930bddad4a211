"""The pictures of a comparison: loss against step and against time, bytes per step, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, readable with any colour vision; its yellow is too light on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY, INK = "#8A8A8A", "#333333"
COMPUTE, EXPOSED = "#56B4E9", "#D55E00"
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 13,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.axisbelow": True,
    "savefig.dpi": 150,
}


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Write the PNG files of ``report`` (as ``compare`` builds it, with its rows) to ``out``; returns their paths."""
    with plt.rc_context(STYLE):
        figures = {
            "loss_by_step": loss(report, "step", "optimizer step"),
            "loss_by_time": loss(report, "wall_s", "seconds of training"),
            "bytes_per_step": traffic(report),
            "step_time": step_time(report),
        }
        paths = []
        for name, figure in figures.items():
            paths.append(out / f"{name}.png")
            figure.savefig(paths[-1], bbox_inches="tight", facecolor="white")
            plt.close(figure)
    return paths


def loss(report: dict[str, Any], x: str, label: str) -> Figure:
    """Training loss of every method; names stand to the right. Against steps, earlier lines are
    wider, so that equal ones all show.
    """
    figure, axes = plt.subplots(figsize=(8.5, 4.8))
    ends: list[tuple[float, float, str, str]] = []
    for behind, (run, colour) in enumerate(zip(reversed(report["runs"]), reversed(colours(report)), strict=True)):
        rows = [row for row in run["rows"] if row.get("loss") is not None]
        if not rows:
            continue
        xs, ys = [row[x] for row in rows], [row["loss"] for row in rows]
        silent = run["method"] == "none"
        width = 1.4 if silent else 1.8 + 0.9 * min(behind, 5) if x == "step" else 2.0
        axes.plot(xs, ys, color=colour, linewidth=width, linestyle="--" if silent else "-", zorder=3 - 0.01 * width)
        axes.plot(xs[-1], ys[-1], "o", color=colour, markersize=4 + width, zorder=3 - 0.01 * width)
        name = "none (no exchange)" if silent else run["method"]
        ends.append((xs[-1], ys[-1], name if x == "step" else f"{name}, {xs[-1]:.3g} s", colour))
    axes.set_xlabel(label)
    axes.set_ylabel("training loss, mean over ranks (nats per token)")
    axes.set_title(f"Training loss: {subtitle(report)}", pad=12)
    axes.margins(x=0.02)
    if x == "step":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label_ends(axes, ends)
    return figure


def label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names to the right of the axes, at their lines' heights, moved apart where they would overlap.

    A thin line leads to the end of a curve that reaches the right edge; the others are told by colour.
    """
    axes.figure.canvas.draw()
    height = axes.get_window_extent().height
    apart = 19 * axes.figure.dpi / 72 / height  # of the axes' height, one line of text
    spots = []
    for x, y, name, colour in ends:
        across, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        spots.append([up, across, up, name, colour])
    spots.sort(key=lambda spot: (spot[0], -spot[1]))
    for low, high in pairwise(spots):
        high[0] = max(high[0], low[0] + apart)
    over = max(0.0, spots[-1][0] - 1.0) if spots else 0.0
    for spot in spots:
        spot[0] -= over
    for high, low in pairwise(reversed(spots)):
        low[0] = min(low[0], high[0] - apart)
    for at, across, up, name, colour in spots:
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "alpha": 0.5, "shrinkA": 2, "shrinkB": 4}
        axes.annotate(
            name, xy=(across, up), xytext=(1.05, at), xycoords="axes fraction", textcoords="axes fraction",
            color=colour, va="center", fontweight="bold", annotation_clip=False,
            arrowprops=leader | {"relpos": (0, 0.5)} if across > 0.9 else None,
        )  # fmt: skip


def traffic(report: dict[str, Any]) -> Figure:
    """Bytes that node 0 sent per step: the ledger's payload as bars, the kernel's count as a mark."""
    runs = [run for run in report["runs"] if run["method"] != "none"]
    figure, axes = bars(len(runs))
    counts = [run["bytes_per_step"] for run in runs]
    kernel = [(count["kernel"] or {}).get("tx") for count in counts]
    top = max([count["ledger"] for count in counts] + [value or 0 for value in kernel] + [1])
    unit, name = next((u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")) if top >= u)
    for at, (count, seen) in enumerate(zip(counts, kernel, strict=True)):
        axes.barh(at, count["ledger"] / unit, color=PALETTE[0], height=0.6)
        if seen is not None:
            axes.plot([seen / unit] * 2, [at - 0.38, at + 0.38], color=INK, linewidth=2, solid_capstyle="butt")
        end = max(count["ledger"], seen or 0) / unit
        text = f"{count['ledger'] / unit:.3g}" + (f"  (kernel {seen / unit:.3g})" if seen is not None else "")
        axes.annotate(text, (end, at), xytext=(8, 0), textcoords="offset points", va="center", color=INK)
    names(axes, [run["method"] for run in runs])
    axes.set_xlim(0, top / unit * 1.3)
    legend = ": payload (bar), and the kernel's count with headers (mark)" if any(kernel) else ""
    axes.set_xlabel(f"{name} sent by node 0 per step{legend}")
    axes.set_title(f"Bytes per step: {subtitle(report)}", pad=12)
    return figure


def step_time(report: dict[str, Any]) -> Figure:
    """A step's time: computation, and communication that computation did not hide."""
    runs = report["runs"]
    figure, axes = bars(len(runs))
    totals = [run["summary"]["step_ms"] for run in runs]
    top = max(totals)
    for at, run in enumerate(runs):
        total = run["summary"]["step_ms"]
        hidden_out = min(run["summary"]["exposed_ms"], total)
        parts = ((0.0, total - hidden_out, COMPUTE, INK), (total - hidden_out, hidden_out, EXPOSED, "white"))
        for start, width, colour, ink in parts:
            axes.barh(at, width, left=start, color=colour, height=0.6)
            if width > 0.07 * top:
                axes.text(start + width / 2, at, f"{width:.0f}", ha="center", va="center", color=ink)
        axes.annotate(f"{total:.0f} ms", (total, at), xytext=(8, 0), textcoords="offset points", va="center",
                      color=INK, fontweight="bold")  # fmt: skip
    silent = next(run["summary"]["step_ms"] for run in runs if run["method"] == "none")
    axes.axvline(silent, color=GREY, linestyle="--", linewidth=1.2, zorder=0.5)
    names(axes, [run["method"] for run in runs])
    axes.set_xlim(0, top * 1.15)
    axes.set_xlabel("milliseconds per optimizer step (median); dashed: the run that exchanges nothing")
    axes.set_title(f"Where a step's time goes: {subtitle(report)}", pad=30)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (COMPUTE, EXPOSED)]
    labels = ["computation, and communication hidden behind it", "exposed communication"]
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(-0.01, 1.0),
                ncols=2, frameon=False, borderaxespad=0.2, handlelength=1.2)  # fmt: skip
    return figure


def bars(count: int) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8.5, 1.6 + 0.55 * count))
    axes.grid(axis="y", visible=False)
    return figure, axes


def names(axes: Axes, methods: Sequence[str]) -> None:
    """Methods down the left, the first on top."""
    axes.set_yticks(range(len(methods)), methods)
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def colours(report: dict[str, Any]) -> list[str]:
    """One per run: grey for the one that exchanges nothing, the palette in order for the rest."""
    rest = iter(PALETTE * (1 + len(report["runs"]) // len(PALETTE)))
    return [GREY if run["method"] == "none" else next(rest) for run in report["runs"]]


def subtitle(report: dict[str, Any]) -> str:
    where = f"{report['link']} per node" if report["emulated_network"] else "plain loopback, NO rate limit"
    return f"{report['preset']}, {report['nodes']} nodes x {report['ranks_per_node']}, {where}"
