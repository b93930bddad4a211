"""Records a few steps of a method on virtual ranks, for ``laws.py`` to check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method
from thinwire.core.road import Stage
from thinwire.core.selection import keep_dense
from thinwire.core.state import dump_state
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import Plan
from thinwire.proof.ranks import Shapes, ThreadEngine, Threads, VirtualRank, flat_copy

SHAPES: Shapes = {"a.weight": (12, 16), "b.weight": (5, 7)}
KNOBS: Mapping[str, Any] = {
    "smallest": 0, "start": 1, "warmup": 2, "density": 0.25, "T": 2, "rank": 1, "theta": 0.9,
    "ratio": 4, "block": 16, "group": 32, "weight_group": 32, "every": 2, "outer_lr": 1.0, "outer_momentum": 0.0,
}  # fmt: skip
"""Knobs with which a method compresses tensors as small as ``SHAPES`` and ends its start within a few steps."""
RUN = 100
"""Steps of the run that methods are told; the recording ends earlier."""


class Setup(NamedTuple):
    """A ``topology`` of a ``ThreadEngine`` with ``size`` ranks, ``per_node`` of them on a node."""

    topology: str
    size: int
    per_node: int = 1

    @property
    def engine(self) -> str:
        return {"all_reduce": "ddp", "two_level": "ddp", "hsdp": "hsdp"}.get(self.topology, "fsdp2")


def small(cls: type[Method], **knobs: Any) -> Method:
    """Make a method with ``knobs`` and those of ``KNOBS`` that it has."""
    return cls(**{knob.name: KNOBS[knob.name] for knob in knobs_of(cls) if knob.name in KNOBS} | knobs)


class Hop(NamedTuple):
    """An exchange on one rank as its method saw it: the input ``entered`` and the ``mean``, both flat."""

    entered: Tensor
    mean: Tensor


@dataclass(frozen=True)
class StepRecord:
    """The tensors of a rank after one step. ``moments``: the optimizer's ``exp_avg``, flat, as if it counted every
    step. ``stepped``: the weights after the optimizer. ``alone``: the rank stepped by itself. ``equal``: all ranks hold
    the same weights now."""

    hops: list[Hop]
    mean: Tensor
    sent: float
    state: dict[str, Tensor]
    moments: Tensor
    weights: Tensor
    stepped: Tensor
    alone: bool
    equal: bool


@dataclass(frozen=True)
class Recording:
    """A recorded run. ``ranks``: the records by rank and step. ``first``: rank 0 itself."""

    setup: Setup
    ranks: list[list[StepRecord]]
    first: Rank


Gradient = Callable[[int, int, int], Tensor]
"""(rank, step, numel) -> (numel,) float32."""


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """Draw a gradient: values common to all ranks and steps, plus noise half as large."""
    return common(numel) + 0.5 * _normal(1 + rank + 64 * step, numel)


def common(numel: int) -> Tensor:
    return _normal(0, numel)


def _normal(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def play(
    make: Callable[[], Method], setup: Setup, steps: int, *, gradient: Gradient = gradient, undo: Sequence[int] = ()
) -> Recording:
    """Record ``steps`` steps of ``make``'s method; before each in ``undo``, undo one with other gradients."""
    world = Threads(setup.size)

    def body(number: int) -> tuple[list[StepRecord], Rank]:
        rank, records = Rank(make, setup, world, number), []
        for step in range(steps):
            if step in undo:
                rank.exchange(step, 3 * gradient(number, steps + step, rank.engine.numel))
                rank.undo()
                rank.ledger.close_step()
            rank.exchange(step, gradient(number, step, rank.engine.numel))
            records.append(rank.record(step))
        return records, rank

    results = world.run(body)
    return Recording(setup, [records for records, _ in results], results[0][1])


def values_of(bucket: Bucket) -> Tensor:
    """Return what is to be compressed of ``bucket``: its rows, or the steps that a codec is to make of them."""
    if bucket.adam is None:
        return bucket.rows
    steps = bucket.rows.clone()
    bucket.adam.take(steps)
    return steps


class RecordedStage(Stage):
    """A stage that keeps its method's last input and mean."""

    def carry(self, flat, pieces, out, send=None, bound=None):
        entered, method = flat.clone(), self.method
        if method.card.promise.of == "updates":
            compress = method.compress  # type: ignore[attr-defined]

            def recorded(bucket: Bucket, exchange: Exchange) -> None:
                bucket.copies.unpack(values_of(bucket).contiguous(), entered)
                compress(bucket, exchange)

            method.compress = recorded  # type: ignore[attr-defined]
        super().carry(flat, pieces, out, send, bound)
        if "compress" in vars(method):
            del method.compress  # type: ignore[attr-defined]
        self.hop = Hop(entered, out.clone())


class Rank(VirtualRank):
    """A virtual rank that records its steps, with a plan and those tensors of ``SHAPES`` that its method compresses."""

    def __init__(self, make: Callable[[], Method], setup: Setup, world: Threads, rank: int) -> None:
        method, ledger = make(), Ledger()

        def engine(shapes: Shapes) -> ThreadEngine:
            return ThreadEngine(setup.topology, world, rank, ledger, shapes, setup.per_node)

        sent = [name for name, parameter in engine(SHAPES).parameters.items() if keep_dense(method, parameter) is None]
        if not sent:
            raise ThinwireError(f"{method.name} compresses none of {SHAPES}: what it needs belongs into KNOBS")
        shapes = {name: SHAPES[name] for name in sent}
        super().__init__(method, engine(shapes), RUN, optimizer=partial(method.OPTIMIZER, lr=1e-3), stage=RecordedStage)
        self.plan = Plan(self.road, self.run, setup.engine)

    def record(self, number: int) -> StepRecord:
        """Take and record the step of the last exchange."""
        self.finish(number, torch.ones(()))
        beta1 = self.optimizer.defaults.get("betas", (0.0,))[0]
        states = [self.optimizer.state[weight] for weight in self.weights.values()]
        # A method may freeze Adam's count, and keep the first moment as one of that many steps.
        moments = [
            adam["exp_avg"] * ((1 - beta1 ** (number + 1)) / (1 - beta1 ** float(adam["step"])))
            for adam in states if "exp_avg" in adam
        ]  # fmt: skip
        record = StepRecord(
            [stage.hop for stage in self.road.stages if isinstance(stage, RecordedStage)],
            self.out.clone(),
            sum(self.ledger.current.bytes.values()),
            dump_state(self.method.state),
            torch.cat([torch.zeros(0), *moments]),
            flat_copy(self.weights),
            self.stepped,
            self.method.card.alone(number),
            self.method.rank_equal,
        )
        self.ledger.close_step()
        return record
