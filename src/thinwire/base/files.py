"""Writes that leave a file whole or absent, whatever happens, and disk errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from thinwire.base.errors import ThinwireError

IS_THERE = errno.ENOTEMPTY, errno.EEXIST
"""Errors of a rename to the name of a folder that holds something."""


def remove(path: Path, spare: Callable[[Path], bool] | None = None) -> None:
    """Remove a folder so that a kill at any moment leaves it whole or hidden, unless ``spare`` says that it stays.

    ``spare`` is asked again with the hidden folder's path, where nobody else replaces it: then it comes back.
    """
    if spare and spare(path):
        return
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
    path.rename(hidden)
    if spare and spare(hidden):
        try:
            hidden.rename(path)
            return
        except OSError as error:
            if error.errno not in IS_THERE:  # else there is another one by now
                raise
    sync(path.parent)
    shutil.rmtree(hidden)


def write(path: Path, text: str) -> None:
    """Write ``text`` so that ``path`` always holds all of it or what it held before, also if several write at once."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    sync(path.parent)


@contextlib.contextmanager
def whole_or_empty(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder inside ``folder``, whose files move there at the end of the block; after an error none do.

    What others put into ``folder`` meanwhile stays.
    """
    was_there, hidden = folder.exists(), folder / f".{uuid.uuid4().hex[:8]}.partial"
    try:
        hidden.mkdir(parents=True)
        yield hidden
        moves = [(path, folder / path.name) for path in hidden.iterdir()]
        for _, target in moves:
            if target.exists():
                raise ThinwireError(f"{target} came into being meanwhile, and stays: name another folder")
        for path, target in moves:
            path.rename(target)
    except (OSError, ThinwireError) as error:
        raise ThinwireError(str(in_one_line(error)).replace(str(hidden), str(folder))) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
        if not was_there:
            with contextlib.suppress(OSError):  # there is something in it
                folder.rmdir()


def sync(path: Path) -> None:
    """Make what was written to a file, or renamed in a folder, survive a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError from inside name ``path`` if the system, which knows only a file's number, names no file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def in_one_line(error: Exception) -> Exception:
    """Turn an OSError into one clear line; return any other error as it is."""
    if not isinstance(error, OSError):
        return error
    return ThinwireError(f"cannot use {error.filename or 'a file'}: {error.strerror or error}")
