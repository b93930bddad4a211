"""TAGC (EuroMLSys 2025) and LHC, whose sketch it sends; flat float64 arrays, steps and workers counted from 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from papers.support import Array, Mask, top_mask


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
            chosen = top_mask(self.accumulators[self.steps % self.workers], self.keep)
            selected = [chosen.copy() for _ in range(self.workers)]
        else:  # line 2, everyone's own choice
            selected = [top_mask(accumulator, self.keep) for accumulator in self.accumulators]
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


def peel(values: Array, index: Array, places: Callable[[int], tuple[list[int], int]], cells: int) -> Array:
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
