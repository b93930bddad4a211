"""A run's folder: is it one for all ranks, or one per host; who keeps it; what was there before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.files import remove
from thinwire.train.job.collective import Together

LOCK_WAIT_S = 3.0
"""A rank that was killed a moment ago may still hold its lock."""
_RUN_FILES = ("metrics.jsonl", "metrics.csv", "tracked.json", "summary.json", "report.txt", "plan.txt", "config.yaml")
_OWN = "|".join(map(re.escape, _RUN_FILES))
_OLD = r"\.[0-9a-f]{8}\.old"
_LEFT = {
    ".": rf"\.({_OWN}|tokenizer(-bpe-\d+)?\.json)\.partial|\.checkpoints{_OLD}|\.rank-[0-9a-f]{{32}}-\d+",
    "checkpoints": rf"\.(latest|step-\d+)\.partial|\.(step-\d+|\.step-\d+\.partial){_OLD}",
    "checkpoints/step-*": r"\.(meta\.json|(model|rank-\d+)\.safetensors)\.partial",
}
"""By place in the folder: the hidden names that are made here. --out may be a folder that holds more than the run."""


@dataclass(frozen=True)
class Folder:
    """``--out`` of a run, locked for it.

    Attributes:
        homes: for each rank, the first of the ranks that see the same folder; all 0 where the folder is shared.
    """

    path: Path
    homes: tuple[int, ...]
    together: Together

    @property
    def first(self) -> bool:
        """Does this rank keep the folder's common files? One rank per folder does."""
        return self.homes[self.together.rank] == self.together.rank

    def by_first(self, work: Callable[[], None]) -> None:
        """``work()`` once per folder, before any rank goes on. Collective."""
        self.together.do(work if self.first else lambda: None)

    def check_free(self) -> None:
        """Refuse to start another run where one has been. (A folder that was refused before a first step has none.)"""
        there = (self.path / "metrics.jsonl").exists() or any((self.path / "checkpoints").glob("step-*"))
        if any(self.together.gather(lambda: there)):
            raise ThinwireError(
                f"--out {self.path} holds a run already: --resume auto goes on with it, --overwrite removes it; "
                "or choose another --out"
            )

    def clear(self) -> None:
        """Remove what an earlier run left, checkpoints last: what is visible of those is always whole."""

        def work() -> None:
            for name in _RUN_FILES:
                (self.path / name).unlink(missing_ok=True)
            if (self.path / "checkpoints").exists():
                remove(self.path / "checkpoints")

        self.by_first(work)


@contextlib.contextmanager
def opened(path: Path, together: Together) -> Iterator[Folder]:
    """``path`` for this run alone until the end of the block, or of this process. Collective.

    Raises:
        ThinwireError: it cannot be written to, or another run is using it.
    """
    homes = _homes(path, together)
    folder = Folder(path, tuple(homes), together)
    lock: IO[str] | None = None
    try:
        lock = together.do(lambda: _locked(path) if folder.first else None)
        folder.by_first(lambda: _sweep(path))
        yield folder
    finally:
        if lock is not None:
            lock.close()


def _homes(path: Path, together: Together) -> list[int]:
    token = together.tell(uuid.uuid4().hex)[0]
    mark = [path / f".rank-{token}-{rank}" for rank in range(together.size)]

    def leave() -> None:
        if path.exists() and not path.is_dir():
            raise ThinwireError(f"--out {path} is a file: name a folder")
        path.mkdir(parents=True, exist_ok=True)
        mark[together.rank].touch()

    try:
        together.do(leave)
        return together.gather(lambda: next((rank for rank, left in enumerate(mark) if left.exists()), together.rank))
    finally:
        with contextlib.suppress(OSError):
            mark[together.rank].unlink()


def _locked(path: Path) -> IO[str]:
    """The folder's lock, which the kernel lets go of when this process ends."""
    lock = (path / ".lock").open("a+")
    until = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            lock.seek(0)
            holder = " ".join(lock.read(300).split()) or "another run"
            lock.close()
            raise ThinwireError(f"--out {path} is in use by {holder}: choose another, or wait for its end") from None
        except OSError as error:
            reason = error.strerror
            line = f"--out {path} cannot be locked ({reason}): start no second run in it"
            warnings.warn(line, ThinwireWarning, stacklevel=2)
            break
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
    lock.flush()
    return lock


def _sweep(path: Path) -> None:
    """Remove what a run that was killed left half made or half removed."""
    for where, names in _LEFT.items():
        for left in path.glob(f"{where}/.*" if where != "." else ".*"):
            if re.fullmatch(names, left.name):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)  # a rank of the killed run may be at its end still
                else:
                    left.unlink(missing_ok=True)
