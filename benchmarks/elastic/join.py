"""A replica joins on a slow link: how long until its first step that counts, how many bytes, how long the others wait.

    python benchmarks/elastic/join.py --link 50mbit --hidden 156250 --method dense --method trickle --method torchft

Two replicas of ``replica.py`` (20 million parameters with ``--hidden 156250``) train on an emulated network, and a
third one joins them. The seconds run from when it is ready to its first step that counts, and ``steps`` are those that
the others took in that time. The bytes are those that its interface received, by the kernel's count; a step's exchange
is among them. ``others waited`` is the longest of their steps, beyond the usual one; ``lost`` is what all of them took
longer than usual. ``--waits``: let the others wait for the whole state. ``torchft`` is its own dense all-reduce.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import kills
from thinwire.lab.cluster import Cluster

JOINER = "r2"


def join(method: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Cluster(4, link=options.link) as cluster:
        lighthouse = kills.start_lighthouse(cluster, 3, 1)
        replicas = kills.Replicas(cluster, Path(folder), lighthouse, options, method)
        for name in replicas.names[:2]:
            replicas.start(name)
        wait(replicas, lambda lines: sum(line.get("counted", False) for line in lines) >= 8, options)
        replicas.start(JOINER)
        wait(replicas, lambda lines: any(line.get("ready") and line["replica"] == JOINER for line in lines), options)
        counters = cluster.counters()
        before = 0 if counters is None else counters[2].rx
        wait(replicas, lambda lines: any(line.get("counted") and line["replica"] == JOINER for line in lines), options)
        counters = cluster.counters()
        received = 0 if counters is None else counters[2].rx - before
        joined = next(line for line in replicas.lines() if line.get("counted") and line["replica"] == JOINER)
        wait(replicas, lambda lines: any(is_of(line, "r0", joined["step"]) for line in lines), options)
        lines = replicas.lines()
    ready = next(line["time"] for line in lines if line.get("ready") and line["replica"] == JOINER)
    others = sorted(line["time"] for line in lines if line.get("counted") and line["replica"] == "r0")
    gaps = [(later - earlier, later) for earlier, later in pairwise(others)]
    usual = statistics.median(gap for gap, later in gaps if later < ready)
    joining = [gap for gap, later in gaps if ready <= later <= joined["time"] + 0.5]
    return {
        "seconds": joined["time"] - ready, "received": received, "usual": usual, "waited": max(joining) - usual,
        "steps": len(joining), "lost": sum(joining) - len(joining) * usual,
    }  # fmt: skip


def is_of(line: dict[str, Any], replica: str, step: int) -> bool:
    """Does the line say that ``replica`` has counted ``step``?"""
    return bool(line.get("counted")) and line["replica"] == replica and line["step"] == step


def wait(replicas: kills.Replicas, over: Any, options: argparse.Namespace) -> None:
    end = time.monotonic() + options.limit
    while not over(replicas.lines()):
        if (failed := replicas.errors()) or time.monotonic() > end:
            raise SystemExit(f"the replicas have not come so far: {failed or 'time is over'}")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", action="append", help="a method, or torchft; may be given several times")
    parser.add_argument("--link", default="50mbit", help="of each node, both ways")
    parser.add_argument("--hidden", type=int, default=156250, help="higher => a larger model: 128 parameters for each")
    parser.add_argument("--waits", action="store_true", help="let the others wait while it fetches their state")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of computing that each step pretends to take")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a replica waits for another")
    parser.add_argument("--limit", type=float, default=400, help="seconds until it is given up")
    options = parser.parse_args()
    fixed = {"replicas": 3, "shards": 1, "min_replicas": 1, "spares": False, "slow": 1.0, "books": False}
    options = argparse.Namespace(**vars(options), **fixed)
    print(f"128 x {options.hidden} parameters, links of {options.link}, a third replica joins two")
    heads = f"{'received':>10} {'steps':>6} {'others waited':>13} {'lost':>8}"
    print(f"{'method':36} {'usual step':>10} {'joined in':>10} {heads}")
    for method in options.method or ["torchft", "dense", "trickle"]:
        found = join(method, options)
        print(
            f"{method:36} {found['usual']:8.2f} s {found['seconds']:8.2f} s {found['received'] / 1e6:7.1f} MB "
            f"{found['steps']:6} {found['waited']:11.2f} s {found['lost']:6.2f} s", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
