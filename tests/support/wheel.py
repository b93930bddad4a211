"""What the installed wheel does with torch and NumPy alone: run by ``make test-wheel`` in an empty environment."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import thinwire
from thinwire.base import extras

HERE = Path(__file__).resolve().parent


def program(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True)
    print("$", Path(words[0]).name, *words[1:])
    print("".join(f"  {line}\n" for line in (done.stdout + done.stderr).splitlines()[:4]), end="")
    return done


def main() -> None:
    thin, ours = str(Path(sys.executable).parent / "thinwire"), Path(thinwire.__file__).resolve().parent
    assert HERE.parents[1] / "src" not in ours.parents, f"{ours} is not the installed package"
    # torch brings triton where it is built for CUDA.
    present = [name for name in extras.EXTRAS if name != "triton" and find_spec(name)]
    assert present == [], f"not an empty environment: {present}"
    assert all((ours / name).exists() for name in ("py.typed", "cli/program.py")), "files are missing from the wheel"

    listed = program(thin, "methods", "--json")
    assert listed.returncode == 0 and any(of["name"] == "int8" for of in json.loads(listed.stdout)), listed.stderr
    found = program(thin, "env", "--json")
    assert found.returncode == 0 and json.loads(found.stdout)["packages"]["numba"] is None, found.stderr
    tested = program(thin, "selftest")
    assert tested.returncode == 0 and "FAILED" not in tested.stdout, tested.stdout + tested.stderr
    step = program(sys.executable, str(HERE / "core_step.py"))
    assert step.returncode == 0 and "pip install 'thinwire[train]'" in step.stdout, step.stderr
    for command in ("train", "compare"):
        done = program(thin, command)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.endswith("is not installed: pip install 'thinwire[train]'\n"), done.stderr
    print("the wheel is whole, and says what it lacks")


if __name__ == "__main__":
    main()
