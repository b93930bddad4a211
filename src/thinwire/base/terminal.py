"""Lines for people: folded to the width of the terminal that shows them, and left whole in a file or a pipe."""

from __future__ import annotations

import os
import select
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

SHOW_CURSOR = "\x1b[?25h"
"""The sequence that makes a terminal's cursor visible again that a progress bar has hidden."""


def columns(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal that ``stream`` (None: standard output) goes to; None: it goes to none."""
    stream = stream or sys.stdout
    try:
        if not stream.isatty():
            return None
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):  # it is closed, or a stand-in; COLUMNS is no number
        return None


def counted(count: int, noun: str) -> str:
    """Return ``count`` and the ``noun``, in the plural unless it is one."""
    return f"{count} {noun}{'s' * (count != 1)}"


def fold(text: str, width: int, indent: str = "  ") -> str:
    """Break the lines of ``text`` between words; what goes on begins with ``indent``. A word stays whole."""
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        margin = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, width, subsequent_indent=margin + indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def fold_command(command: str, width: int, indent: str = "    ") -> str:
    """Break a shell command between words so that it can be copied: every line but the last ends with a backslash."""
    return fold(command, width - 2, indent).replace("\n", " \\\n") if len(command) > width else command


def say(text: str, stream: TextIO | None = None, indent: str = "  ", end: str = "\n") -> None:
    """Print ``text``, folded if ``stream`` (None: standard output) goes to a terminal.

    On standard error stands how the work goes on, and not what it is for: where its disk is full, ``text`` is lost.
    """
    width = columns(stream)
    try:
        print(text if width is None else fold(text, width, indent), file=stream or sys.stdout, end=end, flush=True)
    except OSError as error:
        if stream is not sys.stderr or isinstance(error, BrokenPipeError):
            error.filename = "standard output" if stream in (None, sys.stdout) else error.filename
            raise


def note(text: str) -> None:
    """Tell a person at a terminal what is being waited for; print nothing to a file or a pipe."""
    if columns() is not None:
        say(text)


def begin_line(stream: TextIO) -> None:
    """Leave the line that a Ctrl-C is shown on, or a progress bar stands on, before a message."""
    if columns(stream) is not None:
        os.write(stream.fileno(), b"\n")  # a signal's handler may call this while the stream itself is written to


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process inside, where nothing is to be cleaned up: imports may swallow a KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    replaces = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if replaces:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if replaces and signal.getsignal(signal.SIGINT) is _end:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> None:
    begin_line(sys.stderr)
    with suppress(OSError):
        os.write(2, b"thinwire: interrupted\n")
    os._exit(128 + number)


def lost_readers() -> list[TextIO]:
    """List those of standard output and standard error that are pipes whose reader has gone (``| head``)."""
    lost = []
    for stream in (sys.stdout, sys.stderr):
        try:
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                lost.append(stream)
        except (OSError, ValueError, AttributeError):
            continue
    return lost


def silence(stream: TextIO) -> None:
    """Send what is still to be written to ``stream`` nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
