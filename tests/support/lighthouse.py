"""A lighthouse and its replicas, as threads that live as long as replicas do, and a schedule drawn from a seed.

    Lighthouse(seed=7, begin=begin).run()

``begin(replica)`` returns the program of a replica, which runs to its end, is killed, or loses messages. One thread
runs at a time. Where all wait, the lighthouse goes on: messages that all have sent arrive; who waits for one that is
lost, or of one that has gone on, gets an error; and when all that live ask who takes part, it says so, after it has let
somebody join.
"""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from thinwire.base.errors import LostRank
from thinwire.network.comm import Membership
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from turnover import MemoryFollower, as_transferred


class Killed(BaseException):
    """The process of a replica is gone."""


class Replica:
    """A replica's members, as the engine asks for them, its comm, and its thread.

    Attributes:
        step: votes that counted, as managers count them. fault: what happens at which message of this attempt.
    """

    def __init__(self, lighthouse: Lighthouse, name: str) -> None:
        self.lighthouse, self.name = lighthouse, name
        self.comm, self.membership = _Comm(self), Membership(0, (0,), -1)
        self.step = self.verbs = self.back_at = 0
        self.fault: tuple[int, str] | None = None
        self.wants, self.sent, self.error, self.late = "turn", None, None, False
        self.received: Any = None
        self.results: list[Any] = []
        self.gives: dict[str, Callable[[], Any]] = {}
        self.takes: dict[str, Callable[[Any], None]] = {}
        self._turn = threading.Semaphore(0)

    # What a manager does.

    def ask(self) -> tuple[Membership, Any]:
        self._wait("quorum")
        received, self.received = self.received, None
        if self.fault is not None and self.fault[1] == "deaf":
            raise LostRank(0, [], "quorum", 0.0, "could not join")
        if received is not None:
            self.step = received["step"]
            for key, take in self.takes.items():
                take(received[key])
            held, fetched = self._hold(), list[int]()
            received = received["wire"] if held is None else as_transferred(received["wire"], held, fetched)
            self.lighthouse.seen["fetched nothing more"] += fetched == [0]
        return self.membership, received

    def vote(self, counts: bool) -> bool:
        self.step += counts
        self.late &= not counts
        return counts

    def fall_behind(self) -> None:
        self.step = 0

    def follow(self, turnover: Any) -> None:
        """Let the replica of ``turnover`` take the steps of another again before it asks, if one has a tape."""
        turnover.tape.want(0)
        self.tape = turnover.tape
        tapes = ((peer, getattr(peer, "tape", None)) for peer in self.lighthouse.living)
        sources = [peer for peer, tape in tapes if tape is not None and tape.snapshot(0, 0.0)]
        if sources and self.name.endswith(("4", "6", "8", "9")):
            source = sources[-1]
            turnover.follows = MemoryFollower(source.tape, lambda: source in self.lighthouse.living)
            self.lighthouse.seen["followed"] += 1

    def offer(self, give: Callable[[], Any], hold: Callable[[], Any]) -> None:
        self.gives["wire"], self._hold = give, hold

    def register_state_dict_fn(self, key: str, take: Callable[[Any], None], give: Callable[[], Any]) -> None:
        self.takes[key], self.gives[key] = take, give

    def current_step(self) -> int:
        return self.step

    # Threads.

    def swap(self, value: Tensor) -> list[Tensor]:
        self.verbs += 1
        kind = self.fault[1] if self.fault is not None and self.fault[0] == self.verbs else ""
        if kind == "killed":
            raise Killed
        if kind == "stopped":
            self.back_at = self.lighthouse.number + 2
            self._wait("nothing")
        if kind in ("lost", "stopped") or self.membership.number != self.lighthouse.number:
            raise LostRank(self.comm.rank, [], "swap", 0.0, "a lost message")
        self.sent = value
        self._wait("swap")
        if kind == "killed after":
            raise Killed
        if kind == "lost after":
            raise LostRank(self.comm.rank, [], "swap", 0.0, "a lost message")
        return self.results

    def _wait(self, what: str) -> None:
        self.wants, self.error = what, None
        self.lighthouse.pass_on()
        self._turn.acquire()
        if self.error is not None:
            raise self.error

    def wake(self) -> None:
        self._turn.release()

    def run(self, program: Callable[[], None]) -> None:
        self._turn.acquire()
        try:
            program()
        except Killed:
            self.lighthouse.seen["killed"] += 1
        except BaseException as error:
            self.lighthouse.errors.append(error)
        self.lighthouse.living.remove(self)
        self.lighthouse.pass_on()


