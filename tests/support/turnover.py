"""Replicas that die, join and lose messages, as threads: real wires on small models, and a schedule drawn from a seed.

    Run(make_method, seed=7, optimizer=sgd, conserves=True).play(attempts=8)    # raises AssertionError at a broken law

Each attempt is one step of all replicas that are there. In it a replica may die at any message, before or after it has
sent it; or one replica alone may see an error at any message, before or after the others got what it sent. Between two
attempts replicas join, some of which have fetched the state of another while it went on (or its source dies, or they
do); and some are away for a while, as if they were stopped. After each attempt the laws are checked:

* all replicas that counted the last step hold the same weights, bit for bit;
* taken = delivered + waiting + lost, where a replica that died, or became a spare, has lost what waited on it.

With ``active``, so many replicas take part; the others are spares. Who is one is drawn anew for each attempt.
"""

from __future__ import annotations

import copy
import functools
import io
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.adapters.transport import completed, digest_of, without_tensors
from thinwire.base.errors import LostRank
from thinwire.core.method import Method
from thinwire.core.safety import Safety
from thinwire.core.state import dump_state, written_rows
from thinwire.engines.replicas import Replicas
from thinwire.network.comm import Membership
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from thinwire.saved.tape import Entry, Tape
from thinwire.saved.turnover import Held
from thinwire.wire import Options, Wire, join

SHAPES = {"a": (12, 16), "b": (5, 7)}
DROPS = ("drop to None", "drop to zeros", "drop to zeros, accumulate")
FURTHER = ("further", "further, accumulate")
TOUCHES = ("replaced", "looked at")
"""What may come between the exchange of a step's gradients, for clipping, and the optimizer, on all replicas: the batch
is dropped and another one taken, or its gradients are added to; or the user puts other tensors with the same values in
their place, or asks ``torch.autograd.grad`` for some."""


class Killed(BaseException):
    """The process of a replica is gone."""


@dataclass
class Fault:
    """What happens at a replica's message number ``verb`` of an attempt: ``before`` the others get it, or after."""

    verb: int
    before: bool
    deadly: bool


class FaultyComm(ThreadComm):
    """The verbs between the threads of the world of this attempt, one of which may go wrong."""

    def __init__(self) -> None:
        super().__init__(Threads(1), 0, Ledger())
        self.fault: Fault | None = None
        self.verbs = 0

    def enter(self, world: Threads, rank: int, fault: Fault | None, active: int) -> None:
        self._world, self._world_rank, self._members = world, rank, list(range(active))
        self.fault, self.verbs = fault, 0

    def _swap(self, tensor: Tensor) -> list[Tensor]:
        fault = self.fault if self.fault is not None and self.fault.verb == self.verbs else None
        self.verbs += 1
        if fault is not None and fault.before:
            self._fail(fault)
        try:
            values = super()._swap(tensor)
        except TimeoutError as error:
            raise LostRank(self.rank, [], "swap", 0.0, "no message") from error
        if fault is not None:
            self._fail(fault)
        return values

    def _fail(self, fault: Fault) -> None:
        raise Killed if fault.deadly else LostRank(self.rank, [], "swap", 0.0, "a lost message")


class ScriptedMembers:
    """Members that are told by the schedule who takes part.

    Attributes:
        source: the rank from which this replica, which is behind, gets what it needs. gives: is it such a source?
        step: steps that were voted for, as managers count.
    """

    membership = Membership(0, (0,))
    world: Threads
    source: int | None = None
    gives = counted = False
    fetched: list[int] | None = None
    place = step = 0

    def ask(self) -> tuple[Membership, Any]:
        given, state = self.world.swap(self.place, self.give() if self.gives else None), None
        if self.source is not None:
            state, held = copy.deepcopy(given[self.source]), self.hold()  # as if it had come from another process
            state = state if held is None else as_transferred(state, held, self.fetched)
        self.source, self.gives = None, False
        return self.membership, state

    def vote(self, counts: bool) -> bool:
        self.counted = counts
        self.step += counts
        return counts

    def fall_behind(self) -> None:
        self.step = 0

    def offer(self, give: Any, hold: Any) -> None:
        self.give, self.hold = give, hold


