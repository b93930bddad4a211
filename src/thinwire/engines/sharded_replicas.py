"""Replicas of several ranks that come and go (HSDP): FSDP2 inside a replica, the managed group between replicas.

The ranks of a replica live and die together. FSDP2's own engine shards weights and reduces gradients among them, in the
backward pass, with the method's messages; each rank then exchanges its shard with the same rank of the other replicas
as the optimizer steps (``replicas.py``). What one rank of a replica sees fail has failed for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from thinwire.core.bucket import Layout
from thinwire.core.engine import Meet
from thinwire.core.exchange import AllReduce
from thinwire.core.method import Method
from thinwire.core.road import Road
from thinwire.core.step import StepLoop
from thinwire.core.weights import Replica
from thinwire.engines.fsdp2 import FSDP2
from thinwire.engines.fsdp2_module import columns
from thinwire.engines.replicas import Replicas
from thinwire.network.comm import Comm
from thinwire.network.ledger import Ledger


class ShardedReplicas(Replicas):
    """The shards of all gradients in one flat buffer for each dtype.

    Attributes:
        sharded: the engine inside the replica.
    """

    kind = "hsdp"

    def __init__(
        self, model: Any, method: Method, members: Any, across: Comm, ledger: Ledger, meet: Meet = lambda: None
    ) -> None:
        self.sharded = FSDP2(model, method, ledger, two_level=False, meet=meet)
        self.model, self.members, self.across = model, members, across
        self.parameters, self.rank = self.sharded.parameters, self.sharded.rank
        self.gathers = self.sharded.gathers
        self.inside, self.comms = self.sharded.comms, [*self.sharded.comms, across]
        self.hops = (*self.sharded.hops, AllReduce(across, divide="after"))
        self._prepare()
        for call in ("accumulate", "accumulated", "stepping", "stepped", "send_weights", "wait_for_weights",
                     "weights_changed", "missed", "close"):  # fmt: skip
            setattr(self, call, getattr(self.sharded, call))  # these are about the replica's own ranks alone

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of weights that the method encodes."""
        return self.sharded.replicas

    def layout(self) -> Layout:
        """Return the buffers between replicas with the rows that they are shards of; torch reduces these by module."""
        ranks = self.sharded.hops[0].ranks
        buffers = [columns({piece.name: piece.numel for piece in pieces}, ranks) for *_, pieces in self._buffers]
        inside = self.sharded.layout()
        return Layout(buffers, [dtype for dtype, *_ in self._buffers], inside.shards, inside.comm, inside.held)

    def attach(self, step_loop: StepLoop, road: Road) -> None:
        super().attach(step_loop, road)
        self.sharded.attach(step_loop, Road(road.stages[:1]))

    def _watch(self) -> None:
        """The engine inside tells the loop of every backward pass."""

    def _enter(self, names: Sequence[str]) -> None:
        if unseen := [name for name in names if not self._step_loop.seen(name)]:  # they rest in this step
            self._step_loop.enter(unseen)

    def dropped(self, weights: Sequence[Tensor], *, look: bool, comms: Sequence[Comm] | None = None) -> bool:
        if look:  # a further pass, which the replica's own ranks have averaged, and not the replicas
            self._gradients = "own"
        return self.sharded.dropped(weights, look=look)

    def end_step(self) -> None:
        super().end_step()
        self.sharded.end_step()
