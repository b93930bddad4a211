"""Checkpoints of ``thinwire train``: what is kept, what is found again, what is refused; ranks are threads mostly."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import ranks
from breadth import spread
from pretrained_models import TEXT
from thinwire.base import files
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.processes import free_port
from thinwire.cli import program as cli
from thinwire.core.card import Card
from thinwire.network.comm import GroupComm
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadComm, Threads
from thinwire.train import loop
from thinwire.train.checkpoint import format, inspect, run_settings, state, store, trained_model
from thinwire.train.checkpoint.format import read_meta, read_tensors
from thinwire.train.checkpoint.store import Checkpoints, obsolete
from thinwire.train.config import Config, from_arguments
from thinwire.train.data.windows import Windows
from thinwire.train.job import collective, run_folder, setup
from thinwire.train.job.collective import Collective
from thinwire.train.job.progress import Display, cut_metrics
from thinwire.train.job.run_folder import RunFolder, open_run_folder
from thinwire.train.job.signals import note_signals
from thinwire.wire import Wire


def on(world: int, body: Callable[[Collective], Any]) -> list[Any]:
    """``body`` on ranks that are threads: what each returned, or the ThinwireError or OSError that it raised."""
    threads = Threads(world)

    def rank_body(rank: int) -> Any:
        try:
            return body(Collective(ThreadComm(threads, rank, Ledger())))
        except (ThinwireError, ValueError) as error:
            return error

    return threads.run(rank_body)


# --- agreement --------------------------------------------------------------------------------------------------------


def test_trouble_on_one_rank_is_raised_on_all_with_its_name():
    def body(ranks: Collective) -> str:
        def work() -> str:
            if ranks.rank == 1:
                raise OSError(28, "No space left on device", "/full/file")
            return f"done by {ranks.rank}"

        assert ranks.gather(lambda: ranks.rank * 2) == [0, 2, 4]
        return ranks.do(work)

    found = [str(error) for error in on(3, body)]
    line = "cannot use /full/file: No space left on device"
    assert found == [f"rank 1: {line}", line, f"rank 1: {line}"]


def test_an_error_that_nobody_foresaw_is_told_to_the_others_too():
    def body(ranks: Collective) -> None:
        ranks.do(lambda: int("x") if ranks.rank == 0 else 0)

    mine, others = on(2, body)
    assert type(mine) is ValueError and str(others) == f"rank 0: ValueError: {mine}"


@pytest.mark.parametrize("size", [0, 5, 8, 21])
def test_a_file_travels_in_chunks(tmp_path, monkeypatch, size):
    monkeypatch.setattr(collective, "CHUNK", 8)
    data = bytes(range(size))
    (tmp_path / "1").write_bytes(data)
    on(3, lambda ranks: ranks.copy(1, tmp_path / "1", tmp_path / "2" if ranks.rank == 2 else None))
    assert (tmp_path / "2").read_bytes() == data
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


@pytest.mark.parametrize(("rank", "call"), [(1, "readinto"), (2, "write"), (2, "close")])
def test_a_disk_that_fails_while_a_file_travels_is_told_by_all(tmp_path, monkeypatch, rank, call):
    real = Path.open

    def open_(path: Path, mode: str = "r", **how: Any) -> Any:
        file = real(path, mode, **how)
        if mode == ("rb" if call == "readinto" else "ab"):
            wrapped = mock.MagicMock(wraps=file, **{f"{call}.side_effect": OSError(5, "Input/output error")})
            wrapped.__enter__.return_value = wrapped
            wrapped.__exit__.side_effect = lambda *error: wrapped.close()
            return wrapped
        return file

    (tmp_path / "1").write_bytes(b"x" * 20)
    monkeypatch.setattr(Path, "open", open_)
    found = on(3, lambda ranks: ranks.copy(1, tmp_path / "1", tmp_path / "2" if ranks.rank == 2 else None))
    line = f"cannot use {tmp_path}/{1 if call == 'readinto' else 2}: Input/output error"
    assert [str(error) for error in found] == [line if at == rank else f"rank {rank}: {line}" for at in range(3)]
    assert not (tmp_path / "2").exists()


def test_a_disk_that_is_full_while_text_is_written_names_the_file(tmp_path):
    with mock.patch.object(os, "fsync", side_effect=OSError(28, "No space left on device")):
        said = str(on(1, lambda ranks: ranks.do(lambda: files.write(tmp_path / "plan.txt", "x")))[0])
    assert said == f"cannot use {tmp_path}/plan.txt: No space left on device"


# --- the folder -------------------------------------------------------------------------------------------------------


def test_ranks_find_out_whether_their_folders_are_one(tmp_path):
    def homes(*names: str) -> tuple[int, ...]:
        def body(ranks: Collective) -> tuple[int, ...]:
            with open_run_folder(tmp_path / names[ranks.rank], ranks) as place:
                return place.homes

        return on(len(names), body)[0]

    assert homes("a", "a", "a") == (0, 0, 0)
    assert homes("a", "b", "a", "b") == (0, 1, 0, 1)
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]


def test_a_second_run_in_a_folder_is_refused_by_the_name_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_WAIT_S", 0.0)

    def second(ranks: Collective) -> None:
        with open_run_folder(tmp_path, ranks):
            pass

    def first(ranks: Collective) -> list[Any]:
        with open_run_folder(tmp_path, ranks):
            return on(2, second)

    mine, other = on(1, first)[0]
    assert "is in use by process " in str(mine) and str(other) == f"rank 0: {mine}"
    assert on(2, second) == [None, None]


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")

    def said(path: Path) -> str:
        def body(ranks: Collective) -> None:
            with open_run_folder(path, ranks):
                pass

        return str(on(1, body)[0])

    assert said(tmp_path / "file") == f"--out {tmp_path / 'file'} is a file: name a folder"
    assert said(tmp_path / "file/run") == f"cannot use --out {tmp_path / 'file/run'}: Not a directory"
    with mock.patch.object(Path, "touch", side_effect=OSError(30, "Read-only file system", "a mark")):
        assert said(tmp_path / "run") == f"cannot use --out {tmp_path / 'run'}: Read-only file system"


def test_what_a_killed_run_left_is_removed_at_the_next_start(tmp_path):
    mine = {".venv.old/x", ".notes.partial", ".mine", "checkpoints/.best.old/x", "checkpoints/step-000002/.x.partial"}
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    hidden = (
        ".step-000003.partial", ".step-000003.0123abcd.partial", ".step-000001.0123abcd.old",
        "..step-000003.0123abcd.partial.0123abcd.old", "..step-000003.partial.0123abcd.old",
    )  # fmt: skip
    for name in (".checkpoints.0123abcd.old", *(f"checkpoints/{name}" for name in hidden)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x").write_text("x")
    for name in ("meta.json", "meta.json.0123abcd", "model.safetensors", "rank-0001.safetensors"):
        (tmp_path / f"checkpoints/step-000002/.{name}.partial").touch()
    for name in (".metrics.jsonl", ".summary.json", ".tokenizer-bpe-300.json", "checkpoints/.latest"):
        for unique in ("", ".0123abcd"):
            (tmp_path / f"{name}{unique}.partial").touch()
    (tmp_path / f".rank-{'a' * 32}-3").touch()
    (tmp_path / "metrics.jsonl").touch()  # of a run, as its first file says

    def body(ranks: Collective) -> list[str]:
        with open_run_folder(tmp_path, ranks):
            return [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]

    assert {*on(1, body)[0]} == {".lock", "metrics.jsonl", *mine}


# --- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("there", "newest", "latest", "gone"),
    [
        ([5, 10, 15], 15, 15, [5]),
        ([999999, 1000000, 1000001], 1000001, 1000001, [999999]),
        ([35, 37, 40], 37, 37, [40]),  # the run has gone back to 35
        ([5, 10, 15], 15, 5, []),  # never what latest names
        ([5, 10, -15], 15, 10, []),
        ([5, 10, -15, -20], 20, 10, [15]),
        ([5, -10, -15, 20], 20, 20, [10, 15]),
        ([35, 40, -37], 37, 40, []),  # what is not good replaces nothing
    ],
)  # fmt: skip
def test_retention_is_by_step_and_spares_what_is_good(there, newest, latest, gone):
    """Negative: not good."""
    by_name = {f"step-{abs(step):06d}": step > 0 for step in there}
    names = obsolete(by_name, f"step-{newest:06d}", f"step-{latest:06d}", keep=2)
    assert sorted(names) == sorted(f"step-{step:06d}" for step in gone)


class Stub:
    """In a wire's place."""

    class engine:
        kind = "ddp"

    class method:
        rank_equal = True
        card = Card()

    def __init__(self, rank: int) -> None:
        self.state = {"step": torch.tensor(3), "residual/weight": torch.full((1, 4), rank + 1.0)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.state

    def hand_over(self) -> None: ...

    def load_state_dict(self, state: dict[str, torch.Tensor], resize: str | None = None) -> None:
        self.state = state


SEEDED = threading.Lock()
"""Ranks are threads here, and torch has one generator for all of them."""


class Run:
    """One rank's model, and its checkpoints in ``path`` (of the ranks' folders where there are several)."""

    def __init__(
        self, place: RunFolder, keep: int = 2, seed: int = 0, about: dict[str, Any] | None = None, **how
    ) -> None:
        with SEEDED:
            torch.manual_seed(seed)
            self.model: Any = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()
        self.wire: Any = Stub(place.collective.rank)
        about = {"mesh": "1 x 1", "method": "int8"} | (about or {"seed": 0})
        self.checkpoints = Checkpoints(place, about, keep=keep, **how)

    def save(self, *steps: int, good: bool = True) -> None:
        for step in steps:
            self.checkpoints.save(
                step, 10 * step, model=self.model, optimizers=[self.optimizer], wire=self.wire, good=good
            )

    def resume(self, how: str = "auto") -> int | None:
        found = self.checkpoints.find(how)
        if found is None:
            return None
        found.restore(model=self.model, optimizers=[self.optimizer], wire=self.wire)
        return found.checkpoint.step

    def weights(self) -> list[float]:
        return [*self.model.weight.flatten().tolist(), *self.wire.state["residual/weight"].flatten().tolist()]


def run_on(paths: list[Path], body: Callable[[Run], Any], **how: Any) -> list[Any]:
    """``body`` of a run whose ranks have these folders."""

    def rank_body(ranks: Collective) -> Any:
        with open_run_folder(paths[ranks.rank], ranks) as place:
            return body(Run(place, **how))

    with warnings.catch_warnings():
        warnings.simplefilter("error", ThinwireWarning)
        return on(len(paths), rank_body)


def names(path: Path) -> list[str]:
    return sorted(found.name for found in (path / "checkpoints").glob("*"))


def test_only_the_newest_of_this_run_stay(tmp_path):
    run_on([tmp_path], lambda run: run.save(300, 400))
    other = names(tmp_path)
    run_on([tmp_path], lambda run: run.save(100, 200, 250))
    assert names(tmp_path) == ["latest", "step-000200", "step-000250", *other[1:]]
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000250\n"


def test_one_rank_gets_back_what_it_saved(tmp_path):
    saved = run_on([tmp_path] * 2, lambda run: (run.save(4), run.weights())[1])
    found = run_on([tmp_path] * 2, lambda run: (run.resume(), run.weights(), len(run.optimizer.state)), seed=1)
    assert found == [(4, weights, 2) for weights in saved]
    assert saved[0][-1] == 1.0 and saved[1][-1] == 2.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_whose_folder_is_no_more_ends_the_run_on_all(tmp_path, rank):
    """No checkpoint is written, and the folder is not made anew."""
    homes = [tmp_path / "a", tmp_path / "b"]

    def body(run: Run) -> None:
        run.save(2)
        run.checkpoints.collective.do(lambda: homes[rank].rename(tmp_path / "moved") if is_it(run) else None)
        run.save(4)

    def is_it(run: Run) -> bool:
        return run.checkpoints.collective.rank == rank

    said = [str(error) for error in run_on(homes, body)]
    assert said[rank].startswith(f"--out {homes[rank]} was moved or removed")
    assert said[1 - rank] == f"rank {rank}: {said[rank]}"
    assert not homes[rank].exists() and names(homes[1 - rank]) == names(tmp_path / "moved") == ["latest", "step-000002"]


def test_what_is_not_good_replaces_nothing(tmp_path):
    def body(run: Run) -> int | None:
        run.save(5, 10)
        run.save(15, 20, good=False)
        return run.resume()

    assert run_on([tmp_path], body) == [10]
    assert names(tmp_path) == ["latest", "step-000005", "step-000010", "step-000020"]
    for how in ("auto", "latest"):
        found = run_on([tmp_path / how], lambda run, how=how: (run.save(5, good=False), run.resume(how))[1])
        assert "to resume from, only some that were saved while the run diverged; --overwrite" in str(found[0])


def test_a_future_that_the_run_has_gone_back_from_is_not_taken_for_the_newest(tmp_path):
    def body(run: Run) -> int | None:
        run.save(5, 10)
        run.resume(str(tmp_path / "checkpoints/step-000005"))
        with mock.patch.object(store, "obsolete", return_value=[]):  # as if killed before that is removed
            run.save(7)
        return run.resume()

    assert run_on([tmp_path], body) == [7]


class Stop:
    """Stops this process before its ``number``-th operation on the files of checkpoints, for what others do
    ``meanwhile``."""

    armed: Stop | None = None
    EVENTS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.listdir", "os.scandir")

    def __init__(self, number: int, meanwhile: Callable[[], None]) -> None:
        self.number, self.meanwhile, self.count, self.place = number, meanwhile, 0, ""

    def __enter__(self) -> Stop:
        Stop.armed = self
        return self

    def __exit__(self, *error: object) -> None:
        Stop.armed = None

    @classmethod
    def hook(cls, event: str, facts: tuple[Any, ...]) -> None:
        stop = cls.armed
        if stop is None or event not in cls.EVENTS or (isinstance(facts[0], str) and "/checkpoints" not in facts[0]):
            return
        stop.count += 1
        if stop.count == stop.number:
            cls.armed, stop.place = None, f"{stop.number}: {event} {facts[0]}"
            stop.meanwhile()


sys.addaudithook(Stop.hook)


def stop_once(run: Run, number: int, act: str, later: tuple[int, ...], keep: int, rolled_back: bool) -> bool:
    """A replica is stopped before the ``number``-th operation of an ``act``, and another one saves the steps ``later``
    (negative: not good). Before it, both have gone back to step 3, and left a step 9 behind if ``rolled_back``. Return
    whether the act has so many operations."""
    folder, left_behind = run.checkpoints.path, ""
    run.save(3)
    if rolled_back:
        run.save(9)
        left_behind = read_meta(folder / "step-000009").meta["save"]
    stopped, other = (Run(run.checkpoints.folder, keep=keep) for _ in range(2))
    for replica in (stopped, other):
        replica.resume(str(folder / "step-000003"))
    if act != "goes on":
        stopped.checkpoints.go_on()
    other.checkpoints.go_on()

    def meanwhile() -> None:
        for step in later:
            other.save(abs(step), good=step > 0)

    with Stop(number, meanwhile) as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore", ThinwireWarning)
        stopped.checkpoints.go_on() if act == "goes on" else stopped.save(5, good=act == "saves")
    if stop.count < number:
        return False
    saves = {path.name: read_meta(path).meta["save"] for path in folder.glob("step-*")}
    newest = max(3, *[5] * (act == "saves"), *later)
    assert (folder / "latest").read_text() == f"step-{newest:06d}\n", stop.place
    assert Run(run.checkpoints.folder).resume() == newest, stop.place
    stay = {later[-1], *[step for step in later if step > 0][-keep:]}
    assert {f"step-{abs(step):06d}" for step in stay} <= {*saves}, f"{stop.place}: {[*saves]}"
    assert left_behind not in saves.values() or newest == 3, stop.place
    stopped.save(13)
    left = names(folder.parent)
    assert "step-000013" in left and (len(left) == keep + 1 or keep > 2), f"{stop.place}: {left}"
    assert not any(name.startswith(".") for name in left), f"{stop.place}: {left}"
    return True


def stop_at_each_operation(folder: Path, act: str, **case: Any) -> None:
    for number in itertools.count(1):
        with mock.patch.object(os, "fsync"):  # for speed
            again = functools.partial(stop_once, number=number, act=act, **case)
            (went,) = run_on([folder / str(number)], again, keep=9)
        assert isinstance(went, bool), f"{number}: {went}"
        if not went:
            break
    assert number > 3


@pytest.mark.parametrize(("later", "keep"), spread(5, [(7,), (7, 9), (5,), (7, 9, 11), (-7,)], [1, 2, 9]), ids=str)
def test_who_was_stopped_in_a_save_moves_nothing_back(later, keep, tmp_path):
    """A replica of an elastic run, at any moment: what others have saved when it wakes stays, and is the newest."""
    stop_at_each_operation(tmp_path, "saves", later=later, keep=keep, rolled_back=False)


FUTURES = ("saves", (5, 9)), ("saves", (7, 9)), ("saves what is not good", (5, 7)), ("goes on", (7, 9))


@pytest.mark.parametrize(("case", "rolled_back"), spread(4, FUTURES, [False, True]))
def test_who_was_stopped_leaves_no_future_and_takes_none_for_one(case, rolled_back, tmp_path):
    act, later = case
    stop_at_each_operation(tmp_path, act, later=later, keep=1, rolled_back=rolled_back)


def test_what_is_not_good_points_to_none_that_was_lost_in_its_save(tmp_path):
    def body(run: Run) -> None:
        run.save(3)
        run.checkpoints.latest = "step-000004"  # which the replica that kept the files was to save
        run.save(5, good=False)

    run_on([tmp_path], body)
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000003\n"


def test_who_was_not_waited_for_moves_nothing_back_as_it_goes_on(tmp_path):
    def body(run: Run) -> None:
        run.save(3)
        late = Run(run.checkpoints.folder)
        assert late.resume() == 3
        run.save(5)
        late.checkpoints.go_on()

    run_on([tmp_path], body)
    assert (tmp_path / "checkpoints/latest").read_text() == "step-000005\n"


def test_what_is_not_good_does_not_replace_the_good_one_of_the_same_step(tmp_path):
    def body(run: Run) -> int | None:
        run.save(5, 10)
        run.resume(str(tmp_path / "checkpoints/step-000005"))
        run.save(10, good=False)
        return run.resume()

    assert run_on([tmp_path] * 2, body) == [10, 10]
    assert names(tmp_path) == ["latest", "step-000005", "step-000010"]


def test_auto_starts_afresh_and_latest_does_not(tmp_path):
    assert run_on([tmp_path], lambda run: run.resume()) == [None]
    assert "there is no checkpoint in" in str(run_on([tmp_path], lambda run: run.resume("latest"))[0])
    assert "has no meta.json" in str(run_on([tmp_path], lambda run: run.resume(str(tmp_path / "none")))[0])


def test_a_checkpoint_of_another_folder_begins_a_run_of_its_own(tmp_path):
    run_on([tmp_path / "a"], lambda run: run.save(4))
    path = str(tmp_path / "a/checkpoints/step-000004")
    assert run_on([tmp_path / "b"], lambda run: (run.resume(path), run.save(8))[0]) == [4]
    first, second = (read_meta(tmp_path / name).meta["run"] for name in ("a/checkpoints/step-000004",
                                                                        "b/checkpoints/step-000008"))  # fmt: skip
    assert first != second
    assert "holds a run already" in str(run_on([tmp_path / "b"], lambda run: run.resume(path))[0])
    assert run_on([tmp_path / "a"], lambda run: (run.resume(path), run.save(6, 8))[0]) == [4]
    assert names(tmp_path / "a") == ["latest", "step-000006", "step-000008"]


@pytest.mark.parametrize("moment", ["before", "while it is hidden", "while it is hidden, on a disk that fails"])
def test_what_is_not_to_be_removed_stays(moment, tmp_path):
    folder, renamed = tmp_path / "step-000005", []
    folder.mkdir()

    def is_spared(path: Path) -> bool:
        return moment == "before" or path != folder

    def rename(path: Path, target: Path, rename: Any = Path.rename) -> Path:
        renamed.append(target)
        if "fails" in moment and len(renamed) == 2:
            raise OSError(5, "Input/output error", str(path))
        return rename(path, target)

    with mock.patch.object(Path, "rename", rename), contextlib.suppress(OSError):
        files.remove(folder, is_spared)
    assert len(list(tmp_path.iterdir())) == 1, "what another replica has saved is gone"
    assert len(renamed) == (0 if moment == "before" else 2)  # who is killed between the two leaves it hidden


# --- hosts without a shared folder ------------------------------------------------------------------------------------


def test_each_host_keeps_its_part_and_gets_back_what_it_lost(tmp_path):
    hosts = [tmp_path / "a", tmp_path / "b", tmp_path / "b"]
    saved = run_on(hosts, lambda run: (run.save(4, 8), run.weights())[1])
    part = ["meta.json", "model.safetensors"]
    kept = [sorted(path.name for path in (host / "checkpoints/step-000008").iterdir()) for host in hosts[:2]]
    assert kept == [[*part, "rank-0000.safetensors"], [*part, "rank-0001.safetensors", "rank-0002.safetensors"]]

    def resumed() -> None:
        assert run_on(hosts, lambda run: (run.resume(), run.weights()), seed=1) == [(8, weights) for weights in saved]

    resumed()
    (tmp_path / "b/checkpoints/step-000008/model.safetensors").unlink()
    resumed()
    # The hosts have changed places: what each needs is on the other.
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "b").rename(tmp_path / "a")
    (tmp_path / "c").rename(tmp_path / "b")
    resumed()
    assert [names(host) for host in hosts[:2]] == [["latest", "step-000004", "step-000008"]] * 2


