"""Independent float64 transcription of SCAPE / AdamS and SDP4Bit, used as a test oracle.

Written from the papers and their restatement only, with loops over workers and no communication. "Restated"
below means the restatement's form. SCAPE: arXiv 2607.01678. SDP4Bit: NeurIPS 2024 (its Algorithm 2 is missing from the
extracted text).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Map = Callable[[Array], Array]

CLIP_RULES = ("paper", "code", "return")


def flat(x: Any) -> Array:
    """A fresh flat float64 copy."""
    return np.array(x, dtype=np.float64).reshape(-1)


class AdamS:
    """AdamS (SCAPE paper, equation (2), with the bias corrections its text adds). v is recomputed, not state."""

    def __init__(
        self,
        weights: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        self.weights = flat(weights)
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.bias_correction = bias_correction
        self.m = np.zeros_like(self.weights)
        self.v = np.zeros_like(self.weights)  # the last step's, to look at only
        self.update = np.zeros_like(self.weights)  # the last step's u, to look at only
        self.t = 0

    def step(self, gradient: Any, lr: float | None = None) -> Array:
        """Equation (2): v from the moment BEFORE the update; decoupled decay of the old weights."""
        g = flat(gradient)
        if g.shape != self.weights.shape:
            raise ValueError("gradient and weights differ in size")
        rate = self.lr if lr is None else lr
        b1, b2 = self.betas
        self.t += 1
        before = self.m
        self.m = b1 * before + (1.0 - b1) * g
        self.v = b2 * before**2 + (1.0 - b2) * g**2
        self.update = direction(self.m, self.v, self.eps, self.betas, self.t if self.bias_correction else None)
        self.weights = self.weights - rate * (self.update + self.weight_decay * self.weights)
        return self.weights


def direction(m: Array, v: Array, eps: float, betas: tuple[float, float], t: int | None) -> Array:
    """SCAPE equation (2) / Alg. 1 line 20: m^/(sqrt(v^)+eps); t (from 1) turns the bias corrections on, None off."""
    if t is not None:
        m = m / (1.0 - betas[0] ** t)
        v = v / (1.0 - betas[1] ** t)
    return m / (np.sqrt(v) + eps)


def warmed_density(target: float, done: int, warmup: int) -> float:
    """Density of the step after `done` finished steps: geometric from 1 (done = 0) to target (done >= warmup)."""
    if done <= 0:
        return 1.0
    if done >= warmup:
        return target
    return float(target ** (done / warmup))


def top_mask(x: Array, density: float) -> Mask:
    """The k = max(int(density * numel), 1) largest |x|; of equal ones the lower index (SCAPE Alg. 1 line 15)."""
    k = min(max(int(density * x.size), 1), x.size)
    mask = np.zeros(x.size, dtype=np.bool_)
    mask[np.argsort(-np.abs(x), kind="stable")[:k]] = True
    return mask


class SCAPE:
    """SCAPE Alg. 1 on several flat tensors with replicated weights; `replicas` follows Alg. 2 lines 3-5.

    clip: "paper" clips only the g^ inside v (Alg. 1 lines 16-19); "code" rebuilds m from the clipped g^ and loses the
    rest (the authors' code, as restated); "return" does that and adds what was clipped off m to every worker's e.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        workers: int,
        density: float,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_norm: float | None = None,
        warmup: int = 0,
        owners: list[int] | None = None,
        clip: str = "paper",
        weights: Sequence[Any] | None = None,
        dense: Sequence[bool] | None = None,
        bias_correction: bool = True,
        clip_epsilon: float = 1e-6,
        printed_gather: bool = False,
    ) -> None:
        """dense[i]: tensor i is never sparsified (norm, bias). warmup: steps. printed_gather: Alg. 2's mask index."""
        if clip not in CLIP_RULES:
            raise ValueError(f"clip must be one of {CLIP_RULES}")
        count = len(sizes)
        self.sizes = list(sizes)
        self.workers = workers
        self.density = density
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.max_norm = max_norm
        self.warmup = warmup
        self.owners = [i % workers for i in range(count)] if owners is None else list(owners)
        if len(self.owners) != count or any(not 0 <= owner < workers for owner in self.owners):
            raise ValueError("one owner per tensor, each a worker")
        self.clip = clip
        self.dense = [False] * count if dense is None else list(dense)
        self.bias_correction = bias_correction
        self.clip_epsilon = clip_epsilon
        self.printed_gather = printed_gather
        self.weights = [np.zeros(n) for n in self.sizes] if weights is None else [flat(w) for w in weights]
        if [w.size for w in self.weights] != self.sizes:
            raise ValueError("weights and sizes differ")
        self.replicas = [[w.copy() for w in self.weights] for _ in range(workers)]
        self.m = [np.zeros(n) for n in self.sizes]
        self.masks: list[Mask] = [np.ones(n, dtype=np.bool_) for n in self.sizes]  # Alg. 1 line 5; for the NEXT step
        self.residuals = [[np.zeros(n) for n in self.sizes] for _ in range(workers)]  # Alg. 1 line 6
        self.t = 0
        # What the last step computed, to look at only.
        self.used_masks: list[Mask] = [mask.copy() for mask in self.masks]
        self.semi = [[np.zeros(n) for n in self.sizes] for _ in range(workers)]
        self.b = [np.zeros(n) for n in self.sizes]
        self.recovered = [np.zeros(n) for n in self.sizes]
        self.clipped = [np.zeros(n) for n in self.sizes]
        self.v = [np.zeros(n) for n in self.sizes]
        self.updates = [np.zeros(n) for n in self.sizes]
        self.norm = 0.0
        self.clip_factor = 1.0

    def step(self, gradients: Sequence[Sequence[Any]], lr: float | None = None) -> list[Array]:
        """One pass of Alg. 1 lines 8-21 over gradients[worker][tensor] (each worker's own, not divided by N)."""
        rate = self.lr if lr is None else lr
        b1, b2 = self.betas
        count = len(self.sizes)
        self.t += 1
        masks = self.masks  # M_{t-1}
        before = self.m  # m_{t-1}
        # Lines 9-12: the semi-updated moment of each worker, and its error feedback (at full weight).
        for worker in range(self.workers):
            for i in range(count):
                g = flat(gradients[worker][i])
                semi = b1 * before[i] + (1.0 - b1) * g + self.residuals[worker][i]
                self.semi[worker][i] = semi
                self.residuals[worker][i] = np.where(masks[i], 0.0, semi)
        # Lines 13-14: the mean of the payloads.
        self.b = []
        for i in range(count):
            total = np.zeros(self.sizes[i])
            for worker in range(self.workers):
                total = total + np.where(masks[i], self.semi[worker][i], 0.0)
            self.b.append(total / self.workers)
        # Line 15: the owner's local values choose the next step's mask, at the next step's density.
        density = warmed_density(self.density, self.t, self.warmup)
        following: list[Mask] = []
        for i in range(count):
            if self.dense[i]:
                following.append(np.ones(self.sizes[i], dtype=np.bool_))
            else:
                following.append(top_mask(self.semi[self.owners[i]][i], density))
        # Lines 16-17.
        self.m = [b.copy() for b in self.b]
        self.recovered = [np.where(masks[i], (self.b[i] - b1 * before[i]) / (1.0 - b1), 0.0) for i in range(count)]
        # Line 18: one global norm over all tensors, as torch's clip_grad_norm_ computes the factor.
        self.norm = float(np.sqrt(sum(float(np.sum(g**2)) for g in self.recovered)))
        self.clip_factor = 1.0
        if self.max_norm is not None:
            self.clip_factor = min(1.0, self.max_norm / (self.norm + self.clip_epsilon))
        self.clipped = [self.clip_factor * g for g in self.recovered]
        if self.clip != "paper" and self.clip_factor < 1.0:
            for i in range(count):
                self.m[i] = np.where(masks[i], b1 * before[i] + (1.0 - b1) * self.clipped[i], 0.0)
                if self.clip == "return":
                    for worker in range(self.workers):
                        self.residuals[worker][i] = self.residuals[worker][i] + (self.b[i] - self.m[i])
        # Lines 19-21; the decay acts on all coordinates.
        for i in range(count):
            self.v[i] = b2 * before[i] ** 2 + (1.0 - b2) * self.clipped[i] ** 2
            t = self.t if self.bias_correction else None
            self.updates[i] = direction(self.m[i], self.v[i], self.eps, self.betas, t)
            self.weights[i] = self.weights[i] - rate * (self.updates[i] + self.weight_decay * self.weights[i])
        # Alg. 2 lines 3-5: masked weights are gathered, the rest decays locally. The mask is the one THIS update used;
        # the printed one (w'_t[M_{t-1}] for the update that used M_{t-2}) is a step newer and loses updates.
        sent = following if self.printed_gather else masks
        for worker in range(self.workers):
            for i in range(count):
                decayed = (1.0 - rate * self.weight_decay) * self.replicas[worker][i]
                self.replicas[worker][i] = np.where(sent[i], self.weights[i], decayed)
        self.used_masks = masks
        self.masks = following
        return self.weights


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
