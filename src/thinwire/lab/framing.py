"""From payload to what the wire carries: TCP/IPv4 over Ethernet at an MTU of 1500 bytes, as the kernel counts it.

    14 Ethernet + 20 IPv4 + 32 TCP (20, and 12 of the timestamp option) + 1448 payload = 1514 bytes per full frame

The receiver answers two full segments with one acknowledgement of 66 bytes (an empty segment), which travels the other
way and is counted there. Where traffic flows both ways, an acknowledgement often rides on a data frame instead, so the
true count lies between ``frames`` alone and ``frames`` plus ``acks``. Preamble, checksum and gap (24 bytes per frame on
a real cable) are seen neither by the counters nor by the rate limit.
"""

from __future__ import annotations

MTU = 1500
HEADERS = 14 + 20 + 32
SEGMENT = MTU - 20 - 32
FRAME = SEGMENT + HEADERS
SEGMENTS_PER_ACK = 2
EFFICIENCY = SEGMENT / FRAME  # the share of a full link that payload can have: 0.956


def segments(payload: float) -> float:
    """Full segments that ``payload`` bytes of one stream fill."""
    return payload / SEGMENT


def frames(payload: float) -> float:
    """Bytes on the wire in the direction of the data."""
    return payload + segments(payload) * HEADERS


def acks(payload: float) -> float:
    """Bytes on the wire in the other direction, at most (traffic one way)."""
    return segments(payload) / SEGMENTS_PER_ACK * HEADERS
