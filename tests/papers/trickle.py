"""Trickle (section 2 of its first description, QUALITY.md), and what is conserved, from what any form of it shows.

A gradient or weight argument is a list over tensors (of any shape); `gradients` is a list over workers of such lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from papers.compressors import Compressor
from papers.support import Array, Indices, array, mean_of, zeros_like


class Trickle:
    """QUALITY.md section 2: error feedback on updates, each worker's lr g / (sqrt(r v / (1 - b2^t)) + eps).

    r is one scalar for all tensors, measured over the coordinates sample(tensor, t) of all of them (give an empty list
    for a tensor without any). Its order, which the text leaves open: with delayed=False the r used in step t is the
    value AFTER step t's sample went in; with delayed=True it is the value BEFORE it, so one step old, and 1 / sqrt(N)
    in the very first step. The first measured ratio is taken as it is; a step whose sample is all zeros measures
    nothing, and until something was measured r stays as it is. sample=None: r = 1 for ever.

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
        self.s, self.y = zeros_like(self.weights), zeros_like(self.weights)
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
        used = before if self.delayed else self.r
        if used is None and self.delayed and self.sample is not None:
            used = self.workers**-0.5
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
                self.y[i] = c + self.s[i]
                c = self.server(self.y[i])
                self.s[i] = self.y[i] - c
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
