"""Local steps: DiLoCo (arXiv 2311.08105, Alg. 1), Streaming DiLoCo (arXiv 2501.18512, Alg. 2) and LS1 (QUALITY.md,
section 5).

A gradient or weight argument is a list over tensors (of any shape); `gradients` is a list over workers of such lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from papers.compressors import Compressor, dense, sign_mean
from papers.support import Array, array, mean_of, zeros_like


def clipped(gradient: Sequence[Array], max_norm: float | None, epsilon: float = 0.0) -> list[Array]:
    """The list scaled down to a joint norm of at most max_norm; torch's clip_grad_norm_ has epsilon = 1e-6."""
    norm = float(np.sqrt(sum(float(np.sum(g**2)) for g in gradient)))
    factor = 1.0 if max_norm is None or norm == 0.0 else min(1.0, max_norm / (norm + epsilon))
    return [factor * g for g in gradient]


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


class StreamingDiLoCo(LocalSteps):
    """Streaming DiLoCo, Alg. 2, on the workers' own clock t = 1, 2, ..., with fragments p of the tensors.

    For each t, after the inner step of every worker m:
      t - t_p - tau mod H = 0:   theta_p <- OuterOpt(theta_p, Delta_p of t - tau);   theta_m,p <- alpha theta_m,p +
                                 (1 - alpha) theta_p
      t - t_p mod H = 0:         Delta_m,p = theta_p - theta_m,p;   Delta_p = mean_m Delta_m,p leaves
    theta_p is what the last outer step of fragment p made (the paper writes theta^(t - H), the workers' start). Where
    both come at one t, what arrives is taken up first.

    fragments: lists of the tensors' numbers. offsets: t_p of each, 1 to H.
    """

    def __init__(
        self, weights: Sequence[Any], workers: int, inner: Callable[[], SGD | AdamW], outer_lr: float, momentum: float,
        fragments: Sequence[Sequence[int]], offsets: Sequence[int], every: int, delay: int, mix: float,
        compress: Compressor = dense,
    ) -> None:  # fmt: skip
        super().__init__(weights, workers, inner, outer_lr, momentum)
        self.fragments, self.offsets, self.every, self.delay, self.mix = fragments, offsets, every, delay, mix
        self.compress, self.t = compress, 0
        self.under_way: dict[int, dict[int, Array]] = {}

    def clock(self, last: bool = False) -> None:
        """All workers have taken their inner step t. ``last``, ours and not the paper's: all rounds end with it."""
        self.t += 1
        for p, offset in enumerate(self.offsets):
            if p in self.under_way and (last or (self.t - offset - self.delay) % self.every == 0):
                self.arrive(p, self.mix)
        for p, offset in enumerate(self.offsets):
            if last or (self.t - offset) % self.every == 0:
                self.leave(p)
                if last or self.delay == 0:
                    self.arrive(p, 0.0)

    def leave(self, p: int) -> None:
        self.rounds += 1
        self.under_way[p] = {}
        for i in self.fragments[p]:
            deltas = [self.weights[i] - local[i] for local in self.local]
            self.under_way[p][i] = mean_of(self.compress(i, self.rounds, deltas))

    def arrive(self, p: int, mix: float) -> None:
        for i, d in self.under_way.pop(p).items():
            self.u[i] = self.momentum * self.u[i] + d
            self.weights[i] = self.weights[i] - self.outer_lr * (d + self.momentum * self.u[i])
            for local in self.local:
                local[i] = mix * local[i] + (1 - mix) * self.weights[i]


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
