# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors, the same bits as ``reference``: one pass over the values, and lists after that."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

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
    from thinwire.ops.sparse import Part

BLOCK = 4096
"""Columns between two looks at the lists: they stay in the first-level cache."""


@njit
def _sampled(rows, first, old, old_first, step, feedback, out):
    """|h| of every ``step``-th column, as integers."""
    value = np.empty(1, np.float32)
    bits = value.view(np.int32)
    for i in range(out.size):
        value[0] = rows[first + i * step]
        if feedback:
            value[0] += old[old_first + i * step]
        out[i] = magnitude(bits[0])


@njit
def _add(values, before, out):
    for i in range(out.size):
        out[i] = values[i] + before[i]


@njit
def _listed(rows, first, old, old_first, new, new_first, width, feedback, low, at, values):
    """h = rows + old -> new, and ``at`` which columns |h| is ``low`` or more, with ``values``, as far as there is room.

    Without ``feedback`` h is in ``new`` already. How many there are.
    """
    bits = new.view(np.int32)
    found, room = 0, at.size
    for block in range(0, width, BLOCK):
        size = min(BLOCK, width - block)
        to = new_first + block
        if feedback:
            before = old[old_first + block : old_first + block + size]
            _add(rows[first + block : first + block + size], before, new[to : to + size])
        for word in range(0, size, WORD):
            large = at_least(bits, to + word, low)
            while large != 0:
                column = word + np.int64(trailing_zeros(large))
                if found < room:
                    at[found] = block + column
                    values[found] = new[to + column]
                found += 1
                large &= large - uint64(1)
    return found


@njit
def _chosen(at, values, threshold, k, start, found, payload, place, to):
    """Of the columns ``at`` those whose size is above ``threshold``, and the first that equal it, ``k`` in all."""
    bits = values.view(np.int32)
    ties = k
    for i in range(at.size):
        ties -= magnitude(bits[i]) > threshold
    for i in range(at.size):
        size = magnitude(bits[i])
        if size > threshold or (size == threshold and ties > 0):
            ties -= size == threshold
            found[place] = start + at[i]
            payload[to] = values[i]
            place, to = place + 1, to + 1


@njit
def _walked(values, threshold, ties, start, found, payload, place, to):
    """``_chosen`` of all columns, where it is known how many that equal the ``threshold`` are among them."""
    bits = values.view(np.int32)
    for word in range(0, values.size, WORD):
        above = at_least(bits, word, threshold + np.int32(1))
        large = at_least(bits, word, threshold) if ties > 0 else above
        while large != 0:
            equal = (large & ~above & (~large + uint64(1))) != 0  # its lowest bit is none of those above
            if not equal or ties > 0:
                ties -= equal
                column = word + np.int64(trailing_zeros(large))
                found[place] = start + column
                payload[to] = values[column]
                place, to = place + 1, to + 1
            large &= large - uint64(1)


@njit
def _pack_part(found, start, width, string, lower, bits):
    for i in range(found.size):
        column = found[i] - start
        if not 0 <= column < width:
            return False
        bit = i * bits
        lower[bit >> 3] |= np.uint8((column & ((1 << bits) - 1)) << (bit & 7))
        bit = (column >> bits) + i
        string[bit >> 3] |= np.uint8(1 << (bit & 7))
    return True


@njit
def _pack(found, stride, rows, table, wire, wire_stride):
    for row in range(rows):
        for part in range(len(table)):
            start, width, k, place, first, low, end, bits = table[part]
            own = found[row * stride + place : row * stride + place + k]
            octets = wire[row * wire_stride + first : row * wire_stride + end]
            if bits == 8:  # a constant, for which the loop is compiled: with a variable it takes twice as long
                done = _pack_part(own, start, width, octets[:low], octets[low:], 8)
            else:
                done = _pack_part(own, start, width, octets[:low], octets[low:], 4)
            if not done:
                return False
    return True


@njit
def _unpack_part(string, lower, start, width, found, bits):
    i = 0
    for word in range(string.size):
        ones = string[word]
        while ones != 0:
            if i == found.size:
                return False
            bit = i * bits
            low = (np.int64(lower[bit >> 3]) >> (bit & 7)) & ((1 << bits) - 1)
            column = ((WORD * word + np.int64(trailing_zeros(ones)) - i) << bits) + low
            if column >= width or (i and start + column <= found[i - 1]):
                return False
            found[i] = start + column
            i += 1
            ones &= ones - uint64(1)
    return i == found.size


@njit
def _unpack(wire, wire_stride, rows, table, found, stride, m):
    for row in range(rows):
        found[row * stride : row * stride + m] = -1
        for part in range(len(table)):
            start, width, k, place, first, low, end, bits = table[part]
            own = found[row * stride + place : row * stride + place + k]
            octets = wire[row * wire_stride + first : row * wire_stride + end]
            string = octets[:low].view(np.uint64)
            if bits == 8:
                done = _unpack_part(string, octets[low:], start, width, own, 8)
            else:
                done = _unpack_part(string, octets[low:], start, width, own, 4)
            if not done:
                return False
    return True


