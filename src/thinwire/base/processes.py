"""Processes of one machine: how they end with their parent, are waited for, find a port, and what the kernel counts."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.base.errors import ThinwireError

PR_SET_PDEATHSIG = 1
POLL_S = 0.05


class Bytes(NamedTuple):
    """Sent and received since the interface was made."""

    tx: int
    rx: int

    def __sub__(self, earlier: Bytes) -> Bytes:
        return Bytes(self.tx - earlier.tx, self.rx - earlier.rx)


def interface_bytes(interface: str | None = None, pid: int | str = "self") -> Bytes | None:
    """The counters of an interface, cumulative, in bytes.

    Args:
        interface: its name; by default the one that gloo uses (GLOO_SOCKET_IFNAME).
        pid: a process in the network namespace that is meant; by default this one's.

    Returns:
        None where there is no such interface, or none is named.
    """
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME")
    # /sys shows the namespace it was mounted in; /proc/PID/net always the process's own.
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            values = columns.split()
            return Bytes(tx=int(values[8]), rx=int(values[0]))
    return None


def free_port() -> int:
    """Return a port that nobody uses on this machine's loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def die_with_parent() -> None:
    """Have Linux end this process when its parent is gone, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait(
    ranks: Sequence[subprocess.Popen[Any]], deadline: float | None = None, check: Callable[[], None] = lambda: None
) -> tuple[int, int] | None:
    """Wait until all ranks have ended well (None), or one has failed: its number and exit status.

    Raises:
        ThinwireError: it is later than ``deadline``, by the monotonic clock; or what ``check`` raises.
    """
    while True:
        check()
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank, code
        if all(code == 0 for code in codes):
            return None
        if deadline is not None and time.monotonic() > deadline:
            raise ThinwireError("the run took longer than its limit and was ended: allow more, or take fewer steps")
        time.sleep(POLL_S)
