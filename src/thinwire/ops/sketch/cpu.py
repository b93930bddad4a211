# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors: elements are peeled one by one from a stack of cells that hold a single one.

A cell also keeps the exclusive or of its elements' numbers, which names the one that is left (Goodrich and Mitzenmacher
2011).
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
    """The median of its three signed cells for every element that is left."""
    for i in range(left.size):
        word = left[i]
        while word != 0:
            element = uint64(64 * i) + trailing_zeros(word)
            first, second = _hash(seed, element)
            a, b, c = _cells(first, second, cells)
            low, high = min(held[a], held[b]), max(held[a], held[b])
            middle = max(low, min(high, held[c]))
            out[element] = np.float32(-middle if second & uint64(1) else middle)
            word &= word - uint64(1)


@njit
def _peel_row(sketch, index, seed, cells, out, left, wanted, counts, names, held, stack):
    counts[:] = 0
    names[:] = uint64(0)
    for i in range(index.size):
        left[i] = index[i]
        word = index[i]
        while word != 0:
            element = uint64(64 * i) + trailing_zeros(word)
            first, second = _hash(seed, element)
            for cell in _cells(first, second, cells):
                counts[cell] += 1
                names[cell] ^= element
            word &= word - uint64(1)
    if wanted:
        for i in range(held.size):
            held[i] = sketch[i]
    top = 0
    for i in range(counts.size):
        if counts[i] == 1:
            stack[top] = i
            top += 1
    while top:
        top -= 1
        cell = stack[top]
        if counts[cell] != 1:
            continue
        element = names[cell]
        first, second = _hash(seed, element)
        share = held[cell]
        if wanted:
            out[element] = np.float32(-share if second & uint64(1) else share)
        left[element >> uint64(6)] &= ~(uint64(1) << (element & uint64(63)))
        for other in _cells(first, second, cells):
            counts[other] -= 1
            names[other] ^= element
            held[other] -= share
            if counts[other] == 1:
                stack[top] = other
                top += 1


@njit
def _peel(sketch, stride, index, index_stride, left, left_stride, out, out_stride, rows, count, cells, seed, wanted,
          estimate):  # fmt: skip
    size = np.int64(3 * cells)
    counts = np.empty(size, np.int32)
    names = np.empty(size, np.uint64)
    held = np.zeros(size, np.float64)
    stack = np.empty(size, np.int64)
    for row in range(rows):
        values = out[row * out_stride : row * out_stride + 64 * count]
        if wanted:
            values[:] = np.float32(0)
        _peel_row(
            sketch[row * stride : row * stride + size], index[row * index_stride : row * index_stride + count], seed,
            cells, values, left[row * left_stride : row * left_stride + count], wanted, counts, names, held, stack,
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
