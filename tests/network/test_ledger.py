"""What the ledger makes of the times of many steps."""

from __future__ import annotations

import pytest

from thinwire.network.ledger import Ledger, whole_rounds


def test_the_wait_of_a_round_counts_as_often_as_it_comes():
    """A median of steps would leave out the one step in four that waits for the network."""
    times = [100.0, 500.0, 100.0, 100.0] * 5
    assert whole_rounds([*times, 100.0], 4) == [200.0] * 5 and whole_rounds(times, 1) == times
    assert whole_rounds(times[:3], 4) == [pytest.approx(700 / 3)], "less than a round: all that there is"
    assert whole_rounds([], 4) == whole_rounds([], 1) == [0.0]
    ledger = Ledger()
    for wait in [0.0, 0.0, 0.0, 0.4] * 5:
        ledger.current.seconds["exposed"] += wait
        ledger.close_step()
    assert ledger.stats()["exposed_ms"] == 0
    assert ledger.stats(round_steps=4)["exposed_ms"] == pytest.approx(100)
