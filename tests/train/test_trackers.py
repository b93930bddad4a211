"""What a run's trackers are told, with stand-ins that have the services' own signatures."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.train.config import Config
from thinwire.train.job.progress import Display

STAND_IN = {
    # wandb/sdk/wandb_init.py and wandb_run.py of 0.21
    "wandb": """
def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, group=None,
         mode=None, resume=None, settings=None):
    calls.append(("init", dict(project=project, dir=dir, id=id, name=name, config=config, resume=resume)))
    if project == "down":
        raise OSError("no\\nroute")
    return Run()
class Run:
    def log(self, data, step=None, commit=None):
        if data.get("loss") == 13:
            raise ConnectionError("lost")
        calls.append(("log", step, data))
    def finish(self, exit_code=None, quiet=None):
        calls.append(("finish", exit_code))
calls = []
""",
    # trackio/__init__.py and run.py of 0.43
    "trackio": """
def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
         resume="never", settings=None, private=None, embed=True):
    calls.append(("init", dict(project=project, name=name, config=config, resume=resume)))
    return Run()
class Run:
    def log(self, metrics, step=None):
        assert not {"project", "run", "timestamp", "step", "time"} & set(metrics), "reserved"
        calls.append(("log", step, metrics))
    def finish(self):
        calls.append(("finish",))
calls = []
""",
    # mlflow/tracking/fluent.py of 3.6
    "mlflow": """
from types import SimpleNamespace
def set_experiment(experiment_name=None, experiment_id=None, trace_location=None):
    calls.append(("experiment", experiment_name))
def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None,
              description=None, log_system_metrics=None):
    global runs
    runs += run_id is None
    calls.append(("init", dict(id=run_id or f"run-{runs}", asked=run_id, name=run_name)))
    return SimpleNamespace(info=SimpleNamespace(run_id=run_id or f"run-{runs}"))
def log_params(params, synchronous=None, run_id=None):
    calls.append(("params", params))
def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None):
    assert type(step) is int
    calls.append(("log", step, metrics))
def end_run(status="FINISHED"):
    calls.append(("finish", status))
