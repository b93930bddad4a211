"""The pictures of a simulation: a step's time over the link's rate, and over the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import counted
from thinwire.lab.plots import DASHES, GREY, INK, PANEL_CURVES, SHADE, STYLE, colour, save
from thinwire.predict.play import Prediction
from thinwire.predict.simulate import DENSE, Job, Simulation, at_rates, bits, pays_below, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATES = np.geomspace(10e6 / 8, 400e9 / 8, 24).tolist()
"""Bytes/s: 10 Mbit/s to 400 Gbit/s."""
TIMES = (1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 36000, 360000)
"""Seconds that an axis names, with multiples where it is short."""
LINE = 0.22
"""Inches: height of a label."""


def links(simulation: Simulation, path: Path) -> Path:
    """Draw a step's time of each method over the rate out of a node; say up to which rate it pays, by WORTH."""
    job = simulation.job
    curves = at_rates(simulation, RATES)
    lines = _lines(curves)
    limits = {method: pays_below(RATES, curves[DENSE], times) for method, times in curves.items() if method != DENSE}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9.5, 5.8))
        axes.set_xscale("log")
        for method, times in curves.items():
            axes.plot([8 * rate for rate in RATES], times, **lines[method])
            if 0 < limits.get(method, 0) < math.inf:
                height = math.exp(np.interp(math.log(limits[method]), np.log(RATES), np.log(times)))
                axes.plot([8 * limits[method]], [height], "o", color=colour(method), markersize=8, zorder=4)
        axes.set_xlim(8 * RATES[0], 8 * RATES[-1])
        _mark_links(axes, job.cluster.inter_rate.value, max(limits.values(), default=0.0))
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: bits(rate / 8)))
        axes.xaxis.set_minor_locator(NullLocator())
        _time_axis(axes, [time for times in curves.values() for time in times])
        axes.yaxis.tick_right()
        axes.yaxis.set_label_position("right")
        axes.spines[["left", "right"]].set_visible(False)
        texts = {method: f"{method}  {_pays(limit)}" for method, limit in limits.items()}
        _label(
            axes, {method: times[0] for method, times in curves.items()}, {DENSE: "dense  (no compression)", **texts}
        )
        axes.set_xlabel("rate of the link out of each node. Left of its dot, a method is at least 5% faster than dense")
        axes.set_title("\n".join(("Will compression help?", *_subtitle(job))), pad=12)
        save(figure, path)
    return path


def _mark_links(axes: Axes, own_rate: float, limit: float) -> None:
    """Mark the user's ``own`` link, and grey the links faster than ``limit``, on which no method pays."""
    at_right = own_rate > math.sqrt(RATES[0] * RATES[-1])
    axes.axvline(8 * own_rate, color=INK, linestyle="--", linewidth=1.5)
    axes.annotate(f"your link, {bits(own_rate)}", (8 * own_rate, 1), xycoords=("data", "axes fraction"), va="top",
                  xytext=(-5 if at_right else 5, -4), textcoords="offset points", ha="right" if at_right else "left",
                  color=INK, fontweight="bold")  # fmt: skip
    if limit < RATES[-1]:
        begin = max(limit, RATES[0])
        axes.axvspan(8 * begin, 8 * RATES[-1], color=SHADE, zorder=0)
        axes.annotate("do not compress", (8 * math.sqrt(begin * RATES[-1]), 0.5), xycoords=("data", "axes fraction"),
                      ha="center", va="center", rotation=90, color=GREY)  # fmt: skip


def _pays(limit: float) -> str:
    if not limit:
        return "never pays"
    return "pays on all of these links" if limit == math.inf else f"pays below {bits(limit)}"