def test_a_host_that_has_nothing_gets_its_part(tmp_path):
    run_on([tmp_path / "a"] * 2, lambda run: run.save(4))
    assert run_on([tmp_path / "a", tmp_path / "new"], lambda run: (run.resume(), run.weights()[-1])) == [(4, 1), (4, 2)]
    given = sorted(path.name for path in (tmp_path / "new/checkpoints/step-000004").iterdir())
    assert given == ["meta.json", "model.safetensors", "rank-0001.safetensors"]


def test_a_copy_that_a_host_was_given_is_not_what_another_replica_has_saved(tmp_path):
    """It was damaged, so the run has gone back from it."""
    hosts = [tmp_path / "a", tmp_path / "new"]
    run_on([tmp_path / "a"] * 2, lambda run: run.save(20, 30))
    flip(tmp_path / "a/checkpoints/step-000030/model.safetensors", -3)

    def body(run: Run) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ThinwireWarning)
            resumed = run.resume()
        run.checkpoints.go_on()
        run.save(25)
        return resumed

    assert run_on(hosts, body) == [20, 20]
    assert [names(host) for host in hosts] == [["latest", "step-000020", "step-000025"]] * 2


def test_a_disk_that_fails_on_one_host_is_not_damage_of_which_an_older_one_is_taken(tmp_path):
    hosts = [tmp_path / "a", tmp_path / "new"]
    run_on([tmp_path / "a"] * 2, lambda run: run.save(4, 8))
    failing = mock.patch.object(os, "replace", side_effect=OSError(5, "Input/output error", "x"))

    def body(run: Run) -> Any:
        run.checkpoints.collective.share(0)  # the folders are open
        return run.resume()

    with failing:
        found = run_on(hosts, body)
    line = "cannot use x: Input/output error"
    assert [str(error) for error in found] == [f"rank 1: {line}", line]


