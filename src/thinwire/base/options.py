"""Reading a command line into a dataclass with tyro, whose boxed errors become one line."""

from __future__ import annotations

import contextlib
import io
from typing import Any, TypeVar

import tyro

from thinwire.base.errors import ThinwireError

T = TypeVar("T")


def read_options(kind: type[T], arguments: list[str], program: str, *, default: T | None = None, source: str = "") -> T:
    """Read the options of ``program``, a dataclass ``kind``, from ``arguments``.

    ``source``: the file that the options come from, for error messages. Raises ThinwireError in place of tyro's exit.
    """
    printed, defaults = io.StringIO(), {} if default is None else {"default": default}
    cli: Any = tyro.cli
    try:
        with contextlib.redirect_stderr(printed):
            return cli(kind, args=arguments, prog=program, **defaults)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ThinwireError((f"{source}: " if source else "") + _unboxed(printed.getvalue())) from None


def _unboxed(printed: str) -> str:
    """Turn tyro's boxed explanation into one line."""
    words = " ".join(line.strip("│╭╮╰╯─ \n") for line in printed.splitlines())
    words = " ".join(words.split())
    return words.removeprefix("Parsing error ").removeprefix("Unrecognized options ") or "cannot read the command line"
