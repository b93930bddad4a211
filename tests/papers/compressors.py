"""Compressors of one worker's tensor (h -> c, of the same shape), and of one tensor over all workers.

The latter are called as C(tensor index, t, list over workers of that tensor's h), with steps t counted from 1, and give
the list over workers of c; what the workers receive is the mean of c. `each_worker` makes one from a function of h.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from papers.support import Array, Indices, array, mean_of

Compressor = Callable[[int, int, list[Array]], list[Array]]


def kept(numel: int, density: float) -> int:
    """k = max(int(density * numel), 1) (METHODS.md's rule)."""
    return min(max(int(density * numel), 1), numel)


def largest(h: Array, k: int) -> list[int]:
    """The positions (flat, ascending) of exactly k largest |h|; of equal ones the lowest index."""
    flat = h.reshape(-1)
    order = sorted(range(flat.size), key=lambda i: (-abs(flat[i]), i))
    return sorted(order[:k])


def margin(h: Array, k: int) -> float:
    """How far the last kept |h| is above the first one left out, relative to it: near 0, fp32 may differ."""
    size = np.sort(np.abs(h.reshape(-1)))[::-1]
    return float("inf") if k >= size.size else float((size[k - 1] - size[k]) / max(size[k - 1], 1e-300))


def at_positions(h: Array, positions: Indices) -> Array:
    """h at the (flat) positions, 0 elsewhere."""
    flat = h.reshape(-1)
    out = np.zeros(flat.size)
    for i in positions:
        out[int(i)] = flat[int(i)]
    return out.reshape(h.shape)


def top_k(h: Array, k: int) -> Array:
    """Exactly the k largest |h|, unrounded."""
    return at_positions(h, largest(h, k))


def symmetric_integers(x: Array, levels: int, group: int | None, wire: Callable[[float], float] = float) -> Array:
    """x rounded to scale * integer in -levels..levels; one scale = max|x| / levels per group of consecutive values.

    Half goes to the even integer, a group of zeros stays zero, the last group may be short, group None is one group.
    wire: what becomes of a scale on its way (np.float32, say); the integers are taken with what arrives.
    """
    flat = x.reshape(-1)
    out = np.zeros(flat.size)
    step = group or max(flat.size, 1)
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        scale = float(wire(float(np.max(np.abs(part))) / levels))
        if scale > 0.0:
            integers = np.clip(np.rint(part / scale), -levels, levels)
            out[start : start + step] = scale * integers
    return out.reshape(x.shape)


def top_k_integers(h: Array, k: int, levels: int, group: int | None, wire: Callable[[float], float] = float) -> Array:
    """top_k with integers: the k values sent, in order of position, in groups; scale = absmax / levels."""
    flat = h.reshape(-1)
    positions = largest(h, k)
    values = symmetric_integers(array([flat[i] for i in positions]), levels, group, wire)
    out = np.zeros(flat.size)
    for i, value in zip(positions, values, strict=True):
        out[i] = value
    return out.reshape(h.shape)


def top_k_int8(h: Array, k: int, group: int | None, wire: Callable[[float], float] = float) -> Array:
    """top_k with 8-bit values."""
    return top_k_integers(h, k, 127, group, wire)


def in_rows(h: Array, rows: int, compress: Callable[[Array], Array]) -> Array:
    """Each of `rows` rows of span = ceil(numel / rows) consecutive values by itself; zeros fill up the last ones."""
    flat = h.reshape(-1)
    span = -(-flat.size // rows)
    filled, out = np.zeros(rows * span), np.zeros(rows * span)
    filled[: flat.size] = flat
    for row in range(rows):
        out[row * span : (row + 1) * span] = compress(filled[row * span : (row + 1) * span])
    return out[: flat.size].reshape(h.shape)


def sign_mean(h: Array, group: int | None = None) -> Array:
    """+-mean|h| of each group of consecutive values (the last may be short; None is one group); 0 counts as plus."""
    flat = h.reshape(-1)
    out = np.zeros(flat.size)
    step = group or max(flat.size, 1)
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        scale = float(np.sum(np.abs(part))) / part.size
        for i, value in enumerate(part):
            out[start + i] = -scale if value < 0 else scale
    return out.reshape(h.shape)


def dense(tensor: int, t: int, hs: list[Array]) -> list[Array]:
    """Everything is sent."""
    return [array(h) for h in hs]


def each_worker(compress: Callable[[Array], Array]) -> Compressor:
    """The same function of h on every worker."""
    return lambda tensor, t, hs: [compress(h) for h in hs]


def shared_mask(positions: Callable[[int, int], Indices]) -> Compressor:
    """Each worker's values at positions(tensor, t), which are the same for all."""
    return lambda tensor, t, hs: [at_positions(h, positions(tensor, t)) for h in hs]


class RadiusUpdates:
    """Radius as a compressor of updates: every R-th step dense, in between one mask per tensor.

    The mask is the top-k of |mean_n h_n| of the last dense step, where h is the update with the residual in it (which a
    dense step empties): the mean that was delivered. As METHODS.md has it, the first step at or after `start` is dense
    and chooses, then every R-th after it; `printed`: t % R == 0 (Alg. 1 line 7 with t from 1). Dense until a mask is
    there.
    """

    def __init__(self, density: float, period: int, start: int = 1, printed: bool = False) -> None:
        self.density, self.period, self.start, self.printed = density, period, start, printed
        self.masks: dict[int, list[int]] = {}

    def chooses(self, t: int) -> bool:
        """Whether step t is dense and chooses the next mask."""
        if t < self.start:
            return False
        return (t if self.printed else t - self.start) % self.period == 0

    def __call__(self, tensor: int, t: int, hs: list[Array]) -> list[Array]:
        """c of each worker."""
        if self.chooses(t):
            self.masks[tensor] = largest(mean_of(hs), kept(hs[0].size, self.density))
            return dense(tensor, t, hs)
        if tensor not in self.masks:
            return dense(tensor, t, hs)
        return [at_positions(h, self.masks[tensor]) for h in hs]


class Merged:
    """Own masks that a server per row merges: one row of each tensor per worker, and row j's server is worker j.

    As a compressor it is C, what the workers send: of each row of h its k = kept(span, density) largest, as integers of
    -levels..levels. `server` (give it to Trickle) is C', what a row's server sends to all: the same of y with K =
    kept(span, merged) and server_levels. Levels None: the values as they are (where a row's server owns its weights).
    """

    def __init__(
        self,
        workers: int,
        density: float,
        merged: float,
        group: int | None,
        levels: int | None = 127,
        server_levels: int | None = 127,
        wire: Callable[[float], float] = float,
    ) -> None:
        self.workers, self.density, self.merged = workers, density, merged
        self.group, self.levels, self.server_levels, self.wire = group, levels, server_levels, wire

    def largest_of(self, row: Array, share: float, levels: int | None) -> Array:
        """The largest of one row."""
        k = kept(row.size, share)
        return top_k(row, k) if levels is None else top_k_integers(row, k, levels, self.group, self.wire)

    def __call__(self, tensor: int, t: int, hs: list[Array]) -> list[Array]:
        """c of each worker."""
        return [in_rows(h, self.workers, lambda row: self.largest_of(row, self.density, self.levels)) for h in hs]

    def server(self, y: Array) -> Array:
        """c of one tensor, of all rows' servers."""
        return in_rows(y, self.workers, lambda row: self.largest_of(row, self.merged, self.server_levels))
