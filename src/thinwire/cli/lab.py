"""``thinwire lab run``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.base.errors import ThinwireError
from thinwire.base.options import read_options
from thinwire.base.terminal import counted, note
from thinwire.lab.cluster import Cluster
from thinwire.lab.link import Network
from thinwire.lab.run import launch, open_cluster, say


@dataclass
class LabRun(Network):
    """Run COMMAND, written for torchrun, once per rank on emulated nodes of this machine, each with a slow link.

    It gets torchrun's environment variables, and gloo uses the slow link. Output of ranks other than 0 begins with
    [rank k]. If a rank fails, all are ended, and its exit status is returned. At the end it prints the seconds, and the
    bytes of each node as the kernel counts them. When the command ends, the emulated network is gone.

    $ thinwire lab run --nodes 2 --link 200mbit -- python train.py
    $ thinwire lab run --delay 30ms --jitter 5ms --loss 1% --reorder 1% -- thinwire train --method bf16 --out runs/b
    """


def lab_main(argv: list[str]) -> int:
    """Run ``thinwire lab run ... -- COMMAND``. Return the exit status."""
    if not argv:
        raise ThinwireError("write 'run' after 'thinwire lab': thinwire lab run -- COMMAND (thinwire lab run --help)")
    word, *arguments = argv
    if word in ("-h", "--help"):
        arguments = argv
    elif word != "run":
        raise ThinwireError(f"unknown word '{word}' after 'thinwire lab'; there is: run (thinwire lab run --help)")
    options, command = split(arguments)
    settings = read_options(LabRun, options, "thinwire lab run", after="-- COMMAND")
    note(f"lab: setting up {settings.nodes} nodes")
    with open_cluster(settings.nodes, settings.ranks_per_node, settings.parse_link()) as cluster:
        outcome = launch(cluster, command)
        if outcome.failed_rank is not None:
            status = f"exit status {outcome.returncode}"
            say(f"thinwire: rank {outcome.failed_rank} failed with {status}; all ranks were ended")
        link = ", ".join(filter(None, (cluster.link.text, cluster.link.distance)))
        ranks = counted(cluster.ranks_per_node, "rank")
        say(f"lab: {outcome.seconds:.1f} s on {cluster.nodes} nodes of {ranks}, link {link}")
        for node, traffic in enumerate(outcome.traffic or []):
            say(f"lab: node {node} sent {traffic.tx:,} B, received {traffic.rx:,} B")
        if cluster.delayed_by is not None:
            say(f"lab: packets {delayed(cluster)}")
    return outcome.returncode


def delayed(cluster: Cluster) -> str:
    """Say what delayed the packets, with the forwarder's counts if there is one."""
    counts = cluster.forwarded()
    if counts is None:
        return "delayed by the kernel (netem)"
    return (
        "delayed by a forwarder, as this kernel has no netem: {packets:,}, of which {lost:,} were lost, {overtook:,} "
        "overtook, {queue_full:,} found the receiver's queue full and {no_room:,} the path; {missed:,} it did not see; "
        "{late:,} left over 1 ms late, at most {latest_ms:.1f} ms; processor {cpu_s:.1f} s"
    ).format(**counts)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words at the first ``--``."""
    words = list(argv)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]
