"""Replicas of two ranks each, as threads on a clock of their own: the adapter's members and messages, on doubles of
torchft's manager, its lighthouse, and gloo.

    World(seed=7, method="trickle(density=0.2, smallest=0)").run()

A thread runs until it waits for something; then another one goes on, drawn from the seed, and time with it. Where all
wait, the clock goes to the next timeout or event: a rank is killed, and its mate soon after it; a replica comes back; a
rank that stood still goes on. Messages are as strict as gloo's, which ends a process that gets another number of
bytes than it has asked for; and a replica's two ranks must call the same verbs with the same shapes.
"""

from __future__ import annotations

import copy
import random
import threading
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from thinwire.adapters.torchft import ManagerMembers
from thinwire.adapters.transport import Transport
from thinwire.base.errors import LostRank, ThinwireError
from thinwire.core.safety import Safety
from thinwire.engines.replicas import Replicas
from thinwire.methods import resolve
from thinwire.network.comm import Comm, ManagedComm
from thinwire.network.ledger import Ledger
from thinwire.wire import Options, join
from turnover import Model, as_transferred

HEARTBEAT_S, JOIN_S, QUORUM_S, INSIDE_S = 1.0, 60.0, 600.0, 1800.0
EXCHANGE = timedelta(seconds=10)


class Killed(BaseException):
    """The process of a rank is gone."""


class Mismatch(AssertionError):
    """What would have ended a process in gloo, or has left a replica's ranks apart."""


class World:
    """Attributes: now: in seconds. seen: how often each thing happened. hashes: of the weights after a step, by step,
    number of the membership and rank in the replica."""

    def __init__(
        self, seed: int, method: str, *, replicas: int = 2, steps: int = 8, kills: int = 2, stalls: float = 0.01
    ) -> None:
        """``stalls``: how often a process stands still as it is about to go on."""
        self._stalls = stalls
        self.draw, self.method, self.steps = random.Random(seed), method, steps
        self.now, self.baton = 0.0, threading.Semaphore(0)
        self.seen: Counter[str] = Counter()
        self.hashes: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        self.faults: list[BaseException] = []
        self.replicas: list[Replica] = []
        self.lighthouse = Lighthouse(self)
        self.groups: dict[tuple[int, int], dict[int, Group]] = defaultdict(dict)  # by quorum and rank in the replica
        self._events: list[tuple[float, Callable[[], None]]] = []
        self._start_all([f"r{number}" for number in range(replicas)])
        for _ in range(kills):
            self.after(self.draw.uniform(0.1, 8.0), self._kill)

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self._events.append((self.now + seconds, event))

    def run(self) -> None:
        for _ in range(100_000):
            if self.faults or not self._living():
                break
            self._go_on()
        else:
            self.faults.append(Mismatch("the replicas have not come to an end"))
        for process in self._living():
            process.die()
            process.turn.release()
            self.baton.acquire()
        if self.faults:
            raise self.faults[0]

    def _living(self) -> list[Process]:
        return [process for replica in self.replicas for process in replica.processes if not process.ended]

    def _go_on(self) -> None:
        due = [entry for entry in self._events if entry[0] <= self.now]
        self._events = [entry for entry in self._events if entry[0] > self.now]
        for _, event in due:
            event()
        self.lighthouse.look()
        living = self._living()
        able = [process for process in living if process.can_run]
        if not able:
            times = [max(process.deadline, process.stopped) for process in living]
            times += [process.stopped for process in living if process.ready()]
            self.now = min(times + [time for time, _ in self._events] + self.lighthouse.times())
            return
        process = self.draw.choice(able)
        if not process.dead and self.draw.random() < self._stalls:
            seconds = self.draw.choice((0.5, 3, 12, 30))
            process.stopped, process.stood_still = self.now + seconds, process.stood_still or seconds > 20
            self.seen["stopped"] += 1
            return
        self.now += self.draw.choice((0.0, 0.001, 0.02))
        process.turn.release()
        self.baton.acquire()

    def _start_all(self, names: Sequence[str]) -> None:
        self.replicas += [Replica(self, name) for name in names]

    def _kill(self) -> None:
        """Kill one rank of a replica; its supervisor ends the mate, and starts the replica again."""
        alive = [replica for replica in self.replicas if not any(p.dead or p.ended for p in replica.processes)]
        if len(alive) < 2:
            return
        replica = self.draw.choice(alive)
        first, second = self.draw.sample(replica.processes, 2)
        self.seen["killed"] += 1
        first.die()
        self.after(self.draw.choice((0.0, 0.01, 0.2, 1.0)), second.die)
        self.after(self.draw.uniform(1.1, 3.0), lambda: self._start_all([replica.name]))


