"""SIGTERM and Ctrl-C: a first one lets the step under way end, a second one ends at once.

Python calls a signal's handler only between two instructions of the main thread, not while a library waits for other
ranks or a disk. So another thread, which is told of each signal as soon as it comes, ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from thinwire.base.errors import ThinwireError
from thinwire.base.terminal import SHOW_CURSOR, columns


def end_at_once() -> None:
    """Let the first Ctrl-C end the process from now on, whatever it waits for, as SIGTERM does by default."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interrupted(Exception):
    """A signal has come while the main thread waited for something that may never come."""


def ended_by(number: int, rest: str) -> ThinwireError:
    """Make the error of a run that signal ``number`` has ended: "ended by SIGTERM" and the ``rest``."""
    error = ThinwireError(f"ended by {signal.Signals(number).name} {rest}")
    error.status = 128 + number
    return error


@contextlib.contextmanager
def note_signals(waits: Callable[[], bool] = lambda: False) -> Iterator[list[int]]:
    """Yield a list that notes a first SIGTERM or SIGINT; a second one ends the process with 128 + its number.

    ``waits``: does the main thread wait for something that may never come? Then the first one raises Interrupted there.
    """
    signals: list[int] = []

    def note(came: int, frame: object) -> None:
        signals.append(came)
        if waits():
            raise Interrupted

    if threading.current_thread() is not threading.main_thread():  # no other thread gets signals
        yield signals
        return
    reader, wakeup_fd = os.pipe()
    os.set_blocking(wakeup_fd, False)
    old_wakeup_fd = signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
    # A shell's background jobs ignore SIGINT.
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
    old_handlers = {number: signal.signal(number, note) for number in numbers}
    threading.Thread(target=_end_at_the_second, args=(reader, numbers), daemon=True).start()
    try:
        yield signals
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_wakeup_fd)
        os.close(wakeup_fd)


def _end_at_the_second(reader: int, numbers: Sequence[int]) -> None:
    """End the process at the second byte that is in ``numbers``; return at the end of ``note_signals``' block."""
    count = 0
    while byte := os.read(reader, 1):
        count += byte[0] in numbers
        if count > 1:
            if columns() is not None:  # a progress bar has hidden the cursor
                os.write(sys.stdout.fileno(), SHOW_CURSOR.encode())
            os._exit(128 + byte[0])
    os.close(reader)
