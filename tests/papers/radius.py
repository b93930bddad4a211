"""Radius (MLSys 2025). Tensors are flat float64 arrays; steps and workers are counted from 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from papers.support import Array, Mask, mean_of, top_mask


class Radius:
    """Radius (MLSys 2025), Algorithms 1 and 2, as the method description restates them.

    Two points can be read in two ways, and each has a switch:
    `decay_in_direction` adds weight_decay * w to the direction that is ranked (Alg. 2 line 5), with the weights before
    the step; `floor_k` takes k = max(int(density * n), 1), as the description has it, in place of round(density * n).
    `printed_schedule` resamples when t % T == 0 with t counted from 1 (Alg. 1 lines 1 and 7) and not from `start` on;
    before the first such step the masks are all ones.
    `residual_at_mask` matters for a residual_scale below 1, which the paper does not have: what a resample step left in
    the residual then travels with the next values at its position, if the new mask has it, before the next resample.
    """

    def __init__(
        self,
        sizes: list[int],
        workers: int,
        density: float,
        period: int,
        start: int,
        lr: float,
        max_norm: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        residual_scale: float = 1.0,
        decay_in_direction: bool = False,
        floor_k: bool = False,
        printed_schedule: bool = False,
        residual_at_mask: bool = False,
    ) -> None:
        self.sizes, self.workers, self.density = list(sizes), workers, density
        self.period, self.start, self.lr, self.max_norm = period, start, lr, max_norm
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay
        self.residual_scale = residual_scale
        self.decay_in_direction, self.floor_k, self.printed_schedule = decay_in_direction, floor_k, printed_schedule
        self.residual_at_mask = residual_at_mask
        self.steps = 0
        self.clip_factor = 1.0
        self.masks: list[Mask] = [np.ones(n, dtype=np.bool_) for n in self.sizes]
        self.residuals: list[list[Array]] = [[np.zeros(n) for n in self.sizes] for _ in range(workers)]
        self.weights: list[Array] = [np.zeros(n) for n in self.sizes]
        self.directions: list[Array] = [np.zeros(n) for n in self.sizes]
        self.first: list[Array] = [np.zeros(n) for n in self.sizes]
        self.second: list[Array] = [np.zeros(n) for n in self.sizes]

    def count(self, n: int) -> int:
        """How many of n elements a mask keeps: never fewer than one (the method description)."""
        return max(int(self.density * n) if self.floor_k else round(self.density * n), 1)

    def resamples(self, t: int) -> bool:
        """Whether step t (from 0) sends everything and renews the masks (Alg. 1 line 7; the method description)."""
        if t < self.start:
            return False
        if self.printed_schedule:
            return (t + 1) % self.period == 0
        return (t - self.start) % self.period == 0

    def step(self, gradients: Sequence[Sequence[Array]]) -> list[Array]:
        """One pass of Alg. 1's loop; returns what line 20 is given: the mean gradients before the clipping."""
        t = self.steps
        resample = self.resamples(t)
        means: list[Array] = []
        for i, n in enumerate(self.sizes):
            sent: list[Array] = []
            for worker in range(self.workers):
                g = np.array(gradients[worker][i], dtype=np.float64)
                if t < self.start:  # lines 3-5
                    sent.append(g)
                elif resample:  # lines 7-11
                    residual = self.residuals[worker][i]
                    sent.append(g + self.residual_scale * residual)
                    self.residuals[worker][i] = residual - self.residual_scale * residual
                else:  # lines 13-17
                    if self.residual_at_mask:
                        g = g + np.where(self.masks[i], self.residuals[worker][i], 0.0)
                        self.residuals[worker][i] = np.where(self.masks[i], 0.0, self.residuals[worker][i])
                    inside, outside = np.zeros(n), np.zeros(n)
                    inside[self.masks[i]] = g[self.masks[i]]
                    outside[~self.masks[i]] = g[~self.masks[i]]
                    sent.append(inside)
                    self.residuals[worker][i] = self.residuals[worker][i] + outside
            means.append(mean_of(sent))
        self.optimize(means)
        if resample:  # lines 22-24: after the direction is known
            self.masks = [top_mask(u, self.count(u.size)) for u in self.directions]
        self.steps += 1
        return means

    def optimize(self, means: list[Array]) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ (line 20), then AdamW (line 21 with Alg. 2, line 25)."""
        norm = float(np.sqrt(sum(float(np.sum(g * g)) for g in means)))
        self.clip_factor = min(self.max_norm / (norm + 1e-6), 1.0)
        beta1, beta2 = self.betas
        age = self.steps + 1
        for i, mean in enumerate(means):
            g = mean * self.clip_factor
            self.first[i] = beta1 * self.first[i] + (1 - beta1) * g
            self.second[i] = beta2 * self.second[i] + (1 - beta2) * g * g
            m_hat = self.first[i] / (1 - beta1**age)
            v_hat = self.second[i] / (1 - beta2**age)
            adam = m_hat / (np.sqrt(v_hat) + self.eps)
            full = adam + self.weight_decay * self.weights[i]
            self.directions[i] = full if self.decay_in_direction else adam
            self.weights[i] = self.weights[i] - self.lr * full
