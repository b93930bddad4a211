"""Groups by backend and device: what a verb costs, and how groups are made. On one rank, over doubles of NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

import ranks
from thinwire.comm import GroupComm
from thinwire.ledger import Ledger


def _devices(rank, world):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (which registers the backend "fake")

    group = dist.new_group(backend="cpu:gloo,cuda:fake")
    return [GroupComm(group, Ledger(), device=device).reduce_scatter_is_all_reduce for device in ("cpu", "cuda")]


def test_bytes_are_those_of_the_backend_that_carries_the_device():
    assert ranks.run(_devices, 1) == [[True, False]]


def _bound(rank, world):
    split = []
    dist.distributed_c10d._get_split_source = split.append
    dist.group.WORLD.bound_device_id = torch.device("cuda:0")
    dist.new_group([0])
    before = len(split)
    comm = GroupComm(dist.group.WORLD, Ledger()).twin()
    return before, len(split), comm.size, str(dist.group.WORLD.bound_device_id)


def test_a_group_of_some_ranks_is_not_split_off_all_ranks():
    assert ranks.run(_bound, 1) == [(1, 1, 1, "cuda:0")]
