"""Scales that change, values that overflow on the way, and spoilt batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ranks
import thinwire
from breadth import dealt, falls_on, spread
from engines import build, same_on_all_ranks
from models import Net, batch, flat
from test_edges import CASES, NO_SCALER, SHAPES, STATEFUL, Case, Given, each, error_of, findings, on, same, tensors
from thinwire.methods import resolve


def given(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


# --------------------------------------------------------------------------------------------------------- GradScaler

START = 256.0


def complaints(method, what):
    """Of all that was tried on one rank: lists of what was wrong, by name."""
    return [f"{key}: {complaint}" for key in what if key != "error" for complaint in what[key]]


def _scaled(
    engine: str, world: int, rank: int, case: Case, steps, *, overflow: int = -1, growth: int = 10**6,
    clip: bool = False, wrap: bool = True, to_none: bool = True, told: bool = True, batches: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """Train with a GradScaler. ``overflow``: the step at which rank 1's loss is infinite. ``told``: compress() is."""
    model = build(engine, world, net=Given)
    optimizer = case.make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=growth)
    wire = thinwire.compress(model, optimizer, case.method, steps=8, **({"scaler": scaler} if told else {}))
    moved, said = [], []
    for step in steps:
        factor = float("inf") if step == overflow and rank == 1 else 1.0
        values = given(step, rank) if batches is None else batches[step]
        if wrap:
            with wire.accumulate():
                scaler.scale(model(values) * factor).backward()
        else:
            scaler.scale(model(values) * factor).backward()
        if clip:
            scaler.unscale_(optimizer)
            wire.clip_grad_norm_(40.0)
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        said.append(wire.step_was_skipped)
        optimizer.zero_grad(set_to_none=to_none)
        said[-1] &= wire.step_was_skipped or not (to_none or told)
        moved.append(not torch.equal(before, flat(model)))
    found = {
        "tensors": [flat(model), *tensors(optimizer)], "moved": moved, "equal": same_on_all_ranks(model),
        "said": said, "skipped": wire.skipped, "step": wire.step, "scale": scaler.get_scale(),
    }  # fmt: skip
    wire.close()
    return found


def _growing(rank, world):
    def look(case):
        found, told = {}, case in STATEFUL  # the others need not be told
        turns = [clip for clip in (False, True) if falls_on(CASES.index(case), clip, (False, True))]
        for clip in turns if told else [True]:
            options = {"clip": clip, "told": told}
            fixed, doubled = (_scaled("ddp", world, rank, case, range(4), growth=g, **options) for g in (10**6, 2))
            found[f"clip={clip}"] = float((fixed["tensors"][0] - doubled["tensors"][0]).abs().max())
            assert (fixed["scale"], doubled["scale"]) == (START, 4 * START)
            found[f"clip={clip}, skipped"] = fixed["skipped"] + doubled["skipped"]
        return found

    return findings(spread(2, [case for case in on("ddp") if case.name not in NO_SCALER]), look)


def test_a_scale_that_doubles_changes_no_bit():
    def check(method, what):
        return [f"{key}: {value:.2g} off with a scale that doubles every 2 steps" for key, value in what.items()
                if key != "error" and value != 0]  # fmt: skip

    each(ranks.run(_growing, 2), "ddp", check)


OVERFLOWING = [
    case for case in CASES
    if case.name in ("dense", "int8", "radius", "scape", "separate", "powersgd", "topk", "onebit-adam")
]  # fmt: skip


