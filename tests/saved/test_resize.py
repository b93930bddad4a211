"""What waits moves to other ranks and engines, and arrives; ``wire.flush``."""

from __future__ import annotations

import math
import tempfile
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ranks
import thinwire
from breadth import dealt, spread
from engines import adamw, build, train
from models import Net, flat, loss_of
from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout
from thinwire.core.method import Method
from thinwire.core.state import dump_state, load_state
from thinwire.methods import TABLE, LocalSteps, OneBitAdam, PowerSGD, Trickle
from thinwire.methods.parts.updates import move_moments
from thinwire.plan.dry_run import largest_state
from thinwire.proof.ranks import Threads
from thinwire.proof.record import Rank, Setup, common, gradient, small
from thinwire.saved import resize
from thinwire.saved.format import Form, Header, from_dcp
from thinwire.saved.resize import move
from threaded import FlatMuon, entries

U = 2.0**-24
COUNTS = {"step": torch.tensor(7), "skipped": torch.tensor(0), "flush": torch.tensor(-1)}
TRIP = (
    Setup("all_reduce", 4), Setup("all_reduce", 2), Setup("all_reduce", 3), Setup("reduce_scatter", 3),
    Setup("reduce_scatter", 2), Setup("hsdp", 4, 2), Setup("hsdp", 6, 3), Setup("two_level_owner", 4, 2),
    Setup("two_level", 4, 2), Setup("all_reduce", 4),
)  # fmt: skip
"""4 -> 2 -> 3 ranks, and DDP -> FSDP2 -> HSDP -> two levels -> DDP."""
WAIT = [cls for cls in TABLE if small(cls).card.keeps_state or cls.name == "int8"]


def make(cls: type, **knobs: Any) -> Any:
    more = {"feedback": "gradients"} if cls.name == "int8" else {}
    outer = {"outer": "topk(feedback='gradients', smallest=0, density=0.25)"} if cls.name == "local-steps" else {}
    return small(cls, **{**more, **outer, **knobs})


