"""Helpers for processes of one machine: their environment, ending with the parent, waiting, what the kernel counts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import random
import re
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
PORTS = range(20_000, 32_768)
"""Below those that Linux gives to clients, and where nobody asks for a certain one (ip_local_port_range)."""


class Bytes(NamedTuple):
    """Bytes sent and received since the interface was made."""

    tx: int
    rx: int

    def __sub__(self, earlier: Bytes) -> Bytes:
        return Bytes(self.tx - earlier.tx, self.rx - earlier.rx)


def interface_bytes(interface: str | None = None, pid: int | str = "self") -> Bytes | None:
    """Read an interface's cumulative counters, in bytes; None if there is no such interface.

    Args:
        interface: its name; by default the one that gloo uses (GLOO_SOCKET_IFNAME).
        pid: a process in the interface's network namespace; by default this process.
    """
    interface = interface or os.environ.get("GLOO_SOCKET_IFNAME")
    # /sys shows the namespace it was mounted in; /proc/PID/net always shows the process's own.
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            values = columns.split()
            return Bytes(tx=int(values[8]), rx=int(values[0]))
    return None


def free_port() -> int:
    """Return a port that is free on this machine's loopback now, and that the kernel gives to nobody by itself.

    Of those that it gives, other runs' connections and listeners may take one before a rank binds it.
    """
    for port in random.SystemRandom().sample(PORTS, min(len(PORTS), 100)):  # no seed may make two runs draw alike
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ThinwireError(f"no port from {PORTS[0]} to {PORTS[-1]} is free on 127.0.0.1, of 100 that were tried")


def processor() -> str:
    """Name this machine's processor."""
    with contextlib.suppress(OSError):
        if model_line := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return model_line[1]
    return platform.machine()


def rank_variables(rank: int, ranks: int, local_rank: int, local_ranks: int, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for ``rank``, number ``local_rank`` of ``local_ranks`` on its node."""
    values = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks}
    return {name: str(value) for name, value in (values | {"MASTER_ADDR": address, "MASTER_PORT": port}).items()}


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait(
    ranks: Sequence[subprocess.Popen[Any]], deadline: float | None = None, check: Callable[[], None] = lambda: None
) -> tuple[int, int] | None:
    """Wait until all ranks have ended well (return None) or one has failed (return its number and exit status).

    Raises:
        ThinwireError: ``deadline``, by the monotonic clock in s, has passed. What ``check`` raises is raised, too.
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
            raise ThinwireError("the run took longer than its limit and was ended: allow it more, or take fewer steps")
        time.sleep(POLL_S)
