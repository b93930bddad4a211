# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg"
"""Numba kernels for CPU tensors, the same bits as ``reference``: one pass over the values, and lists after that."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.errors import ThinwireError
from thinwire.ops.kernels import flat, njit
from thinwire.ops.mask.cpu import NAN_BITS, WORD, at_least, kth, magnitude, trailing_zeros

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
def _listed(rows, first, old, old_first, new, new_first, width, feedback, low, at, sizes):
    """h = rows + old -> new, and the columns ``at`` and ``sizes`` of all |h| from ``low`` on, as many as there is room.

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
                    sizes[found] = magnitude(bits[to + column])
                found += 1
                large &= large - uint64(1)
    return found


@njit
def _chosen(at, sizes, threshold, k, start, out, place):
    """Of the columns ``at`` those whose size is above ``threshold``, and the first that equal it, ``k`` in all."""
    ties = k
    for size in sizes:
        ties -= size > threshold
    for i in range(at.size):
        if sizes[i] > threshold or (sizes[i] == threshold and ties > 0):
            ties -= sizes[i] == threshold
            out[place] = start + at[i]
            place += 1


@njit
def _walked(bits, first, width, threshold, ties, start, out, place):
    """``_chosen`` of all columns, where their threshold is known."""
    for word in range(0, width, WORD):
        above = at_least(bits, first + word, threshold + np.int32(1))
        large = at_least(bits, first + word, threshold) if ties > 0 else above
        while large != 0:
            equal = (large & ~above & (~large + uint64(1))) != 0  # its lowest bit is none of those above
            if not equal or ties > 0:
                ties -= equal
                out[place] = start + word + np.int64(trailing_zeros(large))
                place += 1
            large &= large - uint64(1)


@njit
def _pack(found, stride, rows, table, wire, wire_stride):
    for row in range(rows):
        for part in range(len(table)):
            start, width, k, place, string, low, _ = table[part]
            string, low = row * wire_stride + string, row * wire_stride + low
            for i in range(k):
                column = found[row * stride + place + i] - start
                if not 0 <= column < width:
                    return False
                bit = (column >> 8) + i
                wire[low + i] = np.uint8(column & 255)
                wire[string + (bit >> 3)] |= np.uint8(1 << (bit & 7))
    return True


@njit
def _unpack(wire, wire_stride, rows, table, found, stride, m):
    for row in range(rows):
        found[row * stride : row * stride + m] = -1
        for part in range(len(table)):
            start, width, k, place, string, low, size = table[part]
            string, low = row * wire_stride + string, row * wire_stride + low
            i = 0
            for octet in range(size):
                bits = uint64(wire[string + octet])
                while bits != 0:
                    if i == k:
                        return False
                    column = ((8 * octet + np.int64(trailing_zeros(bits)) - i) << 8) + wire[low + i]
                    if column >= width:
                        return False
                    found[row * stride + place + i] = start + column
                    i += 1
                    bits &= bits - uint64(1)
            if i != k:
                return False
    return True


@njit
def _take(values, stride, found, found_stride, rows, m, out, out_stride):
    for row in range(rows):
        for i in range(m):
            at = found[row * found_stride + i]
            out[row * out_stride + i] = values[row * stride + at] if at >= 0 else np.float32(0)


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


def largest(rows: Tensor, old: Tensor | None, parts: tuple[Part, ...], new: Tensor | None, found: Tensor) -> None:
    if old is None and new is not None:
        new.copy_(rows)
    total = rows if new is None else new
    found.fill_(-1)
    arrays = [flat(rows), flat(total if old is None else old), flat(total), flat(found)]
    for row in range(len(rows)):
        (g, g_row), (e, e_row), (h, h_row), (out, out_row) = ((of, row * step) for of, step in arrays)
        for start, width, k, place in parts:
            firsts = [each + start for each in (g_row, e_row, h_row)]
            _largest(g, e, h, *firsts, width, k, start, out, out_row + place, feedback=old is not None)


def _largest(
    g: np.ndarray, e: np.ndarray, h: np.ndarray, g_first: int, e_first: int, h_first: int, width: int, k: int,
    start: int, out: np.ndarray, place: int, *, feedback: bool,
) -> None:  # fmt: skip
    """A sample says from which size on all values are listed, so that the k largest are among them, in all probability.

    In that pass over memory h is made; which of the listed are the largest is found in the list. Where the sample was
    wrong (once in millions), or many values are equal, the threshold is looked for among all values.
    """
    if k == 0:
        none = np.empty(0, np.int32)
        _listed(g, g_first, e, e_first, h, h_first, width, feedback, NAN_BITS + np.int32(1), none, none)
        return
    step = (width // min(max(width // 16, 1024), 16384)) | 1  # odd: not in step with rows of a power of two
    sample = np.empty(-(-width // step), np.int32)
    _sampled(g, g_first, e, e_first, step, feedback, sample)
    share = k / width
    first = int(sample.size * (1 - share) - 5 * np.sqrt(sample.size * share * (1 - share)) - 2) if step > 1 else -1
    low = np.int32(0)
    if first >= 0:
        sample.partition(first)  # a tenth of the time of sorting it
        low = sample[first]
    elif step == 1:
        low = np.partition(sample, width - k)[width - k]
    room = min(width, width * (sample.size - max(first, 0)) // sample.size + width // 8 + 64)
    at, sizes = np.empty(room, np.int32), np.empty(room, np.int32)
    count = _listed(g, g_first, e, e_first, h, h_first, width, feedback, low, at, sizes)
    if k <= count <= room:
        sizes = sizes[:count]
        threshold = np.partition(sizes, count - k)[count - k]
        _chosen(at[:count], sizes, threshold, k, start, out, place)
        return
    bits = h[h_first : h_first + width].view(np.int32)
    threshold, above = kth(bits, k)
    _walked(bits, 0, width, np.int32(threshold), k - above, start, out, place)


@functools.cache
def _table(parts: tuple[Part, ...]) -> np.ndarray:
    """(parts, 7): of each what it says, where its string and its lower bytes are in a wire, and the string's bytes."""
    rows, first = [], 0
    for part in parts:
        rows.append((*part, first, first + part.string, part.string))
        first += part.nbytes
    return np.array(rows, np.int64).reshape(-1, 7)


def pack(found: Tensor, parts: tuple[Part, ...], wire: Tensor) -> None:
    wire.zero_()
    if not _pack(*flat(found), len(wire), _table(parts), *flat(wire)):
        raise ThinwireError("there are not as many positions in each part of a row as its parts say")


def unpack(wire: Tensor, parts: tuple[Part, ...], found: Tensor) -> None:
    if not _unpack(*flat(wire), len(wire), _table(parts), *flat(found), found.shape[1]):
        raise ThinwireError("a wire of positions does not hold as many as it should, or one beyond its columns")


def take(values: Tensor, found: Tensor, out: Tensor) -> None:
    _take(*flat(values), *flat(found), *found.shape, *flat(out))


def put(payload: Tensor, found: Tensor, out: Tensor) -> None:
    _put(*flat(payload), *flat(found), *found.shape, *flat(out))


def sum_at(payload: Tensor, found: Tensor, parts: tuple[Part, ...], out: Tensor, scale: float) -> None:
    _sum_at(*flat(payload), *flat(found), *found.shape, out.numpy(), np.float32(scale), scale != 1.0)
