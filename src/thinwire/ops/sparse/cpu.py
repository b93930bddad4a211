# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors, the same bits as ``reference``: one pass over the values, and lists after that."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.kernels import flat, njit
from thinwire.ops.mask.cpu import (
    NAN_BITS,
    WORD,
    around,
    at_least,
    kth,
    magnitude,
    magnitudes,
    threshold_words,
    trailing_zeros,
)
from thinwire.ops.sparse import reference

if TYPE_CHECKING:
    from thinwire.ops.sparse import ListSegment

BLOCK = 4096
"""Columns between two looks at the lists: they stay in the first-level cache."""


@njit
def _sampled(rows, residual, step, feedback, out):
    """Write |h| of every ``step``-th column, as integers, to ``out``."""
    value = np.empty(1, np.float32)
    bits = value.view(np.int32)
    for i in range(out.size):
        value[0] = rows[i * step]
        if feedback:
            value[0] += residual[i * step]
        out[i] = magnitude(bits[0])


@njit
def _add(values, addends, out):
    for i in range(out.size):
        out[i] = values[i] + addends[i]


@njit
def _listed(rows, residual, total, feedback, threshold, columns, values):
    """List the ``columns`` where |h| >= ``threshold`` and their ``values``, as far as there is room; count them.

    ``total`` = h = ``rows`` + ``residual``; without ``feedback`` h is in it already.
    """
    bits = total.view(np.int32)
    count, room = 0, columns.size
    for block in range(0, rows.size, BLOCK):
        end = min(block + BLOCK, rows.size)
        if feedback:
            _add(rows[block:end], residual[block:end], total[block:end])
        for word in range(block, end, WORD):
            large = at_least(bits, word, threshold)
            while large != 0:
                column = word + np.int64(trailing_zeros(large))
                if count < room:
                    columns[count] = column
                    values[count] = total[column]
                count += 1
                large &= large - uint64(1)
    return count


@njit
def _chosen(columns, values, threshold, start, positions, payload):
    """Choose of ``columns`` those whose size is above ``threshold``, and the first that equal it, until all is full."""
    bits = values.view(np.int32)
    ties, entry = positions.size, 0
    for i in range(columns.size):
        ties -= magnitude(bits[i]) > threshold
    for i in range(columns.size):
        size = magnitude(bits[i])
        if size > threshold or (size == threshold and ties > 0):
            ties -= size == threshold
            positions[entry] = start + columns[i]
            payload[entry] = values[i]
            entry += 1


@njit
def _walked(values, threshold, ties, start, positions, payload):
    """Choose as ``_chosen`` of all columns; ``ties``: how many that equal the ``threshold`` are among the chosen."""
    bits = values.view(np.int32)
    entry = 0
    for word in range(0, values.size, WORD):
        above = at_least(bits, word, threshold + np.int32(1))
        large = at_least(bits, word, threshold) if ties > 0 else above
        while large != 0:
            equal = (large & ~above & (~large + uint64(1))) != 0  # its lowest bit is none of those above
            if not equal or ties > 0:
                ties -= equal
                column = word + np.int64(trailing_zeros(large))
                positions[entry] = start + column
                payload[entry] = values[column]
                entry += 1
            large &= large - uint64(1)


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


@njit
def _pack(positions, stride, rows, table, wire, wire_stride):
    for row in range(rows):
        for segment in range(len(table)):
            start, width, k, list_start, first, high_size, end, low_bits = table[segment]
            columns = positions[row * stride + list_start : row * stride + list_start + k]
            octets = wire[row * wire_stride + first : row * wire_stride + end]
            if low_bits == 8:  # a constant, for which the loop is compiled: with a variable it takes twice as long
                is_valid = _pack_segment(columns, start, width, octets[:high_size], octets[high_size:], 8)
            else:
                is_valid = _pack_segment(columns, start, width, octets[:high_size], octets[high_size:], 4)
            if not is_valid:
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


@njit
def _unpack(wire, wire_stride, rows, table, positions, stride, m):
    for row in range(rows):
        positions[row * stride : row * stride + m] = -1
        for segment in range(len(table)):
            start, width, k, list_start, first, high_size, end, low_bits = table[segment]
            columns = positions[row * stride + list_start : row * stride + list_start + k]
            octets = wire[row * wire_stride + first : row * wire_stride + end]
            high_words = octets[:high_size].view(np.uint64)
            if low_bits == 8:
                is_valid = _unpack_segment(high_words, octets[high_size:], start, width, columns, 8)
            else:
                is_valid = _unpack_segment(high_words, octets[high_size:], start, width, columns, 4)
            if not is_valid:
                return False
    return True


