# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors: elements are peeled one by one from a queue of cells that hold a single one.

A cell also keeps the exclusive or of its elements' numbers, which names the one that is left (Goodrich and Mitzenmacher
2011). First in, first out, at no cost: each value then depends on few others, so that even sums that are not exact come
out to rounding, where a stack multiplies errors along chains of thousands.
"""

from __future__ import annotations

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import flat, njit
from thinwire.ops.mask.cpu import trailing_zeros, unsigned
from thinwire.ops.sketch import reference

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
def _encode(payload, payload_stride, words, words_stride, out, stride, rows, count, cells, seed):
    for row in range(rows):
        sketch = out[row * stride : row * stride + np.int64(3 * cells)]
        sketch[:] = np.float32(0)
        at = row * payload_stride
        for i in range(count):
            word = words[row * words_stride + i]
            while word != 0:
                first, second = _hash(seed, uint64(64 * i) + trailing_zeros(word))
                a, b, c = _cells(first, second, cells)
                value = -payload[at] if second & uint64(1) else payload[at]
                sketch[a] += value
                sketch[b] += value
                sketch[c] += value
                at += 1
                word &= word - uint64(1)


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
    for i in range(sketch.size):
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
    for i in range(sketch.size):
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
def _peel(sketch, stride, index, index_stride, left, left_stride, out, out_stride, rows, count, cells, seed, wanted,
          estimate):  # fmt: skip
    size = np.int64(3 * cells)
    tags = np.empty(2 * size, np.uint64)
    held = tags.view(np.float64)
    queue = np.empty(size, np.int64)
    for row in range(rows):
        values = out[row * out_stride : row * out_stride + 64 * count]
        if wanted:
            values[:] = np.float32(0)
        _peel_row(
            sketch[row * stride : row * stride + size], index[row * index_stride : row * index_stride + count], seed,
            cells, values, left[row * left_stride : row * left_stride + count], wanted, tags, held, queue,
        )  # fmt: skip
        if estimate:
            _estimate(left[row * left_stride : row * left_stride + count], seed, cells, held, values)


@njit
def _settle(sent, sent_stride, rest, rest_stride, words, words_stride, left, left_stride, out, stride, rows, count):
    for row in range(rows):
        at = 0
        for i in range(count):
            word = words[row * words_stride + i]
            lost = left[row * left_stride + i]
            while word != 0:
                j = trailing_zeros(word)
                value = rest[row * rest_stride + at]
                if (lost >> j) & uint64(1):
                    value += sent[row * sent_stride + at]
                out[row * stride + 64 * i + np.int64(j)] = value
                at += 1
                word &= word - uint64(1)


def sketch_encode(payload: Tensor, words: Tensor, seed: int, out: Tensor) -> None:
    cells = np.uint64(out.shape[1] // 3)
    _encode(*flat(payload), *unsigned(words), *flat(out), *words.shape, cells, np.uint64(seed))


def sketch_peel(sketch: Tensor, index: Tensor, seed: int, out: Tensor | None, left: Tensor, estimate: bool) -> None:
    cells = np.uint64(sketch.shape[1] // 3)
    values = flat(sketch if out is None else out)  # not written to unless wanted
    _peel(*flat(sketch), *unsigned(index), *unsigned(left), *values, *index.shape, cells, np.uint64(seed),
          out is not None, estimate and out is not None)  # fmt: skip


def settle(sent: Tensor, rest: Tensor, words: Tensor, left: Tensor, out: Tensor) -> None:
    _settle(*flat(sent), *flat(rest), *unsigned(words), *unsigned(left), *flat(out), *words.shape)


round_to = reference.round_to  # k values: not worth a kernel
