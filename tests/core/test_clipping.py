"""With a clip that bites a loss 256 times as large makes the same run, for each method, engine and kind of clip."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import ranks
import thinwire
from breadth import alternating, dealt, spread
from engines import build, made, refusal, same_on_all_ranks
from models import flat, loss_of
from thinwire.methods import resolve
from thinwire.optim import AdamS
from user_programs import METHODS, ONLY

STEPS = 8
SIZES = ((1, 1e9), (256, 0.25))
"""Factors of the loss, whose gradients have norms of about 0.7, and clips: none bites in the first run."""
ADAMS = [
    method
    for method in METHODS
    if ONLY.get(method.split("(")[0], "adam")[:4] == "adam" and method[:4] != "none"
]
ON_MOMENTS = ("scape", "onebit")
PLACES = ("ddp, wire", "fsdp2, torch", "ddp, torch", "fsdp2, wire")


def _moved(rank: int, world: int, place: str, method: str, size: int, clip: float) -> Tensor | None:
    """How far 8 steps move all weights; None: torch's clips act on steps that the method has made, or on momenta."""
    kind, clips = place.split(", ")
    model = build(kind, world)
    adam = AdamS if ONLY.get(method.split("(")[0]) == "adams" else torch.optim.AdamW
    optimizer, start = adam(model.parameters(), lr=3e-3), flat(model)
    wire = thinwire.compress(model, optimizer, method, steps=STEPS)
    if clips == "torch" and (wire.method.card.step_maker is not None or method.startswith("onebit")):
        wire.close()
        return None
    for step in range(STEPS):
        (loss_of(model, step, rank) * size).backward()
        if clips == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        else:
            wire.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    wire.close()
    return flat(model) - start


def _drifts(rank, world, place, methods):
    found = {}
    for method in methods:
        plain, *others = [_moved(rank, world, place, method, *size) for size in SIZES]
        if plain is not None:
            found[method] = [float((other - plain).norm() / plain.norm()) for other in others]
    return found


def _saved_and_loaded(rank, world, kind, methods):
    """The errors of wires that load what they have saved, in a run of bfloat16 that is clipped."""
    said = {}
    for method in methods:
        model = build(kind, world, prepare=lambda net: net.to(torch.bfloat16))
        adam = AdamS if ONLY.get(method.split("(")[0]) == "adams" else torch.optim.AdamW
        optimizer = adam(model.parameters(), lr=3e-3)
        try:
            wire = thinwire.compress(model, optimizer, method, steps=STEPS)
        except thinwire.ThinwireError:
            continue  # not for weights in 16 bits
        for step in range(STEPS - 2):
            loss_of(model, step, rank).backward()
            wire.clip_grad_norm_(0.25)
            optimizer.step()
            optimizer.zero_grad()
        said[method] = refusal(wire.load_state_dict, wire.state_dict())
        wire.close()
    return said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_what_a_clipped_run_in_16_bits_saves_can_be_loaded(kind):
    some = dealt(spread(2, ADAMS), kind, ("ddp", "fsdp2"))
    methods = {*some, *(method for method in ADAMS if method.startswith(("onebit", "radius")))}
    methods = {method for method in methods if kind == "ddp" or not method.startswith("local-steps")}
    for said in ranks.run(_saved_and_loaded, 2, kind, sorted(methods)):
        assert len(said) > 3 and not any(said.values()), said


@pytest.mark.parametrize("place", PLACES)
def test_a_clipped_run_does_not_feel_the_size_of_the_loss(place):
    """It ends where the run does whose loss is small and not clipped, up to the method's noise."""
    methods = {*dealt(spread(3, ADAMS), place, PLACES), *(method for method in ADAMS if method.startswith(ON_MOMENTS))}
    methods = {method for method in methods if place.startswith("ddp") or not method.startswith("local-steps")}
    for found in ranks.run(_drifts, 2, place, sorted(methods)):
        assert len(found) > 1
        assert all(drift < 0.4 for drifts in found.values() for drift in drifts), found


def _without_limit(rank, world, kind, methods):
    """What is wrong after a step that rank 1 clips at NaN, as an adaptive limit does after a bad batch."""
    wrong: dict[str, list[str]] = {}
    for method in methods:
        model = build(kind, world)
        optimizer = made(type(resolve(method)).OPTIMIZER, model)
        wire = thinwire.compress(model, optimizer, method, steps=STEPS)
        alone, said = wire.method.card.alone(1), wrong.setdefault(method, [])
        skips = not alone or rank == 1 or (kind == "hsdp" and rank == 0)  # ranks of a node skip together
        said += ["a negative limit is taken"] * ("max_norm" not in refusal(wire.clip_grad_norm_, -1.0))
        for step in range(3):
            loss_of(model, step, rank).backward()
            wire.clip_grad_norm_(math.nan if step == 1 and rank == 1 else 1.0)
            before = flat(model)
            optimizer.step()
            optimizer.zero_grad()
            moved = not torch.equal(flat(model), before)
            said += [f"step {step} moved {moved}"] * (moved == (step == 1) and not alone)
        said += ["weights are not finite"] * (not flat(model).isfinite().all())
        said += [f"{wire.skipped} steps are skipped"] * (wire.skipped != skips)
        drift = method == "none" or wire.method.card.alone(2)
        said += ["ranks drift apart"] * (not drift and not same_on_all_ranks(model))
        wire.close()
    return wrong


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_a_limit_of_nan_skips_the_step(kind, world):
    methods = dealt(spread(2, sorted({*METHODS, "none", "dense"})), kind)
    methods = [method for method in methods if kind in resolve(method).engines]
    for wrong in ranks.run(_without_limit, world, kind, methods):
        assert len(wrong) > 1 and not any(wrong.values()), wrong
