"""Run inside a node's namespace: turn segmentation offload off, so that every frame is counted with its own header.

A veth with the offload hands whole 64 KiB super-packets over, and its counters see one header for all of them. With a
second word, ``checksums``, the kernel writes TCP's checksums too: a forwarder in user space hands on what it reads.
Called as a script by ``cluster.py`` (ethtool is not on every machine); the numbers are from linux/ethtool.h.
"""

import array
import fcntl
import socket
import struct
import sys

SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO = 0x17, 0x1F, 0x24

if __name__ == "__main__":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as door:
        for command in (ETHTOOL_STSO, ETHTOOL_SGSO, *([ETHTOOL_STXCSUM] if sys.argv[2:] == ["checksums"] else [])):
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", sys.argv[1].encode(), value.buffer_info()[0])
            fcntl.ioctl(door.fileno(), SIOCETHTOOL, request)
