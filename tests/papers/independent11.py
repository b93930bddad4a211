"""Independent float64 transcriptions: update-space feedback (Trickle), local-step methods, momentum with a frozen v.

Written from the texts only, with loops over workers and no communication, by someone without sight of the library, so
that agreement means something. Trickle and LS1: QUALITY.md, sections 2 and 5. PowerSGD: arXiv 1905.13727, Alg. 1 and 2.
DiLoCo: arXiv 2311.08105, Alg. 1. SparseLoCo: arXiv 2508.15706. 1-bit Adam's frame: arXiv 2102.02888, Alg. 1. Where a
text can be read in two ways there is a switch, and the docstring says so.

A gradient or weight argument is a list over tensors (of any shape); `gradients` is a list over workers of such lists.
Steps t are counted from 1. A compressor is called as C(tensor index, t, list over workers of that tensor's h) and gives
the list over workers of c; what the workers receive is the mean of c. `each_worker` makes one from a function of h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Compressor = Callable[[int, int, list[Array]], list[Array]]
Indices = Sequence[int] | NDArray[np.int64]


def array(x: Any) -> Array:
    """A fresh float64 copy, of the same shape; torch tensors may ask for gradients and have any dtype."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.array(x, dtype=np.float64)


def zeros_like(tensors: Sequence[Array]) -> list[Array]:
    """Zeros in the shapes of `tensors`."""
    return [np.zeros(x.shape) for x in tensors]


def mean_of(parts: Sequence[Array]) -> Array:
    """The mean over workers, added in worker order."""
    total = np.zeros(parts[0].shape)
    for part in parts:
        total = total + part
    return total / len(parts)


def clipped(gradient: Sequence[Array], max_norm: float | None, epsilon: float = 0.0) -> list[Array]:
    """The list scaled down to a joint norm of at most max_norm; torch's clip_grad_norm_ has epsilon = 1e-6."""
    norm = float(np.sqrt(sum(float(np.sum(g**2)) for g in gradient)))
    factor = 1.0 if max_norm is None or norm == 0.0 else min(1.0, max_norm / (norm + epsilon))
    return [factor * g for g in gradient]


# Compressors of one worker's tensor: h -> c, both of the same shape.


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


# Compressors over all workers of one tensor.


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


def orthonormal(p: Array) -> Array:
    """Gram-Schmidt on the columns (the modified one); a column of zeros stays."""
    p = array(p)
    for j in range(p.shape[1]):
        for i in range(j):
            p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
        norm = np.linalg.norm(p[:, j])
        if norm > 0:
            p[:, j] /= norm
    return p


class PowerSGDUpdates:
    """PowerSGD, Alg. 1, on each tensor as a matrix (first dimension x the rest), with warm start.

    q: the first right factor of each compressed tensor, (columns, rank); tensors without one are sent dense. By Alg. 2
    a worker's error is against its OWN P^ Q_n^T (`own`); torch's hook takes the mean's P^ Q^T instead. The mean over
    workers, of c and of the errors, is the same.
    """

    def __init__(self, q: dict[int, Any], own: bool = True) -> None:
        self.q = {tensor: array(value) for tensor, value in q.items()}
        self.own = own

    def __call__(self, tensor: int, t: int, hs: list[Array]) -> list[Array]:
        """c of each worker."""
        if tensor not in self.q:
            return dense(tensor, t, hs)
        shape = hs[0].shape
        matrices = [h.reshape(shape[0], -1) for h in hs]
        p = mean_of([matrix @ self.q[tensor] for matrix in matrices])  # l. 2-3
        p = orthonormal(p)  # l. 4
        own = [matrix.T @ p for matrix in matrices]  # l. 5
        self.q[tensor] = mean_of(own)  # l. 6
        parts = own if self.own else [self.q[tensor]] * len(hs)
        return [(p @ q.T).reshape(shape) for q in parts]


# Section 2.


