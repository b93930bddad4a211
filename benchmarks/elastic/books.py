"""The books of replicas that come and go: is what they took delivered, waiting or lost, and nothing twice?

Each replica writes, as lines of JSON, random projections of what it sends, of what then waits on it, and of what all
are delivered: one number each, in place of as many as the model has parameters. A line is written *before* what it says
is sent, so that it is there when the replica is killed. :func:`balance` adds them up.

    taken = delivered + waiting + lost          lost: what waited on replicas that have died
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from thinwire.core.state import written_rows
from thinwire.methods.parts.fragments import Fragment
from thinwire.network.comm import local
from thinwire.proof.record import values_of


class Books:
    """Notes what a wire takes, delivers and keeps. ``write`` gets the lines; ``sent`` is in each that counts."""

    def __init__(self, wire: Any, manager: Any, model: nn.Module, write: Callable[[dict[str, Any]], None]) -> None:
        self._wire, self._manager, self._write = wire, manager, write
        self._projection = {
            name: torch.randn(local(weight).numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            for seed, (name, weight) in enumerate(model.named_parameters())
        }
        self.delivered = 0.0
        promise = wire.method.card.promise
        if promise.kind not in ("exact", "conserves"):  # of what is rounded off there are no books
            return
        if promise.of == "weights":
            self._watch_rounds()
        else:
            self._watch(wire._road.last)
        self._norm_of_waiting, wire.turnover.waiting = wire.turnover.waiting, self._waiting

    @property
    def number(self) -> int:
        """The number of the membership."""
        return self._wire.engine.across.membership.number

    def _project(self, values: Iterable[tuple[str, Tensor]]) -> float:
        total = 0.0
        for name, columns in values:
            projection = self._projection[name]
            columns = columns.reshape(-1)[: len(projection)].double()
            total += float(columns @ projection[: len(columns)])
        return total

    def _line(self, **values: float) -> None:
        if self._wire.engine.across.played is None:  # else others have taken the step
            self._write({"attempt": self._manager.current_step() + 1, "number": self.number, **values})

    def _watch(self, stage: Any) -> None:
        carry, method = stage.carry, stage.method

        def views(flat: Tensor, pieces: Sequence[Any]) -> list[tuple[str, Tensor]]:
            return [(piece.name, flat[piece.offset :][: piece.numel]) for piece in pieces]

        def recorded(flat: Tensor, pieces: Any, out: Tensor, *more: Any, **named: Any) -> None:
            entered = flat.clone()
            if method.card.promise.of == "updates":
                compress = type(method).compress

                def send(bucket: Any, exchange: Any) -> None:
                    bucket.copies.unpack(values_of(bucket), entered)
                    self._line(takes=self._project(views(entered, pieces)))
                    compress(method, bucket, exchange)

                method.compress = send
            else:
                self._line(takes=self._project(views(entered, pieces)))
            carry(flat, pieces, out, *more, **named)
            self._note_delivered(views(out, pieces))

        stage.carry = recorded

    def _watch_rounds(self) -> None:
        average, books = Fragment.average, self

        def recorded(self: Fragment, moved: Tensor, number: int, exchange: Any) -> Tensor:
            books._line(takes=books._project(self._views(moved)))
            mean = average(self, moved, number, exchange)
            books._note_delivered(self._views(mean))
            return mean

        Fragment.average = recorded  # type: ignore[method-assign]

    def _note_delivered(self, mean: Iterable[tuple[str, Tensor]]) -> None:
        if self._wire.engine.across.played is None:
            self.delivered = self._wire.engine.across.size * self._project(mean)

    def _waiting(self) -> float:
        method, comm, total = self._wire.method, self._wire.engine.across, 0.0
        for key, rows in written_rows(method.state).items():
            kind, _, name = key.partition("/")
            if kind not in method.card.promise.waits:
                continue
            served = kind.endswith("server")
            projection = self._projection[name][comm.rank * rows.shape[1] if served else 0 :]
            values = rows.double().reshape(-1)[: len(projection)]
            times = method.card.promise.waits[kind] * (comm.size if served else 1)
            total += times * float(values @ projection[: len(values)])
        self._line(keeps=total)
        return self._norm_of_waiting()


class Balance(NamedTuple):
    """``gap``: the largest of what went missing or came twice, over all steps, as a share of a usual ``waiting``: the
    root of its mean square by replica; 0 where nothing waits, and then the share is of what a replica takes in a step.
    ``lost``: the steps of which something was lost."""

    gap: float
    waiting: float
    lost: int


def balance(lines: Iterable[dict[str, Any]]) -> Balance:
    """Add up the books of all replicas, shard by shard, along the steps that the survivors hold."""
    shards: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        shards[line.get("shard", 0)].append(line)
    parts = [_balance(part) for _, part in sorted(shards.items())]
    return Balance(max(part.gap for part in parts), max(part.waiting for part in parts), sum(p.lost for p in parts))


def _balance(lines: Sequence[dict[str, Any]]) -> Balance:
    takes: dict[tuple[int, int], float] = defaultdict(float)
    keeps: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    delivered: dict[int, tuple[int, float]] = {}  # by step: of the latest membership, since others took it again
    last_seen: dict[int, int] = {}
    squares = list[float]()
    for line in lines:
        if "takes" in line:
            takes[line["attempt"], line["number"]] += line["takes"]
            squares.append(line["takes"] ** 2)
        elif "keeps" in line:
            keeps[line["attempt"], line["number"]][line["process"]] = line["keeps"]
        elif line.get("counted") and "delivered" in line:
            delivered[line["step"]] = max(delivered.get(line["step"], (-1, 0.0)), (line["number"], line["delivered"]))
            last_seen[line["process"]] = max(last_seen.get(line["process"], 0), line["step"])
    taken = total = largest = 0.0
    kept: dict[int, float] = {}
    waits = list[float]()
    for step, (number, values) in sorted(delivered.items()):
        taken, total = taken + takes[step, number], total + values
        kept |= keeps[step, number]
        waits += keeps[step, number].values()
        largest = max(largest, abs(taken - total - sum(kept.values())))
    usual = math.sqrt(sum(value**2 for value in waits) / max(1, len(waits)))
    scale = usual or math.sqrt(sum(squares) / max(1, len(squares)))
    end = max(delivered, default=0)
    lost = sum(value != 0 and last_seen.get(process, 0) < end for process, value in kept.items())
    return Balance(largest / scale if scale else 0.0, usual, lost)
