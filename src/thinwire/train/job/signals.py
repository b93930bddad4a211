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
    """Let a first Ctrl-C end the process from now on, whatever it waits for; SIGTERM does so from the start."""
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
        self._old_handlers: dict[int, Any] = {}
        self._wakeup_fd, self._old_wakeup_fd = -1, -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # Python hands signals to no other
            reader, self._wakeup_fd = os.pipe()
            os.set_blocking(self._wakeup_fd, False)
            self._old_wakeup_fd = signal.set_wakeup_fd(self._wakeup_fd, warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background jobs ignore SIGINT
                    self._old_handlers[number] = signal.signal(number, self._note)
            threading.Thread(target=self._watch, args=(reader, frozenset(self._old_handlers)), daemon=True).start()
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number

    @staticmethod
    def _watch(reader: int, numbers: frozenset[int]) -> None:
        """End the process at the second byte that is one of ``numbers``; return at the end of the block."""
        count = 0
        while byte := os.read(reader, 1):
            count += byte[0] in numbers
            if count > 1:
                os._exit(128 + byte[0])
        os.close(reader)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._old_handlers:
            number, handler = self._old_handlers.popitem()
            signal.signal(number, handler)
        if self._wakeup_fd >= 0:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            os.close(self._wakeup_fd)