class Trickle:
    """QUALITY.md section 2: error feedback on updates, each worker's lr g / (sqrt(r v / (1 - b2^t)) + eps).

    r is one scalar for all tensors, measured over the coordinates sample(tensor, t) of all of them (give an empty list
    for a tensor without any). Its order, which the text leaves open: with delayed=False the r used in step t is the
    value AFTER step t's sample went in; with delayed=True it is the value BEFORE it, so one step old, except that the
    very first step uses its own. The first measured ratio is taken as it is; a step whose sample is all zeros measures
    nothing, and until something was measured r = 1. sample=None: r = 1 for ever.

    small[i]: tensor i is not compressed but gets AdamW (dense_b1, b2) of the mean gradient, without r.
    b1: a momentum inside, local and bias-corrected, in place of g_n (the text's "betas inside"); 0 is the algorithm.
    server: what is delivered is not mean_n c_n but c = server(y) of y = mean_n c_n + s, and s = y - c waits there.
    rs: the r used in each step. taken, delivered: per compressed tensor, the sums over steps of the mean over workers
    of what was put into h and of what the weights moved by.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        workers: int,
        compress: Compressor,
        sample: Callable[[int, int], Indices] | None,
        delayed: bool = False,
        small: Sequence[bool] | None = None,
        b1: float = 0.0,
        dense_b1: float = 0.9,
        server: Callable[[Array], Array] | None = None,
    ) -> None:
        self.weights = [array(w) for w in weights]
        self.workers = workers
        self.compress = compress
        self.server = server
        self.sample = sample
        self.delayed = delayed
        self.small = [False] * len(self.weights) if small is None else list(small)
        self.b1 = b1
        self.dense_b1 = dense_b1
        self.m = [zeros_like(self.weights) for _ in range(workers)]
        self.v = [zeros_like(self.weights) for _ in range(workers)]
        self.e = [zeros_like(self.weights) for _ in range(workers)]
        self.s = zeros_like(self.weights)
        self.dense_m, self.dense_v = zeros_like(self.weights), zeros_like(self.weights)
        self.r: float | None = None
        self.rs: list[float] = []
        self.taken, self.delivered = zeros_like(self.weights), zeros_like(self.weights)

    def measure(self, t: int, gradients: list[list[Array]]) -> float | None:
        """sum_S (mean_n g_n)^2 / sum_S mean_n g_n^2 over all tensors' samples."""
        above = below = 0.0
        for i in range(len(self.weights)):
            for index in [] if self.sample is None else self.sample(i, t):
                values = [float(g[i].reshape(-1)[int(index)]) for g in gradients]
                above += (sum(values) / len(values)) ** 2
                below += sum(value**2 for value in values) / len(values)
        return above / below if below > 0.0 else None

    def scale(self, t: int, gradients: list[list[Array]]) -> float:
        """The r of this step; the running value takes this step's sample in."""
        before = self.r
        ratio = self.measure(t, gradients)
        if ratio is not None:
            self.r = ratio if self.r is None else 0.9 * self.r + 0.1 * ratio
        used = before if self.delayed and before is not None else self.r
        return 1.0 if used is None else used

    def step(
        self, t: int, gradients: Sequence[Sequence[Any]], lr: float, b2: float, eps: float, wd: float
    ) -> list[Array]:
        """The new weights after step t with gradients[worker][tensor], each worker's own."""
        given = [[array(g) for g in worker] for worker in gradients]
        r = self.scale(t, given)
        self.rs.append(r)
        for i in range(len(self.weights)):
            if self.small[i]:
                self.step_small(t, i, mean_of([worker[i] for worker in given]), lr, b2, eps, wd)
                continue
            updates, hs = [], []
            for n in range(self.workers):
                updates.append(self.update(n, i, t, given[n][i], r, lr, b2, eps))
                hs.append(self.e[n][i] + updates[n])
            cs = self.compress(i, t, [array(h) for h in hs])
            for n in range(self.workers):
                self.e[n][i] = hs[n] - cs[n]
            c = mean_of(cs)
            if self.server is not None:
                y = c + self.s[i]
                c = self.server(y)
                self.s[i] = y - c
            self.weights[i] = (1 - lr * wd) * self.weights[i] - c
            self.taken[i] = self.taken[i] + mean_of(updates)
            self.delivered[i] = self.delivered[i] + c
        return [array(w) for w in self.weights]

    def update(self, n: int, i: int, t: int, g: Array, r: float, lr: float, b2: float, eps: float) -> Array:
        """Worker n's update of tensor i along g."""
        self.m[n][i] = self.b1 * self.m[n][i] + (1 - self.b1) * g
        self.v[n][i] = self.second(n, i, g, b2)
        direction = self.m[n][i] / (1 - self.b1**t)
        return lr * direction / (np.sqrt(r * self.v[n][i] / (1 - b2**t)) + eps)

    def second(self, n: int, i: int, g: Array, b2: float) -> Array:
        """Worker n's v of tensor i, with g in it."""
        return b2 * self.v[n][i] + (1 - b2) * g**2

    def step_small(self, t: int, i: int, g: Array, lr: float, b2: float, eps: float, wd: float) -> None:
        """AdamW of the mean gradient."""
        b1 = self.dense_b1
        self.dense_m[i] = b1 * self.dense_m[i] + (1 - b1) * g
        self.dense_v[i] = b2 * self.dense_v[i] + (1 - b2) * g**2
        update = self.dense_m[i] / (1 - b1**t) / (np.sqrt(self.dense_v[i] / (1 - b2**t)) + eps)
        self.weights[i] = (1 - lr * wd) * self.weights[i] - lr * update

    def deliver(self) -> list[Array]:
        """One dense exchange of what waits: w -= mean_n e_n + s, e = 0, s = 0."""
        for i in range(len(self.weights)):
            waiting = mean_of([e[i] for e in self.e]) + self.s[i]
            self.s[i] = np.zeros(waiting.shape)
            self.weights[i] = self.weights[i] - waiting
            self.delivered[i] = self.delivered[i] + waiting
            for n in range(self.workers):
                self.e[n][i] = np.zeros(waiting.shape)
        return [array(w) for w in self.weights]


