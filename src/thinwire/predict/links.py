"""Measures links with the collectives themselves, by size, and fits one latency and one rate to them.

All groups of a kind send at once, as in training: the ranks of each node among themselves; on several nodes, those with
the same number on their node, which together fill the NICs; and all ranks.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from thinwire.base import device as devices
from thinwire.network.comm import GroupComm
from thinwire.predict.cluster import Constant
from thinwire.predict.timeline import RING, Group, Message

VERBS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
SMALLEST, LARGEST, GROWTH = 1 << 16, 1 << 28, 4  # bytes of a message: from 64 kB, each 4 times the one before
TIMINGS = 3
TIMED_S, TIMED_BYTES, SLOW_S, MOST_REPEATS = 0.02, 1 << 20, 0.25, 64
"""A timing takes ``TIMED_S`` at least, and ``TIMED_BYTES`` or ``SLOW_S``; its message is repeated that often, at most.

A few messages may fit into a shaper's burst (64 kB or more) and would be timed at many times the link's rate.
"""
REWEIGHTED = 40
"""Weighted fits of squares that together make a fit of absolute errors."""
HALVINGS = 24
FALL = 0.9
"""Rate among all nodes by that between two, below which a fall is told."""
BESIDE_S = 0.6  # an exchange beside computing


@dataclass(frozen=True)
class Sample:
    """A collective of all groups of a kind at once. ``seconds``: of the slowest rank, the median of ``TIMINGS``."""

    kind: str
    message: Message
    size: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes/s out of a node, or of a rank whose group is inside it."""
        message = self.message
        return (message.nic_bytes if message.group.crosses else message.nbytes) / self.seconds


@dataclass(frozen=True)
class Line:
    """A fit: ``seconds = rounds * latency + bytes / rate``."""

    latency: Constant
    rate: Constant


def groups_of(job: GroupComm, per_node: int) -> dict[str, tuple[GroupComm, Group]]:
    """Make this rank's group of each kind. Collective over ``job``.

    "inside" a node, "across" nodes, "pair" of neighbouring nodes (of four or more, an even number), "all".
    """
    size, rank = job.size, job.rank
    nodes, node, position = size // per_node, rank // per_node, rank % per_node
    kinds: dict[str, tuple[GroupComm, Group]] = {}
    if per_node > 1:
        first = node * per_node
        kinds["inside"] = job.subset(range(first, first + per_node)), Group(per_node, per_node)
    if nodes > 1:
        kinds["across"] = job.subset(range(position, size, per_node)), Group(nodes, 1, beside=per_node)
    if nodes > 3 and nodes % 2 == 0:
        first = (node - node % 2) * per_node + position
        kinds["pair"] = job.subset([first, first + per_node]), Group(2, 1, beside=per_node)
    if per_node > 1 and nodes > 1:
        kinds["all"] = job, Group(size, per_node)
    return kinds


def sweep(job: GroupComm, per_node: int, seconds: float) -> list[Sample]:
    """Time each verb in the groups of each kind, from small to large, for about ``seconds`` in all. Collective.

    All ranks get the same samples. The next size follows if, by the time of the last one, it fits in what is left.
    """
    kinds = groups_of(job, per_node)
    samples: list[Sample] = []
    for kind, (comm, group) in kinds.items():
        for verb in VERBS:
            seconds_left = seconds / len(kinds) / len(VERBS)
            size = SMALLEST
            timed(job, _call(comm, verb, size), 1)  # connections are made at the first message
            while size <= LARGEST:
                began = time.perf_counter()
                call = _call(comm, verb, size)
                timings, repeats = TIMINGS if timed(job, call, 1) < seconds_left / 8 else 1, 1
                elapsed = statistics.median(timed(job, call, repeats) for _ in range(timings))
                while (needed := _repeats(size, elapsed)) > repeats:
                    repeats = min(MOST_REPEATS, max(needed, 2 * repeats))
                    elapsed = statistics.median(timed(job, call, repeats) for _ in range(timings))
                samples.append(Sample(kind, _message(comm, verb, size, group), size, elapsed))
                seconds_left -= agree(job, time.perf_counter() - began)
                if seconds_left < GROWTH * elapsed * (1 + TIMINGS):
                    break
                size *= GROWTH
        if comm is not job:
            comm.release()
    return samples


def _repeats(size: int, seconds: float) -> int:
    """Return how often a message of ``size`` bytes that takes ``seconds`` is sent in a timing."""
    repeats = max(TIMED_S / seconds, min(TIMED_BYTES / size, SLOW_S / seconds))
    return min(MOST_REPEATS, math.ceil(repeats))


def _message(comm: GroupComm, verb: str, size: int, group: Group) -> Message:
    """Describe a message as a timeline does."""
    if verb in RING:
        return Message(verb, comm.ring_bytes(verb, size), group, round(comm.ring_bytes(verb, comm.size)))
    return Message(verb, size * (comm.size - 1) / comm.size, group)


