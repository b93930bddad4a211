"""``thinwire train --elastic`` and ``thinwire status``: refusals, who is started again; with torchft, whole runs."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from patience import PATIENCE
from pretrained_models import TEXT
from thinwire.adapters import torchft as torchft_adapter
from thinwire.base import files
from thinwire.base.errors import ThinwireError, Unanswered
from thinwire.cli import program as cli
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from thinwire.train import supervisor
from thinwire.train.checkpoint.format import checkpoint_names, read_meta
from thinwire.train.config import LIGHTHOUSE, Config
from thinwire.train.job import run_folder
from thinwire.train.job import status as status_page
from thinwire.train.job.replica_log import REPLICAS, STARTS, turn
from thinwire.train.job.run_folder import RESULTS, hold_run_folder, settle_previous
from thinwire.train.job.status import Gap, alive_on, goodput, read_run, shown
from thinwire.train.loop import Trainer
from thinwire.train.replica import ReplicaTrainer, train_replica
from thinwire.train.supervisor import Replica, Supervisor, replica_names

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None
SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--replicas", "3"], "--replicas and --min-replicas are for --elastic"),
        (["--min-replicas", "2"], "--replicas and --min-replicas are for --elastic"),
        (["--elastic", "--ranks", "2"], "--ranks does not go with --elastic"),
        (["--elastic", "--engine", "fsdp2"], "--engine fsdp2 does not go with --elastic"),
        (["--elastic", "--device", "cuda"], "--device cuda does not go with --elastic"),
        (["--elastic", "--method", "auto"], "--method auto does not go with --elastic"),
        (["--elastic", "--method", "local-steps(delay=1)"], "--method local-steps with fragments or a delay"),
        (["--elastic", "--check-every", "5"], "--check-every does not go with --elastic"),
        (["--elastic", "--min-replicas", "3"], "--min-replicas 3 is more than the 2 replicas that are started"),
    ],
)
def test_what_does_not_go_with_elastic_is_refused_in_one_line(words, line, monkeypatch, capsys, tmp_path):
    monkeypatch.delenv(LIGHTHOUSE, raising=False)
    monkeypatch.setattr("thinwire.train.supervisor.supervise", None)
    assert cli.main(["train", "--preset", "tiny", "--out", f"{tmp_path}/run", *words]) == 2
    printed = capsys.readouterr().err
    assert line in printed and len(printed.splitlines()) == 1


def test_a_machine_may_start_fewer_replicas_than_the_run_needs(monkeypatch):
    monkeypatch.setenv(LIGHTHOUSE, "http://10.0.0.1:29510")
    Config(elastic=True, replicas=1, min_replicas=3).check()


@pytest.mark.skipif(HAS_TORCHFT, reason="torchft is installed")
def test_the_command_that_installs_torchft_is_named(capsys, tmp_path):
    assert cli.main(["train", "--elastic", "--preset", "tiny", "--out", f"{tmp_path}/run"]) == 2
    assert capsys.readouterr().err == (
        "thinwire: the package 'torchft' is not installed: pip install 'thinwire[elastic]'\n"
    )


def test_torchrun_does_not_start_replicas(monkeypatch, capsys, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["train", "--elastic", "--preset", "tiny", "--out", f"{tmp_path}/run"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_replicas_are_named_by_number_or_by_machine():
    assert replica_names(3, {}, shared=False) == ["0", "1", "2"]
    assert replica_names(2, {"REPLICA_GROUP_ID": "west"}, shared=True) == ["west-0", "west-1"]
    assert replica_names(1, {"REPLICA_GROUP_ID": "west"}, shared=True) == ["west"]
    (name,) = replica_names(1, {}, shared=True)
    assert name == f"{os.uname().nodename.partition('.')[0]}-0"
    assert replica_names(1, {"REPLICA_GROUP_ID": "w" * 100}, shared=True) == ["w" * 100]
    for name in ("rack:7", "a/b", "w" * 101):  # by which logs could not be named, nor told apart
        with pytest.raises(ThinwireError, match=r"REPLICA_GROUP_ID is .*: take up to 100 characters"):
            replica_names(1, {"REPLICA_GROUP_ID": name}, shared=True)


@pytest.mark.parametrize("address", ["10.0.0.1:29510", "http://nowhere", "http://256.1.1.1:5"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ThinwireError, match=LIGHTHOUSE):
        supervisor._own_address(address)
    assert supervisor._own_address("http://127.0.0.1:29510") == supervisor._own_address(None) == "127.0.0.1"


def test_machines_of_one_run_share_its_folder_and_others_do_not(tmp_path):
    here, there = "http://10.0.0.1:29510", "http://10.0.0.2:29510"
    with hold_run_folder(tmp_path, here, anew=False, goes_on=False):
        (tmp_path / "metrics.jsonl").write_text("")
        with hold_run_folder(tmp_path, here, anew=False, goes_on=False):
            assert (tmp_path / "metrics.jsonl").exists()
        for other in (there, None):
            with (
                pytest.raises(ThinwireError, match="is in use by"),
                hold_run_folder(tmp_path, other, anew=False, goes_on=False),
            ):
                pass
    with (
        pytest.raises(ThinwireError, match="holds a run already"),
        hold_run_folder(tmp_path, None, anew=False, goes_on=False),
    ):
        pass
    with hold_run_folder(tmp_path, None, anew=True, goes_on=False):
        assert not (tmp_path / "metrics.jsonl").exists()


OLD, STEP = '{"wall_s": 1}\n', '{"step": 1, "loss": 5.5, "wall_s": 2}\n'


@pytest.mark.parametrize("begins", [False, True])
def test_overwrite_removes_a_run_only_when_the_new_one_has_begun(begins, tmp_path):
    """An input that cannot be used, which replicas find out, must not cost the run that was there."""
    (tmp_path / "checkpoints/step-000007").mkdir(parents=True)
    for name in ("metrics.jsonl", "summary.json", "checkpoints/step-000007/model.safetensors"):
        (tmp_path / name).write_text(OLD)
    with hold_run_folder(tmp_path, None, anew=True, goes_on=False):
        assert sorted(entry.name for entry in tmp_path.iterdir() if entry.name[0] != ".") == [REPLICAS]
        settle_previous(tmp_path, over=False)
        (tmp_path / "metrics.jsonl").write_text(
            new := STEP if begins else '{"step": 0, "valid_loss": 5.5, "wall_s": 0}\n'
        )
        settle_previous(tmp_path, over=False)
        assert (tmp_path / ".previous").exists() is not begins
    assert (tmp_path / "metrics.jsonl").read_text() == (new if begins else OLD)
    assert (tmp_path / "checkpoints/step-000007/model.safetensors").exists() is not begins
    assert not (tmp_path / ".previous").exists() and (tmp_path / REPLICAS).exists() is begins


def test_a_run_that_was_set_aside_in_part_comes_back(tmp_path):
    """A launcher was killed between two of its renames: before all was aside, or before all was back."""
    (tmp_path / ".previous/checkpoints/step-000007").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text(OLD)
    with hold_run_folder(tmp_path, None, anew=False, goes_on=True):
        assert (tmp_path / "checkpoints/step-000007").exists() and (tmp_path / "metrics.jsonl").read_text() == OLD
    (tmp_path / ".previous").mkdir()
    (tmp_path / "metrics.jsonl").rename(tmp_path / ".previous/metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text("half")
    (tmp_path / "..previous.01234567.old").mkdir()  # and a removal that was cut short
    with hold_run_folder(tmp_path, None, anew=True, goes_on=False):
        pass
    assert (tmp_path / "checkpoints/step-000007").exists() and (tmp_path / "metrics.jsonl").read_text() == OLD
    assert not (tmp_path / "..previous.01234567.old").exists() and not (tmp_path / ".previous").exists()


def test_what_tells_why_a_run_never_began_stays(tmp_path):
    with hold_run_folder(tmp_path, None, anew=False, goes_on=False):
        (tmp_path / REPLICAS / "0.jsonl").write_text("a line")
    assert (tmp_path / REPLICAS / "0.jsonl").exists()


def test_a_run_is_not_put_back_under_another_machine(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(OLD)
    url = "http://10.0.0.1:29510"
    with hold_run_folder(tmp_path, url, anew=True, goes_on=False):
        with hold_run_folder(tmp_path, url, anew=True, goes_on=False):
            pass  # a second machine comes and goes
        assert (tmp_path / REPLICAS).exists() and not (tmp_path / "metrics.jsonl").exists()
    assert (tmp_path / "metrics.jsonl").read_text() == OLD


def test_what_another_launcher_has_removed_already_is_no_error(tmp_path, monkeypatch):
    """Both see that the new run has begun, and remove the one that was set aside."""
    (tmp_path / "metrics.jsonl").write_text(OLD)
    with hold_run_folder(tmp_path, None, anew=True, goes_on=False):
        (tmp_path / "metrics.jsonl").write_text(STEP)
        twice = lambda path: (files.remove(path), files.remove(path))  # noqa: E731
        monkeypatch.setattr(run_folder, "remove", twice)
        settle_previous(tmp_path, over=False)
        assert not (tmp_path / ".previous").exists()


@pytest.mark.parametrize("port", ["any", "\u00b2", "65536", "-1"])
def test_a_port_that_is_none_is_refused(port, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHFT_MANAGER_PORT", port)
    with pytest.raises(ThinwireError, match="TORCHFT_MANAGER_PORT is"):
        supervisor.supervise([], Config(elastic=True, out=tmp_path / "run"))


def test_each_replica_has_a_port_of_its_own(tmp_path, monkeypatch, capsys):
    """With one TORCHFT_MANAGER_PORT for all of them only the first could open its manager."""
    monkeypatch.setenv("TORCHFT_MANAGER_PORT", "29600")
    run = supervised(tmp_path, {name: f"echo $TORCHFT_MANAGER_PORT > {tmp_path}/port-{name}" for name in "01"})
    assert run.run() == 0
    assert [(tmp_path / f"port-{name}").read_text() for name in "01"] == ["29600\n", "29601\n"]
    monkeypatch.setenv("TORCHFT_MANAGER_PORT", "0")  # any port that is free
    run = supervised(tmp_path, {name: f"echo $TORCHFT_MANAGER_PORT > {tmp_path}/port-{name}" for name in "01"})
    assert run.run() == 0
    assert [(tmp_path / f"port-{name}").read_text() for name in "01"] == ["0\n", "0\n"]


# ------------------------------------------------------------------------------------------- who is started again


def supervised(tmp_path: Path, programs: dict[str, str], **settings: Any) -> Supervisor:
    """A supervisor of shell scripts in place of replicas: each knows its name, and how often it was started before."""
    script = tmp_path / "replica"
    cases = "\n".join(f"{name}) {text} ;;" for name, text in programs.items())
    script.write_text(f"#!/bin/sh\ncase $THINWIRE_REPLICA in\n{cases}\nesac\n")
    script.chmod(0o755)
    (tmp_path / REPLICAS).mkdir(exist_ok=True)
    config = Config(elastic=True, out=tmp_path, replicas=len(programs), **settings)
    made = Supervisor([], config, [Replica(name) for name in programs], dict(os.environ), None)
    made._command = [str(script)]
    return made


def test_a_replica_that_dies_is_started_again_and_the_run_ends_with_the_others(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.1)
    log = f"{tmp_path}/{REPLICAS}/1.jsonl"
    members = f"""echo '{{"event": "members"}}' >> {log}"""
    part = f'echo "{{\\"event\\": \\"started\\", \\"pid\\": $$}}" >> {log}; {members}'
    dies = f"[ $THINWIRE_STARTS -gt 4 ] || {{ {part}; kill -9 $$; }}; touch {tmp_path}/done"
    run = supervised(tmp_path, {"0": f"until [ -e {tmp_path}/done ]; do sleep 0.05; done", "1": dies})
    assert run.run() == 0
    assert [replica.starts for replica in run.replicas] == [1, 6]
    assert capfd.readouterr().err.count("replica 1 was ended by SIGKILL; it is started again") == 5


@pytest.mark.parametrize("anothers", [False, True])
def test_no_replica_is_started_in_a_folder_that_is_no_more_this_run_s(tmp_path, monkeypatch, anothers):
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.05)
    out, moved = tmp_path / "run", tmp_path / "moved"
    out.mkdir()
    (out / ".lock").write_text("this run's")
    begins = f"mkdir {out}; echo another > {out}/.lock; " if anothers else ""
    waits = f"until [ -e {tmp_path}/up ]; do sleep 0.05; done"
    run = supervised(out, {"0": f"{waits}; mv {out} {moved}; {begins}kill -9 $$", "1": f"touch {tmp_path}/up; sleep 9"})
    run._command = [str((out / "replica").rename(tmp_path / "replica"))]
    with pytest.raises(ThinwireError, match=f"--out {out} was moved or removed"):
        run.run()
    assert [replica.starts for replica in run.replicas] == [1, 1]
    assert [path.name for path in out.glob("*")] == ([] if not anothers else [".lock"])


def test_a_replica_that_never_takes_part_stays_away_after_three_times(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.05)
    waits = f"until [ -e {tmp_path}/3 ]; do sleep 0.05; done; sleep 1"
    run = supervised(tmp_path, {"0": waits, "1": f"touch {tmp_path}/$((THINWIRE_STARTS + 1)); exit 7"})
    assert run.run() == 0 and run.replicas[1].starts == 3
    assert "replica 1 ended with status 7, 3 times before its first step: it is not" in capfd.readouterr().err
    run = supervised(tmp_path, {"0": "exit 7", "1": "exit 7"})
    assert run.run() == 7


def test_a_replica_that_dies_as_the_run_ends_is_not_said_to_be_started_again(tmp_path, capfd):
    waits = f"until [ -e {tmp_path}/died ]; do sleep 0.05; done; sleep 0.3"
    run = supervised(tmp_path, {"0": f"touch {tmp_path}/died; kill -9 $$", "1": waits})
    assert run.run() == 0 and run.replicas[0].starts == 1
    assert "replica 0 was ended by SIGKILL as the run ended" in (printed := capfd.readouterr().err)
    assert "started again" not in printed


SAVES = "mkdir -p {0}/checkpoints; echo step-000007 > {0}/checkpoints/latest"


@pytest.mark.parametrize("saves", [False, True])
def test_a_run_whose_last_files_nobody_wrote_can_go_on(saves, tmp_path):
    run = supervised(tmp_path, {"0": f"{SAVES.format(tmp_path) if saves else ':'}; exit 0"})
    with subprocess.Popen(["sleep", "60"]) as run._lighthouse:
        line = "--resume auto goes on from step-000007" if saves else "nothing is saved"
        with pytest.raises(Unanswered, match=line) as raised:
            run.run()
        run._lighthouse.kill()
    assert raised.value.status == 1


@pytest.mark.parametrize("saves", [False, True])
def test_replicas_save_what_they_have_when_the_lighthouse_dies(saves, tmp_path):
    """One that does not end within --file-timeout is ended."""
    trap = f"{SAVES.format(tmp_path)}; exit 143" if saves else ""
    up = [tmp_path / f"up-{name}" for name in "01"]
    text = f"trap '{trap}' TERM; touch {tmp_path}/up-$THINWIRE_REPLICA; while :; do sleep 0.05; done"
    run = supervised(tmp_path, {name: text for name in "01"}, file_timeout=60.0 if saves else 0.5)
    watch = f"until [ -e {up[0]} -a -e {up[1]} ]; do sleep 0.05; done"
    with subprocess.Popen(["sh", "-c", watch]) as run._lighthouse:
        line = "--resume auto goes on from step-000007" if saves else "nothing is saved"
        with pytest.raises(Unanswered, match=f"lighthouse has ended, and so has the run: {line}") as raised:
            run.run()
    assert raised.value.status == 1 and all(replica.away and replica.starts == 1 for replica in run.replicas)


def test_a_replica_that_is_stopped_in_its_save_is_waited_for_once(tmp_path, monkeypatch, capfd):
    saved = []
    monkeypatch.setattr(Trainer, "_save", lambda self, good: saved.append(self.step))
    trainer = object.__new__(ReplicaTrainer)
    trainer.config = Config(elastic=True, out=tmp_path, timeout=0.5, file_timeout=3.0, steps=9)
    trainer._keeps, trainer._is_blocked = True, False

    def save(step: int) -> float:
        trainer.step, began = step, time.monotonic()
        trainer._save(good=True)
        return time.monotonic() - began

    with turn(tmp_path):  # as the stopped one
        waited = [save(step) for step in (5, 6)]
    assert waited[0] >= 0.5 > waited[1]
    save(7)
    with turn(tmp_path):
        waited = [save(step) for step in (8, 9)]
    assert waited[0] >= 0.5 > waited[1] and saved == [5, 6, 7, 8, 9]
    line = "thinwire: another replica, which may be stopped, has been in its save for 0.5 s: going on beside it\n"
    assert capfd.readouterr().err == 2 * line


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Returns a function that makes ``train_replica`` prepare what it is given, and returns its settings."""

    def begin(start: SimpleNamespace, starts: int) -> Config:
        monkeypatch.setenv(STARTS, str(starts))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        (tmp_path / REPLICAS).mkdir(exist_ok=True)
        (tmp_path / ".lock").touch()
        comm = ThreadComm(Threads(1), 0, Ledger())
        comm.patient = lambda seconds: comm
        inputs = SimpleNamespace(tokenizer=SimpleNamespace(save=lambda path: None), save=lambda *given: None)
        for name, value in {
            "join_ranks": lambda config: nullcontext(SimpleNamespace(comm=comm)), "is_kept": lambda *given: False,
            "read_inputs": lambda *given: inputs, "prepare": lambda *given: start,
        }.items():  # fmt: skip
            monkeypatch.setattr(f"thinwire.train.replica.{name}", value)
        return Config(elastic=True, out=tmp_path, timeout=0.5)

    return begin