# Conservation, from what can be seen of any implementation.


def taken_by(
    gradients: Sequence[Sequence[Any]], lrs: Sequence[float], rs: Sequence[float], b2: float, eps: float
) -> Array:
    """One tensor: sum over steps of mean_n lr g / (sqrt(r v / (1 - b2^t)) + eps), from gradients[step][worker]."""
    workers = len(gradients[0])
    total = np.zeros(array(gradients[0][0]).shape)
    for n in range(workers):
        v = np.zeros(total.shape)
        for t, (given, lr, r) in enumerate(zip(gradients, lrs, rs, strict=True), 1):
            g = array(given[n])
            v = b2 * v + (1 - b2) * g**2
            total = total + lr * g / (np.sqrt(r * v / (1 - b2**t)) + eps) / workers
    return total


def delivered_by(weights: Sequence[Any], lrs: Sequence[float], wd: float) -> Array:
    """One tensor: sum over steps of (1 - lr wd) w_{t-1} - w_t, from the weights w_0, w_1, ... of every step."""
    total = np.zeros(array(weights[0]).shape)
    for t, lr in enumerate(lrs, 1):
        total = total + (1 - lr * wd) * array(weights[t - 1]) - array(weights[t])
    return total


def lost(taken: Any, delivered: Any, residuals: Sequence[Any]) -> float:
    """The largest |taken - delivered - mean_n e_n|, relative to the largest |taken|: 0 where nothing is lost."""
    taken = array(taken)
    rest = taken - array(delivered) - mean_of([array(e) for e in residuals])
    return float(np.max(np.abs(rest)) / max(float(np.max(np.abs(taken))), 1e-300))


# Local steps.


class SGD:
    """w -= lr g."""

    def step(self, weights: list[Array], gradient: list[Array], lr: float) -> list[Array]:
        """The new weights."""
        return [w - lr * g for w, g in zip(weights, gradient, strict=True)]


