"""The ``thinwire`` program on a terminal of 80 columns, or into a pipe that nobody reads to its end.

A command runs in a fork of a process that has torch loaded, so that it takes as long as what it does, and no longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from patience import PATIENCE

COLUMNS = 80
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Seen(NamedTuple):
    """What a terminal received. ``status``: as a shell has it."""

    status: int
    output: str
    words: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        """The lines that stand there at the end, without colours: a bar is what its line was last."""
        lines = CODES.sub("", self.output.replace("\r\n", "\n")).split("\n")
        return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in lines]

    @property
    def widest(self) -> str:
        """The widest line that stood there at any time."""
        return max(re.split(r"[\r\n]+", CODES.sub("", self.output)), key=len)

    @property
    def cursor_shown(self) -> bool:
        return self.output.rfind(HIDE) <= self.output.rfind(SHOW)


def _open_streams() -> None:
    """Python's standard streams, after the files behind them have changed."""
    sys.stdin = sys.__stdin__ = os.fdopen(0)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w")


def status_of(waited: int) -> int:
    return 128 + os.WTERMSIG(waited) if os.WIFSIGNALED(waited) else os.WEXITSTATUS(waited)


def on_terminal(
    run: Callable[[], int],
    *,
    after: Callable[[str, float], int | None] = lambda seen, seconds: None,
    limit: float = 120,
) -> Seen:
    """Run ``run`` in a fork with a terminal. ``after``: what was seen, seconds so far -> a byte to type, or None."""
    pid, master = pty.fork()
    if pid == 0:
        status = 99
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
            os.environ |= {"TERM": "xterm-256color"}
            for name in ("COLUMNS", "LINES", "NO_COLOR"):
                os.environ.pop(name, None)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without it
            _open_streams()
            status = run()
            sys.stdout.flush()
        finally:
            os._exit(status)
    return _watch(pid, master, after, limit)


def _watch(pid: int, master: int, after: Callable[[str, float], int | None], limit: float) -> Seen:
    received, began = b"", time.monotonic()
    os.set_blocking(master, False)
    while True:
        with contextlib.suppress(BlockingIOError):
            try:
                chunk = os.read(master, 65536)
            except OSError as error:
                if isinstance(error, BlockingIOError):
                    raise
                break  # the other side is closed
            if not chunk:
                break
            received += chunk
            continue
        seconds = time.monotonic() - began
        if (key := after(received.decode(errors="replace"), seconds)) is not None:
            os.write(master, bytes([key]))
        if seconds > limit * PATIENCE:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    _, waited = os.waitpid(pid, 0)
    os.close(master)
    return Seen(status_of(waited), received.decode(errors="replace"))


def command(words: Sequence[str]) -> Callable[[], int]:
    def run() -> int:
        from thinwire.cli import program

        return program.main(list(words))

    return run


def each_on_terminal(commands: Sequence[Sequence[str]]) -> list[Seen]:
    """Run each of ``commands`` of thinwire on a terminal of its own."""
    return [on_terminal(command(words))._replace(words=tuple(words)) for words in commands]


def each_unread(commands: Sequence[Sequence[str]]) -> list[Seen]:
    """Run each of ``commands`` into a pipe of which nobody reads a byte; see what they say on standard error."""
    seen = []
    for words in commands:
        (reader, writer), (heard, voice) = os.pipe(), os.pipe()
        os.close(reader)
        if (pid := os.fork()) == 0:
            status = 99
            try:
                os.dup2(writer, 1)
                os.dup2(voice, 2)
                _open_streams()
                status = command(words)()
                sys.stdout.flush()
            except BaseException as error:
                os.write(2, repr(error).encode())
            finally:
                os._exit(status)
        os.close(writer)
        os.close(voice)
        with open(heard, errors="replace") as file:
            said = file.read()
        seen.append(Seen(status_of(os.waitpid(pid, 0)[1]), said, tuple(words)))
    return seen
