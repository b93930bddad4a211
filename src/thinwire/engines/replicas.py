"""Replicas that come and go: gradients are exchanged as the optimizer steps, once the backward pass is over.

    ask who takes part -> exchange -> agree (flags and norms of all, gathered) -> vote -> the optimizer steps

An attempt that fails leaves no trace. No replica counts a step unless all have come to the agreement. One whose own
error comes later is *in doubt*, and learns from the others (``saved/turnover.py``) whether they counted it.
"""

from __future__ import annotations

import itertools
import textwrap
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from thinwire.base.errors import FailedExchange, ThinwireError
from thinwire.core.bucket import Layout, Piece
from thinwire.core.engine import Engine, all_zero
from thinwire.core.exchange import AllReduce
from thinwire.core.names import describe
from thinwire.core.road import Road
from thinwire.core.step import StepLoop
from thinwire.network.comm import Comm, local
from thinwire.network.guard import Guard

_FROZEN = (
    "{name} was frozen after compress(), and the optimizer would still move it, by the mean of the others and by its "
    "momentum: freeze it before, or give it a group of its own with lr=0"
)

_UNLIKE = (
    "the replicas' {what} differ (here {own}), so the step would leave them with different weights: give all the same, "
    "and set a schedule by manager.current_step(), which they share"
)


def any_of(inside: Sequence[Comm], flag: bool) -> bool:
    """Return whether ``flag`` is set on any rank of a replica (no groups: on this one). Collective over ``inside``."""
    flags = torch.full((1,), float(flag), dtype=torch.float32, device="cpu")
    for comm in inside:
        comm.all_reduce(flags, "max")
    return bool(flags)


def fewest(inside: Sequence[Comm], number: int) -> int:
    """Return the smallest ``number`` on the ranks of a replica. Collective over ``inside``."""
    row = torch.tensor([-float(number)], dtype=torch.float64, device="cpu")
    for comm in inside:
        comm.all_reduce(row, "max")
    return -int(row)


