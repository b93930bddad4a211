"""What the ledger makes of the times of many steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from thinwire.base import device as devices
from thinwire.network.ledger import SAMPLED, WINDOW, Ledger, settled_rounds, whole_rounds


def test_the_wait_of_a_round_counts_as_often_as_it_comes():
    """A median of steps would leave out the one step in four that waits for the network."""
    times = [100.0, 500.0, 100.0, 100.0] * 5
    assert whole_rounds([*times, 100.0], 4) == [200.0] * 5 and whole_rounds(times, 1) == times
    assert whole_rounds(times[:3], 4) == [pytest.approx(700 / 3)], "less than a round: all that there is"
    assert whole_rounds([], 4) == whole_rounds([], 1) == [0.0]
    assert settled_rounds([9.0, 9.0, *times], 4) == [200.0] * 5 and settled_rounds(times[:4], 1) == times[:4]
    ledger = Ledger()
    for wait in [3.0, 3.0, *[0.0, 0.0, 0.0, 0.4] * 2]:  # the first two warm up, as in the steps' own times
        ledger.current.seconds["exposed"] += wait
        ledger.close_step()
    assert ledger.stats()["exposed_ms"] == 0
    assert ledger.stats(round_steps=4)["exposed_ms"] == pytest.approx(100)


def test_steps_without_an_exchange_are_sampled_on_a_gpu_as_those_with_one(monkeypatch):
    """Else the medians of rounds would be those of the steps in which nothing happens."""
    event = SimpleNamespace(elapsed_time=lambda end: 40.0, query=lambda: True, synchronize=lambda: None)
    monkeypatch.setattr(devices, "streams", lambda device: object())
    monkeypatch.setattr(devices, "mark", lambda device: event)
    ledger = Ledger()
    for step in range(800):
        if step % 4 == 0:
            with ledger.span("encode", torch.empty(1)):
                pass
        ledger.close_step()
    timed = [step for step in ledger.steps if step.timed]
    assert len(timed) == pytest.approx(SAMPLED + 800 / SAMPLED, rel=0.1)
    encoded = sum(step.seconds["encode"] for step in timed) / len(timed)
    assert encoded == pytest.approx(0.010, rel=0.2) and not any(step.events for step in ledger.steps if not step.timed)
    assert ledger.stats(last=True)["encode_ms"] in (0.0, 40.0)


def test_a_long_run_keeps_the_times_of_its_last_steps_only():
    ledger = Ledger()
    for step in range(WINDOW + 50):
        ledger.count("inter", step)
        ledger.close_step()
    assert len(ledger.steps) == WINDOW and ledger.steps[0].bytes["inter"] == 50
    assert ledger.total.steps == WINDOW + 50 and not ledger._unread
