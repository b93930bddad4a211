"""What a saved state holds, whose it is, what is refused, and how it goes through ``torch.distributed.checkpoint``."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

import ranks
import thinwire
from breadth import alternating, dealt, falls_on, spread
from engines import adamw, build, made, refusal, train
from models import loss_of
from thinwire.base.knobs import knobs_of
from thinwire.core.method import Method, Run
from thinwire.core.state import find_entries
from thinwire.engines.fsdp2 import param_groups
from thinwire.methods import TABLE, LocalSteps, resolve
from thinwire.network.comm import local
from thinwire.proof.record import small
from thinwire.saved.format import Header

TOPK = "topk(feedback='gradients', smallest=100, density=0.1)"


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _forms(rank: int, world: int, kind: str) -> list[str]:
    """Of every method: what a fresh wire shows is what it shows after any step, and what is loaded was saved."""
    wrong = []
    for number, cls in enumerate(TABLE):
        if kind not in cls.engines or not falls_on(number, kind, cls.engines):
            continue
        method = small(cls)
        if not method.card.keeps_state and not (method.card.encodes_weights and kind == "fsdp2"):
            continue
        model = build(kind, world, net=_shorter)
        for _, group in [] if kind == "ddp" else param_groups(model):  # as in torch 2.15, before it has found an order
            vars(group).setdefault("_reduce_scatter_param_indices", [])
        optimizer = made(cls.OPTIMIZER, model)
        wire = thinwire.compress(model, optimizer, method, steps=100)
        fresh = {key: (value.shape, value.dtype) for key, value in wire.state_dict().items()}
        if any(not key.startswith(f"rank-{rank:04d}-of-{world:04d}/") for key in fresh):
            wrong.append(f"{cls.name}: {list(fresh)}")
        for step in range(4):
            train(model, optimizer, rank, [step], wire)
            state = wire.state_dict()
            found = {key: (value.shape, value.dtype) for key, value in state.items()}
            wrong += [f"{cls.name}, step {step}: {key} is {found.get(key)}, and was {fresh.get(key)}"
                      for key in sorted({*found, *fresh}) if found.get(key) != fresh.get(key)]  # fmt: skip
            if step % 2:
                wire.load_state_dict(state)
            if not same(state, wire.state_dict()):
                wrong.append(f"{cls.name}, step {step}: loaded, it saves something else")
        if cls.name in ("scape", "radius", "sdp4bit"):
            wrong += _on_the_wrong_side(wire, state)
        wire.close()
    return wrong


def _on_the_wrong_side(wire: thinwire.Wire, state: dict) -> list[str]:
    """What of ``state`` is loaded onto the device and belongs to the host, which counts, or the other way round."""
    with mock.patch.object(thinwire.Wire, "_device", torch.device("meta")):
        wire.load_state_dict(state)
    found = {kind: value.device.type for kind, _, value in find_entries(wire._state)}
    there = {"chosen": "cpu", "resampled": "cpu", "replica step": "cpu", "mask": "meta", "replica": "meta"}
    return [f"{kind} is loaded onto {where}" for kind, where in found.items() if there.get(kind, where) != where]


@pytest.mark.parametrize(("kind", "world"), alternating(0, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_the_form_of_a_state_is_known_before_the_first_step(kind, world):
    for wrong in ranks.run(_forms, world, kind):
        assert not wrong, "\n".join(wrong)


def _run(spec: str, kind: str, world: int, **more: Any) -> tuple[Any, Any, Any]:
    model = build(kind, world)
    optimizer = adamw(model)
    return model, optimizer, thinwire.compress(model, optimizer, spec, **more)


def _refused(rank: int, world: int) -> dict[str, tuple[str, bool]]:
    model, optimizer, wire = _run(TOPK, "ddp", world)
    train(model, optimizer, rank, range(3), wire)
    mine = wire.state_dict()
    theirs: list[Any] = [None] * world
    dist.all_gather_object(theirs, mine)
    key = f"rank-{rank:04d}-of-{world:04d}/"
    residual = key + "residual/blocks.0.up.weight"
    another = {name: values for name, values in mine.items() if name != residual}
    cases = {
        "empty": {}, "of another rank": theirs[1 - rank], "of all ranks": theirs[0] | theirs[1],
        "without a residual": another, "with something else": {**mine, key + "residual/nobody": torch.zeros(2)},
        "of another shape": {**mine, residual: torch.zeros(1, 5)},
        "of another dtype": {**mine, residual: mine[residual].double()},
        "not finite": {**mine, residual: mine[residual] / 0}, "plain names": {"residual/w": torch.zeros(1)},
        "without about": {name: of for name, of in mine.items() if name != key + "about"},
        "of no step": {**mine, key + "step": torch.tensor(-3)},
        "of any step": {**mine, key + "step": torch.tensor(2**62)},
        "damaged": {**mine, key + "about": torch.zeros(4096, dtype=torch.uint8)}, "of no kind": None,
    }  # fmt: skip
    found = {}
    for name, state in cases.items():
        found[name] = refusal(wire.load_state_dict, state), same(mine, wire.state_dict())
    wire.close()
    for name, kind, spec, more in (
        ("another method", "ddp", "trickle(smallest=100)", {}),
        ("another knob", "ddp", "topk(feedback='gradients', smallest=100, density=0.2)", {}),
        ("another default", "ddp", "topk(smallest=100, density=0.1)", {}),
        ("another seed", "ddp", TOPK, {"seed": 1}),
        ("another bound", "ddp", TOPK, {"safety": thinwire.Safety(outlier_clip=None)}),
        ("another engine", "fsdp2", TOPK, {}), ("another model", "ddp", TOPK, {"layers": 1}),
    ):  # fmt: skip
        net = {"net": _shorter} if more.pop("layers", None) else {}
        model = build(kind, world, **net)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, spec, **more)
        before = wire.state_dict()
        found[name] = refusal(wire.load_state_dict, mine), same(before, wire.state_dict())
        wire.close()
    return found


def _shorter() -> Any:
    from models import Net

    return Net(layers=0)


SAID = {
    "empty": "the state is empty, and this is rank {rank} of 2",
    "of another rank": "the state is that of rank {other} of 2, and this is rank {rank} of 2",
    "of all ranks": "the state is that of rank {other} of 2, and this is rank {rank} of 2",
    "without a residual": "the state lacks 'rank-000{rank}-of-0002/residual/blocks.0.up.weight'",
    "with something else": "the state has 'rank-000{rank}-of-0002/residual/nobody', unknown to this run",
    "of another shape": "residual/blocks.0.up.weight' is torch.float32 (1, 5), this run needs torch.float32 (1, 1296)",
    "of another dtype": "is torch.float64 (1, 1296), this run needs torch.float32 (1, 1296)",
    "not finite": "residual/blocks.0.up.weight' holds values that are not finite",
    "plain names": "'residual/w' is not an entry of a state",
    "without about": "the state has no 'rank-000{rank}-of-0002/about'",
    "of no step": "topk: the saved state is damaged: step=-3",
    "of any step": "damaged: step=4611686018427387904",
    "damaged": "'rank-000{rank}-of-0002/about' is damaged",
    "of no kind": "a state maps names to tensors, as wire.state_dict() does, got NoneType",
    "another method": "it was saved with method topk, this run has trickle",
    "another knob": "it was saved with density=0.1 of topk, this run has density=0.2",
    "another default": "it was saved with feedback=gradients of topk, this run has feedback=updates",
    "another seed": "it was saved with seed=0, this run has seed=1",
    "another bound": "it was saved with outlier_clip=10.0, this run has outlier_clip=None",
    "another engine": "it was saved on ddp, this run is on fsdp2",
    "another model": "it holds blocks.0.down.bias, which this run does not train",
}


def test_what_is_not_this_ranks_own_is_refused_by_name_and_changes_nothing():
    for rank, found in enumerate(ranks.run(_refused, 2)):
        assert found.keys() == SAID.keys()
        for case, (said, unchanged) in found.items():
            assert SAID[case].format(rank=rank, other=1 - rank) in said, (case, said)
            assert unchanged, case


def test_a_state_of_other_ranks_is_refused_by_their_number():
    saved = ranks.run(_saved_alone, 1)[0]
    for said in ranks.run(_loaded_by_two, 2, saved):
        assert said.startswith("the state is that of rank 0 of 1") and "resize='flush'" in said


def _saved_alone(rank: int, world: int) -> dict[str, Any]:
    model, optimizer, wire = _run(TOPK, "ddp", world)
    train(model, optimizer, rank, range(2), wire)
    return {key: value.numpy() for key, value in wire.state_dict().items()}


def _loaded_by_two(rank: int, world: int, saved: dict[str, Any]) -> str:
    _, _, wire = _run(TOPK, "ddp", world)
    return refusal(wire.load_state_dict, {key: torch.tensor(value) for key, value in saved.items()})


def _unlike(rank: int, world: int, kind: str) -> list[str]:
    """Of every method: what is said where the last rank's file is of an earlier step, or is gone (step 0)."""
    wrong = []
    for number, cls in enumerate(TABLE):
        if kind not in cls.engines or not falls_on(number, kind, cls.engines):
            continue
        states: dict[int, Any] = {}
        for goes_on in (False, True):
            model = build(kind, world, net=_shorter)
            optimizer = made(cls.OPTIMIZER, model)
            check = thinwire.Safety(check_every=0)
            wire = thinwire.compress(model, optimizer, small(cls), steps=100, safety=check)
            if not goes_on:
                for step in range(2):
                    train(model, optimizer, rank, [step], wire)
                    states[step + 1] = wire.state_dict()
                wire.close()
                continue
            last, earlier = world - 1, number % 2
            if rank < last or earlier:
                wire.load_state_dict(states[earlier if rank == last else 2])
            said = refusal(train, model, optimizer, rank, range(2, 4), wire)
            sides = f"rank {last} goes on from step {earlier}, and ", "rank 0 goes on from step 2, and "
            if not said.startswith(sides) or not said.endswith(": load the states of one checkpoint on all ranks"):
                wrong.append(f"{cls.name}, step {earlier}: {said}")
            wire.close()
    return wrong


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_ranks_that_loaded_states_of_unlike_steps_are_told_so_before_they_exchange_anything(kind, world):
    for wrong in ranks.run(_unlike, world, kind):
        assert not wrong, "\n".join(wrong)


