"""SDP4Bit (NeurIPS 2024; its Algorithm 2 is missing from the extracted text). "Restated" means the form of the
restatement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from papers.support import Array, Map, flat


def sylvester(size: int) -> Array:
    """The orthonormal Sylvester Hadamard matrix H = H^T = H^-1 (SDP4Bit section 3.2.2)."""
    if size < 1 or size & (size - 1):
        raise ValueError("size must be a power of two")
    h = np.ones((1, 1))
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(float(size))


def hadamard(x: Any, size: int = 32) -> Array:
    """H on each run of `size` neighbours of a flat x whose length `size` divides (SDP4Bit section 3.3: 32 x 32)."""
    values = flat(x)
    if values.size % size:
        raise ValueError("the size of the matrix does not divide the length")
    return (values.reshape(-1, size) @ sylvester(size).T).reshape(-1)


class Int4Group:
    """Symmetric group quantizer, round to nearest (SDP4Bit section 2.2): levels -(2^(bits-1)-1)..2^(bits-1)-1.

    Restated: scale = max|x| of the group; a zero group has scale 1. printed_scale: the paper's s = max(x).
    Halves go to even. scale_type float32 stores the scale as the wire does. The last group may be short.
    """

    def __init__(
        self, bits: int = 4, group: int = 128, printed_scale: bool = False, scale_type: Any = np.float64
    ) -> None:
        self.bits = bits
        self.group = group
        self.levels = 2 ** (bits - 1) - 1
        self.printed_scale = printed_scale
        self.scale_type = scale_type

    def encode(self, x: Any) -> tuple[NDArray[np.int64], Array]:
        """Codes and one scale per group."""
        values = flat(x)
        codes = np.zeros(values.size, dtype=np.int64)
        scales: list[float] = []
        for start in range(0, values.size, self.group):
            part = values[start : start + self.group]
            scale = float(self.scale_type(np.max(part) if self.printed_scale else np.max(np.abs(part))))
            if scale == 0.0:
                scale = 1.0
            scales.append(scale)
            code = np.clip(np.rint(part / scale * self.levels), -self.levels, self.levels)
            codes[start : start + self.group] = code.astype(np.int64)
        return codes, np.array(scales, dtype=np.float64)

    def decode(self, codes: NDArray[np.int64], scales: Array) -> Array:
        """code * scale / levels."""
        out = np.zeros(codes.size)
        for index, start in enumerate(range(0, codes.size, self.group)):
            out[start : start + self.group] = codes[start : start + self.group] * scales[index] / self.levels
        return out

    def __call__(self, x: Any) -> Array:
        """Quantize and dequantize."""
        return self.decode(*self.encode(x))


class WeightDifference:
    """qWD (SDP4Bit section 3.1, Alg. 2; Alg. 4 lines 2 and 6-8): sharded master, one replica per rank.

    plain: qW, the weights themselves are quantized (the ZeRO++ baseline). printed: Alg. 4 line 6 as printed, which
    resets the master to the replica before the optimizer's change (restated: a misprint; the master keeps its value).
    """

    def __init__(
        self,
        weights: Any,
        workers: int,
        quantizer: Map,
        plain: bool = False,
        printed: bool = False,
        bounds: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """bounds: each rank's (start, stop), covering the vector; by default equal parts, the last ones short."""
        start = flat(weights)
        size = -(-start.size // workers)
        if bounds is None:
            bounds = [(min(r * size, start.size), min((r + 1) * size, start.size)) for r in range(workers)]
        self.bounds = list(bounds)
        self.workers = workers
        self.quantizer = quantizer
        self.plain = plain
        self.printed = printed
        self.main = [start[a:b].copy() for a, b in self.bounds]
        self.replicas = [start.copy() for _ in range(workers)]  # Alg. 4 line 2
        self.sent = [np.zeros(b - a) for a, b in self.bounds]  # the last step's dequantized messages

    @property
    def weights(self) -> Array:
        """The whole master."""
        return np.concatenate(self.main)

    @property
    def replica(self) -> Array:
        """Rank 0's replica (all are equal)."""
        return self.replicas[0]

    def step(self, change: Any | None) -> Array:
        """Adds the optimizer's change (-lr u) to the master and sends; None is a skipped step, which sends nothing."""
        if change is None:
            return self.replica
        delta = flat(change)
        for rank, (a, b) in enumerate(self.bounds):
            base = self.replicas[rank][a:b] if self.printed else self.main[rank]
            self.main[rank] = base + delta[a:b]  # Alg. 4 line 6
        return self.send()

    def step_to(self, main: Any) -> Array:
        """As step, with the master's new values given (no `printed` form)."""
        values = flat(main)
        self.main = [values[a:b].copy() for a, b in self.bounds]
        return self.send()

    def send(self) -> Array:
        """Alg. 4 lines 7-8: each owner quantizes its shard; every rank, the owner too, adds the dequantized values."""
        self.sent = []
        for rank, (a, b) in enumerate(self.bounds):
            if a == b:
                self.sent.append(np.zeros(0))
            elif self.plain:
                self.sent.append(flat(self.quantizer(self.main[rank].copy())))
            else:
                self.sent.append(flat(self.quantizer(self.main[rank] - self.replicas[rank][a:b])))
        for rank in range(self.workers):
            for owner, (a, b) in enumerate(self.bounds):
                if self.plain:
                    self.replicas[rank][a:b] = self.sent[owner]
                else:
                    self.replicas[rank][a:b] = self.replicas[rank][a:b] + self.sent[owner]
        return self.replica


def owned_slices(n: int, nodes: int, ranks: int, layout: str = "rank") -> list[list[slice]]:
    """Which run of the vector (node, rank) owns. "rank": part node*ranks + rank, as a global reduce-scatter gives.

    "nested": the local rank's contiguous 1/ranks of the vector first, the node's share inside it (two plain hops).
    """
    if n % (nodes * ranks):
        raise ValueError("the number of ranks does not divide the length")
    if layout not in ("rank", "nested"):
        raise ValueError("layout is rank or nested")
    size = n // (nodes * ranks)
    out: list[list[slice]] = []
    for node in range(nodes):
        row: list[slice] = []
        for rank in range(ranks):
            part = node * ranks + rank if layout == "rank" else rank * nodes + node
            row.append(slice(part * size, (part + 1) * size))
        out.append(row)
    return out


def two_level(
    gradients: Sequence[Sequence[Any]],
    quantize_inside: Map,
    quantize_across: Map,
    rotate: Map | None = None,
    layout: str = "rank",
    both_hops: bool = False,
    naive: bool = False,
    divide_first: bool = True,
) -> list[list[Array]]:
    """TLq-HS (SDP4Bit Alg. 3): the mean over all (node, rank), as the part each of them owns (see owned_slices).

    rotate is its own inverse. Restated: division by N first; one node sends the inside hop only, one rank per node the
    across hop only. both_hops: both always, as Alg. 3 prints. naive: Alg. 3 lines 6 and 8, the transforms that cancel.
    """
    nodes, ranks = len(gradients), len(gradients[0])
    total = nodes * ranks
    n = flat(gradients[0][0]).size
    owned = owned_slices(n, nodes, ranks, layout)
    inside = both_hops or nodes == 1 or ranks > 1
    across = both_hops or nodes > 1
    turn: Map = rotate if rotate is not None else flat

    # Lines 2-5: rotate, quantize the whole vector (the own part too), and each rank takes its share inside the node.
    messages: list[list[Array]] = []
    for node in range(nodes):
        row: list[Array] = []
        for rank in range(ranks):
            g = flat(gradients[node][rank])
            if divide_first:
                g = g / total
            g = flat(turn(g))
            row.append(flat(quantize_inside(g)) if inside else g)
        messages.append(row)
    # Lines 6-8: sum inside the node. shares[node][rank]: the parts this local rank owns on ALL nodes, in node order.
    shares: list[list[Array]] = []
    for node in range(nodes):
        row = []
        for rank in range(ranks):
            share = np.zeros(n // ranks)
            for source in range(ranks):
                pieces = [messages[node][source][owned[other][rank]] for other in range(nodes)]
                piece = np.concatenate(pieces)
                share = share + (flat(turn(piece)) if naive else piece)
            row.append(flat(turn(share)) if naive else share)
        shares.append(row)
    # Lines 9-13: quantize the share, exchange between nodes at equal local rank, sum, rotate back.
    sent = [[flat(quantize_across(share)) if across else share for share in row] for row in shares]
    size = n // total
    out: list[list[Array]] = []
    for node in range(nodes):
        row = []
        for rank in range(ranks):
            part = np.zeros(size)
            for source in range(nodes):
                part = part + sent[source][rank][node * size : (node + 1) * size]
            part = flat(turn(part))
            row.append(part if divide_first else part / total)
        out.append(row)
    return out


def gather_parts(parts: Sequence[Sequence[Any]], quantize: Map | None = None, layout: str = "rank") -> Array:
    """The whole vector from two_level's parts; quantize: the all-reduce form, each owner quantizes its part."""
    nodes, ranks = len(parts), len(parts[0])
    n = nodes * ranks * flat(parts[0][0]).size
    owned = owned_slices(n, nodes, ranks, layout)
    out = np.zeros(n)
    for node in range(nodes):
        for rank in range(ranks):
            part = flat(parts[node][rank])
            out[owned[node][rank]] = part if quantize is None else flat(quantize(part))
    return out
