# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba, the same bits as ``reference``: one pass over the values, then over lists only."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from llvmlite import ir
from numba import uint64
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops import mask as masks
from thinwire.ops import sparse as of
from thinwire.ops.kernels import by_row, flat, njit, rows_of
from thinwire.ops.mask.cpu import WORD, list_bits, set_bits, trailing_zeros
from thinwire.ops.sparse import reference

if TYPE_CHECKING:
    from thinwire.ops.direction import Adam
    from thinwire.ops.sparse import ListSegment, WireValues

MAGNITUDE_BITS = np.int32(0x7FFFFFFF)
NAN_BITS = np.int32(0x7F800001)  # any NaN: all are equal, and larger than infinity
SAMPLE = 16384
"""Elements of a row that give the bracket around its k-th value."""
BLOCK = 4096
"""Columns processed at a time: they stay in the first-level cache."""
SIZES = ir.VectorType(ir.IntType(32), WORD)

_by_row = functools.partial(by_row, table=lambda segments: of.wire_table(segments, torch.device("cpu")).numpy())


@intrinsic
def _at_least(context, bits, first, low):
    """Return a mask word of the 64 values from ``bits[first]`` on: set where the magnitude is ``low`` or more.

    Comparisons of LLVM's own vectors are mask words already: a loop that sets single bits is 8 times slower.
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


def _magnitudes(bits: np.ndarray) -> np.ndarray:
    """Return |values| as integers in the order of floats, with all NaN equal and the largest."""
    return np.minimum(bits & MAGNITUDE_BITS, NAN_BITS)


@njit
def _collect_between(bits, low, high, between):
    """Count magnitudes above ``high``, and collect those from ``low`` to ``high`` into ``between`` while they fit."""
    above, count = np.int64(0), np.int64(0)
    for first in range(0, bits.size, WORD):
        over = _at_least(bits, first, high + np.int32(1))
        above += np.int64(set_bits(over))
        word = _at_least(bits, first, low) & ~over
        inside = np.int64(set_bits(word))
        if count + inside > between.size:
            count += inside
            continue
        while word != 0:
            between[count] = min(bits[first + np.int64(trailing_zeros(word))] & MAGNITUDE_BITS, NAN_BITS)
            count += 1
            word &= word - uint64(1)
    return above, count


@njit
def _threshold_words(bits, threshold, ties, words):
    """Set the bits of all magnitudes above ``threshold``, and of the first ``ties`` that equal it."""
    for i in range(words.size):
        word = _at_least(bits, WORD * i, threshold + np.int32(1))
        if ties:
            equal = _at_least(bits, WORD * i, threshold) & ~word
            while equal != 0 and ties:
                lowest = equal & (~equal + uint64(1))
                word |= lowest
                equal ^= lowest
                ties -= 1
        words[i] = word


def _around(size: int, share: float) -> tuple[int, int]:
    """Return two indices, perhaps outside of a rising sample of ``size``, between which the largest ``share`` begins.

    They are 5 standard deviations from the middle: the bracket fails once in millions.
    """
    middle, spread = size * (1 - share), 5 * np.sqrt(size * share * (1 - share)) + 2
    return int(middle - spread), int(middle + spread) + 1


def _kth(bits: np.ndarray, k: int) -> tuple[int, int]:
    """Return the k-th largest magnitude and the number of those above it.

    One pass counts the values above a sample's bracket and collects those in it. A bracket of one value (a gradient
    with more zeros than n - k) needs no more, and one that begins with many equal ones (the zeros where few ranks have
    sent something) a second pass. If the bracket misses (once in millions) or holds too many other values (ties), all
    values are partitioned.
    """
    n = bits.size
    step = (n // SAMPLE) | 1  # odd: not in step with rows of a power of two
    sample = _magnitudes(bits[::step])
    if step > 1:
        size = sample.size
        first, last = _around(size, k / n)
        sample.partition([max(first, 0), min(last, size - 1)])  # a tenth of the time of sorting it
        low = sample[first] if first >= 0 else np.int32(0)
        high = sample[last] if last < size else NAN_BITS
        between = np.empty(max(int(2 * n * (last - first + 2) / size), 1024), np.int32)
        above, count = _collect_between(bits, low, high, between)
        if above < k <= above + count:
            if low == high:
                return int(low), above
            if count > between.size:
                above, count = _collect_between(bits, low + np.int32(1), high, between)
                if k > above + count:
                    return int(low), above + count
            if count <= between.size:
                inside = between[:count]
                threshold = np.partition(inside, count - (k - above))[count - (k - above)]
                return int(threshold), above + int(np.count_nonzero(inside > threshold))
        sample = _magnitudes(bits)
    threshold = np.partition(sample, n - k)[n - k]
    return int(threshold), int(np.count_nonzero(sample > threshold))


def _mask_of(values: np.ndarray, k: int) -> np.ndarray:
    """Return the mask of the ``k`` >= 1 largest."""
    bits, words = values.view(np.int32), np.empty(values.size // WORD, np.uint64)
    threshold, above = _kth(bits, k)
    _threshold_words(bits, np.int32(threshold), k - above, words)
    return words


@njit
def _add(values, addends, out):
    for i in range(out.size):
        out[i] = values[i] + addends[i]


@njit
def _listed(rows, residual, total, feedback, threshold, columns, values):
    """List the ``columns`` where |h| >= ``threshold`` and their ``values`` while there is room; return their number.

    ``feedback`` writes h = ``rows`` + ``residual`` to ``total``, which else holds h already.
    """
    bits = total.view(np.int32)
    count, room = 0, columns.size
    for block in range(0, rows.size, BLOCK):
        end = min(block + BLOCK, rows.size)
        if feedback:
            _add(rows[block:end], residual[block:end], total[block:end])
        for word in range(block, end, WORD):
            large = _at_least(bits, word, threshold)
            while large != 0:
                column = word + np.int64(trailing_zeros(large))
                if count < room:
                    columns[count] = column
                    values[count] = total[column]
                count += 1
                large &= large - uint64(1)
    return count


@njit
def _chosen(columns, values, sizes, threshold, ties, start, positions, payload):
    """Choose the ``columns`` whose size is above ``threshold``, and the first ``ties`` that equal it."""
    entry = 0
    for i in range(sizes.size):
        if sizes[i] > threshold or (sizes[i] == threshold and ties > 0):
            ties -= sizes[i] == threshold
            positions[entry] = start + columns[i]
            payload[entry] = values[i]
            entry += 1


@njit
def _pack_segment(positions, start, width, high_bytes, low_bytes, low_bits):
    for i in range(positions.size):
        column = positions[i] - start
        if not 0 <= column < width:
            return False
        bit = i * low_bits
        low_bytes[bit >> 3] |= np.uint8((column & ((1 << low_bits) - 1)) << (bit & 7))
        bit = (column >> low_bits) + i
        high_bytes[bit >> 3] |= np.uint8(1 << (bit & 7))
    return True


@_by_row
def _pack(positions, table, wire):
    for segment in range(len(table)):
        start, width, k, list_start, first_bit, high_bits, low_bits, _, _ = table[segment]
        first, middle = first_bit // 8, (first_bit + high_bits) // 8
        operands = positions[list_start : list_start + k], start, width, wire[first:middle], wire[middle:]
        # the loop is compiled for a constant: with a variable it takes twice as long
        if not (_pack_segment(*operands, 8) if low_bits == 8 else _pack_segment(*operands, 4)):
            return False
    return True


@njit
def _unpack_segment(high_words, low_bytes, start, width, positions, low_bits):
    i = 0
    for word in range(high_words.size):
        ones = high_words[word]
        while ones != 0:
            if i == positions.size:
                return False
            bit = i * low_bits
            low = (np.int64(low_bytes[bit >> 3]) >> (bit & 7)) & ((1 << low_bits) - 1)
            column = ((WORD * word + np.int64(trailing_zeros(ones)) - i) << low_bits) + low
            if column >= width or (i and start + column <= positions[i - 1]):
                return False
            positions[i] = start + column
            i += 1
            ones &= ones - uint64(1)
    return i == positions.size


@_by_row
def _unpack(wire, table, positions):
    positions[:] = -1
    for segment in range(len(table)):
        start, width, k, list_start, first_bit, high_bits, low_bits, _, _ = table[segment]
        first, middle = first_bit // 8, (first_bit + high_bits) // 8
        high_words, columns = wire[first:middle].view(np.uint64), positions[list_start : list_start + k]
        operands = high_words, wire[middle:], start, width, columns
        if not (_unpack_segment(*operands, 8) if low_bits == 8 else _unpack_segment(*operands, 4)):
            return False
    return True


@by_row
def _put(payload, positions, out, minus):
    for i in range(positions.size):
        if positions[i] >= 0:
            out[positions[i]] = payload[i] if minus is None else payload[i] - minus[i]


@njit
def _sum_at(payload, stride, positions, positions_stride, peers, m, out, scale, scaled):
    cursors = np.zeros(peers, np.int64)
    for first in range(0, out.size, BLOCK):
        block = out[first : first + BLOCK]
        block[:] = np.float32(0)
        for peer in range(peers):
            i = cursors[peer]
            while i < m:
                column = positions[peer * positions_stride + i]
                if column >= first + block.size:
                    break
                if column >= 0:
                    out[column] += payload[peer * stride + i]
                i += 1
            cursors[peer] = i
        if scaled:
            for j in range(block.size):
                block[j] *= scale


def largest(
    rows: Tensor, residual: Tensor | None, segments: tuple[ListSegment, ...], total_out: Tensor | None,
    positions: Tensor, payload: Tensor, wire: Tensor | None = None, adam: Adam | None = None,
    values: WireValues | None = None, decoded: Tensor | None = None, guess: Tensor | None = None,
) -> None:  # fmt: skip
    if adam is not None:
        adam.take(rows)
    if residual is None and total_out is not None:
        total_out.copy_(rows)
    total = rows if total_out is None else total_out
    positions.fill_(-1)
    payload.zero_()
    for *sources, listed, chosen in rows_of(rows, total if residual is None else residual, total, positions, payload):
        for start, width, k, list_start in segments:
            operands = [memory[start : start + width] for memory in sources]
            lists = [memory[list_start : list_start + k] for memory in (listed, chosen)]
            _largest(operands, residual is not None, k, start, lists)
    if wire is not None:
        pack(positions, segments, wire)
    if values is not None:
        sent = reference.write_values(payload, values, decoded)
        if total_out is not None:
            _put(payload, positions, total_out, sent)


def _largest(operands: list[np.ndarray], feedback: bool, k: int, start: int, lists: list[np.ndarray]) -> None:
    """List the ``k`` largest in one pass, which makes h and lists all values above a size that a sample gives.

    If the sample was wrong (once in millions), or many values are equal, search all values for the threshold.
    """
    rows, residual, total = operands
    lowest, room = _bracket(rows, residual, feedback, k)
    columns, values = np.empty(room, np.int32), np.empty(room, np.float32)
    count = _listed(rows, residual, total, feedback, lowest, columns, values)
    if k == 0:
        return
    if k <= count <= room:
        sizes = _magnitudes(values[:count].view(np.int32))
        threshold = np.partition(sizes, count - k)[count - k]
        _chosen(columns, values, sizes, threshold, k - np.count_nonzero(sizes > threshold), start, *lists)
    else:
        list_bits(total, _mask_of(total, k), start, *lists)


def _bracket(rows: np.ndarray, residual: np.ndarray, feedback: bool, k: int) -> tuple[np.int32, int]:
    """Return a size that at least ``k`` values should reach, and the room to reserve for all that do."""
    if k == 0:
        return NAN_BITS + np.int32(1), 0
    width = rows.size
    step = (width // min(max(width // 32, 1024), 4096)) | 1  # odd: not in step with rows of a power of two
    with np.errstate(all="ignore"):  # infinities of both signs
        sampled = rows[::step] + residual[::step] if feedback else rows[::step]
    sample = _magnitudes(sampled.view(np.int32))
    if step == 1:
        return np.partition(sample, width - k)[width - k], width
    first = max(_around(sample.size, k / width)[0], 0)
    sample.partition(first)  # a tenth of the time of sorting it
    room = width * (sample.size - first) // sample.size + width // 8 + WORD
    return sample[first] if first else np.int32(0), min(room, width)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> None:
    words.zero_()
    for values, mask in rows_of(rows, words):
        for start, width, k, _ in segments:
            if k:
                mask[start // WORD : (start + width) // WORD] = _mask_of(values[start : start + width], k)


def pack(positions: Tensor, segments: tuple[ListSegment, ...], wire: Tensor) -> None:
    wire.zero_()
    if not _pack(positions, segments, wire):
        raise ThinwireError("positions to pack must be as many in each part of a row as the part says, and inside it")


def unpack(wire: Tensor, segments: tuple[ListSegment, ...], positions: Tensor) -> None:
    if not _unpack(wire, segments, positions):
        raise ThinwireError(reference.NOT_A_WIRE)


def put(payload: Tensor, positions: Tensor, out: Tensor) -> None:
    _put(payload, positions, out, None)


def decode(
    wire: Tensor, values: WireValues, segments: tuple[ListSegment, ...], out: Tensor, scale: float | None,
    positions: Tensor, decoded: Tensor | None,
) -> None:  # fmt: skip
    unpack(wire, segments, positions)
    payload = reference.read_values(values, decoded)
    if scale is None:
        _put(payload, positions, out.zero_(), None)
    else:
        sum_at(payload, positions, segments, out[0], scale)


def read(wire: Tensor, segments: tuple[ListSegment, ...], words: Tensor, positions: Tensor) -> None:
    unpack(wire, segments, positions)
    reference.mark(positions, segments, words, masks.from_indices)


def sum_at(payload: Tensor, positions: Tensor, segments: tuple[ListSegment, ...], out: Tensor, scale: float) -> None:
    _sum_at(*flat(payload), *flat(positions), *positions.shape, out.numpy(), np.float32(scale), scale != 1.0)
