"""Simulates a step of several methods on a cluster: which is fastest, by how much, what bounds it, what is not known.

A prediction has a range: in eight of ten draws of the constants it lies inside. Methods are compared draw by draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from thinwire.base import extras
from thinwire.base.errors import ThinwireError, first_line
from thinwire.base.terminal import columns, counted
from thinwire.methods import resolve
from thinwire.plan.measured import describe_measured
from thinwire.plan.plan import human, in_text
from thinwire.predict.cluster import Cluster
from thinwire.predict.layouts import timeline_of
from thinwire.predict.play import WORTH, Prediction, play
from thinwire.predict.profile import ModelProfile
from thinwire.predict.timeline import Timeline

DENSE, SILENT = "dense", "none"
ENGINES = ("ddp", "fsdp2", "hsdp")
WIDE = 150
"""Columns that the whole tables take."""
NARROW = ("method", "a step", "10 to 90%", "exposed", "x dense", "per rank")
"""Columns of the table of times where a terminal has fewer."""


@dataclass(frozen=True)
class Job:
    """A model's training on a cluster.

    Attributes:
        name: of the model. model: on the meta device.
        ranks: of all nodes. sequences: per rank and micro-batch. micro_batches: per step.
        dtype: of the computing, in which sharded weights are gathered. two_level, intra: as for ``compress()``.
        reshard: gathered weights are freed after the forward pass.
    """

    name: str
    model: nn.Module
    profile: ModelProfile
    cluster: Cluster
    engine: str
    ranks: int
    sequences: float
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    two_level: bool | None = None
    intra: str | None = None
    reshard: bool = True

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ThinwireError(
                f"engine '{self.engine}' is not simulated: choose {', '.join(ENGINES)}. What tensor and pipeline "
                "parallelism or FSDP1 send across nodes is not known; inside a node leave them out of the model"
            )
        if self.ranks % self.per_node:
            raise ThinwireError(
                f"{self.ranks} ranks on nodes of {self.per_node} ({self.cluster.name}) leave one node smaller: unequal "
                f"nodes are not simulated, choose a multiple of {self.per_node}"
            )

    @property
    def per_node(self) -> int:
        return min(self.cluster.per_node, self.ranks)

    def record(self, method: str) -> Timeline:
        """Record what ``method`` does."""
        try:
            return timeline_of(
                self.model, method, engine=self.engine, nodes=self.ranks // self.per_node, per_node=self.per_node,
                two_level=self.two_level, intra=self.intra, reshard=self.reshard,
                gather_dtype=None if self.dtype == torch.float32 else self.dtype, gloo=self.cluster.codec_on_core,
            )  # fmt: skip
        except RuntimeError as error:  # NotImplementedError included
            line = f"{method} cannot be simulated: its dry run failed, in which no tensor has values"
            raise ThinwireError(f"{line}: {first_line(error)}") from None

    def play(self, timeline: Timeline) -> Prediction:
        """Predict a step of ``timeline``."""
        return play(timeline, self.profile, self.cluster, sequences=self.sequences, micro_batches=self.micro_batches)

    def __str__(self) -> str:
        nodes, cluster = self.ranks // self.per_node, self.cluster
        batches = f" in {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return (
            f"{self.name} ({self.profile.parameters / 1e6:,.4g} million parameters) on {self.engine}, "
            f"{counted(nodes, 'node')} x {self.per_node} {cluster.device} "
            f"({cluster.name}: {bits(cluster.inter_rate.value)} a node), "
            f"{self.sequences * self.micro_batches:g} sequences per rank and step{batches}"
        )


@dataclass(frozen=True)
class Outcome:
    """A method's prediction."""

    method: str
    timeline: Timeline
    prediction: Prediction


