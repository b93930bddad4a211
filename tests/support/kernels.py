"""A fresh checkout has no compiled kernels: pytest's workers compile them before the first test, each kernel once.

Else every rank of the first tests compiles what it needs, all at once: three times the work, and more.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path

import thinwire
from thinwire import methods
from thinwire.proof import record

STEPS = 5
"""Past the start and the warm-up of ``record.KNOBS``."""
SETUPS = (record.Setup("all_reduce", 2), record.Setup("reduce_scatter", 2), record.Setup("hsdp", 4, 2))
"""Where rows go to their owners, and to two levels of them, methods have kernels that no other place needs."""
METHODS = tuple(partial(record.small, cls) for cls in methods.TABLE) + (
    partial(record.small, methods.Trickle, mask="merged"),
)


def are_missing() -> bool:
    """Where numba keeps them there is not one."""
    folder = os.environ.get("NUMBA_CACHE_DIR") or Path(thinwire.__file__).parent / "ops"
    return not any(Path(folder).rglob("*.nbi"))


def compile_all(*, backwards: bool) -> None:
    """Play every method for a few steps on virtual ranks; one that another worker is playing is waited for.

    Two workers, of which one goes ``backwards`` through the table, share the work, and end with all kernels on disk.
    """
    order = range(len(METHODS))
    with open(__file__, "r+b") as file:
        for number in reversed(order) if backwards else order:
            fcntl.lockf(file, fcntl.LOCK_EX, 1, number)  # one byte per method
            for setup in SETUPS:
                record.play(METHODS[number], setup, STEPS)
            fcntl.lockf(file, fcntl.LOCK_UN, 1, number)
