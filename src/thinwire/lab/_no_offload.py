"""Turn segmentation offload off in a node's namespace, so that the kernel counts every frame with its own header.

With the offload, a veth hands over 64 KiB super-packets, and its counters see one header for each. The second argument
``checksums`` also makes the kernel write TCP's checksums, because a forwarder in user space does not. ``cluster.py``
calls this script (not every machine has ethtool); the numbers are from linux/ethtool.h.
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
