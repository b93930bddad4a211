"""Laws of all commands: what a user's own files, numbers and disk may bring about."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.cli import program as cli
from thinwire.predict.cluster import read_cluster, write_cluster
from thinwire.train.checkpoint import evaluation
from thinwire.train.checkpoint.trained_model import TrainedModel
from thinwire.train.job import run_folder
from thinwire.train.job.run_folder import hold_run_folder, open_run_folder
from thinwire.train.model.shapes import PRESETS

USERS = [
    *("metrics.jsonl", "metrics.csv", "tracked.json", "summary.json", "report.txt", "valid_losses.csv", "plan.txt"),
    *("config.yaml", "replicas/x", "checkpoints/epoch-1.pt", "checkpoints/step-000001/weights.pt", "tokenizer.json"),
    *("hf/config.json", "train.bin", "valid.bin", "tokens.json", "model.safetensors", "tokenizer_config.json"),
    *("config.json", "tokenizer-bpe-300.json"),
]
"""Names that commands give their files, which the user may have used before."""
ALONE = SimpleNamespace(rank=0, size=1, share=lambda value: [value], gather=lambda work: [work()],
                        do=lambda work: work())  # fmt: skip


def _on_ranks(out, anew: bool, goes_on: bool) -> None:
    with open_run_folder(out, ALONE) as folder:
        if not (goes_on or anew):
            folder.check_free()
        folder.make_room()
        for name in run_folder._RUN_FILES:  # what the run would write
            (out / name).write_text("a run's")


def _by_launcher(out, anew: bool, goes_on: bool) -> None:
    run_folder.refuse(out, anew=anew, goes_on=goes_on)
    _on_ranks(out, anew, goes_on)


def _elastic(out, anew: bool, goes_on: bool) -> None:
    with hold_run_folder(out, None, anew=anew, goes_on=goes_on):
        (out / "replicas/0.jsonl").write_text("a run's")


def _export(out, anew: bool, goes_on: bool) -> None:
    model = TrainedModel(out, 1, out, None, PRESETS["tiny"], "", {}, SimpleNamespace(as_hub=None))
    model.export(out)


def _tokenize(out, anew: bool, goes_on: bool) -> None:
    (out.parent / "text.txt").write_text("some text " * 50)
    if cli.main(["tokenize", str(out.parent / "text.txt"), "--tokenizer", "bpe:300", "--out", str(out)]):
        raise ThinwireError("refused")


@pytest.mark.parametrize(("anew", "goes_on"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("command", [_on_ranks, _by_launcher, _elastic, _export, _tokenize])
def test_no_command_removes_or_replaces_a_file_that_no_command_wrote(command, anew, goes_on, tmp_path):
    for number, name in enumerate(USERS):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_text('{"mine": 1}\n')
        try:
            command(tmp_path / str(number), anew, goes_on)
        except ThinwireError as error:
            assert len(str(error).splitlines()) == 1
        assert path.exists() and path.read_text() == '{"mine": 1}\n', name


# --- a file that an option names --------------------------------------------------------------------------------------


def _explain(path: Path) -> int:
    return cli.main(
        ["simulate", "--cluster", "l40s-10g", "--model", "tiny", "--method", "int8", "--explain", str(path)]
    )


def _doctor(path: Path) -> int:
    write_cluster(read_cluster("l40s-10g"), path)
    return 0


def _evaluate(path: Path) -> int:
    return cli.main(["eval", str(path.parent), "--tasks", "some", "--out", str(path)])


@pytest.fixture(params=[_explain, _doctor, _evaluate])
def names_file(request, monkeypatch):
    """A command that writes the file which an option names."""
    monkeypatch.setattr(evaluation, "evaluate", lambda options: {"results": {"some": 1}})
    monkeypatch.setattr(evaluation, "refuse", lambda options: None)
    table = SimpleNamespace(make_table=lambda results: "a table")
    load = extras.load
    monkeypatch.setattr(extras, "load", lambda name: table if name == "lm_eval.utils" else load(name))
    return request.param


def test_a_device_stays_a_device(names_file, tmp_path):
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_text("x")
    except OSError as error:
        pytest.skip(f"needs a device: {error}")
    assert names_file(path) == 0
    assert path.is_char_device() and [*tmp_path.iterdir()] == [path]


def test_a_pipe_s_reader_gets_the_text(names_file, tmp_path):
    path, texts = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: texts.append(path.read_text()), daemon=True)
    reader.start()
    assert names_file(path) == 0
    if path.is_fifo():
        reader.join(10)
    assert path.is_fifo() and [*tmp_path.iterdir()] == [path]
    assert len(texts[0].splitlines()) >= 1


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link_and_its_target_is_written(names_file, there, tmp_path):
    path, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    if there:
        target.write_text("before")
    path.symlink_to(Path("elsewhere/target"))
    assert names_file(path) == 0
    assert path.is_symlink() and target.read_text() not in ("before", "")
    assert [*target.parent.iterdir()] == [target] and {*tmp_path.iterdir()} == {path, target.parent}


def test_standard_output_by_its_name_gets_both_the_file_and_the_lines(tmp_path, capfd):
    """Also where it goes to a file, as it does here: neither is written over the other."""
    path = tmp_path / "stdout"  # not /dev/stdout itself, which a fault would replace
    path.symlink_to("/proc/self/fd/1")
    assert _explain(path) == 0
    sys.stdout.flush()
    said = capfd.readouterr().out
    trace, at = json.JSONDecoder().raw_decode(said[said.index("{") :])
    assert trace["traceEvents"] and f"written: {path}" in said[at:] and "dense" in said


def test_a_result_is_said_also_if_its_file_cannot_be_written(names_file, tmp_path, monkeypatch, capsys):
    """A disk is full, and what was computed for an hour would be lost."""
    if names_file is _doctor:
        pytest.skip("test_doctor.py has it")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert names_file(tmp_path / "file") == 2
    seen = capsys.readouterr()
    assert seen.err == f"thinwire: cannot use {tmp_path}/file: No space left on device\n"
    assert "a table" in seen.out or "int8" in seen.out
    assert "written" not in seen.out


@pytest.mark.parametrize("words", [
    ["doctor", "--preset", "tiny"],
    ["eval", "run", "--tasks", "some"],
    ["simulate", "--cluster", "l40s-10g", "--model", "tiny"],
], ids=lambda words: words[0])  # fmt: skip
@pytest.mark.parametrize("place", ["read-only", "folder", "below a file"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(words, place, tmp_path, monkeypatch, capsys):
    """A file system is read-only: that is known before an hour of work, and not after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("thinwire.train.cli.start_ranks", lambda *given: pytest.fail("work began"))
    monkeypatch.setattr(evaluation, "refuse", lambda options: None)
    monkeypatch.setattr(evaluation, "evaluate", lambda options: pytest.fail("work began"))
    monkeypatch.setattr("thinwire.cli.simulate.make_job", lambda options: pytest.fail("work began"))
    (tmp_path / "plain").touch()
    path = {"read-only": tmp_path / "file", "folder": tmp_path, "below a file": tmp_path / "plain" / "file"}[place]
    if place == "read-only":
        monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK and Path(path) == tmp_path))
    option = "--explain" if words[0] == "simulate" else "--out"
    assert cli.main([*words, option, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"thinwire: {option} {path} is not a file that can be written") and error.count("\n") == 1
