"""Does a network that delays, loses and reorders packets change a bit? Each method: 20 steps there and on a quiet one.

    python benchmarks/proofs/lossy.py --delay 30ms --jitter 5ms --loss 1% --reorder 1%
    python benchmarks/proofs/lossy.py --delay 200ms --loss 5% --reorder 5% --methods int8 sdp4bit trickle local-steps
    python benchmarks/proofs/lossy.py --slow --methods int8            # and rank 1 has a tenth of the processor
    python benchmarks/proofs/lossy.py --delay 5ms --rates 100mbit 200mbit 500mbit 1gbit # to which rate it is faithful

Two nodes of one rank, gloo with its own time limits, the small model of the tests. A row says how long the 20 steps
took on either link, and whether all weights, and the bytes that were sent, are the same. The exit status is the number
of rows where they are not, or where one of the two runs did not come to its end. Needs network namespaces.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from quiet import STREAM
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import die_with_parent
from thinwire.cli.lab import delayed
from thinwire.lab import framing
from thinwire.lab.cluster import Cluster
from thinwire.lab.link import Link
from thinwire.lab.run import launch
from thinwire.methods import resolve

HERE = Path(__file__).parent
RAN_S, STOPPED_S = 0.005, 0.045
"""Of a rank that is ten times slower."""


def all_methods() -> list[str]:
    """All that exchange anything, with knobs for a small model and 20 steps."""
    import digests

    own = ("none", "local-steps")
    return [method for method in digests.specs() if method.partition("(")[0] not in own] + ["local-steps(every=5)"]


def play(engines: list[str], methods: list[str]) -> None:
    """One rank: each method in turn, with the engine beside it, and a line for each."""
    import torch
    import torch.distributed as dist

    import digests

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for engine, method in zip(engines, methods, strict=True):
        start = time.monotonic()
        (seen,) = digests.play(dist.get_rank(), dist.get_world_size(), [engine], [method]).values()
        print(f"{method} {engine}\t{time.monotonic() - start:.1f}\t{seen}", flush=True)
    dist.destroy_process_group()


def slowed(command: list[str]) -> int:
    """Run ``command``, and let it have a tenth of the time."""
    process = subprocess.Popen(command, preexec_fn=die_with_parent)
    while process.poll() is None:
        time.sleep(RAN_S)
        process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        process.send_signal(signal.SIGCONT)
    return process.returncode


def rows(link: Link, cases: list[tuple[str, str]], slow: bool, limit_s: float) -> tuple[dict[str, list[str]], str]:
    """Seconds and digest by ``"METHOD ENGINE"``, and what became of the packets. What came to no end has no row.

    Args:
        cases: method and engine.
        slow: rank 1 has a tenth of the time.
    """
    with tempfile.TemporaryDirectory(prefix="thinwire-lossy-") as folder, Cluster(2, 1, link) as cluster:
        log, why = Path(folder, "log"), ""
        command = [sys.executable, str(HERE / "lossy.py"), "--rank"]
        command += ["--methods", *(method for method, _ in cases), "--engines", *(engine for _, engine in cases)]
        try:
            outcome = launch(cluster, [*command, *(["--slow"] if slow else [])], log=log, limit_s=limit_s)
            why = f"; rank {outcome.failed_rank} ended with {outcome.returncode}" if outcome.returncode else ""
        except ThinwireError as error:
            why = f"; {error}"
        if why:
            print(log.read_text()[-2000:], file=sys.stderr)
        lines = [line.split("\t") for line in log.read_text().splitlines() if line.count("\t") == 2]
        of_ranks = {(line[0].removeprefix("[rank 1] "), line[0].startswith("[rank 1]")): line[1:] for line in lines}
        both = {case: of_ranks[case, False] for case, other in of_ranks if other and (case, False) in of_ranks}
        differ = [case for case in both if of_ranks[case, True][1] != both[case][1]]
        why += f"; the ranks differ: {', '.join(differ)}" if differ else ""
        return both, (delayed(cluster) if cluster.delayed_by else "as they come") + why


def faithful(link: Link) -> str:
    """A row: the share of the rate that a TCP stream of 4 seconds gets, near and far, and what that costs."""
    assert link.rate is not None
    payload = int(link.rate / 8 * framing.efficiency(link.mtu) * 4)
    shares, about = [], ""
    for place in (replace(link, delay=0.0, jitter=0.0, loss=0.0, reorder=0.0), link):
        with Cluster(2, 1, place) as cluster, tempfile.TemporaryDirectory(prefix="thinwire-lossy-") as folder:
            log = Path(folder, "log")
            before = cluster.forwarded()
            launch(cluster, [sys.executable, "-c", STREAM, str(payload)], log=log, limit_s=300)
            seconds = float(log.read_text().split("seconds")[1])
            shares.append(f"{framing.frames(payload, link.mtu) * 8 / seconds / link.rate:.0%}")
            after = cluster.forwarded()
            if before and after:
                done = {key: after[key] - before[key] for key in after}
                about = f"{done['packets'] / seconds:,.0f} | {done['cpu_s'] / seconds:.0%} | "
                about += f"{done['late'] / done['packets']:.1%} | {done['missed'] + done['no_room']:.0f}"
    return f"| {link.text} | {link.mtu} | {' | '.join(shares)} | {about} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="200mbit")
    for flag, value in (("--delay", "0ms"), ("--jitter", "0ms"), ("--loss", "0%"), ("--reorder", "0%")):
        parser.add_argument(flag, default=value)
    parser.add_argument("--methods", nargs="+", help="as thinwire.compress takes them; by default all")
    parser.add_argument("--engines", nargs="+", default=["ddp"], choices=("ddp", "fsdp2"))
    parser.add_argument("--slow", action="store_true", help="rank 1 has a tenth of the time, on the second link")
    parser.add_argument("--limit-minutes", type=float, default=60)
    parser.add_argument("--rates", nargs="+", help="one stream at each of these rates, and nothing else")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        if chosen.slow and os.environ["RANK"] == "1":
            return slowed([word for word in [sys.executable, *sys.argv] if word != "--slow"])
        play(chosen.engines, chosen.methods)
        return 0
    place = (chosen.mtu, chosen.delay, chosen.jitter, chosen.loss, chosen.reorder)
    if chosen.rates:
        print("| rate | MTU | near | far | packets/s | processor | late | dropped |\n|---|---|---|---|---|---|---|---|")
        for rate in chosen.rates:
            print(faithful(Link.parse(rate, *place)), flush=True)
        return 0
    far = Link.parse(chosen.link, *place)
    print(f"2 nodes, {far.text}; {far.distance}{', rank 1 ten times slower' if chosen.slow else ''}")
    methods = [(method, resolve(method).engines) for method in chosen.methods or all_methods()]
    cases = [(method, engine) for engine in chosen.engines for method, engines in methods if engine in engines]
    quiet, trouble = rows(Link.parse(chosen.link, chosen.mtu), cases, False, 60 * chosen.limit_minutes)
    lossy, packets = rows(far, cases, chosen.slow, 60 * chosen.limit_minutes)
    wrong = sum("differ" in told for told in (trouble, packets))
    print("| method | engine | quiet s | lossy s | |\n|---|---|---|---|---|")
    for method, engine in cases:
        near, distant = (found.get(f"{method} {engine}", ["-", "no end"]) for found in (quiet, lossy))
        same = near[1] == distant[1] != "no end" and "refused" not in near[1]
        wrong += not same
        word = "equal" if same else f"DIFFERS: {near[1]}, {distant[1]}"
        print(f"| {method} | {engine} | {near[0]} | {distant[0]} | {word} |")
    print(f"quiet: packets {trouble}\nlossy: packets {packets}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