def _call(comm: GroupComm, verb: str, size: int) -> Callable[[], object]:
    """Make a call of ``verb`` in which each rank puts in, or gets, ``size`` bytes."""
    rows = torch.ones(comm.size, -(-size // 4 // comm.size), dtype=torch.float32, device=comm.device)
    row, out = rows[comm.rank].clone(), torch.empty_like(rows)
    return {
        "all_reduce": lambda: comm.all_reduce(rows.view(-1), "max"),
        "reduce_scatter": lambda: comm.reduce_scatter(row, rows, "max"),
        "all_gather": lambda: comm.all_gather(out, row),
        "all_to_all": lambda: comm.all_to_all(out, rows),
    }[verb]


def timed(job: GroupComm, work: Callable[[], object], repeats: int) -> float:
    """Time ``work`` on the slowest rank, the mean of ``repeats``, begun by all ranks together. Collective."""
    agree(job, 0.0)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    devices.wait(job.device)
    return agree(job, time.perf_counter() - began) / repeats


def agree(job: GroupComm, value: float) -> float:
    """Return the largest ``value`` of all ranks. Collective."""
    return float(job.all_reduce(torch.tensor([value], dtype=torch.float64, device=job.device), "max"))


def fit(samples: Sequence[Sample]) -> Line:
    """Fit a latency and a rate to ``samples``; the ranges are those of the shorter and the longer half of them."""
    seconds = np.array([sample.seconds for sample in samples])
    rounds = np.array([float(sample.message.rounds) for sample in samples])
    nbytes = seconds * [sample.rate for sample in samples]
    latency, slope = fit_line(rounds, nbytes, seconds)
    ratios, is_long = (rounds * latency + nbytes * slope) / seconds, nbytes > np.median(nbytes)
    return Line(spread(latency, 1 / ratios[~is_long], 1.25), spread(1 / max(slope, 1e-15), ratios[is_long], 1.03))


def fit_line(counts: ArrayLike, nbytes: ArrayLike, seconds: ArrayLike) -> tuple[float, float]:
    """Fit ``seconds = a * counts + b * nbytes``, a and b 0 or more, by the sum of absolute relative errors.

    Not of their squares: a message that fits into a shaper's burst may take a quarter of its time.
    """
    elapsed = np.asarray(seconds)
    columns = np.stack([np.asarray(counts, float), np.asarray(nbytes, float)], 1) / elapsed[:, None]
    weights = np.ones(len(elapsed))
    for _ in range(REWEIGHTED):
        a, b = np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(abs(columns @ (a, b) - 1), 1e-6))
    if min(a, b) < 0 or len(elapsed) < 2:  # one of the two does not show, or both cannot be told apart: bytes it is
        a, b = (0.0, _alone(columns[:, 1])) if a < 0 or len(elapsed) < 2 else (_alone(columns[:, 0]), 0.0)
    return float(a), float(b)


def solve(is_above: Callable[[float], bool], low: float, high: float) -> float:
    """Return the number from ``low`` to ``high``, both above 0, from which on ``is_above``: by ``HALVINGS`` trials."""
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return middle


def _alone(column: np.ndarray) -> float:
    return float(np.median(1 / column[column > 0])) if column.any() else 0.0


def spread(value: float, ratios: Sequence[float] | np.ndarray, at_least: float) -> Constant:
    """Return a measured constant whose range holds four of five ``ratios``, but at least a factor of ``at_least``."""
    low, high = np.quantile(ratios, (0.1, 0.9)) if len(ratios) else (1.0, 1.0)
    return Constant(value, "measured", min(float(low), 1 / at_least), max(float(high), at_least))


def fall_with_nodes(samples: Sequence[Sample]) -> str | None:
    """Say that a node's NICs carry less among all nodes than between two, if they do."""
    two, many = (_best(samples, kind) for kind in ("pair", "across"))
    if two is None or many is None or many > FALL * two:
        return None
    return (
        f"a node's NICs carry {two / 1e9:.3g} GB/s between 2 nodes and {many / 1e9:.3g} among all: it falls with nodes"
    )


def _best(samples: Sequence[Sample], kind: str) -> float | None:
    return max((sample.rate for sample in samples if sample.kind == kind), default=None)


def curves(samples: Sequence[Sample]) -> list[str]:
    """Return a line for each kind of group and verb: the rate by size."""
    lines: dict[str, list[str]] = {}
    for sample in samples:
        rate = f"{_size(sample.size)} {sample.rate / 1e6:.4g}"
        lines.setdefault(f"{sample.kind:<6} {sample.message.verb:<14}", []).append(rate)
    return [f"{name} MB/s: {', '.join(rates)}" for name, rates in lines.items()]


def _size(nbytes: int) -> str:
    return f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"


def host_cost(job: GroupComm, rate: float) -> Constant:
    """Measure the seconds of a core that each byte sent takes from computing on CPUs. Collective.

    Multiplies matrices alone, and again beside an exchange of half as long at ``rate`` bytes/s per rank.
    """
    twin = job.twin()
    matrix = torch.ones(256, 256, dtype=torch.float32, device="cpu")
    size = max(SMALLEST, min(1 << 22, int(rate * BESIDE_S / 4)))
    messages = max(1, round(rate * BESIDE_S / 2 / size))
    product_seconds = timed(job, lambda: matrix @ matrix, 100)
    turns = max(1, int(BESIDE_S / product_seconds))

    def compute() -> None:
        for _ in range(turns):
            matrix @ matrix

    def exchange() -> None:
        rows: Tensor = torch.ones(size // 4, dtype=torch.float32, device="cpu")
        for _ in range(messages):
            twin.all_reduce(rows, "max")

    def beside() -> None:
        thread = threading.Thread(target=exchange)
        thread.start()
        began = time.perf_counter()
        compute()
        elapsed.append(time.perf_counter() - began)
        thread.join()

    costs = []
    for _ in range(TIMINGS):
        elapsed: list[float] = []
        alone = timed(job, compute, 1)
        timed(job, beside, 1)
        costs.append((agree(job, elapsed[0]) - alone) / (messages * twin.ring_bytes("all_reduce", size)))
    twin.release()
    value = max(statistics.median(costs), 1e-12)
    return spread(value, [max(cost, 0.1 * value) / value for cost in costs], at_least=1.5)