@pytest.mark.parametrize(("starts", "going", "points"), [(0, False, 1), (0, True, 0), (1, True, 1)])
def test_who_comes_to_a_run_that_goes_on_does_not_point_back(starts, going, points, begin, monkeypatch):
    """It may --resume from an older checkpoint than the others have saved: their state is what it goes on with. One
    that is started again looks for the newest."""
    pointed: list[bool] = []
    checkpoints = SimpleNamespace(
        go_on=lambda: pointed.append(True), latest="step-000010", newest=lambda: "step-000030"
    )  # fmt: skip
    start = SimpleNamespace(ended="", checkpoints=checkpoints)
    config = begin(start, starts)
    monkeypatch.setenv(LIGHTHOUSE, "http://127.0.0.1:1")
    monkeypatch.setattr("thinwire.train.replica.goes_on", lambda address: going)
    trainer = SimpleNamespace(train=lambda: 0, manager=SimpleNamespace(shutdown=lambda wait: None))
    monkeypatch.setattr("thinwire.train.replica.ReplicaTrainer", lambda *given: trainer)
    assert train_replica(config, "1", lambda *given, **settings: None, print) == 0 and len(pointed) == points
    assert checkpoints.latest == ("step-000010" if points else "step-000030")


def test_a_replica_that_comes_back_while_another_is_stopped_in_its_save_is_not_held_up(tmp_path, begin, capfd):
    config = begin(SimpleNamespace(ended="prepared"), 1)
    back = threading.Thread(target=train_replica, args=(config, "1", print, print), daemon=True)
    with turn(tmp_path):  # as the stopped one
        back.start()
        back.join(30 * PATIENCE)
        assert not back.is_alive()
    lines = capfd.readouterr().err.splitlines()
    assert ["going on beside it" in lines[0], *lines[1:]] == [True, "thinwire: prepared"]