class AdamW:
    """AdamW with bias corrections and decoupled decay (1 - lr wd) w; the state outlives a round."""

    def __init__(self, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, wd: float = 0.0) -> None:
        self.b1, self.b2, self.eps, self.wd = b1, b2, eps, wd
        self.m: list[Array] = []
        self.v: list[Array] = []
        self.t = 0

    def step(self, weights: list[Array], gradient: list[Array], lr: float) -> list[Array]:
        """The new weights."""
        if self.t == 0:
            self.m, self.v = zeros_like(weights), zeros_like(weights)
        self.t += 1
        out = []
        for i, (w, g) in enumerate(zip(weights, gradient, strict=True)):
            self.m[i] = self.b1 * self.m[i] + (1 - self.b1) * g
            self.v[i] = self.b2 * self.v[i] + (1 - self.b2) * g**2
            m, v = self.m[i] / (1 - self.b1**self.t), self.v[i] / (1 - self.b2**self.t)
            out.append((1 - lr * self.wd) * w - lr * m / (np.sqrt(v) + self.eps))
        return out


class LocalSteps:
    """Workers that leave the common weights by inner steps of their own; `outer` brings them back in a round.

    The outer step, with the mean pseudo-gradient D: momentum 0 is w -= outer_lr D; else torch's SGD(nesterov=True),
    u = momentum u + D, w -= outer_lr (D + momentum u); nesterov=False: w -= outer_lr u. H is how often inner_step is
    called between rounds. Inner states stay with their workers.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        workers: int,
        inner: Callable[[], SGD | AdamW],
        outer_lr: float,
        momentum: float,
        nesterov: bool = True,
        max_norm: float | None = None,
    ) -> None:
        self.weights = [array(w) for w in weights]
        self.local = [[array(w) for w in weights] for _ in range(workers)]
        self.inner = [inner() for _ in range(workers)]
        self.outer_lr, self.momentum, self.nesterov, self.max_norm = outer_lr, momentum, nesterov, max_norm
        self.u = zeros_like(self.weights)
        self.rounds = 0

    def inner_step(self, worker: int, gradient: Sequence[Any], lr: float) -> list[Array]:
        """One step of one worker on its own weights, which are returned; max_norm clips its own gradient."""
        g = clipped([array(x) for x in gradient], self.max_norm)
        self.local[worker] = self.inner[worker].step(self.local[worker], g, lr)
        return [array(w) for w in self.local[worker]]

    def drift(self, worker: int) -> list[Array]:
        """The pseudo-gradient w - w_n."""
        return [w - own for w, own in zip(self.weights, self.local[worker], strict=True)]

    def outer(self, means: list[Array]) -> list[Array]:
        """The outer step with the mean pseudo-gradient of each tensor; all workers go on from its result."""
        for i, d in enumerate(means):
            self.u[i] = self.momentum * self.u[i] + d
            move = d + self.momentum * self.u[i] if self.nesterov else self.u[i]
            self.weights[i] = self.weights[i] - self.outer_lr * move
        self.local = [[array(w) for w in self.weights] for _ in self.local]
        return [array(w) for w in self.weights]


class DiLoCo(LocalSteps):
    """DiLoCo, Alg. 1: H inner AdamW steps, outer Nesterov (.7, .9). outer_lr 1, momentum 0 is plain averaging.

    compress: what a worker's pseudo-gradient becomes on its way, without feedback (the paper: nothing).
    """

    def __init__(
        self,
        weights: Sequence[Any],
        workers: int,
        inner: Callable[[], SGD | AdamW] = AdamW,
        outer_lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        max_norm: float | None = None,
        compress: Compressor = dense,
    ) -> None:
        super().__init__(weights, workers, inner, outer_lr, momentum, nesterov, max_norm)
        self.compress = compress

    def round(self) -> list[Array]:
        """The new common weights."""
        self.rounds += 1
        drifts = [self.drift(n) for n in range(len(self.local))]
        means = []
        for i in range(len(self.weights)):
            means.append(mean_of(self.compress(i, self.rounds, [drift[i] for drift in drifts])))  # l. 12
        return self.outer(means)  # l. 14


def tiles_of(shape: tuple[int, ...], size: int = 4096) -> list[list[int]]:
    """Flat positions of each tile: `size` consecutive ones, the last tile short."""
    numel = int(np.prod(shape))
    return [list(range(start, min(start + size, numel))) for start in range(0, numel, size)]


def blocks_of(shape: tuple[int, ...], side: int = 64) -> list[list[int]]:
    """The authors' tiles: side x side blocks of a matrix (short at the edges), side^2 in a row of a vector."""
    if len(shape) != 2:
        return tiles_of(shape, side * side)
    rows, columns = shape
    return [
        [i * columns + j for i in range(y, min(y + side, rows)) for j in range(x, min(x + side, columns))]
        for y in range(0, rows, side)
        for x in range(0, columns, side)
    ]


