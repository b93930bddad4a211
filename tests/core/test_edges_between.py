"""Between two optimizers' steps of one step: what users do there, and in hooks of their own, is as in plain torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import ranks
import thinwire
from breadth import ALL, ENGINES, alternating, spread
from engines import build
from models import flat
from test_edges import CASES, Case, Given, each, findings, full, on, parts
from test_edges_turns import gradients
from thinwire.base.errors import ThinwireError
from threaded import entries

STEPS = 5
PROGRAMS = [
    *CASES,
    Case("local-steps(every=1, outer='int8(smallest=0)', outer_momentum=0.0, second_moment='mean')", "", "adamw"),
    Case("topk(smallest=0, density=0.1)", "", "adamw"),
    Case("powersgd(smallest=0, rank=2)", "", "adamw"),
    Case("tagc(smallest=0, theta=0.9)", "", "adamw"),
    Case("radius(smallest=0, start=0, T=2, density=0.3, feedback='updates')", "", "adamw"),
    Case("trickle(smallest=0, density=0.2)", "", "muon"),
]


class Program:
    """Two optimizers, each with a schedule; ``draw`` says what comes where, and without it all comes at the end."""

    def __init__(self, world: int, rank: int, engine: str, case: Case, draw: random.Random | None) -> None:
        self.rank, self.draw, self.wrong = rank, draw, set[str]()
        self.model = build(engine, world, net=Given)
        of = parts(self.model)
        kinds: list[Callable] = [case.make, case.make]
        if case.optimizer == "muon":
            kinds = [torch.optim.Muon, torch.optim.AdamW]
        self.optimizers = [kinds[0]([of["w0"], of["w1"]], lr=0.01), kinds[1]([of["w2"]], lr=0.01)]
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["weight_decay"] = 2.0  # which schedules halve
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.8**step) for one in self.optimizers]
        self.groups = [one.param_groups for one in self.optimizers]
        self.arrived: list[list[tuple[torch.Tensor, torch.Tensor]] | None] = [None, None]
        self.rates = [0.01, 0.01]
        self.failed: int | None = None  # whose own step has raised an error
        self.inside: list[list[Callable[[int], None]]] = [[], []]  # what the next post hook does
        early = draw is not None and draw.random() < 0.5
        if early:
            self._hook()
        self.quantized = engine != "ddp" and case.name in ("sdp4bit", "zeropp", "qsdp")
        self.wire = thinwire.compress(self.model, self.optimizers, case.method, steps=20)
        if not early:
            self._hook()

    def _hook(self) -> None:
        for number, optimizer in enumerate(self.optimizers):
            optimizer.register_step_pre_hook(lambda *_, number=number: self.look(f"before step {number}"))
            optimizer.register_step_post_hook(lambda *_, number=number: self._in_hook(number))

    def _in_hook(self, number: int) -> None:
        self.failed = None
        self.look(f"in the hook of step {number}")
        for action in self.inside[number]:
            action(number)
        self.look(f"at the end of the hook of step {number}")

    def look(self, where: str) -> None:
        """The groups are the user's, with the rates of the schedules, and so is every gradient."""
        for number, optimizer in enumerate(self.optimizers):
            if optimizer.param_groups is not self.groups[number]:
                self.wrong.add(f"other groups {where}")
            if abs(optimizer.param_groups[0]["lr"] - self.rates[number]) > 1e-9:
                self.wrong.add(f"another rate {where}")
            weights = [weight for group in self.groups[number] for weight in group["params"]]
            arrived = self.arrived[number]
            if self.failed == number:  # what the method has stepped is hidden until the step is taken again
                continue
            if arrived is None:
                if any(weight.grad is not None and bool(weight.grad.any()) for weight in weights):
                    self.wrong.add(f"a gradient that was cleared {where}")
                continue
            for weight, (gradient, values) in zip(weights, arrived, strict=True):
                if weight.grad is not gradient or not torch.allclose(_local(gradient), values, rtol=1e-6):
                    self.wrong.add(f"another gradient {where}")

    def schedule(self, number: int) -> None:
        self.schedules[number].step()
        self.optimizers[number].param_groups[0]["weight_decay"] /= 2
        self.rates[number] *= 0.8

    def clear(self, number: int) -> None:
        self.optimizers[number].zero_grad(set_to_none=self.draw is None or self.draw.random() < 0.7)
        self.arrived[number] = None

    def save(self, number: int) -> None:
        saved = self.optimizers[number].state_dict()["param_groups"][0]["lr"]
        if abs(saved - self.rates[number]) > 1e-9:
            self.wrong.add("state_dict() has another rate")

    def backward(self, step: int) -> None:
        stored = {name: full(weight).clone() for name, weight in parts(self.model).items()}
        loss = self.model(gradients(step, self.rank))
        seen = getattr(self.model, "module", self.model).seen
        if not self.quantized and not all(torch.equal(stored[name], seen[name]) for name in stored):
            self.wrong.add("weights to compute with are not those that are stored")
        loss.backward()
        self.arrived = [
            [(weight.grad, _local(weight.grad).clone()) for group in groups for weight in group["params"]]
            for groups in self.groups
        ]

    def step(self, step: int) -> None:
        """Each optimizer's schedule, zero_grad and state_dict come in its hook, right after its step, or at the end."""
        self.backward(step)
        order, late = [0, 1], []
        if self.draw is not None:
            self.draw.shuffle(order)
        for number in order:
            actions = [self.schedule, self.clear, self.save]
            places: tuple[list[Any], list[Any], list[Any]] = ([], [], actions)
            if self.draw is not None:
                self.draw.shuffle(actions)
                places = ([], [], [])
                for action in actions:
                    self.draw.choice(places).append(action)
            self.inside[number] = places[0]
            if self.draw is not None and (step == number or self.draw.random() < 0.2):
                self.fail(number)
            self.optimizers[number].step()
            self.look(f"after step {number}")
            for action in places[1]:
                action(number)
                self.look("between")
            late += [(action, number) for action in places[2]]
        if self.draw is not None and self.draw.random() < 0.3:
            self.wire.state_dict()
        for action, number in late:
            action(number)
        self.look("at the end")

    def fail(self, number: int) -> None:
        """The optimizer's own step raises an error, before it is taken again."""
        self.failed = number
        _fail(self.optimizers[number])
        rates = [one.param_groups[0]["lr"] for one in self.optimizers]
        if any(one.param_groups is not mine for one, mine in zip(self.optimizers, self.groups, strict=True)):
            self.wrong.add("other groups after an error")
        if rates != pytest.approx(self.rates):
            self.wrong.add("other rates after an error")

    def end(self) -> None:
        """The wire is closed when one optimizer has stepped and the other one has not."""
        self.backward(STEPS)
        self.inside = [[], []]
        self.optimizers[0].step()
        self.look("before close()")
        taken = not self.wire.method.card.adds_up  # what the other one holds has left the method's state
        if taken:
            try:
                self.wire.state_dict()
                self.wrong.add("a state was saved that lacks what an optimizer still holds")
            except ThinwireError:
                pass
        self.wire.close()
        if taken:
            self.arrived[1] = None
        self.look("after close()")
        before = flat(self.model)
        self.optimizers[1].step()
        if taken and not torch.equal(before, flat(self.model)):
            self.wrong.add("after close() something that is no gradient was stepped with")


