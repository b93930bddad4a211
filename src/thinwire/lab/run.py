"""Run a torchrun-style command once per rank on a cluster."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO

from thinwire.base import terminal
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import POLL_S, Bytes, processor, wait
from thinwire.base.version import __version__
from thinwire.lab.cluster import Cluster, NoNamespaces, kill_group
from thinwire.lab.link import Link

GRACE_S = 5.0  # between SIGTERM and SIGKILL
WHOLE_LINES = threading.Lock()  # one rank's line at a time


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        returncode: 0, or the exit status of ``failed_rank`` (128 + signal if a signal ended it).
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
    """Open a cluster, or plain loopback with a line on stderr if this machine allows no namespaces."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(nodes, ranks_per_node, link))
        except NoNamespaces as error:
            without = "WITHOUT a rate limit" + (", delay or loss" if link.distant else "")
            say(f"thinwire: NO EMULATED NETWORK, the ranks use plain loopback {without}: {error}")
            cluster = stack.enter_context(Cluster(nodes, ranks_per_node, "loopback"))
        yield cluster


def say(line: str) -> None:
    terminal.say(line, sys.stderr)


def launch(
    cluster: Cluster,
    command: Sequence[str],
    *,
    log: Path | None = None,
    limit_s: float | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run ``command`` once per rank and wait for all ranks; when one fails, end all.

    Args:
        command: as on a shell; a first word ``thinwire`` means this installation.
        log: file for the output of all ranks (None: our stdout and stderr). Lines of ranks > 0 begin with ``[rank k]``.
        limit_s: end all ranks after so many seconds.
        watch: is called many times a second while the ranks run.

    Raises:
        ThinwireError: there is no such program, the limit has passed, or the emulated network has ended.
    """
    if not command:
        raise ThinwireError("no command to run: write it after --, for example  thinwire lab run -- python train.py")
    if command[0] == "thinwire":
        command = [sys.executable, "-m", "thinwire", *command[1:]]
    if shutil.which(command[0]) is None:
        raise ThinwireError(f"cannot run '{command[0]}': there is no such program")

    def check() -> None:
        cluster.check()
        watch()

    cluster.new_port()
    begin = cluster.counters()
    start = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    copiers: list[threading.Thread] = []
    with _open_log(log) if log else nullcontext() as file:
        try:
            for rank in range(cluster.world_size):
                ranks.append(_start(cluster, command, rank, piped=rank > 0 or file is not None))
                copiers += _copy(ranks[-1], rank, file)
            failed = wait(ranks, None if limit_s is None else start + limit_s, check)
        finally:
            _end(ranks)
            cluster.end_watchers(ranks)
            for copier in copiers:
                copier.join(0.5)  # a process that left its rank's session may hold the pipe open
    seconds = time.monotonic() - start
    end = cluster.counters()
    traffic = None if begin is None or end is None else [b - a for a, b in zip(begin, end, strict=True)]
    failed_rank, code = failed or (None, 0)
    return Outcome(128 - code if code < 0 else code, failed_rank, seconds, traffic)


@contextmanager
def _open_log(log: Path) -> Iterator[IO[str]]:
    """Open a run's log. What a full disk does not take of it is lost, and the run is not."""
    file = log.open("w", encoding="utf-8")
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            say(f"thinwire: the log {log} is cut: {error.strerror}")


def _start(cluster: Cluster, command: Sequence[str], rank: int, piped: bool) -> subprocess.Popen[bytes]:
    stream = subprocess.PIPE if piped else None
    environment, node = cluster.environment(rank), rank // cluster.ranks_per_node
    return cluster.popen(node, command, env=environment, stdout=stream, stderr=stream)


def _copy(process: subprocess.Popen[bytes], rank: int, file: IO[str] | None) -> list[threading.Thread]:
    """Start threads that copy a rank's piped output to ``file`` or to our own streams."""
    pairs = [(process.stdout, file or sys.stdout), (process.stderr, file or sys.stderr)]
    threads = [
        threading.Thread(target=_copy_lines, args=(source, target, f"[rank {rank}] " if rank else ""), daemon=True)
        for source, target in pairs if source is not None
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    return threads


def _copy_lines(source: IO[bytes], target: IO[str], prefix: str) -> None:
    with source:
        for line in source:
            # The file may be closed by now, or nobody reads our output any longer: the ranks go on.
            with WHOLE_LINES, suppress(ValueError, OSError):
                target.write(prefix + line.decode(errors="replace"))
                target.flush()


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Ask running ranks to end, then kill all processes in the ranks' sessions."""
    for process in ranks:
        if process.poll() is None:
            kill_group(process, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for process in ranks:
        kill_group(process, signal.SIGKILL)
        process.wait()


def describe_machine() -> str:
    """Describe processor, operating system, and the versions of Python, torch and Thinwire."""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} x {processor()}, {system}, torch {metadata.version('torch')}, Thinwire {__version__}"
