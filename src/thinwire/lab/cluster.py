"""An emulated cluster: every node a network namespace, all joined by a bridge, each node's link limited both ways.

              switch namespace
        .--------- bridge ---------.
      port0                      port1        tbf on the port: what the node receives
        |                          |
      eth0 (10.0.0.1)            eth0 (10.0.0.2)   tbf on eth0: what the node sends
      node 0                     node 1

A link with delay or loss has the kernel's netem above the tbf of its port. If the kernel has no netem, ``forwarder.py``
takes the bridge's place and does the same.

The lab never touches the host's network and leaves nothing behind. Its namespaces live in a process-id namespace of
their own, whose first process reads a pipe that only we hold. When we end (even by SIGKILL), the pipe closes, that
process ends, and the kernel kills every process of the lab and drops its interfaces. The lab works as root, and as an
ordinary user where user namespaces are allowed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from thinwire.base.errors import ThinwireError
from thinwire.base.processes import Bytes, die_with_parent, free_port, interface_bytes, rank_variables
from thinwire.lab.link import Link

TOOLS = ("unshare", "nsenter", "ip", "tc")
LIMIT_S = 20.0  # for each step of the set-up
INTERFACE = "eth0"
# Every namespace runs these lines. IPv6's neighbour discovery and router solicitations would count as traffic, and the
# host's congestion control would show (BBR paces itself): use cubic if the kernel has it, as most clusters do.
SYSCTLS = """
for f in /proc/sys/net/ipv6/conf/*/disable_ipv6; do echo 1 > $f || true; done
for c in reno cubic; do echo $c > /proc/sys/net/ipv4/tcp_congestion_control || true; done
"""


class NoNamespaces(ThinwireError):
    """This machine, or this user, cannot make network namespaces."""


class Cluster:
    """``nodes`` emulated machines; ``with Cluster(2, 1, "200mbit") as cluster: cluster.popen(0, ["hostname"])``.

    Args:
        nodes: number of nodes, at least 1.
        ranks_per_node: ranks that ``environment`` places on each node.
        link: rate of each node's link, in each direction: "200mbit", "1gbit", "unlimited"; "loopback" for no network
            (all nodes on 127.0.0.1, no limit, no counters); or a ``Link``.

    Raises:
        NoNamespaces: on entry, if namespaces cannot be made.
    """

    def __init__(self, nodes: int = 2, ranks_per_node: int = 1, link: str | Link = "unlimited") -> None:
        if not 1 <= nodes <= 250:
            raise ThinwireError(f"{nodes} nodes cannot be emulated: choose 1 to 250")
        if ranks_per_node < 1:
            raise ThinwireError(f"--ranks-per-node must be 1 or more, got {ranks_per_node}")
        self.nodes, self.ranks_per_node = nodes, ranks_per_node
        self.link = Link.parse(link) if isinstance(link, str) else link
        self._pipes: list[IO[bytes]] = []
        self._enter: list[list[str]] = []
        self._holders: list[int] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._watchers: dict[int, subprocess.Popen[bytes]] = {}
        self._forwarder: subprocess.Popen[bytes] | None = None
        self._port = 29500
        self.new_port()

    @property
    def emulated(self) -> bool:
        """Whether the cluster has a network of its own, as opposed to plain loopback."""
        return not self.link.loopback

    @property
    def delayed_by(self) -> str | None:
        """The source of delay and loss: "netem" (the kernel), "forwarder" (our own process), or None."""
        if not self.link.distant:
            return None
        return "netem" if self._forwarder is None else "forwarder"

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def address(self, node: int) -> str:
        return f"10.0.0.{node + 1}" if self.emulated else "127.0.0.1"

    def __enter__(self) -> Cluster:
        if self.emulated:
            try:
                self._build()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the lab, and so its namespaces and interfaces."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not self.emulated:
                kill_group(process, signal.SIGKILL)
        self.end_watchers(self._processes)  # before a process that is waited for leaves its number to another
        for process in self._processes:
            try:
                process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                kill_group(process, signal.SIGKILL)
                process.wait()
        self._processes.clear()

    def end_watchers(self, processes: Iterable[subprocess.Popen[Any]]) -> None:
        """End what would kill the process groups of ``processes``, which have ended."""
        for process in processes:
            if (watcher := self._watchers.pop(process.pid, None)) is not None:
                with watcher:
                    watcher.kill()

    def popen(self, node: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a node, in its own session. Signal it by ``kill_group``: it may be a child."""
        options = {"stdin": subprocess.DEVNULL, "start_new_session": True} | options
        if self.emulated:
            # Joining a mount namespace changes the directory to its root; env changes it back.
            directory = str(options.pop("cwd", None) or os.getcwd())
            command = [*self._enter[node], "env", f"--chdir={directory}", *command]
        else:
            options["preexec_fn"] = die_with_parent  # a process in a namespace ends with the lab's pipe
        process = subprocess.Popen(command, **options)
        self._processes.append(process)
        if not self.emulated:
            # A shell kills the process and what it has started when the lab ends, even by SIGKILL, and so its pipe.
            watch = ["sh", "-c", 'trap "" HUP INT TERM; read _; kill -s KILL -- "-$1"', "sh", str(process.pid)]
            self._watchers[process.pid] = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)
        return process

    def environment(self, rank: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that torchrun sets for ``rank``, with gloo bound to the node's interface, one thread."""
        local = self.ranks_per_node
        return {
            **(os.environ if base is None else base),
            **rank_variables(rank, self.world_size, rank % local, local, self.address(0), self._port),
            "GROUP_RANK": str(rank // local), "GROUP_WORLD_SIZE": str(self.nodes),
            "GLOO_SOCKET_IFNAME": INTERFACE if self.emulated else "lo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def new_port(self) -> None:
        """Choose the rendezvous port of the next run."""
        self._port = self._port + 1 if self.emulated else free_port()

    def counters(self) -> list[Bytes] | None:
        """Return the bytes that each node's interface has sent and received so far; None on loopback."""
        if not self.emulated:
            return None
        counts = [interface_bytes(INTERFACE, holder) for holder in self._holders]
        return [count for count in counts if count is not None]

    def forwarded(self) -> dict[str, float] | None:
        """Return the forwarder's ``Forwarder.report`` so far; None without a forwarder.

        Raises:
            ThinwireError: the forwarder has ended.
        """
        if self._forwarder is None:
            return None
        assert self._forwarder.stdin and self._forwarder.stdout
        with suppress(BrokenPipeError):
            self._forwarder.stdin.write(b"\n")
        answer = self._forwarder.stdout.readline()
        if not answer:
            self._forwarder.wait(LIMIT_S)
            self.check()
        return json.loads(answer)

    def check(self) -> None:
        """Raise a ``ThinwireError`` if the emulated network has ended, because a run on it would wait forever."""
        if self._forwarder is not None and (status := self._forwarder.poll()) is not None:
            raise ThinwireError(f"the process that forwards the emulated network's packets has ended (status {status})")

    def _build(self) -> None:
        for tool in TOOLS:
            if shutil.which(tool) is None:
                raise NoNamespaces(f"'{tool}' is missing: install iproute2 and util-linux, or use --link loopback")
        join = self._keeper()
        holders = [self._hold(join) for _ in range(self.nodes)]
        self._holders = [pid for pid, _ in holders]
        self._enter = [[join[0], f"--target={pid}", *join[2:]] for pid in self._holders]
        for enter in [join, *self._enter]:
            self._call(enter, ["sh", "-c", SYSCTLS])
        netem = self.link.distant and self._knows_netem(join)
        forwards = self.link.distant and not netem
        if not forwards:
            self._ip(join, ["link add switch type bridge", "link set switch up"])
        rate = [self.link.tbf()] if self.link.rate is not None else []
        queues = [self.link.netem(self.nodes), *rate] if netem else rate
        mtu = self.link.mtu
        for node, (enter, (_, inner_pid)) in enumerate(zip(self._enter, holders, strict=True)):
            self._ip(join, [
                f"link add port{node} mtu {mtu} type veth "
                f"peer name {INTERFACE} address {ethernet(node)} mtu {mtu} netns {inner_pid}",
                *([] if forwards else [f"link set port{node} master switch"]),
                f"link set port{node} up",
            ])  # fmt: skip
            self._ip(enter, [
                "link set lo up",
                f"addr add {self.address(node)}/24 dev {INTERFACE}",
                f"link set {INTERFACE} up",
                # Fixed addresses on a distant link: an ARP request would be lost like any other packet.
                *(f"neigh add {self.address(far)} lladdr {ethernet(far)} dev {INTERFACE} nud permanent"
                  for far in range(self.nodes if self.link.distant else 0) if far != node),
            ])  # fmt: skip
            script = Path(__file__).with_name("_no_offload.py")
            checksums = ["checksums"] if forwards else []
            self._call(enter, [sys.executable, "-I", "-S", str(script), INTERFACE, *checksums])
            for queue in rate:
                self._call(enter, f"tc qdisc add dev {INTERFACE} root {queue}".split())
            for position, queue in zip(("root handle 1:", "parent 1:1 handle 2:"), queues, strict=False):
                self._call(join, f"tc qdisc add dev port{node} {position} {queue}".split())
        if forwards:
            self._forwarder = self._forward(join)

    @staticmethod
    def _knows_netem(join: list[str]) -> bool:
        """Tell whether this kernel has netem, by a trial on the switch's loopback, which nothing uses."""
        probe = [*join, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return subprocess.run(probe, capture_output=True, timeout=LIMIT_S).returncode == 0

    def _keeper(self) -> list[str]:
        """Start the lab's first process, which holds the switch. Return the command that joins its namespaces."""
        as_root = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        as_user = [*as_root, "--user", "--map-root-user"]
        line = ""
        for command in ([as_root] if os.geteuid() == 0 else []) + [as_user]:
            process, line = self._spawn(
                [*command, "sh", "-c", "echo up; exec cat > /dev/null"],
                stdin=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            if line == "up":
                user = ["--user", "--preserve-credentials"] if command is as_user else []
                return ["nsenter", f"--target={only_child(process)}", "--mount", "--pid", "--net", *user]
        raise NoNamespaces(f"no network namespaces may be made here ({line}): run as root, or use --link loopback")

    def _hold(self, join: list[str]) -> tuple[int, int]:
        """Start the process that holds a node's namespace. Return its pid outside and inside the lab."""
        process, line = self._spawn(
            [*join, "unshare", "--net", "sh", "-c", "echo $$; exec sleep infinity"],
            stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if not line.isdigit():
            raise NoNamespaces(f"a node's namespace could not be made ({line}): run as root, or use --link loopback")
        self._pipes.pop().close()  # saves a file descriptor per node
        return only_child(process), int(line)

    def _forward(self, join: list[str]) -> subprocess.Popen[bytes]:
        link = self.link
        settings = {
            "ports": {ethernet(node): f"port{node}" for node in range(self.nodes)}, "delay": link.delay,
            "jitter": link.jitter, "loss": link.loss, "reorder": link.reorder, "room": link.room(self.nodes),
            "frame": link.mtu + 14,
        }  # fmt: skip
        script = str(Path(__file__).with_name("forwarder.py"))
        command = [*join, sys.executable, "-I", "-S", script, json.dumps(settings)]
        process, line = self._spawn(command, stdin=subprocess.PIPE)
        if line != "up":
            raise NoNamespaces(f"packets cannot be forwarded here ({line or 'it ended'}): leave out delay and loss")
        return process

    def _spawn(self, command: list[str], **streams: Any) -> tuple[subprocess.Popen[bytes], str]:
        """Start a process of the lab. Return it and the first line that it prints."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, start_new_session=True, **streams)
        self._processes.append(process)
        assert process.stdout
        self._pipes += filter(None, (process.stdin, process.stdout))
        return process, process.stdout.readline().decode(errors="replace").strip()

    def _ip(self, enter: list[str], lines: list[str]) -> None:
        self._call(enter, ["ip", "-batch", "-"], "\n".join(lines))

    @staticmethod
    def _call(enter: list[str], command: list[str], text: str = "") -> None:
        result = subprocess.run([*enter, *command], input=text, capture_output=True, text=True, timeout=LIMIT_S)
        if result.returncode:
            reason = (result.stderr.strip() or f"exit status {result.returncode}").splitlines()[0]
            failure = f"'{command[0]}': {reason}"
            raise NoNamespaces(f"the emulated network could not be made ({failure}): use --link loopback")


def ethernet(node: int) -> str:
    """Return a node's locally administered Ethernet address."""
    return f"02:00:0a:00:00:{node + 1:02x}"


def only_child(process: subprocess.Popen[Any]) -> int:
    """Return the process id, in this namespace, of the one child of ``process``."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(status.read_text().rpartition(")")[2].split()[1]) == process.pid:
                return int(status.parent.name)
    raise NoNamespaces("the lab's first process ended before it could be used: use --link loopback")


def kill_group(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to ``process`` and to its descendants in the same session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
