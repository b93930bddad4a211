"""What the guard says of values on several ranks: held against a look at each of them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from thinwire.network.guard import Guard
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values_of(draw: random.Random, bad: float) -> Tensor:
    """Of any size and dtype: finite, up to the largest of float16, or one of them not."""
    values = 3e4 * torch.randn(draw.choice([0, 1, 50])).clamp(-2, 2)
    if draw.random() < bad and len(values):
        values[draw.randrange(len(values))] = draw.choice([torch.inf, -torch.inf, torch.nan])
    return values.to(draw.choice(DTYPES))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_one_flag_of_all_ranks_says_what_a_look_at_every_value_says(seed, enabled):
    """Step by step, whoever has the bad value: in a buffer, or in a gradient that never came by; and who is in trouble.

    Switched off, a rank knows of itself alone.
    """
    torch.manual_seed(seed)
    draw, size = random.Random(seed), 1 + seed % 3
    world, steps = Threads(size), []
    for _ in range(6):
        bad = draw.choice([0.0, 0.0, 0.2])
        steps.append([
            ([values_of(draw, bad) for _ in range(draw.randrange(3))],
             [draw.choice([None, values_of(draw, bad)]) for _ in range(draw.randrange(3))],
             draw.random() < 0.15)
            for _ in range(size)
        ])  # fmt: skip

    def body(rank: int) -> list[tuple[bool, bool]]:
        guard, found = Guard([ThreadComm(world, rank, Ledger())], enabled), []
        for step in steps:
            buffers, gradients, trouble = step[rank]
            for buffer in buffers:
                guard.observe(buffer.clone())
            guard.observe_all(gradients)
            found.append(guard.agree(CPU, trouble) if trouble else guard.agree(CPU))
        return found

    for rank, found in enumerate(world.run(body)):
        for number, (step, (finite, troubled)) in enumerate(zip(steps, found, strict=True)):
            if not enabled:
                assert (finite, troubled) == (True, step[rank][2])
                continue
            bad = any(not bool(of.isfinite().all()) for one in step for of in (*one[0], *one[1]) if of is not None)
            assert troubled == any(one[2] for one in step), number
            assert troubled or finite == (not bad), number


def test_trouble_is_no_finite_step():
    guard = Guard([])
    assert guard.agree(CPU, True) == (False, True) and guard.agree(CPU) == (True, False)


def test_a_norm_that_overflows_is_not_finite_and_float16_has_none_that_does():
    """The same of a buffer and of gradients beside each other, of which one alone may be float16."""
    for of, finite in (
        ([torch.full((4,), 1e20)], False), ([torch.full((4,), 1e18, dtype=torch.bfloat16)] * 2, True),
        ([torch.full((4,), 6e4, dtype=torch.float16)], True),
        ([torch.ones(2), torch.full((4,), 6e4, dtype=torch.float16)], True),
        ([torch.full((2,), 1e200, dtype=torch.float64)], False), ([torch.full((2,), 1e30).double()], True),
    ):  # fmt: skip
        one, all_ = Guard([]), Guard([])
        for values in of:
            one.observe(values)
        all_.observe_all(of)
        assert one.agree(CPU) == all_.agree(CPU) == (finite, False), of


def test_what_is_forgotten_does_not_count_and_a_step_is_forgotten_once_it_is_judged():
    guard = Guard([])
    guard.observe(torch.tensor(torch.nan))
    guard.forget()
    assert guard.agree(CPU) == (True, False)
    guard.observe(torch.tensor(torch.nan))
    assert guard.agree(CPU) == (False, False) and guard.agree(CPU) == (True, False)


def test_all_of_its_groups_agree_or_those_that_are_named():
    """Two nodes of two ranks: the flag crosses both groups; over one alone the other node hears nothing."""
    world = Threads(4)

    def body(rank: int) -> tuple[bool, bool]:
        node = 2 * (rank // 2)
        inside = ThreadComm(world, rank, Ledger(), range(node, node + 2))
        across = ThreadComm(world, rank, Ledger(), range(rank % 2, 4, 2))
        guard, found = Guard([inside, across]), []
        for comms in (None, [inside]):
            if rank == 1:
                guard.observe(torch.tensor(torch.inf))
            found.append(guard.agree(CPU, comms=comms)[0])
        return tuple(found)

    assert world.run(body) == [(False, False), (False, False), (False, True), (False, True)]
