"""A checksum behind every row that one rank sends another: xxh3_64 of its bytes, eight more bytes on the wire.

It finds what a link, a switch or memory changed on the way. Values that the network sums (all-reduce and reduce-scatter
of floats) cannot carry one.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from thinwire.base.extras import load

BYTES = 8


def seal(rows: Tensor) -> Tensor:
    """Copy the bytes of each of ``rows`` (R, n) and append its checksum: (R, m + 8) uint8."""
    size = rows.shape[1] * rows.itemsize
    sealed = torch.empty((len(rows), size + BYTES), dtype=torch.uint8, device=rows.device)
    if not rows.is_meta:
        sealed[:, :size].copy_(rows.contiguous().view(torch.uint8))
        for row in sealed.numpy():
            row[size:] = _digest(row[:size])
    return sealed


def unseal(sealed: Tensor, rows: Tensor) -> int | None:
    """Copy the values in ``sealed`` (R, m + 8) to ``rows`` (R, n); return the first damaged row, or None."""
    if sealed.is_meta:
        return None
    size = sealed.shape[1] - BYTES
    for number, row in enumerate(sealed.numpy()):
        if not np.array_equal(row[size:], _digest(row[:size])):
            return number
    rows.copy_(sealed[:, :size].contiguous().view(rows.dtype).view(rows.shape))
    return None


def _digest(octets: np.ndarray) -> np.ndarray:
    """Compute a checksum (8,) uint8."""
    return np.frombuffer(load("xxhash").xxh3_64_digest(octets), dtype=np.uint8)
