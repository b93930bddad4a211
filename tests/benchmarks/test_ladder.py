"""``benchmarks/loss/ladder.py``: a run in pieces, and one with branches, are the run in one; its tables."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire.base.errors import ThinwireError
from thinwire.methods import resolve

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "loss"))
import ladder
import ladder_tables
import regimes
import virtual

SMALLEST = "--preset tiny --layers 1 --width 16 --heads 2 --seq-len 16"
JOB = ladder.Job("smallest", "words", 2, 4, "trickle(density=0.1)", "adamw", 4e-3, 0.0, 0.9, 1.0, 3, 0)
MUON = replace(JOB, optimizer="muon", lr=8e-3, beside=4e-3)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ladder.Place:
    words = random.Random(0).choices(["signal", "noise", "the", "of", "network", "rank", "and"], k=3000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    monkeypatch.setattr(ladder, "MODELS", {"smallest": SMALLEST})
    monkeypatch.setattr(regimes, "TEXTS", {"words": ("text.txt", "text.txt")})
    monkeypatch.setattr(regimes, "SMALLEST", 64)
    monkeypatch.setattr(regimes, "commit", lambda: "none")
    monkeypatch.setattr(regimes, "_TOKENS", {})
    return ladder.Place(tmp_path, tmp_path / "ladder.jsonl", tmp_path / "out")


def lines(place: ladder.Place) -> list[dict[str, Any]]:
    made = [json.loads(line) for line in place.data.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "cpu_seconds"} for row in made]


@pytest.mark.parametrize(
    "job",
    [
        JOB, MUON, replace(MUON, method="dense"), replace(JOB, method="local-steps(every=3)"),
        replace(JOB, method="local-steps(every=4,delay=3,mix=0.25)"),
    ],
    ids=["trickle", "muon", "dense-muon", "local-steps", "rounds-beside"],
)  # fmt: skip
def test_a_run_in_pieces_is_the_run_in_one(job, place, monkeypatch):
    """Stopped and begun anew every two steps, on the trunk and on its branches."""
    whole = replace(place, data=place.data.with_name("whole.jsonl"), out=place.out / "whole")
    assert [row["error"] for row in ladder.run(job, [5, 10], whole)] == [None, None]
    monkeypatch.setattr(ladder, "CHUNK", 2)
    stops = 0
    while True:
        looks = itertools.count()
        monkeypatch.setattr(ladder, "clock", lambda looks=looks: float(next(looks)))
        try:
            if not ladder.run(job, [5, 10], replace(place, until=0.5)):
                break
        except ladder.OutOfTime:
            stops += 1
    assert stops > 3 and lines(place) == lines(whole)
    assert not list((place.out / "played").iterdir()), "nothing is left behind"


def test_a_branch_is_the_run_of_its_length(place):
    """Beside a longer one, or alone: the same losses, as rates and text are the same."""
    both, alone = ladder.run(JOB, [5, 10], place), ladder.run(JOB, [10], replace(place, data=place.data.with_name("b")))
    assert both[1]["spans"] == alone[0]["spans"] and both[0]["spans"] != both[1]["spans"]
    assert ladder.run(JOB, [5, 10], place) == [], "what is there is not run again"


def test_rates_rise_stay_and_fall_at_the_end_of_each_length():
    trunk, ten = JOB.rate(None), JOB.rate(10)
    assert [trunk(step) for step in (0, 1, 2, 3, 100)] == pytest.approx([4e-3 / 3, 8e-3 / 3, 4e-3, 4e-3, 4e-3])
    assert [ten(step) for step in (7, 8, 9)] == pytest.approx([4e-3, 4e-3 * 0.55, 4e-4])


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(place):
    life = virtual.Replica(MUON.config(10), 256, None)
    muon, adamw = life.optimizers
    names = {id(weight): name for name, weight in life.weights.items()}
    held = {names[id(weight)] for group in muon.param_groups for weight in group["params"]}
    assert held and all("blocks" in name and name.endswith("weight") and "norm" not in name for name in held)
    life.rate(1e-3)
    assert [group["lr"] for group in (*muon.param_groups, *adamw.param_groups)] == pytest.approx([2e-3, 1e-3, 1e-3])


def test_a_crash_is_a_line(place, monkeypatch, capsys):
    def fail(self, length):
        raise ThinwireError("no luck")

    monkeypatch.setattr(ladder.Life, "end", fail)
    (row,) = ladder.run(JOB, [5], place)
    capsys.readouterr()
    assert row["error"] == "ThinwireError: no luck" and "no luck" in ladder.line(row)
    assert ladder_tables.rows(ladder_tables.read(place.data).values()) == []


def row(method: str, spans: list[float], seed: int = 0, lr: float = 4e-3, **more: Any) -> dict[str, Any]:
    job = replace(JOB, method=method, seed=seed, lr=lr)
    return asdict(job) | {
        "steps": 800, "valid": sum(spans) / max(len(spans), 1), "spans": spans, "error": None, "diverged": False,
        "bytes": 20 if method != "dense" else 1000, "dense_bytes": 1000, "tokens_per_parameter": 6.8,
    } | more  # fmt: skip


def test_a_gap_below_its_error_is_called_none():
    draw = random.Random(0)
    dense = [draw.gauss(2.0, 0.3) for _ in range(128)]
    noise = [draw.gauss(0.0, 0.02) for _ in dense]
    noise = [value - sum(noise) / 128 for value in noise]
    mine = {gap: [a * (1 + gap) + b for a, b in zip(dense, noise, strict=True)] for gap in (0.001, 0.01)}
    spans = {gap: ladder_tables.gap([row("trickle", mine[gap])], [row("dense", dense)]) for gap in mine}
    half = 1.96 * 0.02 / math.sqrt(128) / 2.0
    assert [span.mean for span in spans.values()] == pytest.approx([0.001, 0.01])
    assert spans[0.001].half == pytest.approx(half, rel=0.2), "the text's own difficulty drops out"
    assert ladder_tables.written(spans[0.001]).startswith("= +0.10% ± 0.1")
    assert ladder_tables.written(spans[0.01]).startswith("+1.00% ± 0.1")
    two = [row("trickle", mine[0.01]), row("trickle", mine[0.001], 1)]
    both, spreads = [row("dense", dense, seed) for seed in (0, 1)], {"adamw": ladder_tables.Spread(0.005, 30)}
    assert ladder_tables.gap(two, both).mean == pytest.approx(0.0055), "of the means over all seeds"
    assert ladder_tables.written(ladder_tables.gap(two, both, spreads)).startswith("= "), "below what seeds differ by"
    none = ladder_tables.gap(two, both, {"muon": ladder_tables.Spread(0.5, 30)})
    assert none == ladder_tables.gap(two, both), "each side has its own optimizer's"


def test_each_method_is_shown_at_its_best_and_held_against_both_baselines():
    flat = [2.0] * 128
    runs = [
        row("dense", flat), row("dense", [2.1] * 128, lr=8e-3), row("dense", [1.9] * 128, seed=1),
        row("dense", [1.8] * 128, optimizer="muon", beside=4e-3), row("trickle", [1.89] * 128, optimizer="muon"),
        row("trickle", [], valid=None, diverged=True, lr=1.6e-2, optimizer="muon"),
    ]  # fmt: skip
    dense, _, trickle = ladder_tables.rows(runs)
    assert (dense.tuned[0], dense.tried, sorted(dense.runs)) == (4e-3, 2, [0, 1]), "by the seed that both rates have"
    assert (trickle.failed, trickle.tried) == (1, 2)
    table = ladder_tables.markdown(runs)
    assert "smallest on words, 2 ranks, 4 sequences a step, 800 steps: 6.8 tokens per parameter." in table
    apart = "Seeds lie apart (standard deviation, and degrees of freedom): 3.63% with adamw (1)."
    assert table.startswith(apart), "dense AdamW's two"
    mine = "| `trickle` | muon | 0.004 [lowest], 0.9, 1, 3 | 2 (1 without a loss) | 1 | 1.8900 | = -3.08% ± 32.58% ? |"
    assert f"{mine} +5.00% ± 0.00% ? |" in table, "no two seeds with Muon"
    dense = "| `dense` | muon | 0.004 (0.004), 0.9, 1, 3 | 1 | 1 | 1.8000 | = -7.69% ± 32.58% ? | - | 100.00% |"
    assert dense in table


def test_how_far_seeds_lie_apart_is_taken_from_all_settings():
    """Of two methods with two seeds each 1% apart; one that is unstable is left out."""
    runs = [
        row(method, [loss * (1 + shift)] * 128, seed)
        for method, loss in (("dense", 2.0), ("trickle", 2.2)) for seed, shift in ((0, 0.005), (1, -0.005))
    ]  # fmt: skip
    wild = [row("dense", [loss] * 128, seed, lr=1.6e-2) for seed, loss in ((0, 2.1), (1, 4.0))]
    spread = ladder_tables.spread_of([*runs, *wild])
    assert spread is not None and spread == pytest.approx((0.01 / math.sqrt(2), 2), rel=1e-3)
    spreads = ladder_tables.spreads_of([*runs, *wild])
    assert spreads == {"adamw": spread}
    one, two = (ladder_tables.gap(runs[2 : 2 + seeds], runs[:seeds], spreads) for seeds in (1, 2))
    assert one.half == pytest.approx(4.303 * 0.01, rel=1e-3), "the difference of two seeds"
    assert two.half == pytest.approx(one.half / math.sqrt(2))
    uneven = ladder_tables.gap(runs[2:3], runs[:2], spreads)
    assert uneven.half == pytest.approx(one.half * math.sqrt(0.75)), "all seeds"
    assert ladder_tables.spread_of(runs[::2]) is None and "% ?" in ladder_tables.markdown(runs[::2]), "one seed"


def test_bartletts_test_of_spreads():
    """As SciPy's, to what an approximation of chi squared is off: of draws of one spread, and of two."""
    draw = random.Random(0)

    def spread(deviation: float, count: int) -> ladder_tables.Spread:
        values = [draw.gauss(0, deviation) for _ in range(count + 1)]
        return ladder_tables.Spread(statistics.stdev(values), count)

    alike = [ladder_tables.bartlett([spread(1, 5), spread(1, 9), spread(1, 20)]) for _ in range(400)]
    assert statistics.fmean(alike) == pytest.approx(0.5, abs=0.05)
    assert statistics.fmean(value < 0.05 for value in alike) == pytest.approx(0.05, abs=0.03)
    assert ladder_tables.bartlett([spread(1, 30), spread(3, 30)]) < 1e-4