def test_what_no_host_has_is_named(tmp_path):
    hosts = [tmp_path / "a", tmp_path / "b"]
    run_on(hosts, lambda run: run.save(4))
    lost = tmp_path / "b/checkpoints/step-000004/rank-0001.safetensors"
    lost.unlink()
    for error in run_on(hosts, lambda run: run.resume()):
        assert "step-000004 is incomplete: rank-0001.safetensors is missing" in str(error)


def test_a_host_that_lacks_the_checkpoint_of_another_run_begins_a_run_of_its_own_too(tmp_path, monkeypatch):
    run_on([tmp_path / "a"] * 2, lambda run: run.save(4))
    given, host = tmp_path / "a/checkpoints/step-000004", threading.local()
    read, exists = format.read_meta, Path.exists

    def read_meta_(path: Path) -> Any:
        if path == given and host.rank:
            raise format.Damaged(format.no_meta(path))
        return read(path)

    def resume(run: Run) -> Any:
        host.rank = run.checkpoints.collective.rank
        return run.resume(str(given)), run.weights()[-1], run.checkpoints.run == read(given).meta["run"]

    monkeypatch.setattr(store, "read_meta", read_meta_)
    monkeypatch.setattr(Path, "exists", lambda path: exists(path) and not (path == given and host.rank))
    host.rank = 0
    hosts = [tmp_path / "b", tmp_path / "c"]
    assert run_on(hosts, resume) == [(4, 1.0, False), (4, 2.0, False)]
    assert [names(host) for host in hosts] == [[], ["step-000004"]]
    assert all("holds a run already" in str(error) for error in run_on(hosts, resume))


