"""SEPARATE (ICLR 2025). Tensors are flat float64 arrays; steps and workers are counted from 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from papers.support import Array, mean_of


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
