"""The kernel's own count of the bytes that an interface carried, headers included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


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
