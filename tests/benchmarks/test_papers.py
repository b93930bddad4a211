"""``thinwire paper``: every experiment runs, writes its table and its picture, and says what differs."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from breadth import spread
from thinwire.base.errors import ThinwireError
from thinwire.cli.paper import folder, paper_main
from thinwire.cli.program import main

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import frame

EXPERIMENTS = [(paper, name) for paper in frame.PAPERS for name in frame.load(paper).experiments]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all experiments: those that train the same runs share them."""
    return tmp_path_factory.mktemp("papers")


@pytest.mark.parametrize(("paper", "name"), spread(8, EXPERIMENTS))
def test_a_dry_pass_writes_table_and_picture(paper, name, out, capsys):
    assert paper_main([paper, name, "--dry", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "What differs from the paper" in printed and "say nothing" in printed
    made = out / paper / name
    rows = list(csv.DictReader((made / "table.csv").open()))
    assert rows and any("paper" in column for column in rows[0]), "no figures of the paper beside ours"
    assert (made / "table.md").read_text().startswith(f"# {frame.load(paper).title}, {name}")
    assert "<svg " in (made / "picture.svg").read_text()


@pytest.mark.parametrize("paper", frame.PAPERS)
def test_every_paper_has_its_headline(paper):
    assert "headline" in frame.load(paper).experiments


def test_the_list_names_every_experiment(capsys):
    assert main(["paper"]) == 0
    printed = capsys.readouterr().out
    for paper, name in EXPERIMENTS:
        assert paper in printed and name in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "unknown paper 'nobody'"),
        (["radius", "table-99"], "radius has no experiment 'table-99'"),
        (["radius", "headline", "--steps", "0"], "1 or more"),
        (["radius", "headline", "--corpora", "nowhere", "--out", "papers"], "in nowhere: --corpora is the folder"),
    ],
)
def test_a_wrong_word_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["paper", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_a_checkout_it_says_what_to_do(tmp_path):
    with pytest.raises(ThinwireError, match="git clone"):
        folder([tmp_path])


def test_the_link_is_set_to_the_papers_ratio():
    """On a network whose wait is a constant and a part that goes with 1 / rate, three trials find the rate."""

    def wait(rate: float) -> float:
        return 0.1 + 300 / rate

    tried: list[tuple[float, float]] = []
    rate = 400.0
    for _ in range(3):
        tried.append((rate, wait(rate)))
        rate = frame.next_rate(tried, 1.5)
    assert wait(rate) == pytest.approx(1.5, rel=1e-6)


ON_THE_NETWORK = [
    (paper, name)
    for paper, name in EXPERIMENTS
    if name == "headline" or (paper, name) in {("radius", "table-3"), ("scape", "figure-10"), ("tagc", "table-2")}
]


@pytest.mark.parametrize(("paper", "name"), ON_THE_NETWORK)
def test_what_a_comparison_gives_is_in_the_table(paper, name, tmp_path, monkeypatch):
    """On a pretended network, dense waits 300 ms over the rate in units of 100 Mbit/s, and methods a tenth of that."""
    import measures

    def compared(settings, name, methods, link, steps, **lab):
        wait = 300 * 100 / float(link.removesuffix("mbit"))
        runs = [
            {
                "step_ms": 100 + waiting, "exposed_ms": waiting, "encode_ms": 1.0, "wire_ms": waiting, "decode_ms": 1.0,
                "train_loss": 2.0, "valid_loss": 2.1, "wire_bytes_per_step": {"inter": 1e6},
            }
            for waiting in (0, *(wait if method.startswith("dense") else wait / 10 for method in methods))
        ]  # fmt: skip
        return {
            "runs": [{"method": method, "summary": run} for method, run in zip(["none", *methods], runs, strict=True)]
        }

    monkeypatch.setattr(measures, "compared", compared)
    result = frame.load(paper).experiments[name].run(frame.Settings(out=tmp_path, dry=True))
    assert all(isinstance(claim.reached, bool) for claim in result.claims), result.claims
    assert any(claim.reached for claim in result.claims)
    measured = [row[column] for row in result.rows for column in row if column.startswith(("step", "iteration"))]
    assert measured and all(value is not None for value in measured)
    for panel in result.panels:
        panel(frame_axes())


def frame_axes():
    from matplotlib import pyplot

    return pyplot.figure().subplots()


def test_a_claim_is_judged_by_what_was_measured():
    def report(*steps: float) -> dict:
        summaries = (
            {"step_ms": step, "train_loss": 2.0, "valid_loss": None, "wire_bytes_per_step": {"inter": 1e6}}
            for step in steps
        )
        return {"runs": [{"summary": summary} for summary in summaries]}

    claim = frame.Headline("m", dense_ms=200, none_ms=100, speedup=1.5, derived="a table")
    assert claim.ratio == 1.0
    for method_ms, reached in ((130, True), (140, False)):
        result = frame.judged(claim, report(100, 200, method_ms), 100.0)
        assert result.claims[0].reached is reached
        assert result.rows[2]["faster than dense"] == pytest.approx(200 / method_ms)
    assert frame.judged(claim, None, 100.0).claims[0].reached is None
