"""``thinwire simulate``: models of all three kinds, pictures, a trace, JSON, and one line for what cannot be read."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from breadth import ALL
from thinwire.base.errors import ThinwireError
from thinwire.cli.program import main
from thinwire.cli.simulate import load_model
from thinwire.lab.link import bit_rate
from thinwire.predict.profile import profile_of
from thinwire.predict.simulate import Job
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS
from timelines import hand_made

SMALL = ["--model", "small", "--cluster", "l40s-10g"]


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Job, "record", lambda job, method: hand_made(job.model, method, ranks=job.ranks, per_node=job.per_node)
    )


def test_three_lines_first_then_what_was_asked_for(by_hand: None, tmp_path: Path, capsys) -> None:
    out, trace = tmp_path / "pictures", tmp_path / "trace.json"
    words = ["simulate", *SMALL, "--method", "int8,sign", "--nodes", "4", "--links", "--scale", "8..64"]
    assert main([*words, "--out", str(out), "--explain", str(trace)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["fastest", "gain", "bound by"]
    assert "small (0.8425 million parameters) on ddp, 4 nodes x 1 L40S" in lines[4]
    assert lines[-3:] == [f"written: {trace}", f"written: {out}/links.svg", f"written: {out}/scale.svg"]
    for name in ("links", "scale"):
        drawn = (out / f"{name}.svg").read_text()
        assert all(f">{method}" in drawn for method in ("dense", "int8", "sign")), "names are text"
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.skipif(not ALL, reason="make test-all: 10 s of simulation")
def test_the_page_shows_what_its_first_command_prints_and_draws(tmp_path: Path, capsys) -> None:
    docs = Path(__file__).parents[2] / "docs"
    command, shown = re.findall(r"```(?:sh|text)\n(.+?)```", (docs / "predict.md").read_text(), re.DOTALL)[:2]
    assert main([*shlex.split(command)[1:], "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.replace(f"{tmp_path}/", "runs/simulate/")
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()
    drawn = (docs / "predict-links.svg", tmp_path / "links.svg")
    before, now = (re.findall(r">([^<]+)</text>", path.read_text()) for path in drawn)
    assert before == now, "draw docs/predict-links.svg anew"


def test_what_cannot_be_written_is_one_line(by_hand: None, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    for words in (["--explain", str(tmp_path / "file" / "t.json")], ["--links", "--out", str(tmp_path / "file")]):
        assert main(["simulate", *SMALL, "--method", "int8", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"thinwire: {words[-2]} {tmp_path}/file/") and "not a file that can be written" in line
    assert main(["simulate", *SMALL, "--method", "int8", "--explain", str(tmp_path / "new" / "t.json")]) == 0


def test_json_alone_is_printed(by_hand: None, capsys) -> None:
    assert main(["simulate", *SMALL, "--method", "int8", "--json", "--tokens", "2048", "--micro-batches", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sequences"], report["micro_batches"], report["written"]) == (8, 2, [])
    assert [entry["method"] for entry in report["methods"]] == ["dense", "int8"]


def test_fp32_on_gpus_is_said_to_be_predicted_at_the_flops_of_the_cluster_s_file(by_hand: None, capsys) -> None:
    for dtype, told in (("fp32", True), ("bf16", False)):
        assert main(["simulate", *SMALL, "--method", "dense", "--dtype", dtype]) == 0
        assert ("fp32 is taken to reach the cluster's flops, 3.62e+14" in capsys.readouterr().out) == told


def test_a_link_of_your_own(by_hand: None, capsys) -> None:
    seconds = {}
    for link in ("1gbit", "100mbit"):
        assert main(["simulate", *SMALL, "--method", "dense", "--json", "--link", link]) == 0
        seconds[link] = json.loads(capsys.readouterr().out)["methods"][0]["split"]["exposed communication"]
    assert seconds["100mbit"] > 8 * seconds["1gbit"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "gpt-9"],
            "there is no model 'gpt-9': write a Hugging Face config.json, your file.py:function, or",
        ),
        (["--cluster", "moon"], "there is no cluster 'moon'"),
        (["--engine", "pipeline"], "engine 'pipeline' is not simulated: choose ddp, fsdp2, hsdp"),
        (["--cluster", "h100-25g", "--ranks", "12"], "unequal nodes are not simulated"),
        (["--nodes", "0"], "--nodes must be 1 or more, got 0"),
        (["--tokens", "100"], "--tokens 100: a rank takes 128 or more in a step, one sequence of 128 per mic"),
        (["--strong", "--weak"], "--strong and --weak exclude each other"),
        (["--strong"], "are for --scale 8..16384"),
        (["--scale", "8-64"], "cannot read --scale '8-64'"),
        (["--scale", "8..10000000"], "cannot read --scale"),
        (["--scale", "1..²"], "cannot read --scale '1..²'"),
        (["--nodes", "10000000"], "--nodes 10000000: clusters of up to 1,000,000"),
        (["--intra", "int8"], "--intra averages inside a node: it needs --engine hsdp or --two-level True"),
        (["--nodes", "2", "--ranks", "8"], "--nodes and --ranks exclude each other: choose one"),
        (
            ["--two-level", "True"],
            "several nodes of several ranks, and here 2 are in nodes of 1 (l40s-10g): leave",
        ),
        (["--cluster", "h100-25g", "--nodes", "1", "--two-level", "True"], "here 8 are in nodes of 8 (h100-25g)"),
        (["--cluster", "h100-25g", "--ranks", "4", "--two-level", "True"], "here 4 are in nodes of 8 (h100-25g)"),
        (["--link", "fast"], "cannot read the link rate 'fast': write 200mbit or 10gbit"),
        (["--link", "0mbit"], "cannot read the link rate '0mbit': write 200mbit or 10gbit"),
        (["--method", "int7"], "unknown method 'int7'"),
    ],
)
def test_what_cannot_be_read_is_one_line(by_hand: None, words: list[str], message: str, capsys) -> None:
    assert main(["simulate", *SMALL, *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_rates_of_links() -> None:
    assert [bit_rate(text, "1gbit")[1] for text in ("200mbit", "1.5Gbit/s", " 10gbit ")] == [2e8, 1.5e9, 1e10]


def test_a_preset_is_made_as_train_makes_it_without_first_values() -> None:
    model, inputs, length = load_model("small", 64)
    assert length == 64 and inputs[0].shape == (1, 64)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in Decoder(PRESETS["small"]).named_parameters()
    }
    assert load_model("small", 512)[0].context == 512  # type: ignore[union-attr]


OWN = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (torch.zeros(3, 8),)

def number():
    return 3

def broken():
    raise KeyError("what\\nnow")
"""


