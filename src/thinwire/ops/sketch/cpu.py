# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba: elements are peeled one by one from a queue of cells that hold a single element.

A cell also keeps the exclusive or of its elements' numbers, which names the last one (Goodrich and Mitzenmacher 2011).
The queue is first in, first out, at no cost: each value then depends on few others, so that even inexact sums come out
to rounding, whereas a stack multiplies errors along chains of thousands.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import by_row, njit, rows_of
from thinwire.ops.mask.cpu import list_bits, set_bits, trailing_zeros

if TYPE_CHECKING:
    from thinwire.ops.sketch import SketchSegments

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
MIX3 = np.uint64(0xD6E8FEB86659FD93)
LOW = np.uint64(0xFFFFFFFF)
COUNT_SHIFT = np.uint64(40)  # a tag: how many elements a cell holds, above the exclusive or of their numbers
COUNT_ONE = np.uint64(1 << 40)
XOR_MASK = np.uint64((1 << 40) - 1)

_by_row = functools.partial(by_row, table=lambda segments: segments.table.numpy())


@njit
def _hash(seed, element):
    word = (uint64(element) + uint64(1)) * GOLDEN + seed
    word = (word ^ (word >> uint64(30))) * MIX1
    word = (word ^ (word >> uint64(27))) * MIX2
    word1 = word ^ (word >> uint64(31))
    word2 = (word1 ^ (word1 >> uint64(32))) * MIX3
    return word1, word2 ^ (word2 >> uint64(32))


@njit
def _cells(word1, word2, cells):
    """Return the element's cell in each of the three tables."""
    a = ((word1 >> uint64(32)) * cells) >> uint64(32)
    b = ((word1 & LOW) * cells) >> uint64(32)
    c = ((word2 >> uint64(32)) * cells) >> uint64(32)
    return np.int64(a), np.int64(b + cells), np.int64(c + uint64(2) * cells)


