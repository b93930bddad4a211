"""Links with delay, jitter, loss and reordering: what arrives, when, and that training on them changes no bit.

By netem where the kernel has it, else by the lab's own forwarder; ``test_who_delays`` says which.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranks
from breadth import ALL
from patience import PATIENCE
from test_lab import SOURCE, gone, interfaces, stream
from thinwire.base.errors import ThinwireError
from thinwire.cli.compare import compare_main
from thinwire.cli.lab import delayed, lab_main
from thinwire.lab.cluster import Cluster, NoNamespaces
from thinwire.lab.link import Link, duration, share
from thinwire.lab.run import launch
from thinwire.methods import resolve

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "proofs"))

import digests
import lossy

pytestmark = pytest.mark.usefixtures("namespaces")
FAR = Link.parse("200mbit", 1500, "1ms", "0.5ms", "1%", "1%")


def test_who_delays(record_property: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(2, 1, "200mbit") as near, Cluster(2, 1, FAR) as far:
        assert near.delayed_by is None and near.forwarded() is None
        assert far.delayed_by in ("netem", "forwarder")
        with capsys.disabled():
            print(f"\ndistant links: {delayed(far)}")


@pytest.mark.parametrize(
    "text, seconds", [("30ms", 0.03), ("200us", 2e-4), (" 0.2S ", 0.2), ("0ms", 0.0), ("1.5 ms", 0.0015)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text, "it") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "30", "ms", "-1ms", "1e3ms", "nan s", "3 minutes"])
def test_bad_durations_are_named(text: str) -> None:
    with pytest.raises(ThinwireError, match="it is a duration"):
        duration(text, "it")


def test_shares() -> None:
    assert (share("1%", "it"), share("0.01", "it"), share("0%", "it"), share(" 12.5% ", "it")) == (0.01, 0.01, 0, 0.125)
    for text in ("", "1", "100%", "-1%", "nan", "1%%", "x"):
        with pytest.raises(ThinwireError, match="it is a share"):
            share(text, "it")


@pytest.mark.parametrize(
    "link, says",
    [
        ({"delay": "11s"}, "at most 10s"), ({"delay": "5ms", "jitter": "6ms"}, "at most the delay"),
        ({"loss": "60%"}, "at most 50%"), ({"reorder": "1%"}, "choose a delay"),
        ({"jitter": "1ms"}, "at most the delay"), ({"text": "loopback", "loss": "1%"}, "on loopback"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(link: dict[str, str], says: str) -> None:
    with pytest.raises(ThinwireError, match=says) as seen:
        Link.parse(**{"text": "200mbit", **link})
    assert "\n" not in str(seen.value)


@pytest.mark.parametrize("main, before, after", [(lab_main, ["run"], ["true"]), (compare_main, [], [])])
def test_both_commands_take_them(main: object, before: list[str], after: list[str]) -> None:
    for flag, value in (("--delay", "30"), ("--jitter", "1ms"), ("--loss", "2"), ("--reorder", "1%")):
        with pytest.raises(ThinwireError, match=flag[2:]):
            main([*before, flag, value, "--", *after])


def test_what_netem_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay and loss come first, then the receiver's rate, whose queue stays as it is without them."""
    link = Link.parse("200mbit", 1500, "30ms", "5ms", "1%", "0.5%")
    assert link.netem(2).split()[3:] == ["delay", "30000us", "5000us", "loss", "1%", "reorder", "0.5%"]
    assert Link.parse("unlimited", loss="2%").netem(2).split()[3:] == ["loss", "2%"]
    # All that a node can have sent within the longest delay has its place, as packets of any size.
    assert int(link.netem(2).split()[2]) * 66 > 200e6 / 8 * 0.035
    calls: list[list[str]] = []
    monkeypatch.setattr(Cluster, "_knows_netem", staticmethod(lambda join: True))
    monkeypatch.setattr(Cluster, "_call", staticmethod(lambda enter, command, text="": calls.append(command)))
    with Cluster(2, 1, link) as cluster:
        assert cluster.delayed_by == "netem" and cluster.forwarded() is None
    of_port = [" ".join(call) for call in calls if "port1" in call]
    assert len(of_port) == 2
    assert of_port[0].startswith("tc qdisc add dev port1 root handle 1: netem limit")
    assert of_port[1].startswith(f"tc qdisc add dev port1 parent 1:1 handle 2: {link.tbf()}")
    assert not any("checksums" in call for call in calls)


