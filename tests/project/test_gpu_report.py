"""The report of a machine with GPUs, without one: a line where there is none, and every part's fate where there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu_cases
import gpu_report
from breadth import ALL
from gpu_report import ROOT, Part


def test_without_a_gpu_it_says_so_in_a_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    card = "NVIDIA GeForce RTX 3090, 470.42"
    for listed, cuda, why in (
        ("no nvidia-smi: FileNotFoundError", None, "nvidia-smi lists none"), ("", "13.0", "nvidia-smi lists none"),
        (card, None, f"is built for CPUs, and here is {card}"), (card, "13.0", "a driver older than CUDA 13.0?"),
    ):  # fmt: skip
        monkeypatch.setattr(gpu_report, "_said", lambda *command, listed=listed: listed)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and said.err.startswith("no GPU") and why in said.err and not said.out
    assert not (tmp_path / "report.md").exists()


HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({!r}, "w").write(str(child.pid))
print("said before", flush=True)
time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """A zombie has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_failure_does_not_end_the_others(tmp_path, capsys, monkeypatch):
    given = [
        Part("one", ("-c", "print('fine')"), 60),
        Part("two", ("-c", "print('before'); raise SystemExit(3)"), 60),
        Part("three", ("-c", HANGS.format(str(tmp_path / "child"))), 2),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "machine", lambda: ["a machine"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu_report, "parts", lambda capability, gpus: given)
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 1
    report = (tmp_path / "report.md").read_text()
    for expected in ("a machine", "one: passed", "fine", "two: FAILED, exit status 3", "before", "three: FAILED"):
        assert expected in report
    assert "something FAILED" in capsys.readouterr().out
    assert "said before" in report, "what a part had said is kept"
    assert not is_running(int((tmp_path / "child").read_text())), "nothing that it started is left behind"
    monkeypatch.setattr(gpu_report, "parts", lambda capability, gpus: given[:1])
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 0


def test_what_is_run_is_there():
    found = gpu_report.parts(90, 1)
    arguments = [part.arguments for part in found]
    assert arguments[1][0] == "tests/support/gpu_cases.py" and ("tests/support/aot.py", "90") in arguments
    assert all(part.arguments[0] == "-m" or (ROOT / part.arguments[0]).exists() for part in found)


@pytest.mark.skipif(not ALL, reason="a minute of programs that start ranks: THINWIRE_TESTS=all")
def test_cases_are_rehearsed_on_a_cpu_and_their_report_becomes_tables(tmp_path, capsys):
    """A NaN step, a skipped step and a resume; a hang that ends, with the stacks of its threads; speed and memory."""
    words = ["--device", "cpu", "--engines", "ddp", "fsdp2", "--methods", "int8(smallest=0)", "--timed", "int8"]
    more = ["--written", "zeropp(smallest=0)", "--jobs", "2", "--preset", "tiny", "--hang-after", "4"]
    command = [sys.executable, "tests/support/gpu_cases.py", *words, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # with no module but its own imported
    assert done.returncode == 0, done.stderr
    lines = done.stdout
    found = [json.loads(line) for line in lines.splitlines()]
    order = {name: i for i, name in enumerate(("steps", "writes", "hang", "speed"))}  # cases come as they end
    found.sort(key=lambda case: (order[case["what"]], not case["sets_device"], case["engine"]))
    *steps, unset, written, hang, speed = found
    assert [case["engine"] for case in steps] == ["ddp", "fsdp2"]
    for case in (*steps, unset, written, speed):
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