def _fail(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer's own step raise an error."""
    inner = "_init_group" if hasattr(optimizer, "_init_group") else "_step"
    with mock.patch.object(type(optimizer), inner, side_effect=MemoryError), pytest.raises(MemoryError):
        optimizer.step()


def _local(values: Any) -> torch.Tensor:
    return values.to_local() if hasattr(values, "to_local") else values


def _found(world: int, rank: int, engine: str, case: Case) -> dict[str, Any]:
    ended = []
    warnings.simplefilter("ignore")
    wrong: set[str] = set()
    for seed in (None, 1, 2) if ALL else (None, 1):
        program = Program(world, rank, engine, case, None if seed is None else random.Random(f"{seed} {case.method}"))
        for step in range(STEPS):
            program.step(step)
        ended.append((flat(program.model), entries(program.wire.state_dict())))
        program.end()
        wrong |= program.wrong
    (weights, state), *others = ended
    same = all(torch.equal(weights, there) for there, _ in others)
    kept = all(torch.equal(value, there[key]) for _, there in others for key, value in state.items())
    return {"same": same, "kept": kept, "wrong": sorted(wrong)}


def _all(rank: int, world: int, engine: str) -> Any:
    cases = on(engine, spread(2, PROGRAMS), among=tuple(dict.fromkeys(ENGINES)))
    return findings(cases, lambda case: _found(world, rank, engine, case))


@pytest.mark.parametrize(("engine", "world"), alternating(1, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_whatever_comes_between_two_optimizers_steps_is_as_in_plain_torch(engine, world):
    """The same bits as if it came after them; between any two calls groups and gradients are the user's."""

    def complaints(method: str, what: dict[str, Any]) -> list[str]:
        found = list(what["wrong"])
        return found + ["other weights"] * (not what["same"]) + ["another state"] * (not what["kept"])

    each(ranks.run(_all, world, engine), engine, complaints)


def _changed(rank: int, world: int, method: str, kind: Callable, by: str) -> float:
    """How far are the weights of the forward pass, which are gathered at masks, from the owners'?"""
    model = build("fsdp2", world, net=Given)
    optimizer = kind(model.parameters(), lr=0.01)

    @torch.no_grad()
    def shrink(*_: Any) -> None:
        for weight in model.parameters():
            weight.mul_(0.9)

    if by == "hooks":
        optimizer.register_step_post_hook(shrink)
    wire = thinwire.compress(model, optimizer, method, steps=20)
    if by == "hooks":
        optimizer.register_step_pre_hook(shrink)
    worst = 0.0
    for step in range(5):
        now = {name: full(weight).clone() for name, weight in parts(model).items()}
        model(gradients(step, rank)).backward()
        worst = max(worst, *(float((model.seen[name] - now[name]).abs().max()) for name in now))
        if by == "a second try":  # after the method has stepped in the optimizer's place
            _fail(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    wire.close()
    return worst


@pytest.mark.parametrize("by", ["hooks", "a second try"])
@pytest.mark.parametrize(
    ("method", "kind"),
    [("trickle:merged(smallest=0, density=0.05)", torch.optim.AdamW),
     ("scape(smallest=0, density=0.1, warmup=1)", thinwire.AdamS)],
)  # fmt: skip
def test_weights_that_change_in_hooks_or_in_two_tries_of_a_step_are_gathered_as_they_are(method, kind, by):
    assert max(ranks.run(_changed, 2, method, kind, by)) < 1e-6


def _shared(rank: int, world: int) -> str:
    models = [build("ddp", world, net=lambda: nn.Linear(4, 4)) for _ in range(2)]
    optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()], lr=0.1)
    wire = thinwire.compress(models[0], optimizer, "dense")
    try:
        thinwire.compress(models[1], optimizer, "dense")
    except thinwire.ThinwireError as error:
        wire.close()
        thinwire.compress(models[1], optimizer, "dense").close()
        return str(error)
    return ""


def test_an_optimizer_of_two_open_wires_is_refused():
    for said in ranks.run(_shared, 2):
        assert "another wire, still open, has this SGD" in said and "wire.close()" in said


class Adversaries(nn.Module):
    """A generator whose output the discriminator judges."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.judge = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.judge(torch.tanh(self.generator(noise)))


def _passed_through(rank: int, world: int, engine: str) -> dict[str, tuple[float, bool]]:
    """How far the discriminator moves that only the generator's passes go through, and whether a warning said so."""
    moved = {}
    for method in ("int8", "topk", "tagc", "sign", "loco", "powersgd"):
        feedback = "" if method == "loco" else ", feedback='gradients'"
        model = build(engine, world, net=Adversaries)
        of = parts(model)
        generator, judge = (torch.optim.SGD([of[f"{part}.weight"]], lr=0.1) for part in ("generator", "judge"))
        wire = thinwire.compress(model, [generator, judge], f"{method}(smallest=0{feedback})", steps=20)
        before = full(of["judge.weight"]).clone()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for step in range(4):
                noise = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
                for one, sign in ((generator, -1.0), (judge, 0.0)):
                    one.zero_grad()
                    (sign * model(noise)).mean().backward()
                    one.step()
        said = any("did not step after the last exchange" in str(one.message) for one in heard)
        moved[method] = (float((full(of["judge.weight"]) - before).norm()), said)
        wire.close()
    return moved


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_gradient_that_is_cleared_in_place_of_a_step_moves_nothing_or_is_warned_of(engine: str) -> None:
    for moved in ranks.run(_passed_through, 2, engine):
        assert all(far == 0 or said for far, said in moved.values()), moved
        assert any(far > 0 for far, _ in moved.values())