def test_seeds_of_both_sides_have_nothing_in_common():
    """Why a gap is of the means of all seeds, and why each optimizer has a spread of its own: in the data."""
    runs = list(ladder_tables.read(ladder.DATA).values())
    gaps, alone = ladder_tables.likeness(runs)
    assert gaps.count > 100 and gaps.deviation > 0.9 * alone
    apart = [float(line.split()[-1]) for line in ladder_tables.seeds_apart(runs).splitlines() if "in truth" in line]
    assert len(apart) == 3 and apart[0] < 0.05, "of the optimizers"


def test_settings_that_one_seed_does_not_tell_apart():
    """The one with the most seeds is taken, but for one that is better by more than rounding moves a run."""
    runs = [row("dense", [2.0] * 128, seed) for seed in (0, 1, 2)]
    (found,) = ladder_tables.rows([*runs, row("dense", [1.995] * 128, clip=0.3)])
    assert (found.tuned[3], sorted(found.runs), found.edge) == (1.0, [0, 1, 2], "")
    (found,) = ladder_tables.rows([*runs, row("dense", [1.98] * 128, lr=8e-3)])
    assert (found.tuned[0], sorted(found.runs), found.edge) == (8e-3, [0], "highest")


def test_the_command_line_names_what_is_missing(capsys, monkeypatch):
    for words, said in (([], "--corpora is needed"), (["--corpora", "x", "--ranks", "3"], "3 ranks cannot share")):
        monkeypatch.setattr(sys, "argv", ["ladder.py", *words])
        with pytest.raises(SystemExit):
            ladder.parse()
        assert said in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["ladder.py", "--table"])
    args: argparse.Namespace = ladder.parse()
    assert args.table and torch.get_num_threads() >= 1


def test_the_preset_for_muon_is_the_better_form_of_those_that_were_run(capsys):
    """By servers in 4 bits against each rank's own in 8: lower in every pair of the same rate, seed and length."""
    names = ("trickle:muon", "trickle(density=0.03)")
    pairs = ladder_tables.pairs(ladder_tables.read(ladder.DATA).values(), *names)
    assert len(pairs) >= 12 and len({run["steps"] for run, _ in pairs}) > 1
    assert all(run["valid"] < other["valid"] and run["bytes"] < other["bytes"] for run, other in pairs)
    assert resolve(names[0]) == resolve("trickle(density=0.03,bits=4,mask='merged')")
    ladder.print_pairs(pairs)
    assert f"\n{len(pairs)} pairs: -" in capsys.readouterr().out
