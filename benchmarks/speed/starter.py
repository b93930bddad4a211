"""Starts a program once more for each of several gloo ranks on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

from thinwire.base.processes import free_port


def start_ranks(ranks: int) -> int:
    """Run this program, with its own words, as each rank (RANK is set), one thread each; return the highest status."""
    places = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **quiet, **places, "RANK": str(rank)})
        for rank in range(ranks)
    ]
    return max(process.wait() for process in started)
