"""A link: its rate (``200mbit``, ``1.5gbit``, ``unlimited``), its frames, and the queue that makes a veth behave so."""

from __future__ import annotations

import re
from dataclasses import dataclass

from thinwire.errors import ThinwireError

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
SLOWEST, FASTEST = 64e3, 40e9  # bit/s
SMALLEST, LARGEST = 576, 9000  # bytes


@dataclass(frozen=True)
class Link:
    """What each node's network interface carries, in each direction.

    Attributes:
        text: as the user wrote it.
        rate: bits per second, counted as the kernel counts them: with the 14-byte Ethernet header, without preamble
            and checksum. None: no limit.
        loopback: do not make a network at all; all nodes share 127.0.0.1.
        mtu: bytes of a full frame without its Ethernet header. Larger: fewer frames; each costs processor time.
    """

    text: str
    rate: float | None
    loopback: bool = False
    mtu: int = 1500

    @classmethod
    def parse(cls, text: str, mtu: int = 1500) -> Link:
        """``"200mbit"`` (also kbit, gbit, and decimals), ``"unlimited"`` or ``"loopback"``."""
        word = text.strip().lower()
        if not SMALLEST <= mtu <= LARGEST:
            raise ThinwireError(f"an MTU of {mtu} bytes is not to be had: choose {SMALLEST} to {LARGEST}")
        if word == "loopback" and mtu != cls.mtu:
            raise ThinwireError("an MTU is a link's: on loopback leave it out")
        if word in ("unlimited", "loopback"):
            return cls(word, None, word == "loopback", mtu)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s|ps)?", word)
        if match is None:
            raise ThinwireError(f"cannot read the link rate '{text}': write 200mbit, 1gbit, 'unlimited' or 'loopback'")
        rate = float(match[1]) * UNITS[match[2]]
        if not SLOWEST <= rate <= FASTEST:
            raise ThinwireError(f"a link of {text} cannot be emulated: choose 64kbit to 40gbit, or 'unlimited'")
        return cls(match[1] + match[2], rate, mtu=mtu)

    def tbf(self) -> str:
        """The ``tc`` arguments of a token bucket with this rate.

        burst: at least one 64 KiB super-packet, so that none is cut up in the queue, and 1 ms of the rate, so that a
        late timer loses nothing. limit: 25 ms of queue, deep enough for TCP to keep the link busy after a drop, short
        enough that small messages are not held up behind large ones for longer than on a real switch.
        """
        assert self.rate is not None
        burst = max(66_000, int(self.rate / 8 * 0.001))
        limit = max(4 * burst, int(self.rate / 8 * 0.025))
        return f"tbf rate {int(self.rate)}bit burst {burst} limit {limit}"
