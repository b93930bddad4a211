"""``thinwire train --method auto``: the choice is in the run's files, a resumed run keeps it, nothing of it stays."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import ranks
from breadth import spread
from pretrained_models import TEXT
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import free_port
from thinwire.cli import program as cli
from thinwire.lab.entries import Entry
from thinwire.train.checkpoint.format import read_meta
from thinwire.train.config import Config, from_arguments, from_yaml

COMMON = (
    "--preset", "tiny", "--layers", "1", "--width", "64", "--steps", "6", "--max-loss", "any", "--checkpoint-every",
    "3", "--eval-sequences", "0", "--batch-size", "2",
)  # fmt: skip


def _train(rank, world, port, words, predicted, seconds):
    """Train, with predictions and clocks from dictionaries by the method's name; say how many steps were tried."""
    from thinwire.predict import choice as choices
    from thinwire.train import loop

    def predictor(auto, training, trials, dense):
        def predict(method):
            name = method.partition("(")[0]
            if name not in predicted:
                raise ThinwireError("no prediction")
            time = predicted[name]
            return SimpleNamespace(seconds=time, low=time, high=time, memory={})

        return predict

    def clock(trials, wire):
        tried.append(str(wire.method))
        trials._auto.step(wire)
        return seconds.get(wire.method.name, 0.03)

    tried: list[str] = []
    loop.predictor, choices.Trials._time = predictor, clock
    torch.distributed.destroy_process_group()  # that of ranks.py: the program makes its own
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = cli.main(["train", *words])
    return status, out.getvalue() + err.getvalue(), tried


def train(*words, predicted=None, seconds=None):
    predicted = {"zeropp": 0.001, "lhc": 0.002} if predicted is None else predicted
    seconds = {"lhc": 0.01, "zeropp": 0.02} if seconds is None else seconds
    results = ranks.run(_train, 2, free_port(), words, predicted, seconds, LOCAL_WORLD_SIZE="2")
    assert all(status == 0 for status, _, _ in results), results
    return results


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(TEXT))
    return path


def _same_checkpoints(one: Path, other: Path) -> None:
    files = sorted(path.name for path in one.glob("*.safetensors"))
    assert files == sorted(path.name for path in other.glob("*.safetensors"))
    for name in files:
        saved, again = load_file(one / name), load_file(other / name)
        for key in saved:
            if not key.endswith("/about"):  # in which one of them tells of its choice
                assert torch.equal(saved[key], again[key]), f"{name}: {key}"


@pytest.mark.parametrize("engine", spread(2, ["ddp", "fsdp2"]))
def test_a_chosen_method_is_that_of_the_run_named_bit_for_bit_and_a_resumed_run_keeps_it(tmp_path, text, engine):
    common = [*COMMON, "--corpus", str(text), "--engine", engine]
    (_, said, tried), _ = train(*common, "--method", "auto", "--out", f"{tmp_path}/auto")
    assert set(tried) >= {"dense", "lhc"}
    assert "lhc: 3.00 times as fast as dense" in said
    run = tmp_path / "auto"
    assert from_yaml(run / "config.yaml").check().method == "lhc"
    plan, summary = (run / "plan.txt").read_text(), json.loads((run / "summary.json").read_text())
    assert "chosen by auto(max_loss=inf" in plan
    assert "measured 10 ms" in plan
    assert summary["method"] == summary["choice"]["method"] == "lhc"
    assert read_meta(run / "checkpoints/step-000003").meta["about"]["choice"] == summary["choice"]
    about = bytes(load_file(run / "checkpoints/step-000003/rank-0001.safetensors")["wire/rank-0001-of-0002/about"])
    assert json.loads(json.loads(about)["choice"]) == summary["choice"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]

    named = [word for word in common if word not in ("--max-loss", "any")]
    train(*named, "--method", "lhc", "--out", f"{tmp_path}/named")
    _same_checkpoints(run / "checkpoints/step-000006", tmp_path / "named/checkpoints/step-000006")
    # Now zeropp would be faster: nobody asks.
    third = run / "checkpoints/step-000003"
    again = train(
        *common, "--method", "auto", "--resume", str(third), "--out", f"{tmp_path}/again", seconds={"zeropp": 0.001}
    )
    assert all(not tried for _, _, tried in again)
    _same_checkpoints(run / "checkpoints/step-000006", tmp_path / "again/checkpoints/step-000006")
    resumed = json.loads((tmp_path / "again/summary.json").read_text())
    assert resumed["choice"] == summary["choice"]
    assert "measured 10 ms" in (tmp_path / "again/plan.txt").read_text()


def test_dense_stays_on_a_fast_link(tmp_path, text):
    (_, said, _), _ = train(
        *COMMON, "--corpus", str(text), "--method", "auto", "--out", f"{tmp_path}/run", seconds={"lhc": 0.029}
    )
    assert "dense: nothing is 5% faster" in said
    assert json.loads((tmp_path / "run/summary.json").read_text())["method"] == "dense"


def test_where_no_method_can_be_taken_nothing_is_tried(tmp_path, text):
    words = [word for word in COMMON if word not in ("--max-loss", "any")]  # six steps are like no measured run
    (_, said, tried), _ = train(*words, "--corpus", str(text), "--method", "auto", "--out", f"{tmp_path}/run")
    assert not tried and "dense: no method can be taken: its loss was not measured in runs of this length" in said
    assert "--max-loss any" in said
    choice = json.loads((tmp_path / "run/summary.json").read_text())["choice"]
    assert choice["method"] == "dense" and choice["options"] and all(option["reason"] for option in choice["options"])
    assert "not measured in runs of this length" in (tmp_path / "run/plan.txt").read_text()


@pytest.mark.parametrize(("words", "share"), [("1%", 0.01), ("0.02", 0.02), ("any", float("inf"))])
def test_the_largest_loss_is_a_share(words, share):
    config = from_arguments(["--method", "auto", "--max-loss", words]).check()
    assert config.largest_loss == share
    assert config.optimizer_name == "adamw"


def test_what_is_no_share_or_no_method_is_refused():
    with pytest.raises(ThinwireError, match="--max-loss"):
        Config(method="auto", max_loss="little").check()
    with pytest.raises(ThinwireError, match="name a method"):
        Config(intra="auto").check()


def test_compare_takes_auto_among_the_methods():
    assert Entry.parse("auto --max-loss any").own_flags([]) == ["--max-loss", "any"]
