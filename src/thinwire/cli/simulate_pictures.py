"""The pictures of a simulation: a step's time over the link's rate, and over the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from thinwire.base.errors import ThinwireError
from thinwire.lab.plots import GREY, INK, PANEL_CURVES, STYLE, colour, save
from thinwire.predict.simulate import DENSE, FASTEST_LINK, Job, Simulation, at_rates, bits, pays_below, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SLOWEST_LINK = 10e6 / 8  # bytes/s


def links(simulation: Simulation, path: Path) -> Path:
    """Draw a step's time of each method over the rate out of a node; say up to which rate each is faster than dense."""
    job, own = simulation.job, simulation.job.cluster.inter_rate.value
    rates = np.geomspace(SLOWEST_LINK, FASTEST_LINK, 47)
    curves = at_rates(simulation, rates.tolist())
    _check(curves)
    limits = {o.method: pays_below(simulation, o, SLOWEST_LINK) for o in simulation.outcomes[1:]}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(10, 5.6))
        for method, times in curves.items():
            axes.plot(8 * rates, times, color=colour(method), linewidth=4 if method == DENSE else 2, zorder=2)
        for method, limit in limits.items():
            if 0 < limit < FASTEST_LINK / 1.02:
                height = float(np.exp(np.interp(math.log(limit), np.log(rates), np.log(curves[method]))))
                axes.plot([8 * limit], [height], "o", color=colour(method), markersize=8, zorder=4)
        axes.axvline(8 * own, color=INK, linestyle=":", linewidth=1.5)
        axes.annotate(f"your link: {bits(own)}", (8 * own, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
                      textcoords="offset points", va="top", color=INK)  # fmt: skip
        texts = {method: f"{method}: {_pays(limits[method])}" for method in curves if method != DENSE}
        _label(axes, {method: times[0] for method, times in curves.items()}, {DENSE: DENSE, **texts})
        axes.set_xlim(8 * SLOWEST_LINK, 8 * FASTEST_LINK)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: bits(rate / 8)))
        axes.xaxis.set_minor_locator(NullLocator())
        _time_axis(axes, "time of a step")
        axes.set_xlabel(
            "rate of the link out of each node; a dot: from here to the left the method is faster than dense"
        )
        axes.set_title(_wrapped(job), pad=12)
        save(figure, path)
    return path


def _pays(limit: float) -> str:
    if not limit:
        return "never pays"
    return "pays on all of these links" if limit > FASTEST_LINK / 1.02 else f"pays below {bits(limit)}"


def scale(job: Job, curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, *, strong: bool) -> Path:
    """Draw a step's time, and the efficiency, over ranks: computing's own time divided by the step's."""
    _check(curves)
    with plt.rc_context(STYLE):
        figure, (above, below) = plt.subplots(2, sharex=True, figsize=(10, 8))
        for method, points in curves.items():
            ranks, times = (np.array(column, dtype=float) for column in zip(*points, strict=True))
            ideal = curves[DENSE][0][1] * (curves[DENSE][0][0] / ranks if strong else 1.0)
            width = 4 if method == DENSE else 2
            above.plot(ranks, times, color=colour(method), linewidth=width, marker="o", markersize=width + 2)
            below.plot(ranks, 100 * ideal / times, color=colour(method), linewidth=width, marker="o",
                       markersize=width + 2)  # fmt: skip
        sizes = [size for size, _ in curves[DENSE]]
        above.set_xscale("log", base=2)
        for axes in (above, below):
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
        _time_axis(above, "time of a step")
        below.set_ylim(bottom=0)
        below.set_ylabel(f"efficiency, % of dense on {sizes[0]} ranks")
        below.set_xlabel("ranks" + (", which share the tokens of a step" if strong else ", each with the same tokens"))
        _label(above, {method: points[-1][1] for method, points in curves.items()}, {}, right=True)
        _label(below, {method: 1 / points[-1][1] for method, points in curves.items()}, {}, right=True)
        above.set_title(_wrapped(job), pad=12)
        save(figure, path)
    return path


def _check(curves: Mapping[str, object]) -> None:
    if len(curves) > PANEL_CURVES:
        raise ThinwireError(f"a picture has at most {PANEL_CURVES} curves, got {len(curves)}: name fewer methods")


def _wrapped(job: Job) -> str:
    return str(job).replace(" nodes x", " nodes x", 1).replace(", ", ",\n", 1).replace("), ", "),\n", 1)


def _time_axis(axes: Axes, label: str) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3) if axes.get_ylim()[1] < 100 * axes.get_ylim()[0] else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(label)


def _label(axes: Axes, heights: Mapping[str, float], texts: Mapping[str, str], *, right: bool = False) -> None:
    """Write the methods' names in their colours beside the ends of their curves, in the order of the ends, apart."""
    ordered = sorted(heights, key=heights.__getitem__, reverse=True)
    axes.figure.canvas.draw()
    to_fraction = axes.transData + axes.transAxes.inverted()
    x = axes.get_xlim()[1]
    ends = [float(to_fraction.transform((x, heights[method]))[1]) for method in ordered]
    gap = 0.055
    for index in range(1, len(ends)):
        ends[index] = min(ends[index], ends[index - 1] - gap)
    lift = max(0.0, -ends[-1])
    for method, end in zip(ordered, ends, strict=True):
        axes.annotate(texts.get(method, method), (1.0 if right else 0.0, end + lift), xycoords="axes fraction",
                      xytext=(10 if right else -10, 0), textcoords="offset points", va="center",
                      ha="left" if right else "right", color=colour(method), fontweight="bold")  # fmt: skip