# --- other ranks than before ------------------------------------------------------------------------------------------


def test_another_number_of_ranks_gets_the_weights_and_the_states_of_all_that_were(tmp_path):
    def save(run: Run) -> list[float]:
        rank = run.checkpoints.collective.rank
        run.wire.state = {f"rank-{rank:04d}-of-0002/residual/weight": torch.full((4,), rank + 1.0)}
        run.save(4)
        return run.model.weight.flatten().tolist()

    def resume(run: Run) -> Any:
        given: dict[str, Any] = {}
        run.wire.load_state_dict = lambda state, **how: given.update(how, keys=sorted(state))
        step = run.resume()
        run.checkpoints.go_on()
        return step, run.model.weight.flatten().tolist(), given

    two, three = ({"world_size": ranks, "seed": 0} for ranks in (2, 3))
    weights = run_on([tmp_path] * 2, save, about=two)[0]
    refused = run_on([tmp_path] * 3, resume, about=three, seed=1)
    assert all("made by 2 ranks, this run has 3" in str(error) for error in refused)
    given = {"resize": "flush", "keys": [f"rank-000{rank}-of-0002/residual/weight" for rank in range(2)]}
    with mock.patch.object(store.warnings, "warn") as warn:
        found = run_on([tmp_path] * 2 + [tmp_path / "new"], resume, about=three, seed=1, resize="flush")
    assert found == [(4, weights, given)] * 3
    assert "world_size was 2 and is 3 now" in warn.call_args[0][0]
    unmoved = run_on([tmp_path] * 2, resume, about=two, seed=1, resize="flush")
    assert [keys for _, _, keys in unmoved] == [{"resize": None, "keys": [name]} for name in given["keys"]]


def test_shards_are_put_side_by_side(tmp_path):
    weight, step = torch.arange(12.0).view(4, 3), torch.tensor(7.0)
    for rank, part in enumerate(weight.split([2, 1, 1, 0]) * 2):  # two copies of four shards
        tensors = {"model/w": part, "optimizer/w/exp_avg": part + 1, "optimizer/w/step": step, "wire/x": step + 1}
        format.write_tensors(tensors, tmp_path / format.rank_file(rank))
    meta = {"files": {format.rank_file(rank): 0 for rank in range(8)}, "about": {"mesh": "4 x 2"}}
    found = dict(state.read_whole_tensors(format.Checkpoint(tmp_path, meta)))
    assert found.keys() == {"model/w", "optimizer/w/exp_avg", "optimizer/w/step"}
    assert torch.equal(found["model/w"], weight) and torch.equal(found["optimizer/w/exp_avg"], weight + 1)
    assert torch.equal(found["optimizer/w/step"], step)


# --- damage -----------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


HARMS: dict[str, Callable[[Path], object]] = {
    "model truncated": lambda path: (path / "model.safetensors").write_bytes(b"0" * 50),
    "model empty": lambda path: (path / "model.safetensors").write_bytes(b""),
    "rank missing": lambda path: (path / "rank-0001.safetensors").unlink(),
    "a bit of a tensor": lambda path: flip(path / "model.safetensors", -5),
    "a bit of a rank's tensor": lambda path: flip(path / "rank-0001.safetensors", -5),
    "a bit of the header": lambda path: flip(path / "model.safetensors", 60),
    "meta no text": lambda path: (path / "meta.json").write_bytes(b"\xff\xfe"),
    "meta a list": lambda path: (path / "meta.json").write_text("[]"),
    "meta empty": lambda path: (path / "meta.json").write_text(""),
    "meta deep": lambda path: (path / "meta.json").write_text("[" * 100000),
    "meta of a later version": lambda path: (path / "meta.json").write_text('{"format": 99}'),
    "meta changed": lambda path: (path / "meta.json").write_text(
        (path / "meta.json").read_text().replace('"step": 8', '"step": 9')
    ),
    "meta missing": lambda path: (path / "meta.json").unlink(),
    "latest no text": lambda path: (path.parent / "latest").write_bytes(b"\xff\xfe"),
    "latest dangles": lambda path: (path.parent / "latest").write_text("step-000099"),
    "latest leads elsewhere": lambda path: (path.parent / "latest").write_text("../../etc"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_damage_is_named_and_the_newest_whole_checkpoint_taken(tmp_path, harm):
    run_on([tmp_path] * 2, lambda run: run.save(4, 8))
    path = tmp_path / "checkpoints/step-000008"
    (tmp_path / "metrics.jsonl").touch()  # as in the folder of every run
    HARMS[harm](path)
    latest = harm.startswith("latest")

    def resume(how: str) -> list[Any]:
        def body(run: Run) -> Any:
            return run.resume(how)

        return run_on([tmp_path] * 2, body)

    with warnings.catch_warnings(record=True), mock.patch.object(store.warnings, "warn") as warn:
        found = resume("auto")
    assert found == ([8, 8] if latest else [4, 4])
    assert warn.call_count == 1
    if not latest:
        shutil.rmtree(tmp_path / "checkpoints/step-000004")
        for how in ("auto", str(path)):
            for error in resume(how):
                assert isinstance(error, ThinwireError) and str(path) in str(error) and "\n" not in str(error)


def test_a_checkpoint_of_an_earlier_version_is_refused_as_such(tmp_path):
    run_on([tmp_path], lambda run: run.save(8))
    path = tmp_path / "checkpoints/step-000008"
    (path / "meta.json").write_text('{"format": 1, "step": 8, "world_size": 1}')
    for how in ("auto", "latest", str(path)):
        said = str(run_on([tmp_path], lambda run, how=how: run.resume(how))[0])
        assert f"{path} was made by an earlier version of Thinwire, in format 1; this one reads 2" in said


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(3)}, path)
    with pytest.raises(ThinwireError, match="not of Thinwire"):
        list(read_tensors(path))
    path.write_bytes(b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ThinwireError, match="damaged, or no safetensors file"):
        list(read_tensors(path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool])
