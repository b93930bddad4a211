# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors, the same bits as ``reference``: masks are walked word by word, set bits by their
trailing zeros, so that the cost follows the number of set bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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
    """Return a mask word: which of the 64 values from ``bits[first]`` on have a :func:`magnitude` >= ``low``.

    In LLVM's own vectors, whose comparisons are mask words already: a loop that sets one bit after the other is 8 times
    slower.
    """

    def code(compiler, builder, signature, arguments):
        bits, first, low = arguments
        data = compiler.make_array(signature.args[0])(compiler, builder, bits).data
        values = builder.load(builder.bitcast(builder.gep(data, [first]), SIZES.as_pointer()), align=4)
        sizes = builder.and_(values, ir.Constant(SIZES, [int(MAGNITUDE_BITS)] * WORD))
        nan = ir.Constant(SIZES, [int(NAN_BITS)] * WORD)
        sizes = builder.select(builder.icmp_signed("<", sizes, nan), sizes, nan)
        lows = builder.insert_element(ir.Constant(SIZES, ir.Undefined), low, ir.IntType(32)(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), WORD), [0] * WORD)
        lows = builder.shuffle_vector(lows, lows, zeros)
        return builder.bitcast(builder.icmp_signed(">=", sizes, lows), ir.IntType(64))

    return types.uint64(bits, types.int64, types.int32), code


@njit
def _gather_keep(rows, stride, residual, residual_stride, words, words_stride, payload, payload_stride, residual_out,
                 out_stride, shape, feedback, keep):  # fmt: skip
    buffer = np.empty(WORD, np.float32)
    for row in range(shape[0]):
        slot = row * payload_stride
        end = slot + shape[2]
        for i in range(shape[1]):
            word = words[row * words_stride + i]
            if word == 0 and not keep:
                continue
            if slot + np.int64(set_bits(word)) > end:
                return False
            start = row * stride + WORD * i
            values = rows[start : start + WORD]
            if keep:
                out_start = row * out_stride + WORD * i
                total = residual_out[out_start : out_start + WORD]
            else:
                total = buffer
            if feedback:
                residual_start = row * residual_stride + WORD * i
                addends = residual[residual_start : residual_start + WORD]
                for j in range(WORD):
                    total[j] = values[j] + addends[j]
            else:
                for j in range(WORD):
                    total[j] = values[j]
            while word != 0:
                j = trailing_zeros(word)
                payload[slot] = total[j]
                if keep:
                    total[j] = np.float32(0)
                slot += 1
                word &= word - uint64(1)
        if slot != end:
            return False
    return True


@njit
def _put(payload, slot, end, word, values):
    """``values`` (64,) = ``payload`` from ``slot`` on, at the set bits of ``word``; return the next slot.

    Where ``word`` has more bits than there are slots before ``end``, nothing is written.
    """
    next_slot = slot + np.int64(set_bits(word))
    if next_slot <= end:
        while word != 0:
            bit = trailing_zeros(word)
            values[bit] = payload[slot]
            slot += 1
            word &= word - uint64(1)
    return next_slot


@njit
def _scatter(payload, payload_stride, words, words_stride, out, stride, shape, factor):
    """``shape``: rows, columns, bits of each row. Bits of a mask's last word beyond the columns are refused.

    Off the mask a value becomes 0 (``factor`` None), or ``factor`` times itself.
    """
    full_words, tail = shape[1] // WORD, shape[1] % WORD
    for row in range(shape[0]):
        if tail != 0 and words[row * words_stride + full_words] >> uint64(tail) != 0:
            return False
        slot = row * payload_stride
        end = slot + shape[2]
        for column in range(0, shape[1], WORD):
            start = row * stride + column
            values = out[start : start + min(shape[1] - column, WORD)]
            if factor is None:
                values[:] = np.float32(0)
            else:
                for j in range(values.size):
                    values[j] *= factor
            slot = _put(payload, slot, end, words[row * words_stride + column // WORD], values)
            if slot > end:
                return False
        if slot != end:
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
    """Refuse positions out of range, which would become addresses, and with ``rise`` those that do not rise."""
    for row in range(rows):
        previous = np.int64(-1)
        for i in range(row * stride, row * stride + k):
            position = np.int64(positions[i])
            if not 0 <= position < columns or (rise and position <= previous):
                return False
            words[row * words_stride + (position >> 6)] |= uint64(1) << uint64(position & 63)
            previous = position
    return True


@njit
def magnitude(bits):
    """Return |value| as an integer: the order of floats, every NaN the same and the largest."""
    return min(np.int32(bits & MAGNITUDE_BITS), NAN_BITS)


@njit
def _bracket(bits, low, high, between):
    """Count magnitudes above ``high``, and collect those from ``low`` to ``high`` into ``between`` while they fit.

    Both comparisons become mask words, without a branch per element; then only the few in between are walked.
    """
    above, count = np.int64(0), np.int64(0)
    for first in range(0, bits.size, WORD):
        over = at_least(bits, first, high + np.int32(1))
        above += np.int64(set_bits(over))
        word = at_least(bits, first, low) & ~over
        inside = np.int64(set_bits(word))
        if count + inside > between.size:
            count += inside
            continue
        while word != 0:
            between[count] = magnitude(bits[first + np.int64(trailing_zeros(word))])
            count += 1
            word &= word - uint64(1)
    return above, count


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
    """Return two indices of a rising sample of ``size`` between which the ``share`` of largest begins, most likely.

    Within 5 standard deviations: it fails once in millions. They may lie outside of the sample.
    """
    middle, spread = size * (1 - share), 5 * np.sqrt(size * share * (1 - share)) + 2
    return int(middle - spread), int(middle + spread) + 1


def kth(bits: np.ndarray, k: int) -> tuple[int, int]:
    """Find the k-th largest magnitude, and count those above it.

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
        above, count = _bracket(bits, low, high, between)
        if above < k <= above + count:
            if low == high:
                return int(low), above
            if count <= between.size:
                inside = between[:count]
                threshold = int(np.partition(inside, count - (k - above))[count - (k - above)])
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


directory = reference.directory


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    bit_offsets: Tensor | None = None,
) -> None:
    addends = flat(rows if residual is None else residual)
    out = flat(rows if residual_out is None else residual_out)  # not written to unless there is a ``residual_out``
    shape = (*words.shape, payload.shape[1])
    exact = _gather_keep(*flat(rows), *addends, *unsigned(words), *flat(payload), *out, shape, residual is not None,
                         residual_out is not None)  # fmt: skip
    _expect(exact, payload)


def scatter(payload: Tensor, words: Tensor, out: Tensor, bit_offsets: Tensor | None = None) -> None:
    shape = (*out.shape, payload.shape[1])
    _expect(_scatter(*flat(payload), *unsigned(words), *flat(out), shape, None), payload)


def _scatter_segment(payload: Tensor, words: Tensor, columns: Tensor, factor: float) -> bool:
    shape = (*columns.shape, payload.shape[1])
    exact: bool = _scatter(*flat(payload), *unsigned(words), *flat(columns), shape, np.float32(factor))
    return exact


collect = functools.partial(reference.collect, gather=gather_keep)
renew = functools.partial(reference.renew, scatter_segment=_scatter_segment)


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
        raise reference.list_error(words)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> None:
    for positions, columns in lists:
        from_indices(positions, words[:, columns], rise=True)