@njit
def _put(payload, stride, found, found_stride, rows, m, out, out_stride):
    for row in range(rows):
        for i in range(m):
            at = found[row * found_stride + i]
            if at >= 0:
                out[row * out_stride + at] = payload[row * stride + i]


@njit
def _sum_at(payload, stride, found, found_stride, peers, m, out, scale, scaled):
    places = np.zeros(peers, np.int64)
    for first in range(0, out.size, BLOCK):
        block = out[first : first + BLOCK]
        block[:] = np.float32(0)
        for peer in range(peers):
            i = places[peer]
            while i < m:
                at = found[peer * found_stride + i]
                if at >= first + block.size:
                    break
                if at >= 0:
                    out[at] += payload[peer * stride + i]
                i += 1
            places[peer] = i
        if scaled:
            for j in range(block.size):
                block[j] *= scale


def largest(
    rows: Tensor, old: Tensor | None, parts: tuple[Part, ...], new: Tensor | None, found: Tensor, payload: Tensor
) -> None:
    if old is None and new is not None:
        new.copy_(rows)
    total = rows if new is None else new
    found.fill_(-1)
    payload.zero_()
    sources = flat(rows), flat(total if old is None else old), flat(total)
    lists = flat(found), flat(payload)
    for row in range(len(rows)):
        for start, width, k, place in parts:
            values = [each for of, step in sources for each in (of, row * step + start)]
            places = [row * step + place for _, step in lists]
            _largest(values, width, old is not None, k, start, [of for of, _ in lists], places)


def _largest(
    values: list[Any], width: int, feedback: bool, k: int, start: int, lists: list[np.ndarray], places: list[int]
) -> None:
    """A sample says from which size on all values are listed, so that the k largest are among them, in all probability.

    In that pass over memory h is made; which of the listed are the largest is found in the list. Where the sample was
    wrong (once in millions), or many values are equal, the threshold is looked for among all values.
    """
    low, room = _bracket(values, width, feedback, k)
    at, listed = np.empty(room, np.int32), np.empty(room, np.float32)
    count = _listed(*values, width, feedback, low, at, listed)
    if k == 0:
        return
    if k <= count <= room:
        sizes = np.empty(count, np.int32)
        magnitudes(listed[:count].view(np.int32), 1, sizes)
        sizes.partition(count - k)
        _chosen(at[:count], listed[:count], sizes[count - k], k, start, *lists, *places)
    else:
        *_, total, first = values
        total = total[first : first + width]
        threshold, above = kth(total.view(np.int32), k)
        _walked(total, np.int32(threshold), k - above, start, *lists, *places)


def _bracket(values: list[Any], width: int, feedback: bool, k: int) -> tuple[np.int32, int]:
    """A size that no more than ``width - k`` values should be below, and for how many there should be room."""
    if k == 0:
        return NAN_BITS + np.int32(1), 0
    step = (width // min(max(width // 32, 1024), 4096)) | 1  # odd: not in step with rows of a power of two
    sample = np.empty(-(-width // step), np.int32)
    _sampled(*values[:4], step, feedback, sample)
    if step == 1:
        return np.partition(sample, width - k)[width - k], width
    first = max(around(sample.size, k / width)[0], 0)
    sample.partition(first)  # a tenth of the time of sorting it
    room = width * (sample.size - first) // sample.size + width // 8 + WORD
    return sample[first] if first else np.int32(0), min(room, width)


@functools.cache
def _table(parts: tuple[Part, ...]) -> np.ndarray:
    """(parts, 8): of each what it says, where it begins in a wire, how far from there its lower bits do, where it ends,
    and how many lower bits a position has."""
    rows, first = [], 0
    for part in parts:
        rows.append((*part, first, part.string, first + part.nbytes, part.low))
        first += part.nbytes
    return np.array(rows, np.int64).reshape(-1, 8)


def marked(rows: Tensor, parts: tuple[Part, ...], words: Tensor) -> None:
    words.zero_()
    for row, mask in zip(rows, words, strict=True):
        for start, width, k, _ in parts:
            if k:
                bits = row[start : start + width].detach().numpy().view(np.int32)
                threshold, above = kth(bits, k)
                own = mask[start // WORD : (start + width) // WORD].numpy().view(np.uint64)
                threshold_words(bits, np.int32(threshold), k - above, own)


def pack(found: Tensor, parts: tuple[Part, ...], wire: Tensor) -> None:
    wire.zero_()
    if not _pack(*flat(found), len(wire), _table(parts), *flat(wire)):
        raise ThinwireError("there are not as many positions in each part of a row as its parts say")


def unpack(wire: Tensor, parts: tuple[Part, ...], found: Tensor) -> None:
    if not _unpack(*flat(wire), len(wire), _table(parts), *flat(found), found.shape[1]):
        raise ThinwireError(reference.NOT_A_WIRE)


def put(payload: Tensor, found: Tensor, out: Tensor) -> None:
    _put(*flat(payload), *flat(found), *found.shape, *flat(out))


def sum_at(payload: Tensor, found: Tensor, parts: tuple[Part, ...], out: Tensor, scale: float) -> None:
    _sum_at(*flat(payload), *flat(found), *found.shape, out.numpy(), np.float32(scale), scale != 1.0)
