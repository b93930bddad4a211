"""The papers' pseudo-code in float64, with plain loops over workers: what the methods are held against.

Written from the papers' text, in their order and symbols; nothing of Thinwire is used. One parameter tensor each; what
is random (matrices, hashes) is handed in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Vector = np.ndarray


def top(values: Vector, k: int) -> Vector:
    """Flags of the k largest magnitudes, ties to the lowest index."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    flags = np.zeros(len(values), bool)
    flags[order[:k]] = True
    return flags


def peel(values: Vector, index: Vector, places: Callable[[int], tuple[list[int], int]], cells: int) -> Vector:
    """LHC: insert the ``values`` of the elements ``index`` into a count sketch and peel it. NaN: not recovered."""
    sketch, members = np.zeros(cells), [set() for _ in range(cells)]
    for i, value in zip(index.tolist(), values, strict=True):
        where, sign = places(i)
        for cell in where:
            sketch[cell] += sign * value
            members[cell].add(i)
    out = dict.fromkeys(index.tolist(), np.nan)
    found = True
    while found:
        found = False
        for cell in range(cells):
            if len(members[cell]) == 1:
                (i,) = members[cell]
                where, sign = places(i)
                value = sketch[cell]
                out[i] = sign * value
                for other in where:
                    sketch[other] -= value
                    members[other].discard(i)
                found = True
    return np.array(list(out.values()))


class PowerSgdPaper:
    """PowerSGD, Alg. 1-2, on one matrix."""

    def __init__(self, q: Vector, workers: int, shape: tuple[int, int]) -> None:
        self.q, self.e = q, [np.zeros(shape) for _ in range(workers)]

    def step(self, gradients: list[Vector]) -> Vector:
        matrices = [g + e for g, e in zip(gradients, self.e, strict=True)]
        p = sum(matrix @ self.q for matrix in matrices) / len(matrices)
        for j in range(p.shape[1]):  # Gram-Schmidt
            for i in range(j):
                p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
            p[:, j] /= np.linalg.norm(p[:, j])
        own = [matrix.T @ p for matrix in matrices]
        self.e = [matrix - p @ q.T for matrix, q in zip(matrices, own, strict=True)]
        self.q = sum(own) / len(own)
        return p @ self.q.T


class OneBitAdamPaper:
    """1-bit Adam (arXiv 2102.02888, Alg. 1), on one vector: chunk r belongs to server r, each group has a scale.

    Warm-up is Adam(W) as everybody computes it, with bias corrections. After ``warmup`` steps the variance and its
    correction stay as they are. ``scale`` "rms" is ||x||_2 / sqrt(n) (the authors' code), "mean" ||x||_1 / n.
    """

    def __init__(self, numel: int, workers: int, *, group: int, warmup: int, scale: str, lr: float,
                 betas: tuple[float, float], eps: float, decay: float) -> None:  # fmt: skip
        self.group, self.warmup, self.scale = group, warmup, scale
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        chunk = -(-numel // workers)
        self.chunks = [slice(min(r * chunk, numel), min((r + 1) * chunk, numel)) for r in range(workers)]
        self.w, self.m, self.v, self.t = np.zeros(numel), np.zeros(numel), np.zeros(numel), 0
        self.closest = np.inf  # |x| / scale of the value whose sign was the least certain
        self.worker_error = [np.zeros(numel) for _ in range(workers)]
        self.server_error = [np.zeros(c.stop - c.start) for c in self.chunks]

    def compress(self, x: Vector) -> Vector:
        """C of one chunk."""
        out = np.empty_like(x)
        for at in range(0, len(x), self.group):
            part = x[at : at + self.group]
            size = np.linalg.norm(part) / len(part) ** 0.5 if self.scale == "rms" else np.abs(part).mean()
            self.closest = min(self.closest, np.abs(part).min() / size)
            for i, value in enumerate(part):
                out[at + i] = -size if value < 0 else size
        return out

    def step(self, gradients: list[Vector]) -> Vector:
        """The weights after one more step."""
        b1, b2 = self.betas
        self.t += 1
        workers = len(gradients)
        if self.t <= self.warmup:
            g = sum(gradients) / workers
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * g**2
        else:
            arrived = []  # by worker
            for n, g in enumerate(gradients):
                m_n = b1 * self.m + (1 - b1) * g  # l. 6
                x = m_n + self.worker_error[n]
                sent = np.concatenate([self.compress(x[chunk]) for chunk in self.chunks])  # l. 7
                self.worker_error[n] = x - sent
                arrived.append(sent)
            self.m = np.empty_like(self.m)
            for server, chunk in enumerate(self.chunks):
                x = sum(sent[chunk] for sent in arrived) / workers + self.server_error[server]  # l. 9
                self.m[chunk] = self.compress(x)
                self.server_error[server] = x - self.m[chunk]
        correction1, correction2 = 1 - b1**self.t, 1 - b2 ** min(self.t, self.warmup)
        update = np.zeros_like(self.m)
        for i in range(len(update)):
            if self.v[i] > 0:  # the authors' momentum mask: what never had a gradient is not moved
                update[i] = self.m[i] / correction1 / (np.sqrt(self.v[i] / correction2) + self.eps)
        self.w = (1 - self.lr * self.decay) * self.w - self.lr * update  # l. 13
        return self.w
