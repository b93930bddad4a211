"""Turns the measurements of the doctor into a cluster's constants, and what bounds a job and would help it."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from thinwire.predict.cluster import Cluster, Kernel
from thinwire.predict.links import Sample, fit, solve, spread
from thinwire.predict.play import OPTIMIZER
from thinwire.predict.simulate import DENSE, SILENT, Job, Simulation, seconds

SHOWS = 1.05
"""A dense step by a step that sends nothing, above which it says what the network carries beside training."""
RUNS = {False: 0.03, True: 0.1}
"""By how much computing differs at least from run to run: on GPUs, and on CPUs, whose cores others use, too."""
EXTREMES = 0.1, 10.0
"""Multiples of the memory's rate beyond which a kernel says nothing of others: it is short, or stays in caches."""
LEAST, MOST = 0.5, 1.2
"""Share of the rate that collectives have alone which they may have beside training."""
BUSY = 0.9
"""Share of a step without exchange beyond which a host that gives work to the device is what the device waits for."""
NAMES = {"network": "the network", "computing": "computing", "host": "the host", "input": "loading data"}
REMEDIES = {
    "network": "fewer exchanges (--accumulate) or a faster link",
    "computing": "a faster device, or a smaller model",
    "host": "fewer and larger kernels: --compile, or more sequences at a time",
    "input": "text that is tokenized beforehand (thinwire tokenize), or faster files",
}


@dataclass(frozen=True)
class Steps:
    """Measured optimizer steps with one method, in seconds, of the slowest rank.

    Attributes:
        steps: each. loading: until its data were there. issuing: until the host had given its passes to the device.
        optimizer: its step. wire: with a message under way. exposed: waited for messages. The four are medians.
    """

    steps: Sequence[float]
    loading: float = 0.0
    issuing: float = 0.0
    optimizer: float = 0.0
    wire: float = 0.0
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        return statistics.median(self.steps)

    @property
    def hidden(self) -> float:
        """The share of the exchange beside computing, 0 to 1."""
        return max(0.0, 1 - self.exposed / self.wire) if self.wire else 0.0


def with_measured(cluster: Cluster, kernels: Mapping[str, Kernel], samples: Sequence[Sample]) -> Cluster:
    """Return ``cluster`` with ``kernels`` and what the links' ``samples`` show, as far as there are any."""
    changes: dict[str, Any] = {"kernels": kernels}
    if kernels:
        shares = np.clip([kernel.rate / cluster.memory_rate.value for kernel in kernels.values()], *EXTREMES)
        middle = float(np.median(shares))
        changes["memory_share"] = spread(middle, shares / middle, 1.5)
    for link, kind in (("intra", "inside"), ("inter", "across")):
        if of_link := [sample for sample in samples if sample.kind == kind]:
            line = fit(of_link)
            changes |= {f"{link}_latency": line.latency, f"{link}_rate": line.rate}
    return replace(cluster, **changes)


def calibrated(job: Job, none: Steps, dense: Steps | None) -> Job:
    """Fit the two constants that only training shows: the share of the peak, and what exchanges have beside it."""
    silent = replace(job, engine="ddp")
    timeline = silent.record(SILENT)
    if none.optimizer and timeline.optimizer_bytes:
        rate = timeline.optimizer_bytes / none.optimizer
        job = _with(job, kernels={**job.cluster.kernels, OPTIMIZER: Kernel(0.0, rate)})
    prediction = _with(silent, kernels=job.cluster.kernels).play(timeline)
    computing = prediction.split["computing"]
    computing_s = max(none.seconds - (prediction.seconds - computing), 0.1 * none.seconds)
    share = spread(computing / computing_s, none.seconds / np.array(none.steps), 1 + RUNS[job.cluster.codec_on_core])
    job = _with(job, compute_share=replace(share, source="fitted:the step of none"))
    if dense is None or dense.seconds < SHOWS * none.seconds or job.ranks == job.per_node:
        return job
    timeline, host = job.record(DENSE), job.cluster.host_seconds_per_byte.value
    too_slow = job.play(timeline).seconds > dense.seconds
    # A link carries no more beside training than alone: what is too slow is what its bytes take from a CPU's core.
    name, low, high = (
        ("host_seconds_per_byte", 0.01 * host, host) if too_slow and host else ("inter_share", LEAST, MOST)
    )

    def fitted(value: float) -> Job:
        constant = spread(value, dense.seconds / np.array(dense.steps), 1.03)
        return _with(job, **{name: replace(constant, source="fitted:the dense step")})

    costs = name == "host_seconds_per_byte"  # more of it makes a step longer
    return fitted(solve(lambda value: (fitted(value).play(timeline).seconds > dense.seconds) == costs, low, high))


def _with(job: Job, **changes: Any) -> Job:
    return replace(job, cluster=replace(job.cluster, **changes))


def parts_of(none: Steps, dense: float, *, on_gpu: bool) -> dict[str, float]:
    """Split the ``dense`` seconds of a step by what takes them.

    A GPU waits for a host that is still giving it work when it should be nearly done.
    """
    issuing = max(none.issuing - none.loading, 0.0) if on_gpu and none.issuing > BUSY * none.seconds else 0.0
    return {
        "network": max(dense - none.seconds, 0.0),
        "computing": max(none.seconds - none.loading - issuing, 0.0),
        "host": issuing,
        "input": none.loading,
    }


def verdict(parts: Mapping[str, float], hidden: float | None, simulation: Simulation | None, command: str) -> list[str]:
    """Say in three lines what bounds a job, what would help and by how much, and what to type.

    Args:
        parts: of a dense step. hidden: share of its exchange; None: there is none.
        simulation: of the candidates; None: nothing is known of other ranks.
        command: of a run, up to the method's name.
    """
    first, second, *_ = sorted(parts, key=lambda name: -parts[name])
    bound = (
        f"bound by: {NAMES[first]}, {seconds(parts[first])} of a step of {seconds(sum(parts.values()))}; then "
        f"{NAMES[second]}, {seconds(parts[second])}"
    )
    helps, method = REMEDIES[first], DENSE
    if simulation is not None:
        best, dense, step = simulation.best, simulation.dense, simulation.best.prediction
        bound += "" if hidden is None else f"; {hidden:.0%} of the exchange is hidden"
        method = best.method
        if best is dense:
            rival = simulation.rival
            rival_words = "" if rival is None else f"; {rival.method} would be {simulation.gain(rival)} as fast"
            helps = f"do not compress{rival_words}; rather {helps}: up to {seconds(parts[first])}"
        else:
            between = f"{seconds(step.low)} to {seconds(step.high)}"
            helps = (
                f"{method}: {seconds(step.seconds)} a step ({between}) in place of "
                f"{seconds(dense.prediction.seconds)}, {simulation.gain(best)} as fast"
            )
    return [bound, f"helps:    {helps}", f"type:     {command} {shlex.quote(method)}"]
