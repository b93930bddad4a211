"""Replicas that come and go: gradients are exchanged as the optimizer steps, whatever parallelism is inside a replica.

A replica is what fails as a whole: one rank, or the ranks of one FSDP2 shard group. torch reduces inside it, in the
backward pass; we average across replicas, shard by shard, once the backward pass is over. There is no exchange beside
the backward pass, then, but also no error in the middle of one: whatever fails fails in one place.

    ask who takes part -> exchange -> agree (flags and norms of all, gathered) -> vote -> the optimizer steps

An attempt that fails leaves no trace. The agreement is the point of no return: no replica can have counted the step
unless all had come to it. A replica whose own error comes later than that is *in doubt*, and finds out from the others
(``saved/turnover.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from thinwire.base.errors import FailedExchange, ThinwireError
from thinwire.core.bucket import Layout, Piece
from thinwire.core.engine import Engine
from thinwire.core.exchange import AllReduce
from thinwire.core.members import Members
from thinwire.core.names import describe
from thinwire.core.road import Road
from thinwire.core.step import ENDED, StepLoop
from thinwire.network.comm import Comm, GroupComm, local
from thinwire.network.guard import Guard

T = TypeVar("T")


class Attempts(Protocol):
    """What happens to a wire's state around an attempt: ``saved.turnover.Turnover``."""

    @property
    def met(self) -> bool: ...

    @property
    def asked(self) -> bool: ...

    @property
    def behind(self) -> bool: ...

    def meet(self, unsent: FailedExchange | None) -> bool: ...

    def waiting(self) -> float: ...

    @property
    def branch(self) -> tuple[int, int]: ...

    def agreed(self, counted: bool, finite: bool, waiting: Sequence[float]) -> None: ...

    def doubt(self) -> None: ...


