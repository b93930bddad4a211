"""The order of streams, as a GPU needs it: every method on every engine, and each of our waits left out in turn."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as sharded
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce
from torch.nn.parallel import DistributedDataParallel

import dry_cuda
import streamorder
import thinwire
from breadth import falls_on, spread
from kernel_access import written
from streamorder import Stream, Watch, World, gpu, on
from thinwire import methods, wire
from thinwire.base import device as devices
from thinwire.base.errors import ThinwireError
from thinwire.base.random import Pool, Seeds
from thinwire.core.exchange import bucket_rows
from thinwire.methods.papers import tagc
from thinwire.methods.parts import masks
from thinwire.network.guard import Guard
from thinwire.ops import backends, quant
from thinwire.ops.norms import Limit
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


class Wide(nn.Module):
    """Its weights are encoded, and cut, where the engine has put them: their shards are whole lists."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def build(kind: str) -> nn.Module:
    """``fsdp2-wide`` leaves gradients where they are, ``fsdp2-keep`` does not reshard, ``fsdp2-shared`` calls a module
    twice, ``fsdp2-nested`` has one in another, ``fsdp2-unshard`` asks for weights before the forward pass does,
    ``hsdp-bf16`` reduces in bfloat16."""
    torch.manual_seed(0)
    blocks = [Nested() if kind == "fsdp2-nested" else Wide() if kind == "fsdp2-wide" else Block()]
    blocks += [Block()] * (kind != "fsdp2")
    model = nn.Sequential(*blocks[:1] * (1 + (kind == "fsdp2-shared")), *blocks[1:], nn.Linear(WIDTH, 3))
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.0005)
    replicated = kind.startswith("hsdp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if replicated else None
    mesh = mesh or init_device_mesh("cpu", (4,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if kind == "hsdp-bf16" else None)
    fully_shard = partial(sharded, mp_policy=policy)
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
    # A comparison of replicas would wait for the device in the first step, and hide waits that are needed.
    safety = thinwire.Safety(guard, check_every=0)
    handle = thinwire.compress(model, optimizer, method, steps=100, safety=safety)
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
        for _ in range(2 * (kind == "fsdp2-unshard")):  # torch has no stream for it yet
            model[1].unshard()
            model[1].reshard()
        step(micro=2)
        for _ in range(min(method.card.steady, 2) + 1):
            step()
        if guard:
            step(spoilt=True)
        handle.load_state_dict(copy.deepcopy(handle.state_dict()))
        step()
        before = world.syncs.copy()
        step()
        world.waited = world.syncs - before
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
    if kind in small(cls).engines and falls_on(number, kind, ("ddp", "fsdp2", "hsdp", "ddp", "fsdp2"))
]  # fmt: skip
CASES += [(kind, cls, {})
           for kind, cls in spread(3, ("fsdp2-keep", "fsdp2-shared", "fsdp2-nested", "fsdp2-unshard"), WHOLE)
           if small(cls).card.adds_up or kind != "fsdp2-shared"]
CASES += [("hsdp-bf16", cls, {}) for cls in (methods.Dense, methods.Int8)]
CASES += [(kind, methods.SCAPE, {"offload": True}) for kind in ("ddp", "fsdp2", "hsdp")]
CASES += [(kind, methods.TopK, {"feedback": "gradients"}) for kind in ("ddp", "fsdp2", "hsdp")]
CASES += [(kind, methods.Trickle, {"mask": "merged"}) for kind in ("ddp", "fsdp2", "hsdp")]
CASES += [(kind, methods.Trickle, {"mask": "merged"}) for kind in ("fsdp2-keep", "fsdp2-unshard", "fsdp2-wide")]
CASES += [("fsdp2-wide", cls, {}) for cls in (methods.TopK, methods.Trickle, methods.Int8)]


@pytest.mark.parametrize(("kind", "cls", "knobs"), CASES, ids=lambda of: getattr(of, "name", str(of)))
def test_no_access_is_unordered(kind, cls, knobs, monkeypatch):
    limits, make = [], Limit.make
    monkeypatch.setattr(Limit, "make", lambda *of: limits.append(make(*of)) or limits[-1])
    world = steps(kind, partial(small, cls, **knobs))
    assert bool(limits) == (kind == "fsdp2-wide" and issubclass(cls, methods.TopK))
    assert not world.wrong(), "\n".join(world.wrong()[:8])
    # Counters of the user's optimizer are on the host; here, once loaded, they look as if the device had them.
    waited = {place: count for place, count in world.waited.items() if place != "user"}
    assert sum(waited.values()) <= 1, f"the host waits for the guard's flag alone, not at {waited}"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_nor_without_the_guard_for_whose_flag_the_host_waits(kind):
    counts = {"feedback": "gradients"}
    for cls, knobs in ((methods.SCAPE, {"offload": True}), (methods.PowerSGD, {}), (methods.TAGC, counts)):
        world = steps(kind, partial(small, cls, **knobs), guard=False)
        assert not world.wrong(), "\n".join(world.wrong()[:8])


def test_two_streams_that_use_one_table_have_a_copy_each():
    """Seeds, the places of programs, and tables of segments: a copy on one stream is not there yet on another."""
    world, format, pool = World(), quant.Format(8, 64), Pool([3, 5])
    drawn = Seeds(((0, 64, 3), (64, 192, 5)), pool)
    for _ in range(2):
        with Watch(), on(Stream()):
            rows = torch.randn(2, 192)
            quant.quantize(rows, format, torch.empty(2, 192, dtype=torch.int8), torch.empty(2, 3), drawn)
    assert not world.wrong(), world.wrong()[:4]
    assert "quant.quantize" not in str(world.syncs)


def test_what_two_streams_tell_the_guard_is_in_no_order():
    """The hops of HSDP and the micro-batches of an engine observe where they are; only ``agree`` comes after all."""
    world, guard, streams = World(), Guard([]), [Stream(), Stream()]
    with Watch():
        gradient = torch.ones(4)
        for stream in streams:
            stream.wait_stream(world.main)
            with on(stream):
                guard.observe(gradient)
                guard.note(torch.zeros(3))
        for stream in streams:
            world.main.wait_stream(stream)
        assert guard.agree(gradient.device) == (True, False)
    assert not world.wrong(), world.wrong()[:4]


def test_pinned_memory_belongs_to_a_copy_until_that_is_over():
    """Written through numpy or by torch, or read, by a host that has not waited; and by one that has."""
    cpu = torch.device("cpu")
    for touch in (lambda of: of.numpy().fill(1), lambda of: of.fill_(1), lambda of: of.tolist()):
        for waits in (False, True):
            world = World()
            with Watch():
                pinned, there = devices.host_memory((4,), cpu), torch.ones(4)
                pinned.copy_(there, non_blocking=True)
                event = devices.mark(cpu)
                if waits:
                    event.synchronize()
                touch(pinned)
            assert bool(world.wrong()) is not waits


def test_a_launch_writes_where_its_kernel_stores():
    """Read off the kernels' source: some that go through helpers, additions and other kernels."""
    with dry_cuda.run():
        found = {family.rpartition(".")[2]: module for family, module in backends.host_code.get().items()}
    expected = {
        "mask._scatter": {"out"}, "mask._gather_keep": {"payload", "residual_out"},
        "sparse._spread": {"words", "offsets"}, "sparse._third": {"state", "counts", "ends", "marks", "guess"},
        "sparse._first": {
            "total", "second_out", "state", "counts", "ends", "over", "near", "marks", "sums",
            "limited", "squares", "cuts", "residues", "bounded", "usual_now",
        },
        "sparse._list": {"total", "positions", "payload", "words", "codes", "scales", "arrived"},
        "quant._sum_rows": {"out"},
        "mask._from_lists": {"words", "bit_offsets"}, "moments._advance": {"next_moment", "gradient", "common_out"},
        "moments._add_up": {"payload", "residual_out"}, "rows._pack": {"rows"}, "sketch._restore": {"out"},
        "norms._bound": {"flat", "rows", "sums", "ends", "factors", "residues", "bounded", "updated"},
    }  # fmt: skip
    for kernel, names in expected.items():
        family, name = kernel.split(".")
        assert written(getattr(found[family], name).function) == names, kernel
    kernels = [of for module in found.values() for of in vars(module).values() if isinstance(of, dry_cuda._Kernel)]
    storing = [of for of in kernels if "tl.store(" in inspect.getsource(of.function)]
    assert len(storing) > 30 and all(written(of.function) for of in storing)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_a_step_that_a_graph_records_is_refused(kind, monkeypatch):
    """Before anything of it is done: the host's part of a step would be done once, and never again."""
    monkeypatch.setattr(streamorder._Module, "is_current_stream_capturing", staticmethod(lambda: True))
    with pytest.raises(ThinwireError, match="a whole step cannot be captured in a CUDA graph"):
        steps(kind, partial(small, methods.Int8))


def test_streams_of_ours_go_before_those_that_compute():
    """As FSDP2's own do: else the model's large kernels fill the GPU, and a bucket's small ones wait behind them."""
    made = steps("ddp", methods.Dense).priorities
    assert {place.partition(":")[0] for place in made} == {"worker.py"} and set(made.values()) == {-1}


SETTABLE = hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers")


@pytest.mark.skipif(not SETTABLE, reason="torch has it from 2.13 on")
def test_fsdp2_computes_on_while_a_module_s_gradients_wait_for_their_reduction():
    """torch keeps one input: the stream that computes would wait for the network at each module. The plan has it."""
    torch.manual_seed(0)
    model = build("fsdp2")
    handle = thinwire.compress(model, torch.optim.AdamW(model.parameters()), "dense", steps=100)
    with Watch():
        model(torch.randn(4, WIDTH)).sum().backward()
    [context] = {group.comm_ctx for _, group in handle.engine.groups}
    assert context.reduce_scatter_max_input_buffers == 2
    largest = max(sum(piece.numel for piece in pieces) for pieces in handle.engine.layout().buffers)
    assert handle.plan.memory_bytes == handle.plan.dry_run.memory.peak + 4 * largest
    handle.close()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "hsdp"])
