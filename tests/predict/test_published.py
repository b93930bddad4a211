"""Published numbers beside predictions: the classes are whole, and the recorded predictions are today's."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data"
sys.path.insert(0, str(ROOT / "benchmarks" / "predict"))

import published  # noqa: E402
from thinwire.predict.cluster import read_cluster  # noqa: E402

ROWS = published.PUBLISHED.rows


def read(name: str) -> list[dict[str, str]]:
    with (DATA / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_has_a_class_and_those_not_predicted_a_reason():
    assert {row["class"] for row in ROWS.values()} == {"a", "b", "c", "input", "-"}
    for row in ROWS.values():
        if row["class"] == "b":
            assert row["why"].startswith("inputs: "), row["row"]
        if row["class"] in ("c", "-"):
            assert row["why"], row["row"]
        assert row["class"] != "a" or row["why"].startswith(("inputs: ", "")), row["row"]


def test_every_row_of_a_and_b_and_every_run_is_predicted_and_the_goals_are_met():
    table = read("predicted.csv")
    wanted = [row["row"] for row in ROWS.values() if row["class"] in ("a", "b")]
    assert [row["row"] for row in table] == wanted + [run["run"] for run in published.runs()]
    errors: dict[tuple[str, str], list[float]] = {}
    for row in table:
        if not row["fitted"]:
            error = float(row["predicted"]) / float(row["published"]) - 1
            errors.setdefault((row["class"], row["source"]), []).append(abs(error))
    for kind, middle, worst in (("a", 0.10, 0.25), ("b", 0.15, None)):
        of_kind = [sizes for (letter, _), sizes in errors.items() if letter == kind]
        assert median(map(median, of_kind)) <= middle
        assert worst is None or max(map(max, of_kind)) <= worst


@pytest.mark.parametrize("row", ("onebit-14", "onebit-26", "cu_grid-ddp-30m-bw1g-r0"))
def test_a_recorded_prediction_is_todays(row):
    recorded = next(line for line in read("predicted.csv") if line["row"] == row)
    if row in ROWS:
        predict, choose = published.SOURCES[ROWS[row]["paper"]]
        today = predict(ROWS[row], read_cluster(choose(ROWS[row])))
    else:
        run = next(run for run in published.runs() if run["run"] == row)
        today = published.diloco(run, read_cluster(published.run_cluster(run)))
    assert today == pytest.approx(float(recorded["predicted"]), rel=0.01)


def test_a_constant_is_fitted_by_its_row_alone():
    """The edr cluster's two rows give its two constants back from wherever they start."""
    from dataclasses import replace

    cluster = read_cluster("onebit-edr100")
    names = cluster.sourced("fitted:")
    off = {name: replace(getattr(cluster, name), value=getattr(cluster, name).value * 1.5) for name in names}
    fitted = published.fit(replace(cluster, **off))
    for name in names:
        assert getattr(fitted, name).value == pytest.approx(getattr(cluster, name).value, rel=0.01)