def test_every_dtype_and_shape_comes_back(tmp_path, dtype):
    given = {"a": torch.arange(6).view(2, 3), "b": torch.ones(()), "c": torch.zeros(0, 4)}
    tensors = {name: tensor.to(dtype) for name, tensor in given.items()}
    format.write_tensors(tensors, tmp_path / "x.safetensors")
    found = dict(read_tensors(tmp_path / "x.safetensors"))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)
    assert list(load_file(tmp_path / "x.safetensors")) == ["a", "b", "c"]


def test_another_model_is_refused(tmp_path):
    run_on([tmp_path], lambda run: run.save(4))

    def wider(run: Run) -> None:
        run.model = nn.Linear(4, 2)
        run.resume()

    def less(run: Run) -> None:
        run.model = nn.Linear(3, 2, bias=False)
        run.resume()

    assert "weight has shape (2, 3), this model needs (2, 4)" in str(run_on([tmp_path], wider)[0])
    assert "holds bias, which this model does not have" in str(run_on([tmp_path], less)[0])


class Killed(BaseException):
    """As by kill -9: nothing is done after it."""


@pytest.mark.parametrize("step", spread(2, [16, 12]))
def test_a_kill_at_any_moment_leaves_every_visible_checkpoint_whole(tmp_path, step):
    """Between any two changes of the disk, of a save that removes another, or overwrites a step that was gone back from
    (then `latest` may name what is gone for a moment, and the one before is taken)."""

    def killed_after(changes: int) -> bool:
        path = tmp_path / str(changes)
        run_on([path], lambda run: run.save(4, 8, *([12] if step == 12 else [])))
        left = [changes]

        def counted(change: Callable) -> Callable:
            def call(*args: Any, **how: Any) -> Any:
                if left[0] <= 0:
                    raise Killed
                left[0] -= 1
                return change(*args, **how)

            return call

        def body(run: Run) -> bool:
            run.resume(str(path / "checkpoints/step-000008"))
            try:
                with contextlib.ExitStack() as stack:
                    for of, name in (
                        (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (format, "save_file"),
                        (files, "sync"), (os, "unlink"), (os, "rmdir"), (os, "fsync"),
                    ):  # fmt: skip
                        stack.enter_context(mock.patch.object(of, name, counted(getattr(of, name))))
                    run.save(step)
            except Killed:
                return True
            return False

        killed = run_on([path], body)[0]
        for found in (path / "checkpoints").glob("step-*"):
            seen = read_meta(found)
            assert seen.complete_files == list(seen.meta["files"]), f"{changes}: {found}"
            for name in seen.complete_files:
                list(read_tensors(found / name))
        with mock.patch.object(store.warnings, "warn") as warn:
            assert run_on([path], lambda run: run.resume())[0] in (8, step), changes
        assert step == 12 or not warn.called
        return killed

    changes = 0
    while killed_after(changes):
        changes += 1
    assert changes > 15


@pytest.mark.parametrize("at", ["save_file", "write"])
def test_a_disk_that_is_full_is_told_by_all_and_older_checkpoints_stay(tmp_path, at):
    full = OSError(28, "No space left on device", "x")

    def body(run: Run) -> Any:
        run.save(4)
        before = names(tmp_path)
        of, name = (format, "write_tensors") if at == "save_file" else (files, "write")
        if run.checkpoints.collective.rank == 0:
            real = getattr(of, name)

            def once(*args: Any) -> Any:
                if threading.current_thread() is mine:
                    raise full
                return real(*args)

            mine = threading.current_thread()
            setattr(of, name, once)
        try:
            run.save(8)
        except ThinwireError as error:
            return str(error), names(tmp_path) == before, list((tmp_path / "checkpoints").glob(".*"))
        finally:
            if run.checkpoints.collective.rank == 0:
                setattr(of, name, real)

    found = run_on([tmp_path] * 2, body)
    line = "cannot use x: No space left on device"
    assert [said[0] for said in found] == [line, f"rank 0: {line}"]
    assert found[0][1:] == (True, [])
    assert run_on([tmp_path] * 2, lambda run: run.resume()) == [4, 4]


# --- what may differ --------------------------------------------------------------------------------------------------

INDIFFERENT = {
    "cluster", "max_loss",  # the choice that they lead to is in the method
    "preset", "seq_len", "corpus", "valid", "tokenizer", "shard_size", "out", "ranks", "ranks_per_node", "eval_every",
    "eval_sequences", "checkpoints", "checkpoint_every", "keep", "resume", "resume_anyway", "resize", "overwrite",
    "max_skipped", "check_every", "timeout", "file_timeout", "track", "track_project", "data", "lora_alpha",
    "lora_targets", "replicas", "min_replicas",
}  # fmt: skip
"""What shows in something else that is compared (the model's shape, hashes of the text, the mesh), or nowhere."""


def described(**changes: Any) -> dict[str, Any]:
    config = dataclasses.replace(Config(preset="tiny"), **changes)
    return run_settings.describe_run(
        config, config.shape(256), tokens=("a", "b"), world_size=4, per_node=2, device="cpu", dtype="fp32"
    )


def test_every_setting_is_compared_or_known_not_to_matter():
    fields = {field.name for field in dataclasses.fields(Config)}
    assert fields - set(run_settings.TABLE) == INDIFFERENT
    assert described().keys() == run_settings.TABLE.keys()
    assert json.loads(json.dumps(described())) == described()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "seed was 0 and is 1 now"),
        ({"batch_size": 4, "accumulate": 2}, "batch_size was 8 and is 4 now, accumulate was 1 and is 2 now"),
        ({"layers": 1}, "layers was 2 and is 1 now"),
        ({"optimizer": "adams"}, "optimizer was adamw and is adams now"),
        ({"engine": "hsdp"}, "engine was ddp and is hsdp now, mesh was 1 x 4 and is 2 x 2 now"),
        ({"method": "topk(density=0.02)"}, "method was dense and is topk(density=0.02) now"),
        ({"seq_len": 32}, "context was 64 and is 32 now"),
    ],
)
def test_what_cannot_go_on_is_refused_by_name(changes, words):
    with pytest.raises(ThinwireError) as caught:
        run_settings.compare(described(), described(**changes))
    assert words in str(caught.value)


def test_other_data_need_a_word_and_other_rates_are_told():
    told = "seed was 0 and is 1 now"
    assert run_settings.compare(described(), described(seed=1), resume_anyway=True) == told
    assert run_settings.compare(described(), described(lr=1.0, threads=2)) == (
        "lr was 0.002 and is 1.0 now, threads was 1 and is 2 now"
    )
    assert run_settings.compare(described(), described()) == ""
    with pytest.raises(ThinwireError, match="layers"):
        run_settings.compare(described(), described(layers=1), resume_anyway=True)
    llamas = (described(preset="llama-tiny", seq_len=length) for length in (64, 32))  # whose shape is the same
    with pytest.raises(ThinwireError, match=r"does not fit this run: sequence was 64 and is 32 now$"):
        run_settings.compare(*llamas, resume_anyway=True, resize="flush")
    same = {"method": "topk(density=0.01 )"}, {"method": "topk( density=0.01)"}
    assert run_settings.compare(*(described(**written) for written in same)) == ""
    assert from_arguments([]).resize == "redistribute"  # what delivers all at once does harm in mid-run (docs/state.md)
    fewer = described() | {"world_size": 2, "mesh": "1 x 2", "layers": 3}
    with pytest.raises(ThinwireError, match=r"made by 2 ranks, this run has 4; .* with --resize redistribute"):
        run_settings.compare(fewer, described())
    with pytest.raises(ThinwireError, match=r"does not fit this run: layers was 3 and is 2 now$"):
        run_settings.compare(fewer, described(), resize="flush")
    assert "world_size was 2" in run_settings.compare(fewer | {"layers": 2}, described(), resize="flush")


