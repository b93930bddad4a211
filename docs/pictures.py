"""The pictures of docs/figures.py that ``thinwire compare`` does not draw: loss against speed, and against bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox

from thinwire.lab import plots
from thinwire.lab.plots import step_time as step_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tradeoff(points: Sequence[tuple[str, float, float]]) -> Figure:
    """Loss against speed, one dot per method.

    Args:
        points: (method, speed in percent of the run without an exchange, loss above dense in percent).
    """
    figure, axes = plt.subplots(figsize=(8.5, 4.8))
    gap_scale(axes, [gap for _, _, gap in points])
    axes.set_xlim(20, 104)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    draw_methods(axes, points)
    axes.set_xlabel("speed: share of the same run's without any exchange (right is better)")
    return figure


def by_bytes(points: Sequence[tuple[str, float, float]]) -> Figure:
    """Loss against bytes, one dot per method; dense is the line at 0.

    Args:
        points: (method, loss above dense in percent, bytes sent in percent of dense's).
    """
    figure, axes = plt.subplots(figsize=(8.5, 4.8))
    gap_scale(axes, [gap for _, gap, _ in points])
    axes.axhline(0, color=plots.INK, linewidth=1)
    axes.annotate("dense", (1, 0), xytext=(4, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                  va="center", color=plots.INK)  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(1.5, 110)
    axes.set_xticks([2, 5, 10, 20, 50, 100])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.minorticks_off()
    draw_methods(axes, [(method, share, gap) for method, gap, share in points])
    axes.set_xlabel("bytes sent, share of dense's (left is better)")
    return figure


def gap_scale(axes: Axes, gaps: Sequence[float]) -> None:
    """The scale of losses above dense: linear up to 5%, logarithmic beyond; what is below 2% is shaded."""
    lowest, highest = min(-1.0, 1.35 * min(gaps)), max(3.0, 1.35 * max(gaps))
    axes.axhspan(lowest, 2, color=plots.SHADE, zorder=0)
    axes.set_yscale("symlog", linthresh=5, linscale=2.5)
    axes.set_ylim(lowest, highest)
    axes.set_yticks([at for at in (-10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50) if lowest <= at <= highest])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}%" if value else "as dense")
    axes.yaxis.set_minor_locator(NullLocator())


def draw_methods(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """A dot with its name for each method: (method, x, loss above dense in percent)."""
    spots = [(x, gap, method, plots.colour(method)) for method, x, gap in points]
    for x, gap, _, tint in spots:
        axes.plot(x, gap, "o", color=tint, markersize=9)
    label_dots(axes, spots)
    axes.set_ylabel("validation loss above dense (down is better)")


def label_dots(axes: Axes, spots: Sequence[tuple[float, float, str, str]]) -> None:
    """A name beside each dot, at the first of many places where it meets no dot, other name or edge."""
    axes.figure.canvas.draw()
    dots = [axes.transData.transform(spot[:2]) for spot in spots]
    reach = 7 * axes.figure.dpi / 72
    taken = [Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach) for x, y in dots]
    for at, (x, y, name, tint) in enumerate(spots):
        for across, up, side, level in PLACES:
            text = axes.annotate(
                name, (x, y), xytext=(across, up), textcoords="offset points", ha=side, va=level, color=tint,
                fontweight="bold", annotation_clip=False,
            )  # fmt: skip
            box = text.get_window_extent()
            clear = not any(box.overlaps(other) for i, other in enumerate(taken) if i != at)
            if clear and axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0:
                break
            if (across, up, side, level) != PLACES[-1]:
                text.remove()
        taken.append(box)
        if math.hypot(across, up) > FAR:
            axes.annotate("", (x, y), xytext=(across, up), textcoords="offset points",
                          arrowprops={"arrowstyle": "-", "color": tint, "linewidth": 0.7})  # fmt: skip


PLACES = (
    (9, 0, "left", "center"), (0, 9, "center", "bottom"), (0, -9, "center", "top"), (-9, 0, "right", "center"),
    (7, 7, "left", "bottom"), (7, -7, "left", "top"), (-7, 7, "right", "bottom"), (-7, -7, "right", "top"),
    (0, 21, "center", "bottom"), (0, -21, "center", "top"),
    *((0, sign * far, "center", level) for far in (40, 60, 80) for sign, level in ((1, "bottom"), (-1, "top"))),
    *((x * far, y * far, side, "center") for far in (40, 60, 80) for x, side in ((1, "left"), (-1, "right"))
      for y in (0.6, -0.6)),
)  # fmt: skip
FAR = 30
"""Points from a dot to its name from which a line joins them."""


def walltime(runs: Sequence[tuple[str, str, Sequence[tuple[float, float]]]]) -> Figure:
    """Held-out loss against seconds of training, one panel per link; a line at dense's last loss.

    Args:
        runs: (link, method, (seconds, loss) of each evaluation).
    """
    links, methods = (list(dict.fromkeys(run[at] for run in runs)) for at in (0, 1))
    figure, panels = plt.subplots(1, len(links), figsize=(5.5 * len(links), 4.5), sharey=True, squeeze=False)
    seen: set[str] = set()
    again = {method for method in methods if plots.plain(method) in seen or seen.add(plots.plain(method))}
    for axes, link in zip(panels[0], links, strict=True):
        axes.set_title(link)
        axes.set_xlabel("seconds of training")
        for where, method, curve in runs:
            if where != link:
                continue
            line = ":" if method == "none" else "--" if method in again else "-"
            axes.plot(*zip(*curve, strict=True), line, color=plots.colour(method), linewidth=2, label=method)
            axes.plot(*curve[-1], "o", color=plots.colour(method), markersize=6)
            if method == "dense":
                axes.axhline(curve[-1][1], color=plots.INK, linewidth=0.8, alpha=0.5)
        last = [curve[-1][1] for _, _, curve in runs]
        axes.set_ylim(min(last) - 0.1, max(last) + 1.0)
    panels[0, 0].set_ylabel("held-out loss (down is better)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3,
                  frameon=False)  # fmt: skip
    return figure


def clock(runs: Sequence[tuple[str, str, str, Sequence[tuple[float, float]]]]) -> Figure:
    """Loss at the end of runs of several lengths against their seconds, one panel per link.

    Args:
        runs: (link, method, optimizer, (seconds, loss) of each length). Lines of Muon are dashed.
    """
    links = list(dict.fromkeys(run[0] for run in runs))
    figure, panels = plt.subplots(1, len(links), figsize=(5.5 * len(links), 4.5), sharey=True, squeeze=False)
    for axes, link in zip(panels[0], links, strict=True):
        axes.set_title(link)
        axes.set_xlabel("seconds of training, predicted (left is better)")
        axes.set_xscale("log")
        for _, method, optimizer, curve in (run for run in runs if run[0] == link):
            line = "--" if optimizer == "muon" else "-"
            name = {"adamw": f"{method}, AdamW", "muon": f"{method}, Muon"}[optimizer] if ":" not in method else method
            axes.plot(*zip(*curve, strict=True), line, color=plots.colour(method), linewidth=2, marker="o", label=name)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panels[0, 0].set_ylabel("held-out loss (down is better)")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4,
                  frameon=False)  # fmt: skip
    return figure


def gaps(rows: Sequence[tuple[str, str, float, float]]) -> Figure:
    """Loss above dense at the end of a run, one row per method, the lowest on top.

    Args:
        rows: (what stands at the left, method, loss above dense in percent, share of dense's bytes in percent).
    """
    rows = sorted((row for row in rows if row[1] != "dense"), key=lambda row: row[2])
    found = [row[2] for row in rows]
    lowest, highest = min(-1.0, 1.5 * min(found)), max(5.0, 1.5 * max(found))
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.36 * len(rows)))
    axes.grid(axis="y", visible=False)
    axes.set_xscale("symlog", linthresh=1, linscale=0.7)
    axes.set_xlim(lowest, highest)
    axes.set_xticks([at for at in (-10, -3, -1, 0, 1, 3, 10, 30) if lowest <= at <= highest])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}%" if value else "as dense")
    axes.minorticks_off()
    for at, (_, method, gap, share) in enumerate(rows):
        axes.plot([0, gap], [at, at], color=plots.colour(method), linewidth=1.5, alpha=0.5)
        axes.plot(gap, at, "o", color=plots.colour(method), markersize=7)
        beside(axes, at, f"{gap:+.2f}%", f"{share:.1f}%")
    axes.axvline(0, color=plots.INK, linewidth=1)
    beside(axes, -0.95, "loss", "bytes", fontweight="bold")
    plots.names(axes, [row[0] for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(plots.colour(row[1]))
    axes.set_xlabel("validation loss above dense (left is better; logarithmic beyond 1%)\n"
                    "bytes: share of what dense sends")  # fmt: skip
    return figure


def beside(axes: Axes, at: float, *words: str, **style: Any) -> None:
    """Columns to the right of the axes, in row ``at``."""
    for column, word in enumerate(words):
        axes.text(
            1.13 + 0.1 * column, at, word, transform=axes.get_yaxis_transform(), ha="right", va="center_baseline",
            color=plots.INK, **style,
        )  # fmt: skip
