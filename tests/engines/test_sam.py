"""SAM by hand: a first pass whose gradients move the weights and are dropped, and a second one that is stepped with."""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress

import pytest
import torch

import ranks
import thinwire
from breadth import alternating, dealt
from engines import build, same_on_all_ranks
from models import flat, loss_of
from thinwire.methods import TABLE, Dense, LocalSteps
from thinwire.proof.record import small

RHO = 0.05
"""What a gradient is multiplied with to move the weights."""


def _train(model, optimizer, rank, steps, apart=nullcontext, to_none=True):
    """Take ``steps`` steps of SAM; its first passes are inside ``apart()``. Return the weights after the last."""
    weights = list(model.parameters())
    for step in range(steps):
        with apart():
            loss_of(model, step, rank).backward()
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad, alpha=RHO)
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, step, rank).backward()
        with torch.no_grad():
            for weight, former in zip(weights, before, strict=True):
                weight.copy_(former)
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def _by_hand(rank, world, kind):
    warnings.simplefilter("ignore")
    stock = build(kind, world)
    reference = _train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-3), rank, 3)
    broken = []
    others = (cls for cls in TABLE if kind in cls.engines and cls not in (Dense, LocalSteps))
    for cls in [Dense, *dealt(others, kind)]:
        model = build(kind, world)
        optimizer = cls.OPTIMIZER(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, optimizer, small(cls), steps=6)
        end = _train(model, optimizer, rank, 3)
        if not same_on_all_ranks(model) and wire.method.rank_equal:
            broken.append(f"{cls.name}: the ranks end apart")
        if (wire.step, wire.skipped) != (6, 3):
            broken.append(f"{cls.name}: {wire.step} steps, {wire.skipped} of them skipped")
        if cls is Dense and not torch.equal(end, reference):
            broken.append("dense: not what the engine does by itself")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_ranks_end_alike_and_dense_as_without_a_wire(kind, world):
    assert ranks.run(_by_hand, world, kind) == [[]] * world


def _alone(rank, world, kind):
    """Return whether each run of local-steps warned of it."""
    warned = []
    for check_every in (0, None):
        for every, to_none in ((1, True), (2, True), (4, False)):
            model = build(kind, world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            safety = thinwire.Safety(check_every=check_every)
            wire = thinwire.compress(model, optimizer, LocalSteps(every=every), safety=safety)
            with warnings.catch_warnings(record=True) as heard, suppress(thinwire.ThinwireError):
                warnings.simplefilter("always")
                _train(model, optimizer, rank, 4, to_none=to_none)
            warned.append(any("SAM's first pass" in str(one.message) for one in heard))
            wire.close()
    return warned


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_ranks_that_step_alone_are_told_with_any_check(kind, world):
    """W is copied after the first pass has moved each rank, and ranks stay apart."""
    assert ranks.run(_alone, world, kind) == [[True] * 6] * world


def _beside(rank, world):
    warnings.simplefilter("ignore")
    model = build("ddp", world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.compress(model, optimizer, LocalSteps(every=2))
    _train(model, optimizer, rank, 4, model.no_sync)
    return wire.step, wire.skipped, same_on_all_ranks(model)


def test_ranks_that_step_alone_take_a_first_pass_of_which_they_do_not_know():
    assert ranks.run(_beside, 2) == [(4, 0, True)] * 2
