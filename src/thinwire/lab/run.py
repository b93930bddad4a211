"""Run a torchrun-style command once per rank on a cluster, and end all ranks when one fails."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from thinwire.base.errors import ThinwireError
from thinwire.base.processes import POLL_S, Bytes, wait
from thinwire.lab.cluster import Cluster, NoNamespaces, kill_group
from thinwire.lab.link import Link

GRACE_S = 5.0  # between asking ranks to end and ending them


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        returncode: 0, or what the first rank to fail ended with (128 + signal where a signal ended it).
        failed_rank: the first rank to fail, or None.
        seconds: wall clock, from the start of the first rank to the end of the last.
        traffic: bytes by node, set-up included; None on loopback.
    """

    returncode: int
    failed_rank: int | None
    seconds: float
    traffic: list[Bytes] | None


@contextmanager
def open_cluster(nodes: int, ranks_per_node: int, link: Link) -> Iterator[Cluster]:
    """Open a cluster; on a machine that allows no namespaces, plain loopback, with a line on stderr that says so."""
    cluster = Cluster(nodes, ranks_per_node, link)
    try:
        cluster.__enter__()
    except NoNamespaces as error:
        without = "WITHOUT a rate limit" + (", delay or loss" if link.distant else "")
        line = f"NO EMULATED NETWORK, the ranks use plain loopback {without}: {error}"
        print(f"thinwire: {line}", file=sys.stderr, flush=True)
        cluster = Cluster(nodes, ranks_per_node, Link("loopback", None, loopback=True))
    try:
        yield cluster
    finally:
        cluster.close()


def launch(
    cluster: Cluster,
    command: Sequence[str],
    *,
    base: Mapping[str, str] | None = None,
    log: Path | None = None,
    limit_s: float | None = None,
) -> Outcome:
    """Run ``command`` once per rank. Returns when all have ended.

    Args:
        command: as on a shell; a first word ``thinwire`` is this very installation.
        base: environment beneath torchrun's variables; by default ours.
        log: a file for the output of all ranks; by default they write to our stdout and stderr. Lines of ranks other
            than 0 begin with ``[rank k]``.
        limit_s: end everything after so many seconds.

    Raises:
        ThinwireError: the limit has passed, or the emulated network has ended.
    """
    if not command:
        raise ThinwireError("no command to run: write it after --, for example  thinwire lab run -- python train.py")
    if command[0] == "thinwire":
        command = [sys.executable, "-m", "thinwire", *command[1:]]
    cluster.new_port()
    begin = cluster.counters()
    start = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    copiers: list[threading.Thread] = []
    with _Sink(log) as sink:
        try:
            for rank in range(cluster.world_size):
                process = _start(cluster, command, rank, cluster.environment(rank, base), sink)
                ranks.append(process)
                copiers += sink.copy(process, rank)
            failed = wait(ranks, None if limit_s is None else start + limit_s, cluster.check)
        finally:
            _end(ranks)
            for copier in copiers:
                copier.join(0.5)  # something that left its session may hold the pipe open
    seconds = time.monotonic() - start
    end = cluster.counters()
    traffic = None if begin is None or end is None else [b - a for a, b in zip(begin, end, strict=True)]
    if failed is None:
        return Outcome(0, None, seconds, traffic)
    rank, code = failed
    return Outcome(128 - code if code < 0 else code, rank, seconds, traffic)


def _start(
    cluster: Cluster, command: Sequence[str], rank: int, environment: dict[str, str], sink: _Sink
) -> subprocess.Popen[bytes]:
    plain = rank == 0 and sink.file is None
    streams = {"stdout": None, "stderr": None} if plain else {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        return cluster.popen(rank // cluster.ranks_per_node, command, env=environment, **streams)
    except FileNotFoundError:
        raise ThinwireError(f"cannot run '{command[0]}': no such program") from None


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ask the ranks that still run to end, then end them and whatever they left in their sessions."""
    for process in ranks:
        if process.poll() is None:
            kill_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in ranks:
        kill_group(process, signal.SIGKILL)
        process.wait()


class _Sink:
    """The target of the ranks' output: our own streams, or a file."""

    def __init__(self, log: Path | None) -> None:
        self.log = log
        self.file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> _Sink:
        self.file = open(self.log, "wb") if self.log else None
        return self

    def __exit__(self, *unused: object) -> None:
        if self.file is not None:
            with self._lock:
                self.file.close()

    def copy(self, process: subprocess.Popen[bytes], rank: int) -> list[threading.Thread]:
        threads = []
        prefix = f"[rank {rank}] ".encode() if rank else b""
        for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                threads.append(threading.Thread(target=self._pump, args=(source, target, prefix), daemon=True))
                threads[-1].start()
        return threads

    def _pump(self, source: IO[bytes], target: IO[str], prefix: bytes) -> None:
        with source:
            for line in source:
                with self._lock:
                    if self.file is None:
                        target.write((prefix + line).decode(errors="replace"))
                        target.flush()
                    elif not self.file.closed:
                        self.file.write(prefix + line)
                        self.file.flush()
