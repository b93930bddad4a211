"""What a comparison says of numbers that are known: no ranks, no network."""

from __future__ import annotations

import math
import random
import re
import statistics
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from thinwire.base.errors import ThinwireError
from thinwire.cli.compare import compare_main
from thinwire.lab import report as reports
from thinwire.lab import verdict
from thinwire.lab.compare import SILENT, Comparison, _facts, joined, mean, measure
from thinwire.lab.entries import Entry
from thinwire.plan.plan import in_text
from thinwire.train.config import from_arguments


def part(ms: float, loss: float, curve: list[float], spread: float) -> dict:
    """One seed's run: step times alternate by ``spread`` around ``ms``."""
    rows = [
        {"step": at + 1, "loss": value, "step_ms": ms + spread * (-1) ** at, "wall_s": (at + 1) * ms / 1000,
         "tokens": 10 * (at + 1), "node_bytes": 1000}
        for at, value in enumerate(curve)
    ]  # fmt: skip
    summary = {
        "step_ms": ms, "train_loss": loss, "valid_loss": loss, "exposed_ms": 0, "encode_ms": 0, "decode_ms": 0,
        "wire_ms": 0, "wire_bytes_per_step": {"inter": 1000, "intra": 0},
    }  # fmt: skip
    return {"directory": "d", "seconds": 1.0, "summary": summary, "rows": rows, "node_totals": None}


def report(fail_above: float | None = None, spread: float = 0.0, **methods: str | list[tuple[float, float]]) -> dict:
    """``method=[(step in ms, final loss), one per seed]``, or why it failed."""
    runs, count = [], max(len(seeds) for seeds in methods.values() if not isinstance(seeds, str))
    for name, seeds in {"none": [(50.0, 9.0)] * count, **methods}.items():
        why = seeds if isinstance(seeds, str) else None
        parts = [] if why else [part(ms, loss, [4.0, 3.0, 2.0, loss], spread) for ms, loss in seeds]
        runs.append(joined(Entry(name), (), parts, why))
    found = {
        "runs": runs, "fail_above": fail_above, "steps": 4, "mtu": 1500, "ranks_per_node": 1, "rate_bits_per_s": None,
        "seeds": list(range(count)), "model": "tiny", "nodes": 2, "link": "loopback",
        "emulated_network": False, "command": "thinwire compare --out '<&>'", "machine": "m", "verdict": "",
    }  # fmt: skip
    measure(found)
    found["verdict"] = verdict.line(found)
    return found


def test_the_kernel_s_bytes_are_compared_with_those_of_the_same_steps():
    """The first step, which ends as the kernel is first asked, may send more: a dense start, weights in full."""
    runs = []
    for name in ("none", "dense"):
        run = part(50.0, 2.0, [4.0, 3.0, 2.0, 2.0], 0.0)
        for step, row in enumerate(run["rows"]):
            row |= {"node_bytes": 1448 if step else 50_000, "link_tx_bytes": 90_000 + 1514 * step, "link_rx_bytes": 0}
        runs.append(joined(Entry(name), (), [run], None))
    found = report(dense=[(50.0, 2.0)]) | {"emulated_network": True, "runs": runs}
    measure(found)
    assert found["runs"][1]["bytes_per_step"]["kernel_to_framed"] == pytest.approx(1)


