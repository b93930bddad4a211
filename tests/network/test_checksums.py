"""Messages that carry a checksum: a bit that flips on the way is named, and nothing else changes."""

from __future__ import annotations

import importlib.util
import random
import warnings
from unittest import mock

import pytest
import torch

import ranks
import thinwire
from breadth import dealt
from engines import build
from models import flat, loss_of
from thinwire import methods
from thinwire import wire as wires
from thinwire.base.errors import DamagedMessage, LostRank, ThinwireError
from thinwire.network.comm import ChainedWork, GroupComm
from thinwire.proof.record import small

pytestmark = pytest.mark.skipif(importlib.util.find_spec("xxhash") is None, reason="needs xxhash")
BY_NAME = {cls.name: cls for cls in methods.TABLE}
NAMES = [name for name in BY_NAME if name != "none"]


def begun(kind, world, name, **more):
    model, method = build(kind, world), small(BY_NAME[name])
    optimizer = type(method).OPTIMIZER(model.parameters(), lr=1e-3)
    return model, optimizer, thinwire.compress(model, optimizer, method, steps=100, **more)


def advance(model, optimizer, rank, steps):
    for step in steps:
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def _changes_nothing(rank, world, kind):
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt(NAMES, kind):
        if kind not in BY_NAME[name].engines:
            continue
        ends = []
        for checksum in (False, True):
            model, optimizer, wire = begun(kind, world, name, safety=thinwire.Safety(checksum=checksum))
            advance(model, optimizer, rank, range(4))
            wire.reset_stats()
            advance(model, optimizer, rank, range(4, 6))
            stats, adapts = wire.ledger.stats(), wire.method.card.bytes_follow_data
            sent = sum(stats["wire_bytes_per_step"].values()) - stats["weight_bytes_per_step"]
            more = sent - wire.plan.wire_bytes  # 8 bytes of each of some messages, which the plan does not know
            if not adapts and name not in ("radius", "local-steps") and not 0 <= round(more, 6) <= 500 * checksum:
                broken.append(f"{name} on {kind}, checksum={checksum}: sent {sent}, planned {wire.plan.wire_bytes}")
            ends.append(flat(model))
            wire.close()
        if not torch.equal(*ends):
            broken.append(f"{name} on {kind}: other bits")
    return broken


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_checksums_change_no_bit_and_are_counted_as_sent(kind):
    for broken in ranks.run(_changes_nothing, 2, kind):
        assert not broken


def _damaged(rank, world, kind, name):
    """One bit flips in what rank 1 receives in its third step."""
    warnings.simplefilter("ignore")
    model, optimizer, _ = begun(kind, world, name, safety=thinwire.Safety(checksum=True))
    advance(model, optimizer, rank, range(2))
    generator, flipped = random.Random(name), []

    def flip(out):
        if rank == 1 and not flipped and out.numel() > 64:
            octets = out.view(-1).view(torch.uint8)
            theirs = octets[: len(octets) // world]  # rank 0's
            theirs[generator.randrange(len(theirs))] ^= 1 << generator.randrange(8)
            flipped.append(True)

    def flipping(original):
        def verb(self, out, row, *args, **more):
            work = original(self, out, row, *args, **more)
            if work is not None:
                return ChainedWork(work, lambda: flip(out))
            flip(out)
            return None

        return verb

    with mock.patch.multiple(
        GroupComm, _all_gather=flipping(GroupComm._all_gather), _all_to_all=flipping(GroupComm._all_to_all)
    ):
        try:
            advance(model, optimizer, rank, range(2, 6))
        except (DamagedMessage, LostRank) as error:
            return type(error).__name__, str(error)
    return "nothing", str(flipped)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("ddp", "int8"), ("ddp", "topk"), ("fsdp2", "sdp4bit"), ("ddp", "tagc"), ("fsdp2", "trickle"), ("fsdp2", "scape")],
)
def test_a_bit_that_flips_on_the_way_is_named_and_no_rank_goes_on(kind, name):
    other, (found, said) = ranks.run(_damaged, 2, kind, name)
    assert found == "DamagedMessage", said
    assert "rank 1, step 3: the checksum shows that what rank 0 sent in the exchange of" in said, said
    assert "arrived damaged" in said
    assert other[0] == "LostRank", other


def test_checksums_are_refused_on_a_gpu_and_without_the_package():
    with pytest.raises(ThinwireError, match="checksum=True is for tensors on a CPU, not on cuda"):
        wires._seal(mock.Mock(), "cuda")
    with mock.patch.dict("sys.modules", {"xxhash": None}), pytest.raises(ThinwireError, match="pip install"):
        wires._seal(mock.Mock(), "cpu")


def test_a_lost_rank_is_named_as_far_as_it_is_known():
    """One, one of several, or, where the network does not tell at all, another one."""
    said = [str(LostRank(0, lost, "swap", 0.5, "closed")) for lost in ([], [3], [1, 2])]
    assert [line.split(" for ")[1].split(" in ")[0] for line in said] == ["another rank", "rank 3", "one of ranks 1, 2"]
