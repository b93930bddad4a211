"""Replicas under fire: killed, stopped, slowed down or cut off at random; what is left of the time, and are all equal?

    python benchmarks/elastic/kills.py --method trickle --replicas 4 --seconds 60 --every 15 --seed 1
    python benchmarks/elastic/kills.py --method sdp4bit --replicas 2 --shards 2      # HSDP 2 x 2: any rank is killed
    python benchmarks/elastic/kills.py --method trickle --stop 30 --every 45         # SIGSTOP for 30 s, then SIGCONT
    python benchmarks/elastic/kills.py --method trickle --slow 10 --every 1000       # r0 computes ten times as long
    python benchmarks/elastic/kills.py --method trickle --cut 20 --every 40 --link 50mbit    # the network in two halves

Starts torchft's lighthouse and the replicas of ``replica.py``, on this machine's loopback or on an emulated network
(``--link``; the lighthouse is a node of its own, on the side of the first replicas). Every ``--every`` seconds one
replica is killed, and started again after 5 to 20 seconds. At the end it prints the goodput (the share of the wall
clock in which steps counted: ``thinwire.train.job.status.goodput``), the steps, the longest gap between two that
counted, and whether all replicas had one hash of the weights at every step that both counted; with
``--events``, after each event, who waited how long. Several methods: give ``--method`` several times; ``torchft`` is
torchft's own dense all-reduce.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from books import Balance, balance
from thinwire.lab.cluster import Cluster
from thinwire.train.job.status import Gap, goodput
from thinwire.train.supervisor import SERVE

REPLICA = Path(__file__).with_name("replica.py")
RETURN_S = 120.0
"""How long, at the end, those that were killed last are waited for."""
NOWHERE = "02:00:0a:00:00:fe"
"""A card that no node of the emulated network has."""


@dataclass
class Event:
    """One thing that happened: ``kind`` to ``names`` at ``time``, over at ``end`` (None: not yet)."""

    kind: str
    names: list[str]
    time: float
    end: float | None = None


@dataclass
class Outcome:
    """What the replicas of one method wrote. ``gaps``: between steps that counted, on the run's own clock.

    ``batches``: that counted, since the start. ``balance``: of the books, if they were kept. ``load``: processes that
    wanted a core, on average.
    """

    lines: list[dict[str, Any]]
    events: list[Event]
    failed: list[str] = field(default_factory=list)
    batches: int = 0
    balance: Balance | None = None
    load: float = 0.0

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
        return [
            step for step, lines in self.counted.items()
            if len({(line["shard"], line["hash"]) for line in lines}) > len({line["shard"] for line in lines})
        ]  # fmt: skip

    @property
    def gaps(self) -> list[Gap]:
        steps = sorted(self.counted.values(), key=lambda lines: min(line["time"] for line in lines))
        ends = [min(line["time"] for line in lines) for lines in steps]
        who = [{line["process"] for line in lines} for lines in steps]
        dropped = [line for line in self.lines if line.get("counted") is False and not line.get("alone")]
        failed = {bisect.bisect(ends, line["time"]) for line in dropped}
        return [
            Gap(ends[later] - ends[later - 1], len(who[later]), later in failed or who[later] != who[later - 1])
            for later in range(1, len(steps))
        ]

    @property
    def goodput(self) -> float:
        return math.nan if (share := goodput(self.gaps)) is None else share

    @property
    def loss(self) -> float:
        """The mean loss of the last hundred steps, without that of a replica that joined, before it had the weights."""
        counted, seen = self.counted, set[int]()
        steps, losses = sorted(counted), list[float]()
        for step in steps:
            losses += [line["loss"] for line in counted[step] if line["process"] in seen and step >= steps[-100:][0]]
            seen |= {line["process"] for line in counted[step]}
        return statistics.fmean(losses)

    def told(self, event: Event) -> str:
        """Say when the others, and those that the event fell on, took their next step."""
        times = [
            (line["time"] - event.time, line["replica"] in event.names) for line in self.lines if line.get("counted")
        ]
        end = f" for {event.end - event.time:.1f} s" if event.end is not None else ""
        text = f"{event.kind} {' '.join(event.names)}{end}"
        for who, theirs in (("the others'", False), ("its", True)):
            own = sorted(after for after, fell in times if fell is theirs)
            after = [moment for moment in own if moment > 0]
            if not after:
                text += f"; {who} next step never came"
                continue
            waits = [later - earlier for earlier, later in itertools.pairwise([max(own[0], 0.0), *after])]
            until = (event.end or event.time) - event.time + 30
            longest = max((wait for wait, moment in zip(waits, after, strict=True) if moment - wait < until), default=0)
            text += f"; {who} next step after {after[0]:.2f} s, longest wait {longest:.2f} s"
        return text


class Replicas:
    """Processes of ``replica.py``, each with a file of what it printed. They end with the cluster."""

    def __init__(
        self, cluster: Cluster, folder: Path, lighthouse: str, options: argparse.Namespace, method: str,
        until: int = 1_000_000,
    ) -> None:  # fmt: skip
        self._cluster, self._folder, self._lighthouse, self._options = cluster, folder, lighthouse, options
        self._arguments = ["--until", str(until), "--hidden", str(options.hidden), "--timeout", str(options.timeout)]
        self._arguments += ["--min-replicas", str(options.min_replicas), "--shards", str(options.shards)]
        self._arguments += ["--spares"] if options.spares else []
        self._arguments += ["--waits"] if options.waits else []
        self._arguments += ["--books"] if options.books and method != "torchft" else []
        self._arguments += ["--dense-torchft", "--method", "dense"] if method == "torchft" else ["--method", method]
        self.names = [f"r{number}" for number in range(options.replicas)]
        self.processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._starts, self._joined = 0, set[str]()
        self._outputs: dict[str, tuple[Path, int]] = {}  # a file of each, and what to skip of it

    def start(self, name: str) -> None:
        self._starts += 1
        node = self.names.index(name)
        pause = self._options.pause * (self._options.slow if node == 0 else 1)
        self.processes[name] = []
        for shard in range(self._options.shards):
            path = self._folder / f"{name}-{self._starts}-{shard}"
            own = ["--address", self._cluster.address(node), "--pause", str(pause), "--shard", str(shard)]
            own += ["--meet", str(self._folder / f"{name}-{self._starts}.port")] if self._options.shards > 1 else []
            self._outputs[name] = path.with_suffix(".jsonl"), 0
            environment = {**_environment(self._cluster, node), "TORCHFT_LIGHTHOUSE": self._lighthouse}
            with path.with_suffix(".jsonl").open("wb") as out, path.with_suffix(".err").open("wb") as err:
                command = [sys.executable, str(REPLICA), name, *self._arguments, *own]
                process = self._cluster.popen(node, command, stdout=out, stderr=err, env=environment)
            self.processes[name].append(process)
        self._joined.discard(name)

    def is_back(self, name: str) -> None:
        """Note that ``name`` may go on."""
        path, _ = self._outputs[name]
        self._outputs[name] = path, path.stat().st_size
        self._joined.discard(name)

    def signal(self, name: str, number: int) -> None:
        for process in self.processes[name]:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def kill(self, name: str, draw: random.Random) -> None:
        """Kill one rank of ``name``; and the others of it once they could have noticed, as torchrun does."""
        victim = draw.choice(self.processes[name])
        os.killpg(victim.pid, signal.SIGKILL)
        victim.wait()
        if len(self.processes[name]) > 1:
            time.sleep(0.2)
            self.signal(name, signal.SIGKILL)
        for process in self.processes.pop(name):
            process.wait()

    def have_joined(self, names: Sequence[str]) -> int:
        """Count those of ``names`` that have counted a step since they were started or may go on."""
        for name in set(names) & set(self.processes) - self._joined:
            path, known = self._outputs[name]
            if b'"counted": true' in path.read_bytes()[known:]:
                self._joined.add(name)
        return len(self._joined & set(names))

    def all_joined(self) -> bool:
        return self.have_joined(self.names) == len(self.names)

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
        """Name each process that ended by itself, with its exit status and its last word."""
        ended = []
        for name, ranks in self.processes.items():
            for shard, process in enumerate(ranks):
                if (status := process.poll()) is not None:
                    words = max(self._folder.glob(f"{name}-*-{shard}.err"), key=lambda path: path.stat().st_mtime)
                    last = (words.read_text().strip().splitlines() or [""])[-1]
                    ended.append(f"{name} ended with {status}: {last[:300]}")
        return ended

    def cut(self, whole: bool) -> list[str]:
        """Cut the network in two, the lighthouse with the first half, or make it ``whole``; name the second half."""
        nodes, half = self._cluster.nodes, len(self.names) // 2
        for node, far in itertools.product(range(nodes), range(nodes)):
            second = [place in range(half, len(self.names)) for place in (node, far)]
            if second[0] != second[1]:
                change = "del" if whole else f"replace lladdr {NOWHERE} nud permanent"
                verb, *rest = change.split()
                line = ["ip", "neigh", verb, self._cluster.address(far), *rest, "dev", "eth0"]
                self._cluster.popen(node, line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()
        return self.names[half:]


def _environment(cluster: Cluster, node: int) -> dict[str, str]:
    interface = {"GLOO_SOCKET_IFNAME": "eth0"} if cluster.emulated else {}
    return {**os.environ, **interface, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}


def start_lighthouse(cluster: Cluster, node: int, min_replicas: int, heartbeat_s: float = 1.0) -> str:
    """Start a lighthouse; return its address. It is a process of its own, since it writes down all that it does.

    It waits a minute for who lives and does not ask, as torchft's does by default. (If that is shorter than a step in
    which somebody joins, who asks last in the next step is left out, and joins in the one after it, and so on.)
    """
    limits = [str(min_replicas), "60000", f"{1e3 * heartbeat_s:.0f}"]
    command = [sys.executable, "-c", SERVE, cluster.address(node), *limits]
    environment = _environment(cluster, node)
    process = cluster.popen(node, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert process.stdout is not None
    return f"http://{cluster.address(node)}:{process.stdout.readline().decode().strip()}"


def run(method: str, options: argparse.Namespace) -> Outcome:
    link = options.link or "loopback"
    with tempfile.TemporaryDirectory() as folder, Cluster(options.replicas + 1, link=link) as cluster:
        lighthouse = start_lighthouse(cluster, options.replicas, options.min_replicas, options.heartbeat)
        replicas = Replicas(cluster, Path(folder), lighthouse, options, method)
        for name in replicas.names:
            replicas.start(name)
        while len({line["replica"] for line in replicas.lines() if line.get("counted")}) < options.replicas:
            if replicas.errors():
                raise SystemExit(f"{method}: {replicas.errors()}")
            time.sleep(0.2)
        began, loads = time.time(), list[float]()
        events = play(replicas, options, began, loads)
        failed = replicas.errors()
        for name in list(replicas.processes):
            replicas.signal(name, signal.SIGKILL)
        every_line = replicas.lines()
        load = statistics.fmean(loads)
        if options.keep:
            stem = options.keep / re.sub(r"\W+", "-", method).strip("-")
            keep(stem, every_line, events, {"began": began, "method": method, "failed": failed, "load": load})
            if failed:
                shutil.copytree(folder, stem, dirs_exist_ok=True)
        return outcome_of(every_line, events, began, failed, load)


def outcome_of(
    lines: list[dict[str, Any]], events: list[Event], began: float, failed: list[str], load: float
) -> Outcome:
    """Judge all that the replicas of one method wrote; ``began``: when all had taken a step."""
    steps = {line["step"]: line["replicas"] for line in lines if line.get("counted")}
    books = balance(lines) if any("takes" in line for line in lines) else None
    later = [line for line in lines if line.get("time", 0) >= began]
    return Outcome(later, events, failed, sum(steps.values()), books, load)


def undisturbed(method: str, options: argparse.Namespace, batches: int) -> float:
    """Return the loss of all replicas after as many ``batches`` as a run that was disturbed has learnt."""
    calm = argparse.Namespace(**{**vars(options), "pause": 0.0, "books": False, "link": None, "slow": 1.0})
    with tempfile.TemporaryDirectory() as folder, Cluster(options.replicas + 1, link="loopback") as cluster:
        # All together from the first step, or the first ones would count some alone.
        lighthouse = start_lighthouse(cluster, options.replicas, options.replicas)
        replicas = Replicas(cluster, Path(folder), lighthouse, calm, method, until=batches // options.replicas)
        for name in replicas.names:
            replicas.start(name)
        while not all(process.poll() is not None for ranks in replicas.processes.values() for process in ranks):
            time.sleep(0.2)
        return Outcome(replicas.lines(), []).loss


def keep(stem: Path, lines: list[dict[str, Any]], events: list[Event], facts: dict[str, Any]) -> None:
    """Write the ``facts`` and the lines of a run, and a line for each event."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    told = [{"event": event.kind, "of": event.names, "time": event.time, "end": event.end} for event in events]
    with stem.with_suffix(".jsonl").open("w") as out:
        for line in [facts, *told, *lines]:
            out.write(json.dumps(line) + "\n")