def as_transferred(state: Any, held: Held, fetched: list[int] | None = None) -> Any:
    """Return the ``state`` of another process as a replica has it that ``held`` some of it; note in ``fetched`` how
    many tensors it had to fetch."""
    message, tensors = without_tensors(state)
    about = digest_of(state["about"])
    tree = torch.load(io.BytesIO(message), weights_only=False)

    def fetch(missing: Any) -> list[Tensor]:
        if fetched is not None:
            fetched.append(sum(of.digest != about for of in missing))  # the header names a rank
        return [tensors[of.digest].clone() for of in missing]

    return completed(tree, held, fetch)


class MemoryFollower:
    """An ``adapters.transport.Follower`` of a source in this process, which may die."""

    def __init__(self, tape: Tape, alive: Callable[[], bool]) -> None:
        """``alive``: does the source live?"""
        snapshot = tape.snapshot(0, 0.0)
        assert snapshot is not None
        self.tape, self.alive = tape, alive
        self.tree, self.clock = copy.deepcopy(snapshot), snapshot["clock"]
        self.count, self.closed = 0, False

    def next(self) -> list[Entry]:
        gone = self.closed or not self.alive()
        entries = None if gone else self.tape.since(self.clock, self.count)
        self.closed |= entries is None
        return copy.deepcopy(entries or [])

    def close(self) -> None:
        self.closed = True


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


class Replica:
    """A process of the run, with a wire of its own."""

    def __init__(
        self, name: str, make: Callable[[], Method], optimizer: Callable[..., torch.optim.Optimizer], total: int
    ) -> None:
        self.name, self.members, self.comm = name, ScriptedMembers(), FaultyComm()
        self.model = Model()
        self.optimizer = optimizer(self.model.parameters())
        options = Options(
            make(), (self.optimizer,), None, None, total, 0, None, None, Safety(outlier_clip=None, max_skipped=None)
        )
        self.wire: Wire = join(Replicas(self.model, self.members, self.comm), options, self.comm.ledger)
        self.wire.attach()
        self.optimizer.register_step_pre_hook(lambda *_: None)  # a user's
        self.alive = True
        self.fetches: MemoryFollower

    def attempt(self, gradient: Tensor, turn: str = "", later: Tensor | None = None) -> None:
        """Take one optimizer step. ``turn``: what comes between the exchange, for clipping, and the pass of ``later``.
        """
        self.members.counted = False
        for weight, values in self._parts(gradient):
            weight.grad = values.clone()
        if turn:
            self.wire.clip_grad_norm_(1e9)
        if turn == "replaced":
            for weight in self.model.parameters():
                weight.grad = None if weight.grad is None else weight.grad.clone()
        elif turn == "looked at":
            weights = list(self.model.parameters())
            torch.autograd.grad(torch.stack([weight.square().sum() for weight in weights]).sum(), weights)
        elif later is not None:
            if turn.startswith("drop"):
                self.optimizer.zero_grad(set_to_none=turn.endswith("None"))
            with self.wire.accumulate() if "accumulate" in turn else nullcontext():
                torch.stack([(weight * values).sum() for weight, values in self._parts(later)]).sum().backward()
        self.optimizer.step()

    def _parts(self, gradient: Tensor) -> list[tuple[Tensor, Tensor]]:
        sizes = [weight.numel() for weight in self.model.parameters()]
        parts = zip(self.model.parameters(), gradient.split(sizes), strict=True)
        return [(weight, values.view(weight.shape)) for weight, values in parts]

    @property
    def weights(self) -> Tensor:
        return torch.cat([weight.detach().reshape(-1) for weight in self.model.parameters()])

    def waiting(self, *, as_sent: bool = False) -> Tensor:
        """Return what waits here in the sum over the ranks, (P,) float64; ``as_sent``: if the attempt counts."""
        method, total = self.wire.method, []
        if any(membership.spare is not None for membership in (self.comm.membership, self.members.membership)):
            return torch.zeros(len(self.weights), dtype=torch.float64)
        rows = written_rows(method.state) if as_sent else dump_state(method.state)
        for name, weight in self.model.named_parameters():
            whole = torch.zeros(2 * weight.numel() + 8192, dtype=torch.float64)
            for kind, times in method.card.promise.waits.items():
                if (values := rows.get(f"{kind}/{name}")) is None:
                    continue
                served = kind == "server"
                first = self.comm.rank * values.shape[1] if served else 0
                span = whole[first : first + values.numel()]
                span += (self.comm.size if served else 1) * times * values.double().reshape(-1)
            total.append(whole[: weight.numel()])
        return torch.cat(total)


