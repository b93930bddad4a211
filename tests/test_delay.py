"""What a method costs of the loss is told beforehand."""

from __future__ import annotations

import pytest
from torch import nn

from thinwire.collectives import AllReduce
from thinwire.comm import CountingComm
from thinwire.ledger import Ledger
from thinwire.methods import TABLE, resolve
from thinwire.methods.delay import LONG, SHORT, Delay, slope
from thinwire.plan import Plan, describe
from thinwire.rehearsal import stand_in
from thinwire.testing import plan_of


def plan(spec: str, steps: int | None) -> Plan:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    method, parameters = resolve(spec), list(describe(model).values())
    exchange = AllReduce(CountingComm(0, 4, [0, 1, 2, 3], Ledger()))
    method.begin(stand_in(method, parameters, exchange, steps or 10_000))
    return plan_of(method, parameters, exchange)


def test_a_gap_is_that_of_a_dense_run_of_fewer_steps():
    assert Delay(steps=400).gap(800) == pytest.approx(2**0.2 - 1)
    assert Delay(share=0.5).gap(800) == pytest.approx(2**0.2 - 1)
    assert Delay(share=0.5).gap(1_000_000) == pytest.approx(2**0.07 - 1)
    assert Delay().gap(10) == 0
    assert Delay(steps=5000).gap(800) == Delay(share=0.9).gap(800), "who is further behind has not begun to learn"
    assert [slope(steps) for steps in (1, *SHORT[:1], *LONG[:1], 10**9)] == pytest.approx([0.2, 0.2, 0.07, 0.07])
    gaps = [Delay(steps=500, share=0.05).gap(steps) for steps in (800, 3200, 10_000, 50_000)]
    assert gaps == sorted(gaps, reverse=True)


def test_a_short_run_with_a_dear_method_is_warned_of_and_a_long_one_is_not():
    short, long = (plan("topk(density=0.01, feedback='gradient')", steps) for steps in (800, 200_000))
    assert short.warning is not None and "+47.0% in the 800 of this run" in short.warning
    assert short.warning.endswith("unless it goes on from a checkpoint; feedback='update' costs +0.0%")
    assert plan("scape", 800).warning.endswith("unless it goes on from a checkpoint")
    assert long.warning is None and "of dense's loss in 800 steps" in long.cost
    flat = " ".join(str(long).split())
    assert "costs about +47.0%" in flat and "in the 200,000 of this run" in flat
    assert plan("topk", 800).warning is None and plan("topk", 800).cost == ""
    assert "+14.0%" in plan("topk(density=0.05, portion=1.0)", 800).warning
    assert plan("topk(density=0.05)", 800).warning is None
    assert plan("topk(density=0.05, start=0.15, portion=1.0)", 800).warning is None
    assert plan("trickle(density=0.05, mask='shared', choosers=1)", 800).warning is not None
    assert plan("trickle(density=0.05, mask='shared')", 800).warning is None
    assert plan("dense", 800).cost == "" and plan("int8", 800).warning is None


def test_nothing_is_said_of_what_is_not_compressed():
    assert plan("topk(feedback='gradient', smallest=10000000)", 800).cost == ""


@pytest.mark.parametrize("cls", TABLE, ids=lambda cls: cls.name)
def test_every_method_says_what_is_known_or_that_nothing_is(cls):
    delay = cls().delay
    assert delay is None or 0 <= delay.gap(50_000) <= delay.gap(800) < 0.6


def test_a_dense_start_shortens_the_delay():
    late, now = (resolve(f"topk(feedback='gradient', density=0.01, start={start})").delay for start in (0.15, 0))
    assert late.steps == pytest.approx(0.85 * now.steps)
