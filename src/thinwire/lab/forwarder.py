"""Forward frames between the switch's ports with delay, loss and reordering, where the kernel has no netem.

``cluster.py`` runs this script in the switch's namespace, with its settings as one argument of JSON. It reads Ethernet
frames from raw sockets on the ports, draws each frame's fate as netem would (uniform delay, loss, reordering), keeps
the frame in a heap until it is due, and writes it to the receiver's port, whose queue limits the rate. The delay counts
from the kernel's timestamp of the frame, so scheduling delays of this process do not add up. For each line on standard
input it prints its counts as a line of JSON; it ends with its standard input.
"""

import gc
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from contextlib import suppress

ETH_P_ALL = 3
SOL_PACKET, PACKET_STATISTICS, PACKET_IGNORE_OUTGOING = 263, 6, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_TIMESTAMPNS = 32, 33, 35
BUFFER = 1 << 25  # bytes of a port's receive and send buffers
STAMP, STATISTICS = struct.Struct("qq"), struct.Struct("II")
ANCILLARY = socket.CMSG_SPACE(STAMP.size)
BATCH = 64  # frames read from a port before due frames are sent
LATE_S = 0.001
COUNTS = ("packets", "lost", "overtook", "no_room", "missed", "queue_full", "late", "latest_ms")


class Port:
    """The switch's port of one node."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = random.Random(seed).random
        self.waiting = 0  # bytes on their way to this node
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self.socket.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        for forced, asked in ((SO_RCVBUFFORCE, socket.SO_RCVBUF), (SO_SNDBUFFORCE, socket.SO_SNDBUF)):
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, forced, BUFFER)
            except PermissionError:  # an ordinary user's namespace: as much as the host allows
                self.socket.setsockopt(socket.SOL_SOCKET, asked, BUFFER)
        self.socket.bind((name, 0))
        self.socket.setblocking(False)


class Forwarder:
    """The ports and the frames on their way.

    Args:
        ports: each node's interface, by Ethernet address. Frames to other addresses are dropped.
        delay, jitter: seconds, one way. loss, reorder: shares of the frames.
        room: bytes that may be on their way to one node; frames beyond are lost. frame: bytes of the largest frame.
    """

    def __init__(
        self, ports: dict[str, str], delay: float, jitter: float, loss: float, reorder: float, room: int, frame: int
    ) -> None:
        self.delay, self.jitter, self.loss, self.reorder, self.room, self.frame = (
            delay, jitter, loss, reorder, room, frame,
        )  # fmt: skip
        self.ports = [Port(name, seed) for seed, name in enumerate(ports.values())]
        self.behind = {
            bytes.fromhex(address.replace(":", "")): port for address, port in zip(ports, self.ports, strict=True)
        }
        self.flying: list[tuple[float, float, Port, bytes]] = []  # due, number, receiver
        self.counts: dict[str, float] = dict.fromkeys(COUNTS, 0)

    def run(self) -> None:
        """Forward frames until standard input ends."""
        ports = {port.socket.fileno(): port for port in self.ports}
        poll = select.epoll()
        for descriptor in (0, *ports):
            poll.register(descriptor, select.EPOLLIN)
        while True:
            wait = max(0.0, self.flying[0][0] - time.monotonic()) if self.flying else None
            select.select([poll], [], [], wait)  # epoll's own timeout counts whole milliseconds
            for descriptor, _ in poll.poll(0):
                if descriptor in ports:
                    self.receive(ports[descriptor])
                elif not os.read(0, 4096):
                    return
                else:
                    print(json.dumps(self.report()), flush=True)
            self.send_due()

    def receive(self, port: Port) -> None:
        """Read up to ``BATCH`` frames from a port, and draw the fate of each."""
        recvmsg, size = port.socket.recvmsg, self.frame
        monotonic_now, wall_now = time.monotonic(), time.time()
        for _ in range(BATCH):
            try:
                frame, ancillary, _, _ = recvmsg(size, ANCILLARY)
            except BlockingIOError:
                return
            seconds, nanoseconds = STAMP.unpack(ancillary[0][2])
            age = wall_now - (seconds + 1e-9 * nanoseconds)
            arrival = monotonic_now - age if -1 < age < 1 else monotonic_now  # somebody has set the clock
            receiver = self.behind.get(frame[:6])
            if receiver is not None:
                self.send_off(frame, arrival, receiver)

    def send_off(self, frame: bytes, arrival: float, port: Port) -> None:
        draw = port.draw
        self.counts["packets"] += 1
        if self.loss and draw() < self.loss:
            self.counts["lost"] += 1
            return
        if port.waiting + len(frame) > self.room:
            self.counts["no_room"] += 1
            return
        departure = arrival
        if self.reorder and draw() < self.reorder:
            self.counts["overtook"] += 1
        else:
            departure += self.delay
            if self.jitter:
                departure += self.jitter * (2 * draw() - 1)
        port.waiting += len(frame)
        heapq.heappush(self.flying, (departure, self.counts["packets"], port, frame))

    def send_due(self) -> None:
        """Write all frames that are due to the ports of their receivers."""
        flying, clock, pop = self.flying, time.monotonic, heapq.heappop
        while flying:
            lateness = clock() - flying[0][0]
            if lateness < 0:
                return
            _, _, port, frame = pop(flying)
            port.waiting -= len(frame)
            if lateness > LATE_S:
                self.counts["late"] += 1
                self.counts["latest_ms"] = max(self.counts["latest_ms"], 1000 * lateness)
            try:
                port.socket.send(frame)
            except OSError:  # the port's queue is full, or its node has cut the link
                self.counts["queue_full"] += 1

    def report(self) -> dict[str, float]:
        """Return the counts of frames so far, and the processor time in seconds."""
        for port in self.ports:
            counts = port.socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, STATISTICS.size)  # since the last call
            self.counts["missed"] += STATISTICS.unpack(counts)[1]
        used = os.times()
        return self.counts | {"cpu_s": used.user + used.system}


if __name__ == "__main__":
    gc.disable()  # nothing here is cyclic, and a pause would delay frames
    with suppress(PermissionError):
        os.nice(-20)  # the kernel's own netem would come before every process
    try:
        forwarder = Forwarder(**json.loads(sys.argv[1]))
    except OSError as error:
        sys.exit(print(error, flush=True))
    print("up", flush=True)
    forwarder.run()
