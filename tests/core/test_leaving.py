"""A method is left in the middle of a run: the optimizer goes on with what it has then, on ranks that are alike."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
import torch.distributed as dist

import ranks
import thinwire
from breadth import alternating, dealt
from engines import build, refusal
from models import loss_of
from test_strangers import UPDATES, WORLDS, begun, runs
from thinwire.network.comm import local

LR, BEFORE, AFTER = 1e-3, 12, 2
OWN = [*UPDATES, "onebit-adam", "onebit-adam", "local-steps", "local-steps", "scape"]
"""What steps in the optimizer's place, changes what it holds, or lets ranks step alone; dealt out over the engines."""
KNOBS = {"onebit-adam": {"warmup": 5}}


def _pass(model, optimizer, step, rank):
    """Take one step; return its length."""
    before = [local(weight.detach()).clone() for weight in model.parameters()]
    loss_of(model, step, rank).backward()
    optimizer.step()
    optimizer.zero_grad()
    steps = [local(weight.detach()) - old for weight, old in zip(model.parameters(), before, strict=True)]
    return float(torch.cat([step.flatten() for step in steps]).norm())


def _follow(twin, model):
    """Give ``twin`` the weights of ``model``."""
    with torch.no_grad():
        for weight, given in zip(twin.parameters(), model.parameters(), strict=True):
            local(weight).copy_(local(given))


def _rates(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def _shards_of_all(model, world):
    every = [None] * world
    dist.all_gather_object(every, torch.cat([local(weight.detach()).flatten() for weight in model.parameters()]))
    return every


def _left(rank, world, kind):
    """By method: its last step, the first ones after it, those of a dense run whose Adam saw the same weights all the
    time; and do ranks hold the same weights in the end?"""
    warnings.simplefilter("ignore")
    found = {}
    for name in [name for name in dealt(OWN, kind) if runs(kind, name)]:
        model, optimizer, wire = begun(kind, world, name, **KNOBS.get(name, {}))
        _rates(optimizer, LR)
        twin = build(kind, world)
        shadow = type(optimizer)(twin.parameters(), lr=0.0)
        own = 0.0
        for step in range(BEFORE):
            _follow(twin, model)
            _pass(twin, shadow, step, rank)
            own = _pass(model, optimizer, step, rank)
        wire.hand_over()
        wire.close()
        wire = thinwire.compress(model, optimizer, "dense")
        _follow(twin, model)
        _rates(shadow, LR)
        lengths = [own]
        for step in range(BEFORE, BEFORE + AFTER):
            lengths += [_pass(model, optimizer, step, rank), _pass(twin, shadow, step, rank)]
        wire.close()
        every, shards = _shards_of_all(model, world), {"ddp": 1, "hsdp": world // 2, "fsdp2": world}[kind]
        found[name] = *lengths, all(torch.equal(every[i], every[i % shards]) for i in range(world))
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_steps_after_a_method_have_the_size_of_its_own_or_of_denses_and_ranks_stay_alike(kind, world):
    """At least a fifth of dense's, as momentum may begin anew; at most a quarter more than the larger of the two."""
    for found in ranks.run(_left, world, kind):
        assert len(found) > 1
        for name, (own, first, first_dense, second, second_dense, alike) in found.items():
            assert alike, f"after {name} on {kind} ranks drift apart"
            for step, dense in ((first, first_dense), (second, second_dense)):
                assert 0.2 * dense < step < 1.25 * max(own, dense), f"after {name} on {kind}: {step}, {own}, {dense}"


def _begin(world, kind="ddp", method="dense", **safety):
    model = build(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, thinwire.compress(model, optimizer, method, safety=thinwire.Safety(**safety))


def _begun_apart(rank, world, kind):
    """What is said of ranks with weights or moments of their own, which come before compress() or after it."""
    warnings.simplefilter("ignore")
    said, own = {}, 1e-3 * (rank if kind == "ddp" else rank // 2)
    for case in (
        ("dense", "weights", None), ("dense", "moments", None), ("dense", "moments", 0), ("dense", "", None),
        ("trickle(density=0.1, smallest=0)", "moments", None),
    ):  # fmt: skip
        method, apart, every = case
        model, optimizer, wire = _begin(world, kind, method, check_every=every)
        for weight in [weight for weight in model.parameters() if weight.dim() == 2]:
            if apart == "weights":
                local(weight.data).add_(own)
            elif apart:
                moments = {kind: torch.full_like(weight, 1e-3 + own) for kind in ("exp_avg", "exp_avg_sq")}
                optimizer.state[weight] = {"step": torch.tensor(5.0), **moments}
        for step in range(3):
            _rates(optimizer, LR * (step > 0))  # a schedule that warms up begins with 0
            said[case] = refusal(functools.partial(_pass, model, optimizer, step, rank))
            if said[case]:
                break
        wire.close()
    return said


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_ranks_that_begin_apart_are_refused_in_the_first_step_that_moves_weights(kind, world):
    for said in ranks.run(_begun_apart, world, kind):
        for case, line in said.items():
            # "trickle" steps matrices itself, and has no use for what the optimizer holds of them.
            if case[:2] in (("dense", "weights"), ("dense", "moments")) and case[2] is None:
                assert "ranks began with different weights, moments or learning rates: load" in line, case
            else:
                assert not line, case


def _no_mean(rank, world):
    """Rank 1's gradients were never finite: it has no moments. Then both ranks have one of whole numbers."""
    warnings.simplefilter("ignore")
    model, optimizer, wire = _begin(world, method="local-steps(every=4)")
    for step in range(2):
        (loss_of(model, step, rank) * (float("nan") if rank else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    said = [refusal(wire.hand_over)]
    for weight in model.parameters():
        optimizer.state[weight] = {"codes": torch.zeros(3, dtype=torch.uint8)}
    said.append(refusal(wire.hand_over))
    wire.close()
    return said


def test_moments_without_a_mean_are_named():
    for lacks, whole in ranks.run(_no_mean, 2):
        assert "its optimizer's" in lacks and "nothing" in lacks
        assert "codes of embedding.weight is torch.uint8" in whole