class Process:
    """A rank of a replica, and the thread that plays it."""

    def __init__(self, replica: Replica, rank: int) -> None:
        self.replica, self.rank, self.world = replica, rank, replica.world
        self.dead = self.ended = False
        self.ready: Callable[[], bool] = lambda: True
        self.deadline = self.stopped = 0.0
        self.stood_still = False  # for longer than a rank waits for its mate's vote
        self.turn = threading.Semaphore(0)
        self.groups: list[Group] = []
        threading.Thread(target=self._play, daemon=True).start()

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready()``; False: it was not within so many seconds of the world's clock."""
        self.ready, self.deadline = ready, self.world.now + seconds
        self.world.baton.release()
        self.turn.acquire()
        if self.dead:
            raise Killed
        return ready()

    def die(self) -> None:
        self.dead = True
        for group in self.groups:
            group.closed = True

    @property
    def can_run(self) -> bool:
        now = self.world.now
        return self.dead or (self.stopped <= now and (self.deadline <= now or self.ready()))

    @property
    def mate(self) -> Process:
        return self.replica.processes[1 - self.rank]

    def _play(self) -> None:
        self.turn.acquire()
        try:
            if not self.dead:
                play(self)
        except Killed:
            pass
        except ThinwireError as error:
            self.world.seen["ended for its mate"] += 1
            if not (self.mate.dead or self.mate.ended or (error.status == 1 and self.mate.stood_still)):
                self.world.faults.append(error)
        except BaseException as error:
            self.world.faults.append(error)
        self.die()
        self.ended = True
        self.world.baton.release()


class Replica:
    """Two processes, and the server of their managers, which lives in the first one.

    Attributes:
        asked: by rank, the step and the failures in a row with which it asks. quorums: those that were formed with it.
        votes: by number of the vote, those of its ranks. offers: by rank, the state for others who are behind.
        meetings: by number, the verbs of its ranks among themselves.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.asked: dict[int, tuple[int, int]] = {}
        self.quorums: list[Quorum] = []
        self.votes: dict[int, dict[int, bool]] = defaultdict(dict)
        self.offers: dict[tuple[int, int], Any] = {}
        self.meetings: dict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
        self.steps: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        self.heard = False
        self.processes = [Process(self, rank) for rank in range(2)]

    @property
    def serves(self) -> bool:
        return not (self.processes[0].dead or self.processes[0].ended)


class Quorum:
    def __init__(self, number: int, members: Sequence[tuple[Replica, int]]) -> None:
        """``members``: with the steps that each has counted."""
        self.number, self.members = number, [replica for replica, _ in members]
        self.step = max(step for _, step in members)
        self.behind = {replica for replica, step in members if step < self.step}
        self.source = next(replica for replica, step in members if step == self.step)


class Lighthouse:
    def __init__(self, world: World) -> None:
        self.world, self.number = world, 0
        self._former: list[Replica] = []
        self._since: dict[Replica, float] = {}  # when both ranks of it had asked
        self._missed: dict[Replica, float] = {}

    def times(self) -> list[float]:
        """When it may go on by itself."""
        return [time + HEARTBEAT_S for time in self._missed.values() if time + HEARTBEAT_S > self.world.now] + [
            time + JOIN_S for time in self._since.values() if time + JOIN_S > self.world.now
        ]

    def look(self) -> None:
        """Form a quorum if all that live have asked, or if the others are waited for no longer."""
        now, replicas = self.world.now, self.world.replicas
        for replica in replicas:
            if not replica.serves:
                self._missed.setdefault(replica, now)
                self._since.pop(replica, None)
            elif len(replica.asked) == 2:
                self._since.setdefault(replica, now)
        missing = [
            replica for replica in replicas
            if replica.heard and replica not in self._since and now < self._missed.get(replica, now) + HEARTBEAT_S
        ]  # fmt: skip
        if not self._since or (missing and now < min(self._since.values()) + JOIN_S):
            return
        members = sorted(self._since, key=lambda replica: replica.name)
        if members != self._former or any(failures for replica in members for _, failures in replica.asked.values()):
            self.number += 1
        self._former, self._since = members, {}
        quorum = Quorum(self.number, [(replica, replica.asked[0][0]) for replica in members])
        for replica in members:
            if len({step for step, _ in replica.asked.values()}) > 1:
                self.world.faults.append(Mismatch(f"the ranks of {replica.name} have counted unlike numbers of steps"))
            replica.asked.clear()
            replica.quorums.append(quorum)


class NoServer(Transport):
    def __init__(self) -> None: ...

    def metadata(self) -> str:
        return "http://localhost:1/"


class Whole:
    """A state that comes as a whole."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def complete(self, held: Any) -> Any:
        return self.state if held is None else as_transferred(self.state, held)


