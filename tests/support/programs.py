"""Python programs of a test's own: Triton decides when it is imported whether kernels are interpreted or compiled."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import thinwire
from patience import PATIENCE

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-triton"
)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``code`` finds this thinwire, and the tests as modules."""
    tests = [path for path in sys.path if Path(path).is_relative_to(Path(__file__).parents[1])]
    paths = [str(Path(thinwire.__file__).parents[1]), *tests, os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True, timeout=300 * PATIENCE
    )


IN_NO_ORDER = """
import math
from triton.runtime.interpreter import interpreter_builder
put = interpreter_builder.set_grid_idx
def jump(x, y, z):
    size = interpreter_builder.grid_dim[0]
    step = next(step for step in (size // 2 + 1, 7, 5, 3, size - 1, 1) if math.gcd(step, size) == 1)
    put((x * step + size // 3) % size, y, z)
interpreter_builder.set_grid_idx = jump
"""
"""Has the interpreter take the programs of a launch in an order like none: a GPU has none."""


def check_interpreted(code: str) -> None:
    """Run ``code``, in which kernels are Triton's and interpreted, and which fails where one of its checks does."""
    done = run_python(f'{IN_NO_ORDER}{code}print("checked")\n', TRITON_INTERPRET="1")
    assert done.stdout.strip().endswith("checked"), done.stderr