@njit
def _put(payload, stride, positions, positions_stride, rows, m, out, out_stride):
    for row in range(rows):
        for i in range(m):
            column = positions[row * positions_stride + i]
            if column >= 0:
                out[row * out_stride + column] = payload[row * stride + i]


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
    positions: Tensor, payload: Tensor,
) -> None:  # fmt: skip
    if residual is None and total_out is not None:
        total_out.copy_(rows)
    total = rows if total_out is None else total_out
    positions.fill_(-1)
    payload.zero_()
    sources = flat(rows), flat(total if residual is None else residual), flat(total)
    lists = flat(positions), flat(payload)
    for row in range(len(rows)):
        for start, width, k, list_start in segments:
            operands = [memory[row * stride + start :][:width] for memory, stride in sources]
            entries = [memory[row * stride + list_start :][:k] for memory, stride in lists]
            _largest(operands, residual is not None, k, start, entries)


def _largest(operands: list[np.ndarray], feedback: bool, k: int, start: int, lists: list[np.ndarray]) -> None:
    """A sample says from which size on all values are listed, so that the k largest are among them, in all probability.

    In that pass over memory h is made; which of the listed are the largest is found in the list. Where the sample was
    wrong (once in millions), or many values are equal, the threshold is looked for among all values.
    """
    rows, residual, total = operands
    lowest, room = _bracket(rows, residual, feedback, k)
    columns, values = np.empty(room, np.int32), np.empty(room, np.float32)
    count = _listed(rows, residual, total, feedback, lowest, columns, values)
    if k == 0:
        return
    if k <= count <= room:
        sizes = np.empty(count, np.int32)
        magnitudes(values[:count].view(np.int32), 1, sizes)
        sizes.partition(count - k)
        _chosen(columns[:count], values[:count], sizes[count - k], start, *lists)
    else:
        threshold, above = kth(total.view(np.int32), k)
        _walked(total, np.int32(threshold), k - above, start, *lists)


def _bracket(rows: np.ndarray, residual: np.ndarray, feedback: bool, k: int) -> tuple[np.int32, int]:
    """Return a size that no more than n - ``k`` of n values should be below, and for how many there should be room."""
    if k == 0:
        return NAN_BITS + np.int32(1), 0
    width = rows.size
    step = (width // min(max(width // 32, 1024), 4096)) | 1  # odd: not in step with rows of a power of two
    sample = np.empty(-(-width // step), np.int32)
    _sampled(rows, residual, step, feedback, sample)
    if step == 1:
        return np.partition(sample, width - k)[width - k], width
    first = max(around(sample.size, k / width)[0], 0)
    sample.partition(first)  # a tenth of the time of sorting it
    room = width * (sample.size - first) // sample.size + width // 8 + WORD
    return sample[first] if first else np.int32(0), min(room, width)


@functools.cache
def _table(segments: tuple[ListSegment, ...]) -> np.ndarray:
    """(segments, 8): each one's fields, its first byte in a wire, the bytes of its high bits, which come before the
    lower ones, its last byte plus 1, and how many lower bits a position has."""
    rows, first = [], 0
    for segment in segments:
        rows.append((*segment, first, segment.high_bytes, first + segment.nbytes, segment.low_bits))
        first += segment.nbytes
    return np.array(rows, np.int64).reshape(-1, 8)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> None:
    words.zero_()
    for row, mask in zip(rows, words, strict=True):
        for start, width, k, _ in segments:
            if k:
                bits = row[start : start + width].detach().numpy().view(np.int32)
                threshold, above = kth(bits, k)
                own = mask[start // WORD : (start + width) // WORD].numpy().view(np.uint64)
                threshold_words(bits, np.int32(threshold), k - above, own)


def pack(positions: Tensor, segments: tuple[ListSegment, ...], wire: Tensor) -> None:
    wire.zero_()
    if not _pack(*flat(positions), len(wire), _table(segments), *flat(wire)):
        raise ThinwireError("there are not as many positions in each part of a row as its parts say")


def unpack(wire: Tensor, segments: tuple[ListSegment, ...], positions: Tensor) -> None:
    if not _unpack(*flat(wire), len(wire), _table(segments), *flat(positions), positions.shape[1]):
        raise ThinwireError(reference.NOT_A_WIRE)


def put(payload: Tensor, positions: Tensor, out: Tensor) -> None:
    _put(*flat(payload), *flat(positions), *positions.shape, *flat(out))


def sum_at(payload: Tensor, positions: Tensor, segments: tuple[ListSegment, ...], out: Tensor, scale: float) -> None:
    _sum_at(*flat(payload), *flat(positions), *positions.shape, out.numpy(), np.float32(scale), scale != 1.0)