def test_a_signal_interrupts_the_wait_for_the_lighthouse_and_no_vote(monkeypatch):
    """Who leaves in the middle of a vote has counts and weights of two moments, and can save nothing."""
    asking = []

    class Manager:  # as torchft's
        def __init__(self, **named: Any) -> None: ...

        def start_quorum(self) -> None:
            self.wait_quorum()

        def wait_quorum(self) -> None:
            asking.append(self.asking)

        def should_commit(self) -> None:
            self.wait_quorum()  # to learn how many take part

    fake = SimpleNamespace(Manager=Manager, ProcessGroupGloo=lambda timeout: None)
    monkeypatch.setattr(torchft_adapter, "load", lambda name: fake)
    manager = torchft_adapter.open_manager("0", "127.0.0.1", min_replicas=1, timeout_s=1.0, longest_s=1.0)
    manager.start_quorum()
    manager.should_commit()
    assert asking == [True, False] and not manager.asking


@pytest.mark.parametrize("status", [2, 143])
def test_a_replica_with_unusable_input_or_told_to_end_is_not_started_again(tmp_path, status):
    run = supervised(tmp_path, {"0": f"exit {status}", "1": f"exit {status}"})
    assert run.run() == status and [replica.starts for replica in run.replicas] == [1, 1]