# --- whole runs of one rank -------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Callable[..., dict[str, Any]]]:
    """``thinwire train`` with these words, on the one rank of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    text = tmp_path / "text.txt"
    text.write_text("".join(TEXT[:2000]))
    small = [
        "--preset", "tiny", "--layers", "1", "--width", "64", "--seq-len", "16", "--batch-size", "2", "--device", "cpu",
        "--corpus", str(text), "--eval-sequences", "2", "--eval-every", "2",
        "--method", "int8(smallest=1000, feedback='gradients')",
    ]  # fmt: skip

    def train(*words: str) -> dict[str, Any]:
        assert dist.group.WORLD is not None
        ranks = setup.Ranks(GroupComm(dist.group.WORLD, Ledger()), 1, torch.device("cpu"))
        config = from_arguments([*small, "--out", f"{tmp_path}/run", *words]).check()
        return loop.train_on(config, ranks)

    try:
        yield train
    finally:
        dist.destroy_process_group()


def steps_of(out: Path) -> list[str]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [f"{'eval ' * ('valid_loss' in row)}{row['step']}" for row in rows]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {f"{path.name}: {name}": tensor for path in files for name, tensor in load_file(path).items()}


def equal(one: Path, other: Path) -> bool:
    ours, theirs = tensors(one), tensors(other)
    return len(ours) > 1 and ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def ended_after(last: int) -> Any:
    """The run gets a SIGTERM in step ``last``."""
    real = Display.step

    def step(self: Display, row: dict[str, Any], rate: float) -> None:
        real(self, row, rate)
        if row["step"] == last - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return mock.patch.object(Display, "step", step)


@contextlib.contextmanager
def spoilt_from(step: int) -> Iterator[None]:
    """From this step on the loss is not a number."""
    batch, cross_entropy = Windows.batch, torch.nn.functional.cross_entropy

    def spoil(self: Windows, first: int, count: int) -> Any:
        inputs, targets = batch(self, first, count)
        return inputs, targets if first < 2 * (step - 1) else targets.fill_(-1_000_000)

    def loss(*given: Any, **how: Any) -> torch.Tensor:
        good = bool((given[1] >= 0).all())
        return cross_entropy(given[0], given[1].clamp(min=0), **how) * (1.0 if good else float("nan"))

    with mock.patch.object(Windows, "batch", spoil), mock.patch("torch.nn.functional.cross_entropy", loss):
        yield


def test_a_run_that_is_stopped_goes_on_exactly_and_its_folder_is_its_own(tmp_path, one_rank, recwarn):
    one_rank("--steps", "6", "--out", f"{tmp_path}/whole")
    whole, run = tmp_path / "whole/checkpoints", tmp_path / "run/checkpoints"
    assert names(tmp_path / "whole") == ["latest", "step-000006"]
    with ended_after(3), pytest.raises(ThinwireError) as caught:
        one_rank("--steps", "6", "--resume", "auto")
    line = "ended by SIGTERM after step 3: step-000003 is saved, --resume auto goes on from it"
    assert (str(caught.value), caught.value.status) == (line, 143)
    with pytest.raises(ThinwireError, match="holds a run already: --resume auto goes on"):
        one_rank("--steps", "6")
    with pytest.raises(ThinwireError, match="seed was 0 and is 1 now"):
        one_rank("--steps", "6", "--resume", "auto", "--seed", "1")
    with pytest.raises(ThinwireError, match="holds a run already"):
        one_rank("--steps", "9", "--resume", str(whole / "step-000006"))
    with (tmp_path / "run/metrics.jsonl").open("a") as file:  # as if it had been killed after another step
        file.write('{"step": 4, "loss": 1.0, "wall_s": 1}\n{"step"')
    one_rank("--steps", "6", "--resume", "auto")
    assert equal(whole / "step-000006", run / "step-000006")
    rows = ["eval 0", "1", "2", "eval 2", "3", "4", "eval 4", "5", "6", "eval 6"]
    assert steps_of(tmp_path / "whole") == rows
    assert steps_of(tmp_path / "run") == [*rows[:5], "eval 3", *rows[5:]]
    with pytest.raises(ThinwireError, match="nothing is left to do"):
        one_rank("--steps", "6", "--resume", "latest")
    assert one_rank("--steps", "6", "--resume", "auto", "--lr", "0.1") == {}  # and no word of another rate
    one_rank("--steps", "2", "--overwrite", "--no-checkpoints")
    assert steps_of(tmp_path / "run") == ["eval 0", "1", "2", "eval 2"] and not run.exists()
    assert not [str(said.message) for said in recwarn if "not bit for bit" in str(said.message)]


def test_losses_of_a_model_that_does_not_move_are_one_in_the_last_line(tmp_path, one_rank, capsys):
    """It compares the loss before and after on the same text; what is of more text is said to be."""
    words = ["--lr", "0", "--weight-decay", "0", "--steps"]
    summary = one_rank(*words, "40")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("validation loss")]
    first, last, more = f"{summary['first_valid_loss']:.4f}", line.split()[4], f"{summary['valid_loss']:.4f}"
    assert line.startswith(f"validation loss {first} -> {first} (on more text {more}), ") and more != first == last
    one_rank(*words, "4", "--eval-sequences", "100000", "--overwrite")
    assert "on more text" not in capsys.readouterr().out


def test_the_first_loss_in_the_last_line_is_of_the_windows_of_the_last_one(tmp_path, one_rank, capsys):
    """Resumed with another --eval-sequences, it was of the windows of before."""
    words = ["--lr", "0", "--weight-decay", "0", "--steps", "6"]
    for last, more in ((3, []), (5, ["--eval-sequences", "3"])):
        with ended_after(last), pytest.raises(ThinwireError, match="--resume auto goes on"):
            one_rank(*words, *more, "--resume", "auto")
    capsys.readouterr()
    summary = one_rank(*words, "--eval-sequences", "3", "--resume", "auto")
    losses = re.search(r"^validation loss (\S+) -> (\S+)", capsys.readouterr().out, re.MULTILINE)
    assert losses[1].rstrip(",") == losses[2].rstrip(",") == f"{summary['first_valid_loss']:.4f}"
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    losses = {(row["eval_sequences"], row["valid_loss"]) for row in rows if "valid_loss" in row}
    assert len(losses) == 2, "it tells them apart"


def test_muon_and_adamw_go_on_exactly_too(tmp_path, one_rank):
    words = ["--steps", "6", "--optimizer", "muon", "--muon-lr", "8e-3", "--method", "trickle:muon(smallest=1000)"]
    one_rank(*words, "--out", f"{tmp_path}/whole")
    with ended_after(3), pytest.raises(ThinwireError, match="--resume auto goes on"):
        one_rank(*words, "--resume", "auto")
    one_rank(*words, "--resume", "auto")
    whole = tmp_path / "whole/checkpoints/step-000006"
    assert equal(whole, tmp_path / "run/checkpoints/step-000006")
    kinds = {name.rpartition("/")[2] for name in tensors(whole) if "optimizer/" in name}
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq"} <= kinds
    with pytest.raises(ThinwireError, match="optimizer was muon and is adamw now"):
        one_rank("--steps", "8", "--method", "trickle:muon(smallest=1000)", "--resume", "auto")
    with pytest.raises(ThinwireError, match="--muon-lr is for --optimizer muon"):
        one_rank("--muon-lr", "8e-3")


def test_a_run_goes_on_on_another_engine(tmp_path, one_rank):
    """What the method keeps is the library's matter, and left out here."""
    words = ["--method", "dense", "--resume", "auto", "--checkpoint-every", "2", "--keep", "9"]
    with mock.patch.object(Config, "learning_rate", lambda self, step: 1e-3):
        one_rank(*words, "--steps", "6", "--out", f"{tmp_path}/whole")
    for steps, engine in (("2", "ddp"), ("4", "fsdp2"), ("6", "ddp")):
        with mock.patch.object(Wire, "load_state_dict", lambda self, state, **how: None), warnings.catch_warnings():
            warnings.simplefilter("ignore", ThinwireWarning)
            with mock.patch.object(Config, "learning_rate", lambda self, step: 1e-3):
                one_rank(*words, "--steps", steps, "--engine", engine, "--resize", "reset")
    for step in (2, 4, 6):
        folders = [tmp_path / name / f"checkpoints/step-{step:06d}" for name in ("whole", "run")]
        ours, theirs = (dict(state.read_whole_tensors(read_meta(folder))) for folder in folders)
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0, msg=f"{step}: {name}")


