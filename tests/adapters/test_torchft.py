"""Replicas on torchft: what is refused, on a double of its manager; and, with torchft, replicas that are killed."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire.adapters import torchft as adapter
from thinwire.adapters.transport import Transport
from thinwire.base.errors import LostRank
from thinwire.methods import resolve
from thinwire.network.comm import ManagedComm, Membership
from thinwire.network.ledger import Ledger

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "elastic"


class WorldSizeMode(Enum):
    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class ProcessGroupGloo:
    """What torchft calls its group; nobody else is in it here."""

    _timeout, _pg = timedelta(seconds=60), object()
    parent = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(_set_default_timeout=lambda limit: None))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def abort(self) -> None: ...

    def size(self) -> int:
        return 1


class Wrapped(nn.parallel.DistributedDataParallel):
    """What DistributedDataParallel makes of a module, without processes."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class NoServer(Transport):
    def __init__(self) -> None: ...

    def metadata(self) -> str:
        return "http://localhost:1/"


class Manager:
    """The parts of ``torchft.Manager`` that are read, and a run of one replica."""

    def __init__(self) -> None:
        self._pg: Any = ProcessGroupGloo()
        self._checkpoint_transport = NoServer()
        self._quorum_id, self._timeout, self._use_async_quorum = 1, timedelta(seconds=5), False
        self._replica_world_size_mode, self._min_replica_size = WorldSizeMode.DYNAMIC, 1
        self._group_rank, self._group_world_size = 0, 1
        self.functions: dict[str, Any] = {}
        self.step, self.error = 0, None

    def start_quorum(self) -> None:
        self.error = None

    def load_state_dict(self, counts: dict[str, int]) -> None:
        self.step = counts["step"]

    def errored(self) -> Any:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def participating_rank(self) -> int:
        return 0

    def num_participants(self) -> int:
        return 1

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "batches_committed": self.step}

    def should_commit(self, timeout: timedelta) -> bool:
        self.step += self.error is None
        return self.error is None

    def register_state_dict_fn(self, key: str, take: Any, give: Any) -> None:
        self.functions[key] = take, give


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    double = ModuleType("torchft")
    modes = SimpleNamespace(WorldSizeMode=WorldSizeMode)
    double.__dict__.update(Manager=Manager, ProcessGroupGloo=ProcessGroupGloo, manager=modes)
    monkeypatch.setitem(sys.modules, "torchft", double)
    return Manager()


def compress(manager: Any, model: nn.Module | None = None, **options: Any) -> thinwire.Wire:
    model = nn.Linear(8, 8) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters())
    return adapter.compress(model, optimizer, "int8(smallest=0)", manager=manager, **options)