def sigma_labels(values: Array, bins: int = 4, sigmas: float = 6.0) -> NDArray[np.int64]:
    """The bins of the authors' quantizer: `bins` equal ones of width sigmas * std / bins around the mean.

    The bin of x is rint((x - mean) / width + bins / 2), clamped to 0..bins-1, with std over n - 1. With 2 bits the
    bins are centred at -2, -1, 0 and +1 widths (1.5 std each), so plus and minus are not treated alike.
    """
    centred = values - np.mean(values)
    std = float(np.sqrt(np.sum(centred**2) / (values.size - 1))) if values.size > 1 else 0.0
    width = sigmas * std / bins
    if width == 0.0:
        width = 1.0
    return np.clip(np.rint(centred / width + bins // 2), 0, bins - 1).astype(np.int64)


def sign_labels(values: Array) -> NDArray[np.int64]:
    """Another 2-bit reading: the sign (0 is plus), and whether |x| is above the mean |x|."""
    above = np.abs(values) > np.mean(np.abs(values))
    return ((values >= 0).astype(np.int64) * 2 + above.astype(np.int64)).astype(np.int64)


def bin_means(values: Array, labels: NDArray[np.int64]) -> Array:
    """Each value replaced by the mean of those with the same label."""
    out = np.zeros(values.size)
    for label in sorted(set(labels.tolist())):
        members = [i for i in range(values.size) if labels[i] == label]
        out[members] = sum(float(values[i]) for i in members) / len(members)
    return out


def tile_top_k(
    h: Array,
    tiles: Sequence[Sequence[int]],
    k: Callable[[int], int],
    labels: Callable[[Array], NDArray[np.int64]] | None,
    per_tile: bool = False,
) -> Array:
    """Top-k of |h| in each tile (ties: first in the tile), the kept values as bin means.

    k(tile length); labels None keeps the values as they are. The bins are those of all kept values of the tensor (the
    authors' code), or of each tile's own (per_tile). A tile's values come in order of their place in the tile.
    """
    flat = h.reshape(-1)
    chosen = []
    for tile in tiles:
        within = largest(array([flat[i] for i in tile]), min(k(len(tile)), len(tile)))
        chosen.append([tile[j] for j in within])
    out = np.zeros(flat.size)
    for group in chosen if per_tile else [[i for part in chosen for i in part]]:
        values = array([flat[i] for i in group])
        out[group] = values if labels is None else bin_means(values, labels(values))
    return out.reshape(h.shape)


class SparseLoCo(LocalSteps):
    """SparseLoCo: e_n = decay e_n + D_n; c_n = Q(Top-k(e_n)) per tile; e_n -= c_n; w -= outer_lr mean_n c_n.

    The paper's outer step is plain SGD (the decayed residual stands for momentum); momentum > 0 gives Nesterov.
    `density` sets k = max(int(density * tile length), 1) of each tile; `tiles` gives the tiles of a shape.
    """

    def __init__(
        self,
        weights: Sequence[Any],
        workers: int,
        inner: Callable[[], SGD | AdamW] = AdamW,
        outer_lr: float = 1.0,
        momentum: float = 0.0,
        nesterov: bool = True,
        max_norm: float | None = None,
        decay: float = 0.95,
        density: float = 1 / 32,
        tiles: Callable[[tuple[int, ...]], list[list[int]]] = tiles_of,
        labels: Callable[[Array], NDArray[np.int64]] | None = sigma_labels,
        per_tile: bool = False,
    ) -> None:
        super().__init__(weights, workers, inner, outer_lr, momentum, nesterov, max_norm)
        self.decay, self.density, self.tiles, self.labels, self.per_tile = decay, density, tiles, labels, per_tile
        self.e = [zeros_like(self.weights) for _ in range(workers)]

    def round(self) -> list[Array]:
        """The new common weights."""
        self.rounds += 1
        drifts = [self.drift(n) for n in range(len(self.local))]
        means = []
        for i, w in enumerate(self.weights):
            cs = []
            for n in range(len(self.local)):
                h = self.decay * self.e[n][i] + drifts[n][i]
                c = tile_top_k(h, self.tiles(w.shape), lambda m: kept(m, self.density), self.labels, self.per_tile)
                self.e[n][i] = h - c
                cs.append(c)
            means.append(mean_of(cs))
        return self.outer(means)


class LS1:
    """QUALITY.md section 5, last paragraph: local steps, 1 bit both ways.

    warm_step is the AdamW of the first steps (b1, b2, eps, wd; `warm` compresses each worker's gradient, without
    feedback; the mean is clipped to max_norm); then inner_step for each worker and round every H steps. t, for the bias
    corrections, counts a worker's steps of both kinds. In g_n "clipped by itself" the norm is over all its tensors.

    The text does not say what m_n and v_n are when the local steps begin. handover:
    "own" (averages of the worker's own clipped g_n were kept from the first step on, beside the common ones),
    "scaled" (m_n = m, v_n = N v: v of the mean gradient has N times less noise, and v_n is divided by N),
    "kept" (m_n = m, v_n = v), "fresh" (zeros, and t starts again).
    """

    HANDOVERS = ("own", "scaled", "kept", "fresh")

    def __init__(
        self,
        weights: Sequence[Any],
        workers: int,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        wd: float = 0.0,
        max_norm: float | None = 1.0,
        compress: Callable[[Array], Array] = lambda x: sign_mean(x, 128),
        warm: Compressor = dense,
        handover: str = "own",
    ) -> None:
        if handover not in self.HANDOVERS:
            raise ValueError(f"handover must be one of {self.HANDOVERS}")
        self.weights = [array(w) for w in weights]
        self.workers = workers
        self.betas, self.eps, self.wd, self.max_norm = betas, eps, wd, max_norm
        self.compress, self.warm, self.handover = compress, warm, handover
        self.local = [[array(w) for w in weights] for _ in range(workers)]
        self.m = [zeros_like(self.weights) for _ in range(workers)]
        self.v = [zeros_like(self.weights) for _ in range(workers)]
        self.t = [0] * workers
        self.common_m, self.common_v = zeros_like(self.weights), zeros_like(self.weights)
        self.warming, self.warmed = True, 0
        self.e = [zeros_like(self.weights) for _ in range(workers)]
        self.s = zeros_like(self.weights)

    def average(self, m: list[Array], v: list[Array], gradient: list[Array]) -> None:
        """m and v take a gradient in."""
        b1, b2 = self.betas
        for i, g in enumerate(gradient):
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2

    def move(self, w: Array, m: Array, v: Array, t: int, lr: float, divisor: int) -> Array:
        """w - lr (m^ / (sqrt(v^ / divisor) + eps) + wd w)."""
        b1, b2 = self.betas
        direction = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t) / divisor) + self.eps)
        return w - lr * (direction + self.wd * w)

    def warm_step(self, gradients: Sequence[Sequence[Any]], lr: float) -> list[Array]:
        """One step of AdamW with the mean gradient; gradients[worker][tensor]."""
        self.warmed += 1
        given = [[array(g) for g in worker] for worker in gradients]
        means = []
        for i in range(len(self.weights)):
            means.append(mean_of(self.warm(i, self.warmed, [worker[i] for worker in given])))
        self.average(self.common_m, self.common_v, clipped(means, self.max_norm))
        for i, w in enumerate(self.weights):
            self.weights[i] = self.move(w, self.common_m[i], self.common_v[i], self.warmed, lr, 1)
        for n in range(self.workers):
            self.average(self.m[n], self.v[n], clipped(given[n], self.max_norm))
            self.local[n] = [array(w) for w in self.weights]
            self.t[n] = self.warmed
        return [array(w) for w in self.weights]

    def begin(self) -> None:
        """The local steps begin; inner_step calls it."""
        self.warming = False
        for n in range(self.workers):
            if self.handover == "fresh":
                self.m[n], self.v[n], self.t[n] = zeros_like(self.weights), zeros_like(self.weights), 0
            elif self.handover != "own":
                factor = self.workers if self.handover == "scaled" else 1
                self.m[n] = [array(m) for m in self.common_m]
                self.v[n] = [factor * v for v in self.common_v]

    def inner_step(self, worker: int, gradient: Sequence[Any], lr: float) -> list[Array]:
        """One local step of one worker; its own weights are returned."""
        if self.warming:
            self.begin()
        n = worker
        self.t[n] += 1
        self.average(self.m[n], self.v[n], clipped([array(g) for g in gradient], self.max_norm))
        for i, w in enumerate(self.local[n]):
            self.local[n][i] = self.move(w, self.m[n][i], self.v[n][i], self.t[n], lr, self.workers)
        return [array(w) for w in self.local[n]]

    def round(self) -> list[Array]:
        """The new common weights."""
        for i, w in enumerate(self.weights):
            qs = []
            for n in range(self.workers):
                x = w - self.local[n][i] + self.e[n][i]  # D_n + e_n
                qs.append(self.compress(x))
                self.e[n][i] = x - qs[n]
            z = mean_of(qs) + self.s[i]
            q = self.compress(z)
            self.s[i] = z - q
            self.weights[i] = w - q
        self.local = [[array(w) for w in self.weights] for _ in range(self.workers)]
        return [array(w) for w in self.weights]


