"""Float64 transcriptions of three papers' pseudo-code, in plain numpy with loops over workers, for use as oracles.

Written from the papers and their restatement alone, by someone without sight of the library, so that agreement means
something.
Tensors are flat float64 arrays. Steps and workers are counted from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def top_k(values: Array, k: int) -> Mask:
    """The mask of the k largest magnitudes; among equal magnitudes the lowest index wins."""
    order = np.argsort(-np.abs(values), kind="stable")
    mask = np.zeros(values.size, dtype=np.bool_)
    mask[order[:k]] = True
    return mask


def mean_of(parts: Sequence[Array]) -> Array:
    """The mean over workers, added in worker order."""
    total = np.zeros_like(parts[0], dtype=np.float64)
    for part in parts:
        total = total + part
    return total / len(parts)


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
            self.masks = [top_k(u, self.count(u.size)) for u in self.directions]
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


class SEPARATE:
    """SEPARATE (ICLR 2025), Algorithm 1, on blocks, with the error update of the method description.

    `keep` is the paper's beta, read as the weight of the old error; with `printed` it weights the new error, as
    STEP 5 prints it. With `common` the error is taken against the common estimate that STEP 4 prints (the same
    on all workers) and not against the worker's own; the mean over the workers' errors is the same in both.
    """

    def __init__(
        self,
        n_blocks: int,
        block: int,
        workers: int,
        scale: float,
        keep: float,
        reset: int = 0,
        printed: bool = False,
        common: bool = False,
    ) -> None:
        self.n_blocks, self.block, self.workers = n_blocks, block, workers
        self.scale, self.keep, self.reset = scale, keep, reset
        self.printed, self.common = printed, common
        self.steps = 0
        self.errors: list[Array] = [np.zeros(n_blocks * block) for _ in range(workers)]

    def project(self, h: Array, matrix: Array) -> Array:
        """STEP 2: p_i = <h, xi_i>, block by block; xi_i is column i of the matrix."""
        rows = h.reshape(self.n_blocks, self.block)
        return np.stack([row @ matrix for row in rows])

    def expand(self, p: Array, matrix: Array) -> Array:
        """STEP 4: sum of p_i xi_i, times the scale (1/m in the paper)."""
        return np.concatenate([row @ matrix.T * self.scale for row in p])

    def step(self, gradients: Sequence[Array], matrix: Array) -> Array:
        """One pass of Alg. 1's loop; returns the estimate of STEP 4."""
        matrix = np.array(matrix, dtype=np.float64)
        sums = [np.array(gradients[w], dtype=np.float64) + self.errors[w] for w in range(self.workers)]  # STEP 1
        parts = [self.project(h, matrix) for h in sums]  # STEP 2
        estimate = self.expand(mean_of(parts), matrix)  # STEPS 3 and 4
        old = 1.0 - self.keep if self.printed else self.keep
        new = self.keep if self.printed else 1.0 - self.keep
        self.steps += 1
        for worker in range(self.workers):  # STEP 5
            seen = estimate if self.common else self.expand(parts[worker], matrix)
            self.errors[worker] = old * self.errors[worker] + new * (sums[worker] - seen)
            if self.reset > 0 and self.steps % self.reset == 0:
                self.errors[worker] = np.zeros(self.n_blocks * self.block)
        return estimate


class TAGC:
    """TAGC (EuroMLSys 2025), Algorithm 1, with exact top-k, a true OR and left-overs put back."""

    def __init__(self, n: int, workers: int, keep: int, shared: bool = False) -> None:
        self.n, self.workers, self.keep, self.shared = n, workers, keep, shared
        self.steps = 0
        self.accumulators: list[Array] = [np.zeros(n) for _ in range(workers)]
        self.union: Mask = np.zeros(n, dtype=np.bool_)
        self.left_over = 0

    def step(self, gradients: Sequence[Array], recover: Callable[[Array, NDArray[np.int64]], Array]) -> Array:
        """One call of Alg. 1; `recover` stands for lines 6-10 (sketch, reduce, peel) and marks failures with NaN.

        A worker sends only what it selected: line 2 has zeroed the rest before line 5 compresses it, so at a position
        of the union that the worker did not select it adds 0 to the sketch and its own value stays in the accumulator.
        """
        for worker in range(self.workers):  # line 1
            self.accumulators[worker] = self.accumulators[worker] + np.array(gradients[worker], dtype=np.float64)
        if self.shared:  # line 2, one owner's choice for everyone
            chosen = top_k(self.accumulators[self.steps % self.workers], self.keep)
            selected = [chosen.copy() for _ in range(self.workers)]
        else:  # line 2, everyone's own choice
            selected = [top_k(accumulator, self.keep) for accumulator in self.accumulators]
        union = np.zeros(self.n, dtype=np.bool_)
        for mask in selected:  # lines 3 and 4
            union = union | mask
        index = np.flatnonzero(union).astype(np.int64)
        total = np.zeros(index.size)
        for worker in range(self.workers):  # lines 5 and 6
            total = total + np.where(selected[worker], self.accumulators[worker], 0.0)[index]
        sums = np.array(recover(total.copy(), index.copy()), dtype=np.float64)  # lines 9 and 10
        failed = np.isnan(sums)
        mean = np.zeros(self.n)
        mean[index[~failed]] = sums[~failed] / self.workers
        arrived = np.zeros(self.n, dtype=np.bool_)
        arrived[index[~failed]] = True
        for worker in range(self.workers):  # acc_next: all that did not arrive
            self.accumulators[worker] = np.where(selected[worker] & arrived, 0.0, self.accumulators[worker])
        self.union = union
        self.left_over = int(failed.sum())
        self.steps += 1
        return mean


def one_bit_index(masks: Sequence[Mask], field_bits: int = 1, word_bits: int = 32) -> Mask:
    """TAGC section 2.2: the workers' indices packed into integer words, added as NCCL's sum does, and read back.

    Element i is field i % (word_bits // field_bits) of its word, lowest bits first. The sum knows nothing of fields: a
    field that overflows carries into the next one, and the carry out of the top of a word is lost. An element is
    read as flagged when its field is not zero. With one bit, two workers' equal flags read as none.
    """
    n = masks[0].size
    fields = word_bits // field_bits
    words = -(-n // fields)
    sums = [0] * words
    for mask in masks:
        packed = [0] * words
        for i in range(n):
            if mask[i]:
                packed[i // fields] |= 1 << (field_bits * (i % fields))
        for j in range(words):
            sums[j] = (sums[j] + packed[j]) % (1 << word_bits)
    read = np.zeros(n, dtype=np.bool_)
    for i in range(n):
        read[i] = (sums[i // fields] >> (field_bits * (i % fields))) & ((1 << field_bits) - 1) != 0
    return read
