"""SIGTERM and Ctrl-C: a first one lets the step under way end, a second one ends at once.

Python calls a signal's handler when the main thread is between two of its instructions: not while it waits for other
ranks, or for a disk, in a library. So another thread ends the process: it is told of each signal as soon as that comes.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from thinwire.base.errors import ThinwireError


class Stopped(ThinwireError):
    """A signal ended the run between two steps."""

    def __init__(self, number: int, line: str) -> None:
        super().__init__(line)
        self.status = 128 + number


def end_at_once() -> None:
    """From now on a first Ctrl-C ends the process, whatever it waits for; SIGTERM does so from the start."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Signals:
    """Inside the block a first SIGTERM or SIGINT is only noted, a second one ends the process with 128 + its number.

    Attributes:
        number: the signal that has come, or 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}
        self._told, self._told_before = -1, -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            hears, self._told = os.pipe()
            os.set_blocking(self._told, False)
            self._told_before = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background jobs ignore SIGINT
                    self._before[number] = signal.signal(number, self._note)
            threading.Thread(target=self._watch, args=(hears, frozenset(self._before)), daemon=True).start()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    @staticmethod
    def _watch(hears: int, numbers: frozenset[int]) -> None:
        """End the process at the second byte that is one of ``numbers``; return at the end of the block."""
        came = 0
        while byte := os.read(hears, 1):
            came += byte[0] in numbers
            if came > 1:
                os._exit(128 + byte[0])
        os.close(hears)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)
        if self._told >= 0:
            signal.set_wakeup_fd(self._told_before)
            os.close(self._told)
