"""Files that are whole or not there, whatever happens, and errors of the disk that name the file."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from thinwire.base.errors import ThinwireError


def remove(path: Path) -> None:
    """Remove a folder so that a kill at any moment leaves it whole, or out of sight."""
    away = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
    path.rename(away)
    sync(path.parent)
    shutil.rmtree(away)


def write(path: Path, text: str) -> None:
    """``path`` holds all of ``text``, or what it held before, whatever happens."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(path), partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """What was written to a file, or renamed in a folder, survives a crash of the machine."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError from inside names ``path``, where the system, which knows a number only, has named nothing."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def in_one_line(error: Exception) -> Exception:
    """What the disk says as one clear line; anything else as it is."""
    if not isinstance(error, OSError):
        return error
    where = f" {error.filename}" if error.filename else " a file"
    return ThinwireError(f"cannot use{where}: {error.strerror or error}")
