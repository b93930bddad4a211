"""Plays a timeline on the constants of a cluster: when the core, the links and the workers beside them are busy.

A clock keeps, for each resource of one rank, the time up to which it is busy. Computing goes module by module on the
core; each buffer's chain of kernels and messages (encode, send, decode, send again) goes on a worker, one buffer after
the other as in the engine, and each message waits for its link. All times are arrays: first comes the prediction, then
draws of the constants from their ranges.

Not modelled: that kernels beside a computation on a GPU slow it down, other jobs on the same links, and slow ranks.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.base.errors import ThinwireError
from thinwire.predict.cluster import Cluster, Constant
from thinwire.predict.profile import ModelProfile, ModuleProfile
from thinwire.predict.timeline import RING, Message, Pass, RecordedStep, Stretch, Timeline

DRAWS = 100
"""Draws of all constants, from which the range comes."""
SEED = 0
DECILE = 1.2816
"""Standard deviations from the middle of a normal distribution to its last tenth."""
KERNELS = Constant(1.0, "assumed", 0.85, 1.2)
"""Factor by which a measured kernel takes longer in a step than alone."""
MODEL = Constant(1.0, "assumed", 0.94, 1.04)
"""Published over predicted, of the dense rows in docs/data/predicted.csv: a tenth is below, a tenth above."""
WORTH = 1.05
"""Speed, beside dense, that a method must have to be worth a change of the mathematics."""
OPTIMIZER = "optimizer"
"""The kernel's name under which a cluster may have the measured rate of an optimizer's step."""

Times = NDArray[np.float64]
"""Seconds: the prediction, then one value per draw."""


class Span(NamedTuple):
    """A resource is busy from ``begin`` to ``end``, in seconds: "core", "inside", "NIC", or a worker ("gradients",
    "weights", "rounds")."""

    resource: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Prediction:
    """A step of one rank: the mean over the method's cycle.

    Attributes:
        seconds, low, high: of a step. Of four draws in five (of the constants, and of how far off predictions are) it
            lies between ``low`` and ``high``.
        split: seconds by "computing", "codec", "exposed communication", "optimizer"; they sum to ``seconds``. Exposed
            communication is what a network without delay would save, codec what is then left of the method's kernels.
        busy: seconds by what is busy: "network", "computing" (with the optimizer), "codec", "host".
        rank_bytes: sent by the mean rank, by link ("inter", "intra"). nic_bytes: leave one node.
        memory: bytes on one device by use. bound_by: what is busy longest.
        assumed: the constants, and kernels, that nobody measured on this cluster.
        spans: all steps of the cycle, one behind the other.
        draws: seconds for each draw of the constants, which are the same for every timeline: compare draw by draw.
    """

    seconds: float
    low: float
    high: float
    split: Mapping[str, float]
    busy: Mapping[str, float]
    rank_bytes: Mapping[str, float]
    nic_bytes: float
    memory: Mapping[str, float]
    bound_by: str
    assumed: tuple[str, ...]
    spans: tuple[Span, ...]
    draws: tuple[float, ...]


def play(
    timeline: Timeline, profile: ModelProfile, cluster: Cluster, *, sequences: float, micro_batches: int = 1
) -> Prediction:
    """Predict a step of ``sequences`` per rank and micro-batch.

    Only the last of ``micro_batches`` exchanges gradients (``no_sync``); sharded engines gather weights in each.

    Raises:
        ThinwireError: the profile lacks a parameter of the timeline, or the timeline's nodes have other sizes.
    """
    if timeline.per_node != cluster.per_node and timeline.ranks > timeline.per_node:
        raise ThinwireError(
            f"cluster {cluster.name} has {cluster.per_node} ranks on a node, this training has {timeline.per_node}: "
            f"name a cluster with per_node = {timeline.per_node}"
        )
    costs = Costs(cluster)
    modules = [costs.module(module, sequences) for module in profile.modules]
    optimizer = costs.kernel(Pass(OPTIMIZER, timeline.optimizer_bytes)) if timeline.optimizer_bytes else costs.zero
    computing = micro_batches * sum((module.forward + module.backward for module in modules), costs.zero)
    total, exposed, busy, spans, offset = optimizer, costs.zero, defaultdict[str, float](float), list[Span](), 0.0
    for step in timeline.steps:
        clock, silent = (_play_step(step, modules, costs, micro_batches, network=network) for network in (True, False))
        for played in (clock, silent):
            played.wait(played.run("rounds", step.beside) - step.delay * (optimizer + computing))
        total, exposed = total + step.share * clock.core, exposed + step.share * (clock.core - silent.core)
        for name, seconds in clock.busy.items():
            busy[name] += step.share * seconds
        spans += [span._replace(begin=span.begin + offset, end=span.end + offset) for span in clock.spans]
        offset += float(clock.core[0])
    shares = {"computing": computing, "exposed communication": exposed, "optimizer": optimizer}
    split = {name: float(times[0]) for name, times in shares.items()}
    split["codec"] = max(float(total[0]) - sum(split.values()), 0.0)
    uses = {
        "network": max(busy["inside"], busy["NIC"]),
        "computing": split["computing"] + split["optimizer"],
        "codec": busy["codec"],
        "host": busy["host"],
    }
    total = total * costs.model
    low, high = np.quantile(total, [0.1, 0.9])
    sent = [(step.share, costs.as_sent(m)) for step in timeline.steps for m in step.sent(micro_batches)]
    return Prediction(
        seconds=float(total[0]),
        low=min(float(low), float(total[0])),
        high=max(float(high), float(total[0])),
        split=split,
        busy=uses,
        rank_bytes={
            link: sum(share * message.rank_bytes(link) for share, message in sent) for link in ("inter", "intra")
        },
        nic_bytes=sum(share * message.nic_bytes for share, message in sent),
        memory={**asdict(timeline.memory), "activations": sequences * sum(m.activation_bytes for m in profile.modules)},
        bound_by=max(uses, key=lambda name: uses[name]),
        assumed=costs.assumed,
        spans=tuple(spans),
        draws=tuple(total[1:].tolist()),
    )


class Costs:
    """Computes the time of a kernel, a message and a computation on a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.zero: Times = np.zeros(1 + DRAWS)
        self._random = np.random.default_rng(SEED)
        self._value = {name: constant.value * self._factors(constant) for name, constant in cluster.constants.items()}
        self._kernel_factors, self.model = self._factors(KERNELS), self._factors(MODEL)
        self._used: dict[str, None] = {}
        self._unmeasured: dict[str, None] = {}
        self.kernel = functools.cache(self._kernel)
        self.message = functools.cache(self._message)

    def _factors(self, constant: Constant) -> Times:
        """Return 1, then draws with a tenth below ``constant.low`` and a tenth above ``constant.high``."""
        deviations = np.concatenate([[0.0], self._random.standard_normal(DRAWS)]) / DECILE
        return np.where(deviations < 0, constant.low, constant.high) ** abs(deviations)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The constants used that were neither measured nor fitted, and the kernels of which no rate was measured."""
        sources = self.cluster.sourced("assumed", "datasheet")
        return (*(name for name in self._used if name in sources), *(f"kernel {name}" for name in self._unmeasured))

    def __getitem__(self, name: str) -> Times:
        self._used[name] = None
        return self._value[name]

    def computing(self, flops: float) -> Times:
        return flops / (self["flops"] * self["compute_share"])

    def module(self, module: ModuleProfile, sequences: float) -> _Computing:
        passes = (self.computing(sequences * flops) for flops in (module.forward_flops, module.backward_flops))
        return _Computing(module.parameters, *passes)

    def _kernel(self, event: Pass) -> Times:
        measured = self.cluster.kernels.get(event.kernel)
        if measured is not None:
            return self._kernel_factors * (measured.seconds + event.nbytes / measured.rate)
        self._unmeasured[event.kernel] = None
        return self["launch_seconds"] + event.nbytes / (self["memory_rate"] * self["memory_share"])

    def _message(self, message: Message) -> Times:
        """Return the seconds of a collective, its latencies included.

        A ring goes at the rate of its slowest hop. NCCL may all-reduce on a tree, which has fewer rounds; it chooses by
        size. Messages to all peers use the links inside a node and its NICs side by side.
        """
        group, local = message.group, message.group.per_node
        if group.size == 1:
            return self.zero
        hop, rate = self["intra_latency"], self["intra_rate"] if local > 1 else np.inf
        rounds = group.size - 1 if message.verb == "all_gather" and self.on_ring(message) else message.rounds
        if not group.crosses:
            return rounds * hop + message.nbytes / rate
        far, nic = self["inter_latency"], self["inter_rate"] * self["inter_share"]
        if not self.on_ring(message):
            return rounds * far + np.maximum(message.rank_bytes("intra") / rate, message.nic_bytes / nic)
        rate = np.minimum(rate, nic / group.beside)
        ring = rounds * (far + (local - 1) * hop) / local + message.nbytes / rate
        if message.verb != "all_reduce" or self.cluster.codec_on_core:
            return ring
        depth = math.ceil(math.log2(group.size / local)) * far + math.ceil(math.log2(local)) * hop
        whole = message.nbytes * group.size / (group.size - 1)  # up and down again
        return np.minimum(ring, 2 * depth + whole / rate)

    def on_ring(self, message: Message) -> bool:
        """Does ``message`` cross each NIC once? NCCL gathers on a ring, too; on CPUs we gather from peer to peer."""
        return message.verb in (*RING, "broadcast") or (message.verb == "all_gather" and not self.cluster.codec_on_core)

    def as_sent(self, message: Message) -> Message:
        """Return ``message``, or one on a ring that puts the same bytes on each link."""
        return replace(message, verb=RING[0]) if self.on_ring(message) else message


class _Computing(NamedTuple):
    """The computing of a module, and its parameters."""

    parameters: tuple[str, ...]
    forward: Times
    backward: Times


class _Clock:
    """The time up to which each resource of a rank is busy.

    Attributes:
        core: where computing is. busy: seconds by resource, and of "codec" and "host" work.
    """

    def __init__(self, costs: Costs, network: bool) -> None:
        """``network`` False: messages take no time."""
        self.costs, self.network, self.core = costs, network, costs.zero
        self.free: dict[str, Times] = defaultdict(lambda: costs.zero)
        self.busy: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []

    def compute(self, name: str, seconds: Times) -> None:
        self._note("core", name, self.core, self.core + seconds)
        self.core = self.core + seconds

    def wait(self, time: Times) -> None:
        self.core = np.maximum(self.core, time)

    def run(self, worker: str, stretch: Stretch) -> Times:
        """Let ``worker`` begin ``stretch`` at the core's time, behind what it has begun. Return the end.

        On CPUs its kernels and its messages take the core: computing is that much later.
        """
        time, on_core = np.maximum(self.core, self.free[worker]), self.costs.cluster.codec_on_core
        for event in stretch.events:
            if isinstance(event, Pass):
                begin, seconds = time, self.costs.kernel(event)
                time = begin + seconds
                self.busy["codec"] += float(seconds[0])
                self._note(worker, event.kernel, begin, time)
                if on_core:
                    self.core = self.core + seconds
            elif self.network and event.group.size > 1:
                link, seconds = "NIC" if event.group.crosses else "inside", self.costs.message(event)
                begin = np.maximum(time, self.free[link])
                self.free[link] = time = begin + seconds
                self.busy[link] += float(seconds[0])
                self._note(link, event.verb, begin, time)
                if on_core:
                    host = event.nbytes * self.costs["host_seconds_per_byte"]
                    self.core = self.core + host
                    self.busy["host"] += float(host[0])
        self.free[worker] = time
        return time

    def _note(self, resource: str, name: str, begin: Times, end: Times) -> None:
        if self.network:
            self.spans.append(Span(resource, name, float(begin[0]), float(end[0])))


def _play_step(
    step: RecordedStep, modules: Sequence[_Computing], costs: Costs, micro_batches: int, *, network: bool
) -> _Clock:
    """Play one step up to the optimizer's."""
    clock, count = _Clock(costs, network), len(modules)
    gathers, later = (_by_module(stretches, modules, min) for stretches in (step.forward, step.later))
    second_gathers = _by_module(step.again, modules, max)
    gradients = _by_module(step.gradients, modules, min, in_order=True)
    for micro_batch in range(micro_batches):
        for stretch in step.forward if micro_batch == 0 else ():
            if not stretch.parameters:  # buffers that DDP broadcasts before the forward pass
                clock.wait(clock.run("weights", stretch))
        _pass_over(clock, "forward", {i: modules[i].forward for i in range(count)}, gathers, {})
        gathers = later
        is_last = micro_batch == micro_batches - 1
        backward = {i: modules[i].backward for i in reversed(range(count))}
        _pass_over(clock, "backward", backward, second_gathers, gradients if is_last else {})
    clock.wait(clock.free["gradients"])
    clock.wait(clock.run("gradients", step.update))
    return clock