@pytest.mark.parametrize(("every", "steps"), [(1, 4), (2, 8), (4, 8), (4, 12)])
def test_kernel_and_link_use_of_rounds_are_those_of_whole_rounds(every, steps):
    """The kernel's count lacks the first step, in which no round ends: 2 rounds in 7 steps, and not in 8."""
    runs, noted = [], 90_000
    for name in ("none", "rounds"):
        run = part(50.0, 2.0, [2.0] * steps, 0.0)
        for row in run["rows"]:
            sends = name == "rounds" and row["step"] % every == 0
            noted += 1514 * sends
            row |= {"node_bytes": 1448 * sends, "link_tx_bytes": noted, "link_rx_bytes": noted}
            row["wire_ms"] = 1e3 * 1514 * 8 / 1e6 * sends  # with the whole link
        run["summary"] |= {"round_steps": every, "wire_ms": row["wire_ms"] / every}
        runs.append(joined(Entry(name), (), [run], None))
    measured = report(dense=[(50.0, 2.0)]) | {"runs": runs, "rate_bits_per_s": 1e6, "steps": steps}
    measure(measured | {"emulated_network": True})
    counts = runs[1]["bytes_per_step"]
    assert counts["kernel"] == pytest.approx({"tx": 1514 / every, "rx": 1514 / every}, abs=1)  # whole bytes
    assert (counts["kernel_to_framed"], runs[1]["link_use"]) == pytest.approx((1, 1), rel=1e-3)


def test_the_interval_is_student_s():
    assert verdict.interval([1.0]) == (1, 1, 1)
    assert verdict.interval([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 2.4841, 2 + 2.4841), abs=1e-3)
    many = verdict.interval([0.0, 1.0] * 50)
    assert many.half == pytest.approx(2.042 * 0.50252 / 10, rel=1e-4), "beyond the table: a little too wide"


@pytest.mark.parametrize(
    ("methods", "line"),
    [
        ({"int8": [(100.0, 2.0)], "topk": [(50.0, 2.3)], "sign": [(250.0, 2.0)]},
         "int8: 2.0x faster than dense, loss +0.0%; do not use topk here: loss +15%; "
         "do not use sign here: slower than dense (0.80x); losses are after 4 steps, of one seed"),
        ({"int8": "rank 1 failed"}, "int8 failed: rank 1 failed"),
        ({}, "dense alone was run"),
    ],
)  # fmt: skip
def test_the_line_of_one_seed(methods, line):
    assert report(dense=[(200.0, 2.0)], **methods)["verdict"] == line


def test_steps_that_vary_more_than_the_methods_tell_nothing():
    told = report(dense=[(110.0, 2.0)], int8=[(100.0, 2.0)], spread=8.0)["verdict"]
    assert re.search(r"int8: speed not told apart from dense's \(1\.10x, 0\.9\d to 1\.2\d\)", told), told
    assert "int8: as fast as dense (1.01x)" in report(dense=[(101.0, 2.0)], int8=[(100.0, 2.0)], spread=1.0)["verdict"]
    assert "int8: 1.1x faster" in report(dense=[(110.0, 2.0)], int8=[(100.0, 2.0)], spread=1.0)["verdict"]


def test_two_methods_that_change_places_have_the_inverse_speed():
    """A mean of ratios made of two equally fast methods, on a noisy machine, each the faster one."""
    seeds = [[part(ms, 2.0, [2.0] * 4, 1.0) for ms in pair] for pair in ((80, 340), (470, 340))]
    for pairs in (seeds, seeds[:1]):
        there, back = verdict.faster(pairs), verdict.faster([pair[::-1] for pair in pairs])
        assert [there.mean * back.mean, there.low * back.high, there.high * back.low] == pytest.approx([1, 1, 1])
        assert 0 < there.low <= there.mean <= there.high
    found = report(dense=[(340.0, 2.0), (340.0, 2.0)], int8=[(80.0, 2.0), (470.0, 2.0)])
    (run,) = (run for run in found["runs"] if run["method"] == "int8")
    assert run["step_to_dense"] == pytest.approx(1 / run["faster"].mean)


