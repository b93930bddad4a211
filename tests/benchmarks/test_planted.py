"""The planted faults of the CUDA path: each can be planted in the source as it is."""

from __future__ import annotations

import sys
from pathlib import Path

import thinwire

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "proofs"))

import planted


def test_the_source_says_what_each_fault_replaces():
    """In one place: else ``planted.py`` would end, or plant two faults for one."""
    counts = {
        fault.what: (Path(thinwire.__file__).parent / fault.file).read_text().count(fault.right)
        for fault in planted.FAULTS
    }
    assert set(counts.values()) == {1}, counts
