"""The emulated cluster: rate, counters, framing, and that nothing is ever left behind.

A link that is faster than it says is an error on any machine. How close to its rate it gets depends on what else runs:
``benchmarks/proofs/quiet.py`` judges that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import thinwire
from patience import PATIENCE
from thinwire.base import processes
from thinwire.base.errors import ThinwireError
from thinwire.base.processes import free_port, interface_bytes
from thinwire.cli.lab import lab_main, split
from thinwire.lab import framing
from thinwire.lab.cluster import Cluster, NoNamespaces
from thinwire.lab.entries import method_names
from thinwire.lab.link import Link
from thinwire.lab.run import launch

pytestmark = pytest.mark.usefixtures("namespaces")
SOURCE = str(Path(thinwire.__file__).parents[1])


def interfaces() -> str:
    return Path("/proc/net/dev").read_text().count(":") * "|"


def carrying(mark: str) -> list[int]:
    """Processes of this machine with ``mark`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def gone(mark: str) -> bool:
    deadline = time.monotonic() + 60 * PATIENCE
    while carrying(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not carrying(mark)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def mark_of(request: pytest.FixtureRequest) -> str:
    return f"mark-{os.getpid()}-{request.node.name}"


SERVER = """
import socket
server = socket.create_server(("", 5000))
print("up", flush=True)
peer, _ = server.accept()
while peer.recv(1 << 20):
    pass
peer.send(b"x")
"""
CLIENT = """
import socket, struct, sys, time
left, block = int(sys.argv[1]), bytes(1 << 16)
peer = socket.create_connection(("10.0.0.1", 5000))
start = time.monotonic()
while left:
    left -= peer.send(block[:left])
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
seconds = time.monotonic() - start
info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)  # struct tcp_info of linux/tcp.h
print(seconds, *struct.unpack_from("Q", info, 200))  # tcpi_bytes_sent
"""


def stream(cluster: Cluster, payload: int) -> tuple[float, int]:
    """Send ``payload`` bytes by TCP from node 1 to node 0; seconds, and the bytes that TCP sent, repeats included."""
    server = cluster.popen(0, [sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
    with server.stdout:
        assert server.stdout.readline() == b"up\n"
        client = cluster.popen(1, [sys.executable, "-c", CLIENT, str(payload)], stdout=subprocess.PIPE)
        with client.stdout:
            seconds, sent = client.stdout.read().split()
            return float(seconds), int(sent)


def rate_of(cluster: Cluster, node: int) -> float:
    """bit/s that the kernel lets this node send."""
    show = cluster.popen(node, ["tc", "-json", "qdisc", "show", "dev", "eth0"], stdout=subprocess.PIPE)
    (queue,) = json.loads(show.communicate()[0])
    return 8 * queue["options"]["rate"]


@pytest.mark.parametrize(
    "text, rate",
    [("200mbit", 200e6), ("1.5Gbit", 1.5e9), ("800kbit", 8e5), (" 25gbit/s ", 25e9), ("unlimited", None)],
)
def test_rates(text: str, rate: float | None) -> None:
    assert Link.parse(text).rate == rate


@pytest.mark.parametrize("text", ["", "200", "200furlong", "-1gbit", "0mbit", "1kbit", "100gbit", "gbit", "nan gbit"])
def test_bad_rates_are_named(text: str) -> None:
    with pytest.raises(ThinwireError, match="link"):
        Link.parse(text)


def test_a_port_is_none_that_the_kernel_may_give_away_before_it_is_bound(monkeypatch) -> None:
    with socket.socket() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        client.connect(listener.getsockname())
        assert client.getsockname()[1] not in processes.PORTS  # what the kernel gives by itself
        taken = listener.getsockname()[1]
        monkeypatch.setattr(processes, "PORTS", [taken])
        with pytest.raises(ThinwireError, match=f"no port from {taken} "):
            free_port()


def test_bad_sizes_are_refused() -> None:
    for nodes, ranks in ((0, 1), (251, 1), (2, 0)):
        with pytest.raises(ThinwireError):
            Cluster(nodes, ranks)


@pytest.mark.parametrize("rate, payload", [("200mbit", 20_000_000), ("20mbit", 4_000_000)])
def test_a_stream_gets_the_link_and_no_more(rate: str, payload: int) -> None:
    bits = Link.parse(rate).rate
    with Cluster(2, 1, rate) as cluster:
        assert rate_of(cluster, 0) == rate_of(cluster, 1) == bits
        before = cluster.counters()[1]
        seconds, _ = stream(cluster, payload)
        sent = (cluster.counters()[1] - before).tx
    assert framing.frames(payload) <= sent < 1.03 * bits / 8 * seconds


def test_the_receiving_side_is_limited_too() -> None:
    """Two senders share the one link of the node they send to."""
    with Cluster(3, 1, "100mbit") as cluster:
        server = SERVER.replace("peer, _ = server.accept()\nwhile peer.recv(1 << 20):\n    pass\npeer.send(b\"x\")", """
import threading
def take(peer):
    while peer.recv(1 << 20):
        pass
    peer.send(b"x")
takers = [threading.Thread(target=take, args=(server.accept()[0],)) for _ in range(2)]
[taker.start() for taker in takers]
[taker.join() for taker in takers]
""")
        server_process = cluster.popen(0, [sys.executable, "-c", server], stdout=subprocess.PIPE)
        with server_process.stdout:
            server_process.stdout.readline()
            start = time.monotonic()
            clients = [cluster.popen(node, [sys.executable, "-c", CLIENT, "8000000"]) for node in (1, 2)]
            assert [client.wait() for client in clients] == [0, 0]
            seconds = time.monotonic() - start
    assert 2 * 8_000_000 * 8 / seconds < 1.03 * 100e6


@pytest.mark.parametrize("rate, mtu", [("200mbit", 1500), ("unlimited", 1500), ("200mbit", 9000)])
def test_counters_agree_with_the_framing(rate: str, mtu: int) -> None:
    payload = 20_000_000
    with Cluster(2, 1, Link.parse(rate, mtu)) as cluster:
        before = cluster.counters()
        _, sent = stream(cluster, payload)
        receiver, sender = (b - a for a, b in zip(before, cluster.counters(), strict=True))
    # On a busy machine a queue of the kernel overflows now and then and TCP sends again: `sent` tells, and only what it
    # tells may be on the wire twice.
    # A queue that overflows cuts segments short: at 9000 that can be seen.
    assert 0.99 * framing.frames(payload, mtu) < receiver.rx < 1.001 * sender.tx < 1.011 * framing.frames(sent, mtu)
    assert receiver.tx > 0
    if sent == payload:
        assert receiver.rx > 0.999 * sender.tx
        acknowledgements = payload / framing.segment(mtu) / 2 * framing.HEADERS  # one for two segments
        assert receiver.tx < 2.2 * acknowledgements  # one for each segment from a receiver that lags


GLOO = """
import os, time, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
values = torch.ones(2_500_000)
dist.all_reduce(values)
dist.barrier()
start = time.monotonic()
dist.all_reduce(values)
if dist.get_rank() == 0:
    print("seconds", time.monotonic() - start)
dist.destroy_process_group()
"""


def test_gloo_s_all_reduce_crosses_the_link(tmp_path: Path) -> None:
    """10 MB between two nodes: each sends and receives 10 MB, twice, and no faster than the link."""
    with Cluster(2, 1, "200mbit") as cluster:
        log = tmp_path / "log"
        outcome = launch(cluster, [sys.executable, "-c", GLOO], log=log)
    assert outcome.returncode == 0, log.read_text()
    seconds = float(log.read_text().split("seconds")[1].split()[0])
    assert framing.frames(10_000_000) * 8 / seconds <= 1.05 * 200e6
    assert all(node.tx >= 2 * framing.frames(10_000_000) for node in outcome.traffic)


def test_environment_is_torchruns(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR GLOO_SOCKET_IFNAME OMP_NUM_THREADS"
    with Cluster(2, 2, "unlimited") as cluster:
        log = tmp_path / "log"
        echo = "echo " + " ".join("$" + name for name in names.split()) + "; grep -c eth0 /proc/self/net/dev; pwd"
        assert launch(cluster, ["sh", "-c", echo], log=log).returncode == 0
        assert interface_bytes() is None
    lines = log.read_text().splitlines()
    assert "[rank 3] 3 1 4 2 1 10.0.0.1 eth0 1" in lines
    assert "0 0 4 2 0 10.0.0.1 eth0 1" in lines
    assert "[rank 1] 1" in lines and os.getcwd() in lines


def test_nothing_is_left_after_a_normal_end_or_an_exception(request: pytest.FixtureRequest) -> None:
    mark, host = mark_of(request), interfaces()
    with Cluster(2, 1, "200mbit") as cluster:
        cluster.popen(0, ["sh", "-c", f"sleep 600 & sleep 600; : {mark}"])
        deadline = time.monotonic() + 60 * PATIENCE
        while not carrying(mark) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert carrying(mark)
        assert interfaces() == host
    assert gone(mark) and interfaces() == host
    with pytest.raises(ZeroDivisionError), Cluster(2, 1, "200mbit") as cluster:
        cluster.popen(1, ["sh", "-c", f"trap '' TERM INT; sleep 600; : {mark}"])
        raise ZeroDivisionError
    assert gone(mark) and interfaces() == host


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_nothing_is_left_after_a_signal(request: pytest.FixtureRequest, number: int, status: int) -> None:
    mark, host = mark_of(request), interfaces()
    inside = f"setsid sleep 600 & echo up; sleep 600; : {mark}"
    lab = subprocess.Popen(
        [sys.executable, "-m", "thinwire", "lab", "run", "--nodes", "2", "--", "sh", "-c", inside],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": SOURCE},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )  # fmt: skip
    with lab.stdout:
        assert lab.stdout.readline()
        lab.send_signal(number)
        assert lab.wait(60 * PATIENCE) == status
    assert gone(mark) and interfaces() == host


def test_a_failing_rank_ends_all(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> None:
    mark = mark_of(request)
    start = time.monotonic()
    status = lab_main(["run", "--nodes", "2", "--", "sh", "-c", f"test $RANK = 1 && exit 7; sleep 600; : {mark}"])
    assert status == 7 and time.monotonic() - start < 60 * PATIENCE
    assert "rank 1 failed with exit status 7" in capfd.readouterr().err
    assert gone(mark)


@pytest.mark.parametrize("link", ["200mbit", "loopback"])
def test_a_program_that_is_not_there_is_one_line(link: str) -> None:
    with pytest.raises(ThinwireError, match="cannot run 'pyhton': there is no such program"):
        lab_main(["run", "--link", link, "--", "pyhton", "train.py"])


def test_a_killed_rank_ends_all(request: pytest.FixtureRequest) -> None:
    mark = mark_of(request)
    with Cluster(2, 1, "200mbit") as cluster:
        outcome = launch(cluster, ["sh", "-c", f"test $RANK = 1 && kill -9 $$; sleep 600; : {mark}"])
        assert (outcome.failed_rank, outcome.returncode) == (1, 137)
        assert gone(mark)
        assert launch(cluster, ["true"]).returncode == 0
    with Cluster(2, 1, "loopback") as cluster:
        assert launch(cluster, ["sh", "-c", f"test $RANK = 1 && kill -9 $$; sleep 600; : {mark}"]).returncode == 137
    assert gone(mark)


def test_a_run_beyond_its_limit_is_ended(request: pytest.FixtureRequest) -> None:
    mark = mark_of(request)
    with Cluster(1, 2, "unlimited") as cluster:
        with pytest.raises(ThinwireError, match="longer than its limit"):
            launch(cluster, ["sh", "-c", f"sleep 600; : {mark}"], limit_s=0.5)
        assert gone(mark)


def test_two_labs_at_once_do_not_see_each_other() -> None:
    with Cluster(2, 1, "100mbit") as one, Cluster(2, 1, "400mbit") as other:
        before = one.counters()[1]
        stream(other, 5_000_000)
        seen = one.counters()[1] - before
        assert seen.tx + seen.rx < 1000  # the kernel's own IGMP reports, 54 bytes each, come when they like
        assert (rate_of(one, 1), rate_of(other, 1)) == (100e6, 400e6)
        stream(one, 1_000_000)


def test_loopback_runs_and_counts_nothing(tmp_path: Path) -> None:
    with Cluster(2, 1, "loopback") as cluster:
        log = tmp_path / "log"
        outcome = launch(cluster, ["sh", "-c", "echo $MASTER_ADDR $GLOO_SOCKET_IFNAME"], log=log)
        assert not [pid for pid in carrying("read _") if parent_of(pid) == os.getpid()]
    assert outcome.returncode == 0 and outcome.traffic is None
    assert "127.0.0.1 lo" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_on_loopback_either(number: int, request: pytest.FixtureRequest) -> None:
    """Of what the ranks have started: a shell's children outlive it."""
    mark = mark_of(request)
    program = f'{sys.executable} -c "import time; time.sleep(600)" {mark} & echo up; wait'
    words = ["thinwire", "lab", "run", "--link", "loopback", "--", "sh", "-c", program]
    if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("SIGHUP is ignored here, as nohup lets it be")
    with subprocess.Popen(
        [sys.executable, "-m", *words], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": SOURCE}
    ) as lab:
        assert [lab.stdout.readline(), lab.stdout.readline()]
        lab.send_signal(number)
        assert lab.wait(60 * PATIENCE) == -number
    assert gone(mark)


def test_without_namespaces_it_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("thinwire.lab.cluster.shutil.which", lambda tool: tool if tool == "true" else None)
    with pytest.raises(NoNamespaces, match="missing"), Cluster(2, 1, "200mbit"):
        pass
    assert lab_main(["run", "--", "true"]) == 0
    assert "NO EMULATED NETWORK" in capfd.readouterr().err


def test_command_line_errors() -> None:
    for argv in (["walk"], ["run"], ["run", "--link", "fast", "--", "true"]):
        with pytest.raises(ThinwireError):
            lab_main(argv)
    assert split(["--a", "--", "x", "--", "y"]) == (["--a"], ["x", "--", "y"])
    assert method_names("dense, int8(group=64, feedback='gradients'),bf16") == [
        "dense", "int8(group=64, feedback='gradients')", "bf16",
    ]  # fmt: skip


def test_an_ordinary_user_gets_a_lab_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a user namespace, the way taken when not root."""
    monkeypatch.setattr("thinwire.lab.cluster.os.geteuid", lambda: 1000)
    try:
        with Cluster(2, 1, "100mbit") as cluster:
            seconds, _ = stream(cluster, 5_000_000)
            rate = rate_of(cluster, 1)
    except NoNamespaces as error:
        pytest.skip(f"needs user namespaces: {error}")
    assert rate == 100e6
    assert 5e6 * 8 / seconds < 1.03 * 100e6 * framing.efficiency()
