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
