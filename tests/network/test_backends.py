"""Groups by backend and device: what a verb costs, and how groups are made. On one rank, over doubles of NCCL."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import ranks
import thinwire
from thinwire.network.comm import GroupComm
from thinwire.network.ledger import Ledger
from thinwire.train.job.setup import _gpu_backend


def _devices(rank, world):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (which registers the backend "fake")

    group = dist.new_group(backend="cpu:gloo,cuda:fake")
    return [GroupComm(group, Ledger(), device=device).reduce_scatter_is_all_reduce for device in ("cpu", "cuda")]


def test_bytes_are_those_of_the_backend_that_carries_the_device():
    assert ranks.run(_devices, 1) == [[True, False]]


def test_ranks_that_share_a_gpu_talk_by_gloo(monkeypatch):
    """NCCL refuses two ranks on one GPU ("invalid usage"); on hosts of one name, GPUs have names of their own."""

    def backend(*gpus):
        store = dist.PrefixStore(" ".join(gpus), dist.HashStore())
        for rank in range(1, len(gpus)):
            store.set(f"gpu/{rank}", gpus[rank])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[0]))
        return _gpu_backend(torch.device("cuda", 0), store, 0, len(gpus))

    assert backend("one") == backend("one", "two", "three") == "nccl"
    with pytest.warns(thinwire.ThinwireWarning, match="3 ranks share 2 GPUs"):
        assert backend("one", "two", "one") == "gloo"


def _bound(rank, world):
    split = []
    dist.distributed_c10d._get_split_source = lambda group, *backend: split.append(group)
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    dist.new_group([0])
    before = len(split)
    comm = GroupComm(dist.group.WORLD, Ledger()).twin()
    return before, len(split), comm.size, str(dist.group.WORLD.bound_device_id)


def test_a_group_of_some_ranks_is_not_split_off_all_ranks():
    assert ranks.run(_bound, 1) == [(1, 1, 1, "cuda:0")]


def _dropped(rank, world):
    comm = GroupComm.aside(dist.group.WORLD, torch.device("cpu"))

    def gather(value, **more):
        out = torch.empty(world, 1000)
        work = comm.all_gather(out, torch.full((1000,), float(value + rank)), **more)
        return out[:, -1].tolist() if work is None else work

    for late in (0, 1, None):
        if rank == late:
            time.sleep(0.1)
        gather(10, async_op=True)
        if rank != late:
            time.sleep(0.05)
    return [gather(value) for value in (20, 30, 40)]


def test_a_work_that_nobody_waits_for_does_not_shift_the_messages_behind_it():
    """As where a backward pass raises, with the weights of the next layer on their way."""
    assert ranks.run(_dropped, 2, seconds=20) == [[[20.0, 21.0], [30.0, 31.0], [40.0, 41.0]]] * 2


def test_messages_side_by_side_do_not_count_twice_and_a_step_ends_between_them(monkeypatch):
    """Weights on one thread and gradients on another; the clock is ours."""
    clock = iter([0.0, 1.0, 3.0, 4.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr("thinwire.network.ledger.time.perf_counter", lambda: next(clock))
    ledger = Ledger()
    first, second = ledger.span("wire"), ledger.span("wire")
    first.__enter__()  # from 0
    second.__enter__()  # 1
    first.__exit__(None, None, None)  # 3
    ledger.close_step()  # 4
    second.__exit__(None, None, None)  # 6
    with ledger.span("wire"):  # from 10 to 12
        pass
    assert ledger.last.seconds["wire"] == 4 and ledger.current.seconds["wire"] == 2 + 2


def test_no_device_of_ours_lacks_its_number():
    """ "cuda" alone is the current device: cuda:0 on every rank of a program that does not call set_device()."""
    sources = Path(thinwire.__file__).parent.rglob("*.py")
    lines = [(path.name, line.strip()) for path in sources for line in path.read_text().splitlines()]
    assert not [found for found in lines if re.search(r"""device[(=]["']cuda["'](?!,)""", found[1])]


class _Event:
    """A device's event: ``over`` once the device has come to it, ``at`` so many milliseconds."""

    def __init__(self, at: float, over: bool) -> None:
        self.at, self.over, self.waited = at, over, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = self.waited = True

    def elapsed_time(self, end: _Event) -> float:
        assert self.over and end.over, "both events must be completed"
        return end.at - self.at


def test_times_of_events_are_read_when_both_are_over_and_no_step_waits_for_them():
    """The start may be the later one, where weights were there before they were needed; without the guard's flag
    nobody has waited for either."""
    ledger = Ledger()
    start, end = _Event(2.0, over=False), _Event(5.0, over=True)
    ledger.between("exposed", start, end)
    step = ledger.current
    for _ in range(3):
        ledger.close_step()
    assert not start.waited and not end.waited and step.seconds["exposed"] == 0
    start.over = True
    ledger.close_step()
    assert step.seconds["exposed"] == 0.003 and not step.events and not start.waited
    ledger.between("exposed", _Event(1.0, over=False), _Event(2.0, over=False))
    ledger.close_step()
    assert ledger.stats(last=True)["exposed_ms"] == 1.0, "who asks, waits"
