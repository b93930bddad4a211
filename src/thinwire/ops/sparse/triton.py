# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``), the same bits as ``reference``.

One launch per stage for all parts of all rows. The k-th size of each part is found digit by digit, from the highest:
how many values have which digit is counted, and the digit is the one among whose values the k-th is; from then on only
values with that digit count. What is chosen knows its place in the list from the chosen in the blocks before its own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.alignment import viewable
from thinwire.ops.gpu import alignment, along, kernel, launch, row_of
from thinwire.ops.mask.triton import _slots, directory, from_indices
from thinwire.ops.programs import programs_of

if TYPE_CHECKING:
    from thinwire.ops.sparse import Part

BLOCK = 512
"""Columns, or entries of a list, of one program."""
COUNTED = 4096
"""Columns of which one program counts the digits."""
DIGITS = ((20, 1 << 11), (9, 1 << 11), (0, 1 << 9))
"""The lowest bit of each, and how many there are: of the 31 bits of a size."""

NAN = tl.constexpr(0x7F800001)
"""Any NaN, as a size: all are equal, and larger than infinity."""


@triton.jit
def _part_of(programs, parts, COLUMNS: tl.constexpr):
    """This program's row, the number of its part, and what ``parts`` says of that from its second column on."""
    number = tl.load(programs + tl.program_id(0)).to(tl.int64)
    return tl.program_id(1).to(tl.int64), number, parts + number * COLUMNS