def test_the_time_that_was_waited_is_told_by_events(kind):
    """Here an operation takes a millisecond: those of the last exchange, and of each gathering of weights.

    (torch 2.15 gathers in fewer operations: there are six gatherings, and the exchange.)"""
    gathers_longer = torch.__version__ < "2.15"
    assert steps(kind, methods.Dense).exposed > (2 if kind == "ddp" else 8 if gathers_longer else 6)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_buckets_take_turns_on_one_stream_and_the_model_computes_on(kind, monkeypatch):
    """What a bucket launches comes behind the network of the one before: one stream encodes, sends and decodes, and
    needs one bucket's memory. Of all that, the stream that computes hears nothing before its backward pass is over."""
    turns: list[tuple[Stream, str, int, bool, bool]] = []  # stream; launch or collective, number; behind the last; seen

    def note(what: str) -> None:
        world, stream = World.now, streamorder.current()
        numbers = [number for other, verb, number, *_ in turns if verb.startswith("all_") and other is stream]
        behind = stream.clock.get(stream, 0) >= max(numbers, default=0)
        seen = bool(numbers) and world.main.clock.get(stream, 0) >= numbers[0]
        turns.append((stream, what, world.count, behind, seen))

    def launch(world: World, kernel: Callable[..., None], arguments: Any) -> None:
        launched(world, kernel, arguments)
        note(kernel.__name__)

    def run(group: streamorder.Echo, verb: str, *of: Any) -> Any:
        work = ran(group, verb, *of)
        note(verb)
        return work

    launched, ran = World.launch, streamorder.Echo._run
    monkeypatch.setattr(World, "launch", launch)
    monkeypatch.setattr(streamorder.Echo, "_run", run)
    World()
    model, method = build(kind), thinwire.Int8(smallest=16)
    handle = thinwire.compress(model, optimizer := torch.optim.AdamW(model.parameters()), method, steps=100)
    with Watch():
        for _ in range(3):
            loss = model(torch.randn(4, WIDTH)).sum()
            turns.clear()
            loss.backward()
            of_backward = list(turns)
            optimizer.step()
            optimizer.zero_grad()
    handle.close()
    [stream] = {stream for stream, what, *_ in of_backward if what == "_quantize"}
    turns = [turn for turn in of_backward if turn[0] is stream]
    names = [what for _, what, *_ in turns]
    assert names.count("_quantize") > 1 and names.count("all_to_all") > 1 and all(behind for *_, behind, _ in turns)
    assert kind != "ddp" or not any(seen for *_, seen in turns)


