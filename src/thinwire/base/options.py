"""Reading a command line into a dataclass with tyro, whose boxed errors become one line."""

from __future__ import annotations

import contextlib
import difflib
import io
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from thinwire.base.errors import ThinwireError
from thinwire.base.help import Option, list_options, print_help

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NO_NUMBER = re.compile(
    r"Error parsing (\S+): .*(?:invalid literal for int|could not convert string to (float)).*: (.*)"
)
T = TypeVar("T")


def read_options(
    kind: type[T], arguments: list[str], program: str, *, default: T | None = None, source: str = "", after: str = "",
    extra: Sequence[Option] = (),
) -> T:  # fmt: skip
    """Read the options of ``program``, a dataclass ``kind``, from ``arguments``; print its help if they ask for it.

    Args:
        source: the file that the options come from, for error messages.
        after: what may follow the options, for the help. extra: options for the help that are read elsewhere.

    Raises:
        ThinwireError: they cannot be read; in place of tyro's exit.
        SystemExit: the help was printed.
    """
    if {"-h", "--help"} & set(arguments):
        print_help(kind, program, after, extra)
        raise SystemExit(0)
    printed, defaults = io.StringIO(), {} if default is None else {"default": default}
    cli: Any = tyro.cli
    try:
        with contextlib.redirect_stderr(printed):
            return cli(kind, args=arguments, prog=program, add_help=False, **defaults)
    except SystemExit:
        line = explain(printed.getvalue(), kind, program, after)
        raise ThinwireError((f"{source}: " if source else "") + line) from None


def explain(printed: str, kind: type, program: str, after: str = "") -> str:
    """Turn what tyro ``printed``, a box, into one line on what is wrong with the words for ``kind``.

    ``after``: as for ``read_options``.
    """
    rows = [row for line in _COLOURS.sub("", printed).splitlines() if (row := line.strip("│╭╮╰╯ "))]
    rules = [number for number, row in enumerate(rows) if not row.strip("─-")]
    begin = 2 if 1 in rules else 1  # below the title, which has a rule where the terminal has no lines to draw
    end = next((number for number in rules if number >= begin), len(rows))  # then comes a part of the help
    message = " ".join(" ".join(rows[begin:end]).split())
    options = [option for group in list_options(kind).values() for option in group]
    if message.startswith("Missing from"):
        missing = [option for option in options if option.required and option.text in message]
        return f"{program} needs {' and '.join(option.typed for option in missing)}: {missing[0].text}"
    if match := re.match(r"Unrecognized options: ([^\s,]+)", message):
        flags = [flag for option in options for flag in re.findall(r"--[\w-]+", option.typed)]
        near = difflib.get_close_matches(match[1].partition("=")[0], flags, 1)
        advice = f"write {after.strip('[-] ')} after --" if after.startswith("[--") else "see its --help"
        return f"{program} does not know '{match[1]}': " + (f"did you mean {near[0]}?" if near else advice)
    if match := re.match(r"Missing value for argument '(.*?)'. Expected (\d+)", message):
        return f"{match[1]} needs {'a value' if match[2] == '1' else match[2] + ' values'}"
    if match := _NO_NUMBER.search(message):
        return f"{match[1]} is a {'' if match[2] else 'whole '}number, got {match[3]}"
    if match := re.match(r"invalid choice (.*) for argument '(.*)'. Expected one of \((.*?),?\)", message):
        typed = next((option.typed for option in options if option.typed.startswith(f"{match[2]} {{")), match[3])
        return f"{match[2]} is one of {typed.partition('{')[2].rstrip('}').replace(',', ', ')}, got {match[1]}"
    return message or "the command line cannot be read"
