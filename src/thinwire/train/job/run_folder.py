"""A run's folder, shared by all ranks or one per host: its lock, its keeper, and what an earlier run left in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.files import remove, write
from thinwire.train.job.replica_log import ELASTIC, REPLICAS

if TYPE_CHECKING:
    from thinwire.train.job.collective import Collective

_PREVIOUS, _WHOLE = ".previous", "whole"
"""The folder in which an earlier run is set aside until the new one has taken a step."""
LOCK_WAIT_S = 3.0  # a rank that was killed a moment ago may still hold its lock
_JOB = ".job"
"""Names of the job's start that began a run or went on with it last, a line each, if a launcher may start it again."""
RESULTS = ("summary.json", "report.txt", "valid_losses.csv")
_RUN_FILES = ("metrics.jsonl", "metrics.csv", "tracked.json", *RESULTS, "plan.txt", "config.yaml", ELASTIC, _JOB)
_OF_A_RUN = ("checkpoints", *_RUN_FILES, REPLICAS, "hf", "tokenizer.json", "tokenizer-bpe-*.json")
_RUN_FILE = "|".join(map(re.escape, _RUN_FILES))
_REMOVED, _PARTIAL = r"\.[0-9a-f]{8}\.old", r"(\.[0-9a-f]{8})?\.partial"
_UNFINISHED = {
    ".*": rf"\.({_RUN_FILE}|tokenizer(-bpe-\d+)?\.json){_PARTIAL}|\.(checkpoints|{REPLICAS}|hf|\.previous){_REMOVED}|"
          r"\.rank-[0-9a-f]{32}-\d+",
    "checkpoints/.*": rf"\.(latest|step-\d+){_PARTIAL}|\.(step-\d+|\.step-\d+{_PARTIAL}){_REMOVED}",
    "checkpoints/step-*/.*": rf"\.(meta\.json|(model|rank-\d+)\.safetensors){_PARTIAL}",
}  # fmt: skip
"""Hidden names that a run makes, {glob: regular expression}. Others in --out are not ours to remove."""


@dataclass(frozen=True)
class RunFolder:
    """``--out`` of a run, locked for it.

    Attributes:
        homes: for each rank, the first of the ranks that see the same folder; all 0 if the folder is shared.
        owner: whose it is, on a keeper.
    """

    path: Path
    homes: tuple[int, ...]
    collective: Collective
    owner: Owner

    @property
    def is_keeper(self) -> bool:
        """Is this the one rank that keeps the folder's common files?"""
        return self.homes[self.collective.rank] == self.collective.rank

    def check_owner(self) -> None:
        """Raise ThinwireError if the folder at ``path`` is not the one that this run has locked."""
        if self.is_keeper and not self.owner.has(self.path):
            raise ThinwireError(LOST.format(path=self.path))

    def do_once(self, work: Callable[[], object]) -> None:
        """Do ``work()`` once per folder, if it is this run's still, before any rank goes on. Collective."""

        def check_and_work() -> None:
            self.check_owner()
            work()

        self.collective.do(check_and_work if self.is_keeper else lambda: None)

    def check_free(self) -> None:
        """Raise ThinwireError if the folder holds metrics or checkpoints of a run. Collective."""
        if any(self.collective.share(_holds_run(self.path))):
            raise ThinwireError(_HOLDS_RUN.format(path=self.path))

    def check_unfinished(self) -> None:
        """Raise ThinwireError if there are results of a run without checkpoints, which cannot go on. Collective."""
        if self.has_results():
            raise ThinwireError(_HAS_ENDED.format(path=self.path))

    def has_results(self) -> bool:
        """Are there results of a run that has ended? Collective."""
        return any(self.collective.share((self.path / RESULTS[0]).exists()))

    def take_over(self, starts: list[str]) -> bool:
        """Is the run that is here of another start of this job? If so, it is from now on this one's. Collective.

        ``starts``: names of this one on this rank (``starts_of``)."""
        mark, now = self.path / _JOB, set().union(*self.collective.share(starts))
        begun = set().union(*self.collective.gather(lambda: mark.read_text().splitlines() if mark.exists() else []))
        if not _launches(begun) & _launches(now) - _launches(begun & now):
            return False
        self.mark(starts)
        return True

    def mark(self, starts: list[str]) -> None:
        """Say that the run that is here is of this start of the job. Collective."""
        if names := sorted(set().union(*self.collective.share(starts))):
            self.do_once(lambda: write(self.path / _JOB, "\n".join(names)))

    def begin(self, work: Callable[[], object]) -> None:
        """Do ``work()``, which writes a run's first files, once it shows that they are a run's. Collective."""
        self.do_once((self.path / "metrics.jsonl").touch)
        self.do_once(work)

    def make_room(self) -> None:
        """Set an earlier run aside for a new one; it comes back unless ``settle`` is called. Collective."""
        self.do_once(lambda: _make_room(self.path))

    def remove_results(self) -> None:
        """Remove the results of a run that goes on. Collective."""
        self.do_once(lambda: _remove(self.path / name for name in RESULTS))

    def settle(self) -> None:
        """Remove the run that was set aside: the new one has begun. Collective."""
        self.do_once(lambda: _remove([self.path / _PREVIOUS]))


