"""The plan names the measured runs that are nearest to its method, with their setting, and says when there are none."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks" / "loss"))

import ladder_tables  # noqa: E402
import regime_tables  # noqa: E402
from thinwire import methods  # noqa: E402
from thinwire.base.knobs import knobs_of  # noqa: E402
from thinwire.methods import resolve  # noqa: E402
from thinwire.network.ledger import Ledger  # noqa: E402
from thinwire.plan.measured import MeasuredLoss, describe_measured, nearest_measured, read_measured  # noqa: E402
from thinwire.plan.plan import plan_of  # noqa: E402
from thinwire.proof.ranks import Threads, parameters_for  # noqa: E402
from threaded import exchange_on  # noqa: E402


def test_the_packaged_rows_are_those_of_the_runs():
    regimes, ladder = (
        of.read(ROOT / "docs" / "data" / f"{name}.jsonl").values()
        for of, name in ((regime_tables, "regimes"), (ladder_tables, "ladder"))
    )
    assert (ROOT / "src/thinwire/plan/measured.csv").read_text() == regime_tables.measured(regimes, ladder)


def test_tuned_runs_on_all_held_out_text_take_the_place_of_others():
    """The same method, text, size and length: one row, of the ladder."""
    rows = [row for row in read_measured() if row.dense != "Muon" and row.regime == "scratch"]
    same = Counter((row.method, row.text, row.ranks, row.parameters, row.steps) for row in rows)
    assert {key for key, count in same.items() if count > 1} == {
        ("trickle", "peps", 4, 120576, 600), ("trickle", "peps", 4, 120576, 2400), ("trickle", "peps", 4, 842496, 2056),
    }, "two batches"  # fmt: skip
    setting = ("trickle", "peps", 4, 120576, 800)
    (short,) = (row for row in rows if (row.method, row.text, row.ranks, row.parameters, row.steps) == setting)
    assert short.seeds == 3 and abs(short.gap_percent) < 3, "the other: one seed, 8.5% below untuned dense"


def test_a_gap_has_the_seeds_of_both_sides_those_of_the_longest_start_and_an_error():
    def row(*wanted):
        return next(r for r in read_measured() if (r.method, r.regime, r.text, r.parameters, r.steps) == wanted)

    assert row("onebit-adam(warmup_bits=4)", "scratch", "peps", 842496, 800).seeds == 1, "it has three, dense one"
    going_on = row("sdp4bit", "going-on", "peps", 120576, 300)
    assert going_on.seeds == 3 and going_on.error_percent < 0.1, "one went on from a shorter run"
    assert 2 < row("bf16", "scratch", "wikitext", 842496, 800).error_percent < 3
    assert all(row.error_percent > 0 for row in read_measured())


def test_the_longest_run_speaks_first():
    """A short run's lead is gone at 20 tokens per parameter: a plan that named it would promise it."""
    row = nearest_measured(resolve("trickle"), 4)[0]
    others = [other for other in read_measured() if (other.method, other.ranks) == ("trickle", 4)]
    long = (other.tokens_per_parameter for other in others if other.regime in ("scratch", "long"))
    assert row.tokens_per_parameter == max(long) > 20


def test_a_long_run_from_scratch_is_one_from_scratch(monkeypatch):
    made = [
        MeasuredLoss("sign", regime, "peps", 4, 1000, 800, 1, 0.0, tokens_per_parameter=length)
        for regime, length in (("scratch", 7.0), ("long", 27.0), ("finetune", 99.0))
    ]
    monkeypatch.setattr("thinwire.plan.measured.read_measured", lambda: tuple(made))
    assert nearest_measured(resolve("sign"), 4) == [made[1]]


def test_a_tuned_run_takes_no_place_of_another_start():
    """Fine-tuning for as many steps on the same text is another question."""
    regimes = regime_tables.read(ROOT / "docs" / "data" / "regimes.jsonl").values()
    tuned = [run | {"steps": 300} for run in ladder_tables.read(ROOT / "docs" / "data" / "ladder.jsonl").values()
             if (run["model"], run["steps"], run["sequences"]) == ("120k", 800, 16)]  # fmt: skip
    rows = regime_tables.measured(regimes, tuned).splitlines()
    start = "trickle,AdamW,{},peps,4,120576,300,"
    assert [sum(row.startswith(start.format(regime)) for row in rows) for regime in ("scratch", "going-on")] == [1, 1]


def test_muons_rows_are_held_against_dense_muon():
    rows = nearest_measured(resolve("trickle:muon"), 4)
    assert rows and {row.dense for row in rows} == {"Muon"} and "dense Muon" in str(rows[0])
    assert {row.dense for row in nearest_measured(resolve("trickle"), 4)} == {"AdamW"}


@pytest.mark.parametrize("spec", ["trickle", "trickle(mask='merged',bits=4)", "powersgd"])
def test_a_method_that_was_run_is_nearest_to_itself(spec):
    rows = nearest_measured(resolve(spec), 4)
    assert rows and all(resolve(row.method) == resolve(spec) for row in rows)
    assert len({row.text for row in rows}) == len(rows) <= 2
    exact = [row for row in read_measured() if row.method == rows[0].method and row.regime == "scratch"]
    assert rows[0] in exact


def test_other_knobs_are_told_with_the_run():
    """A density that nobody has run: the row says which one it was."""
    line = describe_measured(resolve("trickle(density=0.0123)"), 4)
    assert "(trickle and dense AdamW, " in line or "(trickle(" in line
    assert "ranks" in line and "parameters" in line and "seed" in line and "%" in line


def test_the_number_of_ranks_counts():
    few, many = (nearest_measured(resolve("trickle:merged"), ranks)[0].ranks for ranks in (4, 16))
    assert (few, many) == (4, 16)


def test_where_there_is_no_run_the_plan_says_so(monkeypatch):
    monkeypatch.setattr("thinwire.plan.measured.read_measured", lambda: ())
    assert describe_measured(resolve("sign"), 4) == (
        "loss: no run of sign has been compared with dense; compare one of your own"
    )


@pytest.mark.parametrize("cls", methods.TABLE, ids=lambda cls: cls.name)
def test_every_plan_that_compresses_has_the_line(cls):
    if "ddp" not in cls.engines or cls.name == "local-steps":
        return
    exchange = exchange_on("all_reduce", Threads(4), 0, Ledger())
    made = resolve(f"{cls.name}(smallest=0)") if "smallest" in {knob.name for knob in knobs_of(cls)} else cls()
    plan = plan_of(made, parameters_for(exchange, {"a.weight": (64, 64)}).values(), exchange)
    assert bool(plan.measured) == (plan.compressed not in (None, 0.0))
    if plan.measured:
        assert " ".join(plan.measured.split())[:20] in " ".join(str(plan).split())