def test_torchft_s_own_lines_are_not_shown(tmp_path, capfd):
    line = "2026-11-25T23:29:29.504 [INFO] [torchft::manager] - [Replica 2] should_commit completed"
    run = supervised(tmp_path, {"0": f"echo '{line}' >&2; echo 'thinwire: a line' >&2; echo other >&2"})
    assert run.run() == 0 and capfd.readouterr().err == "thinwire: a line\nother\n"


def test_a_signal_reaches_all_replicas_and_nobody_is_started_again(tmp_path):
    run = supervised(tmp_path, {name: "trap 'exit 143' TERM; sleep 60 2>&- & wait" for name in "0123"})
    run.replicas[3].start_at = time.monotonic() + 60  # it is not yet there
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run.run() == 143
    assert [replica.starts for replica in run.replicas] == [1, 1, 1, 0]
    assert all(replica.away for replica in run.replicas)


# ------------------------------------------------------------------------------------------------------- status


def a_run(path: Path) -> None:
    """The files of a run of three replicas: 1 has died at step 4 and is back from step 6 on."""
    (path / REPLICAS).mkdir(parents=True)
    (path / "elastic.json").write_text(json.dumps({"lighthouse": "http://127.0.0.1:1", "min_replicas": 1}))
    (path / "config.yaml").write_text("method: trickle\npreset: tiny\nsteps: 20\n")
    rows, wall_s = [], 0.0
    for step in range(1, 11):
        wall_s += 1.1 if step == 4 else 0.1
        rows.append(
            {"step": step, "loss": 5 - step / 10, "wall_s": wall_s, "tokens": 1000 * step, "time": 100.0 + wall_s}
            | {"replicas": 2 if step in (4, 5) else 3, "wire_bytes": {"intra": 0.0, "inter": 8.0 * (step % 2)}}
        )
    rows.insert(0, {"step": 0, "valid_loss": 5.1, "wall_s": 0.0})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half')
    for name in "012":
        lines = [
            {"time": 99.0, "event": "started", "pid": 100 + int(name), "host": "west"},
            {"time": 100.0, "event": "members", "step": 1, "names": ["0", "1", "2"], "losses": []},
        ]
        if name == "1":
            lines += [{"time": 101.5, "event": "started", "pid": 200, "host": "west"}]
        else:
            lines += [{"time": 100.4 + int(name) / 10, "event": "dropped", "step": 4}]
            lines += [{"time": 101.4, "event": "members", "step": 4, "names": ["0", "2"], "losses": [["1", 3, 0.25]]}]
        lines.insert(1, {"time": 60.0, "event": "members", "step": 8, "names": [name], "losses": []})  # an earlier life
        lines += [{"time": 101.55, "event": "members", "step": 6, "names": ["0", "1", "2"], "losses": [["1", 3, 0.25]]}]
        (path / REPLICAS / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_status_says_who_is_there_and_what_was_lost(tmp_path):
    a_run(tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.dropped == 1
    text = shown(run, 103.0, ["0", "2"])
    assert "last step     10 of 20, 1 s ago; loss 4.0000, 10,000 tokens" in text
    assert "goodput       47.4% of 2 s; longest gap 1.10 s" in text
    assert "dropped       1 attempt at a step, to be taken again" in text
    assert "what waited on replica 1 after step 3, of norm 0.25" in text
    assert "hears of 0, 2" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[-3:]}
    assert [rows[name][0] for name in "012"] == ["there", "away", "there"] and rows["1"][1:] == ["2", "west,", "200"]
    assert max(map(len, text.splitlines()[1:])) <= 80  # the first has the folder
    assert "does not answer" in shown(run, 103.0, None)


def test_status_of_what_is_no_elastic_run_is_one_line(tmp_path, capsys):
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed/metrics.jsonl").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/elastic.json").write_text("[")
    lines = {"fixed": "was not started with --elastic", ".": "holds no run", "nothing": "there is no run in",
             "broken": "cannot read"}  # fmt: skip
    for name, line in lines.items():
        assert cli.main(["status", str(tmp_path / name)]) == 2
        printed = capsys.readouterr().err
        assert line in printed and len(printed.splitlines()) == 1
    assert cli.main(["status"]) == 2 and cli.main(["status", "--help"]) == 0
    assert "usage: thinwire status RUN" in capsys.readouterr().out


