"""The road of a buffer: what a stage does beside its method, what is made once, and the thread beside the backward."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from breadth import falls_on
from thinwire import methods
from thinwire.base.alignment import same_memory
from thinwire.codecs.appended import Appended
from thinwire.codecs.cast import Bf16
from thinwire.codecs.intquant import Int4
from thinwire.core import road
from thinwire.core.bucket import Bucket, Piece
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method
from thinwire.core.outliers import OutlierClip
from thinwire.core.road import Stage, _Compositions, shard_of
from thinwire.core.state import State, dump_state
from thinwire.core.worker import Worker
from thinwire.methods.parts.feedback import Updates
from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.ops.norms import reference
from thinwire.ops.rows import CopyTable
from thinwire.proof.ranks import ThreadEngine, Threads, VirtualRank, flat_copy
from thinwire.proof.record import Setup, small

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")
SHAPES = {"a": (8, 6), "b": (3,), "c": (5, 4), "d": (7,)}
DENSE = frozenset({"b", "c"})


def gradient_of(rank: int, name: str) -> Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(9 * rank + ord(name))).flatten()


def stage_of(engine: ThreadEngine, name: str, **more: Any) -> Stage:
    method = small(type(methods.resolve(name)), **{"feedback": "gradients"} if name == "topk" else {})
    method.state = State()
    method.begin(engine.run(9, weights=engine.weights()))
    return Stage(method, DENSE, engine.hops[0], Guard([engine.hops[0].comm]), engine.ledger, **more)


def reduced(buffers: str, dtype: torch.dtype, name: str, scale: float = 1.0) -> list[dict[str, Tensor]]:
    """Per rank: the means of parameters that come in such ``buffers``, "ab cd": a and b in one."""
    world = Threads(3)

    def body(rank: int) -> dict[str, Tensor]:
        found = {}
        engine = ThreadEngine("all_reduce", world, rank, Ledger(), SHAPES)
        stage = stage_of(engine, name, scale=None if scale == 1 else lambda device: torch.tensor(scale, dtype=dtype))
        for step in range(2):
            stage.step = step
            for names in buffers.split():
                here = ThreadEngine("all_reduce", world, rank, Ledger(), {of: SHAPES[of] for of in names})
                flat = torch.cat([gradient_of(rank, of) for of in names]).to(dtype) * scale
                stage.reduce(flat, here.pieces, flat)
                found |= {(step, of.name): flat[of.columns] / scale for of in here.pieces}
            assert stage.guard.agree(CPU)[0]
        return found

    return world.run(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "dense"])
def test_no_bit_depends_on_the_engines_buckets_or_on_a_power_of_two(name, dtype):
    """Of what stays dense and of what does not, all ranks alike; the first is the mean."""
    whole = reduced("abcd", dtype, name)
    for rank in whole:
        assert all(torch.equal(rank[key], whole[0][key]) for key in rank)
    for of in DENSE:
        mean = torch.stack([gradient_of(rank, of).to(dtype).float() for rank in range(3)]).sum(0) * (1 / 3)
        assert (whole[0][1, of].float() - mean).abs().max() <= (1e-6 if dtype == torch.float32 else 0.02)
    others = [reduced("ab cd", dtype, name), reduced("dcba", dtype, name), reduced("b a cd", dtype, name)]
    for other in [*others, reduced("abcd", dtype, name, scale=64.0)]:
        assert all(torch.equal(other[0][key], whole[0][key]) for key in whole[0])


def test_a_stage_sees_what_comes_in_and_counts_it():
    """A value that is not finite, and the bytes of the stock engine."""
    engine = ThreadEngine("all_reduce", Threads(2), 0, Ledger(), SHAPES)
    assert Stage.counts_dense
    for counts in (True, False):
        stage = stage_of(engine, "topk", counts_dense=counts)
        stage.carry = lambda *how, **more: None
        engine.ledger.close_step()
        flat = torch.ones(engine.numel)
        stage.reduce(flat, engine.pieces, flat)
        sent = engine.ledger.current.dense_bytes
        assert sent == (4 * engine.numel if counts else 0) and not stage.guard._residues[-1].isnan()
        flat[3] = torch.nan
        stage.reduce(flat, engine.pieces, flat)
        assert stage.guard._residues[-1].isnan()


@pytest.mark.parametrize("name", ["dense", "fp32", "bf16", "int8", "sdp4bit", "zeropp", "qsdp"])
def test_no_gradient_is_read_for_the_guard_whose_mean_shows_what_is_not_finite(name):
    """On all ranks, whichever rank has it: so methods without a state save a pass."""
    world = Threads(2)

    def body(rank: int) -> list[bool]:
        seen = []
        for bad in (torch.nan, torch.inf, -torch.inf):
            engine = ThreadEngine("all_reduce", world, rank, Ledger(), SHAPES)
            stage, flat = stage_of(engine, name), torch.ones(engine.numel)
            stage.dense |= {"d"}
            flat[5] = bad if rank else 1.0
            stage.reduce(flat, engine.pieces, flat)
            seen.append(not stage.guard._residues and not bool(flat[engine.pieces[0].columns].isfinite().all()))
        return seen

    assert world.run(body) == [[True] * 3] * 2


@pytest.mark.parametrize("way", ["reduce", "carry"])
@pytest.mark.parametrize("name", ["int8", "fp32", "dense"])
def test_no_bucket_keeps_the_engines_buffer_alive(name, way):
    engine = ThreadEngine("all_reduce", Threads(1), 0, Ledger(), SHAPES)
    stage = stage_of(engine, name)
    stage.dense = frozenset()
    flat = torch.ones(engine.numel)
    send = [partial(Method.deliver, stage.method)] if way == "carry" else []
    getattr(stage, way)(flat, engine.pieces, flat, *send)
    alive = weakref.ref(flat)
    memory = weakref.ref(flat.untyped_storage())
    assert flat.eq(1).all()
    del flat
    gc.collect()
    assert alive() is None and memory() is None
    for _, bucket in stage._buckets.once(engine.pieces, torch.float32, list)[0].buckets:
        assert not bucket.rows.numel() and not bucket.mean.numel()


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
def test_a_flush_delivers_what_waits_and_nothing_else(topology):
    """The means of what waited on all ranks, of what is compressed; zeros of the rest; and nothing waits then."""
    world = Threads(2)

    def body(rank: int) -> tuple[dict[str, Tensor], Tensor, list[Any]]:
        engine = ThreadEngine(topology, world, rank, Ledger(), SHAPES)
        stage, rows = stage_of(engine, "topk"), engine.rows
        flat = torch.cat([gradient_of(rank, of).new_ones(piece.numel) * (1 + rank + i)
                          for i, (of, piece) in enumerate(zip(SHAPES, engine.pieces, strict=True))])  # fmt: skip
        flat += 0.01 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(rank))
        out = torch.empty(engine.numel // rows) if engine.owner else flat
        for step in (0, 1, 2):
            stage.step = step
            stage.reduce(flat.clone() if engine.owner else flat, engine.pieces, out)
            stage.method.state.commit()
        waits = dump_state(stage.method.state)
        zeros = torch.zeros(engine.numel)
        out = torch.full((engine.numel // rows,), 0.0) if engine.owner else zeros
        stage.carry(zeros, engine.pieces, out, partial(Method.deliver, stage.method))
        stage.method.state.commit()
        after = dump_state(stage.method.state)
        return waits, out, [after, engine.pieces, rows]

    found = world.run(body)
    for rank, (_, out, (after, pieces, rows)) in enumerate(found):
        assert after.keys() == found[0][0].keys() and not any(values.any() for values in after.values())
        for piece in pieces:
            at, span = piece.offset, piece.numel // (rows if topology == "reduce_scatter" else 1)
            arrived = out[at : at + span]
            if piece.name in DENSE:
                assert not arrived.any()
                continue
            waited = sum(of[0][f"residual/{piece.name}"] for of in found) / 2
            mine = waited[rank] if topology == "reduce_scatter" else waited.flatten()[:span]
            assert mine.any() and torch.allclose(arrived, mine, atol=1e-6)


def test_a_step_at_which_all_is_delivered_is_dense_and_leaves_nothing():
    """Of the method; what stays dense beside it is as ever."""
    engine = ThreadEngine("all_reduce", Threads(1), 0, Ledger(), SHAPES)
    stage = stage_of(engine, "topk", flush_at=2)
    total, given = torch.zeros(engine.numel), torch.cat([gradient_of(0, of) for of in SHAPES])
    for step in range(4):
        stage.step, flat = step, given.clone()
        stage.reduce(flat, engine.pieces, flat)
        stage.method.state.commit()
        total += flat
        waits = any(values.any() for values in dump_state(stage.method.state).values())
        assert waits == (step in (1, 3)) and torch.equal(flat, given) == (step == 0)
        if step == 2:
            assert torch.allclose(total, 3 * given, atol=1e-5)


def test_what_was_made_for_older_buckets_of_a_parameter_is_freed_with_its_memory():
    made: _Compositions[object] = _Compositions()
    a, b, c = (Piece(name, 0, 4) for name in "abc")
    first, other = made.once((a, b), torch.float32, object), made.once((c,), torch.float32, object)
    made.arena.borrow("rows", (4,), torch.float32, CPU)
    assert made.once((a, b), torch.float32, object) is first and made.once((c,), torch.float32, object) is other
    assert made.arena._memory
    made.once((b,), torch.float32, object)
    assert made._cached.keys() == {((c,), torch.float32), ((b,), torch.float32)} and not made.arena._memory
    assert made.once((c,), torch.float32, object) is other and made.once((a, b), torch.float32, object) is not first
    half = made.once((c,), torch.bfloat16, object)
    assert half is not other and made.once((c,), torch.bfloat16, object) is half


def test_jobs_run_one_after_the_other_on_one_thread_beside():
    """In the order in which they came, each with its future; only the wait for a step's last one is exposed time."""
    ledger, ran = Ledger(), []
    worker, may = Worker(ledger), threading.Event()

    def job(number: int) -> Tensor:
        may.wait(20)
        ran.append((number, threading.current_thread()))
        return torch.tensor(number)

    worker.drain()  # there is nothing to wait for
    futures = [worker.submit(lambda n=n: job(n), CPU, last=False) for n in range(3)]
    assert not ran and not any(future.done() for future in futures)
    may.set()
    worker.drain()
    assert [int(future.wait()) for future in futures] == [0, 1, 2] == [number for number, _ in ran]
    assert "exposed" not in ledger.current.seconds
    began = time.perf_counter()
    worker.submit(lambda: time.sleep(0.02) or torch.tensor(0), CPU, last=True)
    worker.drain()
    worker.close()
    assert 0.02 <= ledger.current.seconds["exposed"] <= time.perf_counter() - began
    (thread,) = {thread for _, thread in ran}
    assert thread is not threading.current_thread() and not thread.is_alive()
    worker.close()
    assert int(worker.submit(lambda: torch.tensor(7), CPU, last=False).wait()) == 7  # a thread of its own again
    worker.close()