def test_every_wait_of_ours_is_needed():
    """Each is left out in turn, in some run that has it: something is unordered then."""
    runs: list[tuple[str, Callable[[], methods.Method], bool]] = [
        ("ddp", partial(small, methods.SCAPE, offload=True), False), ("ddp", partial(small, methods.PowerSGD), True),
        ("fsdp2-shared", partial(small, methods.SDP4Bit), True),
        ("fsdp2-unshard", partial(small, methods.ZeROPP), True), ("hsdp-bf16", methods.Dense, True),
        ("ddp", partial(small, methods.PowerSGD), False),
        ("ddp", partial(small, methods.TAGC, feedback="gradients"), False),
    ]  # fmt: skip
    needed: dict[str, bool] = {}
    for kind, make, guard in runs:
        for wait in steps(kind, make, guard=guard).waits:
            needed[wait] = needed.get(wait, False) or bool(steps(kind, make, guard=guard, deaf=wait).wrong())
    assert len(needed) > 6
    unneeded = [wait for wait, shows in needed.items() if not shows]
    if inspect.getsource(foreach_reduce).count("all_reduce_input = reduce_output") > 1:  # torch 2.15 keeps it itself
        unneeded = [wait for wait in unneeded if not re.fullmatch(r"fsdp2_module\.py:\d+ keep", wait)]
    assert not unneeded
