"""``benchmarks/predict/draws.py``: what its score counts as right, and that it keeps every row."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "predict"))

import draws
from draws import Row, Trial

KEY = ("1/0", "50", "net20m", "8", "ddp")


def trial(advice: str = "dense", **measured: tuple[float, float]) -> Trial:
    """Method -> its predicted and its measured seconds."""
    rows = [Row(name, made, 0.9 * made, 1.1 * made, took) for name, (made, took) in measured.items()]
    return Trial(KEY, advice, rows)


def test_methods_within_five_percent_may_swap():
    assert trial(dense=(4, 4), a=(1, 1.04), b=(2, 1.0)).is_in_order
    assert not trial(dense=(4, 4), a=(1, 1.2), b=(2, 1.0)).is_in_order


def test_do_not_compress_is_right_where_dense_is_as_fast_or_nearly():
    assert trial("dense", dense=(1, 1), a=(1.1, 1.0)).agrees
    assert not trial("a", dense=(1, 1), a=(0.8, 1.0)).agrees, "it was no faster"
    assert trial("dense", dense=(1, 1), a=(1, 0.92)).agrees, "it saved little"
    assert not trial("dense", dense=(1, 1), a=(1, 0.8)).agrees, "it saved much"
    assert trial("a", dense=(1, 1), a=(0.8, 0.8)).agrees


@pytest.mark.parametrize(
    ("shares", "steps", "expected"),
    [
        ([1.0], [9, 9, 1, 2, 3], 2),
        ([0.75, 0.25], [9, 9, 1, 1, 1, 5, 5], 2),  # the last step ends a round early
        ([0.995, 0.005], [9, 9, 1, 2, 3], 2),  # its cycle is longer than the run
    ],
)
def test_a_typical_step_is_that_of_whole_cycles(shares, steps, expected):
    timeline = SimpleNamespace(steps=[SimpleNamespace(share=share) for share in shares])
    assert draws.typical(timeline, steps) == expected


def test_a_setting_replaces_its_rows_and_keeps_the_others(tmp_path):
    file, other = tmp_path / "draws.csv", Trial(("", "500", "net20m", "8", "ddp"), "a", trial(dense=(1, 1)).rows)
    for each in (trial(dense=(1, 1)), other, trial("a", dense=(2, 2), a=(1, 1.5))):
        draws.write(each, file)
    assert draws.read(file) == [other, trial("a", dense=(2, 2), a=(1, 1.5))]


def test_a_seed_is_a_row_of_settings():
    first = list(draws.draw(1, range(24)))
    assert first == list(draws.draw(1, range(24))) != list(draws.draw(2, range(24)))
    assert all(20 <= setting.rate <= 800 and len(setting.methods) == draws.DRAWN for setting in first)