def test_goodput_of_steps_as_they_should_be_is_all_of_the_time():
    steady = [Gap(0.1)] * 8
    assert goodput(steady) == goodput([Gap(9.0), *steady]) == goodput([Gap(0.05, disturbed=True), *steady]) == 1.0
    assert goodput([Gap(1.1, disturbed=True), *steady]) == pytest.approx(0.9 / 1.9)
    assert goodput([Gap(1.0)]) is goodput([Gap(1.0, disturbed=True)] * 3) is None


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seconds", [0.05, 0.3, 1.3, 5.0], ids="{:g} s".format)
def test_goodput_is_the_share_of_the_time_that_was_not_wasted(seconds, noise):
    """A made-up run: now and then a replica dies in the middle of a step, which fails; the others wait a second for the
    lighthouse; then it comes back, and all wait until it has the weights. With three, a step takes less."""
    draw = random.Random(1)
    gaps, clock, wasted = list[Gap](), 0.0, 0.0
    replicas, every, next_death, joins_at = 4, max(15.0, 12 * seconds), 15.0, math.inf

    def drawn() -> float:
        return seconds * (0.8 if replicas == 3 else 1.0) * draw.lognormvariate(-(noise**2) / 2, noise)

    while clock < 240 * every:
        lost = 0.0
        if clock + drawn() > next_death:
            lost = max(next_death - clock, 0.0) + 1.0 + 0.1 * draw.random()
            replicas, joins_at, next_death = 3, next_death + every / 2, next_death + every
        elif clock > joins_at:
            lost = draw.uniform(0.5, 2)
            replicas, joins_at = 4, math.inf
        step = drawn()
        gaps.append(Gap(lost + step, replicas, lost > 0))
        clock, wasted = clock + lost + step, wasted + lost
    assert goodput(gaps) == pytest.approx(1 - wasted / clock, abs=0.01)