def without_frames(error: FailedExchange) -> FailedExchange:
    """Let go of the messages that failed: gloo's connections live as long as one of them, and others would wait."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__, link = None, link.__cause__ or link.__context__
    error.__cause__ = error.__context__ = None
    return error


class Replicas(Engine):
    """All gradients in one flat buffer for each dtype, in the order of the parameters, on every replica.

    Attributes:
        members: who takes part (``adapters.torchft.ManagerMembers``). attempts: the ``Turnover``, which the wire sets.
        inside: the groups of the ranks of this replica, which decide alike; none: it is one rank.
        failed: the error of the attempt under way, if it has failed. unsent: that of what was sent after the last vote.
        uncounted: did the last step, if it was skipped, fail on the network (so that its batch is to be taken again)?
    """

    kind, rank = "ddp", 0
    attempts: Any
    inside: Sequence[Comm] = ()

    def __init__(self, model: Any, members: Any, across: Comm) -> None:
        self.model, self.members, self.across = model, members, across
        self.parameters, self.hops, self.comms = describe(model), (AllReduce(across),), [across]
        self._prepare()

    def _prepare(self) -> None:
        """Lay out the buffers of ``parameters``."""
        self.failed: FailedExchange | None = None
        self.unsent: FailedExchange | None = None
        self._weights = [weight for weight in self.model.parameters() if id(weight) in self.parameters]
        self.uncounted = False
        # "changed": by a pass since they were exchanged; "dropped": thrown away before such a pass.
        self._gradients: Literal["own", "exchanged", "changed", "dropped"] = "own"
        self._looked = -1, False  # the last pass that gave a gradient; were all zero before it?
        self._watches: list[RemovableHandle] = []
        self._joins_round = False  # was this replica away, and are the others at the end of a round?
        self._buffers: list[tuple[torch.dtype, list[Tensor], tuple[Piece, ...]]] = []
        for dtype in dict.fromkeys(self.parameters[id(weight)].dtype for weight in self._weights):
            weights = [weight for weight in self._weights if self.parameters[id(weight)].dtype == dtype]
            described = [self.parameters[id(weight)] for weight in weights]
            *offsets, _ = itertools.accumulate((parameter.local for parameter in described), initial=0)
            pieces = [Piece(of.name, start, of.local) for of, start in zip(described, offsets, strict=True)]
            self._buffers.append((dtype, weights, tuple(pieces)))

    def layout(self) -> Layout:
        return Layout([pieces for *_, pieces in self._buffers], [dtype for dtype, *_ in self._buffers])

    def attach(self, step_loop: StepLoop, road: Road) -> None:
        self._step_loop, self._road = step_loop, road
        self._watch()

    def _watch(self) -> None:
        """Watch each gradient: its tensor may be the one that was exchanged, with other values."""
        for weight in self._weights:
            self._watches.append(weight.register_hook(self._look))
            self._watches.append(weight.register_post_accumulate_grad_hook(self._note_pass))

    def _look(self, gradient: Tensor) -> None:
        """Find out, when the first gradient of a pass comes, whether exchanged ones were thrown away before it."""
        number = torch._C._current_graph_task_id()
        if self._gradients != "own" and number != self._looked[0]:
            self._looked = number, all_zero(weight.grad for weight in self._weights)

    def _note_pass(self, weight: Tensor) -> None:
        """Note a pass that has changed ``weight.grad``; ``torch.autograd.grad`` leaves it alone."""
        if self._step_loop.open:  # an optimizer misses the step: what it would take now is this replica's alone
            self._step_loop.finish()
        if self._gradients in ("exchanged", "changed"):
            self._gradients = "dropped" if self._looked[1] else "changed"

    def close(self) -> None:
        for watch in self._watches:
            watch.remove()

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def dropped(self, weights: Sequence[Tensor], *, look: bool, comms: Sequence[Comm] | None = None) -> bool:
        return self._gradients == "dropped"

    def emptied(self, comms: Sequence[Comm] | None = None) -> bool:
        inside = [comm for comm in self.inside if comms is None or comm in comms]  # the others hold the same means
        return all_zero(self.gradients(), inside)

    def end_step(self) -> None:
        self.uncounted = self.void
        self.attempts.end_step()
        self.void, self._joins_round = self.failed is not None, False  # what has failed fails until the vote
        self._gradients = "own"

    def ask(self) -> bool:
        """Ask who takes part in the next step, before its gradients are computed: for a loop that deals out its data by
        them. Return whether the step can be taken; if not, ask again."""
        with self._attempt():
            if not self._alone or not self.attempts.met:
                self._meet()
        if not any_of(self.inside, self.failed is not None):
            return True
        self.members.vote(False)
        self.attempts.agreed(False, ())
        self.failed = None
        self.end_step()
        return False

    @torch.no_grad()
    def exchange(self) -> None:
        if self._gradients == "exchanged":  # whatever the user has made of the means
            return
        if self.failed is not None or all(weight.grad is None for weight in self._weights):
            return
        if (frozen := next((weight for weight in self._weights if not weight.requires_grad), None)) is not None:
            raise ThinwireError(_FROZEN.format(name=self.parameters[id(frozen)].name))
        with self._attempt():
            stale = self._meet() if not self._alone or not self.attempts.met else False
            if self._alone and self.attempts.asked:  # for the first time: the run begins, or goes on without us
                self._joins_round = self.void = self.joins_round
                if self._joins_round:
                    return
                self.members.vote(True)
                self.attempts.agreed(False, ())
                stale = False
            self._average(stale)

    def _average(self, stale: bool) -> None:
        """Average the gradients over the replicas. ``stale``: this one's are of weights that are gone, and not sent."""
        self._enter([self.parameters[id(weight)].name for weight in self._weights])
        for dtype, weights, pieces in self._buffers:
            flat = torch.zeros(sum(piece.numel for piece in pieces), dtype=dtype, device=weights[0].device)
            columns = [flat[piece.offset :][: local(w).numel()] for w, piece in zip(weights, pieces, strict=True)]
            for weight, values in zip(weights, columns, strict=True):
                if weight.grad is not None and not stale:
                    values.copy_(local(weight.grad).reshape(-1))
            names_of = (piece.name for piece in pieces)
            with self._step_loop.exchanging("gradients", names_of), self.across.ledger.span("exposed"):
                self._road.last.reduce(flat, pieces, flat)  # the backward pass is over: nothing is computed beside
            for weight, values in zip(weights, columns, strict=True):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
                local(weight.grad).copy_(values.view(local(weight.grad).shape))
        with self.across.ledger.span("exposed"):
            self._road.end_pass()
        self._gradients = "exchanged"

    def _enter(self, names: Sequence[str]) -> None:
        self._step_loop.enter(names)

    def agree(
        self, guard: Guard, device: torch.device, trouble: bool, comms: Sequence[Comm] | None = None
    ) -> tuple[bool, bool]:
        if self._joins_round:  # the end of the round will agree
            self._joins_round = False
            return False, False
        finite, stuck = guard.agree(device, trouble, self.inside)
        lost = any_of(self.inside, self.failed is not None)
        if not lost and comms is not None:  # a step alone
            return finite, stuck
        verdict, outdated = 2.0 if stuck else float(not finite), False
        waiting, agreed, unlike = list[float](), False, list[str]()
        if not lost:
            with self._attempt(self.attempts.doubt):
                settings = self.attempts.settings()
                sums = (zlib.crc32(text.encode()) for text in settings.values())
                vote = [verdict, self.attempts.waiting(), *self.attempts.branch, *sums]
                row = torch.tensor(vote, dtype=torch.float64, device="cpu")
                rows = row.new_zeros(self.across.size, len(row))
                self.across.all_gather(rows, row)
                verdict, waiting = max(verdict, float(rows[:, 0].max())), rows[:, 1].tolist()
                branches = {*map(tuple, rows[:, 2:4].tolist()), self.attempts.branch}
                agreed = len(branches) == 1
                columns = zip(settings, rows[:, 4:].unbind(1), strict=True)
                unlike = [what for what, column in columns if len(column.unique()) > 1]
                # Else some went on while others, who count as many steps, took them again.
                outdated = self.attempts.branch != max(branches, key=lambda branch: branch[::-1])
        if any_of(self.inside, outdated):
            self.members.fall_behind()
        refused = any_of(self.inside, agreed and bool(unlike))
        verdict = 2.0 if refused else verdict
        counted = self.members.vote(agreed)
        if agreed and not counted:
            self.attempts.doubt()
        self.attempts.agreed(counted and verdict == 0, waiting, voted=counted)
        self.failed, self.void = None, not counted
        if counted and refused and unlike:
            raise ThinwireError(_UNLIKE.format(what=unlike[-1], own=textwrap.shorten(settings[unlike[-1]], 200)))
        return counted and verdict == 0, counted and verdict == 2

    @property
    def _alone(self) -> bool:
        return self._road.last.method.card.alone(self._road.step)

    def _meet(self, *, ends_round: bool = False) -> bool:
        unsent, self.unsent = self.unsent, None
        return self.attempts.meet(unsent, ends_round=ends_round)

    @property
    def joins_round(self) -> bool:
        """Do the others end a round of steps that each took alone, in which this replica, which was away, has no part?

        Its next step is then none: it only meets them."""
        return self._alone and self.attempts.asked and self.attempts.meets_round

    def attempt(self, road: Road, exchange: Callable[[int], Any]) -> Any:
        result = None
        if not self.attempts.asked:  # else what has failed since is of this attempt
            self.failed, self.void = None, False
        with self._attempt():
            self._meet(ends_round=True)
            result = exchange(road.step)
        return result

    @contextmanager
    def after_vote(self) -> Iterator[None]:
        try:
            yield
        except FailedExchange as error:
            self.unsent = without_frames(error)

    @contextmanager
    def _attempt(self, on_failure: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Keep a failure of the network for the vote."""
        try:
            yield
        except FailedExchange as error:
            self.failed, self.void = without_frames(error), True
            on_failure()