class _Comm(ThreadComm):
    def __init__(self, replica: Replica) -> None:
        super().__init__(Threads(1), 0, Ledger())
        self._replica = replica

    elastic = True

    def _swap(self, tensor: Tensor) -> list[Tensor]:
        return self._replica.swap(tensor.clone())


class Lighthouse:
    """Attributes: number: of the membership. seen: how often each thing happened. living: replicas, ``errors``: of
    their programs."""

    def __init__(
        self, seed: int, begin: Callable[[Replica], Callable[[], None]], *, replicas: int = 3, quorums: int = 12
    ) -> None:
        """``quorums``: after so many nothing more happens to anybody."""
        self._draw, self._begin, self._quorums = random.Random(seed), begin, quorums
        self.number, self.seen, self._born = 0, Counter[str](), 0
        self.living: list[Replica] = []
        self.errors: list[BaseException] = []
        self._group: list[Replica] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._asked_to_join = False
        self.join_at = -1  # the number of the membership before which another one joins
        for _ in range(replicas):
            self._start()

    def run(self) -> None:
        self.pass_on()
        assert self._over.wait(60), "the replicas have not come to an end"
        if self.errors:  # the others wait for ever, as daemons
            raise self.errors[0]
        for thread in self._threads:
            thread.join()

    def _start(self) -> None:
        self._born += 1
        replica = Replica(self, f"replica {self._born}")
        self.living.append(replica)
        program = self._begin(replica)
        self._threads.append(threading.Thread(target=replica.run, args=(program,), daemon=True))
        self._threads[-1].start()

    def pass_on(self) -> None:
        """Let the next replica run."""
        if not self.living or self.errors:
            self._over.set()
            return
        if not any(replica.wants == "turn" for replica in self.living):
            self._resolve()
        replica = next(replica for replica in self.living if replica.wants == "turn")
        replica.wants = "running"
        replica.wake()

    def _resolve(self) -> None:
        """Go on, as all wait: for messages, for a quorum, or to be woken up."""
        waiting = [replica for replica in self.living if replica.wants == "swap"]
        if waiting and len(waiting) == len(self._group):
            values = [replica.sent for replica in self._group]
            for replica in self._group:
                replica.results, replica.wants = values, "turn"
        elif waiting:
            for replica in waiting:
                replica.error = LostRank(replica.comm.rank, [], "swap", 0.0, "no message")
                replica.wants = "turn"
        else:
            self._form()

    def _form(self) -> None:
        awake = [replica for replica in self.living if replica.wants == "quorum"]
        for replica in self.living:
            if replica.wants == "nothing" and (replica.back_at <= self.number or not awake):
                replica.wants = "turn"
        calm = self.number > self._quorums
        drawn = len(self.living) < 4 and not calm and self._draw.random() < 0.3
        if not self._asked_to_join and (drawn or self.number == self.join_at):
            self.join_at = -1
            self._asked_to_join = True
            self.seen["joined"] += 1
            self._start()
        if any(replica.wants == "turn" for replica in self.living):
            return  # until they ask, too
        self._asked_to_join = False
        self.number += 1
        self._draw.shuffle(awake)
        self._group = awake
        source = max(awake, key=lambda replica: replica.step)
        names = tuple(replica.name for replica in awake)
        for replica in awake:
            replica.late |= replica.step < source.step
        late = tuple(rank for rank, replica in enumerate(awake) if replica.late)
        for rank, replica in enumerate(awake):
            replica.membership = Membership(rank, tuple(range(len(awake))), self.number, names, late=late)
            replica.verbs, replica.fault, replica.wants = 0, None, "turn"
            if replica.step < source.step:
                given = {key: give() for key, give in source.gives.items()}
                replica.received = copy.deepcopy({**given, "step": source.step})
                self.seen["behind"] += 1
        if len(awake) > 1 and not calm and self._draw.random() < 0.6:
            kind = self._draw.choice(("killed", "killed after", "lost", "lost after", "stopped", "deaf"))
            self._draw.choice(awake).fault = self._draw.randint(1, 4), kind
            self.seen[kind] += 1