def _pass_over(
    clock: _Clock,
    name: str,
    seconds: Mapping[int, Times],
    gathers: Mapping[int, Sequence[Stretch]],
    gradients: Mapping[int, Sequence[Stretch]],
) -> None:
    """Compute the modules in the order of ``seconds``, with the gather of the next weights under way beside it."""
    waiting = [stretch for module in seconds for stretch in gathers.get(module, ())]
    arrival = clock.run("weights", waiting.pop(0)) if waiting else clock.core
    for module, computing in seconds.items():
        for _ in gathers.get(module, ()):
            clock.wait(arrival)
            arrival = clock.run("weights", waiting.pop(0)) if waiting else arrival
        clock.compute(f"{name} {module}", computing)
        for stretch in gradients.get(module, ()):
            clock.run("gradients", stretch)


def _by_module(
    stretches: Iterable[Stretch],
    modules: Sequence[_Computing],
    choose: Callable[[Sequence[int]], int],
    *,
    in_order: bool = False,
) -> dict[int, list[Stretch]]:
    """Sort stretches by the module that ``choose`` picks of those that use their parameters.

    ``in_order``: backwards, no stretch before the one in front of it, as engines send gradients.
    """
    users: dict[str, list[int]] = defaultdict(list)
    for number, module in enumerate(modules):
        for name in module.parameters:
            users[name].append(number)
    sorted_by, previous = defaultdict[int, list[Stretch]](list), len(modules)
    for stretch in stretches:
        if unknown := [name for name in stretch.parameters if name not in users]:
            raise ThinwireError(
                f"the profile has no module with {unknown[0]}: it is of another model than the timeline"
            )
        if stretch.parameters:
            number = choose([number for name in stretch.parameters for number in users[name]])
            previous = min(number, previous) if in_order else number
            sorted_by[previous].append(stretch)
    return sorted_by