REFUSED = {
    "use_async_quorum": lambda manager: setattr(manager, "_use_async_quorum", True),
    "FIXED_WITH_SPARES": lambda manager: setattr(manager, "_replica_world_size_mode", WorldSizeMode.FIXED_WITH_SPARES),
    "has 2 ranks": lambda manager: setattr(manager, "_group_world_size", 2),
    "ProcessGroupGloo": lambda manager: setattr(manager, "_pg", object()),
    "torchft 0.2": lambda manager: delattr(manager, "_quorum_id"),
    "has no abort": lambda manager: delattr(ProcessGroupGloo, "abort"),
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_manager_that_is_not_carried_is_refused_in_one_line(word, manager, monkeypatch):
    monkeypatch.setattr(ProcessGroupGloo, "abort", ProcessGroupGloo.abort)  # is there again afterwards
    REFUSED[word](manager)
    with pytest.raises(thinwire.ThinwireError, match=word) as error:
        compress(manager)
    assert "\n" not in str(error.value)


def test_what_else_is_refused(manager):
    with pytest.raises(thinwire.ThinwireError, match="not DistributedDataParallel"):
        compress(manager, nn.Sequential(nn.Linear(8, 8), Wrapped()))
    with pytest.raises(thinwire.ThinwireError, match=r"must be a torchft\.Manager"):
        compress(object())
    with pytest.raises(thinwire.ThinwireError, match="check_every"):
        compress(manager, safety=thinwire.Safety(check_every=10))
    compress(manager, safety=thinwire.Safety(check_every=0)).close()  # which asks for no comparison
    with pytest.raises(thinwire.ThinwireError, match="CPU"):
        compress(manager, nn.Linear(8, 8, device="meta"))


def test_a_quorum_that_never_comes_ends_the_replica_in_one_line(manager):
    def never() -> None:
        raise TimeoutError("status: DeadlineExceeded\nat some place")

    manager.start_quorum = never
    with pytest.raises(thinwire.ThinwireError, match="is the lighthouse running") as error:
        adapter.ManagerMembers(manager).ask()
    assert "\n" not in str(error.value) and error.value.status == 1  # not 2, of input: it is to be started again


def test_a_rank_whose_replica_does_not_vote_ends_in_one_line(manager):
    def never(timeout: timedelta) -> bool:
        raise TimeoutError("deadline has elapsed\nand more")

    manager.should_commit = never
    members = adapter.ManagerMembers(manager)
    with pytest.raises(thinwire.ThinwireError, match=r"vote .* \(deadline has elapsed\): .* for 10 s") as caught:
        members.vote(True)
    assert caught.value.status == 1


def test_connecting_has_a_patience_that_grows_where_it_fails(manager):
    """And the group's own timeout is that of its exchanges again."""
    manager._pg._timeout, waits, outcomes = timedelta(seconds=6), [], ["fails"] * 4 + ["connects"] * 4
    members = adapter.ManagerMembers(manager)

    def start_quorum() -> None:
        waits.append(manager._pg._timeout.total_seconds())
        manager._quorum_id += 1
        failed = outcomes[len(waits) - 1] == "fails"
        manager._pg._pg, manager.error = (None, OSError("no address")) if failed else (object(), None)

    manager.start_quorum = start_quorum
    for outcome in outcomes:
        with pytest.raises(LostRank) if outcome == "fails" else nullcontext():
            members.ask()
        assert manager._pg._timeout == timedelta(seconds=6)
    assert waits == [1, 2, 4, 6, 6, 3, 1.5, 1]


def test_what_fails_while_connected_does_not_change_the_patience(manager):
    manager.start_quorum = lambda: setattr(manager, "error", OSError("a transfer of state")) or bump()

    def bump() -> None:
        manager._quorum_id += 1

    members = adapter.ManagerMembers(manager)
    with pytest.raises(LostRank):
        members.ask()
    assert members._patience == adapter.CONNECT


def test_others_are_told_of_a_failure_at_once(manager):
    """gloo's connections close when no message of the group is left, be it in a frame of an error's traceback."""
    manager._pg, manager.num_participants = Failing(), lambda: 2
    wire = compress(manager)
    gc.disable()
    try:
        assert not wire.engine.ask()
    finally:
        gc.enable()
    assert manager._pg.left == 0 and len(manager._pg.messages) == 2
    wire.close()


class Failing(ProcessGroupGloo):
    """A group of two, whose messages fail. left: how many are there when it is aborted."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def size(self) -> int:
        return 2

    def send(self, *given: Any) -> Any:
        message = Message()
        self.messages.append(weakref.ref(message))
        return message

    recv = send

    def abort(self) -> None:
        self.left = sum(message() is not None for message in self.messages)


class Message:
    def wait(self, limit: timedelta) -> bool:
        raise RuntimeError("Connection closed by peer")


def test_an_all_reduce_has_the_patience_of_the_manager():
    group = Reducing()
    comm = ManagedComm(group, Ledger(), timedelta(seconds=40))
    comm.take(Membership(0, (0, 1)))
    comm.all_reduce(torch.zeros(1))
    assert group.timeout == timedelta(seconds=40)


class Reducing(ProcessGroupGloo):
    timeout: Any = None

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.timeout = options.timeout
        return SimpleNamespace(wait=lambda timeout: True)


def test_a_run_of_one_replica(manager):
    """A step counts when the manager says so; else nothing has changed, and the next one does."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    wire = adapter.compress(model, optimizer, "int8(smallest=0)", manager=manager)
    for counts in (True, False, True):
        before = [weight.detach().clone() for weight in model.parameters()]
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        if not counts:
            manager.should_commit = lambda timeout: False
            manager._pg.abort = lambda: None
        optimizer.step()
        vars(manager).pop("should_commit", None)
        same = all(map(torch.equal, before, model.parameters()))
        assert same is not counts
    assert (wire.step, wire.skipped, manager.step) == (3, 1, 2)
    assert wire.stats()["exposed_ms"] > 0  # the exchange begins when the backward pass is over
    assert set(manager.functions) == {"thinwire"}


def attempt(step: int, takes: dict[int, float], keeps: dict[int, float], delivered: float) -> list[dict[str, Any]]:
    """The lines of an attempt at ``step`` that counts: what processes took and kept, and what was delivered."""
    named: dict[str, Any] = {"attempt": step, "number": 1}
    lines = [{"process": of, **named, "takes": values} for of, values in takes.items()]
    lines += [{"process": of, **named, "keeps": values} for of, values in keeps.items()]
    counted = {"step": step, "number": 1, "counted": True, "delivered": delivered}
    return lines + [{"process": of, **counted} for of in keeps]


@pytest.mark.parametrize("vanishes", [0.0, 0.5])
def test_the_books_notice_what_goes_missing(vanishes, monkeypatch):
    """Process 2 dies after step 1, with 1 that waits; process 3 comes; process 1 forgets a part of what waits on it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from books import balance

    lines = attempt(1, {1: 4.0, 2: 3.0}, {1: 2.0, 2: 1.0}, 4.0)
    lines += attempt(2, {1: 1.0, 3: 2.0}, {1: 1.0 - vanishes, 3: 1.0}, 3.0)
    lines.append({"process": 1, "attempt": 3, "number": 2, "takes": 9.0})  # of an attempt that did not count
    found = balance(lines)
    assert found.lost == 1
    assert (found.gap > 0.1) is (vanishes > 0)


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed")
def test_the_command_that_installs_torchft_is_named():
    with pytest.raises(thinwire.ThinwireError, match=r"pip install 'thinwire\[elastic\]'"):
        compress(object())


real = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")


@real
def test_who_waits_for_a_peer_that_never_connects_gives_up_soon_and_exchanges_wait_longer():
    torchft = importlib.import_module("torchft")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    class Joining(Manager):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self._pg, self._timeout, self.rank = torchft.ProcessGroupGloo(), timedelta(seconds=60), rank

        def start_quorum(self) -> None:
            self._quorum_id, self.error = self._quorum_id + 1, None
            try:
                self._pg.configure(f"127.0.0.1:{store.port}/{self._quorum_id}", "", self.rank, 2)
            except RuntimeError as error:
                self.error = error

    alone, late = Joining(0), Joining(1)
    began = time.monotonic()
    members = adapter.ManagerMembers(alone)
    members._start_quorum()
    assert alone.errored() is not None and time.monotonic() - began < 20  # the group's own timeout is a minute
    late._quorum_id = alone._quorum_id

    def reduce(own: adapter.ManagerMembers, waits: float) -> float:
        own._start_quorum()
        time.sleep(waits)
        value = torch.ones(1)
        own._manager._pg.allreduce([value], torch.distributed.AllreduceOptions()).wait()
        return float(value)

    with ThreadPoolExecutor(2) as pool:
        others = adapter.ManagerMembers(late)
        results = [pool.submit(reduce, members, 0.0), pool.submit(reduce, others, 3.0)]
        assert [result.result() for result in results] == [2.0, 2.0]


@real
def test_who_gets_another_s_state_does_so_in_a_membership_that_all_meet_anew():
    """All tell each other who was behind when its number changes (``Membership.late``): torchft heals in no other."""
    coordination = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2, quorum_tick_ms=10)
    address, limit = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}", timedelta(seconds=20)
    servers = [
        coordination.ManagerServer(
            replica_id=f"{name}:1", lighthouse_addr=address, hostname="127.0.0.1", bind="127.0.0.1:0", store_addr="",
            world_size=1, heartbeat_interval=timedelta(milliseconds=100), connect_timeout=limit, quorum_retries=0,
        )
        for name in "ab"
    ]  # fmt: skip
    clients = [coordination.ManagerClient(server.address(), connect_timeout=limit) for server in servers]

    def ask(steps: tuple[int, int], failures: tuple[int, int]) -> list[tuple[int, bool]]:
        with ThreadPoolExecutor(2) as pool:
            answers = [
                pool.submit(
                    client._quorum, group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, timeout=limit,
                    commit_failures=failed, init_sync=True,
                )
                for client, step, failed in zip(clients, steps, failures, strict=True)
            ]  # fmt: skip
            return [(answer.result().quorum_id, answer.result().heal) for answer in answers]

    (number, _), _ = ask((0, 0), (0, 0))
    assert ask((1, 1), (0, 0)) == [(number, False)] * 2
    assert ask((2, 1), (0, 1)) == [(number + 1, False), (number + 1, True)]  # b has not counted step 2
    assert ask((3, 3), (0, 0)) == [(number + 1, False)] * 2
    assert ask((3, 0), (1, 1)) == [(number + 2, False), (number + 2, True)]  # b has fallen behind by itself
    for server in (*servers, lighthouse):
        server.shutdown()


@real
@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("trickle(density=0.05, smallest=0)", ""),
        ("local-steps(every=4)", ""),
        ("sdp4bit(smallest=0)", "--replicas 2 --shards 2"),
        ("int8(smallest=0)", "--replicas 2 --shards 2"),
        ("trickle(density=0.05, smallest=0)", "--replicas 2 --shards 2"),
        ("trickle(density=0.05, smallest=0)", "--replicas 4 --min-replicas 2 --spares"),
    ],
)
def test_replicas_that_are_killed_and_come_back(method, given, monkeypatch):
    """Replicas of one rank, of two (any of which is killed), and with spares."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kills

    common = "--replicas 3 --seconds 8 --every 3 --least 1 --most 2 --hidden 32 --books"
    options = kills.parse([*common.split(), *given.split()])
    outcome = kills.run(method, options)
    assert outcome.events and not outcome.failed
    first, later = outcome.events[0], [line for line in outcome.lines if line.get("counted")]
    assert any(line["replica"] in first.names and line["time"] > first.end for line in later)
    assert not outcome.unequal and len(outcome.counted) > 20
    assert (outcome.balance is not None) is (resolve(method).card.promise.kind in ("exact", "conserves"))
    assert outcome.balance is None or options.spares or outcome.balance.gap < 1e-4  # what a spare loses is not in them
    if options.spares:
        assert {line["replicas"] for line in outcome.lines if line.get("counted")} == {2}
        assert any(line.get("spare") for line in outcome.lines)
