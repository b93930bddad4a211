"""The memory that the plan foretells is the memory that is held, and nothing of that size is allocated to find out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import thinwire
from breadth import dealt, spread
from engines import adamw, build, train
from models import Net
from ranks import run
from thinwire.base.knobs import knobs_of
from thinwire.core.bucket import Arena, Bucket, Piece
from thinwire.methods import TABLE, resolve
from thinwire.network.comm import local
from thinwire.plan.memory import _tensors, resident_bytes
from threaded import reduce_on_threads

START = "local-steps(start=3,start_with='loco(beta=0,reset=0,smallest=256)')"
LONG = "scape(warmup=20,density=0.01)"
"""Sends all in its first steps, and little in the steady state."""
MORE = ("int8(feedback='gradients')", "scape(refresh=2)", "separate:paper", "sdp4bit:qw", START)
CPU = torch.device("cpu")
FEW = ("dense", "int8", "loco", "radius", "sdp4bit", "onebit-adam")


def method_of(name: str) -> thinwire.Method:
    """With small tensors sent, and without a start that ``name`` does not ask for."""
    method = resolve(name)
    knobs = {field.name: getattr(method, field.name) == field.default for field in knobs_of(method)}
    values = {"smallest": 256, "start": 0, "warmup": 1, "every": 1}
    return replace(method, **{knob: value for knob, value in values.items() if knobs.get(knob)})


def net() -> Net:
    return Net(512, 64, 1)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def foretold_and_held(rank: int, world: int, kind: str, names: list[str]) -> dict[str, tuple[int, int, int]]:
    found = {}
    for name in names:
        method = method_of(name)
        if kind not in method.engines:
            continue
        model = build(kind, world, net=net, **({"bucket_cap_mb": 0.2} if kind == "ddp" else {}))
        optimizer = thinwire.AdamS(model.parameters(), lr=1e-3) if method.name == "scape" else adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        assert wire.memory_bytes() < 16384, name
        train(model, optimizer, rank, range(max(6, wire.method.card.steady + 2)), wire)
        held = _tensors([wire._road, getattr(wire.engine, "replicas", None)], set())
        weights = {storage_of(local(weight)) for weight in model.parameters()}
        assert weights.isdisjoint(map(storage_of, held)), f"{name} counts the model's own weights"
        found[name] = wire.plan.dry_run.memory.resident, wire.plan.dry_run.memory.peak, wire.memory_bytes()
        wire.state_dict()
        assert wire.memory_bytes() == pytest.approx(found[name][2], abs=2048), f"{name}, whose state was saved"
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_the_plan_knows_what_every_method_holds(kind, world):
    names = [LONG, *dealt(spread(2, [method.name for method in TABLE] + list(MORE)), kind, ("ddp", "fsdp2"))]
    if kind == "hsdp":
        names = [LONG, "local-steps", START, *spread(2, FEW)]
    for found in run(foretold_and_held, world, kind, names):
        assert len(found) >= len(names) - 3
        for name, (planned, peak, now) in found.items():
            assert now == pytest.approx(planned, rel=0.05, abs=2048), name
            assert peak >= planned, name
            assert (now > 0) == (name not in ("dense", "none")), name


def beside_rounds(rank: int, world: int) -> list[tuple[bool, int]]:
    """After each step: is a round under way, and the memory held."""
    model = build("ddp", world, net=net)
    optimizer = adamw(model)
    method = resolve("local-steps(every=4,delay=2,start=0)")
    wire = thinwire.compress(model, optimizer, method)
    found = []
    for step in range(14):
        train(model, optimizer, rank, [step], wire)
        found.append((wire.method._journey is not None, wire.memory_bytes()))
    wire.close()
    return found


def test_a_round_under_way_is_held():
    """From the second round on, with the outer momentum."""
    values = sum(weight.numel() for weight in net().parameters())
    for found in run(beside_rounds, 2):
        under_way, others = ({nbytes for beside, nbytes in found[6:] if beside == flag} for flag in (True, False))
        assert min(under_way) - max(others) == pytest.approx(4 * values, abs=2048), found


def two_levels(rank: int, world: int) -> tuple[int, int]:
    model = build("ddp", world, net=net, bucket_cap_mb=0.2)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, method_of("sdp4bit"))
    train(model, optimizer, rank, range(3), wire)
    found = wire.plan.dry_run.memory.resident, wire.memory_bytes()
    wire.close()
    return found


def test_two_levels():
    for planned, now in run(two_levels, 4, LOCAL_WORLD_SIZE="2"):
        assert now == pytest.approx(planned, rel=0.05)


def test_a_tensor_counts_once_whatever_shows_it():
    cpu, values = torch.device("cpu"), torch.zeros(100)
    assert resident_bytes(cpu, {"a": [values, values[10:20]]}, (values.view(10, 10),)) == 400
    assert resident_bytes(torch.device("meta"), values) == 0


def gradient(rank: int, step: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("name", [*(cls.name for cls in TABLE), *MORE, "scape(refresh=3)"])
def test_nothing_relies_on_what_was_in_scratch_memory(monkeypatch, name, topology):
    """Buckets take turns with it: whatever another one has left there, the bits are the same."""
    if "ddp" not in resolve(name).engines or (topology == "reduce_scatter" and "fsdp2" not in resolve(name).engines):
        pytest.skip(f"{name} does not run there")

    def reduced() -> list[torch.Tensor]:
        found = reduce_on_threads(
            lambda: method_of(name), gradient, topology=topology, size=2, shapes={"a": (24, 30), "b": (7, 90)}, steps=4,
            optimizer=thinwire.AdamS if name.startswith("scape") else torch.optim.AdamW,
        )  # fmt: skip
        return [values for rank in found for step in rank for values in (step["mean"], *step["weights"].values())]

    def load(bucket: Bucket, flat: torch.Tensor, out: torch.Tensor, bound: object = None) -> object:
        for memory in bucket._arena._memory.values():
            memory.fill_(255)  # a NaN of float32, -1 of integers
        return original(bucket, flat, out, bound)

    clean, original = reduced(), Bucket.load
    monkeypatch.setattr(Bucket, "load", load)
    for expected, found in zip(clean, reduced(), strict=True):
        assert torch.equal(found, expected) and found.isfinite().all()


def test_buckets_of_a_stage_take_turns_with_their_memory():
    """Of each use, what the largest needs; in another dtype, too. What a bucket keeps is its own."""
    arena = Arena()
    large, small = (
        Bucket([Piece("a", 0, n)], rows=1, owner=False, group=8, dtype=torch.float32, device=CPU, arena=arena)
        for n in (100, 20)
    )
    first = large.scratch("wire", (4, 25), torch.float32)
    again = small.scratch("wire", (3, 10), torch.int64)
    assert again.data_ptr() == first.data_ptr() and resident_bytes(CPU, large, small) == 400
    assert large.buffer("mask", (5,), torch.float32).data_ptr() != small.buffer("mask", (5,), torch.float32).data_ptr()
    assert large.scratch("wire", (101,), torch.float32).numel() == 101 and resident_bytes(CPU, arena) == 404
