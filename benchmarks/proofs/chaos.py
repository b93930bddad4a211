"""A run that is struck again and again, and has to end as the run that was left alone: bit for bit.

    python benchmarks/proofs/chaos.py                            # 30 minutes, on an emulated cluster of 2 x 2 ranks
    python benchmarks/proofs/chaos.py --kinds kill --every 15s   # kill -9 of one rank every 15 seconds
    python benchmarks/proofs/chaos.py --steps 300 --seed 7

Each fault strikes a random rank at a random step, both drawn from the seed that is printed. What ends the run is
followed by `thinwire train --resume auto`. Prints one row per fault, a table by kind, and whether all weights, moments
and states are those of the undisturbed run. Needs namespaces and a tmpfs (root).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import forked
from faults import same, tensors_of
from forked import Job
from thinwire.lab.cluster import Cluster

NODES, PER_NODE, LINK, TIMEOUT = 2, 2, "200mbit", 10
LIMIT_S = TIMEOUT + 10
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "kill": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def exception() -> None:
    raise RuntimeError("a fault of the user's own code")


def lock() -> None:
    """Python's lock is held, as an extension may: no other thread of this rank runs again."""
    ctypes.PyDLL(None).sleep(3600)


INSIDE: dict[str, Callable[[], object]] = {
    "exception": exception, "abort": os.abort, "segfault": lambda: ctypes.string_at(0), "lock held": lock,
}  # fmt: skip
OUTSIDE = (*SIGNALS, "link cut", "link flaps", "disk full")
GOES_ON = ("link flaps",)


class Chaos:
    def __init__(self, box: Path, words: list[str], seed: int) -> None:
        self.box, self.words, self.draw = box, words, random.Random(seed)
        self.out = box / "disk" / "run"

    def round(self, cluster: Cluster, kind: str, ahead: int, victim: int, wait_s: float | None) -> tuple[str, bool]:
        """One start of the run and one fault. Returns its row, and whether the run came to its end before."""
        there = max(forked.steps_of(self.out), default=0)
        at, fault = there + ahead, None
        mark = self.box / f"struck-{at}"
        if kind in INSIDE:

            def fault(rank: int, step: int, micro: int) -> None:
                if (rank, step) == (victim, at):
                    mark.touch()
                    INSIDE[kind]()

        began = time.monotonic()
        world, logs = NODES * PER_NODE, self.box / "run"
        job = forked.train(self.words, world, self.out, fault=fault, cluster=cluster, logs=logs)
        if wait_s is not None:
            job.wait(wait_s)
        elif not job.reach(at - 1):
            return self._over(job, f"step {at} was not reached: {job.last()}", began)
        if wait_s is not None and job.wait(0):
            return self._over(job, "the run ended before", began)
        if kind in INSIDE:
            job.struck(mark)
        else:
            job.since = time.monotonic()
        seen = self.strike(cluster, job, kind, victim)
        ends = job.end()
        codes = " ".join(f"{rank}:{ends[rank][0]}" if rank in ends else f"{rank}:-" for rank in job.pids)
        others = [ends[rank][1] for rank in job.pids if rank in ends and rank != victim]
        good = "yes" if seen or (len(others) == len(job.pids) - 1 and max(others) < LIMIT_S) else "NO"
        text = seen or job.last(*(rank for rank in job.pids if rank != victim))
        took = max(others, default=0)
        return f"{kind:<10} | {at:>5} | {victim} | {good} | {took:4.1f} | {codes} | {text[:160]}", False

    def strike(self, cluster: Cluster, job: Job, kind: str, victim: int) -> str:
        """What was seen where the run goes on; empty where it ended, or had to."""
        rest = [rank for rank in job.pids if rank != victim]
        node = victim // PER_NODE
        if kind in SIGNALS:
            job.strike(SIGNALS[kind], victim)
        elif kind == "link cut":
            cluster.popen(node, ["ip", "link", "set", "eth0", "down"]).wait()
        elif kind == "link flaps":
            there = job.steps()[-1]
            for _ in range(3):
                for state in ("down", "up"):
                    cluster.popen(node, ["ip", "link", "set", "eth0", state]).wait()
                    time.sleep(0.7)
            goes_on = job.reach(there + 5, 60)
            return f"went on, step {there} to {job.steps()[-1]}" if goes_on else ""
        elif kind == "disk full":
            filler = self.out.parent / "filler"
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError:
                    pass
            job.wait(LIMIT_S)
            filler.unlink()
            return ""
        job.wait(LIMIT_S, *rest)
        if kind == "link cut":
            cluster.popen(node, ["ip", "link", "set", "eth0", "up"]).wait()
        return ""

    def _over(self, job: Job, text: str, began: float) -> tuple[str, bool]:
        ended = job.wait(1)
        job.end()
        good = ended and all(end[0] == 0 for end in job.ends.values())
        word, took = "yes" if good else "NO", time.monotonic() - began
        return f"{'-':<10} |     - | - | {word} | {took:4.1f} | | {text[:160]}", good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=[*INSIDE, *OUTSIDE], choices=[*INSIDE, *OUTSIDE])
    parser.add_argument("--every", default="steps", help="15s: strike after so many seconds; default: 10 to 60 steps")
    parser.add_argument("--method", default="topk(feedback='gradients', smallest=1000,density=0.05)")
    chosen = parser.parse_args()
    wait_s = None if chosen.every == "steps" else float(chosen.every.removesuffix("s"))
    words = f"--steps {chosen.steps} --checkpoint-every 20 --resume auto --timeout {TIMEOUT} --method {chosen.method}"
    words += f" --file-timeout {TIMEOUT}"
    print(f"seed {chosen.seed}: {chosen.steps} steps of {chosen.method} on {NODES} x {PER_NODE} ranks, {LINK}, "
          f"--timeout {TIMEOUT}\nkind       |    at | rank | all in time | s | ends | seen", flush=True)  # fmt: skip
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    began, over = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="thinwire-chaos-") as folder, Cluster(NODES, PER_NODE, LINK) as cluster:
        box = Path(folder)
        chaos = Chaos(box, words.split(), chosen.seed)
        chaos.out.parent.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", chaos.out.parent], check=True)
        try:
            while not over:
                kind = chaos.draw.choice(chosen.kinds)
                ahead, victim = chaos.draw.randrange(10, 60), chaos.draw.randrange(NODES * PER_NODE)
                line, over = chaos.round(cluster, kind, ahead, victim, wait_s)
                print(line, flush=True)
                counts[kind][0] += not over
                counts[kind][1] += not over and "| yes |" in line
                if "was not reached" in line and not over:
                    break
            struck = tensors_of(chaos.out, chosen.steps)
        finally:
            subprocess.run(["umount", "--lazy", chaos.out.parent], check=True)
        seconds = time.monotonic() - began
        alone = forked.train(words.split(), NODES * PER_NODE, box / "alone", cluster=cluster)
        alone.wait(3600)
        alone.end()
        equal = same(tensors_of(box / "alone", chosen.steps), struck)
    for kind, (number, good) in sorted(counts.items()):
        print(f"{kind:<12} {number:>3} times, {good:>3} as it should")
    print(f"{sum(n for n, _ in counts.values())} faults in {seconds / 60:.1f} minutes; "
          f"bit-equal to the undisturbed run: {equal}")  # fmt: skip
    return int(not equal or any(number != good for number, good in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
