"""SIGTERM and Ctrl-C: a first one lets the step under way end, a second one ends at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from thinwire.errors import ThinwireError


class Stopped(ThinwireError):
    """A signal ended the run between two steps."""

    def __init__(self, number: int, line: str) -> None:
        super().__init__(line)
        self.status = 128 + number


class Signals:
    """Inside the block a first SIGTERM or SIGINT is only noted.

    Attributes:
        number: the signal that has come, or 0.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background jobs ignore SIGINT
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()
