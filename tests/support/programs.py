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


def check_interpreted(code: str) -> None:
    """Run ``code``, in which kernels are Triton's and interpreted, and which fails where one of its checks does."""
    done = run_python(f'{code}print("checked")\n', TRITON_INTERPRET="1")
    assert done.stdout.strip().endswith("checked"), done.stderr
