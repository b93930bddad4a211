"""SCAPE (arXiv 2607.01678), with AdamS' step in it. "Restated" means the form of the restatement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from papers.support import Array, Mask, flat

CLIP_RULES = ("paper", "code", "return")


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


def densest(x: Array, density: float) -> Mask:
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
                following.append(densest(self.semi[self.owners[i]][i], density))
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
