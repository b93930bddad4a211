"""Reading a command line into a dataclass with tyro, whose boxed errors become one line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from thinwire.base.errors import ThinwireError
from thinwire.base.help import Option, print_help

T = TypeVar("T")


def read_options(
    kind: type[T], arguments: list[str], program: str, *, default: T | None = None, source: str = "", rest: str = "",
    more: Sequence[Option] = (),
) -> T:  # fmt: skip
    """Read the options of ``program``, a dataclass ``kind``, from ``arguments``; print its help if they ask for it.

    Args:
        source: the file that the options come from, for error messages.
        rest: what may follow the options, for the help. more: options for the help that are read elsewhere.

    Raises:
        ThinwireError: they cannot be read; in place of tyro's exit.
        SystemExit: the help was printed.
    """
    if {"-h", "--help"} & set(arguments):
        print_help(kind, program, rest, more)
        raise SystemExit(0)
    printed, defaults = io.StringIO(), {} if default is None else {"default": default}
    cli: Any = tyro.cli
    try:
        with contextlib.redirect_stderr(printed):
            return cli(kind, args=arguments, prog=program, add_help=False, **defaults)
    except SystemExit:
        raise ThinwireError((f"{source}: " if source else "") + _unboxed(printed.getvalue())) from None


def _unboxed(printed: str) -> str:
    """Turn tyro's boxed explanation into one line."""
    words = " ".join(line.strip("│╭╮╰╯─ \n") for line in printed.splitlines())
    words = " ".join(words.split())
    return words.removeprefix("Parsing error ").removeprefix("Unrecognized options ") or "cannot read the command line"
