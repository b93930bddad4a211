"""How long ranks wait follows the link, is the same on all ranks, and holds for groups that are made later."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ranks
from thinwire.network.comm import GroupComm, timeout_of
from thinwire.network.ledger import Ledger
from thinwire.train.job import patience


def _fitted(rank, world):
    comm = GroupComm(dist.group.WORLD, Ledger())
    floor = patience.fit_timeout(comm, parameters=1, floor_s=37.0)
    found = {"floor": (floor.seconds, comm.timeout == timedelta(seconds=37))}
    slow = 10**12  # parameters, for which the loopback is a slow link
    fitted = patience.fit_timeout(comm, parameters=slow, floor_s=37.0)
    need = patience.BYTES_PER_PARAMETER * slow / fitted.rate
    mesh = GroupComm(init_device_mesh("cpu", (world,)).get_group(), Ledger())
    limit = timedelta(seconds=fitted.seconds)
    later = [comm.twin().timeout, mesh.timeout, timeout_of(dist.group.WORLD)]
    close = [abs(other - limit) < timedelta(milliseconds=1) for other in later]
    comm.all_reduce(torch.zeros(1))
    return {**found, "fitted": fitted.seconds, "asked": patience.MARGIN * need, "later": close, "said": str(fitted)}


def test_all_ranks_and_groups_wait_as_long_as_the_link_needs_and_at_least_the_floor():
    first, second = ranks.run(_fitted, 2)
    assert first == second
    assert first["floor"] == (37.0, True)
    assert first["fitted"] == pytest.approx(first["asked"]) and first["fitted"] > 37
    assert first["later"] == [True, True, True]
    assert "at the measured rate of " in first["said"]


class Link:
    """Two ranks whose all-gather takes ``latency`` seconds and its bytes' at ``rate``."""

    size, device = 2, torch.device("cpu")

    def __init__(self, clock: list[float], latency: float, rate: float) -> None:
        self.clock, self.latency, self.rate, self.probes = clock, latency, rate, 0

    def all_reduce(self, tensor, op="sum"):
        return tensor

    def all_gather(self, out, row):
        self.probes += 1
        self.clock[0] += self.latency + len(row) / self.rate


@pytest.mark.parametrize(("rate", "probes"), [(1e4, 1), (1e5, 2), (1e9, 3)])
def test_a_probe_is_long_enough_for_the_rate_and_short_on_a_slow_link(rate, probes, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(patience.time, "perf_counter", lambda: clock[0])
    link = Link(clock, 1e-3, rate)
    assert patience._measure_rate(link) == pytest.approx(rate, rel=0.25)
    assert link.probes == probes and clock[0] < 5
