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
    from thinwire.ops.sketch import Parts

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX1 = np.uint64(0xBF58476D1CE4E5B9)
MIX2 = np.uint64(0x94D049BB133111EB)
MIX3 = np.uint64(0xD6E8FEB86659FD93)
LOW = np.uint64(0xFFFFFFFF)
COUNT_AT = np.uint64(40)  # a tag: how many elements a cell holds, above the exclusive or of their numbers
ONE = np.uint64(1 << 40)
NAME = np.uint64((1 << 40) - 1)


@njit
def _hash(seed, element):
    word = (uint64(element) + uint64(1)) * GOLDEN + seed
    word = (word ^ (word >> uint64(30))) * MIX1
    word = (word ^ (word >> uint64(27))) * MIX2
    first = word ^ (word >> uint64(31))
    second = (first ^ (first >> uint64(32))) * MIX3
    return first, second ^ (second >> uint64(32))


@njit
def _cells(first, second, cells):
    """The element's cell in each of the three tables."""
    a = ((first >> uint64(32)) * cells) >> uint64(32)
    b = ((first & LOW) * cells) >> uint64(32)
    c = ((second >> uint64(32)) * cells) >> uint64(32)
    return np.int64(a), np.int64(b + cells), np.int64(c + uint64(2) * cells)


