"""Methods on ranks that are threads: what each rank got, sent and keeps.

results = reduce_on_threads(MyMethod, my_gradients, topology="all_reduce", size=4, shapes={"w": 1000}, steps=100)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.exchange import AllReduce, Exchange, ReduceScatter
from thinwire.core.method import Method
from thinwire.core.state import dump_state
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import Shapes, ThreadComm, ThreadEngine, Threads, VirtualRank


def exchange_on(topology: str, world: Threads, rank: int, ledger: Ledger, per_node: int = 1) -> Exchange:
    """Make the exchange ``all_reduce`` or ``reduce_scatter`` of ``world``. For two hops: :class:`ThreadEngine`."""
    comm = ThreadComm(world, rank, ledger, per_node=per_node)
    return {"all_reduce": AllReduce, "reduce_scatter": ReduceScatter}[topology](comm)


def reduce_on_threads(
    make: Callable[[], Method],
    gradients: Callable[[int, int, int], Tensor],
    *,
    topology: str,
    size: int,
    shapes: Shapes,
    steps: int = 1,
    per_node: int = 1,
    seed: int = 0,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    max_norm: float = math.inf,
    skip: Sequence[int] = (),
) -> list[list[dict[str, Any]]]:
    """Run a method for ``steps`` steps on ``size`` virtual ranks.

    Args:
        make: a new method for one rank.
        gradients: (rank, step, numel) -> that rank's flat gradient.
        shapes: parameter name -> shape, or number of elements.
        topology, per_node: see :class:`ThreadEngine`.
        optimizer: of zero weights that follow the mean, as an engine's would. max_norm: clips their gradients.
        skip: steps that turn out not to count (a value was not finite): nothing of them may remain.

    Returns:
        per rank, per step: ``input`` (flat), ``mean`` (flat, or this rank's row of it), ``bytes`` (sent by this rank),
        ``facts``, ``weights`` (name -> this rank's values), and the method's state as ``kind/parameter`` (R, span).
    """
    world = Threads(size)

    def clip(rank: VirtualRank) -> Tensor:
        squares = rank.out.double().square().sum()
        if rank.engine.owner:  # on HSDP every node has all rows
            squares = torch.stack(world.swap(rank.engine.rank, squares)).sum() * rank.engine.rows / size
        return (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()

    def body(number: int) -> list[dict[str, Any]]:
        engine = ThreadEngine(topology, world, number, Ledger(), shapes, per_node)
        rank = VirtualRank(make(), engine, steps, seed=seed, all_sent=True, optimizer=optimizer)
        results: list[dict[str, Any]] = []
        for step in range(steps):
            flat = gradients(number, step, engine.numel)
            results.append({"input": flat.clone()})
            rank.exchange(step, flat)
            if step in skip:
                rank.undo()
            else:
                rank.finish(step, torch.ones(()) if optimizer is None else clip(rank))
            results[-1] |= {
                "mean": rank.out.clone(),
                "bytes": torch.tensor(sum(rank.ledger.current.bytes.values())),
                "facts": rank.method.facts(),
                "weights": {name: weight.detach().clone() for name, weight in rank.weights.items()},
                **dump_state(rank.method.state),
            }
            rank.ledger.close_step()
        return results

    return world.run(body)


class FlatMuon(torch.optim.Muon):
    """torch's Muon for virtual ranks, whose weights are flat. It steps none: that is left to the method."""

    def __init__(self, parameters: Any, lr: float = 1e-3, **settings: Any) -> None:
        defaults = torch.optim.Muon([torch.nn.Parameter(torch.zeros(1, 1))], lr=lr, **settings).defaults
        torch.optim.Optimizer.__init__(self, parameters, defaults)

    def _init_group(self, *lists: Any) -> bool:
        return False


def first_moment(optimizer: torch.optim.Optimizer, weight: Tensor, counted: Tensor | None) -> Tensor | None:
    """Return Adam's first moment of ``weight``. A method may have frozen Adam's count, and ``counted`` on by itself:
    ``exp_avg`` is then of the size of a moment of that many steps."""
    adam = optimizer.state.get(weight, {})
    if counted is None or not counted or "exp_avg" not in adam:  # 0 in a saved state: not yet
        return adam.get("exp_avg")
    beta1 = optimizer.param_groups[0]["betas"][0]
    return adam["exp_avg"] * ((1 - beta1 ** float(counted)) / (1 - beta1 ** float(adam["step"])))


def entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``state`` by key without the rank: ``"residual/w"``."""
    return {re.sub(r"^rank-\d+-of-\d+/", "", key): value for key, value in state.items()}