def test_a_run_that_diverges_ends_and_its_last_good_checkpoint_stays(tmp_path, one_rank):
    words = ["--steps", "12", "--checkpoint-every", "2", "--keep", "1", "--max-skipped", "4"]
    with spoilt_from(6):
        with pytest.raises(ThinwireError) as caught:
            one_rank(*words)
        assert "steps 6 to 9 were skipped" in str(caught.value) and "checkpoint is step-000004" in str(caught.value)
        assert names(tmp_path / "run") == ["latest", "step-000004", "step-000008"]
        with pytest.raises(ThinwireError, match="steps 6 to 9 were skipped"):
            one_rank(*words, "--resume", "auto")
    assert steps_of(tmp_path / "run")[-1] == "9"


def test_a_model_is_read_from_the_newest_checkpoint_that_is_whole(tmp_path, one_rank, capsys):
    one_rank("--steps", "4", "--checkpoint-every", "2")
    assert trained_model.read(tmp_path / "run").step == 4
    path = tmp_path / "run/checkpoints/step-000004"
    HARMS["model truncated"](path)
    assert trained_model.read(tmp_path / "run").step == 2
    assert f"thinwire: {path}/model.safetensors is damaged, or no safetensors file: " in capsys.readouterr().err
    with pytest.raises(format.Damaged):
        trained_model.read(path)


@pytest.mark.parametrize(
    ("bad", "finite", "kept"),
    [
        (4, True, "step-000004 is saved, --resume auto goes on from it"),  # skipped, so all is as after step 3
        (4, False, "its loss, or a gradient, was not finite; the last good checkpoint is step-000002"),
        (3, True, "its loss, or a gradient, was not finite; the last good checkpoint is step-000002"),
        (1, True, "its loss, or a gradient, was not finite; there is no good checkpoint"),
    ],
)
def test_what_a_stopped_run_says_of_its_checkpoint_is_so(tmp_path, one_rank, bad, finite, kept):
    words = ["--steps", "6", "--checkpoint-every", "2", "--eval-sequences", "0"]
    weights = mock.patch.object(loop, "_is_finite", lambda model: finite)
    with ended_after(4), spoilt_from(bad), weights, pytest.raises(ThinwireError) as caught:
        one_rank(*words)
    assert str(caught.value) == f"ended by SIGTERM after step 4: {kept}"
    latest = tmp_path / "run/checkpoints/latest"
    assert (latest.read_text().strip() if latest.exists() else "no good checkpoint") in kept


def test_weights_that_are_not_finite_are_seen():
    model = nn.Linear(2, 2)
    assert loop._is_finite(model)
    model.bias.data[1] = float("inf")
    assert not loop._is_finite(model)


def test_a_metrics_file_that_cannot_be_written_ends_the_run_in_one_line(tmp_path, one_rank):
    enter, full_disk = Display.__enter__, mock.Mock(side_effect=OSError(28, "No space left on device"))

    def full(self: Display) -> Display:
        enter(self)
        self._trackers = [full_disk]
        return self

    with mock.patch.object(Display, "__enter__", full), pytest.raises(ThinwireError) as caught:
        one_rank("--steps", "4")
    assert str(caught.value) == f"cannot write {tmp_path}/run/metrics.jsonl: No space left on device"


def test_a_full_disk_below_standard_output_ends_no_run(tmp_path, one_rank, monkeypatch, capfd):
    """The lines of a log are lost, and one on standard error says so; the run and its files are whole."""
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        one_rank("--steps", "4")
    assert capfd.readouterr().err.count("the run goes on without it") == 1
    assert (tmp_path / "run/checkpoints/latest").exists() and (tmp_path / "run/summary.json").exists()


def _train(rank: int, world: int, port: int, words: list[str], dies_at: int) -> int:
    dist.destroy_process_group()  # that of ranks.py: the program makes its own
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    accumulate = Wire.accumulate

    def dies(self: Wire, *, last: bool = True) -> Any:
        if self.step == dies_at and last:  # between two micro-batches
            os.kill(os.getpid(), signal.SIGKILL)
        return accumulate(self, last=last)

    with mock.patch.object(Wire, "accumulate", dies), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        return cli.main(["train", *words])


def test_a_run_that_is_killed_and_resumed_is_the_one_that_was_not_bit_for_bit(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(TEXT[:2000]))
    words = [
        "--preset", "tiny", "--layers", "1", "--width", "64", "--seq-len", "16", "--batch-size", "2", "--steps", "5",
        "--accumulate", "2", "--corpus", str(text), "--eval-sequences", "4", "--checkpoint-every", "2",
        "--method", "scape(smallest=1000, density=0.05, warmup=1)", "--optimizer", "adams", "--resume", "auto",
    ]  # fmt: skip

    def train(out: str, dies_at: int = -1) -> list[int]:
        return ranks.run(_train, 2, free_port(), [*words, "--out", f"{tmp_path}/{out}"], dies_at, LOCAL_WORLD_SIZE="2")

    assert train("whole") == [0, 0]
    with pytest.raises(AssertionError, match="returned nothing"):
        train("killed", dies_at=3)
    assert names(tmp_path / "killed") == ["latest", "step-000002"]
    assert train("killed") == [0, 0]
    whole, killed = (tmp_path / name / "checkpoints/step-000005" for name in ("whole", "killed"))
    assert len(list(whole.glob("rank-*"))) == 2 and equal(whole, killed)
    results = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "killed")]
    told = [{key: value for key, value in result.items() if not measured(key)} for result in results]
    reports = [(tmp_path / name / "report.txt").read_text().splitlines() for name in ("whole", "killed")]
    assert reports[1][0] == "the 3 of 5 steps that this process has taken:" and "5 steps," in reports[0][0]
    assert told[0] == told[1], "also the first evaluation, and the last ten losses, of which some are from before"


def _train_spoilt(rank: int, world: int, port: int, words: list[str], steps: list[int]) -> int:
    """As ``_train``; in these steps the last rank's loss is not a number."""
    take = loop.Trainer._take_step

    def spoil(self: loop.Trainer, **how: Any) -> Any:
        with ExitStack() as stack:
            if self.step + 1 in steps and rank == world - 1:
                stack.callback(self.net.register_forward_hook(lambda *given: given[-1] * float("nan")).remove)
            return take(self, **how)

    with mock.patch.object(loop.Trainer, "_take_step", spoil):
        return _train(rank, world, port, words, -1)


@pytest.mark.parametrize("method", ["int8(smallest=0)", "local-steps(every=3)"])
def test_a_step_that_one_rank_skipped_is_told_as_skipped(tmp_path, method):
    """In its row and in the summary, also of a run that goes on; a last one keeps the checkpoint good, and no loss that
    is not a number is in the mean of the last ten."""
    text = tmp_path / "text.txt"
    text.write_text("".join(TEXT[:2000]))
    words = [
        "--preset", "tiny", "--layers", "1", "--width", "64", "--seq-len", "16", "--batch-size", "2", "--corpus",
        str(text), "--eval-sequences", "4", "--method", method, "--resume", "auto", "--out", f"{tmp_path}/run",
    ]  # fmt: skip
    for steps in ("6", "7"):
        given = ([*words, "--steps", steps], [2, 6])
        assert ranks.run(_train_spoilt, 2, free_port(), *given, LOCAL_WORLD_SIZE="2") == [0, 0]
        rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
        assert [row["step"] for row in rows if row.get("skipped")] == [2, 6]
        summary = json.loads((tmp_path / "run/summary.json").read_text())
        assert summary["skipped_steps"] == 2 and math.isfinite(summary["train_loss"])
        assert (tmp_path / "run/checkpoints/latest").read_text().strip() == f"step-00000{steps}"