def read(path: Path) -> tuple[str, Outcome]:
    """Read what ``keep`` has written: the method, and its outcome."""
    facts, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    events = [Event(line["event"], line["of"], line["time"], line["end"]) for line in lines if "event" in line]
    lines = [line for line in lines if "event" not in line]
    outcome = outcome_of(lines, events, facts["began"], facts.get("failed", []), facts.get("load", math.nan))
    return facts.get("method", path.stem), outcome


def play(replicas: Replicas, options: argparse.Namespace, began: float, loads: list[float]) -> list[Event]:
    """Let things happen to ``replicas`` until the time is over and all are back; return them. Note the load."""
    draw, events = random.Random(options.seed), list[Event]()
    back: list[tuple[float, Event]] = []
    next_event = began + options.every
    end = began + options.seconds
    while (now := time.time()) < end or (now < end + RETURN_S and (back or not replicas.all_joined())):
        for due, event in [(due, event) for due, event in back if due <= now]:
            back.remove((due, event))
            event.end = now
            if event.kind == "killed":
                replicas.start(event.names[0])
            elif event.kind == "stopped":
                replicas.signal(event.names[0], signal.SIGCONT)
            else:
                replicas.cut(whole=True)
            for name in event.names if event.kind != "killed" else ():
                replicas.is_back(name)
        away = {name for _, event in back for name in event.names}
        present = sorted(set(replicas.names) - away)
        if end > now >= next_event and replicas.have_joined(present) > max(1, options.min_replicas):
            next_event = max(next_event + options.every, now)
            if options.cut and not back:
                events.append(Event("cut off", replicas.cut(whole=False), now))
                back.append((now + options.cut, events[-1]))
            elif options.stop:
                events.append(Event("stopped", [draw.choice(present)], now))
                replicas.signal(events[-1].names[0], signal.SIGSTOP)
                back.append((now + options.stop, events[-1]))
            elif not options.cut:
                events.append(Event("killed", [draw.choice(present)], now))
                replicas.kill(events[-1].names[0], draw)
                back.append((now + draw.uniform(options.least, options.most), events[-1]))
        loads.append(os.getloadavg()[0])
        time.sleep(0.05)
    return events


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", action="append", help="a method, or torchft; may be given several times")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--shards", type=int, default=1, help="ranks of a replica, which shard the model (HSDP)")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--waits", action="store_true", help="let the others wait for a joiner's whole transfer")
    parser.add_argument("--spares", action="store_true", help="FIXED_WITH_SPARES: more than --min-replicas are spares")
    parser.add_argument("--seconds", type=float, default=60, help="of each method")
    parser.add_argument("--every", type=float, default=15, help="seconds between two events")
    parser.add_argument("--least", type=float, default=5, help="seconds until a killed replica is back, at least")
    parser.add_argument("--most", type=float, default=20, help="and at most")
    parser.add_argument("--stop", type=float, default=0, help="stop a replica for so many seconds, do not kill it")
    parser.add_argument("--slow", type=float, default=1, help="how many times as long r0 computes")
    parser.add_argument("--cut", type=float, default=0, help="cut the network in two for so many seconds; needs --link")
    parser.add_argument("--link", help="of an emulated network, such as 50mbit; default: loopback")
    parser.add_argument("--timeout", type=float, default=10, help="seconds that a replica waits for another")
    parser.add_argument("--heartbeat", type=float, default=1.0, help="seconds until the lighthouse misses a replica")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of computing in a step")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--keep", type=Path, help="a folder for a file of each method: its events and its steps")
    parser.add_argument("--read", type=Path, nargs="+", help="print again what files of --keep say, and run nothing")
    parser.add_argument("--books", action="store_true", help="check that all that is taken is delivered or lost")
    parser.add_argument("--calm", action="store_true", help="the loss of a run without events, too, after as much data")
    parser.add_argument("--events", action="store_true", help="print a line for each event")
    parser.add_argument("--seed", type=int, default=1, help="whom it falls on, and when who is back")
    options = parser.parse_args(arguments)
    if options.read and options.calm:
        parser.error("--read runs nothing: --calm does not go with it")
    if options.cut and not options.link:
        parser.error("--cut needs --link: loopback cannot be cut")
    return options


