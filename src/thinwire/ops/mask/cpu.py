# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable"
"""Numba kernels for CPU tensors, the same bits as ``reference``: masks are walked word by word, set bits by their
trailing zeros, so that the cost follows the number of set bits."""

from __future__ import annotations

import numpy as np
import torch
from numba import uint64
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.ops.kernels import flat, njit

WORD = 64
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
SAMPLE = 16384
"""Elements of a row that the bracket around its k-th value is taken from."""


@intrinsic
def trailing_zeros(context, word):
    def code(compiler, builder, signature, arguments):
        return builder.cttz(arguments[0], compiler.get_constant(types.boolean, False))

    return types.uint64(types.uint64), code


@intrinsic
def set_bits(context, word):
    def code(compiler, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), code


@njit
def _gather_keep(rows, stride, old, old_stride, words, words_stride, payload, payload_stride, new, new_stride, shape,
                 feedback, keep):  # fmt: skip
    total = np.empty(WORD, np.float32)
    for row in range(shape[0]):
        at = row * payload_stride
        for i in range(shape[1]):
            start = row * stride + WORD * i
            values = rows[start : start + WORD]
            if feedback:
                from_old = row * old_stride + WORD * i
                before = old[from_old : from_old + WORD]
                for j in range(WORD):
                    total[j] = values[j] + before[j]
            else:
                for j in range(WORD):
                    total[j] = values[j]
            word = words[row * words_stride + i]
            while word != 0:
                j = trailing_zeros(word)
                payload[at] = total[j]
                total[j] = np.float32(0)
                at += 1
                word &= word - uint64(1)
            if keep:
                to = row * new_stride + WORD * i
                rest = new[to : to + WORD]
                for j in range(WORD):
                    rest[j] = total[j]


@njit
def _scatter(payload, payload_stride, words, words_stride, out, stride, rows, count):
    for row in range(rows):
        at = row * payload_stride
        for i in range(count):
            start = row * stride + WORD * i
            values = out[start : start + WORD]
            values[:] = np.float32(0)
            word = words[row * words_stride + i]
            while word != 0:
                values[trailing_zeros(word)] = payload[at]
                at += 1
                word &= word - uint64(1)


@njit
def _scatter_add(payload, payload_stride, words, words_stride, out, rows, count, scale, scaled):
    at = np.zeros(rows, np.int64)
    total = np.empty(WORD, np.float32)
    for i in range(count):
        total[:] = np.float32(0)
        for row in range(rows):
            word = words[row * words_stride + i]
            position = row * payload_stride + at[row]
            while word != 0:
                total[trailing_zeros(word)] += payload[position]
                position += 1
                word &= word - uint64(1)
            at[row] = position - row * payload_stride
        values = out[WORD * i : WORD * i + WORD]
        for j in range(WORD):
            values[j] = total[j] * scale if scaled else total[j]


@njit
def _popcount(words, stride, rows, count, counts):
    for row in range(rows):
        total = uint64(0)
        for i in range(row * stride, row * stride + count):
            total += set_bits(words[i])
        counts[row] = total


@njit
def _indices(words, stride, rows, count, out, to_stride):
    for row in range(rows):
        at = row * to_stride
        for i in range(count):
            word = words[row * stride + i]
            while word != 0:
                out[at] = np.int32(WORD * i + trailing_zeros(word))
                at += 1
                word &= word - uint64(1)


@njit
def _from_indices(positions, stride, words, words_stride, rows, k):
    for row in range(rows):
        for i in range(row * stride, row * stride + k):
            position = uint64(positions[i])
            words[row * words_stride + (position >> uint64(6))] |= uint64(1) << (position & uint64(63))


@njit
def _bracket(bits, n, low, high, between):
    """Magnitudes above ``high`` are counted, those from ``low`` to ``high`` collected into ``between``."""
    above, found = 0, 0
    for start in range(0, n, WORD):
        size = min(WORD, n - start)
        part = bits[start : start + size]
        most = np.int32(0)
        for j in range(size):
            most = max(most, np.int32(part[j] & MAGNITUDE_BITS))
        if most < low:
            continue
        for j in range(size):
            magnitude = np.int32(part[j] & MAGNITUDE_BITS)
            if magnitude > high:
                above += 1
            elif magnitude >= low:
                if found < between.size:
                    between[found] = magnitude
                found += 1
    return above, found