_HOLDS_RUN = (
    "--out {path} holds a run already: --resume auto goes on with it, --overwrite removes it; or choose another --out"
)
LOST = (
    "--out {path} was moved or removed, or another run has taken it, while this one went on, which writes no more: "
    "--resume auto goes on from its last checkpoint, if there is one, with the --out where that is now"
)
_HAS_ENDED = "--out {path} holds a run without checkpoints, which has ended: --overwrite removes it; or name another"


def refuse(path: Path, *, anew: bool, goes_on: bool) -> None:
    """Refuse what the ranks would refuse, before they are started; this process starts them all.

    ``anew``: --overwrite. ``goes_on``: --resume.

    Raises:
        ThinwireError: ``path`` is a file, holds files that are no run's, or holds a run that has ended and is neither
            to be removed nor to go on.
    """
    with contextlib.suppress(OSError):  # a name that is too long, a folder that may not be read: the ranks say it
        _check_folder(path)
        _check_files(path)
        if not (anew or goes_on) and _holds_run(path) and not _is_in_use(path):
            raise ThinwireError(_HOLDS_RUN.format(path=path))


def _launches(starts: Iterable[str]) -> set[str]:
    return {start.rpartition(": ")[0] for start in starts}


def where_set_aside(path: Path) -> str:
    """Say where the earlier run of ``path`` is, if the one that was to replace it was killed before it took a step."""
    previous = path / _PREVIOUS
    line = f"; the run that was there is in {previous}, and the next `thinwire train` in this folder takes it back"
    return line if previous.is_dir() else ""