def main() -> None:
    options = parse()
    kind = "cut in two" if options.cut else "one stopped" if options.stop else "one killed"
    if not options.read:
        print(f"{options.replicas} replicas of {options.shards}, {kind} every {options.every:g} s, seed {options.seed}")
    heads = [f"{'method':36} {'events':>6} {'steps':>6} {'goodput':>8} {'longest gap':>11} {'loss':>8}"]
    heads += [f"{'undisturbed':>11}"] * options.calm + [f"{'missing':>9}"] * options.books + [f"{'load':>5}  weights"]
    print(" ".join(heads))
    wrong = False
    methods = options.method or ["torchft", "dense", "int8(smallest=0)", "trickle(density=0.05, smallest=0)"]
    for method, outcome in (
        map(read, options.read) if options.read else ((name, run(name, options)) for name in methods)
    ):
        equal = "equal at every step" if not outcome.unequal else f"unequal at step {outcome.unequal[0]}"
        wrong |= bool(outcome.unequal or outcome.failed)
        texts = [f"{method:36} {len(outcome.events):6} {len(outcome.counted):6} {outcome.goodput:8.1%}"]
        texts += [f"{max(gap.seconds for gap in outcome.gaps):9.2f} s {outcome.loss:8.4f}"]
        texts += [f"{undisturbed(method, options, outcome.batches):11.4f}"] if options.calm else []
        if options.books:
            texts += [f"{outcome.balance.gap:9.1e}" if outcome.balance else "        -"]
        print(" ".join([*texts, f"{outcome.load:5.1f}"]), "", equal, " ".join(outcome.failed), flush=True)
        for event in outcome.events if options.events else ():
            print(f"    {outcome.told(event)}", flush=True)
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