@triton.jit
def _size(values):
    """|values| as int32, which have their order."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, NAN)


@kernel
def _count(
    rows, stride, old, old_stride, new, new_stride, programs, parts, state, counts, count_parts, shift,
    FIRST: tl.constexpr, FEEDBACK: tl.constexpr, KEEP: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """``counts`` of the digit at ``shift`` among the sizes that begin with the digits in ``state``; first h -> new."""
    row, number, part = _part_of(programs, parts, 8)
    at = (tl.program_id(0) - tl.load(part + 4)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(part + 1) // 16 * 16
    start = tl.load(part)
    values = tl.load(row_of(rows + start, stride, row, ALIGN) + at, mask=inside, other=0)
    if FEEDBACK:
        values += tl.load(row_of(old + start, old_stride, row, ALIGN) + at, mask=inside, other=0)
    if KEEP:
        tl.store(row_of(new + start, new_stride, row, ALIGN) + at, values, mask=inside)
    size, which = _size(values), row * count_parts + number
    if not FIRST:
        known = tl.load(state + which * 2)
        inside = inside & ((size >> shift) // BINS == (known >> shift) // BINS)
    found = tl.histogram((size >> shift) % BINS, BINS, mask=inside)
    to = counts + which * BINS + tl.arange(0, BINS)
    tl.atomic_add(to, found, mask=found > 0, sem="relaxed")


@kernel
def _digit(parts, state, counts, count_parts, shift, FIRST: tl.constexpr, BINS: tl.constexpr):
    """The next digit of the k-th size -> ``state``: the digits so far, and how many values with them are chosen.

    ``counts`` become zeros.
    """
    row, number = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    state += (row * count_parts + number) * 2
    if FIRST:
        known, left = 0, tl.load(parts + number * 8 + 2).to(tl.int32)
    else:
        known, left = tl.load(state), tl.load(state + 1)
    digit = tl.arange(0, BINS)
    counts += (row * count_parts + number) * BINS + digit
    count = tl.load(counts)
    from_here = tl.cumsum(count, 0, reverse=True)
    chosen = tl.maximum(tl.sum((from_here >= left).to(tl.int32), 0) - 1, 0)
    tl.store(state, known | (chosen << shift))
    tl.store(state + 1, left - tl.sum(tl.where(digit > chosen, count, 0), 0))
    tl.store(counts, tl.zeros((BINS,), tl.int32))


@triton.jit
def _compared(total, stride, programs, parts, state, count_parts, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Of this program's columns: the part, their values, which are above the k-th size, which equal it."""
    row, number, part = _part_of(programs, parts, 8)
    at = (tl.program_id(0) - tl.load(part + 4)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.load(part + 1) // 16 * 16
    values = tl.load(row_of(total + tl.load(part), stride, row, ALIGN) + at, mask=inside, other=0)
    state += (row * count_parts + number) * 2
    threshold = tl.load(state)
    return part, at, values, inside & (_size(values) > threshold), inside & (_size(values) == threshold), state + 1


@kernel
def _tally(
    total, stride, programs, parts, state, tallies, tallies_stride, count_parts, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """``tallies`` (2 R, 1 + programs): how many are above the k-th size, and how many equal it; a zero before them."""
    _, _, _, above, equal, _ = _compared(total, stride, programs, parts, state, count_parts, BLOCK, ALIGN)
    tallies += 2 * tl.program_id(1).to(tl.int64) * tallies_stride
    first = tl.program_id(0) == 0
    tl.store(tallies, 0, mask=first)
    tl.store(tallies + tallies_stride, 0, mask=first)
    tallies += tl.program_id(0) + 1
    tl.store(tallies, tl.sum(above.to(tl.int32), 0))
    tl.store(tallies + tallies_stride, tl.sum(equal.to(tl.int32), 0))


@triton.jit
def _before(tallies, first, flags):
    """Of each of this program's columns: how many of its part's ``flags`` are before it."""
    bits = flags.to(tl.int32)
    return tl.load(tallies + tl.program_id(0)) - tl.load(tallies + first) + tl.cumsum(bits, 0) - bits


@kernel
def _list(
    total, stride, programs, parts, state, tallies, tallies_stride, found, found_stride, payload, payload_stride,
    count_parts, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    part, at, values, above, equal, ties = _compared(
        total, stride, programs, parts, state, count_parts, BLOCK, ALIGN
    )  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    tallies += 2 * row * tallies_stride
    first, ties = tl.load(part + 4), tl.load(ties)
    equals = _before(tallies + tallies_stride, first, equal)
    place = tl.load(part + 3) + _before(tallies, first, above) + tl.minimum(equals, ties)
    chosen = above | (equal & (equals < ties))
    tl.store(found + row * found_stride + place, (tl.load(part) + at).to(tl.int32), mask=chosen)
    tl.store(payload + row * payload_stride + place, values, mask=chosen)


@triton.jit
def _lower(words, part, i, bits):
    """Where the lower bits of the i-th positions are: their words, which come after the string's, and the bit."""
    bit = i * bits
    return words + tl.load(part + 6) // 8 + bit // 64, bit % 64


@kernel
def _pack(
    found, found_stride, words, words_stride, programs, parts, BLOCK: tl.constexpr,
):  # fmt: skip
    """``words`` are zeros: of each several programs may set bits."""
    row, _, part = _part_of(programs, parts, 8)
    i = (tl.program_id(0) - tl.load(part + 4)) * BLOCK + tl.arange(0, BLOCK)
    inside = i < tl.load(part + 2)
    at = tl.load(found + row * found_stride + tl.load(part + 3) + i, mask=inside, other=0).to(tl.int64)
    at -= tl.load(part)
    inside = inside & (at >= 0) & (at < tl.load(part + 1))
    bits = tl.load(part + 7)
    words += row * words_stride + tl.load(part + 5) // 8
    place, low = _lower(words, part, i, bits)
    tl.atomic_or(place, (at & ((1 << bits) - 1)) << low, mask=inside, sem="relaxed")
    bit = (at >> bits) + i
    one = tl.full((BLOCK,), 1, tl.int64) << (bit & 63)
    tl.atomic_or(words + (bit >> 6), one, mask=inside, sem="relaxed")


@triton.jit
def _string(words, stride, programs, parts, BLOCK: tl.constexpr):
    """Of this program's bits of a string: row, part, its words, their places, and which are ones."""
    row, _, part = _part_of(programs, parts, 8)
    bit = (tl.program_id(0) - tl.load(part + 4)) * BLOCK + tl.arange(0, BLOCK)
    words += row * stride + tl.load(part + 5) // 8
    word = tl.load(words + bit // 64, mask=bit < 8 * tl.load(part + 6), other=0)
    return row, part, words, bit, ((word >> (bit % 64)) & 1) != 0


@kernel
def _ones(words, words_stride, programs, parts, tallies, tallies_stride, BLOCK: tl.constexpr):
    row, _, _, _, ones = _string(words, words_stride, programs, parts, BLOCK)
    tallies += row * tallies_stride
    tl.store(tallies, 0, mask=tl.program_id(0) == 0)
    tl.store(tallies + tl.program_id(0) + 1, tl.sum(ones.to(tl.int32), 0))


@kernel
def _unpack(
    words, words_stride, programs, parts, tallies, tallies_stride, found, found_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part, words, bit, ones = _string(words, words_stride, programs, parts, BLOCK)
    i = _before(tallies + row * tallies_stride, tl.load(part + 4), ones)
    inside = ones & (i < tl.load(part + 2))
    bits = tl.load(part + 7)
    place, low = _lower(words, part, i, bits)
    at = ((bit - i) << bits) + (tl.load(place, mask=inside, other=0) >> low & ((1 << bits) - 1))
    to = found + row * found_stride + tl.load(part + 3) + i
    tl.store(to, (tl.load(part) + at).to(tl.int32), mask=inside & (at < tl.load(part + 1)))


@kernel
def _put(payload, payload_stride, found, found_stride, out, stride, m, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(found + row * found_stride + i, mask=i < m, other=-1)
    values = tl.load(payload + row * payload_stride + i, mask=i < m, other=0)
    tl.store(out + row * stride + at, values, mask=at >= 0)


@kernel
def _sum_at(
    payload, payload_stride, words, words_stride, before, before_stride, places, out, scale, peers, n, k,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``places``: of each 64 columns, how far the entries of their part are from where they would be in a list without
    anything between the parts."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n // 16 * 16
    shift = tl.load(places + at // 64, mask=inside, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(peers):
        row = tl.cast(peer, tl.int64)
        on, place = _slots(words + row * words_stride, before + row * before_stride + block, at, inside, k)
        total += tl.load(payload + row * payload_stride + place + shift, mask=on, other=0.0)
    tl.store(along(out, at, ALIGN), total * scale, mask=inside)


@functools.cache
def _tables(parts: tuple[Part, ...], by: str, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(programs along a row,) int32, the part of each; (parts * 8,) int64: what a part says, its first program, where
    its string is in a wire, the string's bytes, after which the lower bits come, and how many of these a position has.
    ``by``: what programs divide of a part."""
    sizes = {"columns": [of.width for of in parts], "lists": [of.k for of in parts]}
    programs, firsts = programs_of(sizes.get(by, [8 * of.string for of in parts]), block)
    table, place = [], 0
    for part, first in zip(parts, firsts, strict=True):
        table += [*part, first, place, part.string, part.low]
        place += part.nbytes
    return (
        torch.tensor(programs, dtype=torch.int32, device=device), torch.tensor(table, dtype=torch.int64, device=device)
    )  # fmt: skip


@functools.cache
def _shifts(parts: tuple[Part, ...], device: torch.device) -> Tensor:
    """(n / 64,) int32: see ``_sum_at``."""
    found: list[int] = []
    before = 0
    for part in parts:
        found += [part.place - before] * (part.width // 64)
        before += part.k
    return torch.tensor(found, dtype=torch.int32, device=device)


def largest(
    rows: Tensor, old: Tensor | None, parts: tuple[Part, ...], new: Tensor | None, found: Tensor, payload: Tensor
) -> None:
    count, total = len(rows), rows if new is None else new
    before = rows if old is None else old
    aligned = alignment(rows, before, total)
    state = torch.empty(count * len(parts) * 2, dtype=torch.int32, device=rows.device)
    counts = torch.zeros(count * len(parts) * DIGITS[0][1], dtype=torch.int32, device=rows.device)
    programs, table = _tables(parts, "columns", COUNTED, rows.device)
    for shift, bins in DIGITS:
        first = (shift, bins) == DIGITS[0]
        source = rows if first else total
        launch(
            _count, (len(programs), count), source, before, total, programs, table, state, counts, len(parts), shift,
            FIRST=first, FEEDBACK=first and old is not None, KEEP=first and new is not None, BINS=bins,
            BLOCK=COUNTED, ALIGN=aligned,
        )  # fmt: skip
        launch(_digit, (len(parts), count), table, state, counts, len(parts), shift, FIRST=first, BINS=bins)
    found.fill_(-1)
    payload.zero_()
    programs, table = _tables(parts, "columns", BLOCK, rows.device)
    tallies = torch.empty((2 * count, 1 + len(programs)), dtype=torch.int32, device=rows.device)
    grid = (len(programs), count)
    launch(_tally, grid, total, programs, table, state, tallies, len(parts), BLOCK=BLOCK, ALIGN=aligned)
    launch(
        _list, grid, total, programs, table, state, tallies.cumsum_(1), found, payload, len(parts), BLOCK=BLOCK,
        ALIGN=aligned,
    )  # fmt: skip


def marked(rows: Tensor, parts: tuple[Part, ...], words: Tensor) -> None:
    size = max(part.place + part.k for part in parts)
    found = torch.empty((len(rows), size), dtype=torch.int32, device=rows.device)
    largest(rows, None, parts, None, found, torch.empty_like(found, dtype=torch.float32))
    from_indices(found, words)


def _words(wire: Tensor) -> Tensor:
    return viewable(wire).view(torch.int64)


def pack(found: Tensor, parts: tuple[Part, ...], wire: Tensor) -> None:
    wire.zero_()
    programs, table = _tables(parts, "lists", BLOCK, wire.device)
    if len(programs):
        launch(_pack, (len(programs), len(wire)), found, _words(wire), programs, table, BLOCK=BLOCK)


def unpack(wire: Tensor, parts: tuple[Part, ...], found: Tensor) -> None:
    found.fill_(-1)
    words = _words(wire)
    programs, table = _tables(parts, "strings", BLOCK, wire.device)
    tallies = torch.empty((len(wire), 1 + len(programs)), dtype=torch.int32, device=wire.device)
    grid = (len(programs), len(wire))
    launch(_ones, grid, words, programs, table, tallies, BLOCK=BLOCK)
    launch(_unpack, grid, words, programs, table, tallies.cumsum_(1), found, BLOCK=BLOCK)


def put(payload: Tensor, found: Tensor, out: Tensor) -> None:
    grid = (triton.cdiv(found.shape[1], BLOCK), len(found))
    launch(_put, grid, payload, found, out, found.shape[1], BLOCK=BLOCK)


def sum_at(payload: Tensor, found: Tensor, parts: tuple[Part, ...], out: Tensor, scale: float) -> None:
    words = torch.empty((len(found), out.numel() // 64), dtype=torch.int64, device=out.device)
    from_indices(found, words)
    launch(
        _sum_at, (triton.cdiv(out.numel(), BLOCK),), payload, words, directory(words), _shifts(parts, out.device), out,
        scale, len(payload), out.numel(), sum(part.k for part in parts), BLOCK=BLOCK, ALIGN=alignment(out),
    )  # fmt: skip