def test_what_a_job_raises_is_raised_where_it_is_waited_for_and_no_job_behind_it_is_run():
    worker, ran = Worker(Ledger()), []
    futures = [worker.submit(lambda: torch.tensor(1), CPU, last=False), worker.submit(lambda: 1 // 0, CPU, last=False)]
    futures += [worker.submit(lambda: ran.append(1), CPU, last=last) for last in (False, True)]
    with pytest.raises(ZeroDivisionError):
        worker.drain()
    assert int(futures[0].wait()) == 1 and not ran
    for future in futures[1:]:
        with pytest.raises(ZeroDivisionError):
            future.wait()
    worker.drain()  # said once
    assert int(worker.submit(lambda: torch.tensor(2), CPU, last=True).wait()) == 2
    worker.drain()
    worker.close()


@pytest.mark.parametrize("name", ["fp32", "dense"])
@pytest.mark.parametrize(
    ("topology", "size", "per_node"),
    [("all_reduce", 3, 1), ("reduce_scatter", 3, 1), ("hsdp", 6, 2), ("two_level", 6, 2), ("two_level_owner", 6, 3)],
)
def test_a_road_gives_the_mean_and_counts_what_dense_would_send(topology, size, per_node, name):
    """All of it, or this rank's row; as many bytes as the road says of each parameter, in its dtype; at every hop the
    guard sees what is not finite; and the step is that of all stages."""
    world, shapes = Threads(size), {"a": (12, 2), "b": (6,)}

    def body(rank: int) -> tuple[Tensor, Tensor, list[str]]:
        engine = ThreadEngine(topology, world, rank, Ledger(), shapes, per_node)
        method = small(type(methods.resolve(name)))
        method.state = State()
        run = engine.run(9, weights=engine.weights())
        method.begin(run)
        road, wrong = engine.road(method, run), []
        road.step = 4
        if road.step != 4 or any(stage.step != 4 for stage in road.stages) or road.last is not road.stages[-1]:
            wrong.append("step")
        for dtype in (torch.float32, torch.bfloat16):
            flat = torch.randn(engine.numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
            given = flat.clone()
            out = torch.full((engine.numel // engine.rows,), torch.nan, dtype=dtype) if engine.owner else None
            mean = road.reduce(flat, engine.pieces, out)
            if mean is not (flat if out is None else out):
                wrong.append("returned")
            sent = sum(road.dense_bytes(replace(of, dtype=dtype)) for of in engine.parameters.values())
            if engine.ledger.current.dense_bytes != pytest.approx(sent) or not sent:
                wrong.append(f"{dtype}: counted {engine.ledger.current.dense_bytes}, not {sent}")
            engine.ledger.close_step()
            if dtype == torch.float32:
                found = given, mean.clone()
        wrong += [f"piece {of.name}" for of in engine.pieces
                  if topology != "hsdp" and road.piece(engine.parameters[of.name]).numel != of.numel]  # fmt: skip
        return (*found, wrong)

    found = world.run(body)
    assert not any(wrong for _, _, wrong in found), found[0][2]
    mean = torch.stack([given for given, _, _ in found]).double().mean(0)
    for rank, (_, arrived, _) in enumerate(found):
        rows = mean.view(len(mean) // len(arrived), -1)
        assert (arrived - rows[rank % len(rows)]).abs().max() < 1e-6


SIDE_BY_SIDE = {"a": (4, 64), "b": (6, 64), "c": (6,)}
"""On two ranks what is compressed, a and b, lies side by side in the engine's rows, and is a multiple of 64 there."""


def trained(make: Callable[[], Method]) -> list[tuple[Tensor, dict[str, Tensor], bool]]:
    """By rank: the weights after five steps, the state, and whether what is compressed stays in the engine's buffer."""
    world = Threads(2)

    def body(number: int) -> tuple[Tensor, dict[str, Tensor], bool]:
        engine = ThreadEngine("reduce_scatter", world, number, Ledger(), SIDE_BY_SIDE)
        rank = VirtualRank(make(), engine, 9, optimizer=partial(torch.optim.AdamW, lr=0.1))
        stage = rank.road.last
        stage.bound = OutlierClip(2.0, {name: of.local for name, of in engine.parameters.items()}, 1.0)
        for step in range(5):
            generator = torch.Generator().manual_seed(9 * step + number)
            flat = torch.randn(engine.numel, generator=generator) * (100 if step == 3 else 1)
            [packed, *_] = stage._packed(flat, engine.pieces)
            stays = packed.buckets[0][1].lies_in(flat)
            rank.road.step, rank.out = step, torch.empty(engine.numel // 2)
            rank.road.reduce(flat, engine.pieces, rank.out)
            rank.road.end_pass()
            rank.finish(step, torch.ones(()))
            stage.bound.commit()
        assert stage.bound.facts()["cut"] >= 2
        return flat_copy(rank.weights), dump_state(rank.method.state), stays

    return world.run(body)


BESIDE = {"a": (8, 64), "b": (5,), "c": (6, 64), "d": (12, 2)}
"""On three ranks b and d, which stay dense, have an even number of values in an owner's row, on two an odd one."""
WHERE = (
    Setup("all_reduce", 3), Setup("reduce_scatter", 3), Setup("hsdp", 4, 2), Setup("two_level", 4, 2),
    Setup("two_level_owner", 4, 2), Setup("all_reduce", 1), Setup("reduce_scatter", 1),
)  # fmt: skip


def turns_of(cls: type[Method]) -> list[Setup]:
    """Where ``cls`` is tried: two levels on DDP would send moments in chunks that DDP has whole."""
    whole = cls.name in ("scape", "onebit-adam")
    places = [w for w in WHERE if w.engine in cls.engines and not (whole and w.topology == "two_level")]
    return [where for where in places if falls_on(methods.TABLE.index(cls), where, places)]


class Found(NamedTuple):
    """What a run left on a rank: means and weights by step, the state, and bytes and calls by step."""

    values: list[Tensor]
    state: dict[str, Tensor]
    sent: list[float]
    calls: list[int]


def sent_beside(cls: type[Method], where: Setup, **knobs: Any) -> list[Found]:
    """By rank: five steps of ``cls`` with dense parameters in each buffer; one is not finite, the last one flushes."""
    world, knobs = Threads(where.size), {"dense": ("b", "d")} | knobs

    def body(number: int) -> Found:
        engine = ThreadEngine(where.topology, world, number, Ledger(), BESIDE, where.per_node)
        rank = VirtualRank(small(cls, **knobs), engine, 9, optimizer=partial(cls.OPTIMIZER, lr=0.1))
        found, stage = Found([], {}, [], []), rank.road.last
        for step in range(5):
            flat = torch.randn(engine.numel, generator=torch.Generator().manual_seed(9 * step + number))
            if step == 3 and number == 0:
                flat[engine.pieces[1].offset] = torch.nan
            stage.flush_at = 4
            rank.road.step, rank.out = step, flat.new_empty(engine.numel // engine.rows) if engine.owner else flat
            rank.road.reduce(flat, engine.pieces, rank.out)
            rank.road.end_pass()
            found.values.append(rank.out.clone())
            if step == 3:
                rank.undo()
            else:
                rank.finish(step, torch.ones(()))
                found.values.append(flat_copy(rank.weights))
            found.sent.append(sum(engine.ledger.current.bytes.values()))
            found.calls.append(engine.ledger.current.calls.total())
            engine.ledger.close_step()
        found.state.update(dump_state(rank.method.state))
        return found

    return world.run(body)


@pytest.mark.parametrize("cls", [cls for cls in methods.TABLE if "dense" not in cls.ABSENT], ids=lambda cls: cls.name)
def test_no_bit_depends_on_what_travels_in_one_message(cls, monkeypatch):
    """Neither of what stays dense nor of what does not, nor of the state; and as many bytes are sent."""
    turns = turns_of(cls)
    together = [sent_beside(cls, where) for where in turns]
    monkeypatch.setattr(Exchange, "_with_rider", lambda self, codec, *_: codec)
    for where, ranks in zip(turns, together, strict=True):
        for one, apart in zip(ranks, sent_beside(cls, where), strict=True):
            assert one.state.keys() == apart.state.keys()
            pairs = zip([*one.values, *one.state.values()], [*apart.values, *apart.state.values()], strict=True)
            assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in pairs)
            assert one.sent == apart.sent
            assert all(a <= b for a, b in zip(one.calls, apart.calls, strict=True))


@pytest.mark.parametrize(
    ("text", "topology", "saved"),
    [("int8", "all_reduce", 2), ("sdp4bit", "all_reduce", 2), ("loco", "all_reduce", 2), ("qsdp", "all_reduce", 2),
     ("sign", "all_reduce", 0), ("topk", "all_reduce", 0), ("bf16", "all_reduce", 0)]
    + [(name, "reduce_scatter", 1) for name in ("int8", "sdp4bit", "loco", "sign", "topk", "dgc", "trickle:merged")]
    + [("radius", "reduce_scatter", 0)],
)  # fmt: skip
def test_where_rows_go_to_their_owners_one_message_goes_in_place_of_two(text, topology, saved, monkeypatch):
    """As many fewer in every step but those of a dense start and the flush, in which the network sums."""
    method = methods.resolve(text)
    knobs = {"mask": "merged"} if text.endswith("merged") else {}
    together = sent_beside(type(method), Setup(topology, 3), **knobs)
    monkeypatch.setattr(Exchange, "_with_rider", lambda self, codec, *_: codec)
    for one, apart in zip(together, sent_beside(type(method), Setup(topology, 3), **knobs), strict=True):
        assert [b - a for a, b in zip(one.calls[1:4], apart.calls[1:4], strict=True)] == [saved] * 3


@pytest.mark.parametrize("where", [Setup("all_reduce", 3), Setup("reduce_scatter", 3), Setup("all_reduce", 1)], ids=str)
@pytest.mark.parametrize("text", ["int8", "sdp4bit", "loco", "topk"])
def test_no_bit_depends_on_where_dense_rows_are_packed(text, where, monkeypatch):
    """Behind the wire, for which a method names the codec; elsewhere; behind room for another wire than is sent."""
    cls, found = type(methods.resolve(text)), [sent_beside(type(methods.resolve(text)), where)]
    describe = cls.describe
    for codec in (None, Int4(64), Bf16()):
        monkeypatch.setattr(cls, "describe", lambda self, codec=codec: replace(describe(self), row_codec=codec))
        found.append(sent_beside(cls, where))
    for other in found[1:]:
        for one, apart in zip(found[0], other, strict=True):
            pairs = zip([*one.values, *one.state.values()], [*apart.values, *apart.state.values()], strict=True)
            assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in pairs)
            assert one[2:] == apart[2:] and one.state.keys() == apart.state.keys()


@pytest.mark.parametrize("text", ["int8", "sdp4bit"])
@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
def test_dense_rows_are_packed_and_unpacked_where_their_message_is(text, topology, monkeypatch):
    """They are not copied into it, nor out of it."""
    kept, packed = Appended._split, []

    def split(self: Appended, message: Tensor) -> tuple[Tensor, Tensor]:
        found = kept(self, message)
        if len(message) == len(self.rows) and sys._getframe(1).f_code.co_name in ("_encode_and_keep", "_decode"):
            packed.append(same_memory(found[1], self.rows))
        return found

    monkeypatch.setattr(Appended, "_split", split)
    sent_beside(type(methods.resolve(text)), Setup(topology, 3))
    assert packed and all(packed)


@pytest.mark.parametrize("name", ["int8", "loco"])
def test_a_dense_parameter_that_is_not_contiguous_travels_as_one_that_is(name):
    world = Threads(3)

    def body(rank: int) -> list[Tensor]:
        engine, means = ThreadEngine("all_reduce", world, rank, Ledger(), SHAPES), []
        formed = [replace(of, form=((5, 4), (1, 5))) if of.name == "c" else of for of in engine.pieces]
        for pieces in (tuple(engine.pieces), tuple(formed)):
            flat = torch.cat([gradient_of(rank, of) for of in SHAPES])
            stage_of(engine, name).reduce(flat, pieces, flat)
            means.append(flat)
        return means

    assert all(torch.equal(*means) for means in world.run(body))


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
def test_what_travelled_in_a_step_that_failed_is_averaged_in_the_next_one(topology):
    """The stage is not made anew: an error behind the exchange leaves nothing that says that the means are there."""
    world, owner = Threads(3), topology == "reduce_scatter"

    def body(rank: int) -> list[Tensor]:
        engine = ThreadEngine(topology, world, rank, Ledger(), SHAPES)
        stage, means = stage_of(engine, "int8"), []
        stage.dense |= {"d"}
        places = shard_of(engine.pieces) if owner else engine.pieces
        for step in range(5):
            stage.step, flat = step, torch.full((engine.numel,), 3.0 * (rank + step))
            out = flat.new_empty(engine.numel // 3) if owner else flat
            if step in (0, 3):
                with patch.object(stage.exchange, "_decode_mean", lost), patch.object(stage.exchange, "_decode", lost):
                    with pytest.raises(OSError):
                        stage.reduce(flat, engine.pieces, out)
            else:
                stage.reduce(flat, engine.pieces, out)
            means.append(torch.cat([out[of.columns] for of in places if of.name in DENSE]))
        return means

    def lost(*of: object) -> None:
        raise OSError("lost")

    for means in world.run(body):
        for step in (1, 2, 4):
            assert torch.equal(means[step], torch.full_like(means[step], 3.0 * (1 + step)))


@pytest.mark.parametrize("text", ["trickle(density=0.1)", "trickle:merged(density=0.1)", "topk(density=0.1)", "dgc"])
def test_rows_in_the_engines_buffer_are_compressed_as_their_copies_are(text, monkeypatch):
    """Bit for bit: weights and state, with outliers cut, and beside a parameter that stays dense."""

    def make() -> Method:
        return replace(methods.resolve(text), smallest=64, start=1)

    inside = trained(make)
    monkeypatch.setattr(Bucket, "lies_in", lambda bucket, flat: False)
    copied = trained(make)
    assert [stays for *_, stays in inside + copied] == [True, True, False, False]
    for (weights, state, _), (expected, state_expected, _) in zip(inside, copied, strict=True):
        assert torch.equal(weights, expected) and state.keys() == state_expected.keys() and state
        assert all(torch.equal(state[key], state_expected[key]) for key in state)


def bounded(cls: type[Method], where: Setup, how: str) -> list[tuple[dict[str, Tensor], int, int]]:
    """By rank: means, weights and state of five steps, in one of which gradients are cut; how many; norms handed on.

    ``how``: c is "formed", not contiguous; or what is compressed lies "inside" of the engine's buffer, side by side, or
    there and becomes steps as it is "encoded".
    """
    is_inside = how in ("inside", "encoded")
    world, shapes = Threads(where.size), SIDE_BY_SIDE if is_inside else BESIDE

    def body(number: int) -> tuple[dict[str, Tensor], int, int]:
        engine = ThreadEngine(where.topology, world, number, Ledger(), shapes, where.per_node)
        handed, late = list[Tensor](), list[bool]()
        formed = [replace(of, form=((6, 64), (1, 6))) if of.name == "c" else of for of in engine.pieces]
        pieces = tuple(formed) if how == "formed" else engine.pieces
        method = small(cls, dense=("c",) if is_inside else ("b", "d"))
        if how == "encoded":
            method = replace(method, feedback=Updates(delivered_share=1.0))
        rank, found = VirtualRank(method, engine, 9, optimizer=partial(cls.OPTIMIZER, lr=0.1)), {}
        stage, reduce = rank.road.last, method.reduce

        def reduce_with_norms(bucket: Bucket, exchange: Exchange) -> None:
            limit, norms, rows = bucket.limit, bucket.norms, bucket.rows.clone()
            bucket.norms = None  # equal to rounding: all else is equal
            reduce(bucket, exchange)
            if norms is not None:
                expected = torch.stack([rows[:, of.columns].norm() for of in bucket.segments])
                assert torch.allclose(norms, expected * (1 if limit is None else limit.bounds.factors), rtol=1e-5)
                handed.append(norms)
            late.append(limit is not None)
            assert how != "encoded" or step < 2 or bucket.adam.limit is limit  # two steps are begun otherwise

        method.reduce = reduce_with_norms
        stage.bound = OutlierClip(2.0, {name: of.local for name, of in engine.parameters.items()}, 1.0)
        for step in range(5):
            generator = torch.Generator().manual_seed(9 * step + number)
            flat = torch.randn(engine.numel, generator=generator) * (100 if step == 3 else 1)
            rank.road.step, rank.out = step, flat.new_empty(engine.numel // engine.rows) if engine.owner else flat
            rank.road.reduce(flat, pieces, rank.out)
            if is_inside:
                assert stage._packed(flat, pieces)[0].buckets[0][1].lies_in(flat)
            rank.road.end_pass()
            found[f"mean {step}"] = rank.out.clone()
            on_gpu, makes_steps = OutlierClip.apply is None, method.card.step_maker is not None
            assert late.pop() == (on_gpu and makes_steps) or not is_inside
            rank.finish(step, torch.ones(()))
            stage.bound.commit()
            assert stage.guard.agree(CPU)[0]
        found |= {"weights": flat_copy(rank.weights)} | dump_state(method.state) | stage.bound.state_dict()
        return found, int(stage.bound.facts()["cut"]), len(handed)

    return world.run(body)


KEEPING = [cls for cls in methods.TABLE if small(cls).card.keeps_state and small(cls).card.alone_from is None]


@pytest.mark.parametrize(
    ("cls", "how"),
    [(cls, how) for cls in KEEPING if "dense" not in cls.ABSENT for how in ("beside", "formed", "inside", "encoded")
     if how not in ("inside", "encoded") or small(cls).card.rows_apart
     if how != "encoded" or getattr(small(cls), "updates", None)], ids=lambda of: getattr(of, "name", of),
)  # fmt: skip
def test_outliers_are_cut_as_they_are_packed_on_a_gpu_and_no_bit_depends_on_it(cls, how, monkeypatch):
    """Beside what stays dense, wherever it lies; and the method gets the norms, which it would read all values for."""

    def exact(flat: Tensor, table: CopyTable) -> Tensor:  # of rows or of whole parameters: the same bits
        runs = [[of for of in reference.runs(flat, segment)[1:] if of is not None] for segment in table.segments]
        return torch.stack([torch.cat([of.reshape(-1) for of in each]).double().norm() for each in runs]).float()

    monkeypatch.setattr(reference, "_norms", exact)
    turns = turns_of(cls)
    if how != "beside":
        turns = [Setup("all_reduce", 3) if how == "formed" else Setup("reduce_scatter", 2)]
    on_cpu = [bounded(cls, where, how) for where in turns]
    monkeypatch.setattr(road, "devices", SimpleNamespace(streams=lambda device: torch.cuda))
    monkeypatch.setattr(OutlierClip, "apply", None)
    for where, ranks in zip(turns, on_cpu, strict=True):
        for (expected, cut, _), (values, cut_packed, handed) in zip(ranks, bounded(cls, where, how), strict=True):
            assert values.keys() == expected.keys() and cut == cut_packed >= 2 and handed == 5
            assert all(torch.equal(values[key], expected[key]) for key in values)


def test_norms_of_a_step_that_failed_are_not_those_of_an_exchange_after_it(monkeypatch):
    """Between steps nobody takes norms: what an error has left in a bucket is of other rows."""
    engine, seen = ThreadEngine("all_reduce", Threads(1), 0, Ledger(), SHAPES), []
    stage, flat = stage_of(engine, "topk"), torch.ones(engine.numel)
    stage.bound = OutlierClip(2.0, {name: of.local for name, of in engine.parameters.items()})
    monkeypatch.setattr(road, "devices", SimpleNamespace(streams=lambda device: torch.cuda))
    with patch.object(stage.method, "reduce", side_effect=OSError("lost")), pytest.raises(OSError, match="lost"):
        stage.reduce(flat, engine.pieces, flat)
    stage.carry(flat, engine.pieces, flat, send=lambda bucket, exchange: seen.append(bucket.norms))
    assert seen == [None]
