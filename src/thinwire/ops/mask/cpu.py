# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors, the same bits as ``reference``: masks are walked word by word, set bits by their
trailing zeros, so that the cost follows the number of set bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from llvmlite import ir
from numba import uint64
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.kernels import flat, njit
from thinwire.ops.mask import reference
from thinwire.ops.rows import Places

if TYPE_CHECKING:
    from thinwire.ops.mask import Faded

WORD = 64
MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
NAN_BITS = np.int32(0x7F800001)  # any NaN: all are equal, and larger than infinity
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


SIZES = ir.VectorType(ir.IntType(32), WORD)


@intrinsic
def at_least(context, bits, first, low):
    """A word of which |value| is ``low`` or more, of the 64 values from ``bits[first]`` on: see :func:`magnitude`.

    In LLVM's own vectors, whose comparisons are mask words already: of a loop that sets one bit after the other it
    makes something 8 times slower.
    """

    def code(compiler, builder, signature, arguments):
        bits, first, low = arguments
        data = compiler.make_array(signature.args[0])(compiler, builder, bits).data
        values = builder.load(builder.bitcast(builder.gep(data, [first]), SIZES.as_pointer()), align=4)
        sizes = builder.and_(values, ir.Constant(SIZES, [int(MAGNITUDE_BITS)] * WORD))
        nan = ir.Constant(SIZES, [int(NAN_BITS)] * WORD)
        sizes = builder.select(builder.icmp_signed("<", sizes, nan), sizes, nan)
        lows = builder.insert_element(ir.Constant(SIZES, ir.Undefined), low, ir.IntType(32)(0))
        everywhere = ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
        lows = builder.shuffle_vector(lows, lows, everywhere)
        return builder.bitcast(builder.icmp_signed(">=", sizes, lows), ir.IntType(64))

    return types.uint64(bits, types.int64, types.int32), code


@njit
def _gather_keep(rows, stride, old, old_stride, words, words_stride, payload, payload_stride, new, new_stride, shape,
                 feedback, keep):  # fmt: skip
    total = np.empty(WORD, np.float32)
    for row in range(shape[0]):
        at = row * payload_stride
        end = at + shape[2]
        for i in range(shape[1]):
            word = words[row * words_stride + i]
            if word == 0 and not keep:
                continue
            if at + np.int64(set_bits(word)) > end:
                return False
            start = row * stride + WORD * i
            values = rows[start : start + WORD]
            if keep:
                to = row * new_stride + WORD * i
                rest = new[to : to + WORD]
            else:
                rest = total
            if feedback:
                from_old = row * old_stride + WORD * i
                before = old[from_old : from_old + WORD]
                for j in range(WORD):
                    rest[j] = values[j] + before[j]
            else:
                for j in range(WORD):
                    rest[j] = values[j]
            while word != 0:
                j = trailing_zeros(word)
                payload[at] = rest[j]
                if keep:
                    rest[j] = np.float32(0)
                at += 1
                word &= word - uint64(1)
        if at != end:
            return False
    return True


@njit
def _scatter(payload, payload_stride, words, words_stride, out, stride, rows, count, k):
    for row in range(rows):
        at = row * payload_stride
        end = at + k
        for i in range(count):
            start = row * stride + WORD * i
            values = out[start : start + WORD]
            values[:] = np.float32(0)
            word = words[row * words_stride + i]
            if at + np.int64(set_bits(word)) > end:
                return False
            while word != 0:
                values[trailing_zeros(word)] = payload[at]
                at += 1
                word &= word - uint64(1)
        if at != end:
            return False
    return True


