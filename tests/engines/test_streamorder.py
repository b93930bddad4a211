"""The order of streams, as a GPU needs it: every method on every engine, and each of our waits left out in turn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import thinwire
from breadth import falls_on
from streamorder import Watch, World, gpu
from thinwire import methods, wire
from thinwire.core.exchange import bucket_rows
from thinwire.methods.papers import tagc
from thinwire.methods.parts import masks
from thinwire.plan import plan
from thinwire.proof.record import small

WIDTH = 8


class Block(nn.Module):
    """Gradients come in another order than DDP expects: it makes other buckets after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).relu())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x))


def build(kind: str) -> nn.Module:
    """``fsdp2-keep`` does not reshard, ``fsdp2-shared`` calls a module twice, ``fsdp2-nested`` has one in another,
    ``fsdp2-unshard`` asks for weights before the forward pass does."""
    torch.manual_seed(0)
    blocks = [Nested() if kind == "fsdp2-nested" else Block()]
    blocks += [Block()] * (kind != "fsdp2")
    model = nn.Sequential(*blocks[:1] * (1 + (kind == "fsdp2-shared")), *blocks[1:], nn.Linear(WIDTH, 3))
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.0005)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if kind == "hsdp" else None
    mesh = mesh or init_device_mesh("cpu", (4,))
    for block in blocks:
        if isinstance(block, Nested):
            fully_shard(block.inner, mesh=mesh)
        fully_shard(block, mesh=mesh, reshard_after_forward=kind != "fsdp2-keep")
    if kind == "fsdp2-shared":
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    return fully_shard(model, mesh=mesh, reshard_after_forward=kind != "fsdp2-keep")


def steps(kind: str, make: Callable[[], methods.Method], *, guard: bool = True, deaf: str = "") -> World:
    """Some of everything: micro-batches, a step that is skipped, a state that is loaded, buckets that are rebuilt."""
    world = World(deaf)
    method = make()
    model = build(kind)
    optimizer = method.OPTIMIZER(model.parameters(), lr=1e-3)
    handle = thinwire.compress(model, optimizer, method, steps=100, safety=thinwire.Safety(guard))
    inputs = torch.randn(4, WIDTH)

    def step(*, micro: int = 1, spoilt: bool = False) -> None:
        if kind == "fsdp2-unshard" and handle.step:
            model[1].unshard(async_op=True)
        for number in range(micro):
            with handle.accumulate(last=number == micro - 1):
                (model(inputs).square().mean() * (torch.nan if spoilt else 1.0)).backward()
        handle.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    with Watch():
        step(micro=2)
        for _ in range(min(method.card.steady, 2) + 1):
            step()
        if guard:
            step(spoilt=True)
        handle.load_state_dict(copy.deepcopy(handle.state_dict()))
        step()
    assert handle.skipped == guard
    world.exposed = handle.ledger.stats()["exposed_ms"]
    handle.close()
    return world


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """On a rank whose peers say what it says, it chooses whatever one of them chooses."""

    def layout(self: masks.Masks, step: int) -> Any:
        rows, end, places = bucket_rows(self._exchange, True), 0, {}
        for name, chunks in self._chunks.items():
            places[name] = []
            for chunk in chunks:
                first, end = end, end + self._schedule.mask_bytes(chunk.span, step)
                places[name].append((slice(0, rows), slice(first, end)))
        return places, end

    monkeypatch.setattr(masks.Masks, "_lay_out", layout)
    monkeypatch.setattr(tagc, "seed_of", lambda *of: 0)
    monkeypatch.setattr(wire, "compile_kernels", lambda *of: None)  # there are none
    monkeypatch.setattr(plan.Plan, "warning", "")
    with gpu(4):
        yield


WHOLE = [methods.Dense, methods.SDP4Bit, methods.ZeROPP, methods.SCAPE]
CASES = [
    (kind, cls, {}) for kind in ("ddp", "fsdp2", "hsdp") for number, cls in enumerate(methods.TABLE)
    if kind in small(cls).engines and (kind != "hsdp" or falls_on(number, 0, range(3)))
]  # fmt: skip
CASES += [(kind, cls, {}) for kind in ("fsdp2-keep", "fsdp2-shared", "fsdp2-nested", "fsdp2-unshard") for cls in WHOLE
           if small(cls).card.adds_up or kind != "fsdp2-shared"]
CASES += [(kind, methods.SCAPE, {"offload": True}) for kind in ("ddp", "fsdp2", "hsdp")]
CASES += [(kind, methods.TopK, {"feedback": "gradient"}) for kind in ("ddp", "fsdp2", "hsdp")]
CASES += [(kind, methods.Trickle, {"mask": "merged"}) for kind in ("ddp", "fsdp2", "hsdp")]
CASES += [(kind, methods.Trickle, {"mask": "merged"}) for kind in ("fsdp2", "fsdp2-keep", "fsdp2-unshard")]


@pytest.mark.parametrize(("kind", "cls", "knobs"), CASES, ids=lambda of: getattr(of, "name", str(of)))
def test_no_access_is_unordered(kind, cls, knobs):
    world = steps(kind, partial(small, cls, **knobs))
    assert not world.wrong(), "\n".join(world.wrong()[:8])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_nor_without_the_guard_for_whose_flag_the_host_waits(kind):
    for cls, knobs in ((methods.SCAPE, {"offload": True}), (methods.PowerSGD, {})):
        world = steps(kind, partial(small, cls, **knobs), guard=False)
        assert not world.wrong(), "\n".join(world.wrong()[:8])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_the_time_that_was_waited_is_told_by_events(kind):
    """Here an operation takes a millisecond: those of the last exchange, and of each gathering of weights."""
    assert steps(kind, methods.Dense).exposed > (3 if kind == "ddp" else 10)


def test_every_wait_of_ours_is_needed():
    """Each is left out in turn, in some run that has it: something is unordered then."""
    runs: list[tuple[str, Callable[[], methods.Method], bool]] = [
        ("ddp", partial(small, methods.SCAPE, offload=True), False), ("ddp", partial(small, methods.PowerSGD), True),
        ("fsdp2-shared", partial(small, methods.SDP4Bit), True),
        ("fsdp2-unshard", partial(small, methods.ZeROPP), True),
    ]  # fmt: skip
    needed: dict[str, bool] = {}
    for kind, make, guard in runs:
        for wait in steps(kind, make, guard=guard).waits:
            needed[wait] = needed.get(wait, False) or bool(steps(kind, make, guard=guard, deaf=wait).wrong())
    assert len(needed) > 6
    assert all(needed.values()), [wait for wait, shows in needed.items() if not shows]
