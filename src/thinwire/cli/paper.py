"""``thinwire paper``: the experiments of the five papers, each one command, beside the papers' own figures."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from thinwire.base.errors import ThinwireError

FOLDER = Path("benchmarks", "papers")
"""The experiments and the figures that the papers print, in the project's checkout: the package has neither."""


def paper_main(argv: list[str]) -> int:
    """Run ``thinwire paper [PAPER [EXPERIMENT [options]]]``. Return the exit status."""
    sys.path.insert(0, str(folder([Path(__file__).parents[3], Path.cwd()])))
    return importlib.import_module("frame").main(argv)


def folder(checkouts: list[Path]) -> Path:
    """Return the folder of the experiments in the first of ``checkouts`` that has it."""
    for checkout in checkouts:
        if (checkout / FOLDER / "frame.py").exists():
            return checkout / FOLDER
    raise ThinwireError(
        "the papers' experiments are not in the installed package: git clone the project, "
        f"and call thinwire paper in its folder, the one with {FOLDER}"
    )
