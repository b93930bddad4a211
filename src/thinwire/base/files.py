"""Writes that leave a file whole or absent, whatever happens, and disk errors that name the file."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

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
    """Write ``text`` so that ``path`` always holds all of it or what it held before, also if several write at once.

    A link stays, and its target is written. A device, a pipe, or what our own output goes to is written into.
    """
    if path.exists() and (stream := _open_in_place(path)):
        with naming(path), stream:
            stream.write(text)
        return
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    sync(target.parent)


def _open_in_place(path: Path) -> TextIO | None:
    """Open what another file must not replace; None: it is a plain file."""
    there = path.stat()
    for number in (1, 2):  # /dev/stdout may be a file of which only the descriptor knows where the next line goes
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), there):
                return open(number, "w", encoding="utf-8", closefd=False)
    return None if stat.S_ISREG(there.st_mode) or path.is_dir() else path.open("w", encoding="utf-8")


def refuse_unwritable(path: Path, option: str) -> None:
    """Raise ThinwireError if ``path``, which ``option`` names, cannot be written: known before the work, not after it.

    Folders that are not there yet are made where they can be.
    """
    in_place = path.exists() and not path.is_file()
    folders = Path(os.path.realpath(path)).parents
    place = path if in_place else folders[0] if path.is_symlink() else next(of for of in folders if of.exists())
    if in_place == place.is_dir() or not os.access(place, os.W_OK):
        raise ThinwireError(f"{option} {path} is not a file that can be written: name one in a folder that can be")


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
    return ThinwireError(f"cannot use {error.filename or 'a file or standard output'}: {error.strerror or error}")