# Momentum with a frozen v.


class FrozenV:
    """1-bit Adam's frame (Alg. 1) with any compressor of the momentum.

    The first `warmup` steps are AdamW of the mean gradient. Then v and its bias correction stay; x_n = b1 m + (1-b1)
    g_n + e_n, c_n = C(x_n), e_n = x_n - c_n, m = mean_n c_n, or, with a `server` compressor, z = mean_n c_n + s,
    m = server(z), s = z - m. m's bias correction goes on with t. m is what arrived, so what C leaves out is 0 in m and
    waits in e_n. Coordinates whose v is 0 are not moved by m (the authors' mask; still=False moves them by m / eps).
    """

    def __init__(
        self,
        weights: Sequence[Any],
        workers: int,
        warmup: int,
        compress: Compressor,
        server: Callable[[Array], Array] | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        wd: float = 0.0,
        still: bool = True,
    ) -> None:
        self.weights = [array(w) for w in weights]
        self.workers, self.warmup, self.compress, self.server = workers, warmup, compress, server
        self.betas, self.eps, self.wd, self.still = betas, eps, wd, still
        self.m, self.v = zeros_like(self.weights), zeros_like(self.weights)
        self.e = [zeros_like(self.weights) for _ in range(workers)]
        self.s = zeros_like(self.weights)
        self.t = 0

    def step(self, gradients: Sequence[Sequence[Any]], lr: float) -> list[Array]:
        """The new weights after one more step with gradients[worker][tensor]."""
        b1, b2 = self.betas
        self.t += 1
        for i in range(len(self.weights)):
            given = [array(worker[i]) for worker in gradients]
            if self.t <= self.warmup:
                g = mean_of(given)
                self.m[i] = b1 * self.m[i] + (1 - b1) * g
                self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
            else:
                xs = [b1 * self.m[i] + (1 - b1) * given[n] + self.e[n][i] for n in range(self.workers)]
                cs = self.compress(i, self.t, [array(x) for x in xs])
                for n in range(self.workers):
                    self.e[n][i] = xs[n] - cs[n]
                self.m[i] = mean_of(cs)
                if self.server is not None:
                    z = self.m[i] + self.s[i]
                    self.m[i] = self.server(z)
                    self.s[i] = z - self.m[i]
            m = self.m[i] / (1 - b1**self.t)
            v = self.v[i] / (1 - b2 ** min(self.t, self.warmup)) if self.warmup else self.v[i]
            update = m / (np.sqrt(v) + self.eps)
            if self.still:
                update = np.where(self.v[i] > 0, update, 0.0)
            self.weights[i] = (1 - lr * self.wd) * self.weights[i] - lr * update
        return [array(w) for w in self.weights]
