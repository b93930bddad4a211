"""The processes of an elastic run on this machine: torchft's lighthouse, and replicas that are started again.

A replica that ends before its run does is started again after a second, and let in. It stays away if it ended because
its input cannot be used (status 2), if it was told to end (SIGTERM, Ctrl-C), or if it has ended ``TRIES`` times in a
row before it took part in a step.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from thinwire.base.errors import ThinwireError, Unanswered
from thinwire.base.files import write
from thinwire.base.processes import POLL_S, free_port, rank_variables
from thinwire.base.terminal import begin_line, counted, note, say
from thinwire.train.cli import Children, prepare_child, show_cursor
from thinwire.train.config import LIGHTHOUSE
from thinwire.train.job.replica_log import ELASTIC, REPLICA, REPLICAS, STARTS, read_log, summary_time
from thinwire.train.job.run_folder import LOST, hold_run_folder, read_owner, settle_previous

if TYPE_CHECKING:
    from thinwire.train.config import Config

MANAGER_PORT = "TORCHFT_MANAGER_PORT"
TRIES = 3
AGAIN_S = 1.0
"""Seconds until a replica that has ended is started again."""
PATIENCE_S = 10.0
"""Seconds that a replica has to end once the run's last files are written."""
HEARTBEAT_S = 1.0
"""Seconds without a sign of life after which the lighthouse takes a replica for dead: one comes every 0.1 s, whatever
the replica does. One that is missed by mistake gets the others' state again."""
_NOISE = re.compile(r"\S+ \[(INFO|WARN|ERROR)\] \[torchft")
"""A line of torchft's own, of which each step has several."""
LEFT = (128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT)
SERVE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind=f"{sys.argv[1]}:0", min_replicas=int(sys.argv[2]), join_timeout_ms=int(sys.argv[3]), quorum_tick_ms=50,
    heartbeat_timeout_ms=int(sys.argv[4]),
)
print(server.address().rsplit(":", 1)[1], flush=True)
while True:
    time.sleep(3600)
"""
"""A program that serves a lighthouse on an address, and prints its port: address, fewest replicas, ms to wait for more
of them, ms without a sign of life."""
LONGEST_NAME = 100
"""Characters of the name of a machine's replicas."""


@dataclass
class Replica:
    """A replica of this machine. ``start_at``: by the monotonic clock; None: it runs or is away.

    ``tries``: starts in a row that did not lead to a step. ``status``: of its last end. ``ending``: that in words,
    until it is started again.
    """

    name: str
    start_at: float | None = 0.0
    process: subprocess.Popen[str] | None = None
    starts: int = 0
    tries: int = 0
    status: int = 0
    ending: str = ""

    @property
    def away(self) -> bool:
        return self.process is None and self.start_at is None


def supervise(words: list[str], config: Config) -> int:
    """Run the replicas of this machine, which run ``thinwire`` with these words, to the end of the run.

    Return the exit status: 0 if the run came to its end, 128 + signal if one ended it, else that of the replica that
    was the last to fail. When this process ends in any way, its replicas and its lighthouse are ended.
    """
    port = os.environ.get(MANAGER_PORT, "0")
    if not (port.isascii() and port.isdigit()) or int(port) + config.local_replicas > 65_536:
        raise ThinwireError(f"{MANAGER_PORT} is '{port}': write the number of the first replica's port, or 0 for any")
    shared = os.environ.get(LIGHTHOUSE)  # with other machines
    names, address = replica_names(config.local_replicas, os.environ, shared=bool(shared)), _own_address(shared)
    with ExitStack() as stack:
        stack.enter_context(hold_run_folder(
            config.out, shared, anew=config.overwrite, goes_on=config.resume is not None,
        ))  # fmt: skip
        lighthouse, url = (None, shared) if shared else stack.enter_context(_serve_lighthouse(config))
        facts = {"lighthouse": url, "min_replicas": config.min_replicas, "host": socket.gethostname()}
        write(config.out / ELASTIC, json.dumps(facts) + "\n")
        note(f"starting {counted(len(names), 'replica')} on this machine; the lighthouse is {url}")
        loopback = address.startswith("127.") or address == "::1"
        interface = {"GLOO_SOCKET_IFNAME": "lo"} if loopback else {}
        environment = {
            "OMP_NUM_THREADS": "1", **interface, **os.environ, **rank_variables(0, 1, 0, 1, address, 0),
            LIGHTHOUSE: url,
        }  # fmt: skip
        return Supervisor(words, config, [Replica(name) for name in names], environment, lighthouse).run()