@_by_row
def gather(values, words, table, positions, payload):
    for segment in range(len(table)):
        start, width, k, first = table[segment, :4]
        end, own_words = start + width, words[start // 64 : (start + width) // 64]
        list_bits(values[start:end], own_words, start, positions[first : first + k], payload[first : first + k])


@_by_row
def peaks(payload, table, magnitudes):
    # integers have the order of sizes
    sizes, largest = payload.view(np.int32), magnitudes.view(np.int32)
    for segment in range(len(table)):
        _, _, k, list_start = table[segment, :4]
        for i in range(list_start, list_start + k):
            largest[segment] = max(largest[segment], sizes[i] & np.int32(0x7FFFFFFF))


@_by_row
def round_to(payload, quantum, table, residual):
    for segment in range(len(table)):
        _, _, k, list_start, _, _, cells = table[segment, :7]
        unit = quantum[segment]
        if cells == 0:
            residual[list_start : list_start + k] = np.float32(0)
            continue
        for i in range(list_start, list_start + k):
            rounded = np.float32(np.rint(payload[i] / unit)) * unit
            residual[i] = payload[i] - rounded
            payload[i] = rounded


@_by_row
def encode(payload, positions, table, whole, out):
    for segment in range(len(table)):
        start, width, k, list_start, _, wire_start, count, seed = table[segment, :8]
        if count == 0:
            out[wire_start : wire_start + width] = whole[start : start + width]
            continue
        sketch = out[wire_start : wire_start + 3 * count]
        sketch[:] = np.float32(0)
        cells, key = uint64(count), uint64(seed)
        for entry in range(list_start, list_start + k):
            column = positions[entry]
            if column < 0:
                break
            word1, word2 = _hash(key, column - start)
            a, b, c = _cells(word1, word2, cells)
            value = -payload[entry] if word2 & uint64(1) else payload[entry]
            sketch[a] += value
            sketch[b] += value
            sketch[c] += value


@njit
def _estimate(lost, seed, cells, sums, out):
    """Give every element that is left the median of its three signed cells. ``sums``: see ``_peel_row``."""
    for i in range(lost.size):
        word = lost[i]
        while word != 0:
            element = uint64(64 * i) + trailing_zeros(word)
            word1, word2 = _hash(seed, element)
            a, b, c = _cells(word1, word2, cells)
            x, y, z = sums[2 * a + 1], sums[2 * b + 1], sums[2 * c + 1]
            middle = max(min(x, y), min(max(x, y), z))
            out[element] = np.float32(-middle if word2 & uint64(1) else middle)
            word &= word - uint64(1)


@njit
def _peel_row(sketch, index, seed, cells, out, lost, wanted, tags, sums, queue):
    """Peel a sketch. ``tags`` and ``sums`` share one memory, 16 bytes per cell: elements' count and names, the sum."""
    size = np.int64(3 * cells)
    for i in range(size):
        tags[2 * i] = uint64(0)
        sums[2 * i + 1] = sketch[i] if wanted else np.float32(0)
    for i in range(index.size):
        lost[i] = index[i]
        word = index[i]
        while word != 0:
            element = uint64(64 * i) + trailing_zeros(word)
            word1, word2 = _hash(seed, element)
            for cell in _cells(word1, word2, cells):
                tags[2 * cell] = (tags[2 * cell] + COUNT_ONE) ^ element
            word &= word - uint64(1)
    queue_end = 0
    for i in range(size):
        if tags[2 * i] >> COUNT_SHIFT == uint64(1):
            queue[queue_end] = i
            queue_end += 1
    head = 0
    while head < queue_end:  # a cell comes to hold one element at most once: the queue never overflows
        cell = queue[head]
        head += 1
        if tags[2 * cell] >> COUNT_SHIFT != uint64(1):
            continue
        element = tags[2 * cell] & XOR_MASK
        word1, word2 = _hash(seed, element)
        value = sums[2 * cell + 1]
        if wanted:
            out[element] = np.float32(-value if word2 & uint64(1) else value)
        lost[element >> uint64(6)] &= ~(uint64(1) << (element & uint64(63)))
        for element_cell in _cells(word1, word2, cells):
            tag = (tags[2 * element_cell] - COUNT_ONE) ^ element
            tags[2 * element_cell] = tag
            sums[2 * element_cell + 1] -= value
            if tag >> COUNT_SHIFT == uint64(1):
                queue[queue_end] = element_cell
                queue_end += 1


@njit
def _peel(wire, index, table, out, lost, estimate, tags, queue):
    """Peel a row's sketches. ``wire`` and ``out`` are empty for a row that the wire does not hold."""
    wanted, sums = out.size > 0, tags.view(np.float64)
    for segment in range(len(table)):
        start, width, _, _, _, wire_start, count, seed = table[segment, :8]
        values = out[start : start + width]
        cells = wire[wire_start : wire_start + (3 * count if count else width)]
        words = index[start // 64 : (start + width) // 64]
        lost_words = lost[start // 64 : (start + width) // 64]
        if count == 0:
            lost_words[:] = uint64(0)
            values[:] = cells
            continue
        values[:] = np.float32(0)
        _peel_row(cells, words, uint64(seed), uint64(count), values, lost_words, wanted, tags, sums, queue)
        if estimate and wanted:
            _estimate(lost_words, uint64(seed), uint64(count), sums, values)


def peel(
    wire: Tensor, index: Tensor, segments: SketchSegments, row: int, out: Tensor, lost: Tensor, estimate: bool
) -> None:
    table = segments.table.numpy()
    size = 3 * int(table[:, 6].max())
    tags, queue = np.empty(2 * size, np.uint64), np.empty(size, np.int64)
    wanted = dict(enumerate(rows_of(wire, out), row))
    nothing = np.empty(0, np.float32)
    for number, (words, lost_words) in enumerate(rows_of(index, lost)):
        cells, values = wanted.get(number, (nothing, nothing))
        _peel(cells, words, table, values, lost_words, estimate, tags, queue)


@_by_row
def restore(sent, residual, positions, lost, table, out):
    for segment in range(len(table)):
        start, width, k, list_start, _, _, count = table[segment, :7]
        if count == 0:
            out[start : start + width] = np.float32(0)
            continue
        for entry in range(list_start, list_start + k):
            column = positions[entry]
            if column < 0:
                break
            value = residual[entry]
            if (lost[column >> 6] >> uint64(column & 63)) & uint64(1):
                value += sent[entry]
            out[column] = value


@_by_row
def count(words, table, counts):
    for segment in range(len(table)):
        start, width, total = table[segment, 0], table[segment, 1], uint64(0)
        for i in range(start // 64, (start + width) // 64):
            total += set_bits(words[i])
        counts[segment] = total
