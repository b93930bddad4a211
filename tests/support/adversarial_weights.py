"""The weights' way in the adversarial search: SDP4Bit's differences, ZeRO++'s and QSDP's codes, on sharded weights.

A step's weights are as adversarial as gradients are elsewhere: nothing says that a step is small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from adversarial_laws import LEAST, ROOM, TOP, Array, U, rounding_of
from thinwire.core.bucket import Layout, Piece, Shard
from thinwire.core.method import Method, Run
from thinwire.core.road import Road, Stage
from thinwire.core.selection import dense_among, keep_dense
from thinwire.core.state import State
from thinwire.core.weights import Replica
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.plan.doubles import Watch
from thinwire.plan.dry_run import dry_run
from thinwire.proof.ranks import Threads, parameters_for
from threaded import exchange_on

if TYPE_CHECKING:
    from adversarial import Case


class Owner:
    """One rank's weights, and everybody's as it has them."""

    def __init__(self, case: Case, world: Threads, rank: int, make: Callable[[], Method]) -> None:
        self.ledger, self.method = Ledger(), make()
        self.method.state = State(self.method.card.offloaded_kinds)
        exchange = exchange_on("reduce_scatter", world, rank, self.ledger, case.per_node)
        self.comm, self.parameters = exchange.comm, parameters_for(exchange, case.shapes)  # type: ignore[attr-defined]
        self.method.begin(Run(self.parameters, exchange, case.steps, case.seed, rank=rank))
        offset, pieces = 0, []
        for name, parameter in self.parameters.items():
            pieces.append(Piece(name, offset, parameter.local))
            offset += parameter.local
        self.pieces, self.rank = tuple(pieces), rank
        shard = Shard(self.pieces, (), offset, torch.float32)
        message = self.method.weight_message(shard, rank)
        self.replica = Replica(message, self.method.state, shard, self.comm, torch.device("cpu"))
        self.out = self.replica.allocate().zero_()

    def gather(self, master: Array, step: int) -> tuple[Array, float]:
        """Everybody's weights (N, n) once this rank's are ``master``, and the bytes that it sent."""
        own = self.out.view(self.comm.size, -1)[self.rank]
        own.copy_(torch.from_numpy(master))
        work = self.replica.gather(self.out, step)
        if work is not None:
            work.wait()
        sent = float(sum(self.ledger.current.bytes.values()))
        self.ledger.close_step()
        return self.out.view(self.comm.size, -1).numpy().copy(), sent

    def planned(self) -> float:
        """Bytes of one gathering."""
        numel = sum(piece.numel for piece in self.pieces)
        layout = Layout((), (), [Shard(self.pieces, (), numel, torch.float32)], self.comm)
        dense = dense_among(self.method, self.parameters.values())
        road = Road([Stage(self.method, dense, self.method.run.exchange, Guard([], False), Ledger())])
        return dry_run(layout, road, self.method.run, watch=Watch()).weights


def problems_of(case: Case, make: Callable[[], Method], masters: list[Array]) -> list[str]:
    """What is wrong with gathering ``masters``, by step (N, n). The last step's hold a value that is not finite."""
    world = Threads(case.size)

    def body(rank: int) -> tuple[list[tuple[Array, float]], Owner]:
        shard = Owner(case, world, rank, make)
        # the engine asks twice in a step, for the forward and for the backward pass
        return [shard.gather(master[rank], step) for step, master in enumerate(masters) for _ in range(2)], shard

    ranks, found = world.run(body), []
    shard = ranks[0][1]
    with np.errstate(invalid="ignore", over="ignore"):
        for turn in range(2 * len(masters)):
            got, sent = ranks[0][0][turn]
            others = [taken[turn] for taken, _ in ranks]
            if any(other.tobytes() != got.tobytes() for other, _ in others):
                found.append(f"turn {turn}: the ranks have different weights")
            if any(nbytes != sent for _, nbytes in others):
                found.append(f"turn {turn}: the ranks sent {[nbytes for _, nbytes in others]} bytes")
            if turn % 2:
                continue
            before = ranks[0][0][turn - 1][0] if turn else np.zeros_like(got)
            found += _of_one_step(case, shard, turn, masters[turn // 2], before, got)
            if turn and sent != shard.planned():
                found.append(f"turn {turn}: {sent} bytes were sent, and {shard.planned()} announced")
    return found


def _of_one_step(case: Case, shard: Owner, turn: int, master: Array, before: Array, got: Array) -> list[str]:
    """Bounded error, and what is not finite shows. The first step's weights are the replica that all start from."""
    method, found = shard.method, []
    follows = shard.replica.message.resident
    shown = ~np.isfinite(got)
    if (bad := ~np.isfinite(master) & ~shown).any():
        found.append(f"turn {turn}: weights that are not finite are finite on other ranks, at {np.argwhere(bad)[0]}")
    largest = np.abs(master[np.isfinite(master)]).max(initial=0)
    if np.isfinite(master).all() and largest * ROOM * case.steps < TOP and shown.any():
        found.append(f"turn {turn}: moderate weights that are not finite")
    for piece in shard.pieces:
        at = slice(piece.offset, piece.offset + piece.numel)
        w, r, replica = (values[:, at].astype(np.float64) for values in (master, before, got))
        error = np.zeros_like(w)
        if keep_dense(method, shard.parameters[piece.name]) is None and not (follows and not turn):
            codec = method.make_weight_codec()  # type: ignore[attr-defined]
            d = np.abs(w - r) if follows else np.abs(w)
            # the difference, and its sum with the replica: a rounding each
            error = rounding_of(codec)(d * (1 + U)) + (2 * U * (np.abs(w) + np.abs(r)) + 2 * LEAST if follows else 0)
        bad = np.abs(replica - w) > error
        if bad.any():
            place = tuple(np.argwhere(bad)[0])
            found.append(f"turn {turn}, {piece.name}{[int(i) for i in place]}: {replica[place]:.9g} for {w[place]:.9g} "
                         f"(+- {error[place]:.3g})")  # fmt: skip
    return found
