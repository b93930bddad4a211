"""The report of a machine with GPUs, without one: a line where there is none, and every part's fate where there are."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

import gpu_cases
import gpu_report
from gpu_report import ROOT, Part


def test_without_a_gpu_it_says_so_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and said.err.startswith("no GPU") and not said.out
    assert not (tmp_path / "report.md").exists()


def test_one_failure_does_not_end_the_others(tmp_path, capsys, monkeypatch):
    given = [
        Part("one", ("-c", "print('fine')"), 60),
        Part("two", ("-c", "print('before'); raise SystemExit(3)"), 60),
        Part("three", ("-c", "import time; time.sleep(60)"), 1),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "machine", lambda: ["a machine"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_report, "parts", lambda capability: given)
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 1
    report = (tmp_path / "report.md").read_text()
    for expected in ("a machine", "one: passed", "fine", "two: FAILED, exit status 3", "before", "three: FAILED"):
        assert expected in report
    assert "something FAILED" in capsys.readouterr().out
    monkeypatch.setattr(gpu_report, "parts", lambda capability: given[:1])
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 0


def test_what_is_run_is_there():
    found = gpu_report.parts(90)
    arguments = [part.arguments for part in found]
    assert arguments[1][0] == "tests/support/gpu_cases.py" and ("tests/support/aot.py", "90") in arguments
    assert all(part.arguments[0] == "-m" or (ROOT / part.arguments[0]).exists() for part in found)


def test_cases_are_rehearsed_on_a_cpu_and_their_report_becomes_tables(tmp_path, capsys):
    """A NaN step, a skipped step and a resume; a hang that ends, with the stacks of its threads; speed and memory."""
    words = ["--device", "cpu", "--engines", "ddp", "fsdp2", "--methods", "int8(smallest=0)", "--timed", "int8"]
    more = ["--jobs", "2", "--preset", "tiny", "--hang-after", "4"]
    command = [sys.executable, "tests/support/gpu_cases.py", *words, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # with no module but its own imported
    assert done.returncode == 0, done.stderr
    lines = done.stdout
    *steps, unset, hang, speed = map(json.loads, lines.splitlines())
    assert [case["engine"] for case in steps] == ["ddp", "fsdp2"]
    for case in (*steps, unset, speed):
        assert case["result"]["ended"] == "passed", case
    assert hang["result"]["ended"] == "hung" and "_hang" in str(hang["result"]["stacks"])
    assert hang["result"]["seconds"] < 60
    assert speed["result"]["step_ms"] > 0 and speed["result"]["planned_MB"] > 0
    report = tmp_path / "report.md"
    report.write_text(f"# Thinwire\n{lines}{{cut off")
    assert gpu_report.main(["--rows", str(report)]) == 0
    said = capsys.readouterr()
    assert "| `int8(smallest=0)` | ddp, no set_device() | 2, gloo | steps | passed |" in said.out
    assert said.err.count("\n") == 1
    assert "| `int8` | 2, gloo | passed |" in said.out
    assert gpu_report.main(["--rows", str(tmp_path / "none.md")]) == 1


def test_a_case_that_fails_is_told_and_does_not_end_the_others(capsys, monkeypatch):
    monkeypatch.setattr(gpu_cases, "cases", lambda *of: iter([
        gpu_cases.Case("ddp", "int8(grup=3)", 1, "cpu", "gloo"), gpu_cases.Case("ddp", "dense", 1, "cpu", "gloo"),
    ]))  # fmt: skip
    assert gpu_cases.main(["--device", "cpu"]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert "it has: dense, send" in first["result"]["ended"] and second["result"]["ended"] == "passed"
