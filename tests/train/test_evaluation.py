"""``thinwire eval``: lm-evaluation-harness itself, on a task of our own, and no network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import pretrained_models
from thinwire.cli import program as cli
from thinwire.train.checkpoint import evaluation, trained_model
from thinwire.train.data.tokenizer import Tokenizer
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.hf_export import export
from thinwire.train.model.shapes import ModelConfig

needs_harness = pytest.mark.skipif(
    find_spec("lm_eval") is None or find_spec("transformers") is None, reason="lm_eval or transformers is not installed"
)
TASK = """
task: sevens
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["no", "yes"]
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"Is {i} divided by 7? ", "label": int(i % 7 == 0)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/sevens.yaml").write_text(TASK.format(file=tmp_path / "rows.jsonl"))
    return rows


def answered(model, encode, rows) -> float:
    """The share of ``rows`` where the model finds the right answer likelier, worked out by hand."""
    right = 0
    for row in rows:
        question, sums = encode(row["question"].rstrip()), []
        for answer in ("no", "yes"):
            tokens = encode(row["question"] + answer)
            with torch.no_grad():
                logits = model(torch.tensor([tokens]))[0].log_softmax(-1)
            sums.append(sum(float(logits[at - 1, tokens[at]]) for at in range(len(question), len(tokens))))
        right += int(sums[1] > sums[0]) == row["label"]
    return right / len(rows)


@needs_harness
def test_the_harness_says_what_one_finds_by_hand(task, tmp_path, monkeypatch, capfd):
    torch.manual_seed(3)
    model = Decoder(ModelConfig(layers=1, width=32, heads=2, context=64)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    tokenizer = Tokenizer("bytes", ())
    export(model.shape, dict(model.named_parameters()), tokenizer.as_hub(), tmp_path / "model")
    out = tmp_path / "found.json"
    words = ["eval", str(tmp_path / "model"), "--include", str(tmp_path / "tasks"), "--out", str(out)]
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words, "--tasks", "sevens"]) == 0
    said = capfd.readouterr()
    assert "sevens" in said.out and "not a git repository" not in said.err
    found = json.loads(out.read_text())
    expected = answered(model, lambda text: tokenizer.encode(text).tolist(), task)
    assert found["results"]["sevens"]["acc,none"] == pytest.approx(expected)
    assert found["n-samples"]["sevens"]["effective"] == 12
    import lm_eval.tasks

    real = lm_eval.tasks.TaskManager  # without its own tasks, which take half a minute to look through
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_path, include_defaults: real(
        include_path=include_path, include_defaults=False))  # fmt: skip
    assert cli.main([*words, "--tasks", "sixes"]) == 2
    assert "has no task 'sixes'" in capfd.readouterr().err


@needs_harness
def test_a_run_is_evaluated_as_its_export_is(task, tmp_path, monkeypatch):
    """The folder that the harness is given is the run's own model."""
    pretrained_models.make(tmp_path / "hub")
    exported = []

    class Run:
        path, step = tmp_path / "run", 7

        def export(self, folder) -> None:
            exported.append(folder)
            pretrained_models.make(folder)

    monkeypatch.setattr(trained_model, "read", lambda place: Run())
    both = [
        evaluation.evaluate(evaluation.Options(tmp_path / name, ("sevens",), include=tmp_path / "tasks", limit=4))
        for name in ("run", "hub")
    ]
    assert both[0]["results"] == both[1]["results"] and not exported[0].exists()


def test_without_the_harness_the_command_that_installs_it_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "config.json").touch()
    assert cli.main(["eval", str(tmp_path), "--tasks", "sevens"]) == 2
    assert "pip install 'thinwire[eval]'" in capsys.readouterr().err


REFUSED = {
    "nowhere is not a checkpoint": ["nowhere", "--tasks", "sevens"],
    "has no task 'sixes'": ["model", "--tasks", "sixes", "--include", "tasks"],
    "takes a folder with tasks": ["model", "--tasks", "sevens", "--include", "tasks/sevens.yaml"],
    "must be 1 or more": ["model", "--tasks", "sevens", "--limit", "0"],
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_evaluated_is_refused_before_torch_and_the_harness_are_loaded(said, tmp_path):
    """Together they take half a minute on a busy machine, and the index of the harness's own tasks as long."""
    harness = tmp_path / "site/lm_eval"
    (harness / "tasks").mkdir(parents=True)
    (harness / "__init__.py").write_text("raise RuntimeError('the harness was loaded')")
    (harness / "tasks/nines.yaml").write_text("task: nines")
    (tmp_path / "site/torch").mkdir()
    (tmp_path / "site/torch/__init__.py").write_text("raise RuntimeError('torch was loaded')")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/sevens.yaml").write_text(TASK)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").touch()
    paths = os.pathsep.join([str(tmp_path / "site"), *sys.path])

    def thinwire(*words):
        command = [sys.executable, "-m", "thinwire", "eval", *words]
        environment = os.environ | {"PYTHONPATH": paths}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    refused = thinwire(*REFUSED[said])
    assert refused.returncode == 2 and said in refused.stderr and len(refused.stderr.splitlines()) == 1, refused
    if said.startswith("has no task"):
        assert "was loaded" in thinwire("model", "--tasks", "sevens", "nines", "--include", "tasks").stderr
