"""The log of each replica of an elastic run, beside the metrics: replicas/NAME.jsonl in the run's folder.

started   pid, host
members   step, names, losses ([name, step, norm] of what waited on who left): who takes part from this step on
dropped   step: an attempt at it did not count, and its batch is taken again
ended     step, why: "done", or a signal
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.base.files import naming
from thinwire.base.processes import POLL_S

REPLICAS = "replicas"
"""The folder of these logs."""
ELASTIC = "elastic.json"
"""The file with the facts that all replicas of a run share: its lighthouse, the fewest that take a step."""
REPLICA, STARTS = "THINWIRE_REPLICA", "THINWIRE_STARTS"
"""Variables of a replica's process: its name, and how many times it was started before."""


class ReplicaLog:
    """A file to which one replica adds lines, each with its time in seconds since 1970."""

    def __init__(self, path: Path) -> None:
        with naming(path):
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk ends the run where its metrics are written
            self._file.write(json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read a file of lines of JSON; what is no line (of a process that was killed) is left out."""
    rows = []
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
    return rows


def summary_time(path: Path) -> float:
    """Return when the run in ``path`` has written its summary.json, in seconds since 1970; 0: there is none."""
    summary = path / "summary.json"
    return summary.stat().st_mtime if summary.exists() else 0.0


@contextlib.contextmanager
def turn(folder: Path, limit_s: float = math.inf) -> Iterator[bool]:
    """Wait until no other process of this machine (or of the file system, if it locks) is inside, for ``folder``.

    Yield False if one is still inside after ``limit_s`` seconds: it may have been stopped."""
    handle, deadline = os.open(folder, os.O_RDONLY), time.monotonic() + limit_s
    try:
        while not (is_free := _try_lock(handle)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        yield is_free
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True
