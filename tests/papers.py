"""The papers' pseudo-code in float64, with plain loops over workers: what the methods are held against.

Written from the papers' text, in their order and symbols; nothing of Thinwire is used. One parameter tensor each; what
is random (matrices, hashes) is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

Vector = np.ndarray


def top(values: Vector, k: int) -> Vector:
    """Flags of the k largest magnitudes, ties to the lowest index."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    flags = np.zeros(len(values), bool)
    flags[order[:k]] = True
    return flags


class AdamW:
    """Radius, Alg. 2: gradient correction, with weight decay decoupled; also the step that Alg. 1 takes."""

    def __init__(self, n: int, lr: float, betas=(0.9, 0.999), eps=1e-8, decay=0.01) -> None:
        self.w, self.m, self.v, self.t = np.zeros(n), np.zeros(n), np.zeros(n), 0
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay

    def step(self, gradient: Vector) -> Vector:
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * gradient  # l. 1
        self.v = b2 * self.v + (1 - b2) * gradient**2  # l. 2
        m_hat, v_hat = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)  # l. 3-4
        direction = m_hat / (np.sqrt(v_hat) + self.eps) + self.decay * self.w  # l. 5
        self.w = self.w - self.lr * direction
        return direction


class RadiusPaper:
    """Radius, Alg. 1, several tensors clipped together. Resamples at the first step at or after start, then every T."""

    def __init__(self, spans: Sequence[tuple[int, int]], workers: int, density: float, T: int, start: int, lr: float,
                 max_norm: float, decay: float = 0.01, scale: float = 1.0) -> None:  # fmt: skip
        """``spans``: (rows, columns) of each tensor: top-k is taken per row (one row: the paper; else a shard each)."""
        self.spans, self.N, self.d, self.T, self.start, self.max_norm = spans, workers, density, T, start, max_norm
        self.scale = scale
        self.adam = [AdamW(rows * columns, lr, decay=decay) for rows, columns in spans]
        self.residual = [[np.zeros(r * c) for r, c in spans] for _ in range(workers)]
        self.mask: list[Vector] = []
        self.last = -1
        self.t = 0

    def step(self, gradients: list[list[Vector]]) -> list[Vector]:
        resample = self.t >= self.start and (self.last < 0 or self.t - self.last >= self.T)
        means = []
        for i, (rows, columns) in enumerate(self.spans):
            total = np.zeros(rows * columns)
            for n in range(self.N):
                g, e = gradients[n][i].copy(), self.residual[n][i]
                if self.t < self.start:  # l. 3-5
                    total += g
                elif resample:  # l. 7-11
                    total += g + self.scale * e
                    self.residual[n][i] = (1 - self.scale) * e
                else:  # l. 13-17
                    sent = g + e  # e is zero on the mask where residual_scale is 1
                    total[self.mask[i]] += sent[self.mask[i]]
                    sent[self.mask[i]] = 0
                    self.residual[n][i] = sent
            means.append(total / self.N)
        norm = math.sqrt(sum(float((g**2).sum()) for g in means))  # l. 20
        factor = min(1.0, self.max_norm / (norm + 1e-6))
        directions = [adam.step(factor * g) for adam, g in zip(self.adam, means, strict=True)]  # l. 21
        if resample:  # l. 22-24
            self.mask = []
            for (_, columns), direction in zip(self.spans, directions, strict=True):
                k = max(int(self.d * columns), 1)
                self.mask.append(np.concatenate([top(row, k) for row in direction.reshape(-1, columns)]))
            self.last = self.t
        self.t += 1
        return means


class SeparatePaper:
    """SEPARATE on blocks: h = g + e, p = mean h M, g~ = p M^T * scale, e' = keep e + (1 - keep)(h - C(h))."""

    def __init__(self, blocks: int, block: int, workers: int, scale: float, keep: float, reset: int = 0) -> None:
        self.e = [np.zeros((blocks, block)) for _ in range(workers)]
        self.scale, self.keep, self.reset, self.t = scale, keep, reset, 0

    def step(self, gradients: list[Vector], matrix: Vector) -> Vector:
        """``gradients``: (blocks, block) of every worker; ``matrix``: (block, m)."""
        p = np.zeros((gradients[0].shape[0], matrix.shape[1]))
        for n, gradient in enumerate(gradients):
            h = gradient + self.e[n]
            mine = h @ matrix
            p += mine / len(gradients)
            self.e[n] = self.keep * self.e[n] + (1 - self.keep) * (h - self.scale * mine @ matrix.T)
        if self.reset and self.t % self.reset == 0:  # step 5
            self.e = [np.zeros_like(e) for e in self.e]
        self.t += 1
        return self.scale * p @ matrix.T


def peel(values: Vector, index: Vector, places: Callable[[int], tuple[list[int], int]], cells: int) -> Vector:
    """LHC: insert ``values`` at ``index`` into a count sketch and peel it. NaN: could not be recovered."""
    sketch, members = np.zeros(cells), [set() for _ in range(cells)]
    elements = [int(i) for i in np.flatnonzero(index)]
    for i in elements:
        where, sign = places(i)
        for cell in where:
            sketch[cell] += sign * values[i]
            members[cell].add(i)
    out = np.zeros(len(values))
    out[elements] = np.nan
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
    return out


class TagcPaper:
    """TAGC, Alg. 1: sparsify with accumulation, OR of indices, one sketch for all, peeling; left-overs go back."""

    def __init__(self, n: int, workers: int, keep: int, shared: bool = False) -> None:
        self.acc = [np.zeros(n) for _ in range(workers)]
        self.keep, self.shared = keep, shared

    def step(
        self, gradients: list[Vector], recover: Callable[[Vector, Vector], Vector] | None, owner: int = 0
    ) -> Vector:
        """``recover(sum of the kept values, union)``: the sums that come out of the sketch, NaN for left-overs."""
        h = [g + acc for g, acc in zip(gradients, self.acc, strict=True)]
        flags = [top(x, self.keep) for x in h]
        if self.shared:
            flags = [flags[owner]] * len(h)
        union = np.zeros(len(h[0]), bool)
        total = np.zeros(len(h[0]))
        for x, mine in zip(h, flags, strict=True):
            union |= mine
            total += np.where(mine, x, 0)
        out = total if recover is None else recover(total, union)
        lost = np.isnan(out)
        self.acc = [np.where(mine & ~lost, 0, x) for x, mine in zip(h, flags, strict=True)]
        return np.where(lost, 0, out) / len(h)


def one_bit_sum(masks: list[Vector], bits: int = 1, word: int = 32) -> Vector:
    """TAGC's index on NCCL: fields of ``bits`` bits in words that are summed. What is read back: fields not zero."""
    fields = word // bits
    n = len(masks[0])
    out = np.zeros(n, bool)
    for start in range(0, n, fields):
        total = 0
        for mask in masks:
            total += sum(1 << (bits * j) for j, flag in enumerate(mask[start : start + fields]) if flag)
        total %= 1 << word
        for j in range(min(fields, n - start)):
            out[start + j] = (total >> (bits * j)) & ((1 << bits) - 1) != 0
    return out


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
