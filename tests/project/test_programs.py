"""Programs beside the package take from it what it has, with the arguments that it wants: as mypy reads them.

Most of them run for hours, so that nobody notices when a name that they use has moved.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from breadth import ALL

ROOT = Path(__file__).parents[2]
ABSENT = re.compile(r"^.*error: .*\[(?:attr-defined|call-arg|name-defined)\]$", re.M)
SAME_NAME = "benchmarks/proofs/adversarial.py"
"""Runs a file of its own name in tests/support, which mypy takes for the same module."""
GONE = """
from thinwire.lab import link
from thinwire.train.data.windows import Windows

def run(texts: Windows) -> None:
    texts.take(0, 1)
    link.speed("1mbit")
    link.bit_rate("1mbit", "2mbit", "3mbit")
"""
"""A method of a class, a function of a module and an argument that are not there."""


@pytest.mark.skipif(not ALL, reason="a minute of mypy, which reads torch: THINWIRE_TESTS=all")
def test_programs_use_what_is_there(tmp_path):
    pytest.importorskip("mypy")
    gone = tmp_path / "gone_names.py"
    gone.write_text(GONE)
    roots = ["src", "tests/support", *(str(path) for path in (ROOT / "benchmarks").iterdir() if path.is_dir())]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--explicit-package-bases", "--cache-dir", str(tmp_path / "cache"),
         "benchmarks", "examples", str(gone)],
        cwd=ROOT, env={**os.environ, "MYPYPATH": ":".join([*roots, str(tmp_path)])}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    found = [line for line in ABSENT.findall(done.stdout) if not line.startswith(("tests/", SAME_NAME))]
    seen = [line for line in found if gone.name in line]
    assert [line.split("error: ")[1].split(" ")[0] for line in seen] == ['"Windows"', "Module", "Too"]
    assert found == seen


def test_no_module_that_tests_import_by_its_bare_name_is_in_two_folders():
    """pytest puts the folder of each test file first, and the first module of a name is everybody's."""
    tests = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    folders = [folder for folder in tests if not (folder / "__init__.py").exists()]
    homes: dict[str, set[str]] = {}
    for folder in [*folders, *(ROOT / "benchmarks").iterdir()]:
        for file in folder.glob("*.py"):
            if (path := str(file.relative_to(ROOT))) != SAME_NAME and file.stem != "conftest":
                homes.setdefault(file.stem, set()).add(path)
    assert not [paths for paths in homes.values() if len(paths) > 1]