def test_losses_of_several_seeds_are_compared_seed_by_seed():
    dense = [(200.0, 2.0), (202.0, 2.4), (198.0, 3.0)]

    def of(*gaps: float) -> str:
        seeds = [(100.0, loss * (1 + gap)) for (_, loss), gap in zip(dense, gaps, strict=True)]
        return report(dense=dense, int8=seeds)["verdict"]

    after = "; losses are after 4 steps"
    assert of(0, 0.001, -0.001) == f"int8: 2.0x faster than dense, same loss (+0.0% ± 0.2%){after}"
    assert of(0.02, 0.021, 0.019) == f"int8: 2.0x faster than dense, loss +2.0% ± 0.2%{after}"
    untold = "loss not told apart from dense's (+2.0% ± 14.9%)"
    assert of(0.08, 0.02, -0.04) == f"int8: 2.0x faster than dense, {untold}{after}"
    assert of(0.2, 0.201, 0.199) == f"do not use int8 here: loss +20% ± 0.2%{after}"
    assert of(0.2, 0.4, 0.0).startswith("int8: 2.0x faster"), "no advice against it from an interval around 0"


def with_windows(losses: list[float], targets: int = 8) -> dict:
    """A run of one seed whose windows have these losses."""
    run = part(100.0, statistics.fmean(losses), [4.0, statistics.fmean(losses)], 0.0)
    run["summary"]["tokens_per_parameter"] = 1.94
    return run | {"windows": {at: (targets, loss) for at, loss in enumerate(losses)}}


def test_one_seed_is_told_apart_by_the_same_windows():
    """The windows' own losses scatter by 0.5, their differences by much less: only these count."""
    draw = random.Random(0)
    dense = [draw.gauss(2.0, 0.5) for _ in range(2000)]
    noise = [draw.gauss(0.0, 0.02) for _ in dense]
    mean = statistics.fmean(noise)
    pairs = {
        gap: [
            (with_windows([a * (1 + gap) + b - mean for a, b in zip(dense, noise, strict=True)]), with_windows(dense))
        ]
        for gap in (0.0, 0.01)
    }
    error = 0.02 / math.sqrt(2000) / 2.0
    assert verdict.text_error(pairs[0.01]) == pytest.approx(error, rel=0.2)
    span = verdict.above(pairs[0.01])
    assert span.mean == pytest.approx(0.01) and span.half == pytest.approx(1.96 * error, rel=0.2)

    runs = [joined(Entry(name), (), [run], None) for name, run in zip(("int8", "dense"), pairs[0.0][0], strict=True)]
    runs.insert(0, joined(Entry("none"), (), [part(50.0, 9.0, [4.0, 9.0], 0.0)], None))
    found = report(dense=[(100.0, 2.0)]) | {"runs": runs}
    measure(found)
    words = verdict.line(found)
    assert "same loss (+0.0% ± 0.0%)" in words, "no gap below its error is called one"
    assert words.endswith("losses are after 4 steps (1.9 tokens per parameter), of one seed")
    assert "(1.9 tokens per parameter)" in reports.title(found)