ECHO = """
import socket
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
door.bind(("", 5001))
print("up", flush=True)
while True:
    door.sendto(*door.recvfrom(2000))
"""
PINGS = """
import json, socket, struct, sys, threading, time
count, gap = int(sys.argv[1]), float(sys.argv[2])
door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
door.connect(("10.0.0.1", 5001))
door.settimeout(1)
answers = []
def take():
    while len(answers) < count:
        try:
            number, left = struct.unpack("qd", door.recv(2000))
        except TimeoutError:
            break
        answers.append((number, time.monotonic() - left))
taker = threading.Thread(target=take)
taker.start()
for number in range(count):
    door.send(struct.pack("qd", number, time.monotonic()))
    time.sleep(gap)
taker.join()
print(json.dumps(answers))
"""


def pings(cluster: Cluster, count: int, gap: float) -> tuple[list[int], list[float]]:
    """From node 1 to node 0 and back: the numbers of those that came back, as they came, and their seconds, sorted."""
    echo = cluster.popen(0, [sys.executable, "-c", ECHO], stdout=subprocess.PIPE)
    with echo.stdout:
        echo.stdout.readline()
        pinger = cluster.popen(1, [sys.executable, "-c", PINGS, str(count), str(gap)], stdout=subprocess.PIPE)
        with pinger.stdout:
            answers = json.loads(pinger.stdout.read())
    return [number for number, _ in answers], sorted(seconds for _, seconds in answers)


def overtaken(numbers: list[int]) -> int:
    """How many came after one that had left later."""
    last, count = -1, 0
    for number in numbers:
        count += number < last
        last = max(last, number)
    return count


