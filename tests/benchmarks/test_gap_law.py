"""``benchmarks/loss/gap_law.py``: it finds a law that is there, tests it on what was left out, and is silent beyond."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "loss"))
import gap_law
import ladder_tables
from gap_law import Point, Setting, Study

ERROR = 0.001
SIZES = [(size, batch, steps) for size in (1e5, 1e6) for batch in (1e3, 4e3) for steps in (500, 2000, 8000)]


def points(gap, error=ERROR, seed=0):
    draw = random.Random(seed)
    return [
        Point((size, batch), at := Setting(size, steps, batch), gap(at) + draw.gauss(0, error), error, 1)
        for size, batch, steps in SIZES
    ]


def in_steps(at):
    return 0.02 - 20 / at.steps


def in_length(at):
    return 0.01 + 0.01 * gap_law.ln(at.length, 20)


@pytest.mark.parametrize(
    ("truth", "form", "values"),
    [(in_steps, "a + b / steps", (0.02, -0.02)), (in_length, "a + b ln(tokens per parameter)", (0.01, 0.01))],
)
def test_a_law_that_is_there_is_found(truth, form, values):
    study = Study(points(truth))
    kept = {one.law.form: one for one in study.kept(Setting(3e5, 3000, 2e3))}
    assert kept[form].off < 2 * ERROR and kept[form].law.values == pytest.approx(values, abs=2 * ERROR)
    assert not {"a", "a + b ln(steps)"} & kept.keys(), "what the runs contradict"


def test_an_interval_holds_what_it_should():
    """95 of 100 times, for a run like those that were made, its own error included."""
    at, held = Setting(3e5, 3000, 2e3), 0
    for seed in range(200):
        law = gap_law.fit(points(in_steps, seed=seed), "a + b / steps")
        said = law.forecast(at, ERROR)
        held += said.low <= in_steps(at) + random.Random(1000 + seed).gauss(0, ERROR) <= said.high
    assert 180 <= held <= 198


def test_points_that_lie_apart_beyond_their_errors_widen_it():
    apart = [replace(point, gap=point.gap + 0.01 * (-1) ** at) for at, point in enumerate(points(in_steps))]
    law, other = gap_law.fit(apart, "a + b / steps"), gap_law.fit(points(in_steps), "a + b / steps")
    assert law.spread == pytest.approx(0.01, rel=0.4) and other.spread < 0.001
    assert law.forecast(apart[0].at).half > 3 * other.forecast(apart[0].at).half


def test_it_speaks_near_its_runs_and_not_far_from_them():
    study = Study(points(in_length))
    near, far = Setting(3e6, 8000, 4e3), Setting(1e9, 2e10 / 2**20, 2**20)
    said = study.forecast(near)
    assert said.low <= in_length(near) <= said.high and said.half < gap_law.USEFUL
    assert not gap_law.says(said).startswith("nothing")
    assert {one.law.form for one in study.kept(far)} == {"a + b ln(steps) + c ln(size) + d ln(batch)"}
    one_size = Study([point for point in points(in_length) if point.at.parameters == 1e5])
    assert one_size.forecast(far) is None, "size was not varied"
    assert gap_law.says(None) == "nothing"


def test_what_its_errors_drown_says_nothing():
    study = Study(points(in_steps, error=0.03))
    said = study.forecast(Setting(3e5, 3000, 2e3))
    assert said.half > gap_law.USEFUL and gap_law.says(said).startswith("nothing (")


def test_too_few_runs_make_no_law():
    assert gap_law.fit([], "a") is None and gap_law.fit(points(in_steps)[:1], "a") is None
    assert gap_law.fit(points(in_steps)[:3], "a + b ln(steps) + c ln(size) + d ln(batch)") is None
    assert Study(points(in_steps)[:3]).forecast(Setting(1e5, 500, 1e3)) is None, "all of one group"


def test_the_ladders_points_are_its_gaps_and_say_nothing_of_large_models():
    """What docs and plan rest on; a run that changes it changes these sentences."""
    runs = list(ladder_tables.read(gap_law.DATA).values())
    of_trickle = gap_law.points_of(runs, "trickle", "adamw")
    by_setting = {(point.group, point.at.steps): point for point in of_trickle}
    point = by_setting[("120k", "peps", 4, 64), 2400]
    assert (point.at.tokens, point.at.parameters) == (4096, 120576) and point.at.length == pytest.approx(81.5, abs=0.1)
    assert point.seeds == 2 and 0 < point.gap < 0.02 and point.error < 0.01
    for method, optimizer in gap_law.PAIRS:
        study = Study(gap_law.points_of(runs, method, optimizer))
        for at in (at for at in gap_law.TARGETS.values() if at.parameters >= 1e8):
            assert gap_law.says(study.forecast(at)).startswith("nothing"), method
