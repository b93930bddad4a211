"""One optimizer step after another, where programs do not step as the book says: who steps, when, and with what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ranks
import thinwire
from engines import build
from models import flat
from test_edges import SHAPES, Given, full, parts, summed
from threaded import entries

TOPK = "topk(feedback='gradients', smallest=0, density=0.1)"
SCAPE = "scape(smallest=0, density=0.1, warmup=1)"


def gradients(step: int, rank: int, names=tuple(SHAPES)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    every = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: every[name] for name in names}


def two(model: nn.Module, kind: Callable = torch.optim.SGD, **options: Any) -> list[torch.optim.Optimizer]:
    """One optimizer for w0 and w1, another for w2."""
    of = parts(model)
    return [kind([of["w0"], of["w1"]], lr=0.01, **options), kind([of["w2"]], lr=0.01, **options)]


def told(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _idle(world: int, rank: int, engine: str, method: str, order: int, nan: bool) -> list[tuple[int, int]]:
    """In step 1 the second optimizer has no gradients."""
    options = {"find_unused_parameters": True} if engine == "ddp" else {}
    model = build(engine, world, net=Given, **options)
    optimizers = two(model)[::order]
    wire = thinwire.compress(model, optimizers, method)
    counts = []
    for step in range(3):
        loss = model(gradients(step, rank, ("w0", "w1") if step == 1 else tuple(SHAPES)))
        (loss * (float("nan") if nan and step == 1 and rank == 1 else 1.0)).backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        counts.append((wire.step, wire.skipped))
    return counts


def _every_other_time(world: int, rank: int, engine: str, method: str) -> float:
    """The second optimizer steps every other time: how far are the forward pass's weights from the owners'?"""
    model = build(engine, world, net=Given)
    optimizers = two(model, thinwire.AdamS, weight_decay=0.1)
    wire = thinwire.compress(model, optimizers, method, steps=20)
    worst = 0.0
    for step in range(6):
        now = {name: full(weight).clone() for name, weight in parts(model).items()}
        model(gradients(step, rank)).backward()
        if step:
            seen = (model.module if engine == "ddp" else model).seen
            worst = max(worst, *(float((seen[name] - now[name]).abs().max()) for name in now))
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
            optimizer.zero_grad()
    wire.close()
    return worst


def _thrown_away(world: int, rank: int, engine: str, inf: bool, ours: bool) -> tuple[int, int, float]:
    """An exchanged gradient is dropped, and the next step accumulates; what was lost of the other steps."""
    model = build(engine, world, net=Given)
    weights, optimizer = parts(model), torch.optim.SGD(model.parameters(), lr=0.01)
    wire = thinwire.compress(model, optimizer, TOPK, safety=thinwire.Safety(outlier_clip=None))
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step in range(4):
        with wire.accumulate(last=False) if ours else _alone(model, engine):
            model(gradients(10 + step, rank)).backward()
        with wire.accumulate() if ours else contextlib.nullcontext():
            (model(gradients(step, rank)) * (float("inf") if inf and (step, rank) == (1, 0) else 1.0)).backward()
        if step != 1:
            for name in total:
                given = gradients(10 + step, rank)[name] + gradients(step, rank)[name]
                total[name] += summed(given.double()) - world * full(weights[name].grad).double()
            optimizer.step()
        optimizer.zero_grad()
    waits = {name: entries(wire.state_dict())[f"residual/{name}"].double() for name in total}
    lost = max(abs(float(total[name].sum() - summed(waits[name].sum()))) for name in total)
    return wire.step, wire.skipped, lost


@contextlib.contextmanager
def _alone(model: Any, engine: str):
    if engine == "ddp":
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def _zero_mean(world: int, rank: int, engine: str) -> tuple[int, int]:
    """Two exchanged passes, of which the first has a gradient of zeros for one parameter: nothing was thrown away."""
    model = build(engine, world, net=Given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wire = thinwire.compress(model, optimizer, TOPK)
    for step in range(2):
        for half in range(2):
            given = gradients(2 * step + half, rank)
            for name in ("w0", "w2")[half : half + 1]:
                given[name].zero_()
            model(given).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wire.step, wire.skipped


def _saved_inside(world: int, rank: int, engine: str) -> tuple[int, bool]:
    """The state is saved while the second optimizer has not stepped: going on from it is going on."""

    def steps(model, optimizers, chosen):
        for step in chosen:
            model(gradients(step, rank)).backward()
            for optimizer in optimizers[: 1 + step % 2]:
                optimizer.step()
                optimizer.zero_grad()

    model = build(engine, world, net=Given)
    optimizers = two(model)
    wire = thinwire.compress(model, optimizers, "radius(smallest=0, start=0, T=3, density=0.2)")
    steps(model, optimizers, range(3))
    saved, weights = wire.state_dict(), {name: full(p).clone() for name, p in parts(model).items()}
    left = {name: None if p.grad is None else p.grad.clone() for name, p in parts(model).items()}
    steps(model, optimizers, range(3, 6))
    again = build(engine, world, net=Given)
    optimizers = two(again)
    other = thinwire.compress(again, optimizers, "radius(smallest=0, start=0, T=3, density=0.2)")
    again(gradients(9, rank)).backward()  # a step that is under way when the state is loaded
    with torch.no_grad():
        for name, parameter in parts(again).items():
            if hasattr(parameter, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(weights[name])
            parameter.grad = left[name]
    other.load_state_dict(saved)
    steps(again, optimizers, range(3, 6))
    return other.step - wire.step, torch.equal(flat(model), flat(again))


def _all(rank: int, world: int, engine: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for method in ("dense",) if engine == "ddp" else ("dense", TOPK):
        for order in (1, -1):
            for nan in (False, True):
                case = f"idle {method} {order} {nan}"
                found[case] = told(lambda m=method, o=order, n=nan: _idle(world, rank, engine, m, o, n))
    for method in ("dense", TOPK, "sdp4bit(smallest=0)", SCAPE):
        found[f"every other {method}"] = told(lambda m=method: _every_other_time(world, rank, engine, m))
    for inf in (False, True):
        for ours in (False, True):
            found[f"thrown {inf} {ours}"] = told(lambda i=inf, o=ours: _thrown_away(world, rank, engine, i, o))
    found["zero mean"] = told(lambda: _zero_mean(world, rank, engine))
    found["saved inside"] = told(lambda: _saved_inside(world, rank, engine))
    return found


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_steps_that_are_not_by_the_book(engine):
    for found in ranks.run(_all, 2, engine):
        for case, what in found.items():
            if case.startswith("idle"):
                skipped = int(case.endswith("True"))
                assert what == [(1, 0), (2, skipped), (3, skipped)], (engine, case, what)
            elif case.startswith("every other scape"):
                assert "did not step after the last exchange" in str(what), (engine, case, what)
            elif case.startswith("every other"):
                assert what == 0, (engine, case, what)
            elif case.startswith("thrown"):
                step, skipped, lost = what
                assert (step, skipped) == (4, 1) and lost < 1e-3, (engine, case, what)
            elif case == "zero mean":
                assert what == (2, 0), (engine, case, what)
            else:
                assert what == (0, True), (engine, case, what)


def _scaled(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for method, kind in (("trickle(smallest=0)", torch.optim.AdamW),
                         ("onebit-adam(smallest=0, warmup=2, group=32)", torch.optim.AdamW)):  # fmt: skip
        model = build("ddp", world, net=Given)
        scaler = torch.amp.GradScaler("cpu")
        found[method] = told(lambda m=method, k=kind, s=scaler, of=model: thinwire.compress(
            of, two(of, k), m, steps=9, scaler=s))  # fmt: skip
    return found


def test_a_scaler_that_unscales_one_by_one_is_refused_by_methods_that_read_gradients_before():
    for method, said in ranks.run(_scaled, 2)[0].items():
        assert said.startswith("ThinwireError") and "works with one optimizer only" in said, (method, said)