def test_neighbouring_windows_that_err_alike_are_not_taken_for_many():
    """Differences that are the same over stretches of 10 windows: the error is that of 200 stretches, not of 2000."""
    draw = random.Random(1)
    dense = [2.0] * 2000
    stretches = [draw.gauss(0.0, 0.02) for _ in range(200)]
    mine = [2.0 + stretches[at // 10] - statistics.fmean(stretches) for at in range(2000)]
    found = verdict.text_error([(with_windows(mine), with_windows(dense))])
    assert found is not None
    assert 0.7 < found / (statistics.stdev(stretches) / math.sqrt(200) / 2.0) < 1.3


def test_windows_that_only_one_of_two_runs_has_are_left_out():
    run, dense = with_windows([1.0, 2.0, 3.0]), with_windows([1.0, 2.0, 2.5, 7.0])
    assert verdict.text_error([(run, dense)]) is not None
    assert verdict.text_error([(run, part(1.0, 1.0, [1.0], 0.0))]) is None
    assert verdict.above([(run, part(1.0, 1.0, [1.0], 0.0))]).half == 0


def test_the_step_of_a_round_counts_as_often_as_it_comes():
    """Three steps of 100 ms and one of 500: a median of steps would leave out what a round costs."""
    times = [900.0, 900.0, *[100.0, 500.0, 100.0, 100.0] * 5, 100.0]
    run, dense = ({"rows": [{"step_ms": time} for time in times]} for times in (times, [400.0] * 22))
    run["summary"], dense["summary"] = {"step_ms": 200.0, "round_steps": 4}, {"step_ms": 400.0}
    assert verdict.faster([(run, dense)]) == (2.0, 2.0, 2.0)
    run["summary"] = {"step_ms": 400.0, "round_steps": 20}
    assert verdict.faster([(run, dense)]) == (1.0, 0.0, math.inf), "one whole round says nothing of the next"


def test_a_speed_of_too_few_rounds_is_not_claimed():
    whole = report(dense=[(400.0, 2.0)], rounds=[(100.0, 2.0)])
    rounds = next(run for run in whole["runs"] if run["method"] == "rounds")
    rounds["faster"], rounds["summary"]["round_steps"] = verdict.Span(4.0, 0.0, math.inf), 20
    assert "rounds: 4.00x dense's speed in too few rounds to tell" in verdict.line(whole)
    assert reports.notes(whole) == ["rounds: its speed takes at least two whole rounds to tell: --steps 42 or more"]
    assert reports.CELLS["faster than dense"](rounds) == "4.00x (not known)"


@pytest.mark.parametrize(
    ("dense", "words"), [(52.0, "a step is only 1.04x faster"), (49.0, "dense is as fast as the run without")]
)
def test_where_compression_cannot_help(dense, words):
    found = report(dense=[(dense, 2.0)], int8=[(dense, 2.0)])["verdict"]
    assert found.startswith("compression is not worth it here") and words in found


def test_a_speed_that_the_run_without_communication_does_not_reach_is_not_believed():
    found = report(dense=[(60.0, 2.0)], int8=[(30.0, 2.0)], bf16=[(52.0, 2.0)])["verdict"]
    assert "int8: its speed is not known" in found and "bf16: 1.2x faster than dense" in found


def test_without_dense_there_is_no_verdict_and_the_rest_is_reported():
    assert "dense, which the others are measured against, is not among" in report(int8=[(1.0, 2.0)])["verdict"]
    found = report(dense="it diverged", int8=[(1.0, 2.0)])
    assert found["verdict"] == (
        "no verdict: dense, which the others are measured against, failed; dense failed: it diverged"
    )
    written = reports.markdown(found, [])
    assert "| dense | failed | - |" in written and "* dense failed: it diverged" in written


def test_the_limit_for_a_loss_decides_and_is_the_user_s():
    methods = {"dense": [(200.0, 2.0)], "int8": [(100.0, 2.03)], "bf16": [(150.0, 2.0)]}
    assert verdict.worse(report(0.01, **methods), 0.01) == ["int8 +1.5%"]
    assert verdict.worse(report(0.02, **methods), 0.02) == []
    assert "do not use int8 here: loss +1.5%" in report(0.01, **methods)["verdict"]
    assert "do not use" not in report(None, **methods)["verdict"]


def test_when_dense_s_loss_was_reached():
    run = part(100.0, 1.0, [5.0 - 0.1 * at for at in range(20)], 0.0)
    found = verdict.reached(run, part(100.0, 1.0, [9.0] * 18 + [4.1, 3.9], 0.0))
    assert found is not None and found["step"] == 12 and found["wall_s"] == pytest.approx(1.2)
    assert found["loss"] == pytest.approx(3.95), "mean of the last two of twenty"
    assert verdict.reached(run, part(100.0, 1.0, [9.0] * 18 + [3.1, 2.9], 0.0)) is None
    skipped = part(100.0, 1.0, [9.0] * 17 + [4.1, 3.9, math.nan], 0.0)
    assert verdict.reached(run, skipped)["step"] == 12, "a skipped step has no loss"
    assert verdict.reached(run, part(100.0, 1.0, [math.nan] * 20, 0.0)) is None


def test_the_mean_of_seeds_is_of_what_all_of_them_have():
    """A round that is lost with one seed is a fact of that run alone."""
    seeds = [{"loss": 1.0, "facts": {"norm": 2.0, "rounds lost": 1.0}}, {"loss": 3.0, "facts": {"norm": 4.0}}]
    for values in (seeds, seeds[::-1]):
        assert mean(values) == {"loss": 2.0, "facts": {"norm": 3.0}}


def test_the_page_is_escaped_and_whole(tmp_path):
    found = report(dense=[(200.0, 2.0)], **{"<b>": [(100.0, 2.0)]})
    (tmp_path / "a_b.svg").write_bytes(b"<svg/>")
    page = reports.page(found, [tmp_path / "a_b.svg"])
    assert "<b>" not in page and "&lt;b&gt;: 2.0x faster" in page and "--out '&lt;&amp;&gt;'" in page
    assert 'src="data:image/svg+xml;base64,PHN2Zy8+" alt="a b"' in page
    assert "http" not in page and "NO rate limit" in page


def test_an_entry_has_a_method_and_flags_of_its_own():
    entry = Entry.parse(" topk(density=0.1, start=2)  --lr 1e-3 --betas 0.8 0.9 ")
    assert entry == Entry("topk(density=0.1, start=2)", ("--lr", "1e-3", "--betas", "0.8", "0.9"))
    assert entry.label == "topk(density=0.1, start=2) --lr 1e-3 --betas 0.8 0.9"
    assert entry.own_flags(["--clip", "0"]) == ["--lr", "1e-3", "--betas", "0.8", "0.9"]
    assert Entry("scape").own_flags([]) == ["--optimizer", "adams"] and Entry("dgc").own_flags([])[1] == "sgd"
    assert Entry("scape", ("--optimizer", "sgd")).own_flags([]) == ["--optimizer", "sgd"]
    assert Entry("scape").own_flags(["--optimizer=adams"]) == []


@pytest.mark.parametrize(
    ("words", "model", "width"),
    [
        ([], "net20m", 512), (["--preset", "tiny", "--", "--config", "{file}"], "tiny (layers 1)", 128),
        (["--", "--config={file}"], "small (layers 1)", 128), (["--", "--layers", "2"], "net20m (layers 2)", 512),
    ],
)  # fmt: skip
def test_the_model_that_trains_is_that_of_the_file_and_is_called_so(tmp_path, monkeypatch, words, model, width):
    """A flag of compare's own that nobody typed does not win over a file that somebody wrote."""
    (tmp_path / "small.yaml").write_text("preset: small\nlayers: 1\noptimizer: adamw\n")
    taken: list[Comparison] = []
    monkeypatch.setattr("thinwire.cli.compare.compare", taken.append)
    words = [word.format(file=tmp_path / "small.yaml") for word in words]
    compare_main(["--out", str(tmp_path / "out"), "--methods", "dense", *words])
    config = from_arguments(taken[0].flags(Entry("dense"), None, Path("run"))).check()
    assert taken[0].name == config.model == model and config.shape(256).width == width
    flags = taken[0].flags(Entry("scape"), None, Path("run"))
    assert from_arguments(flags).check().optimizer_name == "adams"  # whatever the file says: it has no other


@pytest.mark.parametrize(
    ("settings", "model", "preset"),
    [
        ({}, "net20m", "net20m"), ({"preset": "tiny"}, "tiny", "tiny"),
        ({"extra": ("--config=a.yaml",)}, "the model of --config", None),
        ({"extra": ("--config", "a.yaml"), "preset": "tiny", "model": "tiny (layers 1)"}, "tiny (layers 1)", "tiny"),
    ],
)  # fmt: skip
def test_in_python_too_the_report_names_the_model_that_trains(settings, model, preset):
    """A comparison of which no command line has read the file was said to be of net20m."""
    comparison = Comparison(**settings)
    cluster = MagicMock(link=comparison.parse_link())
    facts = _facts(comparison, cluster)
    assert (comparison.name, facts["model"], facts["preset"]) == (model, model, preset)


@pytest.mark.parametrize("extra", ["--engine fsdp2", "--engine hsdp --shard-size 2", "--engine hsdp --intra bf16"])
def test_the_run_that_exchanges_nothing_takes_the_flags_of_all_engines(extra):
    settings = Comparison(extra=tuple(extra.split()))
    for method, engine in ((SILENT, "ddp"), ("dense", settings.extra[1])):
        config = from_arguments(settings.flags(Entry.parse(method), None, Path("run"))).check()
        assert config.engine == engine and (config.intra is None or method == "dense")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "int8 --lr nan"], "lr"), (["--methods", "int8 --seed 3"], "same seeds"),
        (["--methods", "int8 --steps 3"], "--steps of int8"), (["--methods", "int8 --corpus 'a"], "quotation"),
        (["--steps", "4"], "--steps is 5"), (["--batch-size", "3"], "write options of thinwire train after --"),
        (["--seeds", "0"], "--seeds"), (["--fail-if-loss-worse-than", "x"], "1%"),
        (["--methods", "int8", "--fail-if-loss-worse-than", "1%"], "add it to --methods"),
        (["--methods", "dense,int8 --batch-size 2", "--", "--batch-size", "8"], "--batch-size of int8: .* after --"),
        (["--methods", "dense,int8 --accumulate=2"], "--accumulate of int8"),
        (["--methods", "dense,dense --seq_len 16", "--", "--seq-len", "64"], "--seq-len of dense"),
        (["--methods", "int8 --layers 1"], "--layers"), (["--methods", "int8 --eval-sequences 0"], "--eval-seq"),
        (["--methods", "int8 --corpus a"], "--corpus of"), (["--methods", "int8 --valid b"], "--valid of"),
        (["--methods", "int8:group:64,int8(group=64)"], "share a folder"), (["--", "--elastic"], "--elastic"),
        (["--methods", "dense,int8 --elastic"], "--elastic"), (["--methods", "int8 --config a"], "write it after --"),
        (["--methods", "dense,auto --cluster nowhere"], "nowhere"),
        (["--", "--checkpoint-every", "3"], "--checkpoint-every"), (["--", "--corpus", "nowhere.txt"], "nowhere.txt"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_anything_is_made(tmp_path, words, said, monkeypatch):
    monkeypatch.setattr("thinwire.cli.compare.compare", lambda settings: pytest.fail("it runs"))
    with pytest.raises(ThinwireError, match=said):
        compare_main(["--out", str(tmp_path / "out"), *words])
    assert not (tmp_path / "out").exists()


def test_a_narrow_terminal_has_the_columns_that_matter_whole() -> None:
    long = "trickle:merged(density=0.02)"
    found = report(dense=[(100.0, 4.0751), (101.0, 4.1)], int8=[(50.0, 4.08), (51.0, 4.11)])
    found["runs"] += [dict(found["runs"][2], method=long), dict(found["runs"][2], method="bf16", failed="no memory")]
    brief, wide = (in_text(reports.fitting(found, width), width) for width in (80, 200))
    assert max(map(len, brief.splitlines())) <= 80 and "…" not in brief + wide
    rows = {row.split()[0]: row.split()[1:] for row in brief.splitlines() if row.strip()}
    assert rows["method"] == ["faster", "loss", "to", "dense", "sent/step"]
    assert rows["int8"] == ["1.99x", "4.0950", "±", "0.1906", "+0.2%", "±", "0.8%", "1", "kB"]
    assert rows[long[:22]] == rows["int8"] and rows[long[22:]] == [], "a long name is folded, not cut"
    assert rows["bf16"] == ["failed", "-", "-", "-"]
    assert "All columns are in report.md" in brief and "report.md" not in wide and "x none" in wide
