"""``thinwire train`` on ranks: it runs as one rank of a job, or starts ranks here, one process each."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.processes import POLL_S, die_with_parent, free_port, rank_variables, wait
from thinwire.base.terminal import SHOW_CURSOR, begin_line, columns, counted, ends_at_once, note, say

if TYPE_CHECKING:
    from thinwire.train.config import Config

PATIENCE_S = 1.0
"""Seconds from a signal to a line on what it is waiting for."""
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def begin_rank() -> None:
    """Prepare this process to be a rank, or to start ranks, before torch is imported."""
    # For programs that know nothing of Thinwire: it would compress the model before the program itself does.
    if (method := os.environ.pop("THINWIRE_METHOD", "")) and os.environ.get("RANK", "0") == "0":
        say(f"thinwire: THINWIRE_METHOD={method} is for other programs, and left out: here --method is", sys.stderr)
    # Torch's sockets would print stack traces beside our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if under_torchrun():
        from thinwire.train.job.signals import end_at_once

        end_at_once()


def run_ranks(command: list[str], config: Config, work: Callable[[], int | None]) -> int:
    """Run ``work`` as one rank of a job, or start ranks here, which run ``thinwire`` with the words of ``command``."""
    from thinwire.train.job.scheduler import forgotten_srun, torchrun_variables

    if not under_torchrun():
        os.environ |= torchrun_variables(os.environ)
    if not under_torchrun():
        if line := forgotten_srun(os.environ):
            say(f"thinwire: {line}", sys.stderr)
        with ends_at_once():
            ranks = config.ranks or _default_ranks(config.device)
        per_node = config.ranks_per_node or ranks
        if ranks % per_node:
            raise ThinwireError(f"--ranks-per-node {per_node} does not divide the {ranks} ranks")
        config.check_shards(ranks, per_node)
        note(f"starting {counted(ranks, 'rank')} on this machine")
        return start_ranks(command, ranks, per_node)
    warnings.formatwarning = _one_line
    if (here := os.environ.get("LOCAL_WORLD_SIZE")) and config.ranks_per_node not in (None, int(here)):
        raise ThinwireError(f"--ranks-per-node is for ranks started here: this node's launcher has started {here}")
    return work() or 0


_format_usually = warnings.formatwarning


def _one_line(message: Warning | str, category: type[Warning], *context: Any, **named_place: Any) -> str:
    """Format our warnings without file and line, which are in our own code; others as usual."""
    if issubclass(category, ThinwireWarning):
        return f"thinwire: {message}\n"
    return _format_usually(message, category, *context, **named_place)


def _default_ranks(device: str) -> int:
    """Choose one rank per GPU; without a GPU, two if there are two cores."""
    import torch

    if device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(2, os.cpu_count() or 1)


def under_torchrun() -> bool:
    """Has somebody else (torchrun, ``thinwire lab``) started this process as one rank of several?"""
    return all(name in os.environ for name in TORCHRUN)


def start_ranks(words: list[str], ranks: int, per_node: int) -> int:
    """Run ``thinwire`` with these words on ``ranks`` ranks, treated as nodes of ``per_node`` ranks.

    Return the exit status of the first rank that fails (128 + signal if a signal ended it), or 0. A first SIGTERM or
    Ctrl-C is passed on to the ranks, which save and end; a second one ends them. When a rank fails or this process ends
    in any way, the other ranks are ended, and a cursor that a progress bar has hidden is shown again.
    """
    port = free_port()
    command = [sys.executable, "-m", "thinwire", *words]
    with Children() as children:
        for rank in range(ranks):
            children.start(command, {
                "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ,
                # Its number on this machine, not on a node of per_node, chooses its GPU.
                **rank_variables(rank, ranks, rank, per_node, "127.0.0.1", port),
            })  # fmt: skip
        return _wait(children)


class Children:
    """The processes of a job that this one starts. Signals are passed on to them, their lines are relayed, and none is
    left when the block ends.

    Attributes:
        processes: those that were started; whoever has waited for one may remove it.
        number: the first SIGTERM or SIGINT that came; 0: none.
    """

    def __init__(self, noise: re.Pattern[str] = re.compile(r"(?!)")) -> None:
        """``noise``: the beginnings of lines that are not relayed."""
        self.processes: list[subprocess.Popen[str]] = []
        self.number, self._line_due, self._noise = 0, math.inf, noise
        self._relays: list[threading.Thread] = []
        self._shown, self._lock = set[str](), threading.Lock()

    def __enter__(self) -> Self:
        handled = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self.pass_on) for number in handled}
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self.processes:
            process.kill()
        if any([process.wait() < 0 for process in self.processes]):  # all of them
            show_cursor()
        for thread in self._relays:
            thread.join(timeout=5)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a process, which gets a signal that came before it was there."""
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            # A terminal's Ctrl-C reaches it only through this process.
            preexec_fn=prepare_child, start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        if self.number:
            process.send_signal(self.number)
        thread = threading.Thread(target=self._relay, args=(process.stderr,), daemon=True)
        thread.start()
        self._relays.append(thread)
        return process

    def _relay(self, stream: TextIO) -> None:
        """Relay lines to standard error; show each of our own messages once, although several processes print it."""
        for line in stream:
            if self._noise.match(line):
                continue
            with self._lock:
                if not line.startswith("thinwire:") or line not in self._shown:
                    self._shown.add(line)
                    with suppress(OSError):  # a rank that cannot be heard goes on
                        say(line.removesuffix("\n"), sys.stderr)

    def pass_on(self, number: int, frame: object) -> None:
        """Pass a first signal on to the ranks; end this process, and so them, at a second one."""
        if self.number:
            raise KeyboardInterrupt(number)  # the ranks are ended on the way out
        self.number, self._line_due = number, time.monotonic() + PATIENCE_S
        begin_line(sys.stderr)
        for process in self.processes:
            process.send_signal(number)

    def check(self) -> None:
        """Say what is being waited for, if ranks that are in a step have not ended at once."""
        if time.monotonic() > self._line_due:
            self._line_due = math.inf
            say("thinwire: ending after this step, which saves the run; Ctrl-C again: at once", sys.stderr)


def prepare_child() -> None:
    """Prepare a process that is to run a rank: it ends with this one, and takes no Ctrl-C before it can answer it."""
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _wait(children: Children) -> int:
    processes, failed = children.processes, wait(children.processes, check=children.check)
    if failed is None:
        return 0
    if children.number and failed[1] == -children.number:  # before the run began to note signals, or after
        say("thinwire: interrupted" if children.number == signal.SIGINT else "thinwire: ended by SIGTERM", sys.stderr)
        return 128 + children.number
    for rank, process in enumerate(processes):
        if (state := process.poll()) is not None and state < 0:
            killed = " (by the kernel, where memory ran out: dmesg)" if -state == signal.SIGKILL else ""
            say(f"thinwire: rank {rank} was ended by {signal.Signals(-state).name}{killed}", sys.stderr)
    # The other ranks notice by themselves and may say why; then they are ended.
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    _, code = failed
    return code if code > 0 else 128 - code


def show_cursor() -> None:
    """Show the cursor again that the progress bar of a rank that was killed has hidden."""
    if columns() is not None:
        sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()