def _overflow(rank, world):
    def look(case):
        told = case in STATEFUL
        without = _scaled("ddp", world, rank, case, [0, 1, 3, 4], told=told)
        found: dict[str, Any] = {}
        for wrap, to_none in spread(2, (True, False), (True, False)):
            run = _scaled("ddp", world, rank, case, range(5), overflow=2, wrap=wrap, to_none=to_none, told=told)
            wrong = []
            if run["moved"] != [step != 2 for step in range(5)]:
                wrong.append(f"weights moved in steps {[int(x) for x in run['moved']]}")
            if (run["skipped"], run["step"], run["scale"]) != (1, 5, START / 2):
                wrong.append(f"skipped, step, scale = {run['skipped']}, {run['step']}, {run['scale']}")
            if run["said"] != [step == 2 for step in range(5)]:
                wrong.append(f"step_was_skipped in steps {[int(x) for x in run['said']]}")
            wrong += ["ranks hold different weights"] * (not run["equal"] and case.name != "none")
            wrong += ["not as if without that step"] * (not same(run["tensors"], without["tensors"]))
            found[f"accumulate={wrap}, set_to_none={to_none}"] = wrong
        return found

    return findings(OVERFLOWING, look)


def test_an_overflow_on_one_rank_costs_one_step():
    each(ranks.run(_overflow, 2), "ddp", complaints)


HIDING = spread(2, [case for case in on("ddp") if case.name not in NO_SCALER][::-1])


def _hidden(rank, world):
    """Columns of no gradient, which no mask has taken, until one of their values overflows on rank 1, or on all."""

    def sparse(step, spoilt):
        values = given(step, rank)
        for name in values:
            values[name][:, ::2] = 0.0
            if spoilt:
                values[name][3, 2] = math.inf
        return values

    def look(case):
        found = {}
        for who in dealt([(1,), (0, 1)], HIDING.index(case) % 2, range(2)):
            runs = []
            for steps, at in (([0, 1, 2, 4, 5], -1), (range(6), 3)):
                batches = {step: sparse(step, step == at and rank in who) for step in steps}
                runs.append(_scaled("ddp", world, rank, case, steps, told=case in STATEFUL, batches=batches))
            without, run = runs
            wrong = []
            if (run["skipped"], run["step"], run["scale"]) != (1, 6, START / 2):
                wrong.append(f"skipped, step, scale = {run['skipped']}, {run['step']}, {run['scale']}")
            wrong += ["ranks hold different weights"] * (not run["equal"] and case.name != "none")
            wrong += ["not as if without that step"] * (not same(run["tensors"], without["tensors"]))
            found[f"on ranks {who}"] = wrong
        return found

    return findings(HIDING, look)


def test_an_overflow_that_a_mask_hides_lowers_the_scale_all_the_same():
    each(ranks.run(_hidden, 2), "ddp", complaints)


def _untold(rank, world):
    return findings(
        on("ddp", STATEFUL),
        lambda case: {"raised": error_of(lambda: _scaled("ddp", world, rank, case, range(2), told=False))},
    )


def test_a_method_with_state_that_was_not_told_of_the_scaler_refuses_its_step():
    def check(method, what):
        named = what["raised"].startswith("ThinwireError") and "scaler" in what["raised"]
        return [] if named else [f"scaler.step(): {what['raised'] or 'taken without a word'}"]

    each(ranks.run(_untold, 2), "ddp", check)


def _sharded(rank, world):
    def look(case):
        try:
            run = _scaled("fsdp2", world, rank, case, range(6), overflow=3)
            without = _scaled("fsdp2", world, rank, case, [0, 1, 2, 4, 5])
        except thinwire.ThinwireError as error:
            return {"refused": str(error)}
        counts = run["moved"], run["skipped"], run["scale"]
        right = counts == ([step != 3 for step in range(6)], 1, START / 2) and run["equal"]
        right = right and run["said"] == [step == 3 for step in range(6)]
        return {"refused": None, "right": right and same(run["tensors"], without["tensors"]), "counts": counts}

    return findings([case for case in CASES if case.name in ("dense", "int8", "topk")], look)


def test_a_scaler_on_sharded_weights_is_served_or_refused_but_never_hangs():
    def check(method, what):
        if what["refused"] is not None:
            return [] if "scaler" in what["refused"].lower() else [f"refused without the word: {what['refused']}"]
        return [] if what["right"] else [f"moved, skipped, scale = {what['counts']}"]

    each(ranks.run(_sharded, 2, seconds=40), "fsdp2", check)


# ---------------------------------------------------------------------------------- values that overflow on the way


