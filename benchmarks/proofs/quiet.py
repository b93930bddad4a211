"""What only a quiet machine can show: that an emulated link is used in full, that a small run and an import are short.

    python benchmarks/proofs/quiet.py

The tests judge no time, so that they pass on a busy machine. What they would judge is judged here, and what is out of
its bounds makes the exit status 1. Needs network namespaces (root, or the right to make user namespaces).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from thinwire.lab import framing
from thinwire.lab.cluster import Cluster
from thinwire.lab.link import Link
from thinwire.lab.run import launch

STREAM = """
import os, socket, sys, time
here, left = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(sys.argv[1])
if os.environ["RANK"] == "0":
    peer, _ = socket.create_server(here).accept()
    while peer.recv(1 << 20):
        pass
    peer.send(b"x")
else:
    while True:
        try:
            peer = socket.create_connection(here)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    start, block = time.monotonic(), bytes(1 << 16)
    while left:
        left -= peer.send(block[:left])
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
    print("seconds", time.monotonic() - start)
"""
ALL_REDUCE = """
import os, sys, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
values = torch.ones(int(sys.argv[1]) // 4)
dist.all_reduce(values)
dist.barrier()
start = time.monotonic()
dist.all_reduce(values)
if dist.get_rank() == 0:
    print("seconds", time.monotonic() - start)
dist.destroy_process_group()
"""


def use(cluster: Cluster, program: str, payload: int) -> float:
    """The share of the link that ``payload`` bytes, with their frames' headers, take while ``program`` sends them."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        outcome = launch(cluster, [sys.executable, "-c", program, str(payload)], log=log)
        assert outcome.returncode == 0, log.read_text()
        seconds = float(log.read_text().split("seconds")[1].split()[0])
    assert cluster.link.rate is not None
    return framing.frames(payload) * 8 / seconds / cluster.link.rate


def links() -> Iterator[tuple[str, float, float, float]]:
    """What, its share of what is expected, and the least and the most that is right."""
    for rate, payload in (("200mbit", 40_000_000), ("20mbit", 4_000_000)):
        with Cluster(2, 1, rate) as cluster:
            yield f"a TCP stream on {rate}", use(cluster, STREAM, payload), 0.95, 1.03
            counters = cluster.counters()
        assert counters is not None
        acknowledgements = payload / framing.segment() / 2 * framing.HEADERS
        yield "its acknowledgements, one for two segments", counters[0].tx / acknowledgements, 0.0, 1.1
    with Cluster(2, 1, "200mbit") as cluster:
        yield "gloo's all-reduce on 200mbit", use(cluster, ALL_REDUCE, 10_000_000), 0.9, 1.05
    with Cluster(2, 1, "100mbit"), Cluster(2, 1, "400mbit") as cluster:
        yield "a TCP stream on 400mbit beside another lab", use(cluster, STREAM, 20_000_000), 0.95, 1.03
    ordinary = mock.patch("thinwire.lab.cluster.os.geteuid", lambda: 1000)
    with ordinary, Cluster(2, 1, Link.parse("100mbit")) as cluster:
        yield "a TCP stream on 100mbit within a user namespace", use(cluster, STREAM, 10_000_000), 0.95, 1.03


def smallest_run() -> float:
    """Seconds of 20 steps of ``tiny`` on two ranks, from the command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"train --preset tiny --method bf16 --ranks 2 --steps 20 --out {folder}/run".split()
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "thinwire", *words], check=True, capture_output=True)
        return time.monotonic() - start


IMPORTED = """
import time, torch
start = time.process_time()
import thinwire
print(1e3 * (time.process_time() - start))
"""


def importing() -> float:
    """Milliseconds that ``import thinwire`` takes beyond torch's own: the best of five."""
    words = [sys.executable, "-c", IMPORTED]
    return min(float(subprocess.run(words, check=True, capture_output=True).stdout) for _ in range(5))


def main() -> int:
    wrong = 0
    for what, found, least, most in links():
        wrong += not least < found < most
        print(f"{what:<48} {found:6.1%}   right is {least:.0%} to {most:.0%}", flush=True)
    seconds = smallest_run()
    wrong += seconds > 40
    print(f"{'the smallest full run, 20 steps of tiny':<48} {seconds:5.1f} s   right is up to 40 s")
    milliseconds = importing()
    wrong += milliseconds > 50
    print(f"{'import thinwire, beyond torch':<48} {milliseconds:5.1f} ms  right is up to 50 ms")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