class Run:
    """A run of replicas that follows a schedule.

    Attributes:
        seen: how often each thing happened. taken, delivered, lost: sums over all replicas, (P,) float64.
    """

    def __init__(
        self, make: Callable[[], Method], seed: int, optimizer: Callable[..., torch.optim.Optimizer], *,
        conserves: bool, active: int | None = None, total: int = 1000, calm: bool = False,
        fetches: bool = False, turns: bool = False,
    ) -> None:  # fmt: skip
        """``conserves``: check that nothing is lost but what is counted as lost. The optimizer must then be SGD with an
        lr of 1, and the method must send gradients. ``active``: replicas that take part, at most; others are spares.
        ``total``: optimizer steps of the whole run. ``calm``: two replicas, to which nothing happens.
        ``fetches``: some that join fetch a state first, while the others go on. ``turns``: see ``FURTHER``."""
        self._active, self._total = active, total
        self._make, self._optimizer, self._conserves, self._seed = make, optimizer, conserves, seed
        self._draw, self._born = random.Random(seed), list[Replica]()
        self._quiet, self.fetched, self._turns = calm, 0, turns
        self._chance = random.Random(seed) if fetches else None  # a chance of its own: else nothing else happens
        self.replicas = [self._new() for _ in range(2 if calm else self._draw.randint(2, 4))]
        self.seen: Counter[str] = Counter()
        self._size = sum(weight.numel() for weight in self.replicas[0].model.parameters())
        self.taken, self.delivered, self.lost = (torch.zeros(self._size, dtype=torch.float64) for _ in range(3))
        self._number, self._names, self._failed, self._verbs = 0, list[str](), False, 3
        self._present = list[str]()  # spares included
        self._away: dict[int, list[Replica]] = {}  # by the attempt in which they are back
        self._calm = 0  # attempts without a fault that are to come
        self._coming: list[tuple[Replica, Replica, int]] = []  # who fetches the state of whom, for how many attempts

    def _new(self, *, longer: bool = False) -> Replica:
        """Make a replica; ``longer``: it has been told of twice as many steps as those that it will join."""
        total = self._total * (2 if longer else 1)
        self._born.append(Replica(f"replica {len(self._born) + 1}", self._make, self._optimizer, total))
        return self._born[-1]

    def play(self, attempts: int) -> None:
        for attempt in range(attempts):
            self._attempt(attempt, last=attempt == attempts - 1)
        for replica in self._born:  # torch's hooks are the process's, and must not go while a thread goes through them
            replica.wire.close()

    def _attempt(self, attempt: int, last: bool) -> None:
        back = list(self._away) if last else [attempt]
        self.replicas += [replica for number in back for replica in self._away.pop(number, [])]
        self._come(last)
        if not self._quiet and len(self.replicas) + len(self._coming) < 4 and self._draw.random() < 0.4:
            replica, chance = self._new(longer=all(replica.wire._road.step for replica in self.replicas)), self._chance
            if chance is not None and attempt > 0 and chance.random() < 0.7:
                source = chance.choice(self.replicas)
                source.wire.turnover.tape.want(0)
                self._coming.append((replica, source, chance.randint(0, 2)))
            else:
                self.replicas.append(replica)
                self.seen["joined"] += 1
        stale = self._quorum()
        gradients = [self.draw(replica.name, attempt) for replica in self.replicas]
        turn = self._turn(attempt)
        later = [self.draw(replica.name, ~attempt) for replica in self.replicas if turn in (*DROPS, *FURTHER)]
        faults = {} if last else self._draw_fault()
        before = self.taken.clone(), self.delivered.clone(), {id(r): r.waiting() for r in self.replicas if faults}
        world = Threads(len(self.replicas))
        size = len(self._names)
        for place, replica in enumerate(self.replicas):
            replica.members.world, replica.members.place = world, place

        def body(rank: int) -> None:
            replica = self.replicas[rank]
            replica.comm.enter(world, rank, faults.get(rank), size)
            try:
                replica.attempt(gradients[rank], turn, later[rank] if later else None)
            except Killed:
                replica.alive = False

        world.run(body)
        self._note_fetched()
        self._verbs = max(1, *(replica.comm.verbs for replica in self.replicas))
        counted = [replica for replica in self.replicas if replica.members.counted and replica.alive]
        self._failed = len(counted) < len(self.replicas)
        if counted:
            self.seen["counted by some alone" if self._failed else "counted"] += 1
            pairs = [] if turn in DROPS else list(zip(gradients, stale, strict=True))[:size]
            self.taken += sum(values.double() for values, gone in pairs if not gone)
            self.taken += sum(values.double() for values in later[:size])
            self.seen[turn] += 1
            if self._conserves:
                means = [weight.grad for weight in counted[0].model.parameters()]
                self.delivered += size * torch.cat([mean.reshape(-1).double() for mean in means])
        else:
            self.seen["failed"] += 1
        for replica in self.replicas:
            if not replica.alive:
                self.seen["died"] += 1
                self.lost += replica.waiting(as_sent=bool(counted))
                before[2][id(replica)] -= replica.waiting(as_sent=bool(counted))  # what it lost beyond that
        for replica in counted:
            assert torch.equal(replica.weights, counted[0].weights), f"attempt {attempt}: the weights differ"
        self.replicas = [replica for replica in self.replicas if replica.alive]
        may = not (last or self._quiet) and attempt > 0 and len(self.replicas) > 1 and self._active is None
        if may and self._draw.random() < 0.2:
            self._send_away(self._draw.choice(self.replicas), attempt, counted, before)
        if self._conserves and not self._failed and not self._away:
            waiting = sum(replica.waiting() for replica in self.replicas)
            error = (self.taken - self.delivered - waiting - self.lost).abs().max()
            assert error < 1e-4 * (1 + self.taken.abs().max()), f"attempt {attempt}: {float(error):.3g} went missing"

    def draw(self, name: str, attempt: int) -> Tensor:
        return _gradient(self._seed, name, attempt, self._size)

    def _turn(self, attempt: int) -> str:
        if not self._turns:
            return ""
        adds_up = self.replicas[0].wire.method.card.adds_up
        return random.Random(f"{self._seed} {attempt}").choice(["", *DROPS, *TOUCHES, *(FURTHER if adds_up else ())])

    def join(self, fetches: int) -> Replica:
        """Make a replica that follows the first one from its next step on, and joins ``fetches`` steps later."""
        replica, source = self._new(longer=True), self.replicas[0]
        source.wire.turnover.tape.want(0)
        self._coming.append((replica, source, fetches))
        return replica

    def _come(self, last: bool) -> None:
        """Let those join that have fetched a state, or whose source is gone."""
        still = []
        for replica, source, remaining in self._coming:
            snapshot = source.wire.turnover.tape.snapshot(0, 0.0)
            if self._chance is not None and self._chance.random() < 0.1:
                self.seen["died as it fetched"] += 1
                continue
            if not source.alive:
                self.seen["its source died"] += 1
            elif snapshot is None and not last:
                still.append((replica, source, remaining))
                continue
            elif snapshot is not None and not hasattr(replica, "fetches"):
                replica.fetches = MemoryFollower(source.wire.turnover.tape, functools.partial(getattr, source, "alive"))
            if remaining and source.alive and not last:
                still.append((replica, source, remaining - 1))
                continue
            replica.wire.turnover.follows = getattr(replica, "fetches", None)
            replica.members.fetched = [] if hasattr(replica, "fetches") else None
            self.replicas.append(replica)
            self.seen["joined"] += 1
            self.seen["fetched first"] += replica.members.fetched is not None
        self._coming = still

    def _note_fetched(self) -> None:
        for replica in self.replicas:
            if replica.members.fetched:
                follower: Any = replica.fetches
                whole = follower.alive() and not replica.members.fetched[-1]
                self.seen["took all steps again" if whole else "fetched more"] += 1
                self.seen["steps taken again"] += follower.count
                self.fetched = replica.members.fetched[-1]
                replica.members.fetched = None

    def _send_away(self, replica: Replica, attempt: int, counted: list[Replica], before: Any) -> None:
        """Stop ``replica`` after this attempt. If it alone has counted the step, the others will take it again."""
        self.seen["away"] += 1
        self.replicas.remove(replica)
        self._away.setdefault(attempt + self._draw.randint(2, 3), []).append(replica)
        if counted == [replica] and self._failed:
            self.seen["counted in vain"] += 1
            self.taken, self.delivered, waiting = before
            gone = [other for other in waiting if other == id(replica) or other not in {id(r) for r in self.replicas}]
            self.lost += sum(waiting[other] for other in gone)
            self._calm = 3  # so that they do

    def _quorum(self) -> list[bool]:
        """Say who takes part; let those behind catch up. Return whose gradient is taken at weights that are gone."""
        self._draw.shuffle(self.replicas)
        ahead = max(replica.members.step for replica in self.replicas)
        if self._active is not None:  # who is behind takes part, as nobody knows yet what waits on it
            self.replicas.sort(key=lambda replica: replica.members.step == ahead)
        size = len(self.replicas) if self._active is None else min(self._active, len(self.replicas))
        present = [replica.name for replica in self.replicas]
        names = present[:size]
        if self._failed or present != self._present:
            self._number, self._names, self._present = self._number + 1, names, present
        source = max(self.replicas, key=lambda replica: replica.members.step)
        stale = []
        for rank, replica in enumerate(self.replicas):
            spare = None if rank < size else rank - size
            if spare is not None and replica.members.membership.spare is None and replica.members.membership.names:
                self.lost += replica.waiting()
                self.seen["became a spare"] += 1
            heard = rank if spare is None else spare % size
            spares = len(self.replicas) - size
            replica.members.membership = Membership(
                heard, tuple(range(size)), self._number, tuple(names), spares, spare
            )
            behind = replica.members.step < source.members.step
            stale.append(behind and not torch.equal(replica.weights, source.weights))
            if behind:
                replica.members.source, replica.members.step = self.replicas.index(source), source.members.step
                source.members.gives = True
                self.seen["behind"] += 1
        return stale

    def _draw_fault(self) -> dict[int, Fault]:
        self._calm -= 1
        if self._quiet or len(self.replicas) == 1 or self._calm >= 0 or self._draw.random() > 0.6:
            return {}
        fault = Fault(self._draw.randrange(self._verbs), self._draw.random() < 0.5, self._draw.random() < 0.6)
        return {self._draw.randrange(len(self.replicas)): fault}


def _gradient(seed: int, name: str, attempt: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, int(name.split()[1]), attempt)) % 2**31)
    return torch.randn(size, generator=generator)
