# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors: elements are peeled one by one from a queue of cells that hold a single one.

A cell also keeps the exclusive or of its elements' numbers, which names the one that is left (Goodrich and Mitzenmacher
2011). First in, first out, at no cost: each value then depends on few others, so that even sums that are not exact come
out to rounding, where a stack multiplies errors along chains of thousands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import flat, njit
from thinwire.ops.mask.cpu import set_bits, trailing_zeros, unsigned

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
    """The element's cell in each of the three tables."""
    a = ((word1 >> uint64(32)) * cells) >> uint64(32)
    b = ((word1 & LOW) * cells) >> uint64(32)
    c = ((word2 >> uint64(32)) * cells) >> uint64(32)
    return np.int64(a), np.int64(b + cells), np.int64(c + uint64(2) * cells)


@njit
def _gather(values, stride, words, words_stride, positions, positions_stride, payload, payload_stride, rows, table):
    for row in range(rows):
        for segment in range(len(table)):
            start, width, k, list_start = table[segment, 0], table[segment, 1], table[segment, 2], table[segment, 3]
            entry, end = list_start, list_start + k
            for first_column in range(start, start + width, 64):
                word = words[row * words_stride + first_column // 64]
                while word != 0 and entry < end:
                    column = first_column + np.int64(trailing_zeros(word))
                    positions[row * positions_stride + entry] = column
                    payload[row * payload_stride + entry] = values[row * stride + column]
                    entry += 1
                    word &= word - uint64(1)
            positions[row * positions_stride + entry : row * positions_stride + end] = -1
            payload[row * payload_stride + entry : row * payload_stride + end] = np.float32(0)


@njit
def _peaks(bits, stride, rows, table, magnitudes):
    """As integers, which have the order of sizes."""
    for segment in range(len(table)):
        k, list_start = table[segment, 2], table[segment, 3]
        largest = np.int32(0)
        for row in range(rows):
            values = bits[row * stride + list_start : row * stride + list_start + k]
            for i in range(k):
                largest = max(largest, values[i] & np.int32(0x7FFFFFFF))
        magnitudes[segment] = largest


@njit
def _round_to(payload, stride, residual, residual_stride, rows, table, quantum):
    for segment in range(len(table)):
        k, list_start, cells, unit = table[segment, 2], table[segment, 3], table[segment, 6], quantum[segment]
        for row in range(rows):
            values = payload[row * stride + list_start : row * stride + list_start + k]
            remainder = residual[row * residual_stride + list_start : row * residual_stride + list_start + k]
            if cells == 0:
                remainder[:] = np.float32(0)
                continue
            for i in range(k):
                rounded = np.float32(np.rint(values[i] / unit)) * unit
                remainder[i] = values[i] - rounded
                values[i] = rounded


@njit
def _encode(payload, payload_stride, positions, positions_stride, whole, whole_stride, out, stride, rows, table):
    for row in range(rows):
        for segment in range(len(table)):
            start, width, k, list_start, _, wire_start, count, seed = table[segment, :8]
            wire_start += row * stride
            if count == 0:
                whole_start = row * whole_stride + start
                out[wire_start : wire_start + width] = whole[whole_start : whole_start + width]
                continue
            sketch = out[wire_start : wire_start + 3 * count]
            sketch[:] = np.float32(0)
            cells, key = uint64(count), uint64(seed)
            for entry in range(list_start, list_start + k):
                column = positions[row * positions_stride + entry]
                if column < 0:
                    break
                word1, word2 = _hash(key, column - start)
                a, b, c = _cells(word1, word2, cells)
                value = payload[row * payload_stride + entry]
                value = -value if word2 & uint64(1) else value
                sketch[a] += value
                sketch[b] += value
                sketch[c] += value


@njit
def _estimate(lost, seed, cells, sums, out):
    """The median of its three signed cells for every element that is left. ``sums``: see ``_peel_row``."""
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
    """``tags`` and ``sums`` are one memory, 16 bytes per cell: its elements' count and names, then its sum."""
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
def _peel(wire, stride, index, index_stride, lost, lost_stride, out, out_stride, rows, wanted, table, estimate):
    """``wanted``: the rows that the wire holds, from the first to before the last."""
    size = 3 * np.max(table[:, 6])
    tags = np.empty(2 * size, np.uint64)
    sums = tags.view(np.float64)
    queue = np.empty(size, np.int64)
    for row in range(rows):
        is_wanted = wanted[0] <= row < wanted[1]
        wire_row = row - wanted[0] if is_wanted else 0
        for segment in range(len(table)):
            start, width, _, _, _, wire_start, count, seed = table[segment, :8]
            values = out[wire_row * out_stride + start : wire_row * out_stride + start + width]
            wire_start += wire_row * stride
            cells = wire[wire_start : wire_start + (3 * count if count else width)]
            words = index[row * index_stride + start // 64 : row * index_stride + (start + width) // 64]
            lost_words = lost[row * lost_stride + start // 64 : row * lost_stride + (start + width) // 64]
            if count == 0:
                lost_words[:] = uint64(0)
                if is_wanted:
                    values[:] = cells
                continue
            if is_wanted:
                values[:] = np.float32(0)
            _peel_row(cells, words, uint64(seed), uint64(count), values, lost_words, is_wanted, tags, sums, queue)
            if estimate and is_wanted:
                _estimate(lost_words, uint64(seed), uint64(count), sums, values)


@njit
def _restore(sent, sent_stride, residual, residual_stride, positions, positions_stride, lost, lost_stride, out,
             stride, rows, table):  # fmt: skip
    for row in range(rows):
        for segment in range(len(table)):
            start, width, k, list_start, _, _, count = table[segment, :7]
            if count == 0:
                out[row * stride + start : row * stride + start + width] = np.float32(0)
                continue
            for entry in range(list_start, list_start + k):
                column = positions[row * positions_stride + entry]
                if column < 0:
                    break
                value = residual[row * residual_stride + entry]
                if (lost[row * lost_stride + (column >> 6)] >> uint64(column & 63)) & uint64(1):
                    value += sent[row * sent_stride + entry]
                out[row * stride + column] = value


@njit
def _count(words, stride, rows, table, counts, counts_stride):
    for row in range(rows):
        for segment in range(len(table)):
            start, width = table[segment, 0], table[segment, 1]
            total = uint64(0)
            for i in range(row * stride + start // 64, row * stride + (start + width) // 64):
                total += set_bits(words[i])
            counts[row * counts_stride + segment] = total


def gather(rows: Tensor, words: Tensor, segments: SketchSegments, positions: Tensor, payload: Tensor) -> None:
    _gather(*flat(rows), *unsigned(words), *flat(positions), *flat(payload), len(rows), _table(segments))


def peaks(payload: Tensor, segments: SketchSegments, magnitudes: Tensor) -> None:
    values, stride = flat(payload)
    _peaks(values.view(np.int32), stride, len(payload), _table(segments), magnitudes.numpy().view(np.int32))


def round_to(payload: Tensor, quantum: Tensor, segments: SketchSegments, residual: Tensor) -> None:
    _round_to(*flat(payload), *flat(residual), len(payload), _table(segments), quantum.numpy())


def encode(payload: Tensor, positions: Tensor, segments: SketchSegments, whole: Tensor, out: Tensor) -> None:
    _encode(*flat(payload), *flat(positions), *flat(whole), *flat(out), len(payload), _table(segments))


def peel(
    wire: Tensor, index: Tensor, segments: SketchSegments, row: int, out: Tensor, lost: Tensor, estimate: bool
) -> None:
    wanted = row, row + len(wire)
    _peel(*flat(wire), *unsigned(index), *unsigned(lost), *flat(out), len(index), wanted, _table(segments), estimate)


def restore(
    sent: Tensor, residual: Tensor, positions: Tensor, lost: Tensor, segments: SketchSegments, out: Tensor
) -> None:
    _restore(*flat(sent), *flat(residual), *flat(positions), *unsigned(lost), *flat(out), len(out), _table(segments))


def count(words: Tensor, segments: SketchSegments, counts: Tensor) -> None:
    _count(*unsigned(words), len(words), _table(segments), *flat(counts))


def _table(segments: SketchSegments) -> np.ndarray:
    table: np.ndarray = segments.table.numpy()
    return table
