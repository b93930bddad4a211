"""Ranks forked from one process that has imported everything, and faults that strike them: for faults.py and its kin.

A rank costs a fork here in place of some seconds of imports. Each has a session and a log of its own, on loopback or
in a node of an emulated cluster.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

import torch
import torch.distributed.fsdp

import thinwire.cli.program
import thinwire.cli.train
import thinwire.train.loop
from thinwire.base.processes import die_with_parent, free_port
from thinwire.lab.cluster import Cluster
from thinwire.wire import Wire

torch.set_num_threads(1)

CLONE_NEWNET = 0x40000000
SMALL = "--preset tiny --layers 1 --width 64 --heads 2 --seq-len 32 --batch-size 2 --eval-sequences 0".split()  # noqa: SIM905
"""A model of 58 thousand parameters, whose step takes a few milliseconds."""
TEXT = "".join(f"{i} times {i % 7} is {i * (i % 7)}.\n" for i in range(20_000))

Fault = Callable[[int, int, int], None]
"""Called on every rank with (rank, number of the step about to be taken, of its micro-batch), both from 1."""


@dataclass
class Job:
    """Ranks under way. ``ends``: rank -> (exit status, or a signal's name; seconds since ``since``).

    ``logs``: where they print, the path without rank and suffix.
    """

    out: Path
    logs: Path
    pids: dict[int, int]
    ends: dict[int, tuple[int | str, float]] = field(default_factory=dict)
    since: float = field(default_factory=time.monotonic)

    def wait(self, seconds: float, *ranks: int) -> bool:
        """Have all (or these) ``ranks`` ended within so many ``seconds`` of ``since``?"""
        wanted = set(ranks or self.pids)
        while True:
            for rank in set(self.pids) - set(self.ends):
                pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
                if pid:
                    code = os.waitstatus_to_exitcode(status)
                    ended = code if code >= 0 else signal.Signals(-code).name
                    self.ends[rank] = (ended, time.monotonic() - self.since)
            if wanted <= set(self.ends):
                return True
            if time.monotonic() - self.since > seconds:
                return False
            time.sleep(0.02)

    def strike(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to ``ranks`` (all, if none is named); times count from here."""
        self.since = time.monotonic()
        for rank in ranks or self.pids:
            if rank not in self.ends:
                os.kill(self.pids[rank], number)

    def steps(self) -> list[int]:
        """The steps that metrics.jsonl has, in its order."""
        return steps_of(self.out)

    def reach(self, step: int, seconds: float = 120) -> bool:
        """Wait until ``step`` is in metrics.jsonl; False if the ranks end or the time is over before."""
        self.since = time.monotonic()
        while step not in self.steps()[-50:]:
            if self.wait(0) or time.monotonic() - self.since > seconds:
                return step in self.steps()
            time.sleep(0.02)
        return True

    def struck(self, mark: Path, seconds: float = 120) -> bool:
        """Wait until a fault of a rank's own has put the file ``mark``; times count from there."""
        self.since = time.monotonic()
        while not mark.exists() and not self.wait(0) and time.monotonic() - self.since < seconds:
            time.sleep(0.02)
        self.since = time.monotonic()
        return mark.exists()

    def end(self) -> dict[int, tuple[int | str, float]]:
        """Kill what is left. Returns ``ends``, in which such a rank is missing if it had not ended by itself."""
        self.wait(0)
        for rank in set(self.pids) - set(self.ends):
            os.kill(self.pids[rank], signal.SIGKILL)
            os.waitpid(self.pids[rank], 0)
        return dict(sorted(self.ends.items()))

    def lines(self, rank: int) -> list[str]:
        """What ``rank`` has printed."""
        return log_of(self.logs, rank).read_text(errors="replace").splitlines()

    def last(self, *ranks: int) -> str:
        """The last line of each rank that printed one, equal ones once."""
        lines = [self.lines(rank)[-1] for rank in ranks or self.pids if self.lines(rank)]
        return " / ".join(dict.fromkeys(lines))

    @property
    def tracebacks(self) -> int:
        """How many ranks have printed a traceback."""
        return sum(any("Traceback" in line for line in self.lines(rank)) for rank in self.pids)


def log_of(logs: Path, rank: int) -> Path:
    return logs.with_name(f"{logs.name}-{rank}.log")


def steps_of(out: Path) -> list[int]:
    """The steps that the run's metrics.jsonl has, in its order."""
    try:
        text = (out / "metrics.jsonl").read_text()
    except OSError:
        return []
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]
    return [row["step"] for row in rows if "loss" in row]