def _is_in_use(path: Path) -> bool:
    """Does a run that goes on hold the folder's lock? Then the ranks say by whom."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _check_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ThinwireError(f"--out {path} is a file: name a folder")


def _check_files(path: Path) -> None:
    """Raise ThinwireError if a run would replace files in ``path`` that none has written.

    Its first is metrics.jsonl, or, of replicas, which may end before they have metrics and settings, elastic.json.
    """
    row, launched = "?\n", (path / ELASTIC).exists()
    with contextlib.suppress(FileNotFoundError), (path / "metrics.jsonl").open(errors="replace") as rows:
        row = rows.readline()
    whole = row.endswith("\n")  # a disk may have been full
    if not whole or '"wall_s"' in row or (path / _PREVIOUS).exists() or any(path.glob("checkpoints/step-*/meta.json")):
        return
    names = ("checkpoints", *_RUN_FILES[:-2]) if launched else _OF_A_RUN
    there = {found.name for name in names for found in path.glob(name) if not found.is_dir() or any(found.iterdir())}
    if others := ", ".join(sorted(there - {_JOB})):
        raise ThinwireError(
            f"--out {path} holds {others}, and no metrics.jsonl or checkpoint of a run: name another, or move them"
        )


def _holds_run(path: Path) -> bool:
    return (path / "metrics.jsonl").exists() or any((path / "checkpoints").glob("step-*"))


def has_begun(path: Path) -> bool:
    """Has the run in ``path`` taken a step?"""
    if any((path / "checkpoints").glob("step-*")):
        return True
    with contextlib.suppress(FileNotFoundError), (path / "metrics.jsonl").open(errors="replace") as rows:
        return any('"loss":' in row for row in rows)  # an evaluation's is a "valid_loss"
    return False


def _of_a_run(path: Path) -> list[Path]:
    return [found for name in _OF_A_RUN for found in path.glob(name)]


def _make_room(path: Path) -> None:
    """Move the run in ``path``, if it holds one, to ``_PREVIOUS``, whose mark then says that all of it is there."""
    if not _holds_run(path):  # a tokenizer may be kept for the replicas
        _remove(path / name for name in (*_RUN_FILES, REPLICAS))
        return
    previous = path / _PREVIOUS
    previous.mkdir(exist_ok=True)
    for found in _of_a_run(path):
        found.rename(previous / found.name)
    (previous / _WHOLE).touch()


def _put_back(path: Path) -> None:
    """Move back what is in ``_PREVIOUS``, in the place of what is there."""
    previous = path / _PREVIOUS
    (previous / _WHOLE).unlink(missing_ok=True)  # from now on it may be a part
    for found in _of_a_run(previous):
        if (path / found.name).is_dir():
            remove(path / found.name)
        found.replace(path / found.name)
    remove(previous)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            remove(path)
        else:
            path.unlink(missing_ok=True)


def settle_previous(path: Path, *, over: bool) -> None:
    """Remove the run that was set aside once a new one has begun; put it back if none has and all is ``over``.

    What a launcher that was killed has moved in part is put back.
    """
    previous = path / _PREVIOUS
    with contextlib.suppress(FileNotFoundError):  # another machine's launcher does the same
        if not previous.exists():
            return
        whole = (previous / _WHOLE).exists()
        if whole and has_begun(path):
            remove(previous)
        elif over:
            if whole:
                _remove(_of_a_run(path))
            _put_back(path)


@contextlib.contextmanager
def hold_run_folder(path: Path, lighthouse: str | None, *, anew: bool, goes_on: bool) -> Iterator[None]:
    """Lock ``path`` for the replicas of this machine until the end of the block, and remove what is not theirs.

    ``lighthouse``: that of a run of several machines, which share the folder; None: the run is this machine's alone.
    ``anew``: --overwrite, which removes an earlier run only once the new one has begun. ``goes_on``: --resume.

    Raises:
        ThinwireError: it cannot be written to, another run is using it, or it holds one, or files that are no run's.
    """
    _check_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        lock, first = _lock(path, lighthouse)
        stack.enter_context(lock)
        if first:
            _tidy(path)
            if not anew and not goes_on and _holds_run(path):
                raise ThinwireError(_HOLDS_RUN.format(path=path))
            if not (goes_on and any((path / "checkpoints").glob("step-*"))):
                if goes_on and (path / RESULTS[0]).exists():
                    raise ThinwireError(_HAS_ENDED.format(path=path))
                _make_room(path)
            (path / REPLICAS).mkdir(exist_ok=True)
            if lighthouse is not None:
                write(path / ELASTIC, json.dumps({"lighthouse": lighthouse}) + "\n")
                fcntl.flock(lock, fcntl.LOCK_SH)
        stack.callback(_settle_alone, path, lock, read_owner(path))
        yield


def _settle_alone(path: Path, lock: IO[str], owner: Owner) -> None:
    """Settle what was set aside, unless another machine still holds the ``lock`` of the run."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _settle_own(path, owner)