def measured(key: str) -> bool:
    """Is this entry of summary.json a time or this process's memory?"""
    return key.endswith(("_ms", "_s")) or "memory" in key


def test_a_first_signal_is_held_back_inside_the_block_alone():
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with note_signals() as held:
            os.kill(os.getpid(), signal.SIGTERM)
            assert (held, came) == ([signal.SIGTERM], [])
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(came) == 2 and signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


BLOCKED = """
import contextlib, ctypes, sys
from thinwire.train.job.signals import end_at_once, note_signals

end_at_once()
with note_signals() if sys.argv[1:] else contextlib.nullcontext():
    print("inside", flush=True)
    lock = ctypes.create_string_buffer(64)
    while True:  # the second time it waits for itself for ever, and no signal wakes it
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


def test_a_second_signal_ends_a_process_that_waits_in_a_library_and_before_the_first_step_one_does():
    def started(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", BLOCKED, *words], stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    with started("steps") as stepping, started() as reading:
        try:
            for process in (stepping, reading):
                assert process.stdout is not None and process.stdout.readline() == "inside\n"
            time.sleep(0.2)
            for process in (stepping, reading):
                process.send_signal(signal.SIGINT)
            assert reading.wait(timeout=10) == -signal.SIGINT
            time.sleep(0.2)
            assert stepping.poll() is None
            stepping.send_signal(signal.SIGTERM)
            assert stepping.wait(timeout=10) == 128 + signal.SIGTERM
        finally:
            stepping.kill()
            reading.kill()


def test_ranks_wait_longer_for_files_than_for_each_other(one_rank):
    opening = mock.patch.object(loop, "open_run_folder", side_effect=InterruptedError)
    with opening as open_, pytest.raises(InterruptedError):
        one_rank("--timeout", "5", "--file-timeout", "77")
    assert open_.call_args[0][1]._comm.timeout == timedelta(seconds=77)


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_cut_back_to_one_row_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 0, "valid_loss": 5.0, "wall_s": 0.0}]
    rows += [{"step": step, "loss": 4.0, "wall_s": step / 2} for step in range(1, 8)]
    rows[3] |= {"loss": 9.0, "skipped": True}
    rows.insert(5, {"step": 4, "valid_loss": 3.0, "wall_s": 2.0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 8, "lo')
    kept = cut_metrics(path, 4, 64)
    assert kept == (2.0, 5.0, [4.0] * 3, 4, 1, {}, 7)
    left = [json.loads(line) for line in path.read_text().splitlines()]
    assert left == [row for row in rows if row["step"] < 4 or (row["step"] == 4 and "loss" in row)]
    assert cut_metrics(tmp_path / "none", 4, 64)[2:] == ([], 0, 0, {}, -1)
    path.write_bytes(b"\xff\xfe\n[]\n3\n")
    assert cut_metrics(path, 4, 64)[0] == 0.0 and path.read_text() == ""


# --- thinwire inspect -------------------------------------------------------------------------------------------------


def inspected(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, str]:
    status = cli.main(["inspect", *map(str, paths)])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_inspect_shows_what_waits_on_each_rank_and_what_is_damaged(tmp_path, capsys):
    run_on([tmp_path] * 2, lambda run: run.save(4, 8))
    status, shown = inspected(capsys, tmp_path)
    assert status == 0 and "step-000008: step 8 of run" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["seed", "0"] in rows and ["weight", "2", "4"] in rows  # four values of 1 on rank 0, of 2 on rank 1
    assert sum(row[-1:] == ["fit"] for row in rows) == 3
    path = tmp_path / "checkpoints/step-000008"
    flip(path / "rank-0001.safetensors", -5)
    (path / "rank-0000.safetensors").unlink()
    status, shown = inspected(capsys, path)
    assert status == 1 and "checksum of wire/" in shown and "another host may have it" in shown
    shutil.copy(path / "rank-0001.safetensors", path / "meta.json")
    status, shown = inspected(capsys, path)
    assert status == 1 and shown == f"thinwire: {path}/meta.json is damaged: it is not JSON\n"
    status, shown = inspected(capsys, tmp_path)
    assert status == 1 and "step-000004: step 4 of run" in shown and f"{path}/meta.json is damaged" in shown
    line = f"thinwire: {tmp_path}/none is not a checkpoint: it has no meta.json\n"
    assert inspected(capsys, tmp_path / "none") == (2, line)


def test_inspect_shows_how_two_checkpoints_differ(tmp_path, capsys):
    def other(run: Run) -> None:
        run.model.weight.data[0, 0] += 0.5
        run.checkpoints.run = first
        run.save(4)

    run_on([tmp_path / "a"], lambda run: run.save(4))
    first = read_meta(tmp_path / "a/checkpoints/step-000004").meta["run"]
    run_on([tmp_path / "b"], other, about={"seed": 1})
    assert inspected(capsys, tmp_path / "a", tmp_path / "a")[0] == 0
    status, shown = inspected(capsys, tmp_path / "a", tmp_path / "b")
    rows = [line.split() for line in shown.splitlines()]
    assert status == 1 and ["seed", "0", "1"] in rows
    assert ["model/weight", "0.5"] in [row[:2] for row in rows]
    assert "9 tensors are equal bit for bit, 1 are not" in shown


def test_a_name_of_a_large_model_is_not_cut_in_a_terminal(tmp_path, capsys, monkeypatch):
    run_on([tmp_path], lambda run: run.save(4))
    name = "optimizer/blocks.11.attention.output.weight/exp_avg_sq"
    distances = [(name, 0.000123456, 1.234567)]
    monkeypatch.setattr(inspect, "_distances", lambda one, other: distances if one.stem == "model" else [])
    monkeypatch.setattr(inspect, "columns", lambda: 80)
    shown = inspected(capsys, tmp_path, tmp_path)[1]
    row = next(line for line in shown.splitlines() if name in line)
    assert len(row) <= 80 and row.split() == [name, "0.0001235", "1.235"]


ODD = [None, -1, 0, 1e308, "x", [], {}, "../../outside", True, [1, 2], {"../x.safetensors": 5}, "\0", 10**30, {"a": {}}]


def test_metadata_whose_checksum_fits_and_whose_fields_do_not_are_told_in_a_line(tmp_path):
    """Written by a tool that edited them, or by a bug: every reader takes them, or says what is wrong."""
    meta = {
        "format": format.FORMAT, "run": "a", "save": "b", "step": 4, "sequences": 64, "good": True, "world_size": 2,
        "files": {"model.safetensors": 5, "rank-0000.safetensors": 7},
        "about": {"mesh": "1 x 2", "method": "int8", "layers": 2, "engine": "ddp"},
    }  # fmt: skip
    generator, said = random.Random(0), Counter()
    for _ in range(400):
        changed = json.loads(json.dumps(meta))
        place = changed if generator.random() < 0.6 else changed[generator.choice(["files", "about"])]
        key = generator.choice([key for key in place if key != "format"])
        if generator.random() < 0.3:
            del place[key]
        else:
            place[key] = generator.choice(ODD)
        format.write_meta(tmp_path, changed)
        try:
            checkpoint = format.read_meta(tmp_path)
            assert checkpoint.complete_files == [] and checkpoint.step >= 0
            assert format.is_good(tmp_path) in (True, False)
            assert checkpoint.meta["world_size"] + 0 and checkpoint.meta["run"] is not None
            about = checkpoint.meta["about"]
            assert "mesh" not in about or (about["mesh"].split()[0] and about["method"] is not None)
            assert not any("/" in name or ".." in name for name in checkpoint.meta["files"])
            said["taken"] += 1
        except ThinwireError as error:
            assert "meta.json was not written by Thinwire" in str(error)
            said["refused"] += 1
    assert said["taken"] > 50 and said["refused"] > 200