def test_an_answer_takes_twice_the_delay() -> None:
    with Cluster(2, 1, Link.parse("200mbit", delay="20ms")) as cluster:
        numbers, seconds = pings(cluster, 200, 0.002)
    assert numbers == list(range(200))  # nothing is lost, nothing overtakes
    assert seconds[0] >= 0.040
    assert seconds[len(seconds) // 2] < 0.040 + 0.010 * PATIENCE


def test_jitter_spreads_the_delay_evenly() -> None:
    with Cluster(2, 1, Link.parse("200mbit", delay="20ms", jitter="10ms")) as cluster:
        numbers, seconds = pings(cluster, 500, 0.002)
    assert sorted(numbers) == list(range(500)) and overtaken(numbers) > 100
    assert 0.020 <= seconds[0] < 0.030  # the least of 500: 20 ms to 60 ms, and most about 40
    # One of two, both even: within 5 ms of its middle, 40 ms, lie 7/16.
    assert abs(sum(0.035 <= value < 0.045 for value in seconds) / 500 - 7 / 16) < 0.2


def test_what_is_lost_and_what_overtakes() -> None:
    """Of 2000, 10% are lost on each of two ways, so that 1620 come back, give or take 18 (one sigma)."""
    with Cluster(2, 1, Link.parse("200mbit", delay="10ms", loss="10%", reorder="5%")) as cluster:
        numbers, seconds = pings(cluster, 2000, 0.0005)
        counts = cluster.forwarded()
    assert abs(len(numbers) - 2000 * 0.81) < 5 * 18
    early = sum(value < 0.0199 for value in seconds) / len(seconds)
    assert abs(early - (1 - 0.95**2)) < 5 * 0.0075  # overtook on one of the two ways
    assert overtaken(numbers) > 100
    if counts is not None:
        assert abs(counts["packets"] - 2000 * 1.9) < 5 * 14
        assert abs(counts["lost"] / counts["packets"] - 0.1) < 5 * 0.005
        assert not counts["no_room"] and not counts["missed"] and not counts["queue_full"]


def test_a_distant_link_has_no_more_than_its_rate() -> None:
    """The counters say what was sent and what arrived: all but what was lost."""
    with Cluster(2, 1, Link.parse("50mbit", delay="5ms", loss="0.2%")) as cluster:
        before = cluster.counters()
        seconds, repeated = stream(cluster, 2_000_000)
        receiver, sender = (b - a for a, b in zip(before, cluster.counters(), strict=True))
    assert repeated > 2_000_000  # some of 1400 packets were lost, so that TCP sent again
    assert 2_000_000 < receiver.rx < sender.tx < 1.03 * 50e6 / 8 * seconds + 66_000
    assert receiver.rx > 0.98 * sender.tx


SERVE_TWO = """
import socket
server = socket.create_server(("", 5000))
print("up", flush=True)
for peer in [server.accept()[0] for _ in range(2)]:
    peer.send(b"x")
"""
REACH = """
import socket, sys
assert socket.create_connection((sys.argv[1], 5000)).recv(1) == b"x"
"""


def test_all_nodes_reach_each_other() -> None:
    with Cluster(3, 1, Link.parse("unlimited", delay="3ms")) as cluster:
        for node in range(3):
            server = cluster.popen(node, [sys.executable, "-c", SERVE_TWO], stdout=subprocess.PIPE)
            with server.stdout:
                server.stdout.readline()
                reach = [sys.executable, "-c", REACH, cluster.address(node)]
                peers = [cluster.popen(other, reach) for other in range(3) if other != node]
                assert [peer.wait(60 * PATIENCE) for peer in peers] == [0, 0]


FLOOD = """
import socket
door = socket.socket(type=socket.SOCK_DGRAM)
for _ in range(200):
    door.sendto(bytes(1000), ("10.0.0.1", 9))
"""


def test_a_full_path_loses_what_comes_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is sent, no more than its share waits in memory."""
    monkeypatch.setattr(Link, "room", lambda self, nodes: 20_000)
    with Cluster(2, 1, Link.parse("unlimited", delay="5s")) as cluster:
        if cluster.delayed_by == "netem":
            pytest.skip("the kernel delays packets itself here (netem), without the forwarder")
        assert cluster.popen(1, [sys.executable, "-c", FLOOD]).wait() == 0
        deadline = time.monotonic() + 60 * PATIENCE
        while cluster.forwarded()["packets"] < 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        counts = cluster.forwarded()
    assert counts["packets"] - counts["no_room"] == 20_000 // 1042


def test_a_forwarder_that_ends_ends_the_run(tmp_path: Path) -> None:
    with Cluster(2, 1, FAR) as cluster:
        if cluster.delayed_by == "netem":
            pytest.skip("the kernel delays packets itself here (netem), without the forwarder")
        os.killpg(cluster._forwarder.pid, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ThinwireError, match="forwards the emulated network's packets has ended"):
            launch(cluster, ["sleep", "600"], log=tmp_path / "log")
        assert time.monotonic() - start < 60 * PATIENCE
        with pytest.raises(ThinwireError, match="has ended"):
            cluster.forwarded()


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_nothing_is_left_after_a_signal(number: int, status: int) -> None:
    """Nor the forwarder, which is known by a delay that nobody else has."""
    delay, host = 10_000 + os.getpid() % 80_000, interfaces()
    mark = f'"delay": {Link.parse("200mbit", delay=f"{delay}us").delay}'
    run = ["thinwire", "lab", "run", "--delay", f"{delay}us", "--", "sh", "-c", "echo up; sleep 600"]
    with subprocess.Popen(
        [sys.executable, "-m", *run],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": SOURCE},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as lab:  # fmt: skip
        assert lab.stdout.readline()
        forwarders = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and mark in words(pid)]
        lab.send_signal(number)
        assert lab.wait(60 * PATIENCE) == status
    with Cluster(1, 1, FAR) as cluster:
        assert bool(forwarders) == (cluster.delayed_by == "forwarder")
    assert gone(mark) and interfaces() == host


def words(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_an_ordinary_user_gets_delays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.lab.cluster.os.geteuid", lambda: 1000)
    try:
        with Cluster(2, 1, Link.parse("100mbit", delay="5ms")) as cluster:
            _, seconds = pings(cluster, 20, 0.001)
    except NoNamespaces as error:
        pytest.skip(f"needs user namespaces: {error}")
    assert len(seconds) == 20 and seconds[0] >= 0.010


CASES = [("int8(smallest=0)", "ddp"), ("sdp4bit(weight_group=64, smallest=0)", "fsdp2")]
if ALL:
    methods = lossy.all_methods()
    CASES = [(method, engine) for engine in ("ddp", "fsdp2") for method in methods if engine in resolve(method).engines]


def played(rank: int, world: int) -> dict[str, str]:
    found = {}
    for method, engine in CASES:
        (seen,) = digests.play(rank, world, [engine], [method]).values()
        found[f"{method} {engine}"] = str(seen)
    return found


def test_a_lossy_link_changes_no_bit() -> None:
    """20 steps there and on the loopback; all methods under THINWIRE_TESTS=all, and by ``proofs/lossy.py``."""
    quiet = ranks.run(played, 2)[0]
    far, told = lossy.rows(FAR, CASES, False, (1200 if ALL else 240) * PATIENCE)
    assert not any("refused" in seen for seen in quiet.values()), quiet
    assert {case: digest for case, (_, digest) in far.items()} == quiet, told
    assert "differ" not in told and "ended" not in told
