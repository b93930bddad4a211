"""SAM by hand: a first pass whose gradients move the weights and are dropped, and a second one that is stepped with."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch

import ranks
import thinwire
from breadth import dealt
from engines import build, same_on_all_ranks
from models import flat, loss_of
from thinwire.methods import TABLE, Dense, LocalSteps
from thinwire.proof.record import small

RHO = 0.05
"""What a gradient is multiplied with to move the weights."""


def _train(model, optimizer, rank, steps, apart=nullcontext):
    """Take ``steps`` steps of SAM; its first passes are inside ``apart()``. Return the weights after each."""
    weights, after = list(model.parameters()), []
    for step in range(steps):
        with apart():
            loss_of(model, step, rank).backward()
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight in weights:
                weight.add_(weight.grad, alpha=RHO)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        with torch.no_grad():
            for weight, former in zip(weights, before, strict=True):
                weight.copy_(former)
        optimizer.step()
        optimizer.zero_grad()
        after.append(flat(model))
    return after


def _by_hand(rank, world, kind):
    warnings.simplefilter("ignore")
    stock = build(kind, world)
    reference = _train(stock, torch.optim.AdamW(stock.parameters(), lr=1e-3), rank, 3)[-1]
    broken = []
    others = (cls for cls in TABLE if kind in cls.engines and cls not in (Dense, LocalSteps))
    for cls in [Dense, *dealt(others, kind)]:
        model = build(kind, world)
        optimizer = cls.OPTIMIZER(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, optimizer, small(cls), steps=6)
        *_, end = _train(model, optimizer, rank, 3)
        if not same_on_all_ranks(model) and wire.method.rank_equal:
            broken.append(f"{cls.name}: the ranks end apart")
        if (wire.step, wire.skipped) != (6, 3):
            broken.append(f"{cls.name}: {wire.step} steps, {wire.skipped} of them skipped")
        if cls is Dense and not torch.equal(end, reference):
            broken.append("dense: not what the engine does by itself")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_ranks_end_alike_and_dense_as_without_a_wire(kind, world):
    assert ranks.run(_by_hand, world, kind) == [[]] * world


def _in_rounds(rank, world):
    """Tell whether weights are the same after each step as with first passes of which the wire does not know."""
    warnings.simplefilter("ignore")
    ends = []
    for passes in (2, 1):
        model = build("ddp", world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        method = LocalSteps(every=2 * passes, outer_lr=1.0, outer_momentum=0.5)
        wire = thinwire.compress(model, optimizer, method)
        ends.append(torch.stack(_train(model, optimizer, rank, 6, model.no_sync if passes == 1 else nullcontext)))
        wire.close()
    return torch.equal(*ends), same_on_all_ranks(model)


def test_in_local_steps_a_first_pass_counts_as_one_step_and_changes_no_round():
    """W was copied after it, when each rank had moved by its own gradient: ranks stayed apart."""
    assert ranks.run(_in_rounds, 2) == [(True, True)] * 2
