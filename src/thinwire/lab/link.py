"""The link of a node: its rate (``200mbit``, ``1.5gbit``, ``unlimited``), its frames, their delay and loss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from thinwire.base.errors import ThinwireError, refuse_any

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 64e3, 40e9  # bit/s
SMALLEST, LARGEST = 576, 9000  # bytes
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
MAX_DELAY = 10.0  # s: beyond it no handshake succeeds
MAX_LOSS = 0.5  # share of the packets: beyond it hardly any connection succeeds
AT_ONCE, AT_ONCE_S = 1 << 20, 0.005  # bytes and seconds by which a node may exceed its rate: more than its burst
UNLIMITED = 1e9  # bit/s: the rate from which ``room`` is computed on a distant link without a rate


@dataclass(frozen=True)
class Link:
    """The capacity of each node's network interface, in each direction.

    Attributes:
        text: as the user wrote it.
        rate: bits per second, with the 14-byte Ethernet header, without preamble and checksum. None: no limit.
        loopback: make no network; all nodes share 127.0.0.1.
        mtu: bytes of a full frame without its Ethernet header. Larger: fewer frames, less processor time.
        delay: seconds from one node to another, one way, beyond what the rate takes.
        jitter: seconds. Each packet's delay is drawn uniformly from ``delay - jitter`` to ``delay + jitter``, so
            packets that follow each other closely arrive out of order.
        loss: share of the packets that never arrive.
        reorder: share of the packets that are not delayed, and so overtake the others.
    """

    text: str
    rate: float | None
    loopback: bool = False
    mtu: int = 1500
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    reorder: float = 0.0

    @classmethod
    def parse(
        cls, text: str, mtu: int = 1500, delay: str = "0ms", jitter: str = "0ms", loss: str = "0%", reorder: str = "0%"
    ) -> Link:
        """Read ``"200mbit"`` (also kbit, gbit, decimals), ``"unlimited"``, ``"loopback"``; ``"30ms"``; ``"1%"``."""
        word, rate = text.strip().lower(), None
        if word not in ("unlimited", "loopback"):
            word, rate = bit_rate(text, "200mbit, 1gbit, unlimited or loopback")
            if not SLOWEST <= rate <= FASTEST:
                raise ThinwireError(f"a link of {text} cannot be emulated: choose 64kbit to 40gbit, or 'unlimited'")
        link = cls(
            word, rate, word == "loopback", mtu, duration(delay, "a link's delay"), duration(jitter, "a link's jitter"),
            share(loss, "a link's loss"), share(reorder, "a link's reorder"),
        )  # fmt: skip
        refuse_any({
            f"an MTU of {mtu} bytes is not possible: choose {SMALLEST} to {LARGEST}": not SMALLEST <= mtu <= LARGEST,
            "leave MTU, delay, jitter and loss out on loopback": link.loopback and (mtu != cls.mtu or link.distant),
            f"a delay of {delay} is too long: choose at most {MAX_DELAY:g}s": link.delay > MAX_DELAY,
            f"a jitter of {jitter} is above the delay, {delay}: choose at most the delay": link.jitter > link.delay,
            f"a loss of {loss} leaves no connection: choose at most {MAX_LOSS:.0%}": link.loss > MAX_LOSS,
            f"reorder {reorder} without a delay changes nothing: choose a delay too": link.reorder and not link.delay,
        })  # fmt: skip
        return link

    @property
    def distant(self) -> bool:
        """Whether packets are delayed or lost on their way."""
        return bool(self.delay or self.jitter or self.loss or self.reorder)

    @property
    def distance(self) -> str:
        """The delay and loss as text: ``delay 30ms ± 5ms, loss 1%``; "" for none."""
        delay = f"delay {1000 * self.delay:g}ms" + (f" ± {1000 * self.jitter:g}ms" if self.jitter else "")
        loss = f"loss {100 * self.loss:g}%" if self.loss else ""
        reorder = f"reorder {100 * self.reorder:g}%" if self.reorder else ""
        return ", ".join(filter(None, (delay if self.delay else "", loss, reorder)))

    def tbf(self) -> str:
        """Return the ``tc`` arguments of a token bucket with this rate.

        burst: at least a 64 KiB super-packet, so that the queue cuts none up, and 1 ms of the rate, so that a late
        timer loses nothing. limit: 25 ms of queue: TCP keeps the link busy after a drop, and small messages wait behind
        large ones no longer than on a real switch.
        """
        assert self.rate is not None
        burst = max(66_000, int(self.rate / 8 * 0.001))
        limit = max(4 * burst, int(self.rate / 8 * 0.025))
        return f"tbf rate {int(self.rate)}bit burst {burst} limit {limit}"

    def room(self, nodes: int) -> int:
        """Return the bytes that may be on their way to one node: the peers' traffic during a delay, and bursts."""
        return nodes * (int((self.rate or UNLIMITED) / 8 * (self.delay + self.jitter + AT_ONCE_S)) + AT_ONCE)

    def netem(self, nodes: int) -> str:
        """Return the ``tc`` arguments of the kernel's delay and loss. The limit counts packets of any size."""
        delay = f" delay {self.delay * 1e6:.0f}us {self.jitter * 1e6:.0f}us" if self.delay else ""
        loss = f" loss {100 * self.loss:g}%" if self.loss else ""
        reorder = f" reorder {100 * self.reorder:g}%" if self.reorder else ""
        return f"netem limit {self.room(nodes) // 66}{delay}{loss}{reorder}"


