"""1-bit Adam (arXiv 2102.02888)."""

from __future__ import annotations

import numpy as np

from papers.support import Array


class OneBitAdam:
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

    def compress(self, x: Array) -> Array:
        """C of one chunk."""
        out = np.empty_like(x)
        for at in range(0, len(x), self.group):
            part = x[at : at + self.group]
            size = np.linalg.norm(part) / len(part) ** 0.5 if self.scale == "rms" else np.abs(part).mean()
            self.closest = min(self.closest, np.abs(part).min() / size)
            for i, value in enumerate(part):
                out[at + i] = -size if value < 0 else size
        return out

    def step(self, gradients: list[Array]) -> Array:
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
