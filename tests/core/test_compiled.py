"""torch.compile around an optimizer's step, or more of a step: the same bits, with every method."""

from __future__ import annotations

import functools
import gc
import logging
import warnings

import pytest
import torch
from torch import nn

import ranks
import thinwire
from breadth import ALL, dealt, spread
from engines import adamw, build, train
from models import Net, flat
from test_strangers import BY_NAME, WORLDS, Given, begun, noise, runs

CASES = [*((name, {}) for name in BY_NAME), ("trickle", {"mask": "merged"})]
COMPILED = ("optimizer.step", "the update", *(["the whole step"] if ALL else []))  # the whole one takes seconds


def _weights(rank, world, kind, name, knobs, compiled):
    """The weights after four steps of which the part ``compiled`` is compiled, if any."""
    gc.collect()  # models of before leave tables of torch's: not while Dynamo reads these
    torch._dynamo.reset()  # else the model after next is not compiled any more: too many variants of one function

    def may_compile(part, function):
        return torch.compile(function, backend="eager") if part == compiled else function

    make = BY_NAME[name].OPTIMIZER
    fused = {"fused": True} if make is torch.optim.AdamW else {}  # else torch rounds otherwise where it is compiled
    cap = {"bucket_cap_mb": 1} if kind == "ddp" else {}  # less is an error of torch's own
    model = build(kind, world, net=lambda: Given((32, 32), (48, 16)), **cap)
    optimizer = make(model.parameters(), lr=1e-3, weight_decay=0.01, **fused)
    _, _, wire = begun(kind, world, name, model=model, optimizer=optimizer, **knobs)
    optimizer_step = may_compile("optimizer.step", optimizer.step)

    def update():
        wire.clip_grad_norm_(1.0)
        optimizer_step()
        optimizer.zero_grad()

    update = may_compile("the update", update)

    def whole(gradients):
        with wire.accumulate(last=True):
            model(gradients).backward()
        update()

    whole = may_compile("the whole step", whole)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        whole(noise(model, generator))
    weights = flat(model)
    wire.close()
    return weights


def _compiled(rank, world, kind):
    warnings.simplefilter("ignore")
    logging.disable()  # of what cannot be compiled, torch's own profiler among it
    broken = []
    for number, (name, knobs) in dealt(enumerate(spread(5, CASES)), kind, [engine for engine, _ in WORLDS]):
        if not runs(kind, name):
            continue
        plain = _weights(rank, world, kind, name, knobs, None)
        for part in dealt(COMPILED, number % 2, range(2)):
            if not torch.equal(plain, _weights(rank, world, kind, name, knobs, part)):
                broken.append(f"{name} {knobs} on {kind}: {part}")
    return broken


@pytest.mark.parametrize(("kind", "world"), WORLDS)
def test_a_compiled_step_is_the_step_bit_for_bit(kind, world):
    for broken in ranks.run(_compiled, world, kind):
        assert not broken


def _compiled_first(rank, world, kind):
    ends = []
    cap = {"bucket_cap_mb": 1} if kind == "ddp" else {}  # as above
    for wrap in (nn.Module.train, functools.partial(torch.compile, backend="eager")):
        model = build(kind, world, net=lambda wrap=wrap: wrap(Net(layers=0)), **cap)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, "int8(smallest=100)")
        train(model, optimizer, rank, range(3), wire)
        ends.append(flat(model))
        wire.close()
    return torch.equal(*ends)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_model_may_be_compiled_before_it_is_wrapped(kind):
    assert all(ranks.run(_compiled_first, 2, kind))