class Manager:
    """``torchft.Manager`` on one rank."""

    def __init__(self, process: Process) -> None:
        self._process, self._replica = process, process.replica
        self._checkpoint_transport = NoServer()
        self._group_rank, self._group_world_size, self._replica_id = process.rank, 2, process.replica.name
        self._timeout, self._quorum_id, self._pg = EXCHANGE, -1, Gloo(process)
        self._step = self._failures = self._votes = self._asked = 0
        self._error: Any = None
        self._fns: dict[str, tuple[Any, Any]] = {}
        process.replica.heard = True

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._step}

    def load_state_dict(self, counts: dict[str, int]) -> None:
        self._step = counts["step"]

    def register_state_dict_fn(self, key: str, take: Any, give: Any) -> None:
        self._fns[key] = take, give

    def errored(self) -> Any:
        return self._error

    def report_error(self, error: Exception) -> None:
        self._error = error

    def participating_rank(self) -> int:
        return self._quorum.members.index(self._replica)

    def num_participants(self) -> int:
        return len(self._quorum.members)

    def start_quorum(self) -> None:
        replica, self._error = self._replica, None
        replica.asked[self._group_rank] = self._step, self._failures
        number = self._asked = self._asked + 1
        came = self._process.wait(lambda: len(replica.quorums) >= number or not replica.serves, QUORUM_S)
        if not came or len(replica.quorums) < number:
            raise LostRank(self._group_rank, [0], "quorum", 0.0, "the server of this replica is gone")
        quorum = self._quorum = replica.quorums[number - 1]
        if quorum.number != self._quorum_id:
            self._quorum_id = quorum.number
            try:
                self._pg.configure(quorum)
            except RuntimeError as error:
                self.report_error(error)
                return
        try:
            if quorum.behind and quorum.source is replica:
                give = {key: give() for key, (_, give) in self._fns.items()}
                replica.offers[quorum.number, self._group_rank] = quorum.step, give
            if replica in quorum.behind:
                self._heal(quorum)
        except RuntimeError as error:
            self.report_error(error)

    def _heal(self, quorum: Quorum) -> None:
        offers, place = quorum.source.offers, (quorum.number, self._group_rank)
        if not self._process.wait(lambda: place in offers, EXCHANGE.total_seconds()):
            raise RuntimeError("no checkpoint in time")
        if quorum.source.processes[self._group_rank].dead:
            raise RuntimeError("connection refused")
        self._process.world.seen["healed"] += 1
        self._step, state = copy.deepcopy(offers[place])  # as if it had come from another process
        for key, (take, _) in self._fns.items():
            take(Whole(state[key]) if key == "thinwire" else state[key])

    def should_commit(self, timeout: timedelta) -> bool:
        replica, number = self._replica, self._votes
        self._votes += 1
        votes = replica.votes[number]
        votes[self._group_rank] = self._error is None
        if not self._process.wait(lambda: len(votes) == 2 or not replica.serves, timeout.total_seconds()):
            raise RuntimeError("should_commit timed out")
        if len(votes) < 2:
            raise LostRank(self._group_rank, [0], "vote", 0.0, "the server of this replica is gone")
        counts = all(votes.values())
        self._step += counts
        self._failures = 0 if counts else self._failures + 1
        self._process.world.seen["counted" if counts else "failed"] += 1
        return counts


