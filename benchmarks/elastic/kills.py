"""Replicas under fire: SIGKILL at random, back after a while; what is left of the time, and are all weights equal?

    python benchmarks/elastic/kills.py --method trickle --replicas 4 --seconds 60 --every 15 --seed 1

Starts torchft's lighthouse and the replicas of ``replica.py`` on this machine's loopback. Every ``--every`` seconds one
is killed, and started again after 5 to 20 seconds. At the end it prints the goodput (the share of the wall clock in
which steps counted: 1 minus the gaps between two steps that counted beyond the usual time of a step), the steps, the
longest gap, and whether all replicas had one hash of the weights at every step that both counted. Several methods:
give ``--method`` several times; ``torchft`` is torchft's own dense all-reduce.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPLICA = Path(__file__).with_name("replica.py")
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
server = LighthouseServer(
    bind="127.0.0.1:0", min_replicas=int(sys.argv[1]), join_timeout_ms=1000, quorum_tick_ms=50,
    heartbeat_timeout_ms=1000,
)
print(server.address().rsplit(":", 1)[1], flush=True)
time.sleep(1e6)
"""


@dataclass
class Outcome:
    """What the replicas of one method wrote. ``gaps``: seconds between steps that counted, on the run's own clock."""

    lines: list[dict[str, Any]]
    seconds: float
    kills: int
    failed: list[str] = field(default_factory=list)

    @property
    def counted(self) -> dict[int, list[dict[str, Any]]]:
        steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for line in self.lines:
            if line.get("counted"):
                steps[line["step"]].append(line)
        return steps

    @property
    def unequal(self) -> list[int]:
        """The steps at which two replicas had different weights."""
        return [step for step, lines in self.counted.items() if len({line["hash"] for line in lines}) > 1]

    @property
    def gaps(self) -> list[float]:
        times = sorted(min(line["time"] for line in lines) for lines in self.counted.values())
        return [later - earlier for earlier, later in itertools.pairwise(times)]

    @property
    def goodput(self) -> float:
        usual = statistics.median(self.gaps)
        wasted = sum(gap - usual for gap in self.gaps if gap > 3 * usual)
        return 1 - wasted / sum(self.gaps)

    @property
    def loss(self) -> float:
        """The mean loss of the last twenty steps."""
        steps = sorted(self.counted)[-20:]
        return statistics.fmean(line["loss"] for step in steps for line in self.counted[step])


class Replicas:
    """Processes of ``replica.py``, each with a file of what it printed. They end with this object's ``close``."""

    def __init__(self, folder: Path, lighthouse: str, arguments: Sequence[str]) -> None:
        self._folder, self._lighthouse, self._arguments = folder, lighthouse, arguments
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = 0

    def start(self, name: str) -> None:
        self._starts += 1
        path = self._folder / f"{name}-{self._starts}"
        with path.with_suffix(".jsonl").open("wb") as out, path.with_suffix(".err").open("wb") as err:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(REPLICA), name, *self._arguments], stdout=out, stderr=err,
                env={**_environment(), "TORCHFT_LIGHTHOUSE": self._lighthouse},
            )  # fmt: skip

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()

    def lines(self) -> list[dict[str, Any]]:
        found = []
        for path in sorted(self._folder.glob("*.jsonl")):
            for text in path.read_text().splitlines():
                try:
                    found.append(json.loads(text))
                except ValueError:  # killed in the middle of a line
                    continue
        return found

    def errors(self) -> list[str]:
        """Name each process that ended by itself, with its exit status."""
        ended = {name: process.poll() for name, process in self.processes.items()}
        return [f"{name} ended with {status}" for name, status in ended.items() if status is not None]

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}


def start_lighthouse(min_replicas: int) -> subprocess.Popen[bytes]:
    """Start a lighthouse, which prints its port; in a process of its own, since it writes down all that it does."""
    command = [sys.executable, "-c", LIGHTHOUSE, str(min_replicas)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment())


def run(method: str, options: argparse.Namespace) -> Outcome:
    draw = random.Random(options.seed)
    lighthouse = start_lighthouse(options.min_replicas)
    arguments = ["--until", "1000000", "--pause", str(options.pause), "--hidden", str(options.hidden)]
    arguments += ["--dense-torchft", "--method", "dense"] if method == "torchft" else ["--method", method]
    names, back, kills = [f"r{number}" for number in range(options.replicas)], dict[str, float](), 0
    with tempfile.TemporaryDirectory() as folder:
        assert lighthouse.stdout is not None
        port = lighthouse.stdout.readline().decode().strip()
        replicas = Replicas(Path(folder), f"http://127.0.0.1:{port}", arguments)
        try:
            for name in names:
                replicas.start(name)
            while not any(line.get("counted") for line in replicas.lines()):
                if replicas.errors():
                    raise SystemExit(f"{method}: {replicas.errors()}")
                time.sleep(0.2)
            began = time.time()
            next_kill = began + options.every
            while (now := time.time()) < began + options.seconds:
                for name in [name for name, due in back.items() if due <= now]:
                    del back[name]
                    replicas.start(name)
                alive = sorted(replicas.processes)
                if now >= next_kill and len(alive) > max(1, options.min_replicas):
                    victim = draw.choice(alive)
                    replicas.kill(victim)
                    kills += 1
                    back[victim] = now + draw.uniform(options.least, options.most)
                    next_kill += options.every
                time.sleep(0.05)
            failed = replicas.errors()
            for process in replicas.processes.values():
                process.send_signal(signal.SIGKILL)
            lines = [line for line in replicas.lines() if line.get("time", 0) >= began]
            return Outcome(lines, time.time() - began, kills, failed)
        finally:
            replicas.close()
            lighthouse.kill()
            lighthouse.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", action="append", help="a method, or torchft; may be given several times")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of each method")
    parser.add_argument("--every", type=float, default=15, help="seconds between two kills")
    parser.add_argument("--least", type=float, default=5, help="seconds until a killed replica is back, at least")
    parser.add_argument("--most", type=float, default=20, help="and at most")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of computing in a step")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1, help="who is killed, and when who is back")
    options = parser.parse_args()
    print(f"{options.replicas} replicas, one killed every {options.every:g} s, seed {options.seed}")
    print(f"{'method':36} {'kills':>5} {'steps':>6} {'goodput':>8} {'longest gap':>11} {'loss':>8}  weights")
    wrong = False
    for method in options.method or ["torchft", "dense", "int8(smallest=0)", "trickle(density=0.05, smallest=0)"]:
        outcome = run(method, options)
        equal = "equal at every step" if not outcome.unequal else f"unequal at step {outcome.unequal[0]}"
        wrong |= bool(outcome.unequal or outcome.failed)
        figures = f"{outcome.kills:5} {len(outcome.counted):6} {outcome.goodput:8.1%} {max(outcome.gaps):9.2f} s"
        print(f"{method:36} {figures} {outcome.loss:8.4f}  {equal} {' '.join(outcome.failed)}", flush=True)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
