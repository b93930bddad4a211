"""A few steps of a method on virtual ranks, of which everything is kept: what ``laws.py`` judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import knobs_of
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method, Parameter, Step
from thinwire.core.road import Pieces, Stage
from thinwire.core.selection import keep_dense
from thinwire.core.state import State
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import Plan
from thinwire.proof.ranks import LockStep, Shapes, ThreadEngine, Threads

SHAPES: Shapes = {"a.weight": (12, 16), "b.weight": (5, 7)}
KNOBS: Mapping[str, Any] = {
    "smallest": 0, "start": 1, "warmup": 2, "density": 0.25, "T": 2, "rank": 1, "k": 8, "chunk": 64, "theta": 0.9,
    "ratio": 4, "block": 16, "group": 32, "weight_group": 32, "every": 2, "outer_lr": 1.0, "outer_momentum": 0.0,
}  # fmt: skip
"""With which tensors as small as ``SHAPES`` are compressed, and a few steps are more than the start."""
RUN = 100
"""Steps of the run that methods are told of: what they do at its end is not played."""


class Where(NamedTuple):
    """``topology``: one of ``thinwire.proof.ranks.TOPOLOGIES``. ``size`` ranks, ``per_node`` of them on a node."""

    topology: str
    size: int
    per_node: int = 1

    @property
    def engine(self) -> str:
        return {"all_reduce": "ddp", "two_level": "ddp", "hsdp": "hsdp"}.get(self.topology, "fsdp2")


def small(cls: type[Method], **knobs: Any) -> Method:
    """A method with those of ``KNOBS`` that it has, and ``knobs``."""
    return cls(**{knob.name: KNOBS[knob.name] for knob in knobs_of(cls) if knob.name in KNOBS} | knobs)


@dataclass(frozen=True)
class Hop:
    """One exchange of a step on one rank, as its method saw it: ``given`` and ``mean`` are flat."""

    given: Tensor
    mean: Tensor


@dataclass(frozen=True)
class Taken:
    """What one rank had after one step. ``moments``: the optimizer's ``exp_avg``, flat, in the order of parameters.

    ``alone``: the rank took it by itself. ``stepped``: the weights as the optimizer left them. ``equal``: all ranks
    hold the same weights now.
    """

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
class Played:
    """``ranks``: by rank and step. ``stages``, ``parameters``, ``numel`` (of a flat gradient): rank 0's."""

    where: Where
    ranks: list[list[Taken]]
    stages: Sequence[Stage]
    parameters: dict[str, Parameter]
    numel: int

    @property
    def method(self) -> Method:
        return self.stages[-1].method


Gradient = Callable[[int, int, int], Tensor]
"""(rank, step, numel) -> (numel,) float32."""


def gradient(rank: int, step: int, numel: int) -> Tensor:
    """What all ranks and steps have in common, and noise half as large."""
    return common(numel) + 0.5 * _normal(1 + rank + 64 * step, numel)


def common(numel: int) -> Tensor:
    return _normal(0, numel)


def _normal(seed: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def play(
    make: Callable[[], Method], where: Where, steps: int, *, gradient: Gradient = gradient, undo: Sequence[int] = ()
) -> Played:
    """``steps`` steps of what ``make`` makes. Before those in ``undo``, another one with other gradients is undone."""
    world = LockStep(where.size)

    def body(number: int) -> tuple[list[Taken], Rank]:
        rank, found = Rank(make, where, world, number), []
        for step in range(steps):
            if step in undo:
                rank.exchange(step, 3 * gradient(number, steps + step, rank.numel))
                rank.undo()
            rank.exchange(step, gradient(number, step, rank.numel))
            found.append(rank.finish(step))
        return found, rank

    found = world.run(body)
    first = found[0][1]
    return Played(where, [taken for taken, _ in found], first.road.stages, first.engine.parameters, first.numel)


def begun(make: Callable[[], Method], where: Where) -> Rank:
    return Rank(make, where, Threads(where.size), 0)


class Watched(Stage):
    """Keeps what its method was given last, and what it made of it."""

    def carry(self, flat: Tensor, pieces: Pieces, out: Tensor) -> None:
        given, method = flat.clone(), self.method
        if method.card.promise.of == "updates":
            compress = method.compress  # type: ignore[attr-defined]

            def watched(bucket: Bucket, exchange: Exchange) -> None:
                bucket.unpack(bucket.rows, given)
                compress(bucket, exchange)

            method.compress = watched  # type: ignore[attr-defined]
            super().carry(flat, pieces, out)
            del method.compress  # type: ignore[attr-defined]
        else:
            super().carry(flat, pieces, out)
        self.hop = Hop(given, out.clone())


class Rank:
    """One rank: its method, and the optimizer of a model whose gradients are handed in."""

    def __init__(self, make: Callable[[], Method], where: Where, world: Threads, rank: int) -> None:
        self.ledger, self.method = Ledger(), make()
        method = self.method
        method.state = State(method.card.offloaded_kinds)

        def engine(shapes: Shapes) -> ThreadEngine:
            return ThreadEngine(where.topology, world, rank, self.ledger, shapes, where.per_node)

        sent = [name for name, of in engine(SHAPES).parameters.items() if keep_dense(method, of) is None]
        if not sent:
            raise ThinwireError(f"{method.name} compresses none of {SHAPES}: what it needs belongs into KNOBS")
        self.engine = engine({name: SHAPES[name] for name in sent})
        self.numel, self.weights = self.engine.numel, self.engine.weights()
        self.optimizer = method.OPTIMIZER(list(self.weights.values()), lr=1e-3)
        run = self.engine.run(RUN, optimizers=(self.optimizer,), weights=self.weights)
        method.begin(run)
        self.road = self.engine.road(method, run, stage=Watched)
        self.plan = Plan(self.road, run, where.engine)

    @torch.no_grad()
    def exchange(self, step: int, flat: Tensor) -> None:
        self.road.step, engine = step, self.engine
        self.out = torch.full((self.numel // engine.rows,), torch.nan) if engine.owner else flat
        self.road.carry(flat, engine.pieces, self.out)

    def undo(self) -> None:
        self.method.state.rollback()
        self.method.undo()
        self.method.finish()
        self.ledger.close_step()

    def finish(self, number: int) -> Taken:
        """The step counts."""
        method, state, weights = self.method, self.method.state, self.weights
        state.commit()
        for weight, values in zip(
            weights.values(), self.out.split([weight.numel() for weight in weights.values()]), strict=True
        ):
            weight.grad = values.clone()
        step = Step(number, (self.optimizer,), weights, torch.ones(()))
        with torch.no_grad():
            method.before_step(step)
            self.optimizer.step()
            stepped = _flat(weights)
            method.after_step(step)
        state.commit()
        method.finish()
        moments = [self.optimizer.state[weight].get("exp_avg") for weight in weights.values()]
        taken = Taken(
            [stage.hop for stage in self.road.stages if isinstance(stage, Watched)],
            self.out.clone(),
            sum(self.ledger.now.bytes.values()),
            state.state_dict(),
            torch.cat([torch.zeros(0) if of is None else of.clone() for of in moments]),
            _flat(weights),
            stepped,
            method.card.alone(number),
            method.rank_equal,
        )
        self.ledger.close_step()
        return taken


def _flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weight.detach().clone() for weight in weights.values()])