@njit
def _threshold_words(bits, n, threshold, ties, words):
    """Bits of all magnitudes above ``threshold``, and of the first ``ties`` that equal it."""
    for i in range(n // WORD):
        part = bits[WORD * i : WORD * i + WORD]
        word = uint64(0)
        equal = 0
        for j in range(WORD):
            magnitude = np.int32(part[j] & MAGNITUDE_BITS)
            word |= uint64(magnitude > threshold) << uint64(j)
            equal += magnitude == threshold
        if equal and ties:
            for j in range(WORD):
                if ties and np.int32(part[j] & MAGNITUDE_BITS) == threshold:
                    word |= uint64(1) << uint64(j)
                    ties -= 1
        words[i] = word


@njit
def _magnitudes(bits, step, out):
    for i in range(out.size):
        out[i] = bits[i * step] & MAGNITUDE_BITS


@njit
def _above(bits, n, threshold):
    above = 0
    for i in range(n):
        above += np.int32(bits[i] & MAGNITUDE_BITS) > threshold
    return above


def _kth(bits: np.ndarray, k: int) -> tuple[int, int]:
    """The k-th largest magnitude (as bits: the order of floats, NaN largest) and how many lie above it.

    A sample brackets it within 5 standard deviations; one pass counts what is above the bracket and collects what is
    in it. Where the bracket misses (once in millions, or on values with many ties) everything is partitioned.
    """
    n = bits.size
    step = (n // SAMPLE) | 1  # odd: not in step with rows of a power of two
    sample = np.empty(-(-n // step), np.int32)
    _magnitudes(bits, step, sample)
    if step > 1:
        sample.sort()
        share, size = k / n, sample.size
        middle, spread = size * (1 - share), 5 * np.sqrt(size * share * (1 - share)) + 2
        first, last = int(middle - spread), int(middle + spread) + 1
        low = sample[first] if first >= 0 else np.int32(0)
        high = sample[last] if last < size else MAGNITUDE_BITS
        between = np.empty(max(int(2 * n * (last - first + 2) / size), 1024), np.int32)
        above, found = _bracket(bits, n, low, high, between)
        if above < k <= above + found and found <= between.size:
            inside = between[:found]
            threshold = int(np.partition(inside, found - (k - above))[found - (k - above)])
            return threshold, above + int(_above(inside, found, np.int32(threshold)))
        sample = np.empty(n, np.int32)
        _magnitudes(bits, 1, sample)
    threshold = int(np.partition(sample, n - k)[n - k])
    return threshold, int(_above(sample, n, np.int32(threshold)))


def unsigned(words: Tensor) -> tuple[np.ndarray, int]:
    memory, stride = flat(words)
    return memory.view(np.uint64), stride


def topk_mask(values: Tensor, k: int, words: Tensor) -> None:
    for row, mask in zip(values, words, strict=True):
        bits = row.detach().numpy().view(np.int32)
        threshold, above = _kth(bits, k)
        _threshold_words(bits, bits.size, np.int32(threshold), k - above, mask.numpy().view(np.uint64))


def gather_keep(
    rows: Tensor, residual: Tensor | None, words: Tensor, payload: Tensor, residual_out: Tensor | None
) -> None:
    old = flat(rows if residual is None else residual)
    new = flat(rows if residual_out is None else residual_out)  # not written to unless kept
    _gather_keep(*flat(rows), *old, *unsigned(words), *flat(payload), *new, tuple(words.shape), residual is not None,
                 residual_out is not None)  # fmt: skip


def scatter(payload: Tensor, words: Tensor, out: Tensor) -> None:
    _scatter(*flat(payload), *unsigned(words), *flat(out), *words.shape)


def scatter_add(payload: Tensor, words: Tensor, out: Tensor, scale: float) -> None:
    _scatter_add(*flat(payload), *unsigned(words), out.numpy(), *words.shape, np.float32(scale), scale != 1.0)


def pack(flags: Tensor, words: Tensor) -> None:
    packed = np.packbits(flags.numpy(), axis=1, bitorder="little")
    words.copy_(torch.from_numpy(packed.view(np.int64)))


def unpack(words: Tensor, flags: Tensor) -> None:
    octets = np.ascontiguousarray(words.numpy()).view(np.uint8)
    flags.copy_(torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little")).view(torch.bool))


def popcount(words: Tensor) -> Tensor:
    counts = torch.empty(len(words), dtype=torch.int64)
    _popcount(*unsigned(words), *words.shape, counts.numpy())
    return counts


def indices(words: Tensor, out: Tensor) -> None:
    _indices(*unsigned(words), *words.shape, *flat(out))


def from_indices(positions: Tensor, words: Tensor) -> None:
    words.zero_()
    _from_indices(*flat(positions), *unsigned(words), *positions.shape)
