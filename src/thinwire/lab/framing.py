"""The bytes of a payload on the wire: TCP/IPv4 over Ethernet, as the kernel counts it. At an MTU of 1500 bytes:

    14 Ethernet + 20 IPv4 + 32 TCP (20, and 12 of the timestamp option) + 1448 payload = 1514 bytes per full frame

The receiver acknowledges two full segments with 66 bytes (an empty segment), which count in the other direction. Where
data flows both ways, a data frame often carries the acknowledgement. Neither the counters nor the rate limit see
preamble, checksum and gap (24 bytes per frame on a real cable).
"""

from __future__ import annotations

HEADERS = 14 + 20 + 32


def segment(mtu: int = 1500) -> int:
    """Return the payload bytes of a full frame."""
    return mtu - 20 - 32


def frame(mtu: int = 1500) -> int:
    """Return the bytes of a full frame."""
    return segment(mtu) + HEADERS


def efficiency(mtu: int = 1500) -> float:
    """Return the share of a full link that payload can have: 0.956 at 1500, 0.993 at 9000."""
    return segment(mtu) / frame(mtu)


def frames(payload: float, mtu: int = 1500) -> float:
    """Return the bytes on the wire in the direction of the data."""
    return payload / efficiency(mtu)