class Gloo:
    """torchft's wrapper: a group for each quorum."""

    def __init__(self, process: Process) -> None:
        self._process, self._timeout, self._pg = process, EXCHANGE, None
        backend = SimpleNamespace(_set_default_timeout=lambda limit: None)
        self.parent = SimpleNamespace(_get_backend=lambda device: backend, rank=lambda: self._pg.rank)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def configure(self, quorum: Quorum) -> None:
        """Wait until all members connect, or fail: in torch's words, with what torchft's wrapper then holds."""
        self.abort()
        process, size = self._process, len(quorum.members)
        group = Group(process, quorum.members.index(process.replica), size)
        peers = process.world.groups[quorum.number, process.rank]
        peers[group.rank] = group
        group.peers = peers
        seconds = self._timeout.total_seconds()
        if not process.wait(lambda: len(peers) == size, seconds) or any(peer.closed for peer in peers.values()):
            process.world.seen["not connected"] += 1
            group.closed = True
            raise RuntimeError("gloo connectFullMesh failed: timed out")
        self._pg = group

    def abort(self) -> None:
        if self._pg is not None:
            self._pg.closed = True
        self._pg = None

    def size(self) -> int:
        return self._pg.size

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        assert self._pg is not None
        return self._pg.post(tensors[0], (self._pg.rank, peer, tag), sends=True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        assert self._pg is not None
        return self._pg.post(tensors[0], (peer, self._pg.rank, tag), sends=False)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        assert self._pg is not None
        return self._pg.reduce(tensors[0], options)


class Group:
    """One rank's end of a gloo group."""

    def __init__(self, process: Process, rank: int, size: int) -> None:
        self.process, self.rank, self.size, self.closed = process, rank, size, False
        self.peers: dict[int, Group] = {}
        self.posted: dict[tuple[int, int, int], deque[Message]] = defaultdict(deque)
        self.reductions: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by number, the values of those that came
        self.reduced = 0
        process.groups.append(self)

    def post(self, tensor: Tensor, way: tuple[int, int, int], *, sends: bool) -> Message:
        self._check(way[1] if sends else way[0])
        message = Message(self, tensor, self.peers[way[1] if sends else way[0]])
        other = self.peers[way[1] if sends else way[0]]
        waiting = other.posted[way]
        if waiting and waiting[0].sends != sends:
            partner = waiting.popleft()
            source, target = (message, partner) if sends else (partner, message)
            if source.tensor.nbytes != target.tensor.nbytes:
                words = f"{source.tensor.nbytes} bytes came where {target.tensor.nbytes} were expected, tag {way[2]}"
                self.process.world.faults.append(Mismatch(words))
            else:
                target.tensor.view(-1).copy_(source.tensor.view(-1))
            message.done = partner.done = True
        else:
            message.sends = sends
            self.posted[way].append(message)
        return message

    def reduce(self, tensor: Tensor, options: Any) -> Reduction:
        self.reduced += 1
        return Reduction(self, self.reduced, tensor, options)

    def _check(self, peer: int) -> None:
        if self.closed or self.peers[peer].closed:
            raise RuntimeError("gloo: Connection closed by peer")


class Message:
    def __init__(self, group: Group, tensor: Tensor, peer: Group) -> None:
        self.group, self.tensor, self.peer, self.sends, self.done = group, tensor, peer, False, False

    def wait(self, limit: timedelta) -> bool:
        group = self.group
        over = lambda: self.done or group.closed or self.peer.closed  # noqa: E731
        if not group.process.wait(over, limit.total_seconds()):
            group.process.world.seen["timed out"] += 1
            raise RuntimeError("gloo: Timed out waiting for a message")
        if not self.done:
            raise RuntimeError("gloo: Connection closed by peer")
        return True


class Reduction:
    """An all-reduce, which begins as it is called; it ends when all have called their one of this number."""

    def __init__(self, group: Group, number: int, tensor: Tensor, options: Any) -> None:
        self.group, self.number, self.tensor, self.operation = group, number, tensor, options.reduceOp
        self.own = tensor.clone()
        for peer in group.peers.values():
            peer.reductions[number][group.rank] = self.own

    def wait(self, limit: timedelta) -> bool:
        group, values = self.group, self.group.reductions[self.number]
        over = lambda: len(values) == group.size or any(peer.closed for peer in group.peers.values())  # noqa: E731
        if not group.process.wait(over, limit.total_seconds()):
            raise RuntimeError("gloo: Timed out in an all-reduce")
        if len(values) < group.size:
            raise RuntimeError("gloo: Connection closed by peer")
        if len({value.shape for value in values.values()}) > 1:
            group.process.world.faults.append(Mismatch(f"all-reduces of {[len(v) for v in values.values()]} values"))
            raise Killed
        rows = [values[rank] for rank in sorted(values)]
        largest = self.operation == torch.distributed.ReduceOp.MAX
        self.tensor.copy_(reduce(torch.maximum if largest else torch.add, rows))
        return True


class Inside(Comm):
    """The verbs between the two ranks of a replica."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.rank, [0, 0], Ledger())
        self._process, self._calls = process, 0

    def meet(self, verb: str, tensor: Tensor) -> list[Tensor]:
        """Return both ranks' tensors. Collective: each of its calls must be the mate's call of that number."""
        process, calls = self._process, self._process.replica.meetings[self._calls]
        self._calls += 1
        calls[process.rank] = verb, tensor.clone()
        mate = process.mate
        if not process.wait(lambda: len(calls) == 2 or mate.dead or mate.ended, INSIDE_S):
            raise Mismatch(f"{verb} inside a replica waits for the other rank for ever")
        if len(calls) < 2:
            raise LostRank(process.rank, [1 - process.rank], verb, 0.0, "Connection closed by peer")
        (verb, value), (other, peer_value) = calls[0], calls[1]
        if verb != other or value.shape != peer_value.shape:
            shapes = f"{verb} of {list(value.shape)}, {other} of {list(peer_value.shape)}"
            raise Mismatch(f"the ranks of a replica call unlike verbs: {shapes}")
        return [value, peer_value]

    def _all_reduce(self, tensor: Tensor, op: str) -> None:
        tensor.copy_(reduce(torch.maximum if op == "max" else torch.add, self.meet(f"all-reduce {op}", tensor)))

    def _reduce_scatter(self, out: Tensor, rows: Tensor, op: str) -> None:
        raise NotImplementedError

    def _all_gather(self, out: Tensor, row: Tensor, async_op: bool) -> None:
        out.copy_(torch.stack(self.meet("all-gather", row.reshape(-1))).view_as(out))

    def _all_to_all(self, out: Tensor, rows: Tensor) -> None:
        raise NotImplementedError


class Shards(Replicas):
    """A rank's part of a replica: as if its weights were its shards of larger ones."""

    def __init__(self, model: Any, members: Any, across: Comm, inside: Inside) -> None:
        super().__init__(model, members, across)
        self.inside, self.comms = [inside], [inside, across]


def play(process: Process) -> None:
    """Train on one rank until its replica has taken all steps."""
    world, inside, manager = process.world, Inside(process), Manager(process)
    method = resolve(world.method)
    model = Model()
    optimizer = method.OPTIMIZER(model.parameters(), lr=1e-2)
    options = Options(method, (optimizer,), None, None, 1000, 0, None, None, Safety(max_skipped=None))
    members = ManagerMembers(manager, [inside])
    across = ManagedComm(manager._pg, Ledger(), EXCHANGE)
    wire = join(Shards(model, members, across, inside), options, across.ledger)
    wire.attach()
    taken = 0
    try:
        while manager._step < world.steps:
            taken += 1
            place = f"{process.replica.name} {process.rank} {taken}"
            draw = torch.Generator().manual_seed(zlib.crc32(place.encode()))
            inside.meet("forward and backward", torch.zeros(1))
            process.wait(lambda: False, 0.3)
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, generator=draw)
            before = manager._step
            optimizer.step()
            inside.meet(f"step {manager._step}, {wire.step} of which {wire.skipped} skipped", torch.zeros(1))
            if manager._step > before:
                weights = torch.cat([weight.detach().reshape(-1) for weight in model.parameters()])
                hashes = world.hashes[manager._step, across.membership.number, process.rank]
                hashes.add(hash(tuple(weights.tolist())))
                if len(hashes) > 1 and method.rank_equal:
                    raise Mismatch(f"the weights differ after step {manager._step}")
        world.seen["finished"] += 1
    finally:
        wire.close()
