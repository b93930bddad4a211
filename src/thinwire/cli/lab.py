"""``thinwire lab`` and ``thinwire compare``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import tyro

from thinwire.base.errors import ThinwireError
from thinwire.lab.cluster import Cluster
from thinwire.lab.link import Link, share
from thinwire.lab.run import launch, open_cluster

Settings = TypeVar("Settings")

LAB_HELP = """usage: thinwire lab run [--nodes N] [--ranks-per-node L] [--link RATE] [--delay TIME] ... -- COMMAND ...

Run any torchrun-style command on an emulated cluster: every node a network namespace, its link limited both ways.
    thinwire lab run --nodes 2 --link 200mbit -- python train.py
    thinwire lab run --nodes 2 --link 200mbit -- thinwire train --preset tiny --method bf16 --steps 20 --out runs/a
    thinwire lab run --delay 30ms --jitter 5ms --loss 1% --reorder 1% -- thinwire train --method bf16 --out runs/b

thinwire lab run --help shows the options. Nothing needs cleaning up: the kernel ends a lab with its launcher."""


@dataclass
class Network:
    """The emulated network."""

    nodes: int = 2
    """Emulated nodes, each with a link of its own."""
    ranks_per_node: int = 1
    """Ranks on each node; they share its link, and reach each other without it."""
    link: str = "200mbit"
    """Rate of each node's link in each direction: 200mbit, 1gbit, unlimited; or loopback: no network at all."""
    mtu: int = 1500
    """Largest frame, 576 to 9000 bytes. Larger: the emulation takes less of the processors (see docs/lab.md)."""
    delay: str = "0ms"
    """From a node to another, one way: 30ms, 200us, 0.2s. An answer takes twice as long."""
    jitter: str = "0ms"
    """Each packet's delay lies evenly within the delay plus or minus this; so packets change places."""
    loss: str = "0%"
    """Share of the packets that never arrive: 1% or 0.01. TCP sends them again."""
    reorder: str = "0%"
    """Share of the packets that are not delayed and so overtake the others: 1% or 0.01."""

    def parsed(self) -> Link:
        return Link.parse(self.link, self.mtu, self.delay, self.jitter, self.loss, self.reorder)


@dataclass
class LabRun(Network):
    """Run COMMAND once per rank on an emulated cluster, with torchrun's environment, gloo bound to the slow link.

    Write the command after ``--``. Output of ranks other than 0 begins with ``[rank k]``; when a rank fails, all are
    ended and its exit status is ours. Afterwards: seconds, and the kernel's count of bytes by node.
    """


@dataclass
class Compare(Network):
    """Train the same model on the same data with each method, on one emulated network, and show what each gains.

    A run that communicates nothing (method "none") always comes first, because no method can be faster. Flags
    for ``thinwire train`` follow after ``--``. Prints a verdict and a table; writes them with pictures to report.html
    (one file), report.md and report.json. Exit status: 0; 1: a method has failed; 3: --fail-if-loss-worse-than.
    """

    methods: str = "dense,bf16,int8,sdp4bit,topk"
    """Comma-separated names, with or without knobs, and with flags of thinwire train for one alone behind its name:
    'dense,int8(group=64),topk --lr 1e-3'. 'thinwire methods' lists them."""
    preset: str = "net20m"
    """The model and its settings; see thinwire train --help. Tensors of the smallest, tiny and small, are mostly too
    small to be worth compressing."""
    steps: int = 20
    """Optimizer steps of every run. Times need at least 5; the first two are left out of the median."""
    seeds: int = 1
    """Runs of each method, with the seeds S, S + 1, ... (S: --seed after --, or 0). More: the losses and speeds have
    intervals."""
    fail_if_loss_worse_than: str | None = None
    """Largest loss above dense's, as 1% or 0.01 (lower: stricter): with a method's mean above it the exit status is 3.
    """
    out: Path = Path("runs/compare")
    """A new directory for the report; each method's run lies in a directory of its own beneath."""
    limit_minutes: float = 60.0
    """A method fails when one of its runs takes longer than this."""


OURS = {
    "--preset": "write it before --",
    "--steps": "write it before --",
    "--method": "write --methods before --",
    "--out": "write it before --",
    "--ranks": "write --nodes and --ranks-per-node before --",
    "--ranks-per-node": "write it before --",
}
"""Flags of ``thinwire train`` that ``thinwire compare`` sets itself, and what to do instead."""