def scale(job: Job, curves: Mapping[str, Sequence[tuple[int, Prediction]]], path: Path, *, strong: bool) -> Path:
    """Draw a step's time, and the efficiency, over ranks: the share of the step in which a rank computes."""
    lines, sizes = _lines(curves), [size for size, _ in curves[DENSE]]
    ranks = {method: [size for size, _ in points] for method, points in curves.items()}
    times = {method: [step.seconds for _, step in points] for method, points in curves.items()}
    shares = {
        method: [100 * step.split["computing"] / step.seconds for _, step in points]
        for method, points in curves.items()
    }
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(2, sharex=True, figsize=(9.5, 8))
        for axes, values in ((above, times), (below, shares)):
            axes.set_xscale("log", base=2)
            for method in curves:
                axes.plot(ranks[method], values[method], marker="o", markersize=5, **lines[method])
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
        _time_axis(above, [time for values in times.values() for time in values])
        below.set_ylim(0, 100)
        below.set_ylabel("efficiency: computing,\n% of the step")
        below.set_xlabel("ranks" + (", which share the tokens of a step" if strong else ", each with the same tokens"))
        for axes, values in ((above, times), (below, shares)):
            _label(axes, {method: values[method][-1] for method in curves}, {}, right=True)
        title = f"{'Strong' if strong else 'Weak'} scaling"
        above.set_title("\n".join((title, *_subtitle(job, nodes=strong))), pad=12)
        save(figure, path)
    return path


def _lines(methods: Collection[str]) -> dict[str, dict[str, Any]]:
    """Choose how each method is drawn: dense thick, those of one colour with different dashes."""
    if len(methods) > PANEL_CURVES:
        raise ThinwireError(f"a picture has at most {PANEL_CURVES} curves, got {len(methods)}: name fewer methods")
    tints: list[str] = []
    lines = {}
    for method in methods:
        tint = colour(method)
        lines[method] = {
            "color": tint, "linestyle": DASHES[tints.count(tint) % len(DASHES)],
            "linewidth": 4.5 if method == DENSE else 2.2, "zorder": 2 if method == DENSE else 3,
        }  # fmt: skip
        tints.append(tint)
    return lines


def _subtitle(job: Job, *, nodes: bool = True) -> tuple[str, str]:
    cluster = job.cluster
    number = job.ranks // job.per_node
    count = f"{counted(number, 'node')} x {job.per_node} " if nodes else f"nodes of {job.per_node} "
    return (
        f"{job.name}, {job.profile.parameters / 1e6:,.4g} million parameters, {job.engine}, on {count}{cluster.device}",
        f"({cluster.name}), {job.sequences * job.micro_batches:g} sequences per rank and step; predicted",
    )


def _time_axis(axes: Axes, times: Sequence[float]) -> None:
    low, high = min(times) / 1.15, max(times) * 1.15
    factors = (1, 1.2, 1.5, 2, 3, 5, 7) if high < 5 * low else (1, 2, 5) if high < 30 * low else (1,)
    ticks = [factor * time for time in TIMES for factor in factors if low <= factor * time <= high]
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("time of a step")


def _label(axes: Axes, heights: Mapping[str, float], texts: Mapping[str, str], *, right: bool = False) -> None:
    """Write the methods' names in their colours beside the ends of their curves, apart, in the order of the ends."""
    ordered = sorted(heights, key=heights.__getitem__)
    line = LINE / (axes.bbox.height / axes.figure.dpi)
    to_share = axes.transData + axes.transAxes.inverted()
    ends = [float(to_share.transform((axes.get_xlim()[1], heights[method]))[1]) for method in ordered]
    for index in range(1, len(ends)):
        ends[index] = max(ends[index], ends[index - 1] + line)
    excess = max(0.0, ends[-1] - 1)
    for index in reversed(range(len(ends))):  # what is too high pushes those below it down
        ends[index] = min(ends[index], (1.0 if index == len(ends) - 1 else ends[index + 1] - line) if excess else 9.0)
    for method, end in zip(ordered, ends, strict=True):
        axes.annotate(texts.get(method, method), (1.0 if right else 0.0, end), xycoords="axes fraction",
                      xytext=(10 if right else -10, 0), textcoords="offset points", va="center",
                      ha="left" if right else "right", color=colour(method), fontweight="bold")  # fmt: skip
