"""A parameter that is frozen in mid-run keeps its bits, or is refused: neither what waits of it nor moments move it.

The same if it is frozen by its optimizer's groups: moved to one whose lr is 0, or taken out of all.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

import ranks
import thinwire
from breadth import alternating, spread
from engines import build
from models import flat
from test_edges import CASES, SHAPES, Case, Given, each, findings, full, on, parts
from thinwire.core.exchange import AllReduce
from thinwire.core.run import Run
from thinwire.network.comm import CountingComm
from thinwire.network.ledger import Ledger

FREEZING = [*(case for case in CASES if case.name != "none"), Case("local-steps(every=2)")]
"""All methods but the one whose ranks differ; the last one's outer momentum is not 0, and a round ends at FROZEN_AT."""
STEPS, FROZEN_AT = 7, 4


def _waiting(wire) -> dict[str, torch.Tensor]:
    """This rank's values that wait, by key."""
    kinds = wire.method.card.promise.waits
    return {key: value for key, value in wire.state_dict().items() if key.split("/")[-2] in kinds}


def _freeze(rank, world, engine):
    def look(case):
        model = build(engine, world, net=Given)
        optimizer = case.make(model.parameters())
        wire = thinwire.compress(model, optimizer, case.method, steps=STEPS)
        weights, kept = parts(model), torch.zeros(())
        generator = torch.Generator().manual_seed(100 + rank)
        said, before = "", flat(model)
        try:
            for step in range(STEPS):
                if step == FROZEN_AT:
                    weights["w1"].requires_grad_(False)
                    kept, before = full(weights["w1"]).clone(), flat(model)
                model({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}).backward()
                optimizer.step()
                optimizer.zero_grad()
        except thinwire.ThinwireError as error:
            said = str(error)
        moved, waits = not torch.equal(before, flat(model)), _waiting(wire)
        with suppress(thinwire.ThinwireError):
            wire.flush()
        still = _waiting(wire)
        found = {
            "said": said,
            "kept": torch.equal(kept, full(weights["w1"])),
            "moved": moved,
            "waits": all(torch.equal(waits[key], still[key]) for key in waits if key.endswith("w1")),
        }
        wire.close()
        return found

    if engine == "ddp":
        return findings(on("ddp", FREEZING[::6]), look)  # it refuses them all
    return findings(on(engine, spread(3, FREEZING), ("fsdp2", "fsdp2", "hsdp")), look)


@pytest.mark.parametrize(("engine", "world"), alternating(1, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_a_parameter_that_is_frozen_in_mid_run_rests_or_is_refused(engine, world):
    def check(method, what):
        if what["said"]:
            return [f"refused without its name: {what['said']}"] * ("w1" not in what["said"])
        faults = {"a frozen parameter moved": "kept", "nothing else moved": "moved", "what waits of it left": "waits"}
        return [fault for fault, fact in faults.items() if not what[fact]]

    each(ranks.run(_freeze, world, engine), engine, check)


MOVED = [case for case in CASES if case.name not in ("none", "local-steps")]
"""All methods whose ranks step as one: the groups are the exchanging optimizer's."""
REGROUPED_AT, BACK_AT = 3, 5


def _move(optimizer, how: str) -> None:
    """Let the first two groups change their members, or take the first group's out."""
    (first, second, _), (w0, w1) = optimizer.param_groups, [group["params"][0] for group in optimizer.param_groups[:2]]
    if how == "in place":
        first["params"][:], second["params"][:] = [w1], [w0]
    elif how == "new lists":
        first["params"], second["params"] = [w1], [w0]
    else:
        first["params"].clear()


def _regroup(rank, world, engine):
    def run(case, how):
        model = build(engine, world, net=Given)
        optimizer = case.make(model.parameters())
        (group,) = optimizer.param_groups
        weights = parts(model)
        group["params"][:] = [weights["w0"]]
        optimizer.add_param_group({"params": [weights["w1"]], "lr": 0.0})
        optimizer.add_param_group({"params": [weights["w2"]]})
        wire = thinwire.compress(model, optimizer, case.method, steps=STEPS)
        generator, seen = torch.Generator().manual_seed(100 + rank), []
        for step in range(STEPS):
            if step == REGROUPED_AT:
                _move(optimizer, how)
            if step == BACK_AT and how == "out":
                optimizer.param_groups[0]["params"].append(weights["w0"])
            model({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}).backward()
            optimizer.step()
            model.zero_grad()  # the optimizer does not clear what it does not have
            if step == BACK_AT - 1 and how == "out":
                with suppress(thinwire.ThinwireError):  # most have nothing to deliver, or deliver it with a step
                    wire.flush()
                wire.load_state_dict(wire.state_dict())
                assert wire.stats()["memory_bytes"] >= 0
            seen.append(full(weights["w0"]).clone())
        wire.close()
        return seen, flat(model)

    def look(case):
        (seen, in_place), (_, replaced), (out, _) = (run(case, how) for how in ("in place", "new lists", "out"))
        return {
            "alike": torch.equal(in_place, replaced),
            "rests": torch.equal(seen[REGROUPED_AT - 1], seen[-1]),
            "rests outside": torch.equal(out[REGROUPED_AT - 1], out[BACK_AT - 1]),
            "goes on": not torch.equal(out[BACK_AT - 1], out[-1]),
        }

    return findings(on(engine, spread(3, MOVED[::-1]), ("ddp", "fsdp2", "hsdp")), look)


@pytest.mark.parametrize(("engine", "world"), alternating(0, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_a_parameter_follows_its_optimizers_groups_and_rests_while_none_has_it(engine, world):
    each(
        ranks.run(_regroup, world, engine),
        engine,
        lambda _, what: [fact for fact, holds in what.items() if not holds and fact != "error"],
    )


def test_a_parameter_that_no_group_has_rests_in_a_copy_of_the_run_too():
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight, torch.nn.Parameter(torch.zeros(2))])
    run = Run({}, AllReduce(CountingComm(0, [0], Ledger())), optimizers=(optimizer,), weights={"w": weight})
    assert run.holders["w"].group["lr"] > 0
    del optimizer.param_groups[0]["params"][0]
    assert replace(run, began=5).holders["w"].group["lr"] == 0