class Replicas(Engine):
    """All gradients of this rank in one flat buffer for each dtype, in the order of the parameters on every replica.

    Attributes:
        members: who takes part. inside: the group of this replica's ranks; None: it is one rank.
        attempts: what happens to the wire's state around an attempt; set by ``wire.join``.
        failed: the error of the attempt under way, if it has failed. unsent: that of what was sent after the last vote.
    """

    attempts: Attempts

    def __init__(self, model: Any, members: Members, across: Comm) -> None:
        """``across``: the ranks of all replicas that hold the same part of the weights as this one."""
        self.model, self.members, self.across = model, members, across
        self.inside = _shard_group(model)
        self.kind = "ddp" if self.inside is None else "hsdp"
        shards = {} if self.inside is None else {
            id(weight): (tuple(weight.shape), tuple(local(weight).shape)) for weight in model.parameters()
        }  # fmt: skip
        self.parameters = describe(model, shards)
        self.hops = (AllReduce(across, divide="before" if self.inside is None else "after"),)
        self.comms = [across]
        self.failed: FailedExchange | None = None
        self.unsent: FailedExchange | None = None
        self.void = False
        self._joins_round = False  # was this replica away, and are the others at the end of a round?
        self._weights = [weight for weight in model.parameters() if id(weight) in self.parameters]
        self._exchanged: list[int] = []  # the gradients that this step has exchanged, by id
        self._closed = False
        self._buffers = self._lay_out()

    @property
    def rank(self) -> int:  # type: ignore[override]
        return self.across.rank * self._shards + (0 if self.inside is None else self.inside.rank)

    @property
    def place(self) -> tuple[int, int]:
        """This rank's number among all ranks of all replicas, and how many there are."""
        return self.rank, self.across.size * self._shards

    @property
    def _shards(self) -> int:
        return 1 if self.inside is None else self.inside.size

    def _lay_out(self) -> list[tuple[torch.dtype, list[Tensor], tuple[Piece, ...]]]:
        buffers = []
        for dtype in dict.fromkeys(weight.dtype for weight in self._weights):
            weights = [weight for weight in self._weights if weight.dtype == dtype and local(weight).numel()]
            described = [self.parameters[id(weight)] for weight in weights]  # of which a rank may hold nothing
            *offsets, _ = itertools.accumulate((parameter.local for parameter in described), initial=0)
            pieces = (Piece(p.name, offset, p.local) for p, offset in zip(described, offsets, strict=True))
            buffers.append((dtype, weights, tuple(pieces)))
        return buffers

    def layout(self) -> Layout:
        return Layout([pieces for *_, pieces in self._buffers], [dtype for dtype, *_ in self._buffers])

    def attach(self, step_loop: StepLoop, road: Road) -> None:
        self._step_loop, self._road = step_loop, road

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def dropped(self, weights: Sequence[Tensor], *, look: bool) -> bool:
        return self._exchanged != [id(weight.grad) for weight in self._weights]

    def end_step(self) -> None:
        self._exchanged, self.failed, self.void, self._joins_round = [], None, False, False

    def close(self) -> None:
        self._closed = True

    @torch.no_grad()
    def exchange(self) -> None:
        """Average the gradients over the replicas, unless it is done. A failure is kept until ``agree``."""
        gradients = [weight.grad for weight in self._weights]
        if self._closed:
            raise ThinwireError(ENDED.format(what="gradients were exchanged"))
        if all(gradient is None for gradient in gradients) or self.failed is not None:
            return
        if self._exchanged and not self.dropped((), look=True):
            return
        with self._attempt():
            stale = False
            if not self._alone:
                stale = self._meet()
            elif not self.attempts.met:  # the run begins, or goes on without this replica
                self._meet()
            if self._alone and self.attempts.asked:
                self._joins_round = self.void = self.attempts.behind
                if self._joins_round:
                    return
                self.members.vote(True)
                self.attempts.agreed(False, False, ())
            self._average(stale)

    def _average(self, stale: bool) -> None:
        """Average the gradients over the replicas. ``stale``: this one's are of weights that are gone, and not sent."""
        self._step_loop.enter([self.parameters[id(weight)].name for weight in self._weights])
        for dtype, weights, pieces in self._buffers:
            flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=dtype, device=local(weights[0]).device)
            for weight, piece in zip(weights, pieces, strict=True):
                if weight.grad is not None and not stale:
                    flat[piece.columns].copy_(local(weight.grad).reshape(-1))
            with self._step_loop.exchanging("gradients", (piece.name for piece in pieces)):
                self._road.reduce(flat, pieces)
            for weight, piece in zip(weights, pieces, strict=True):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                gradient = local(weight.grad)
                gradient.copy_(flat[piece.columns].view(gradient.shape))
        self._exchanged = [id(weight.grad) for weight in self._weights]

    def agree(
        self, guard: Guard, device: torch.device, trouble: bool, comms: Sequence[Comm] | None = None
    ) -> tuple[bool, bool]:
        if self._joins_round:  # the end of the round will agree
            self._joins_round = False
            return False, False
        flag = guard.flag(device, trouble) if guard.enabled else torch.zeros(1, device=device)
        guard.forget()
        if self.failed is not None:
            flag[0] = 3.0
        if self.inside is not None:
            self.inside.all_reduce(flag, "max")
        verdict, waiting = float(flag), list[float]()
        if verdict < 3 and comms is not None:  # a step alone
            return verdict == 0, verdict == 2
        if verdict < 3:
            with self._attempt():
                row = torch.tensor([verdict, self.attempts.waiting(), *self.attempts.branch], dtype=torch.float64)
                rows = row.new_zeros(self.across.size, len(row))
                self.across.all_gather(rows, row)
                verdict, waiting = float(rows[:, 0].max()), rows[:, 1].tolist()
                branches = [tuple(branch) for branch in rows[:, 2:].tolist()]
                if len(set(branches)) > 1:  # some went on while others, who count as many steps, took them again
                    verdict = 3.0
                    if self.attempts.branch != max(branches, key=lambda branch: branch[::-1]):
                        self.members.fall_behind()
            if self.failed is not None:
                self.attempts.doubt()
        agreed = self.failed is None and verdict < 3
        counted = self.members.vote(agreed)
        if agreed and not counted:
            self.attempts.doubt()
        self.attempts.agreed(counted, verdict == 0, waiting)
        self.void = not counted
        return counted and verdict == 0, counted and verdict == 2

    @property
    def _alone(self) -> bool:
        return self._road.last.method.card.alone(self._road.step)

    def _meet(self) -> bool:
        unsent, self.unsent = self.unsent, None
        return self.attempts.meet(unsent)

    def attempt(self, road: Road, exchange: Callable[[int], T]) -> T | None:
        result: T | None = None
        with self._attempt():
            self._meet()
            result = exchange(road.step)
        return result

    @contextmanager
    def after_vote(self) -> Iterator[None]:
        try:
            yield
        except FailedExchange as error:
            self.unsent = error

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Keep a failure of the network for the vote."""
        try:
            yield
        except FailedExchange as error:
            error.__traceback__ = error.__cause__ = None  # whose frames would keep the broken group's messages alive
            self.failed, self.void = error, True


def _shard_group(model: nn.Module) -> GroupComm | None:
    """Find the group over which ``fully_shard`` has sharded ``model``; None: nothing is sharded."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return None
    meshes = {getattr(weight, "device_mesh", None) for weight in model.parameters()}
    if len(meshes) != 1 or (mesh := meshes.pop()) is None or mesh.ndim != 1:
        raise ThinwireError(
            "under a manager a replica is one rank, or fully_shard over a 1-D mesh of its own ranks: replicas are "
            "the manager's, so leave the 'replicate' dimension out of the mesh"
        )
    return GroupComm.aside(mesh.get_group(), torch.device("cpu"))