def test_the_gaps_of_a_run_know_in_which_of_them_somebody_left_or_came(tmp_path):
    a_run(tmp_path / "run")
    gaps = read_run(tmp_path / "run").gaps
    assert [step for step, gap in enumerate(gaps, 2) if gap.disturbed] == [4, 6]
    assert [gap.kind for gap in gaps[:4]] == [(3, False), (3, True), (2, False), (2, True)]


def test_the_page_of_a_lighthouse_is_read():
    page = (
        '<ul><li class="heartbeat "> 0:3f-9: seen 0.1s ago</li>\n <li class="heartbeat old">1:77: seen 9s ago</li></ul>'
    )
    assert alive_on(page) == ["0"] and alive_on("<html>") == []


@pytest.mark.parametrize(("age", "step", "under_way"), [("", 3, True), ("", 0, False), ("old", 3, False)])
def test_who_comes_to_a_run_that_goes_on_sees_it_on_the_lighthouses_page(age, step, under_way, monkeypatch):
    page = f'<b>0:abc</b> <br/>\n Step: {step} <br/>\n<li class="heartbeat\n {age}\n">\n 0:abc: seen 0.1s ago</li>'
    monkeypatch.setattr(status_page, "_page_of", lambda address: page)
    assert status_page.goes_on("http://localhost:1") is under_way


# ----------------------------------------------------------------------------------------------- runs, with torchft

real = pytest.mark.skipif(not HAS_TORCHFT, reason="torchft is not installed")


@real
def test_who_is_new_takes_no_step_without_one_that_lives_and_has_not_asked(tmp_path):
    """It may be in a round of local steps. Two that are new would be the majority, and begin the run anew."""
    coordination = importlib.import_module("torchft.coordination")
    limit, config = timedelta(seconds=30), Config(elastic=True, replicas=3, out=tmp_path)
    with supervisor._serve_lighthouse(config) as (_, address), ThreadPoolExecutor(3) as pool:

        def join(name: str) -> tuple[Any, Any]:
            server = coordination.ManagerServer(
                replica_id=f"{name}:1", lighthouse_addr=address, hostname="127.0.0.1", bind="127.0.0.1:0",
                store_addr="", world_size=1, heartbeat_interval=timedelta(milliseconds=100), connect_timeout=limit,
                quorum_retries=0,
            )  # fmt: skip
            return server, coordination.ManagerClient(server.address(), connect_timeout=limit)

        def ask(client: Any, step: int) -> Future[Any]:
            return pool.submit(
                client._quorum, group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, timeout=limit,
                commit_failures=0, init_sync=True,
            )  # fmt: skip

        old = join("b")
        assert ask(old[1], 5).result().replica_world_size == 1
        new = [join("a"), join("c")]
        waiting = [ask(client, 0) for _, client in new]
        assert not wait(waiting, timeout=2.5).done  # the time that it was once left out after, and more
        answers = [answer.result() for answer in (ask(old[1], 6), *waiting)]
        assert {answer.max_step for answer in answers} == {6}
        assert [answer.heal for answer in answers] == [False, True, True]
        for server, _ in (old, *new):
            server.shutdown()


WATCHED = """
import json, os, signal, sys, time

plan, name, starts = json.loads(sys.argv[1]), os.environ["THINWIRE_REPLICA"], int(os.environ["THINWIRE_STARTS"])
if plan["stays away"] == name and starts:
    sys.exit(7)
from thinwire.cli import program
from thinwire.train import replica

from thinwire.train.checkpoint.store import Checkpoints

save = Checkpoints.save

def save_or_die(self, step, *more, **named):
    if name in plan["killed"] and not starts and step == plan["in save"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return save(self, step, *more, **named)

Checkpoints.save = save_or_die
take, count = replica.ReplicaTrainer._take_step, replica.ReplicaTrainer._count_step

def take_step(self):
    self.seen = self.sequences + self.place[0] * self.config.batch_size, self.config.batch_size
    if name in plan["killed"] and not starts and self.step + 1 == plan["at"]:
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of an attempt
    time.sleep(0.1)
    until, waits = time.monotonic() + plan["a step waits"], name not in plan["killed"] and self.step >= plan["at"]
    while waits and time.monotonic() < until and not os.path.exists(plan["back"]):
        time.sleep(0.05)
    return take(self)

def count_step(self, *told):
    with open(plan["seen"], "a") as file:
        weights = float(sum(weight.detach().double().sum() for weight in self.net.parameters()))
        file.write(json.dumps([self.step + 1, name, *self.seen, repr(weights)]) + "\\n")
    if starts:
        open(plan["back"], "a").close()
    return count(self, *told)

replica.ReplicaTrainer._take_step, replica.ReplicaTrainer._count_step = take_step, count_step
sys.argv[1:] = sys.argv[2:]
program.program()
"""
LAUNCHER = """
import sys
from thinwire.train import supervisor

begin = supervisor.Supervisor.__init__

def init(self, *given):
    begin(self, *given)
    self._command = [sys.executable, *sys.argv[1:3], *self._command[3:]]

supervisor.Supervisor.__init__ = init
from thinwire.cli import program

words, sys.argv[3:] = sys.argv[3:], []
sys.exit(program.main(words))
"""