@njit
def _gather(values, stride, words, words_stride, found, found_stride, payload, payload_stride, rows, table):
    for row in range(rows):
        for part in range(len(table)):
            start, width, k, place = table[part, 0], table[part, 1], table[part, 2], table[part, 3]
            i, end = place, place + k
            for at in range(start, start + width, 64):
                word = words[row * words_stride + at // 64]
                while word != 0 and i < end:
                    column = at + np.int64(trailing_zeros(word))
                    found[row * found_stride + i] = column
                    payload[row * payload_stride + i] = values[row * stride + column]
                    i += 1
                    word &= word - uint64(1)
            found[row * found_stride + i : row * found_stride + end] = -1
            payload[row * payload_stride + i : row * payload_stride + end] = np.float32(0)


@njit
def _peaks(bits, stride, rows, table, found):
    """As integers, which have the order of sizes."""
    for part in range(len(table)):
        k, place = table[part, 2], table[part, 3]
        largest = np.int32(0)
        for row in range(rows):
            values = bits[row * stride + place : row * stride + place + k]
            for i in range(k):
                largest = max(largest, values[i] & np.int32(0x7FFFFFFF))
        found[part] = largest


@njit
def _round_to(payload, stride, rest, rest_stride, rows, table, quantum):
    for part in range(len(table)):
        k, place, cells, unit = table[part, 2], table[part, 3], table[part, 6], quantum[part]
        for row in range(rows):
            values = payload[row * stride + place : row * stride + place + k]
            left = rest[row * rest_stride + place : row * rest_stride + place + k]
            if cells == 0:
                left[:] = np.float32(0)
                continue
            for i in range(k):
                rounded = np.float32(np.rint(values[i] / unit)) * unit
                left[i] = values[i] - rounded
                values[i] = rounded


@njit
def _encode(payload, payload_stride, found, found_stride, whole, whole_stride, out, stride, rows, table):
    for row in range(rows):
        for part in range(len(table)):
            start, width, k, place, _, first, count, seed = table[part, :8]
            first += row * stride
            if count == 0:
                begin = row * whole_stride + start
                out[first : first + width] = whole[begin : begin + width]
                continue
            sketch = out[first : first + 3 * count]
            sketch[:] = np.float32(0)
            cells, key = uint64(count), uint64(seed)
            for i in range(place, place + k):
                at = found[row * found_stride + i]
                if at < 0:
                    break
                one, two = _hash(key, at - start)
                a, b, c = _cells(one, two, cells)
                value = payload[row * payload_stride + i]
                value = -value if two & uint64(1) else value
                sketch[a] += value
                sketch[b] += value
                sketch[c] += value


@njit
def _estimate(left, seed, cells, held, out):
    """The median of its three signed cells for every element that is left. ``held``: see ``_peel_row``."""
    for i in range(left.size):
        word = left[i]
        while word != 0:
            element = uint64(64 * i) + trailing_zeros(word)
            first, second = _hash(seed, element)
            a, b, c = _cells(first, second, cells)
            x, y, z = held[2 * a + 1], held[2 * b + 1], held[2 * c + 1]
            middle = max(min(x, y), min(max(x, y), z))
            out[element] = np.float32(-middle if second & uint64(1) else middle)
            word &= word - uint64(1)


@njit
def _peel_row(sketch, index, seed, cells, out, left, wanted, tags, held, queue):
    """``tags`` and ``held`` are one memory, 16 bytes per cell: its elements' count and names, then its sum."""
    size = np.int64(3 * cells)
    for i in range(size):
        tags[2 * i] = uint64(0)
        held[2 * i + 1] = sketch[i] if wanted else np.float32(0)
    for i in range(index.size):
        left[i] = index[i]
        word = index[i]
        while word != 0:
            element = uint64(64 * i) + trailing_zeros(word)
            first, second = _hash(seed, element)
            for cell in _cells(first, second, cells):
                tags[2 * cell] = (tags[2 * cell] + ONE) ^ element
            word &= word - uint64(1)
    end = 0
    for i in range(size):
        if tags[2 * i] >> COUNT_AT == uint64(1):
            queue[end] = i
            end += 1
    at = 0
    while at < end:  # a cell comes to hold one element at most once: the queue never overflows
        cell = queue[at]
        at += 1
        if tags[2 * cell] >> COUNT_AT != uint64(1):
            continue
        element = tags[2 * cell] & NAME
        first, second = _hash(seed, element)
        share = held[2 * cell + 1]
        if wanted:
            out[element] = np.float32(-share if second & uint64(1) else share)
        left[element >> uint64(6)] &= ~(uint64(1) << (element & uint64(63)))
        for other in _cells(first, second, cells):
            tag = (tags[2 * other] - ONE) ^ element
            tags[2 * other] = tag
            held[2 * other + 1] -= share
            if tag >> COUNT_AT == uint64(1):
                queue[end] = other
                end += 1


@njit
def _peel(wire, stride, index, index_stride, left, left_stride, out, out_stride, rows, wanted, table, estimate):
    """``wanted``: the rows that the wire holds, from the first to before the last."""
    size = 3 * np.max(table[:, 6])
    tags = np.empty(2 * size, np.uint64)
    held = tags.view(np.float64)
    queue = np.empty(size, np.int64)
    for row in range(rows):
        mine = wanted[0] <= row < wanted[1]
        own = row - wanted[0] if mine else 0
        for part in range(len(table)):
            start, width, _, _, _, first, count, seed = table[part, :8]
            values = out[own * out_stride + start : own * out_stride + start + width]
            cells = wire[own * stride + first : own * stride + first + (3 * count if count else width)]
            words = index[row * index_stride + start // 64 : row * index_stride + (start + width) // 64]
            remains = left[row * left_stride + start // 64 : row * left_stride + (start + width) // 64]
            if count == 0:
                remains[:] = uint64(0)
                if mine:
                    values[:] = cells
                continue
            if mine:
                values[:] = np.float32(0)
            _peel_row(cells, words, uint64(seed), uint64(count), values, remains, mine, tags, held, queue)
            if estimate and mine:
                _estimate(remains, uint64(seed), uint64(count), held, values)


@njit
def _settle(sent, sent_stride, rest, rest_stride, found, found_stride, left, left_stride, out, stride, rows, table):
    for row in range(rows):
        for part in range(len(table)):
            start, width, k, place, _, _, count = table[part, :7]
            if count == 0:
                out[row * stride + start : row * stride + start + width] = np.float32(0)
                continue
            for i in range(place, place + k):
                at = found[row * found_stride + i]
                if at < 0:
                    break
                value = rest[row * rest_stride + i]
                if (left[row * left_stride + (at >> 6)] >> uint64(at & 63)) & uint64(1):
                    value += sent[row * sent_stride + i]
                out[row * stride + at] = value


@njit
def _count(words, stride, rows, table, found, found_stride):
    for row in range(rows):
        for part in range(len(table)):
            start, width = table[part, 0], table[part, 1]
            total = uint64(0)
            for i in range(row * stride + start // 64, row * stride + (start + width) // 64):
                total += set_bits(words[i])
            found[row * found_stride + part] = total


def gather(rows: Tensor, words: Tensor, parts: Parts, found: Tensor, payload: Tensor) -> None:
    _gather(*flat(rows), *unsigned(words), *flat(found), *flat(payload), len(rows), _table(parts))


def peaks(payload: Tensor, parts: Parts, found: Tensor) -> None:
    values, stride = flat(payload)
    _peaks(values.view(np.int32), stride, len(payload), _table(parts), found.numpy().view(np.int32))


def round_to(payload: Tensor, quantum: Tensor, parts: Parts, rest: Tensor) -> None:
    _round_to(*flat(payload), *flat(rest), len(payload), _table(parts), quantum.numpy())


def encode(payload: Tensor, found: Tensor, parts: Parts, whole: Tensor, out: Tensor) -> None:
    _encode(*flat(payload), *flat(found), *flat(whole), *flat(out), len(payload), _table(parts))


def peel(wire: Tensor, index: Tensor, parts: Parts, row: int, out: Tensor, left: Tensor, estimate: bool) -> None:
    wanted = row, row + len(wire)
    _peel(*flat(wire), *unsigned(index), *unsigned(left), *flat(out), len(index), wanted, _table(parts), estimate)


def settle(sent: Tensor, rest: Tensor, found: Tensor, left: Tensor, parts: Parts, out: Tensor) -> None:
    _settle(*flat(sent), *flat(rest), *flat(found), *unsigned(left), *flat(out), len(out), _table(parts))


def count(words: Tensor, parts: Parts, found: Tensor) -> None:
    _count(*unsigned(words), len(words), _table(parts), *flat(found))


def _table(parts: Parts) -> np.ndarray:
    table: np.ndarray = parts.table.numpy()
    return table
