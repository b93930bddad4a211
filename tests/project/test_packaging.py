"""What is installed with what: the core needs torch and numpy, the rest is asked for by name where it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.base import extras
from thinwire.methods import TABLE, main

CORE_ONLY = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(extras.EXTRAS)}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name.partition(".")[0])

sys.meta_path.insert(0, Absent())
"""

A_STEP = (Path(__file__).parents[1] / "support" / "core_step.py").read_text()


def python(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)


def test_the_core_trains_with_torch_and_numpy_alone():
    done = python(CORE_ONLY + A_STEP)
    assert done.returncode == 0, done.stderr
    assert "numba is not installed: thinwire's kernels run as plain torch" in done.stderr
    assert done.stdout.strip() == "the package 'rich' is not installed: pip install 'thinwire[train]'"


@pytest.mark.parametrize("command", ("train", "compare"))
def test_a_command_says_which_extra_it_needs(command):
    done = python(CORE_ONLY + "import thinwire.cli.program; sys.exit(thinwire.cli.program.main(sys.argv[1:]))", command)
    assert done.returncode == 2
    assert done.stderr.startswith("thinwire: the package '") and "pip install 'thinwire[" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_importing_thinwire_imports_neither_torch_nor_extras():
    done = python("import sys, thinwire; print(*{name.partition('.')[0] for name in sys.modules})")
    assert not {"torch", "numpy", *extras.EXTRAS} & set(done.stdout.split())


@pytest.mark.parametrize("words", ("train --help", "train --stpes 3", "lab --help"))
def test_a_command_line_is_read_without_torch(words):
    """So a mistyped option is told at once, and not when torch has been imported."""
    done = python("""if True:
        import atexit, sys, thinwire.cli.program
        atexit.register(lambda: print("torch" in sys.modules))
        sys.exit(thinwire.cli.program.main(sys.argv[1:]))
    """, *words.split())  # fmt: skip
    assert done.returncode == (0 if "--help" in words else 2), done.stderr
    assert done.stdout.endswith("False\n")


def test_the_first_call_imports_what_a_program_on_ddp_has_already_and_thinwire():
    """No test judges a time: what takes it is modules. docs/start.md has the milliseconds."""
    done = python("""if True:
        import sys, torch.distributed.fsdp
        by_torch = set(sys.modules)
        import thinwire
        thinwire.compress
        print(*set(sys.modules) - by_torch)
    """)
    brought = {name for name in done.stdout.split() if name.partition(".")[0] in {"torch", *extras.EXTRAS}}
    assert "thinwire.wire" in done.stdout.split(), done.stderr
    assert not brought


def test_methods_as_json(capsys):
    main(["--json"])
    found = json.loads(capsys.readouterr().out)
    assert [of["name"] for of in found] == [method.name for method in TABLE]
    int8 = next(of for of in found if of["name"] == "int8")
    assert int8["knobs"]["group"] == 128 and int8["promise"]["kind"] == "rounds" and int8["engines"]