def start(
    function: Callable[[int], Any], world: int, out: Path, *,
    environment: Callable[[int], Mapping[str, str]] | None = None, namespace: Callable[[int], int] | None = None,
    logs: Path | None = None,
) -> Job:  # fmt: skip
    """Fork ``world`` ranks that call ``function(rank)`` under torchrun's variables and end with what it returns.

    ``out``: the run's folder. ``logs``: where they print; beside ``out`` if not said. ``environment``: more variables
    of a rank. ``namespace``: the process whose network namespace a rank joins.
    """
    port, pids, logs = str(free_port()), {}, logs or out
    sys.stdout.flush()
    for rank in range(world):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        if environment is not None:
            variables |= environment(rank)
        pids[rank] = os.fork()
        if pids[rank] == 0:
            _become(rank, function, log_of(logs, rank), variables, None if namespace is None else namespace(rank))
    return Job(out, logs, pids)


def _become(
    rank: int, function: Callable[[int], Any], log: Path, variables: Mapping[str, str], pid: int | None
) -> None:
    """The child's life; ``pid``: whose network namespace it joins."""
    status: Any = 99
    try:
        os.setsid()
        die_with_parent()
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(variables)
        if pid is not None:
            space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(space, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot join the node's network namespace")
        status = function(rank)
    except SystemExit as stop:
        status = stop.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 0 if status is None else 1)


def train(
    words: list[str], world: int, out: Path, *, fault: Fault | None = None, cluster: Cluster | None = None,
    folder: Callable[[int], Path] | None = None, environment: Callable[[int], Mapping[str, str]] | None = None,
    first: Callable[[int], None] | None = None, logs: Path | None = None,
) -> Job:  # fmt: skip
    """``thinwire train`` of the small model with more ``words``, on forked ranks; ``fault`` strikes before each step.

    ``folder``: where a rank that sees no shared folder puts its files. ``first``: called on each rank before all.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    text = (logs or out).parent / "text.txt"
    if not text.exists():
        text.write_text(TEXT)

    def rank_main(rank: int) -> int:
        if first is not None:
            first(rank)
        if fault is not None:
            before_each_micro_batch(lambda step, micro: fault(rank, step, micro))
        place = out if folder is None else folder(rank)
        return thinwire.cli.program.main(["train", *SMALL, "--corpus", str(text), "--out", str(place), *words])

    if cluster is None:
        return start(rank_main, world, out, environment=environment, logs=logs)
    cluster.new_port()
    return start(
        rank_main, world, out, environment=lambda rank: cluster.environment(rank, {}),
        namespace=lambda rank: cluster._holders[rank // cluster.ranks_per_node], logs=logs,
    )  # fmt: skip


def before_each_micro_batch(call: Callable[[int, int], None]) -> None:
    """``call(step, micro-batch)``, both from 1, before each micro-batch of this process."""
    original, step, micro = Wire.accumulate, 0, 0

    def accumulate(self: Wire, **how: Any) -> Any:
        nonlocal step, micro
        micro = micro + 1 if self.step + 1 == step else 1
        step = self.step + 1
        call(step, micro)
        return original(self, **how)

    Wire.accumulate = accumulate  # type: ignore[method-assign]