@dataclass
class Network:
    """The settings of an emulated network on the command line."""

    nodes: int = 2
    """Emulated nodes, each with a link of its own."""
    ranks_per_node: int = 1
    """Ranks on each node; they share its link, and reach each other without it."""
    link: str = "200mbit"
    """Rate of each node's link in each direction: 200mbit, 1gbit, unlimited; or loopback: do not emulate a network."""
    mtu: int = 1500
    """Largest packet, 576 to 9000 bytes. Larger: the emulation takes less CPU time (see docs/lab.md)."""
    delay: str = "0ms"
    """Delay of a packet from one node to another, one way: 30ms, 200us, 0.2s. An answer takes twice as long."""
    jitter: str = "0ms"
    """Each packet's delay is drawn evenly from --delay ± this. Packets then overtake each other."""
    loss: str = "0%"
    """Share of the packets that are lost: 1% or 0.01. TCP sends them again."""
    reorder: str = "0%"
    """Share of the packets that are not delayed and so overtake the others: 1% or 0.01."""

    def parse_link(self) -> Link:
        return Link.parse(self.link, self.mtu, self.delay, self.jitter, self.loss, self.reorder)


def bit_rate(text: str, examples: str) -> tuple[str, float]:
    """Read ``"10 Gbit/s"`` as ("10gbit", 1e10), bits per second. ``examples``: of what to write, for the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s|ps)?", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ThinwireError(f"cannot read the link rate '{text}': write {examples}")
    return match[1] + match[2], float(match[1]) * UNITS[match[2]]


def duration(text: str, label: str) -> float:
    """Read ``"30ms"`` (also us, s, decimals) as seconds. ``label``: its name in the error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    if match is None:
        raise ThinwireError(f"{label} is a duration, as 30ms, 200us or 0.2s, got '{text}'")
    return float(match[1]) * SECONDS[match[2]]


def share(text: str, label: str) -> float:
    """Read ``"1%"`` or ``"0.01"`` as 0.01. ``label``: its name in the error."""
    number, _, suffix = text.strip().partition("%")
    try:
        value = float(number) / (100 if "%" in text else 1)
    except ValueError:
        value = math.nan
    if suffix or not 0 <= value < 1:
        raise ThinwireError(f"{label} is a share, as 1% or 0.01, got '{text}'")
    return value