def test_your_own_model(by_hand: None, tmp_path: Path, capsys) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    model, inputs, length = load_model(f"{file}:net", None)
    assert (length, profile_of(model, inputs).modules[0].forward_flops) == (1, 128)
    assert main(["simulate", "--model", f"{file}:net", "--cluster", "l40s-1g", "--method", "int8"]) == 0
    assert f"{file}:net (0.000108 million parameters)" in capsys.readouterr().out
    for text, message in (
        (f"{file}", "write .*own.py:FUNCTION, which returns a module"),
        (f"{file}:number", "number must return a module and a tuple of example inputs, the first a tensor"),
        (f"{file}:broken", "broken failed with KeyError: 'what"),
        (f"{file}:absent", "absent failed with AttributeError"),
        (f"{tmp_path}/no.py:net", "there is no file .*no.py"),
    ):
        with pytest.raises(ThinwireError, match=message) as caught:
            load_model(text, None)
        assert "\n" not in str(caught.value)


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_a_config_of_hugging_face(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    model, inputs, _ = load_model(str(file), 32)
    profile = profile_of(model, inputs, torch.bfloat16)
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 64 * 96
    assert sum(module.forward_flops for module in profile.modules) == 32 * 2 * matrices + 2 * 4 * 32 * 32 * 64
    assert len(model.blocks) == 2  # type: ignore[arg-type]
    with pytest.raises(ThinwireError, match="cannot make a causal language model of"):
        file.write_text("{}")
        load_model(str(file), 32)
    with pytest.raises(ThinwireError, match=r"^there is no file nowhere/config\.json$"):
        load_model("nowhere/config.json", None)


@pytest.mark.parametrize("count", [1, 2])
def test_one_node_is_called_so(by_hand: None, count: int, capsys) -> None:
    assert main(["simulate", *SMALL, "--method", "int8", "--nodes", str(count)]) == 0
    assert (" 1 node x 1 " if count == 1 else " 2 nodes x 1 ") in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("longest", [128, 4096])
def test_no_sequence_is_longer_than_a_model_takes(kind: str, longest: int, tmp_path: Path) -> None:
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": longest, "vocab_size": 32}
    config = CONFIG | {"max_position_embeddings": longest} if kind == "llama" else {"model_type": kind} | shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model(str(tmp_path), None)[2] == min(longest, 2048)
    assert load_model(str(tmp_path), longest)[2] == longest
    with pytest.raises(ThinwireError, match=f"--sequence {longest + 1} is longer than the {longest} tokens that "):
        load_model(str(tmp_path), longest + 1)


def test_without_transformers_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    assert isinstance(sys.modules["thinwire"], ModuleType)
    with pytest.raises(ThinwireError, match="transformers"):
        load_model(str(tmp_path / "config.json"), None)