def _in_shares() -> list[Method]:
    """Every method whose start or warm-up may be a share of the run, with such a share; local steps also otherwise."""
    starts = [(cls, knob.name) for cls in TABLE for knob in knobs_of(cls) if knob.type == "Start"]
    beside = {"outer": "topk(feedback='gradients', density=0.1, smallest=0, start=0.25)", "every": 1, "start": 0}
    rounds = [{"delay": 1, "start_with": "sign", "start": 0.25}, beside, {**beside, "start": 0.25}]
    return [*(small(cls, **{knob: 0.25}) for cls, knob in starts), *(small(LocalSteps, **knobs) for knobs in rounds)]


def _of_another_length(rank: int, world: int, kind: str) -> list[str]:
    """What is wrong if a run of 8 steps goes on with 20, from inside its start and behind it, or one of 20 with 16."""
    wrong = []
    for number, method in enumerate(_in_shares()):
        if kind not in method.engines or not falls_on(number, kind, method.engines):
            continue

        def begin(steps: int, method: Method = method) -> tuple[Any, Any, thinwire.Wire]:
            model = build(kind, world, net=_shorter)
            optimizer = made(method.OPTIMIZER, model)
            return model, optimizer, thinwire.compress(model, optimizer, replace(method), steps=steps)

        def go_on(begun: tuple[Any, Any, thinwire.Wire], first: int) -> list[Any]:
            """The weights of three steps, and the bytes of gradients, unless a save has brought a round home."""
            (model, optimizer, wire), seen = begun, []
            for step in range(first, first + 3):
                train(model, optimizer, rank, [step], wire)
                seen += [*(local(weight.detach()).clone() for weight in model.parameters())]
                sent = sum(wire.ledger.last.bytes.values()) - wire.ledger.last.weight_bytes  # the first gather is whole
                seen.append(torch.tensor(0 if wire.method.card.delay else sent))
            wire.close()
            return seen

        lengths = (8, 1, [20]), (8, 3 + number % 2, [20]), (20, 3, [16, 5])
        for before, stop, afters in dealt(lengths, number % 2, (0, 1, 0)):
            model, optimizer, wire = begin(before)
            train(model, optimizer, rank, range(stop), wire)
            saved = *map(copy.deepcopy, (model.state_dict(), optimizer.state_dict())), wire.state_dict()
            expected = go_on((model, optimizer, wire), stop)
            for after in afters:
                model, optimizer, wire = begin(after)
                fresh = wire.state_dict() if after == 5 else {}
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
                said, case = refusal(wire.load_state_dict, saved[2]), f"{method}, step {stop} of {before}, then {after}"
                if said and (" beyond the end of the run of " not in said or not same(fresh, wire.state_dict())):
                    wrong.append(f"{case}: {said}")
                if bool(said) != (after == 5):
                    wrong.append(f"{case}: {said or 'not refused'}")
                if said:
                    wire.close()
                elif not all(map(torch.equal, expected, go_on((model, optimizer, wire), stop))):
                    wrong.append(f"{case}: other weights or bytes")
    return wrong