def _huge(rank, world, engine):
    """One element of w0's gradient is 3e38 on all ranks at step 3: finite, but the sum of two is not."""

    def look(case):
        found = {}
        unclipped = {"safety": thinwire.Safety(outlier_clip=None)}
        ways: list[tuple[str, dict, bool]] = [("outlier_clip=None", unclipped, False), ("as it comes", {}, True)]
        for label, options, clip in dealt(ways, CASES.index(case) // 2 % 2, range(2)):  # the engines take every second
            model = build(engine, world, net=Given)
            optimizer = case.make(model.parameters())
            wire = thinwire.compress(model, optimizer, case.method, steps=8, **options)
            wrong = []
            for step in range(5):
                values = given(step, rank)
                if step == 3:
                    values["w0"][0, 3] = 3e38
                with wire.accumulate():
                    model(values).backward()
                if clip:
                    wire.clip_grad_norm_(1.0)
                before = flat(model)
                optimizer.step()
                optimizer.zero_grad()
                if torch.equal(before, flat(model)) != (step == 3):
                    wrong.append(f"step {step} moved {'nothing' if step != 3 else 'weights'}")
            kept = {"weights": flat(model), **{f"wire: {key}": v for key, v in wire.state_dict().items()}}
            kept |= {f"optimizer: {i}": values for i, values in enumerate(tensors(optimizer))}
            wrong += [f"{k} not finite" for k, v in kept.items() if v.is_floating_point() and not v.isfinite().all()]
            wrong += [f"skipped {wire.skipped} steps"] * (wire.skipped != 1)
            wrong += ["ranks hold different weights"] * (case.name != "none" and not same_on_all_ranks(model))
            found[label] = wrong
            wire.close()
        return found

    return findings(on(engine, spread(2, CASES), ("ddp", "fsdp2")), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_finite_gradient_that_overflows_on_the_way_costs_its_step_and_nothing_else(engine):
    """Also where the mean happens to be finite: its norm is not, and no clipping or Adam survives that."""

    each(ranks.run(_huge, 2, engine), engine, complaints)


def _loaded(rank, world):
    """One NaN in every kind of what was saved, one kind at a time."""

    def look(case):
        model = build("ddp", world, net=Given)
        optimizer = case.make(model.parameters())
        wire = thinwire.compress(model, optimizer, case.method, steps=8)
        for step in range(4):
            with wire.accumulate():
                model(given(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        state, said = wire.state_dict(), {}
        for key in [key for key in state if key.endswith("w0") and state[key].is_floating_point()]:
            poisoned = {name: values.clone() for name, values in state.items()}
            poisoned[key].view(-1)[0] = float("nan")
            said[key] = error_of(lambda poisoned=poisoned: wire.load_state_dict(poisoned))
        wire.load_state_dict(state)
        wire.close()
        return {"said": said}

    return findings(on("ddp", spread(2, STATEFUL)), look)


def test_a_saved_state_that_is_not_finite_is_refused_by_its_key():
    def check(method, what):
        wrong = ["nothing was saved"] * (not what["said"])
        for key, said in what["said"].items():
            named = said.startswith("ThinwireError") and key.removeprefix("=") in said
            wrong += [f"{key}: {said or 'loaded'}"] * (not named)
        return wrong

    each(ranks.run(_loaded, 2), "ddp", check)


# --------------------------------------------------------------------------------------------------- a spoilt batch

SPOILT, STEPS, LAST = 12, 45, 10
LEARNING = {"sgd": 0.5, "adamw": 1e-2, "adams": 1e-2}
SPOILT_CASES = [
    Case("int8(smallest=100, feedback='gradients')", "", "adamw"),
    Case("radius(smallest=100, start=2, T=10, density=0.1)", "", "adamw"),
    Case("scape(smallest=100, density=0.03, warmup=5)", "", "adams"),
    Case("separate(smallest=100, ratio=8, beta=None)", "", "adamw"),
    Case("tagc(smallest=100, theta=0.95, feedback='gradients')", "", "adamw"),
    Case("loco(smallest=100)", "", "adamw"), Case("powersgd(smallest=100, rank=2, feedback='gradients')", "", "adamw"),
    Case("topk(smallest=100, density=0.03, feedback='gradients')", "", "adamw"),
    Case("dgc(smallest=100, density=0.03, momentum=0.5)", "", "sgd"),
    Case("onebit-adam(smallest=100, warmup=10, group=128)", "", "adamw"),
    Case("trickle(smallest=100, density=0.03)", "", "adamw"),
    Case("trickle(smallest=100, density=0.03, mask='merged')", "", "adamw"),
    Case("tagc(smallest=100, theta=0.95)", "", "adamw"),  # behind the preconditioner
    Case("powersgd(smallest=100, rank=2)", "", "adamw"), Case("sign(smallest=100, group=128)", "", "adamw"),
    Case("local-steps(every=3, outer_lr=1.0, outer_momentum=0.0)", "", "adamw"),
]  # fmt: skip


def _noisy(model: nn.Module, step: int, rank: int) -> Tensor:
    """The loss of a third of random targets: it settles at what cannot be known, and is the same from there on."""
    tokens, targets = batch(step, rank)
    generator = torch.Generator().manual_seed(7000 * step + rank)
    noise = torch.randint(0, 51, targets.shape, generator=generator)
    targets = torch.where(torch.rand(targets.shape, generator=generator) < 0.33, noise, targets)
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def _spoilt(rank, world):
    def look(case):
        found: dict[str, Any] = {}
        for label, spoilt in (("plain", -1), ("spoilt", SPOILT)):
            model = build("ddp", world, net=lambda: Net(layers=0), bucket_cap_mb=1)
            optimizer = case.make(model.parameters(), lr=LEARNING[case.optimizer])
            wire = thinwire.compress(model, optimizer, case.method, steps=STEPS)
            losses = torch.zeros(STEPS)
            for step in range(STEPS):
                with wire.accumulate():
                    loss = _noisy(model, step, rank)
                    (loss * (1e4 if step == spoilt else 1.0)).backward()
                wire.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses[step] = loss.detach()
            torch.distributed.all_reduce(losses)
            found[label] = float(losses[-LAST:].mean() / world)
            found[f"{label}, bound"] = wire.stats()["bound"]
            wire.close()
        return found

    return findings(spread(6, SPOILT_CASES), look)


@pytest.mark.slow
def test_a_spoilt_batch_does_not_rule_the_steps_after_it():
    def check(method, what):
        near = abs(what["spoilt"] / what["plain"] - 1) < 0.05
        wrong = [f"loss {what['spoilt']:.3f} after a spoilt batch, {what['plain']:.3f} without"] * (not near)
        cut, none = what["spoilt, bound"], what["plain, bound"]
        if not (card := resolve(method).card).keeps_state or card.alone_from is not None:
            return wrong + [f"counts {cut}, {none}, and has no bound"] * bool(cut or none)
        wrong += [f"counts {cut}"] * (not (cut["cut"] > 0 and cut["norm"] > 0 and math.isfinite(cut["norm"])))
        return wrong + [f"cut {none} where nothing was spoilt"] * (none["cut"] != 0 or none["norm"] != 0)

    each(ranks.run(_spoilt, 2), "ddp", check)


def _bounds(rank, world):
    def tried(bound):
        model = build("ddp", world, net=Given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def compress():
            safety = thinwire.Safety(outlier_clip=bound)
            thinwire.compress(model, optimizer, "topk(feedback='gradients', smallest=0)", safety=safety).close()

        return error_of(compress)

    return {str(bound): tried(bound) for bound in (0.5, 0, -1.0, math.nan, math.inf, "10", None, 1, 1.0, 1e6)}


def test_a_bound_is_a_number_from_1_on_or_none():
    for bound, said in ranks.run(_bounds, 2)[0].items():
        if bound in ("None", "1", "1.0", "1000000.0"):
            assert not said, f"bound={bound}: {said}"
        else:
            assert said.startswith("ThinwireError") and "outlier_clip" in said, f"bound={bound}: {said or 'accepted'}"