def replica_names(number: int, environment: dict[str, str] | os._Environ[str], *, shared: bool) -> list[str]:
    """Name the replicas of this machine: REPLICA_GROUP_ID, else its name where several machines share a run ("west-0"),
    with a number; by number alone where the run is this machine's."""
    base = environment.get("REPLICA_GROUP_ID") or (socket.gethostname().partition(".")[0] if shared else "")
    if ":" in base or "/" in base or len(base) > LONGEST_NAME:
        raise ThinwireError(f"REPLICA_GROUP_ID is '{base}': take up to {LONGEST_NAME} characters, no ':' and no '/'")
    if number == 1 and environment.get("REPLICA_GROUP_ID"):
        return [base]
    return [f"{base}-{index}" if base else str(index) for index in range(number)]


def _own_address(lighthouse: str | None) -> str:
    """Return this machine's address on the interface by which it reaches the lighthouse."""
    if lighthouse is None:
        return "127.0.0.1"
    url = urlsplit(lighthouse)
    try:
        if url.scheme not in ("http", "https") or not url.hostname or not url.port:
            raise ThinwireError(f"{LIGHTHOUSE} is '{lighthouse}': write http://HOST:PORT")
        family, _, _, _, address = socket.getaddrinfo(url.hostname, url.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(address)
            return probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise ThinwireError(f"{LIGHTHOUSE} is '{lighthouse}', which cannot be reached: {error}") from None


@contextmanager
def _serve_lighthouse(config: Config) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a lighthouse on this machine's loopback, in a process of its own, since it writes down all that it does;
    yield it and its address."""
    limits = ["127.0.0.1", config.min_replicas, round(1e3 * config.timeout), round(1e3 * HEARTBEAT_S)]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, *map(str, limits)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, preexec_fn=prepare_child,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        if not port.isdigit():
            raise ThinwireError("torchft's lighthouse cannot be started: try torchft_lighthouse --help")
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Supervisor:
    """The loop that starts replicas, and starts them again, until the run has ended.

    Attributes:
        completed: has a replica come to the end of the run?
    """

    def __init__(
        self, words: Sequence[str], config: Config, replicas: Sequence[Replica], environment: dict[str, str],
        lighthouse: subprocess.Popen[str] | None,
    ) -> None:  # fmt: skip
        self._command = [sys.executable, "-m", "thinwire", *words]
        self._config, self._environment, self._lighthouse = config, environment, lighthouse
        self.replicas, self.completed = replicas, False
        self._children = Children(_NOISE)
        self._lacks_lighthouse = False
        self._began, self._deadline, self._owner = time.time(), inf, read_owner(config.out)

    def run(self) -> int:
        with self._children as children:
            while not all(replica.away for replica in self.replicas):
                children.check()
                self._check_lighthouse()
                for replica in self.replicas:
                    self._look_at(replica)
                self._end_late_ones()
                settle_previous(self._config.out, over=False)
                time.sleep(POLL_S)
            return self._status()

    def _check_lighthouse(self) -> None:
        """Let replicas save and end if the lighthouse has ended: they take no further step."""
        if self._lighthouse is None or self._lighthouse.poll() is None or self.completed or self._children.number:
            return
        self._lacks_lighthouse, self._deadline = True, time.monotonic() + self._config.file_timeout
        self._children.pass_on(signal.SIGTERM, None)

    def _look_at(self, replica: Replica) -> None:
        """Start a replica that is due, and note the end of one that has ended."""
        if replica.process is None:
            if replica.start_at is not None and (self._children.number or self.completed):
                replica.start_at = None
                if replica.ending:
                    say(f"thinwire: replica {replica.name} {replica.ending} as the run ended", sys.stderr)
            elif replica.start_at is not None and time.monotonic() >= replica.start_at:
                self._start(replica)
            return
        status = replica.process.poll()
        if status is None:
            return
        process, replica.process, replica.status = replica.process, None, status
        self._children.processes.remove(process)
        self.completed |= status == 0
        if status < 0:
            show_cursor()
        if self._children.number or self.completed or status in (0, ThinwireError.status, *LEFT):
            return
        replica.tries = 0 if _took_part(self._config, replica.name, process.pid) else replica.tries + 1
        begin_line(sys.stderr)
        ending = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if replica.tries == TRIES:
            line = f"replica {replica.name} {ending}, {TRIES} times before its first step: it is not started again"
            say(f"thinwire: {line}", sys.stderr)
            return
        replica.ending, replica.start_at = ending, time.monotonic() + AGAIN_S

    def _start(self, replica: Replica) -> None:
        if not self._owner.has(self._config.out):  # it would take the folder for its run's
            raise ThinwireError(LOST.format(path=self._config.out))
        if replica.ending:
            say(f"thinwire: replica {replica.name} {replica.ending}; it is started again", sys.stderr)
            replica.ending = ""
        environment = self._environment | {
            REPLICA: replica.name, STARTS: str(replica.starts), "MASTER_PORT": str(free_port()), **self._port(replica)
        }  # fmt: skip
        replica.process = self._children.start(self._command, environment)
        replica.starts, replica.start_at = replica.starts + 1, None

    def _port(self, replica: Replica) -> dict[str, str]:
        """Give each replica a port of its own for its manager, from TORCHFT_MANAGER_PORT on, if that is set."""
        first = int(self._environment.get(MANAGER_PORT, "0"))  # 0: any that is free
        return {MANAGER_PORT: str(first + self.replicas.index(replica))} if first else {}

    def _end_late_ones(self) -> None:
        """End who still waits for others when the run's last files are written, or when too few are left to go on."""
        present = sum(not replica.away for replica in self.replicas)
        too_few = self._lighthouse is not None and present < self._config.min_replicas and not self.completed
        if too_few and present and not self._children.number:
            fewest = self._config.min_replicas
            say(f"thinwire: too few replicas are left for --min-replicas {fewest}: the run ends", sys.stderr)
            self._children.pass_on(signal.SIGTERM, None)
        if self.completed and self._deadline == inf and summary_time(self._config.out) > self._began:
            self._deadline = time.monotonic() + PATIENCE_S
        if time.monotonic() > self._deadline:
            for process in self._children.processes:
                process.kill()

    def _status(self) -> int:
        if self.completed:
            if self._lighthouse is not None and not summary_time(self._config.out):
                raise Unanswered(f"all who could write the run's last files were lost: {self._saved()}")
            return 0
        if self._lacks_lighthouse:
            raise Unanswered(f"torchft's lighthouse has ended, and so has the run: {self._saved()}")
        statuses = [replica.status for replica in self.replicas if replica.starts]
        failed = [status for status in statuses if status not in LEFT]
        if self._children.number and not failed:
            if -self._children.number in statuses:  # it came before the run began to note signals
                begin_line(sys.stderr)
                say("thinwire: interrupted", sys.stderr)
            return 128 + self._children.number
        code = next((status for status in failed if status > 0), (failed or statuses)[0])
        return code if code >= 0 else 128 - code

    def _saved(self) -> str:
        latest = self._config.out / "checkpoints/latest"
        return f"--resume auto goes on from {latest.read_text().strip()}" if latest.exists() else "nothing is saved"


def _took_part(config: Config, name: str, pid: int) -> bool:
    """Has the replica's process ``pid`` taken part in a step?"""
    events = read_log(config.out / REPLICAS / f"{name}.jsonl")
    starts = [number for number, event in enumerate(events) if event.get("pid") == pid]
    return bool(starts) and any(event["event"] == "members" for event in events[starts[-1] :])