@dataclass(frozen=True)
class Span:
    """A value, and the ends of the range that eight of ten draws are in."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}x ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True)
class Simulation:
    """The outcomes of a job, dense first, and why other methods were refused. ``str()`` is the verdict, and tables."""

    job: Job
    outcomes: tuple[Outcome, ...]
    refused: dict[str, str]

    @property
    def dense(self) -> Outcome:
        return self.outcomes[0]

    def gain(self, outcome: Outcome) -> Span:
        """Compare with dense: how many times as fast ``outcome`` is."""
        dense = self.dense.prediction
        low, high = np.quantile(np.array(dense.draws) / np.array(outcome.prediction.draws), [0.1, 0.9])
        return Span(dense.seconds / outcome.prediction.seconds, float(low), float(high))

    def memory(self, outcome: Outcome) -> dict[str, tuple[float, float]]:
        """Return bytes on one device by use, from the least to the most: every block computed again, or none."""
        low, high = (self.job.sequences * per_sequence for per_sequence in self.job.profile.activations)
        fixed = {name: size for name, size in outcome.prediction.memory.items() if name != "activations"}
        total = sum(fixed.values())
        return {
            **{name: (size, size) for name, size in fixed.items()},
            "activations": (low, high), "in all": (total + low, total + high),
        }  # fmt: skip

    def fits(self, outcome: Outcome) -> str:
        """Say whether the device's memory is enough: "yes", "with recomputation" of activations, or "does not fit"."""
        low, high = self.memory(outcome)["in all"]
        device = self.job.cluster.memory_bytes.value
        return "does not fit" if low > device else "with recomputation" if high > device else "yes"

    @cached_property
    def best(self) -> Outcome:
        """The fastest that fits, is worth it, and is faster than dense in its whole range; dense if there is none."""
        worth_it = [o for o in self.rivals if (gain := self.gain(o)).low > 1 and gain.middle >= WORTH]
        return min(worth_it, key=lambda outcome: outcome.prediction.seconds, default=self.dense)

    @property
    def rival(self) -> Outcome | None:
        """The fastest of ``rivals``."""
        return min(self.rivals, key=lambda outcome: outcome.prediction.seconds, default=None)

    @property
    def rivals(self) -> list[Outcome]:
        """The methods beside dense that train, and fit."""
        return [o for o in self.outcomes[1:] if o.method != SILENT and self.fits(o) != "does not fit"]

    def verdict(self) -> Iterator[str]:
        """Yield three lines: the fastest, its gain, and what bounds the step."""
        best, dense = self.best, self.dense
        step, fits = best.prediction, self.fits(best)
        but = "" if fits == "yes" else f"; it {fits}" if fits == "does not fit" else f"; it fits {fits} of activations"
        yield (
            f"fastest:  {best.method}, {seconds(step.seconds)} a step "
            f"({seconds(step.low)} to {seconds(step.high)}){but}"
        )
        if best is not dense:
            yield f"gain:     {self.gain(best)} as fast as dense, {seconds(dense.prediction.seconds)}"
        elif (rival := self.rival) is not None:
            yield f"gain:     do not compress: {rival.method} would be {self.gain(rival)} as fast as dense"
        else:
            yield "gain:     no other method was asked for that fits"
        exposed = dense.prediction.split["exposed communication"] / dense.prediction.seconds
        best_words = "" if best is dense else f"; with {best.method}, {best.prediction.bound_by}"
        yield f"bound by: {dense.prediction.bound_by}; {exposed:.0%} of dense's step waits for the network{best_words}"

    def __str__(self) -> str:
        return "\n".join([*self.verdict(), "", self.details()])

    def details(self) -> str:
        """Return the tables and what is assumed, as wide as the terminal."""
        width = min(columns() or WIDE, WIDE)
        times, memory = [*map(self._times, self.outcomes)], [*map(self._memory, self.outcomes)]
        if width < WIDE:
            times = [{name: row[name] for name in NARROW} for row in times]
            memory = [dict([next(iter(row.items())), *list(row.items())[-2:]]) for row in memory]  # name, in all, fits
        return "\n".join([str(self.job), *(_table(rows, width) for rows in (times, memory)), *self._remarks()])

    def _times(self, outcome: Outcome) -> dict[str, str]:
        """Return a row of the table of times, by column."""
        step = outcome.prediction
        return {
            "method": outcome.method,
            "a step": seconds(step.seconds),
            "10 to 90%": f"{seconds(step.low)} - {seconds(step.high)}",
            "computing": seconds(step.split["computing"]),
            "codec": seconds(step.split["codec"]),
            "exposed": seconds(step.split["exposed communication"]),
            "optimizer": seconds(step.split["optimizer"]),
            "x dense": "1" if outcome is self.dense else f"{self.gain(outcome).middle:.2f}",
            "per rank": human(sum(step.rank_bytes.values())),
            "per NICs": human(step.nic_bytes),
            "bound by": step.bound_by,
        }

    def _memory(self, outcome: Outcome) -> dict[str, str]:
        """Return a row of the table of memory, by column."""
        sizes = {
            name: human(low) if low == high else f"{human(low)} - {human(high)}"
            for name, (low, high) in self.memory(outcome).items()
        }
        fits = f"fits {human(self.job.cluster.memory_bytes.value)}"
        return {"memory of a device": outcome.method, **sizes, fits: self.fits(outcome)}

    def _remarks(self) -> Iterator[str]:
        if self.best is not self.dense:
            yield describe_measured(resolve(self.best.method), self.job.ranks)
        for method, reason in self.refused.items():
            yield f"refused: {method}: {reason}"
        cluster = self.job.cluster
        names = list(dict.fromkeys(name for outcome in self.outcomes for name in outcome.prediction.assumed))
        for source in ("assumed", "datasheet"):
            if used := [name for name in cluster.sourced(source) if name in names]:
                yield f"{source}: " + ", ".join(f"{name} {getattr(cluster, name).value:.3g}" for name in used)
        if kernels := [name for name in names if name.startswith("kernel ")]:
            yield f"not measured: {len(kernels)} kernels, taken to run at memory_rate x memory_share"
        for note in dict.fromkeys(note for outcome in self.outcomes for note in outcome.timeline.notes):
            yield f"note: {note}"
        if self.job.dtype == torch.float32 and not cluster.codec_on_core:
            yield f"note: fp32 is taken to reach the cluster's flops, {cluster.flops.value:.3g}, which may be bf16's"
        yield "note: equal nodes, and links that no other job uses; activations from every block computed again to none"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for ``json.dumps``; seconds and bytes."""
        job = self.job
        methods = [
            {
                "method": outcome.method,
                **{name: value for name, value in asdict(outcome.prediction).items() if name not in ("spans", "draws")},
                "gain": asdict(self.gain(outcome)), "memory": self.memory(outcome), "fits": self.fits(outcome),
                "notes": outcome.timeline.notes,
            }
            for outcome in self.outcomes
        ]  # fmt: skip
        return {
            "verdict": list(self.verdict()), "best": self.best.method, "model": job.name,
            "parameters": job.profile.parameters, "cluster": job.cluster.name, "engine": job.engine,
            "ranks": job.ranks, "per_node": job.per_node, "sequences": job.sequences,
            "micro_batches": job.micro_batches, "methods": methods, "refused": self.refused,
        }  # fmt: skip

    def to_trace(self) -> dict[str, Any]:
        """Return a Chrome trace: a process for each method, a row for each resource; microseconds."""
        events: list[dict[str, Any]] = []
        for process, outcome in enumerate(self.outcomes):
            events.append(_name("process", outcome.method, process, 0))
            rows: dict[str, int] = {}
            for span in outcome.prediction.spans:
                if span.resource not in rows:
                    rows[span.resource] = len(rows)
                    events.append(_name("thread", span.resource, process, rows[span.resource]))
                events.append({
                    "ph": "X", "name": span.name, "cat": span.resource, "pid": process, "tid": rows[span.resource],
                    "ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin),
                })  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _table(rows: Sequence[dict[str, str]], width: int) -> str:
    """Write ``rows`` as a table of ``width`` columns; what begins with a digit stands to the right."""
    table = extras.load("rich.table").Table(box=extras.load("rich.box").SIMPLE_HEAD, padding=(0, 1))
    for name, cell in rows[0].items():
        table.add_column(name, justify="right" if cell[:1].isdigit() else "left", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    return in_text(table, width)


def _name(kind: str, name: str, process: int, row: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": row, "args": {"name": name}}


def simulate(job: Job, methods: Iterable[str]) -> Simulation:
    """Predict ``methods`` and dense.

    Raises:
        ThinwireError: every method but dense is refused, or dense itself.
    """
    outcomes, refused = [], {}
    names = list(dict.fromkeys([DENSE, *methods]))
    for method in names:
        try:
            timeline = job.record(method)
            outcomes.append(Outcome(method, timeline, job.play(timeline)))
        except ThinwireError as error:
            if method == DENSE or len(names) == 2:
                raise
            refused[method] = str(error)
    return Simulation(job, tuple(outcomes), refused)


def at_rates(simulation: Simulation, rates: Sequence[float]) -> dict[str, list[float]]:
    """Predict the seconds of a step of each method for each of ``rates`` out of a node, in bytes/s."""
    jobs = [replace(simulation.job, cluster=simulation.job.cluster.with_link(rate)) for rate in rates]
    return {o.method: [job.play(o.timeline).seconds for job in jobs] for o in simulation.outcomes}


def pays_below(rates: Sequence[float], dense: Sequence[float], method: Sequence[float]) -> float:
    """Return the rate up to which ``method`` is worth it beside ``dense``; 0: on none of ``rates``, inf: on all.

    Args:
        rates: ascending. dense, method: seconds of a step on each.
    """
    gains = np.log(np.array(dense) / np.array(method) / WORTH)
    faster = np.flatnonzero(gains > 0)
    if not len(faster):
        return 0.0
    last = int(faster[-1])
    if last == len(rates) - 1:
        return math.inf
    share = gains[last] / (gains[last] - gains[last + 1])
    return rates[last] * (rates[last + 1] / rates[last]) ** float(share)


def at_scale(
    job: Job, methods: Sequence[str], ranks: Sequence[int], *, strong: bool
) -> dict[str, list[tuple[int, Prediction]]]:
    """Predict each method for each of ``ranks``, as far as there is a sequence for each rank.

    ``strong``: the sequences of a step are those of ``job``, on all ranks together; else each rank has as many.
    """
    curves: dict[str, list[tuple[int, Prediction]]] = {}
    for size in ranks:
        sequences = job.sequences * job.ranks / size if strong else job.sequences
        if sequences < 1:
            break
        for outcome in simulate(replace(job, ranks=size, sequences=sequences), methods).outcomes:
            curves.setdefault(outcome.method, []).append((size, outcome.prediction))
    if not curves:
        raise ThinwireError(f"{job.sequences * job.ranks:g} sequences are too few for {ranks[0]} ranks: more --tokens")
    return curves


def seconds(value: float) -> str:
    """Write 0.0123 as '12.3 ms'."""
    if value >= 60:
        return f"{value / 60:.3g} min" if value < 3600 else f"{value / 3600:.3g} h"
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"


def bits(rate: float) -> str:
    """Write 1.25e9 bytes/s as '10 Gbit/s'."""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if 8 * rate >= size:
            return f"{8 * rate / size:.3g} {unit}"
    return f"{8 * rate / 1e3:.3g} kbit/s"
