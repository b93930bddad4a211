"""The report of a machine with GPUs, without one: a line where there is none, and every part's fate where there are."""

from __future__ import annotations

import torch

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
        Part("one", ("-c", "print('fine')")),
        Part("two", ("-c", "print('before'); raise SystemExit(3)")),
        Part("three", ("-c", "import time; time.sleep(60)"), 1),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "machine", lambda: ["a machine"])
    monkeypatch.setattr(gpu_report, "parts", lambda gpus: given)
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 1
    report = (tmp_path / "report.md").read_text()
    for expected in ("a machine", "one: passed", "fine", "two: FAILED, exit status 3", "before", "three: FAILED"):
        assert expected in report
    assert "something FAILED" in capsys.readouterr().out
    monkeypatch.setattr(gpu_report, "parts", lambda gpus: given[:1])
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 0


def test_what_is_run_is_there():
    for gpus in (1, 2, 16):
        found = gpu_report.parts(gpus)
        assert found[0].arguments[:3] == ("-m", "pytest", "-m") and len(found) > (4 if gpus > 1 else 1)
        assert all(part.arguments[0] == "-m" or (ROOT / part.arguments[0]).exists() for part in found)
        assert not any("16" in part.arguments for part in found)