def _settle_own(path: Path, owner: Owner) -> None:
    """Settle what was set aside at the end of ``owner``'s run, unless another run's folder is there now."""
    if owner.has(path):
        settle_previous(path, over=True)


@contextlib.contextmanager
def open_run_folder(path: Path, collective: Collective) -> Iterator[RunFolder]:
    """Lock ``path`` for this run until the end of the block, or of this process. Collective.

    Raises:
        ThinwireError: it cannot be written to, another run is using it, or it holds files that are no run's.
    """
    homes = tuple(_find_homes(path, collective))
    with contextlib.ExitStack() as stack:

        def lock() -> Owner:
            stack.enter_context(_lock(path)[0])
            return read_owner(path)

        owner = collective.do(lock if homes[collective.rank] == collective.rank else lambda: Owner((), ""))
        folder = RunFolder(path, homes, collective, owner)
        folder.do_once(lambda: _tidy(path))
        if folder.is_keeper:
            stack.callback(_settle_own, path, owner)
        yield folder


def _find_homes(path: Path, collective: Collective) -> list[int]:
    """Return ``RunFolder.homes``: each rank leaves a mark in its folder, and looks for the marks of others."""
    token = collective.share(uuid.uuid4().hex)[0]
    marks = [path / f".rank-{token}-{rank}" for rank in range(collective.size)]

    def leave_mark() -> None:
        _check_folder(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            marks[collective.rank].touch()
        except OSError as error:
            error.filename = f"--out {path}"  # not the mark, which nobody knows
            raise

    try:
        collective.do(leave_mark)
        return collective.gather(
            lambda: next((rank for rank, mark in enumerate(marks) if mark.exists()), collective.rank)
        )
    finally:
        with contextlib.suppress(OSError):
            marks[collective.rank].unlink()


class Owner(NamedTuple):
    """The run that has a folder. folder: numbers of its device and inode; (): there is none. lock: what is in its lock;
    "": it has none."""

    folder: tuple[int, ...]
    lock: str

    def has(self, path: Path) -> bool:
        """Tell whether the folder at ``path`` is this one, and no other run's. Its lock may have been removed."""
        now = read_owner(path)
        return now.folder == self.folder and now.lock in ("", self.lock)


def read_owner(path: Path) -> Owner:
    """Read which run has the folder at ``path``."""
    folder: tuple[int, ...] = ()
    lock = ""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        there = path.stat()
        folder = there.st_dev, there.st_ino
        lock = (path / ".lock").read_text(errors="replace")
    return Owner(folder, lock)


def _lock(path: Path, lighthouse: str | None = None) -> tuple[IO[str], bool]:
    """Take the folder's lock, which the kernel releases when this process ends: alone, or with the other machines of
    this ``lighthouse``'s run. Return it, and whether this one has it alone; the first of several then prepares the
    folder."""
    lock, deadline = (path / ".lock").open("a+"), time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                if lighthouse is not None and json.loads((path / ELASTIC).read_text())["lighthouse"] == lighthouse:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return lock, False
            if time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            lock.seek(0)
            holder = " ".join(lock.read(300).split()) or "another run"
            lock.close()
            raise ThinwireError(f"--out {path} is in use by {holder}: choose another, or wait for its end") from None
        except OSError as error:
            if lighthouse is not None:
                raise
            line = f"--out {path} cannot be locked ({error.strerror}): start no second run in it"
            warnings.warn(line, ThinwireWarning, stacklevel=2)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}\n")
        lock.flush()
        return lock, True


def _tidy(path: Path) -> None:
    """Remove what a killed run left half made or half removed, settle what it had set aside; refuse files of others."""
    for pattern, names in _UNFINISHED.items():
        for leftover in path.glob(pattern):
            if re.fullmatch(names, leftover.name):
                if leftover.is_dir():
                    shutil.rmtree(leftover, ignore_errors=True)  # a rank of the killed run may still be ending
                else:
                    leftover.unlink(missing_ok=True)
    settle_previous(path, over=True)
    _check_files(path)