def watched(
    tmp_path: Path, *more: str, steps: int, waits: bool = False, **plan: Any
) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    """Run replicas of which some are ``killed``, in the attempt at step ``at`` or in the save after step ``in save``,
    and one may not come back. If the others ``wait``, their steps are long until it has counted one again. Return what
    each has counted, too: step, its name, its first window of the stream, how many, the sum of its weights."""
    program, seen = tmp_path / "watched.py", tmp_path / "seen"
    program.write_text(WATCHED)
    plan = {"seen": str(seen), "stays away": None, "at": 0, "in save": None, **plan}
    plan |= {"a step waits": 1.0 * PATIENCE * waits, "back": f"{tmp_path}/back"}
    command = [sys.executable, "-c", LAUNCHER, str(program), json.dumps(plan), *words(tmp_path, *more, steps=steps)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240 * PATIENCE)
    return done, [json.loads(line) for line in seen.read_text().splitlines()]


def words(tmp_path: Path, *more: str, steps: int = 100) -> list[str]:
    text = tmp_path / "text"
    if not text.exists():
        text.write_text("".join(TEXT))
    return [
        "train", "--elastic", "--replicas", "3", "--preset", "tiny", "--layers", "1", "--width", "64", "--heads", "2",
        "--seq-len", "32", "--batch-size", "2", "--eval-sequences", "4", "--eval-every", "0", "--steps", str(steps),
        "--corpus", str(text), "--out", f"{tmp_path}/run", *more,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def descendants(pid: int) -> list[int]:
    children = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        children[int(fields[1])].append(int(status.parent.name))
    found = list(children[pid])
    for child in found:
        found += children[child]
    return found


@real
@pytest.mark.parametrize(("method", "victim"), [("trickle(density=0.05, smallest=0)", "1"), ("int8(smallest=0)", "0")])
def test_a_run_whose_replica_is_killed_and_comes_back_learns_each_window_once(method, victim, tmp_path):
    """Replica 0 keeps the run's files when it is killed."""
    steps = 120
    done, counted = watched(tmp_path, "--method", method, steps=steps, waits=True, killed=[victim], at=8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"replica {victim} was ended by SIGKILL; it is started again" in done.stderr
    # Each window of the stream once, and all replicas of a step with the same weights.
    windows = sorted(number for _, _, first, size, _ in counted for number in range(first, first + size))
    assert windows == list(range(len(windows)))
    by_step = defaultdict(list)
    for step, name, *_, weights in counted:
        by_step[step].append((name, weights))
    assert sorted(by_step) == list(range(1, steps + 1))
    assert all(len({weights for _, weights in replicas}) == 1 for replicas in by_step.values())
    assert {len(replicas) for replicas in by_step.values()} == {2, 3} and len(by_step[steps]) == 3
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert rows[-1]["tokens"] == 32 * len(windows)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["valid_loss"] < summary["first_valid_loss"] - 0.5
    assert summary["skipped_steps"] == 0  # an attempt that does not count is none
    assert checkpoint_names(run / "checkpoints") == [f"step-{steps:06d}"]
    status = subprocess.run(
        [sys.executable, "-m", "thinwire", "status", str(run)], env=environment(), capture_output=True, text=True
    )
    assert f"last step     {steps} of {steps}, ended" in status.stdout, status.stdout + status.stderr
    assert method.startswith("int8") or f"what waited on replica {victim} after step 7" in status.stdout
    assert max(map(len, status.stdout.splitlines()[2:])) <= 80


@real
@pytest.mark.parametrize("victim", ["0", "1"])
def test_local_steps_whose_replica_is_killed_in_a_round_stay_in_step(victim, tmp_path):
    """The others end the round without it, and it joins at the end of another one. Replica 0 keeps the files."""
    steps, every = 180, 6
    method = f"local-steps(every={every})"
    done, counted = watched(tmp_path, "--method", method, steps=steps, waits=True, killed=[victim], at=9)
    assert done.returncode == 0, done.stdout + done.stderr
    windows = Counter(number for _, _, first, size, _ in counted for number in range(first, first + size))
    assert max(windows.values()) == 1
    ends = defaultdict(dict)
    for step, name, *_, weights in counted:
        if step % every == 0:
            ends[step][name] = weights
    assert sorted(ends) == list(range(every, steps + 1, every))
    assert all(len(set(weights.values())) == 1 for weights in ends.values())
    assert {len(weights) for weights in ends.values()} == {2, 3} and len(ends[steps]) == 3
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, steps + 1))


@contextmanager
def under_way(tmp_path: Path, *, rows: int, limit_s: float) -> Iterator[tuple[subprocess.Popen, list[int]]]:
    """A launched run that has written ``rows`` rows of metrics, within ``limit_s`` seconds, and all its processes."""
    command = [sys.executable, "-m", "thinwire", *words(tmp_path, "--method", "int8(smallest=0)", steps=1_000_000)]
    launcher = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + limit_s * PATIENCE
        while not metrics.exists() or metrics.read_text().count("\n") < rows:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield launcher, descendants(launcher.pid)
    finally:
        launcher.kill()


