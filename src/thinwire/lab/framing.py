"""The bytes of a payload on the wire: TCP/IPv4 over Ethernet, as the kernel counts it. At an MTU of 1500 bytes:

    14 Ethernet + 20 IPv4 + 32 TCP (20, and 12 of the timestamp option) + 1448 payload = 1514 bytes per full frame

The receiver answers two full segments with one acknowledgement of 66 bytes (an empty segment), which travels the other
way and is counted there. Where traffic flows both ways, an acknowledgement often rides on a data frame instead.
Preamble, checksum and gap (24 bytes per frame on a real cable) are seen neither by the counters nor by the rate limit.
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
