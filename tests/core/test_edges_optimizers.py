"""Several optimizers over one model, and parameters that come late."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import ranks
import thinwire
from breadth import dealt, spread
from engines import build, same_on_all_ranks
from models import Net, flat, loss_of
from test_edges import SHAPES, Case, Given, each, error_of, findings, full, parts, same, tensors

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD
MUON = getattr(torch.optim, "Muon", None)
Rule = tuple[Callable[..., torch.optim.Optimizer], str, dict[str, Any]]
"""An optimizer, the first letters of the names that it takes, and its settings."""


def made(model: nn.Module, rules: Sequence[Rule]) -> list[torch.optim.Optimizer]:
    weights = parts(model)
    return [kind([w for n, w in weights.items() if n.startswith(names)], **more) for kind, names, more in rules]


def given(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


# ------------------------------------------------------------------------------------------------- Muon beside AdamW

MUON_CASES = [
    Case("dense"), Case("topk(feedback='gradients', smallest=100)"), Case("radius(smallest=100, start=0, T=2)")
]  # fmt: skip


def _muon_run(engine: str, world: int, rank: int, method: str, steps: Sequence[int], poison: int, turns: bool):
    """Muon on the matrices inside the blocks, AdamW on the rest; ``turns``: by turns the one first and the other."""
    model = build(engine, world, net=lambda: Net(layers=1))
    hidden = [w for n, w in parts(model).items() if w.dim() == 2 and n.startswith("blocks")]
    taken = {id(w) for w in hidden}
    rest = [w for w in model.parameters() if id(w) not in taken]
    assert MUON is not None
    both = [MUON(hidden, lr=0.01, ns_steps=2), AdamW(rest, lr=3e-3)]
    wire = thinwire.compress(model, both, method, steps=len(steps))
    counts = []
    for step in steps:
        with wire.accumulate():
            (loss_of(model, step, rank) * (float("nan") if step == poison and rank == 1 else 1.0)).backward()
        wire.clip_grad_norm_(1.0)
        for optimizer in both[::-1] if turns and step % 2 else both:
            optimizer.step()
        for optimizer in both:
            optimizer.zero_grad()
        counts.append(wire.step)
    result = [flat(model), *tensors(both[0]), *tensors(both[1])], wire.skipped, counts
    equal = same_on_all_ranks(model)
    wire.close()
    return *result, equal


def _muon(rank, world, engine):
    def look(case):
        run = lambda *args: _muon_run(engine, world, rank, case.method, *args)  # noqa: E731
        poisoned, skipped, counts, equal = run(range(5), 2, False)
        without, none, _, _ = run([0, 1, 3, 4], -1, False)
        turned, _, turned_counts, _ = run([0, 1, 3, 4], -1, True)
        return {
            "skipped": (skipped, none), "counts": (counts, turned_counts), "equal": equal,
            "finite": all(bool(values.isfinite().all()) for values in poisoned),
            "as if not": same(poisoned, without), "in any order": same(turned, without),
        }  # fmt: skip

    return findings(dealt(spread(2, MUON_CASES), engine, ("ddp", "fsdp2")), look)


@pytest.mark.skipif(MUON is None, reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_nan_on_one_rank_skips_the_step_of_muon_and_adamw_alike(engine):
    def check(method, what):
        wrong = [f"skipped {what['skipped']} steps, not 1 and 0"] * (what["skipped"] != (1, 0))
        wrong += [f"wire.step went {what['counts']}"] * (what["counts"] != ([1, 2, 3, 4, 5], [1, 2, 3, 4]))
        wrong += ["ranks hold different weights"] * (not what["equal"])
        wrong += ["weights or moments are not finite"] * (not what["finite"])
        wrong += ["weights or moments are not those without the step"] * (not what["as if not"])
        return wrong + ["the order of the two optimizers changes weights"] * (not what["in any order"])

    each(ranks.run(_muon, 2, engine), engine, check)


def _after_a_skip(rank: int, world: int, engine: str) -> list[float]:
    """Two optimizers, and a second step that is skipped: return the largest move of each in the third."""
    model = build(engine, world, net=Given)
    first, *others = parts(model).values()
    both = [SGD([first], lr=1.0), SGD(others, lr=1.0)]
    wire = thinwire.compress(model, both, "dense")
    for step in range(3):
        before = [full(weight).clone() for weight in parts(model).values()]
        (model(given(step, rank)) * (float("nan") if step == 1 else 1.0)).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert (wire.step, wire.skipped) == (3, 1)
    wire.close()
    return [float((full(w) - old).abs().max()) for w, old in zip(parts(model).values(), before, strict=True)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_after_a_skipped_step_every_optimizer_takes_the_next_one(engine, world):
    """The second one left its part of the skipped step to come, as its gradients were dropped: FSDP2, which exchanges
    nothing on one rank, dropped those of its next step, too."""
    for moves in ranks.run(_after_a_skip, world, engine):
        assert all(moves), moves


# --------------------------------------------------------------------------------- two of a kind, and two of two kinds


def _trained(engine: str, world: int, rank: int, method: str, rules: Sequence[Rule]) -> tuple[dict[str, Tensor], bool]:
    model = build(engine, world, net=Given)
    several = made(model, rules)
    wire = thinwire.compress(model, several if len(several) > 1 else several[0], method, steps=8)
    for step in range(6):
        with wire.accumulate():
            model(given(step, rank)).backward()
        for optimizer in several:
            optimizer.step()
            assert wire.step == step + 1, "taken, also while another optimizer is to join it"
        for optimizer in several:
            optimizer.zero_grad()
    result = {name: full(weight).clone() for name, weight in parts(model).items()}, same_on_all_ranks(model)
    assert (wire.step, wire.skipped) == (6, 0)
    wire.close()
    return result


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": SGD, "adamw": AdamW, "adams": thinwire.AdamS}
TWO = [
    Case("dense", "", "adamw"), Case("int8(smallest=0, feedback='gradients')", "", "adamw"),
    Case("topk(feedback='gradients', smallest=0, density=0.1)"),
    Case("radius(smallest=0, start=0, T=3, density=0.3)", "", "adamw"),
    Case("radius(smallest=0, start=0, T=3, density=0.2)", "", "sgd"),
    Case("scape(smallest=0, density=0.1, warmup=3)", "", "adams"),
    Case("dgc(smallest=0, density=0.1)"),
    Case("onebit-adam(smallest=0, warmup=2, group=32)", "", "adamw"),
]  # fmt: skip


def _two(rank, world, engine):
    def look(case):
        kind = KINDS[case.optimizer]
        one, _ = _trained(engine, world, rank, case.method, [(kind, "w", {"lr": 0.01})])
        halves = [(kind, "w1", {"lr": 0.01}), (kind, ("w0", "w2"), {"lr": 0.01})]
        two, equal = _trained(engine, world, rank, case.method, halves)
        return {"apart": max(float((one[n] - two[n]).abs().max()) for n in one), "equal": equal}

    found = findings(dealt(spread(2, TWO), engine, ("ddp", "fsdp2")), look)

    def mixed(case):
        """Given gradients do not know the weights: each parameter moves as under its own optimizer alone."""
        rules = [(SGD, "w0", {"lr": 0.01}), (KINDS[case.optimizer], ("w1", "w2"), {"lr": 0.01})]
        both, equal = _trained(engine, world, rank, case.method, rules)
        alone = {
            name: _trained(engine, world, rank, case.method, [(kind, "w", {"lr": 0.01})])[0]
            for name, kind in (("w0", SGD), ("w1", KINDS[case.optimizer]), ("w2", KINDS[case.optimizer]))
            if case.name == "radius" or name != "w0"
        }
        return {"apart": max(float((both[n] - alone[n][n]).abs().max()) for n in alone), "equal": equal}

    kinds = [
        Case("radius(smallest=0, start=0, T=3, density=0.25)", "", "adamw"),
        Case("scape(smallest=0, density=0.1, warmup=3, dense=('w0',))", "", "adams"),
        Case("onebit-adam(smallest=0, warmup=2, group=32, dense=('w0',))", "", "adamw"),
    ]
    return found | findings(kinds, mixed)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_several_optimizers_move_each_weight_as_one_alone_would(engine):
    def check(method, what):
        wrong = [f"weights differ by {what['apart']:.2g}"] * (what["apart"] > 0)
        return wrong + ["ranks hold different weights"] * (not what["equal"])

    each(ranks.run(_two, 2, engine), engine, check)


def _idle(rank, world):
    """w2, which one optimizer has to itself, has no gradient in every second step; step 1 is not finite on rank 1."""

    def trained(method: str, order: int, poison: int) -> tuple[list[int], int]:
        model = build("fsdp2", world, net=Given)
        several = made(model, [(SGD, "w2", {"lr": 0.01}), (SGD, ("w0", "w1"), {"lr": 0.01})])
        wire = thinwire.compress(model, several, method, steps=8)
        counts = []
        for step in range(4):
            values = given(step, rank)
            if step % 2:
                del values["w2"]
            with wire.accumulate():
                (model(values) * (float("nan") if step == poison and rank == 1 else 1.0)).backward()
            for optimizer in several[::order]:
                optimizer.step()
            for optimizer in several:
                optimizer.zero_grad()
            counts.append(wire.step)
        wire.close()
        return counts, wire.skipped

    cases = [
        Case(f"{method}, idle one {'first' if order == 1 else 'last'}, a NaN at step {poison}")
        for method in ("dense", "topk(feedback='gradients', smallest=0, density=0.1)")
        for order in (1, -1)
        for poison in (None, 1)
    ]

    def look(case):
        method, order, poison = case.method.rsplit(", ", 2)
        counts, skipped = trained(method, 1 if "first" in order else -1, 1 if "1" in poison else -1)
        return {"counts": counts, "too many": skipped - ("1" in poison)}

    return findings(cases, look)


def test_an_optimizer_without_gradients_steps_along_before_or_after_the_others():
    def check(method, what):
        right = what["counts"] == [1, 2, 3, 4] and what["too many"] == 0
        return [] if right else [f"wire.step went {what['counts']}, {what['too many']} too many skipped"]

    each(ranks.run(_idle, 2), "fsdp2", check)


def _scaler(rank, world):
    """A GradScaler asks each optimizer for itself: an overflow of w0 alone makes it leave out the first one only."""

    def look(case):
        def trained(order, steps, overflow):
            model = build("ddp", world, net=Given)
            several = made(model, [(SGD, "w0", {"lr": 0.01}), (SGD, ("w1", "w2"), {"lr": 0.01})])
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
            wire = thinwire.compress(model, several, case.method, steps=8, scaler=scaler)
            for step in steps:
                values = given(step, rank)
                if step == overflow and rank == 1:
                    values["w0"][0, 0] = float("inf")
                with wire.accumulate():
                    scaler.scale(model(values)).backward()
                for optimizer in several[::order]:
                    scaler.step(optimizer)
                scaler.update()
                for optimizer in several:
                    optimizer.zero_grad()
            result = flat(model), (wire.step, wire.skipped)
            wire.close()
            return result

        found: dict[str, Any] = {}
        for order in (1, -1):
            weights, counts = trained(order, range(4), 1)
            without, _ = trained(order, [0, 2, 3], -1)
            found["first" if order == 1 else "last"] = torch.equal(weights, without), counts
        return found

    cases = Case("dense"), Case("int8(smallest=0)"), Case("topk(feedback='gradients', smallest=0, density=0.1)")
    return findings(cases, look)


def test_a_scaler_that_leaves_one_optimizer_out_leaves_out_all():
    def check(method, what):
        return [f"the one that overflows {key}: as without the step is {alike}, step and skipped are {counts}"
                for key, (alike, counts) in ((k, v) for k, v in what.items() if k != "error")
                if (alike, counts) != (True, (4, 1))]  # fmt: skip

    each(ranks.run(_scaler, 2), "ddp", check)


SHARED = [Case("dense"), Case("int8(smallest=0)"), Case("topk(feedback='gradients', smallest=0, density=0.1)")]


def _shared_scaler(rank, world, engine):
    """A GAN under one GradScaler: the generator's passes, one of which overflows, go through the discriminator too.

    ``saves``: its wire's state is asked for between its backward pass and its step, after the generator has stepped.
    """

    def look(case):
        def trained(saves: bool, generator_first: bool) -> tuple[list[bool], Tensor]:
            models = [build(engine, world, net=Given) for _ in range(2)]
            optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
            scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=100)
            wires = [
                thinwire.compress(model, own, case.method, steps=8, scaler=scaler)
                for model, own in zip(models, optimizers, strict=True)
            ]

            def generate(step: int) -> None:
                optimizers[0].zero_grad()
                loss = models[0](given(step, rank)) + (0 if generator_first else models[1](given(step + 50, rank)))
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
                scaler.step(optimizers[0])

            def discriminate(step: int) -> None:
                optimizers[1].zero_grad()
                scaler.scale(models[1](given(step + 100, rank)) * (float("inf") if step == 3 else 1.0)).backward()
                if saves:
                    wires[1].state_dict()
                scaler.step(optimizers[1])

            steps, told = (generate, discriminate) if generator_first else (discriminate, generate), []
            for step in range(5):
                for take in steps:
                    take(step)
                told += [wires[1].step_was_skipped]
                scaler.update()
                told += [wires[1].step_was_skipped, wires[0].step_was_skipped]
            end = flat(models[1])
            for wire in wires:
                wire.close()
            return told, end

        found: dict[str, Any] = {}
        for first in (False, True):
            told, end = trained(False, first)
            found[f"generator first={first}"] = told, torch.equal(end, trained(True, first)[1])
        return found

    return findings(dealt(spread(2, SHARED), engine, ("ddp", "fsdp2")), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_scaler_of_several_models_leaves_out_the_steps_of_one(engine):
    told = [skipped for step in range(5) for skipped in (step == 3, step == 3, step == 2)]

    def check(method, what):
        return [f"{key}: step_was_skipped is {said}, weights as without a saved state: {alike}"
                for key, (said, alike) in ((k, v) for k, v in what.items() if k != "error")
                if (said, alike) != (told, True)]  # fmt: skip

    each(ranks.run(_shared_scaler, 2, engine), engine, check)


def _refused(rank, world, engine):
    """What is tried -> the words that a refusal must have, and what was said."""

    def tried(method: str, rules: Sequence[Rule], as_one: bool = False) -> str:
        model = build(engine, world, net=Given)
        several = made(model, rules)
        return error_of(lambda: thinwire.compress(model, several[0] if as_one else several, method, steps=8))

    lr: dict[str, Any] = {"lr": 0.01}
    adams = thinwire.AdamS
    shared = [(functools.partial(ZeroRedundancyOptimizer, optimizer_class=AdamW), "w", lr)] if engine == "ddp" else []
    return {
        "dense, a part on each rank": ("ZeroRedundancyOptimizer" if shared else "optimizer", tried("dense", shared)),
        "int8, one of two": ("w0", tried("int8(smallest=0)", [(AdamW, ("w1", "w2"), lr)], as_one=True)),
        "int8, two of three": ("w2", tried("int8(smallest=0)", [(AdamW, "w0", lr), (SGD, "w1", lr)])),
        "dense, one of two": ("w1", tried("dense", [(AdamW, ("w0", "w2"), lr)], as_one=True)),
        "int8, none at all": ("optimizer", tried("int8", [])),
        "scape, AdamW": ("w0", tried("scape(smallest=0, warmup=2)", [(AdamW, "w0", lr), (adams, ("w1", "w2"), lr)])),
        "scape, SGD": ("w2", tried("scape(smallest=0, warmup=2)", [(adams, ("w0", "w1"), lr), (SGD, "w2", lr)])),
        "onebit-adam, SGD": (
            "SGD", tried("onebit-adam(smallest=0, warmup=2)", [(AdamW, ("w0", "w2"), lr), (SGD, "w1", lr)]),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_what_several_optimizers_cannot_do_is_refused_by_the_parameters_name(engine):
    for case, (words, said) in ranks.run(_refused, 2, engine)[0].items():
        assert said.startswith("ThinwireError"), f"{case} on {engine}: {said or 'accepted'}"
        assert words in said and "\n" not in said, f"{case} on {engine}: {said}"


# ----------------------------------------------------------------------------------------- parameters that come late

LATE = [
    Case("dense"), Case("int8(smallest=0)"), Case("int8(smallest=0, feedback='gradients')"),
    Case("radius(smallest=0, start=0, T=2, density=0.3)", "", "adamw"),
    Case("scape(smallest=0, density=0.1, warmup=2)", "", "adams"),
    Case("separate(smallest=0, ratio=4, block=64, beta=None)"),
    Case("tagc(feedback='gradients', smallest=0, theta=0.9)"),
    Case("topk(feedback='gradients', smallest=0, density=0.1)"),
    Case("onebit-adam(smallest=0, warmup=1, group=32)", "", "adamw"),
]  # fmt: skip
HELD = "the optimizer", "another optimizer", "none"


def _late(rank, world, engine):
    """w1 is frozen when compress() is called, and thawed later; ``held``: then the optimizer takes it, or a second one
    does, or none."""

    def look(case):
        found: dict[str, Any] = {}
        for held in HELD:
            model = build(engine, world, net=Given, prepare=lambda net: net.w1.requires_grad_(False))
            optimizers = [case.make(model.parameters())]
            wire = thinwire.compress(model, optimizers, case.method, steps=8)
            late = parts(model)["w1"]
            start = full(late).clone()

            def step(number, late=late, model=model, wire=wire, optimizers=optimizers):
                values = given(number, rank)
                if not late.requires_grad:
                    del values["w1"]
                with wire.accumulate():
                    model(values).backward()
                wire.clip_grad_norm_(1.0)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

            def thaw(late=late, optimizers=optimizers, held=held, step=step, case=case):
                late.requires_grad_(True)
                if held == "the optimizer":
                    optimizers[0].add_param_group({"params": [late]})
                elif held == "another optimizer":
                    optimizers.append(case.make([late]))
                for number in (2, 3, 4):
                    step(number)

            step(0)
            step(1)
            found[f"{held}: raised"] = error_of(thaw)
            if not found[f"{held}: raised"]:
                found[f"{held}: equal"] = same_on_all_ranks(model)
                found[f"{held}: moved"] = not torch.equal(start, full(late))
        return found

    return findings(spread(2, LATE), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_parameter_that_comes_late_is_served_or_refused_by_name(engine):
    def check(method, what):
        wrong = []
        for held in HELD:
            label, moves = f"thawed, and held by {held}", held != "none"
            raised = what[f"{held}: raised"]
            if raised:
                clear = raised.startswith(("ThinwireError", "RuntimeError")) and "w1" in raised and "\n" not in raised
                wrong += [f"{label}: {raised}"] * (not clear)
            else:
                wrong += [f"{label}: ranks hold different weights"] * (not what[f"{held}: equal"])
                wrong += [f"{label}: moved is {not moves}"] * (what[f"{held}: moved"] != moves)
        return wrong

    each(ranks.run(_late, 2, engine), engine, check)