@real
def test_ctrl_c_saves_leaves_nothing_behind_and_the_run_goes_on_from_there(tmp_path):
    metrics = tmp_path / "run/metrics.jsonl"
    with under_way(tmp_path, rows=20, limit_s=120) as (launcher, processes):
        assert len(processes) >= 4  # three replicas, and the lighthouse
        launcher.send_signal(signal.SIGINT)
        out, err = launcher.communicate(timeout=60 * PATIENCE)
    assert launcher.returncode == 130, out + err
    (name,) = checkpoint_names(tmp_path / "run/checkpoints")
    meta = read_meta(tmp_path / "run/checkpoints" / name).meta
    assert f"ended by SIGINT after step {meta['step']}: {name} is saved" in err
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
    assert not list((tmp_path / "run").glob(".*.partial"))
    more = ["--method", "int8(smallest=0)", "--resume", "auto"]
    command = [sys.executable, "-m", "thinwire", *words(tmp_path, *more, steps=meta["step"] + 20)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240 * PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, meta["step"] + 21))
    sizes = [row["replicas"] for row in rows if "loss" in row]
    assert rows[-2]["tokens"] == 2 * 32 * sum(sizes)


@real
def test_a_run_of_which_all_replicas_are_killed_goes_on_from_its_checkpoint(tmp_path):
    more = ["--method", "trickle(density=0.05, smallest=0)", "--checkpoint-every", "5", "--replicas", "2"]
    done, counted = watched(tmp_path, *more, steps=14, killed=["0", "1"], at=8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("it is started again") == 2
    steps = [step for step, *_ in counted]
    assert set(steps) == {*range(1, 15)} and steps.index(6) < steps.index(7) and steps.count(5) <= 2
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 15))
    assert rows[-2]["tokens"] == 2 * 32 * sum(row["replicas"] for row in rows if "loss" in row)
    result = json.loads((tmp_path / "run/summary.json").read_text())
    assert result["first_valid_loss"] == rows[0]["valid_loss"] and rows[0]["step"] == 0
    losses = [row["loss"] for row in rows if "loss" in row]
    assert result["train_loss"] == pytest.approx(statistics.fmean(losses[-10:]))


@real
def test_a_run_whose_replicas_were_all_killed_in_the_last_evaluation_gets_its_results(tmp_path):
    command = [sys.executable, "-m", "thinwire", *words(tmp_path, "--replicas", "2", "--resume", "auto", steps=6)]
    found = []
    for _ in range(2):
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240 * PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        files = {name: (tmp_path / "run" / name).read_text() for name in ("metrics.jsonl", *RESULTS)}
        found.append(files)
        for name in RESULTS:  # what comes after the last checkpoint
            (tmp_path / "run" / name).unlink()
    first, again = found
    assert json.loads(again["summary.json"]) == json.loads(first["summary.json"])
    assert again["valid_losses.csv"] == first["valid_losses.csv"] and again["report.txt"] == first["report.txt"]
    assert len(again["metrics.jsonl"].splitlines()) == len(first["metrics.jsonl"].splitlines())


@real
def test_a_run_with_too_few_replicas_waits_then_saves_and_ends(tmp_path):
    more = ["--method", "int8(smallest=0)", "--replicas", "2", "--min-replicas", "2"]
    done, counted = watched(tmp_path, *more, steps=100, **{"killed": ["1"], "at": 8, "stays away": "1"})
    assert done.returncode == 7, done.stdout + done.stderr
    assert "too few replicas are left for --min-replicas 2: the run ends" in done.stderr
    assert "ended by SIGTERM after step 7: step-000007 is saved, --resume auto goes on from it" in done.stderr
    assert max(step for step, *_ in counted) == 7


@real
def test_the_next_replica_writes_the_last_files_if_their_keeper_is_killed_in_the_last_checkpoint(tmp_path):
    done, _ = watched(tmp_path, "--method", "int8(smallest=0)", steps=8, killed=["0"], **{"in save": 8})
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "run"
    assert checkpoint_names(run / "checkpoints") == ["step-000008"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    result = json.loads((run / "summary.json").read_text())
    assert result["first_valid_loss"] == rows[0]["valid_loss"] and math.isfinite(result["valid_loss"])
    starts = (run / REPLICAS / "0.jsonl").read_text().count('"started"')
    assert starts == 1 + ("is started again" in done.stderr)


@real
def test_a_run_whose_lighthouse_is_killed_is_saved(tmp_path):
    metrics = tmp_path / "run/metrics.jsonl"
    with under_way(tmp_path, rows=10, limit_s=240) as (launcher, processes):
        (lighthouse,) = (pid for pid in processes if b"LighthouseServer" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(lighthouse, signal.SIGKILL)
        out, err = launcher.communicate(timeout=240 * PATIENCE)
    assert launcher.returncode == 1, out + err
    (name,) = checkpoint_names(tmp_path / "run/checkpoints")
    assert f"lighthouse has ended, and so has the run: --resume auto goes on from {name}" in err
    steps = [row["step"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row]
    assert name == f"step-{steps[-1]:06d}"
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@real
def test_a_run_of_which_all_replicas_are_killed_before_a_checkpoint_says_that_it_begins_anew(tmp_path):
    more = ["--method", "trickle(density=0.05, smallest=0)", "--replicas", "2"]
    done, _ = watched(tmp_path, *more, steps=10, killed=["0", "1"], at=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("before the first checkpoint (--checkpoint-every): the run begins anew") == 1
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 11))
    result = json.loads((tmp_path / "run/summary.json").read_text())
    assert rows[0]["step"] == 0 and result["first_valid_loss"] == rows[0]["valid_loss"] and rows[0]["valid_loss"] > 0