@pytest.mark.parametrize(("kind", "world"), alternating(0, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_a_run_goes_on_with_more_steps_or_fewer_as_it_began(kind, world):
    for wrong in ranks.run(_of_another_length, world, kind):
        assert not wrong, "\n".join(wrong)


def _flush_that_one_rank_skips(rank: int, world: int) -> str:
    """What is said where ranks go on from one checkpoint of a round in which one rank has skipped its flush."""
    state: Any = None
    for first, stop in ((0, 6), (6, 9)):
        model = build("ddp", world, net=_shorter)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, optimizer, LocalSteps(every=4, outer=TOPK), steps=40)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            wire.load_state_dict(state[2])
            return refusal(train, model, optimizer, rank, range(first, stop), wire)
        train(model, optimizer, rank, range(first, stop - 1), wire)
        wire.flush(with_next=True)
        train(model, optimizer, rank, [stop - 1], wire, poison=(stop - 1, 1))
        state = *map(copy.deepcopy, (model.state_dict(), optimizer.state_dict())), wire.state_dict()
        wire.close()
    raise AssertionError


def test_a_flush_that_one_rank_alone_has_skipped_makes_no_checkpoint_another_one():
    assert ranks.run(_flush_that_one_rank_skips, 2) == ["", ""]


def _node_evaluates(rank: int, world: int, method: str) -> int:
    """Train after an evaluation of the first node alone, which the others wait for."""
    model = build("hsdp", world, net=_shorter)
    wire = thinwire.compress(model, optimizer := adamw(model), method, steps=40)
    if rank < world // 2:
        model.eval()
        with torch.no_grad():
            loss_of(model, 0, 0)
        model.train()
    dist.barrier()
    train(model, optimizer, rank, range(2), wire)
    wire.close()
    return wire.step


@pytest.mark.parametrize("method", ["qsdp(smallest=100)", "sdp4bit(smallest=100)", "int8(smallest=100)"])
def test_a_node_of_hsdp_may_evaluate_alone_before_the_first_step(method):
    assert ranks.run(_node_evaluates, 4, method, seconds=60) == [2, 2, 2, 2]


METHODS = {
    "ddp": (TOPK, "powersgd(smallest=100)", "radius(smallest=100, start=1, T=2)",
            "onebit-adam(smallest=100, warmup=2)", "trickle(smallest=100, density=0.1)",
            "local-steps(every=2, outer='topk:feedback:gradients(smallest=100)')"),
    "fsdp2": (TOPK, "sdp4bit(smallest=100)", "tagc(smallest=100, theta=0.9)"),
    "hsdp": ("sign(smallest=100)", TOPK),
}  # fmt: skip


def _through_dcp(rank: int, world: int, kind: str, folder: str) -> dict[str, tuple[bool, bool, bool]]:
    found = {}
    for number, spec in enumerate(METHODS[kind]):
        model, optimizer, wire = _run(spec, kind, world, steps=50)
        train(model, optimizer, rank, range(3), wire)
        state, path = wire.state_dict(), str(Path(folder) / str(number))
        if number:
            dcp.save({"wire": wire}, checkpoint_id=path)
        else:
            dcp.async_save({"wire": wire}, checkpoint_id=path).result()
        alike = isinstance(wire, Stateful) and same(state, wire.state_dict())
        wire.close()
        _, _, fresh = _run(spec, kind, world, steps=50)
        dcp.load({"wire": fresh}, checkpoint_id=path)
        back = fresh.step == 3 and same(state, fresh.state_dict())
        there = any(value.any() for key, value in state.items() if key.endswith("blocks.0.up.weight"))
        fresh.close()
        found[spec] = alike, back, bool(there)
    return found


@pytest.mark.parametrize(("kind", "world"), spread(2, [("ddp", 2), ("hsdp", 4), ("fsdp2", 2)]))
def test_a_fresh_wire_gets_all_of_its_own_back_through_dcp(kind, world):
    with tempfile.TemporaryDirectory() as folder:
        for found in ranks.run(_through_dcp, world, kind, folder):
            assert found == {spec: (True, True, True) for spec in METHODS[kind]}
        assert not [path for path in Path(folder).rglob("*") if path.suffix in (".pkl", ".pt")]


def test_an_outer_methods_settings_are_saved_too():
    """So that another default of its is noticed, whatever was written."""
    inner, outer = resolve("radius"), LocalSteps(outer="radius")
    alone: Any = SimpleNamespace(kind="ddp", levels=None, hops=())
    knobs = Header.of_run(0, 1, alone, Run({}, alone), outer).knobs
    assert knobs.items() >= {("radius's T", str(inner.T)), ("outer", "radius")}