class Ranks:
    """All ranks of a place, each with a method that has begun."""

    def __init__(self, cls: type, where: Setup, **knobs: Any) -> None:
        self.where, self.world = where, Threads(where.size)
        self.ranks = [Rank(partial(make, cls, **knobs), where, self.world, number) for number in range(where.size)]
        first = self.ranks[0]
        layout = Layout([first.engine.pieces], [torch.float32])
        shapes = largest_state(layout, first.road, first.method.run)  # all ranks' are
        self.forms = []
        for number, rank in enumerate(self.ranks):
            engine, method = rank.engine, rank.method
            kind: Any = SimpleNamespace(kind=where.engine, levels=engine.levels, hops=engine.hops)
            about = Header.of_run(number, where.size, kind, rank.run, method)
            self.forms.append(Form(about, {**COUNTS, **shapes}))

    def train(self, steps: int | None = None) -> None:
        """Take ``steps``; None: into the steady state, and to the end of a round."""

        def body(number: int) -> None:
            rank, step = self.ranks[number], 0
            while step < (rank.method.card.steady + 4 if steps is None else steps) or not rank.method.rank_equal:
                rank.exchange(step, gradient(number, step, rank.engine.numel))
                rank.record(step)
                step += 1

        self.world.run(body)

    def saved(self) -> dict[str, Tensor]:
        states = [form.pack({**COUNTS, **dump_state(rank.method.state)})
                  for form, rank in zip(self.forms, self.ranks, strict=True)]  # fmt: skip
        return {key: value for state in states for key, value in state.items()}

    def load(self, state: dict[str, Tensor], *, drop: bool = False) -> float:
        for form, rank in zip(self.forms, self.ranks, strict=True):
            values, lost = move(state, form, rank.method, drop=drop)
            load_state(rank.method.state, {key: of for key, of in values.items() if key not in COUNTS})
            rank.method.state_changed()
        return lost

    def delivered(self, deliver: Any = Method.deliver) -> tuple[dict[str, Tensor], float]:
        """What a dense exchange of zeros brings, parameter by parameter, and the largest value that has waited."""
        rows = [of for key, of in self.saved().items() if "/=" not in key and of.is_floating_point()]
        most = max(float(of.abs().max()) for of in rows)

        def body(number: int) -> Tensor:
            rank = self.ranks[number]
            engine = rank.engine
            flat = torch.zeros(engine.numel)
            out = torch.zeros(engine.numel // engine.rows) if engine.owner else flat
            with torch.no_grad():
                method = rank.road.last.method
                rank.road.carry(flat, engine.pieces, out, partial(deliver, method))
            rank.method.state.commit()
            return out

        outs, engine = self.world.run(body), self.ranks[0].engine
        found = {}
        for piece in engine.pieces:
            rows = engine.rows if engine.owner else 1
            parts = [out[piece.offset :][: piece.numel // rows] for out in outs[:rows]]
            found[piece.name] = torch.cat(parts)[: engine.parameters[piece.name].numel]
        return found, most


def places(cls: type) -> list[Setup]:
    found = []
    for where in TRIP:
        if where.engine in cls.engines and (cls.name != "local-steps" or where.topology == "all_reduce"):
            try:
                Rank(partial(make, cls), where, Threads(where.size), 0)
            except ThinwireError:  # takes one level
                continue
            found.append(where)
    return found


class Matrices(Trickle):
    """Trickle of a user whose matrices are Muon's."""

    OPTIMIZER: ClassVar[Any] = FlatMuon


def mean_momentum(there: Ranks, name: str) -> tuple[Tensor, Tensor]:
    """The mean over nodes (without nodes: ranks) of Muon's momenta of ``name``, and each of them, (nodes, numel)."""
    rank, where = there.ranks[0], there.where
    rows = [of.flatten() for key, of in sorted(there.saved().items()) if key.endswith(f"/second/{name}")]
    inside = where.per_node if where.engine == "hsdp" else 1  # whose ranks hold a shard each
    each = torch.stack([torch.cat(rows[at : at + inside]) for at in range(0, len(rows), inside)])
    each = each[:, : rank.engine.parameters[name].numel]
    return each.mean(0), each


@pytest.mark.parametrize("before", [Setup("all_reduce", 4), Setup("reduce_scatter", 3), Setup("hsdp", 4, 2)], ids=str)
def test_on_other_ranks_muon_goes_on_from_the_mean_of_the_momenta(before):
    """It is the momentum of the mean gradient, of whole matrices or of shards; it is no second moment."""
    here = Ranks(Matrices, before)
    here.train()
    names = sorted(here.ranks[0].method.update_space.matrices)
    for where in (Setup("all_reduce", 2), Setup("reduce_scatter", 2), Setup("hsdp", 6, 3)):
        there = Ranks(Matrices, where)
        there.load(here.saved())
        for name in names:
            mean, _ = mean_momentum(here, name)
            _, each = mean_momentum(there, name)
            assert mean.any() and torch.allclose(
                each, mean.expand_as(each), rtol=0, atol=8 * U * float(mean.abs().max())
            )
            counts = {int(of) for key, of in there.saved().items() if key.endswith(f"=turned/{name}")}
            assert counts == {int(here.ranks[0].method.state.get("turned", name))}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("cls", WAIT, ids=lambda cls: cls.name)
def test_states_of_unlike_steps_are_refused(cls, count, monkeypatch):
    """The job was killed between the ranks' saves: on the same ranks the first exchange refuses them.

    No memory of the size of the model is taken for them.
    """
    first, *_, last = places(cls)
    here, there = Ranks(cls, first), Ranks(cls, last)
    state = here.saved()
    key = f"rank-0001-of-{first.size:04}/{count}"
    state[key] = torch.tensor({"step": 4, "skipped": 3, "flush": 7}[count])
    if cls.name == "local-steps" and count == "flush":
        there.load(state)  # ranks that step alone have no count in common but that of all steps
        return
    line = r"^the state of rank 1 is of step .*, and that of rank 0 of step 7: load the states of one checkpoint$"
    monkeypatch.setattr(resize, "_rows", lambda *_: pytest.fail("rows were made"))
    for drop in (False, True):
        with pytest.raises(ThinwireError, match=line):
            there.load(state, drop=drop)


@pytest.mark.parametrize("cls", WAIT, ids=lambda cls: cls.name)
def test_what_waits_arrives_after_every_move(cls):
    """The same, value by value, up to the rounding of float32; and nothing of it is left behind."""
    every = places(cls)
    first, *rest = dealt(every, WAIT.index(cls) % 2, range(2)) if len(every) > 3 else every
    here = Ranks(cls, first)
    here.train()
    waits = False
    for where in rest:
        state = here.saved()
        expected, most = here.delivered()
        again, _ = here.delivered()
        assert not any(values.any() for values in again.values()), "nothing waits after a delivery"
        there = Ranks(cls, where)
        there.load(state)
        found, _ = there.delivered()
        for name, values in expected.items():
            counts = max([1.0, *there.ranks[0].method.card.promise.waits.values()])
            assert torch.allclose(found[name], values, rtol=0, atol=32 * U * counts * most), (where, name)
            waits |= bool(values.any())
        here = Ranks(cls, where)
        here.load(state)
    assert waits or cls.name == "lhc", "nothing waited"  # its gradients are not sparse here: they go whole


AVERAGES = (
    "topk(feedback='gradients', smallest=0, density=0.25)", "tagc(feedback='gradients', smallest=0)",
    "powersgd(feedback='gradients', smallest=0)", "sign(feedback='gradients', smallest=0)",
    "int8(feedback='gradients', smallest=0)", "loco(smallest=0)",
)  # fmt: skip
"""Methods that keep errors in one row, in a row for each rank, or in an owner's."""


@pytest.mark.parametrize("outer", AVERAGES[1::2])
@pytest.mark.parametrize("starter", AVERAGES)
def test_what_waits_in_a_start_arrives_after_every_move(starter, outer):
    """Its rows are those of the method of the start, whatever the outer method's are."""
    knobs = {"start": 20, "start_with": starter, "outer": outer}
    here = Ranks(LocalSteps, Setup("all_reduce", 4), **knobs)
    here.train(5)
    state, (expected, most) = here.saved(), here.delivered(LocalSteps.deliver)
    assert any(values.any() for values in expected.values())
    for size in (2, 3):
        there = Ranks(LocalSteps, Setup("all_reduce", size), **knobs)
        there.load(state)
        found, _ = there.delivered(LocalSteps.deliver)
        for name, values in expected.items():
            assert torch.allclose(found[name], values, rtol=0, atol=32 * U * most), (size, name)


@pytest.mark.parametrize(("cls", "where"), [
    (PowerSGD, Setup("hsdp", 4, 2)), (PowerSGD, Setup("two_level", 4, 2)),
    (Trickle, Setup("hsdp", 4, 2)), (Trickle, Setup("two_level_owner", 4, 2)),
], ids=str)  # fmt: skip
def test_each_shard_keeps_its_own_measures_on_another_number_of_nodes(cls, where):
    """What ranks across nodes have in common: how alike they are, PowerSGD's Q. Shards, or ranks of a node, differ."""
    here, there = Ranks(cls, where), Ranks(cls, where._replace(size=6))
    here.train()
    there.load(here.saved())

    def measures(rank: Rank) -> dict[str, Tensor]:
        values = dump_state(rank.method.state)
        return {key: of for key, of in values.items() if key.startswith(("=alike/", "=q/"))}

    pairs = [measures(rank) for rank in here.ranks[:2]]
    assert pairs[0] and all(not torch.equal(of, pairs[1][key]) for key, of in pairs[0].items())
    for values in pairs:
        move_moments(values, (2, 2), (2, 3))
    for number, rank in enumerate(there.ranks):
        moved = measures(rank)
        assert moved and all(torch.equal(of, pairs[number % 2][key]) for key, of in moved.items()), number


@pytest.mark.parametrize("clips", [(0.5, 0.5), (0.5, 0.05), (0.5, 1.0), (1.0, 0.1)], ids=str)
@pytest.mark.parametrize("where", [Setup("all_reduce", 4), Setup("reduce_scatter", 3)], ids=str)
def test_a_moment_moves_whole_whatever_the_last_clip(where, clips):
    """1-bit Adam's, which travels in the optimizer's state: after a last clip tighter than the warm-up's, too."""
    here, there = Ranks(OneBitAdam, where), Ranks(OneBitAdam, where)

    def body(number: int) -> None:
        rank = here.ranks[number]
        for step in range(rank.method.card.steady + 4):
            rank.exchange(step, gradient(number, step, rank.engine.numel))
            rank.finish(step, torch.tensor(clips[step == rank.method.card.steady + 3]))
        there.ranks[number].optimizer.load_state_dict(rank.optimizer.state_dict())
        there.ranks[number].road.step = step

    here.world.run(body)
    there.load(here.saved())
    (expected, most), (found, _) = (side.delivered(OneBitAdam.deliver) for side in (here, there))
    for name, values in expected.items():
        assert torch.allclose(found[name], values, rtol=0, atol=64 * U * most), name


def alike_and_second(there: Ranks) -> tuple[float, float]:
    """r, and the mean over values and ranks of v, in proportion; steps are as 1 / sqrt(r v)."""
    state = there.saved()
    second = torch.cat([values.flatten() for key, values in state.items() if "/second/" in key])
    return float(there.ranks[0].method.state.get("alike", "")), float(second[second > 0].mean())


BEFORE = *TRIP[:2], *TRIP[5:8]
AFTER = Setup("all_reduce", 4), Setup("hsdp", 4, 2), Setup("reduce_scatter", 4)


@pytest.mark.parametrize(("before", "after", "signal"), spread(6, BEFORE, AFTER, (0.0, 0.3, 1.0)))
def test_steps_are_as_long_on_other_ranks_as_if_the_run_had_begun_there(before, after, signal, monkeypatch):
    """v is of a node's gradients, whose noise falls with its ranks, and r tells how much of v the mean over nodes has.

    r follows what it measures in ten steps, but v in a thousand.
    """
    drawn = gradient
    monkeypatch.setitem(globals(), "gradient", lambda *at: drawn(*at) + (signal - 1) * common(at[-1]))
    here, there, begun_there = (Ranks(Trickle, where, start=0) for where in (before, after, after))
    here.train(40)
    begun_there.train(40)
    there.load(here.saved())
    for moved, expected in zip(alike_and_second(there), alike_and_second(begun_there), strict=True):
        assert 0.75 < moved / expected < 1.33


# On the engines.

METHODS = (
    "topk(feedback='gradients', smallest=100, density=0.1)", "sign(smallest=100)",
    "powersgd(smallest=100)",
    "onebit-adam(smallest=100, warmup=2, warmup_bits=8)",
    "local-steps(every=2, outer='topk:feedback:gradients(smallest=100, density=0.1)')",
    "scape(smallest=100, density=0.1, warmup=2)", "trickle(smallest=100, mask='merged')",
)  # fmt: skip


def start(spec: str, kind: str, world: int, **options: Any) -> tuple[Any, Any, Any]:
    model = build(kind, world, net=shorter, **options)
    make = thinwire.AdamS if spec.startswith("scape") else None
    optimizer = adamw(model) if make is None else make(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    return model, optimizer, thinwire.compress(model, optimizer, spec, steps=50)


def shorter() -> Net:
    return Net(layers=1)


def supported(spec: str, kind: str) -> bool:
    return kind in thinwire.methods.resolve(spec).engines


def waiting(wire: Any) -> dict[str, Tensor]:
    """This rank's part of what waits."""
    waits = wire.method.card.promise.waits
    return {key: of for key, of in entries(wire.state_dict()).items() if key.partition("/")[0] in waits}


def _flushed(rank: int, world: int, kind: str) -> list[str]:
    """The next step delivers all; what it brings is the mean of the gradients and of what waited."""
    wrong = []
    for spec in dealt([spec for spec in METHODS if supported(spec, kind)], kind, ("ddp", "fsdp2")):
        model, optimizer, wire = start(spec, kind, world)
        train(model, optimizer, rank, range(4), wire)
        local = spec.startswith("local")
        before, waited = flat(model), waiting(wire)
        if not any(values.any() for values in waited.values()):
            wrong.append(f"{spec}: nothing waited")
        wire.flush(with_next=True)
        if spec.startswith("topk") and kind == "ddp":
            stock = build(kind, world, net=shorter)
            stock.load_state_dict(model.state_dict())
            loss_of(stock, 4, rank).backward()
            loss_of(model, 4, rank).backward()
            for (name, one), other in zip(model.module.named_parameters(), stock.module.parameters(), strict=True):
                expected = other.grad.clone()
                if f"residual/{name}" in waited:
                    rest = waited[f"residual/{name}"].clone()
                    dist.all_reduce(rest)
                    expected += rest.view_as(expected) / world
                if not torch.allclose(one.grad, expected, atol=1e-6):
                    wrong.append(f"{spec}: {name} is not the mean of gradients and of what waited")
            wire.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            train(model, optimizer, rank, [4], wire, poison=None if local else (4, 0))
            state = wire.state_dict()  # of a step that was skipped: it is still due
            wire.load_state_dict(state)
            train(model, optimizer, rank, [4, 5] if local else [4], wire)
        if any(values.any() for values in waiting(wire).values()):
            wrong.append(f"{spec}: something waits")
        sent = sum(wire.last_step()["wire_bytes_per_step"].values())
        train(model, optimizer, rank, [6, 7], wire)
        if not local and sum(wire.last_step()["wire_bytes_per_step"].values()) >= sent:
            wrong.append(f"{spec}: the step that delivers sent no more than another")
        if not any(values.any() for values in waiting(wire).values()) or torch.equal(before, flat(model)):
            wrong.append(f"{spec}: it does not go on")
        loss_of(model, 8, rank).backward()
        said = ""
        try:
            wire.flush(with_next=True)
        except ThinwireError as error:
            said = str(error)
        if "before the step's backward pass" not in said:
            wrong.append(f"{spec}: after the exchange it says '{said}'")
        wire.close()
    _, _, wire = start("int8(smallest=100)", kind, world)
    try:
        wire.flush(with_next=True)
        wrong.append("int8 has something to deliver")
    except ThinwireError as error:
        if "int8(smallest=100): no unsent values are kept" not in str(error):
            wrong.append(str(error))
    return wrong


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_flush_with_the_next_step(kind):
    for wrong in ranks.run(_flushed, 2, kind):
        assert not wrong, "\n".join(wrong)


def _save(rank: int, world: int, kind: str, specs: list[str], folder: str) -> None:
    for number, spec in enumerate(specs):
        model, optimizer, wire = start(spec, kind, world)
        train(model, optimizer, rank, range(4), wire)
        dcp.save({"wire": wire}, checkpoint_id=f"{folder}/{number}")
        wire.close()


def _resized(rank: int, world: int, kind: str, before: str, specs: list[str], folder: str) -> list[str]:
    wrong = []
    for number, spec in enumerate(specs):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = from_dcp(f"{folder}/{number}")
        for policy in ("flush",) if number else ("flush", "redistribute", "reset", None):
            model, optimizer, wire = start(spec, kind, world)
            fresh = wire.state_dict()
            heard = []
            try:
                with warnings.catch_warnings(record=True) as heard:
                    warnings.simplefilter("always")
                    wire.load_state_dict(state, resize=policy)
            except ThinwireError as error:
                if policy is not None or any(not torch.equal(of, fresh[k]) for k, of in wire.state_dict().items()):
                    wrong.append(f"{spec}, {policy}: {error}")
                wire.close()
                continue
            if policy is None:
                wrong.append(f"{spec}: loaded without a word")
            waits = any(of.any() for of in waiting(wire).values())
            if waits != (policy != "reset"):
                wrong.append(f"{spec}, {policy}: {'something' if waits else 'nothing'} waits")
            if (policy == "reset" and rank == 0) != any("were dropped, worth" in str(of.message) for of in heard):
                wrong.append(f"{spec}, {policy}: warned {len(heard)} times")
            if wire.step != 4:
                wrong.append(f"{spec}, {policy}: at step {wire.step}")
            if policy == "flush" and not spec.startswith("onebit"):  # which needs the moments of its optimizer
                losses = train(model, optimizer, rank, [4, 5] if spec.startswith("local") else [4], wire)
                if any(of.any() for of in waiting(wire).values()) or not all(map(math.isfinite, losses)):
                    wrong.append(f"{spec}: something waits after the first step")
            wire.close()
    return wrong


@pytest.mark.parametrize(
    ("before", "after", "specs"),
    spread(
        2, [(("ddp", 2), ("ddp", 3), (0, 5)), (("fsdp2", 2), ("hsdp", 4), (0, 6)), (("ddp", 2), ("fsdp2", 3), (2, 6))]
    ),
    ids=lambda of: "-".join(map(str, of)),
)  # fmt: skip
def test_a_run_goes_on_with_other_ranks(before, after, specs):
    """Refused without a policy, and as each of the three says."""
    chosen = [METHODS[number] for number in specs]
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(_save, before[1], before[0], chosen, folder)
        for wrong in ranks.run(_resized, after[1], after[0], before[0], chosen, folder):
            assert not wrong, "\n".join(wrong)


def _reordered(rank: int, world: int, specs: list[str]) -> list[str]:
    """The nodes of an HSDP mesh are made of other ranks: each goes on with the state of the rank that had its place."""
    wrong, states = [], [None] * world
    for spec in specs:
        model, optimizer, wire = start(spec, "hsdp", world)
        train(model, optimizer, rank, range(4), wire)
        dist.all_gather_object(states, wire.state_dict())
        wire.close()
        mesh = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("replicate", "shard"))
        model, optimizer, wire = start(spec, "hsdp", world, mesh=mesh)
        wire.load_state_dict({key: value for state in states for key, value in state.items()}, resize="redistribute")
        former, now = entries(states[[0, 2, 1, 3][rank]]), entries(wire.state_dict())
        unlike = [key for key, value in now.items() if key != "about" and not torch.equal(value, former[key])]
        if unlike or not any(values.any() for values in waiting(wire).values()):
            wrong.append(f"{spec}: {unlike}")
        wire.close()
    return wrong


def test_on_a_mesh_of_other_order_each_rank_has_the_state_of_its_place():
    for wrong in ranks.run(_reordered, 4, spread(2, [spec for spec in METHODS if supported(spec, "hsdp")])):
        assert not wrong, "\n".join(wrong)
