"""Laws of all commands: numbers, bytes and disks that nobody expects are one line, and nothing is left behind."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from thinwire.base.files import in_one_line, write
from thinwire.cli.program import main
from thinwire.train.checkpoint import inspect
from thinwire.train.checkpoint.trained_model import generate
from thinwire.train.data.corpus import SPAN, split


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("--temperature", value) for value in ("nan", "inf", "-inf", "1e-40", "-1", "1e300")),
     ("--seed", "9" * 20), ("--seed", "-" + "9" * 20), ("--prompt", os.fsdecode(b"\xff"))],
)  # fmt: skip
def test_a_value_that_sample_cannot_draw_with_is_refused_in_a_line(option, value, tmp_path, capsys):
    assert main(["sample", str(tmp_path), f"{option}={value}"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"thinwire: {option} is ") and line.count("\n") == 1


@pytest.mark.parametrize("temperature", [0, 1e-6, 1, 1e6])
def test_sample_draws_with_every_temperature_that_it_takes(temperature):
    class Fixed(torch.nn.Module):
        context = 4

        def forward(self, tokens):
            return torch.linspace(-50, 50, 7).expand(1, tokens.shape[1], 7)

    drawn = list(generate(Fixed(), torch.tensor([1]), 20, temperature=temperature))
    assert len(drawn) == 20 and (temperature > 1 or set(drawn) == {6})


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name = '\xe9'", b"= 3"])
def test_a_cluster_file_that_is_no_text_is_refused_by_name(content, tmp_path, capsys):
    (tmp_path / "mine.toml").write_bytes(content)
    assert main(["simulate", "--cluster", str(tmp_path / "mine.toml")]) == 2
    assert f"thinwire: {tmp_path / 'mine.toml'}: " in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["a folder is there", "the disk is full", "no folder", "a file is its folder"])
def test_a_write_that_fails_names_the_file_and_leaves_nothing(fault, tmp_path, monkeypatch):
    path = tmp_path / "report.txt"
    if fault == "a folder is there":
        path.mkdir()
    if fault == "the disk is full":
        monkeypatch.setattr(os, "fsync", lambda handle: _full())
    if fault == "no folder":
        path = tmp_path / "none" / "report.txt"
    if fault == "a file is its folder":
        (tmp_path / "plain").write_text("x")
        path = tmp_path / "plain" / "report.txt"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError) as failed:
        write(path, "some text")
    assert str(in_one_line(failed.value)).startswith(f"cannot use {path}: ")
    assert sorted(tmp_path.rglob("*")) == before


def _full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [(0.0, -0.0, False), (0.0, 0.0, True), (1.0, 2.0, False), (float("nan"), float("nan"), True),
     (float("nan"), 1.0, False)],
)  # fmt: skip
def test_inspect_calls_equal_what_has_the_same_bits_and_nothing_else(one, other, equal, tmp_path, monkeypatch, capsys):
    held = {"a": one, "b": other}
    monkeypatch.setattr(inspect, "read_tensors", lambda path: [("weight", torch.tensor([held[path.parent.name], 1.0]))])
    first, second = (SimpleNamespace(path=tmp_path / n, meta={"files": {"model.x": 1}, "about": {}}) for n in "ab")
    assert inspect.show_differences(first, second, Console(quiet=True)) == (not equal)
    assert f"{int(equal)} tensors are equal bit for bit, {int(not equal)} are not" in capsys.readouterr().out


def test_inspect_shows_the_largest_differences_first_and_what_is_no_number_before_them(tmp_path, monkeypatch):
    values = [1.0, float("nan"), 3.0, 2.0, float("nan"), 5.0]
    rows = [(f"t{number}", 1.0, value) for number, value in enumerate(values)]
    monkeypatch.setattr(inspect, "_distances", lambda first, second: rows)
    shown: list[str] = []
    monkeypatch.setattr(inspect, "_table", lambda *_: SimpleNamespace(add_row=lambda name, *_: shown.append(name)))
    one = SimpleNamespace(path=tmp_path, meta={"files": {"model.x": 1}, "about": {}})
    inspect.show_differences(one, one, SimpleNamespace(print=lambda _: None))
    assert shown == ["t1", "t4", "t5", "t2", "t3", "t0"]


@pytest.mark.parametrize("size", [1, 40, SPAN, 19 * SPAN, 19 * SPAN + 1, 19 * SPAN + 700, 20 * SPAN - 1, 20 * SPAN,
                                  20 * SPAN + 1])  # fmt: skip
def test_a_twentieth_of_the_text_is_held_out_whatever_its_length(size):
    text = ("abcdefg" * (size // 7 + 1))[:size]
    train, valid = split(text)
    assert train + valid == text or size > 20 * SPAN
    assert abs(len(valid) - size / 20) <= 1
