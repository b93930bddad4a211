"""Nothing grows: over steps, over cycles of compress() and close(). benchmarks/proofs/soak.py is the long version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "proofs"))

import ranks
import soak
import thinwire
from thinwire.network.ledger import WINDOW, Ledger


def test_a_long_run_takes_no_more_memory_for_its_accounts_than_a_short_one():
    ledger = Ledger()
    for step in range(3 * WINDOW):
        ledger.count("inter", step)
        ledger.count_dense(2.0)
        ledger.close_step(skipped=step % 3 == 0)
    assert len(ledger.steps) == WINDOW
    stats = ledger.stats()
    assert stats["steps"] == 3 * WINDOW and stats["skipped"] == WINDOW and stats["dense_bytes_per_step"] == 2.0
    assert stats["wire_bytes_per_step"]["inter"] == (3 * WINDOW - 1) / 2
    ledger.reset()
    assert ledger.stats()["steps"] == ledger.stats()["skipped"] == 0


@pytest.mark.parametrize("case", ["trickle:ddp", "sdp4bit:fsdp2"])
def test_steps_leave_nothing_behind(case):
    seen, found = soak.soak(case, 72, megabytes=10.0)
    assert len(seen) == soak.READINGS and not found, found


@pytest.mark.parametrize("case", ["cycles:ddp", "cycles:fsdp2"])
def test_cycles_of_compress_and_close_leave_nothing_behind(case):
    seen, found = soak.soak(case, 15 if case == "cycles:ddp" else 12, megabytes=10.0)
    assert len(seen) >= 3 and not found, found


def _leaks(rank, world):
    """As ``soak.steps``, but something keeps a tensor of each step."""
    net = soak.model("ddp", world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    wire = thinwire.compress(net, optimizer, "int8")
    kept, seen = [], []
    for step in range(6):
        soak.take(net, optimizer, wire, rank, step)
        kept.append(torch.zeros(1))
        seen.append(soak.reading())
    return seen


def test_a_leak_would_be_seen():
    assert any(line.startswith("tensors") for line in soak.growth(ranks.run(_leaks, 2)[0]))
