"""PowerSGD (arXiv 1905.13727, Alg. 1 and 2), as a compressor."""

from __future__ import annotations

from typing import Any

import numpy as np

from papers.compressors import dense
from papers.support import Array, array, mean_of


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
