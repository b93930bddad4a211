"""The faults that mutants.py puts into the code: it names modules and tests that are there.

It needs mutmut, which the tests do without, so its tables are read off its source.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def table(name: str) -> Any:
    """A constant of ``mutants.py``."""
    tree = ast.parse((ROOT / "benchmarks" / "proofs" / "mutants.py").read_text())
    [value] = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    return ast.literal_eval(value)


def test_the_modules_and_the_tests_exist():
    modules, names = table("MODULES"), table("NAMES").split()
    assert len(set(names)) == len(names) and modules
    for name, path in modules.items():
        assert (ROOT / path).is_file() and Path(path).stem == name, path
    there = {path.stem.removeprefix("test_") for path in ROOT.glob("tests/*/test_*.py")}
    assert not set(names) - there, set(names) - there


def test_the_page_names_the_same_modules():
    text = " ".join((ROOT / "docs" / "adversarial.md").read_text().split())
    listed = re.search(r"draws them from (.*?);", text)
    assert listed is not None and set(re.findall(r"`(\w+)`", listed[1])) == table("MODULES").keys()
