"""The pictures of docs/figures.py that ``thinwire compare`` does not draw: loss against speed, and against bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle
from textwrap import fill
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from thinwire.errors import ThinwireError
from thinwire.lab import plots
from thinwire.lab.plots import step_time as step_time
from thinwire.methods import resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def tradeoff(points: Sequence[tuple[str, float, float, bool]]) -> Figure:
    """Loss against speed, one dot per method.

    Args:
        points: (method, speed in percent of the run without an exchange, loss above dense in percent, is it a ring: one
            of the two was measured in another setting).
    """
    figure, axes = plt.subplots(figsize=(8.5, 5.2))
    lowest = 2 * min([-0.25, *(point[2] for point in points)])
    axes.axhspan(lowest, 1, color="#EEF5EE", zorder=0)
    axes.set_yscale("symlog", linthresh=1, linscale=1.2)
    axes.set_ylim(lowest, 100)
    axes.set_xlim(20, 104)
    axes.set_yticks([0, 1, 10, 50], ["as dense", "+1%", "+10%", "+50%"])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    spots = []
    for method, fast, gap, ring in points:
        tint = plots.colour(method)
        inside = "white" if ring else tint
        axes.plot(fast, gap, "o", color=tint, markersize=9, markerfacecolor=inside, markeredgewidth=2)
        spots.append((fast, gap, method, tint))
    label_dots(axes, spots)
    axes.set_xlabel("speed: share of the same run's without any exchange (right is better)")
    axes.set_ylabel("validation loss above dense (down is better)")
    return figure


FAMILIES = {
    "fewer bits": ("#0072B2", ("fp32", "bf16", "bf16-acc32", "int8", "fp8", "loco", "sdp4bit", "zeropp", "qsdp")),
    "signs": ("#117733", ("onebit-adam", "sign")),
    "projections": ("#8A7A00", ("powersgd", "separate")),
    "sparse gradients": ("#CC6677", ("topk", "dgc", "radius", "scape", "demo")),
    "sparse gradients, one mask": ("#AA4499", ("tagc", "lhc")),
    "updates": ("#D55E00", ("trickle", "frozen-adam")),
    "local steps": ("#44AA99", ("local-steps",)),
    "others": ("#000000", ()),
}
"""What travels: its colour, and the methods. What sends steps (feedback="update") is among the updates."""


def family(method: str) -> str:
    """Of ``method`` with its knobs, as on the command line."""
    with suppress(ThinwireError):  # what a report names may be of another version
        if resolve(method.split(" --")[0]).card.promise.of == "updates":
            return "updates"
    return next((family for family, (_, names) in FAMILIES.items() if plots.plain(method) in names), "others")


def regimes(points: Sequence[tuple[str, str, str, float, float]]) -> Figure:
    """Loss against bytes, one dot per method and setting, one panel per regime; dense is the line at 0.

    Args:
        points: (regime, setting, method, loss above dense in percent, bytes of compressed tensors in percent of
            dense's). The dots of a method in one panel are joined. Those have names that :func:`worth_a_name` says.
    """
    panels, settings = (list(dict.fromkeys(point[at] for point in points)) for at in (0, 1))
    shape = dict(zip(settings, cycle("os^Dv<>PX*hpd"), strict=False))
    figure, several = plt.subplots(
        max(len(panels), 1), figsize=(8.5, 6.0 * max(len(panels), 1)), sharex=True, squeeze=False
    )
    for axes, panel in zip(several[:, 0], panels or [""], strict=True):
        mine = [point for point in points if point[0] == panel]
        limits(axes, [point[3] for point in mine], [point[4] for point in points])
        axes.set_title(panel)
        axes.set_ylabel("validation loss above dense\n(down is better)")
        spots: list[tuple[float, float, str, str]] = []
        named = worth_a_name(mine)
        for point in mine:
            _, setting, method, gap, share = point
            tint = FAMILIES[family(method)][0]
            axes.plot(share, gap, shape[setting], color=tint, markersize=7, zorder=3)
            spots.append((share, gap, fill(method.replace(",", ", "), 30) if point in named else "", tint))
        for method in {point[2] for point in mine}:
            joined = sorted((point[4], point[3]) for point in mine if point[2] == method)
            axes.plot(*zip(*joined, strict=True), color=FAMILIES[family(method)][0], linewidth=1, alpha=0.4)
        label_dots(axes, spots, fontsize=8)
    several[-1, 0].set_xlabel("bytes of compressed tensors, share of dense's (left is better)")
    present = {family(point[2]) for point in points}
    handles = [Line2D([], [], color=tint, marker="o", linestyle="", label=name)
               for name, (tint, _) in FAMILIES.items() if name in present]  # fmt: skip
    handles += [Line2D([], [], color=plots.GREY, marker=shape[name], linestyle="", label=name) for name in settings]
    if handles:
        below = several[-1, 0].get_position().y0 - 0.75 / figure.get_figheight()
        figure.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, below), ncols=3, frameon=False)
    return figure


def worth_a_name(points: Sequence[tuple[str, str, str, float, float]]) -> list[tuple[str, str, str, float, float]]:
    """Of ``points``, as :func:`regimes` has them: each family's lowest loss, and its fewest bytes below dense.

    One dot per method. The others are in the tables: more names than that nobody can read.
    """
    found: dict[str, tuple[str, str, str, float, float]] = {}
    for name in dict.fromkeys(family(point[2]) for point in points):
        mine = [point for point in points if family(point[2]) == name]
        below = [point for point in mine if point[3] < 0]
        best = [min(mine, key=lambda point: point[3])] + sorted(below, key=lambda point: point[4])[:1]
        found |= {point[2]: point for point in best if point[2] not in found}
    return list(found.values())


def limits(axes: Axes, gaps: Sequence[float], shares: Sequence[float]) -> None:
    """The scales of a panel of :func:`regimes`: linear up to 5% from dense, and logarithmic beyond."""
    axes.axhline(0, color=plots.INK, linewidth=1)
    axes.annotate("dense", (1, 0), xytext=(4, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                  va="center", color=plots.INK)  # fmt: skip
    axes.set_yscale("symlog", linthresh=5, linscale=1.5)
    axes.set_ylim(1.6 * min([-1, *gaps]), 1.3 * max([1, *gaps]))
    axes.set_yticks([at for at in (-50, -20, -10, -5, -2, 0, 2, 5, 10, 20, 50, 100)
                     if axes.get_ylim()[0] <= at <= axes.get_ylim()[1]])  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}%" if value else "0")
    axes.set_xscale("log")
    axes.set_xlim(min([1, *shares]) / 4, 150)  # with room for names
    axes.set_xticks([at for at in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if at >= axes.get_xlim()[0]])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.minorticks_off()


def label_dots(axes: Axes, spots: Sequence[tuple[float, float, str, str]], **style: Any) -> None:
    """A name beside each dot, at the first of many places where it meets no dot, no other name and no edge.

    A dot without a name keeps its place free.
    """
    axes.figure.canvas.draw()
    dots = [axes.transData.transform(spot[:2]) for spot in spots]
    reach = 7 * axes.figure.dpi / 72
    taken = [Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach) for x, y in dots]
    for at, (x, y, name, tint) in enumerate(spots):
        if not name:
            continue
        for across, up, side, level in PLACES:
            text = axes.annotate(
                name, (x, y), xytext=(across, up), textcoords="offset points", ha=side, va=level, color=tint,
                fontweight="bold", annotation_clip=False, **style,
            )  # fmt: skip
            box = text.get_window_extent()
            clear = not any(box.overlaps(other) for i, other in enumerate(taken) if i != at)
            if clear and box.x1 <= axes.bbox.x1 and box.x0 >= axes.bbox.x0:
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


def gaps(rows: Sequence[tuple[str, str, float, float]]) -> Figure:
    """Loss above dense at the end of a run, one row per method, the nearest to dense on top.

    Args:
        rows: (what stands at the left, method, loss above dense in percent, share of dense's bytes in percent).
    """
    rows = sorted((row for row in rows if row[1] != "dense"), key=lambda row: row[2])
    figure, axes = plt.subplots(figsize=(8.5, 1.2 + 0.29 * len(rows)))
    axes.grid(axis="y", visible=False)
    axes.set_xscale("symlog", linthresh=1, linscale=0.7)
    axes.set_xlim(-1, 100)
    axes.set_xticks([-1, 0, 1, 10, 50], ["-1%", "as dense", "+1%", "+10%", "+50%"])
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
    axes.set_xlabel("validation loss above dense (left is better); bytes: share of what dense sends")
    return figure


def beside(axes: Axes, at: float, *words: str, **style: Any) -> None:
    """Columns to the right of the axes, in row ``at``."""
    for column, word in enumerate(words):
        axes.text(
            1.1 + 0.1 * column, at, word, transform=axes.get_yaxis_transform(), ha="right", va="center_baseline",
            color=plots.INK, **style,
        )  # fmt: skip