@njit
def _renew(payload, payload_stride, words, words_stride, rows, stride, shape, keep):
    """``shape``: rows, columns, bits of each row. Bits of a mask's last word beyond them are refused."""
    whole, rest = shape[1] // WORD, shape[1] % WORD
    for row in range(shape[0]):
        if rest != 0 and words[row * words_stride + whole] >> uint64(rest) != 0:
            return False
        at = row * payload_stride
        end = at + shape[2]
        for first in range(0, shape[1], WORD):
            start = row * stride + first
            values = rows[start : start + min(shape[1] - first, WORD)]
            for j in range(values.size):
                values[j] *= keep
            word = words[row * words_stride + first // WORD]
            if at + np.int64(set_bits(word)) > end:
                return False
            while word != 0:
                values[trailing_zeros(word)] = payload[at]
                at += 1
                word &= word - uint64(1)
        if at != end:
            return False
    return True


@njit
def _popcount(words, stride, rows, count, counts):
    for row in range(rows):
        total = uint64(0)
        for i in range(row * stride, row * stride + count):
            total += set_bits(words[i])
        counts[row] = total


@njit
def _from_indices(positions, stride, words, words_stride, rows, k, columns, rise):
    """Whoever sent the positions, they become addresses only from 0 on and below ``columns``; ``rise``: if they do."""
    for row in range(rows):
        last = np.int64(-1)
        for i in range(row * stride, row * stride + k):
            position = np.int64(positions[i])
            if not 0 <= position < columns or (rise and position <= last):
                return False
            words[row * words_stride + (position >> 6)] |= uint64(1) << uint64(position & 63)
            last = position
    return True


@njit
def magnitude(bits):
    """|value| as an integer: the order of floats, every NaN the same and the largest."""
    return min(np.int32(bits & MAGNITUDE_BITS), NAN_BITS)


@njit
def _bracket(bits, low, high, between):
    """Magnitudes above ``high`` are counted, those from ``low`` to ``high`` collected into ``between`` while they fit.

    Both comparisons become mask words, without a branch per element; then only the few in between are walked.
    """
    above, found = np.int64(0), np.int64(0)
    for first in range(0, bits.size, WORD):
        over = at_least(bits, first, high + np.int32(1))
        above += np.int64(set_bits(over))
        word = at_least(bits, first, low) & ~over
        inside = np.int64(set_bits(word))
        if found + inside > between.size:
            found += inside
            continue
        while word != 0:
            between[found] = magnitude(bits[first + np.int64(trailing_zeros(word))])
            found += 1
            word &= word - uint64(1)
    return above, found


@njit
def threshold_words(bits, threshold, ties, words):
    """Bits of all magnitudes above ``threshold``, and of the first ``ties`` that equal it."""
    for i in range(words.size):
        word = at_least(bits, WORD * i, threshold + np.int32(1))
        if ties:
            equal = at_least(bits, WORD * i, threshold) & ~word
            while equal != 0 and ties:
                lowest = equal & (~equal + uint64(1))
                word |= lowest
                equal ^= lowest
                ties -= 1
        words[i] = word


@njit
def magnitudes(bits, step, out):
    for i in range(out.size):
        out[i] = magnitude(bits[i * step])


@njit
def _above(magnitudes, threshold):
    above = 0
    for i in range(magnitudes.size):
        above += magnitudes[i] > threshold
    return above


def around(size: int, share: float) -> tuple[int, int]:
    """Between which places of a rising sample of ``size`` the ``share`` of largest begins, in all probability.

    Within 5 standard deviations: it fails once in millions. They may lie outside of the sample.
    """
    middle, spread = size * (1 - share), 5 * np.sqrt(size * share * (1 - share)) + 2
    return int(middle - spread), int(middle + spread) + 1


def kth(bits: np.ndarray, k: int) -> tuple[int, int]:
    """The k-th largest magnitude and how many lie above it.

    A sample brackets it within 5 standard deviations; one pass counts what is above the bracket and collects what is
    in it. A bracket of one value (a gradient with more zeros than n - k) needs no more. Where the bracket misses (once
    in millions) or holds too much (values with many ties) everything is partitioned.
    """
    n = bits.size
    step = (n // SAMPLE) | 1  # odd: not in step with rows of a power of two
    sample = np.empty(-(-n // step), np.int32)
    magnitudes(bits, step, sample)
    if step > 1:
        size = sample.size
        first, last = around(size, k / n)
        sample.partition([max(first, 0), min(last, size - 1)])  # a tenth of the time of sorting it
        low = sample[first] if first >= 0 else np.int32(0)
        high = sample[last] if last < size else NAN_BITS
        between = np.empty(max(int(2 * n * (last - first + 2) / size), 1024), np.int32)
        above, found = _bracket(bits, low, high, between)
        if above < k <= above + found:
            if low == high:
                return int(low), above
            if found <= between.size:
                inside = between[:found]
                threshold = int(np.partition(inside, found - (k - above))[found - (k - above)])
                return threshold, above + int(_above(inside, np.int32(threshold)))
        sample = np.empty(n, np.int32)
        magnitudes(bits, 1, sample)
    threshold = int(np.partition(sample, n - k)[n - k])
    return threshold, int(_above(sample, np.int32(threshold)))


def unsigned(words: Tensor) -> tuple[np.ndarray, int]:
    memory, stride = flat(words)
    return memory.view(np.uint64), stride


def _expect(exact: bool, payload: Tensor) -> None:
    if not exact:
        raise ThinwireError(f"a row's mask does not have the {payload.shape[1]} bits that its payload has room for")


def directory(words: Tensor) -> None:
    """None is needed."""


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    before: Tensor | None = None,
) -> None:
    old = flat(rows if residual is None else residual)
    new = flat(rows if residual_out is None else residual_out)  # not written to unless kept
    shape = (*words.shape, payload.shape[1])
    exact = _gather_keep(*flat(rows), *old, *unsigned(words), *flat(payload), *new, shape, residual is not None,
                         residual_out is not None)  # fmt: skip
    _expect(exact, payload)


def scatter(payload: Tensor, words: Tensor, out: Tensor, before: Tensor | None = None) -> None:
    _expect(_scatter(*flat(payload), *unsigned(words), *flat(out), *words.shape, payload.shape[1]), payload)


def collect(
    row: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, message: Tensor, before: Tensor | None = None
) -> None:
    reference.collect(row, words, parts, kept, message, by=gather_keep)


def renew(
    messages: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, rows: Tensor, before: Tensor | None = None
) -> None:
    for part, values, mask in reference.each_of(messages, words, parts):
        target = rows[:, part.start : part.start + part.numel]
        shape = len(rows), part.numel, part.k
        if not _renew(*flat(values), *unsigned(mask), *flat(target), shape, np.float32(part.keep)):
            raise reference.not_of(part)
    reference.give(messages, kept, rows)


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


def from_indices(positions: Tensor, words: Tensor, rise: bool = False) -> None:
    words.zero_()
    if not _from_indices(*flat(positions), *unsigned(words), *positions.shape, WORD * words.shape[1], rise):
        raise reference.not_a_list(words)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> None:
    for positions, groups in lists:
        from_indices(positions, words[:, groups], rise=True)
