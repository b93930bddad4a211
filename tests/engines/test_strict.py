"""Every method on every engine over a stand-in for NCCL, which refuses what NCCL lacks and compares what ranks call."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

import nccl_double as strict
import ranks
import thinwire
from breadth import falls_on
from engines import adamw, build, train
from models import Net
from nccl_double import Call
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.proof.record import small

TINY = partial(Net, 13, 6, 1)
MORE = (
    partial(small, methods.Trickle, mask="merged", bits=4), partial(small, methods.SCAPE, refresh=2),
    partial(small, methods.TopK, feedback="gradients"), partial(small, methods.Int8, feedback="gradients"),
)  # fmt: skip
"""Knobs that change what is sent to whom."""


def _join(rank: int, world: int) -> None:
    """The same ranks once more, over the stand-in; groups are named as if they were the first."""
    store = dist.PrefixStore("strict", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("strict", store=store, rank=rank, world_size=world)
    strict.forget()
    strict.as_on_cuda().start()  # the process ends with the test


def _loss(model, step, rank):
    tokens = torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(7 * step + rank))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _every_method(rank, world, kind, options):
    _join(rank, world)
    table = [cls for number, cls in enumerate(methods.TABLE) if falls_on(number, kind, cls.engines)]
    made = [partial(small, cls) for cls in table] if not options else [methods.Dense, methods.SDP4Bit]
    for make in (*made, *MORE):
        method = make()
        if kind not in method.engines:
            continue
        # A buffer: DDP broadcasts it before each forward pass, on its own group.
        model = build(kind, world, net=TINY, prepare=lambda model: model.register_buffer("seen", torch.zeros(2)))
        other = method.OPTIMIZER is not torch.optim.AdamW
        optimizer = method.OPTIMIZER(model.parameters(), lr=1e-3) if other else adamw(model)
        wire = thinwire.compress(model, optimizer, method, steps=100, **(options if method.two_level else {}))
        assert getattr(wire.engine, "worker", None) is None or kind == "ddp", "a CPU's branch"
        train(model, optimizer, rank, range(min(method.card.steady, 3) + 2), wire, loss=_loss)
        wire.close()
    return strict.calls()


@pytest.mark.parametrize(
    ("kind", "world", "options"),
    [("ddp", 2, {}), ("fsdp2", 2, {}), ("hsdp", 4, {}), ("ddp", 4, {"two_level": True}),
     ("fsdp2", 4, {"two_level": True})],
)  # fmt: skip
def test_every_method_would_come_through_on_nccl(kind, world, options):
    everybody = ranks.run(_every_method, world, kind, options, LOCAL_WORLD_SIZE="2" if options else "1")
    assert len(everybody[0]) > 100
    strict.check(everybody)


def _refusals(rank, world):
    _join(rank, world)
    rows = torch.ones(world, 4)

    def refusal(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except ThinwireError as error:
            return str(error)
        return None

    found = {
        "bits": refusal(dist.all_reduce, torch.ones(4, dtype=torch.uint8), dist.ReduceOp.BOR),
        "int16": refusal(dist.all_reduce, torch.ones(4, dtype=torch.int16)),
        "uint16": refusal(dist.broadcast, torch.ones(4, dtype=torch.uint16), 0),
        "flags": refusal(dist.all_reduce, torch.ones(4, dtype=torch.bool)),
        "strides": refusal(dist.all_to_all_single, rows, torch.ones(4, world).t()),
        "device": refusal(dist.broadcast, torch.ones(4, device="meta"), 0),
        "overlap": refusal(dist.all_to_all_single, rows, rows),
        "fine": refusal(dist.all_gather_into_tensor, rows.view(-1), rows[rank]),
    }
    return found, strict.calls()


def test_what_nccl_lacks_is_refused():
    found, calls = ranks.run(_refusals, 2)[0]
    words = {
        "bits": "not by", "int16": "does not reduce torch.int16", "uint16": "does not carry torch.uint16",
        "flags": "does not reduce torch.bool", "strides": "contiguous", "device": "on meta", "overlap": "overlaps",
    }  # fmt: skip
    assert found.pop("fine") is None and len(calls) == 1, "only what was carried out is written down"
    for case, expected in words.items():
        assert found[case] is not None and expected in found[case], (case, found[case])


A, B = (partial(Call, name, (0, 1), "allreduce", "float32") for name in "AB")


def test_calls_are_compared_across_ranks():
    strict.check([[A(8, "sum"), B(8, "sum")]] * 2)
    with pytest.raises(ThinwireError, match=r"call 1 of group A is allreduce sum of 8 float32 on rank 0, and nothing"):
        strict.check([[A(8, "sum"), A(8, "sum")], [A(8, "sum")]])
    with pytest.raises(ThinwireError, match=r"call 0 .* of 8 float32 on rank 0, and allreduce sum of 9 float32 on"):
        strict.check([[A(8, "sum")], [A(9, "sum")]])


def test_two_groups_that_can_wait_for_each_other_are_found():
    with pytest.raises(ThinwireError, match="groups can wait for each other"):
        strict.check([[A(8, "sum"), B(8, "sum")], [B(8, "sum"), A(8, "sum")]])
    # in a circle of three, of which no two ranks share more than one
    pairs = [partial(Call, name, of, "allreduce", "float32", 8, "sum") for name, of in
             (("01", (0, 1)), ("12", (1, 2)), ("02", (0, 2)))]  # fmt: skip
    first, second, third = (make() for make in pairs)
    strict.check([[first, third], [first, second], [second, third]])
    with pytest.raises(ThinwireError, match="groups can wait for each other"):
        strict.check([[first, third], [second, first], [third, second]])