def lab_main(argv: list[str]) -> int:
    """``thinwire lab run ... -- COMMAND``. Returns the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(LAB_HELP)
        return 0 if argv else 2
    if argv[0] != "run":
        raise ThinwireError(f"unknown word '{argv[0]}' after 'thinwire lab'; there is: run")
    options, command = split(argv[1:])
    settings = parse(LabRun, options, "thinwire lab run")
    if not command:
        raise ThinwireError("no command to run: write it after --, for example  thinwire lab run -- python train.py")
    with open_cluster(settings.nodes, settings.ranks_per_node, settings.parsed()) as cluster:
        outcome = launch(cluster, command)
        if outcome.failed_rank is not None:
            status = f"exit status {outcome.returncode}"
            say(f"thinwire: rank {outcome.failed_rank} failed with {status}; all ranks were ended")
        link = ", ".join(filter(None, (cluster.link.text, cluster.link.distance)))
        network = f"{cluster.nodes} nodes x {cluster.ranks_per_node}, link {link}"
        say(f"lab: {outcome.seconds:.1f} s on {network}")
        for node, traffic in enumerate(outcome.traffic or []):
            say(f"lab: node {node} sent {traffic.tx:,} B, received {traffic.rx:,} B")
        if cluster.delayed_by is not None:
            say(f"lab: packets {delayed(cluster)}")
    return outcome.returncode


def compare_main(argv: list[str]) -> int:
    """``thinwire compare ... [-- flags of thinwire train]``. Returns the exit status."""
    options, extra = split(argv)
    settings = parse(Compare, options, "thinwire compare")
    methods = method_names(settings.methods)
    if settings.seeds < 1:
        raise ThinwireError(f"--seeds is the number of runs of each method, 1 or more, got {settings.seeds}")
    limit = settings.fail_if_loss_worse_than
    above = None if limit is None else share(limit, "--fail-if-loss-worse-than, of dense's loss,")
    first = check_flags(settings, methods, extra)
    from thinwire.lab.compare import Comparison, compare

    return compare(Comparison(
        methods, settings.preset, settings.steps, settings.out,
        nodes=settings.nodes, ranks_per_node=settings.ranks_per_node, link=settings.parsed(),
        limit_s=60 * settings.limit_minutes, extra=extra, fail_above=above,
        seeds=range(first, first + settings.seeds) if settings.seeds > 1 else (),
        command=shlex.join(["thinwire", "compare", *argv]),
    ))  # fmt: skip


def check_flags(settings: Compare, methods: Sequence[str], extra: Sequence[str]) -> int:
    """Refuse now what ``thinwire train`` would refuse in the first run, and what a comparison sets itself.

    Returns:
        the first seed.
    """
    from thinwire.lab.compare import Entry
    from thinwire.train.config import from_arguments

    entries = [Entry.parse(method) for method in methods]
    for source, words in (("after --", extra), *((f"of {entry.method}", entry.flags) for entry in entries)):
        for word in words:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in OURS:
                raise ThinwireError(f"{flag} {source} is the comparison's own: {OURS[flag]}")
            if flag == "--seed" and words is not extra:
                raise ThinwireError(f"--seed {source}: every method has the same seeds; write --seed after --")
    common = ["--preset", settings.preset, "--steps", str(settings.steps)]
    for entry in entries:
        from_arguments([*common, "--method", entry.method, *entry.arguments(extra)]).check()
    return from_arguments([*common, *extra]).seed


def delayed(cluster: Cluster) -> str:
    """Say what delayed the packets; of our own forwarder, also what became of them and whether it kept up."""
    counts = cluster.forwarded()
    if counts is None:
        return "delayed by the kernel (netem)"
    return (
        "delayed by a forwarder, as this kernel has no netem: {packets:,}, of which {lost:,} were lost, {overtook:,} "
        "overtook, {queue_full:,} found the receiver's queue full and {no_room:,} the path; {missed:,} it did not see; "
        "{late:,} left over 1 ms late, at most {latest_ms:.1f} ms; processor {cpu_s:.1f} s"
    ).format(**counts)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words at the first ``--``."""
    words = list(argv)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def parse(kind: type[Settings], argv: list[str], program: str) -> Settings:
    return tyro.cli(kind, args=argv, prog=program, config=(tyro.conf.FlagConversionOff,))


def method_names(text: str) -> list[str]:
    """``"dense,int8(group=64, error_feedback=True)"`` -> its methods: commas within parentheses do not separate."""
    names, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            names.append("")
        else:
            names[-1] += letter
    stripped = [name.strip() for name in names if name.strip()]
    if not stripped:
        raise ThinwireError("no methods to compare: write for example --methods dense,bf16,int8")
    return stripped
