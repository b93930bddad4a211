"""The notebook in examples/ runs from its first cell to its last, and says what it says in words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from breadth import ALL

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "dense_and_trickle.ipynb").read_text())
CODE = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.skipif(not ALL, reason="most of a minute: THINWIRE_TESTS=all")
def test_it_runs_with_a_small_model_and_few_steps(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the rank sends and the network waits " * 400)
    small = {"STEPS": "4", "PRESET": "tiny", "CORPUS": str(text), "MPLBACKEND": "Agg"}
    program = [sys.executable, "-c", "\n".join(CODE)]
    done = subprocess.run(program, cwd=tmp_path, env=os.environ | small, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = r": held-out loss \d\.\d+\n    sent [\d.]+ MB, ([\d.]+)% of dense's: \d+ s on"
    assert re.search(rf"^dense{lines}", done.stdout, re.MULTILINE), done.stdout
    share = re.search(rf"^trickle\S*{lines}", done.stdout, re.MULTILINE)
    assert share is not None and float(share[1]) < 60, done.stdout
    assert {path.name for path in (tmp_path / "runs" / "notebook").iterdir()} == {"dense", "trickle"}


def test_it_is_kept_as_notebooks_are() -> None:
    """nbformat 4.5: every cell has an id of its own; what is printed is that of a whole run, in order."""
    cells = NOTEBOOK["cells"]
    assert NOTEBOOK["nbformat"] == 4 and len({cell["id"] for cell in cells}) == len(cells)
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run all cells, and save"
    assert not any(output["output_type"] == "error" for cell in cells for output in cell.get("outputs", []))
    assert "/home/" not in json.dumps(cells) and "/work/" not in json.dumps(cells), "a path of somebody's machine"