calls, runs = [], 0
""",
}


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """The stand-ins, importable; returns what was called of each."""
    for name, source in STAND_IN.items():
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield lambda name: sys.modules[name].calls
    for name in STAND_IN:
        sys.modules.pop(name, None)


def row(step: int, loss: float = 2.5) -> dict:
    return {
        "step": step, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "step_ms": 20.0, "wall_s": 0.02 * step,
        "tokens": 100 * step, "wire_bytes": {"inter": 40, "intra": 4}, "encode_ms": 1.0, "wire_ms": 2.0,
        "decode_ms": 3.0, "exposed_ms": 4.0, "skipped": step == 2, "facts": {"any": 1}, "link_tx_bytes": 7,
    }  # fmt: skip


def a_run(config: Config, start: int, until: int, rank: int = 0) -> None:
    with Display(config, rank, start) as display:
        display.evaluation({"step": start, "valid_loss": 3.0, "wall_s": 0.02 * start})
        for step in range(start + 1, until + 1):
            display.step(row(step), rate=1.0)
        display.check()


def config(tmp_path: Path, *track: str, **more) -> Config:
    (tmp_path / "run").mkdir(exist_ok=True)
    return Config(out=tmp_path / "run", track=track, steps=6, **more)


def table(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "run/metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_goes_on_from_the_checkpoint_as_the_metrics_do(tmp_path):
    run = config(tmp_path, "csv")
    a_run(run, 0, 6)
    whole = table(tmp_path)
    assert whole[0] == dict.fromkeys(whole[0], "") | {"step": "0", "valid_loss": "3.0", "wall_s": "0.0"}
    assert whole[2] | {"wall_s": ""} == {
        "step": "2", "loss": "2.5", "valid_loss": "", "lr": "0.1", "grad_norm": "1.0", "step_ms": "20.0",
        "exposed_ms": "4.0", "encode_ms": "1.0", "wire_ms": "2.0", "decode_ms": "3.0", "wire_bytes_inter": "40",
        "wire_bytes_intra": "4", "skipped": "1", "tokens": "200", "wall_s": "",
    }  # fmt: skip
    a_run(run, 0, 5)
    with (run.out / "metrics.csv").open("a") as file:
        file.write("5,half a li")
    a_run(run, 3, 6)
    again = table(tmp_path)
    assert [line["step"] for line in again] == ["0", "1", "2", "3", "3", "4", "5", "6"]
    assert [line for line in again if line["loss"]] == [line for line in whole if line["loss"]]
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [str(line["step"]) for line in rows] == [line["step"] for line in again]


def test_a_table_that_is_asked_for_later_has_all_rows(tmp_path):
    a_run(config(tmp_path), 0, 4)
    assert not (tmp_path / "run/metrics.csv").exists()
    a_run(config(tmp_path, "csv"), 3, 4)
    assert [line["step"] for line in table(tmp_path)] == ["0", "1", "2", "3", "3", "4"]


@pytest.mark.parametrize("name", list(STAND_IN))
def test_a_service_is_told_every_step_once_however_often_the_run_is_resumed(tmp_path, calls, name):
    run = config(tmp_path, name, track_project="mine").check()
    a_run(run, 0, 4)
    a_run(run, 3, 6)
    told = calls(name)
    inits = [call[1] for call in told if call[0] == "init"]
    assert {**inits[0], "asked": ""} == {**inits[1], "asked": ""}, "the same run"
    if name == "mlflow":
        assert [call[1] for call in told if call[0] == "experiment"] == ["mine"] * 2
        (settings,) = [call[1] for call in told if call[0] == "params"]  # they cannot be changed
    else:
        assert inits[0]["project"] == "mine" and inits[0]["resume"] == "allow"
        settings = inits[0]["config"]
    assert settings["optimizer"] is None and settings["track"] == [name]
    assert [call[1] for call in told if call[0] == "log"] == [0, 1, 2, 3, 4, 5, 6]
    numbers = next(call[2] for call in told if call[0] == "log" and call[1] == 2)
    assert numbers["loss"] == 2.5 and numbers["lr"] == 0.1 and numbers["step_ms"] == 20 and numbers["skipped"] == 1
    assert numbers["wire_bytes_inter"] == 40 and numbers["exposed_ms"] == 4 and "facts" not in numbers
    finished = {"wandb": ("finish", 0), "trackio": ("finish",), "mlflow": ("finish", "FINISHED")}[name]
    assert [call for call in told if call[0] == "finish"] == [finished] * 2
    a_run(run, 0, 1)  # afresh
    third = [call[1] for call in told if call[0] == "init"][2]
    identity = "name" if name == "trackio" else "id"
    assert third[identity] != inits[0][identity] and told[-2][1] == 1


def test_each_of_several_services_goes_on_with_its_own_run(tmp_path, calls):
    run = config(tmp_path, *STAND_IN)
    a_run(run, 0, 4)
    first = json.loads((run.out / "tracked.json").read_text())
    a_run(run, 3, 6)
    assert json.loads((run.out / "tracked.json").read_text()) == first and set(first) == set(STAND_IN)
    for name in STAND_IN:
        begun = [call[1] for call in calls(name) if call[0] == "init"]
        assert begun[0].get("id") == begun[1].get("id") and begun[0]["name"] == begun[1]["name"]


def test_a_failed_run_is_reported_as_failed_and_other_ranks_report_nothing(tmp_path, calls):
    run = config(tmp_path, "wandb", "mlflow")
    with pytest.raises(ThinwireError), Display(run, 0, 0):
        raise ThinwireError("diverged")
    assert calls("wandb")[-1] == ("finish", 1) and calls("mlflow")[-1] == ("finish", "FAILED")
    before = len(calls("wandb"))
    a_run(config(tmp_path, "wandb", "trackio", "csv"), 0, 2, rank=1)
    assert len(calls("wandb")) == before and "trackio" not in sys.modules
    assert not (run.out / "metrics.csv").exists()


def test_a_service_that_fails_ends_no_run(tmp_path, calls):
    with pytest.raises(ThinwireError, match="--track wandb: OSError: no route"):
        a_run(config(tmp_path, "wandb", track_project="down"), 0, 1)
    run = config(tmp_path, "wandb", "trackio")
    with pytest.warns(ThinwireWarning, match="--track wandb failed, and the run .* ConnectionError: lost"):
        with Display(run, 0, 0) as display:
            for step in (1, 2, 3):
                display.step(row(step, loss=13 if step == 2 else 1), rate=1.0)
            display.check()
    assert [call[1] for call in calls("wandb") if call[0] == "log"] == [1]
    assert [call[1] for call in calls("trackio") if call[0] == "log"] == [1, 2, 3]


def test_what_is_not_installed_is_refused_with_the_command_for_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in STAND_IN:
        with pytest.raises(ThinwireError, match=rf"pip install 'thinwire\[{name}\]'"):
            Config(track=("csv", name)).check()
    monkeypatch.setenv("RANK", "1")
    assert Config(track=("wandb",)).check(), "rank 0 alone needs it"
