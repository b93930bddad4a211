# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``), the same bits as ``reference``.

Atomic additions come in any order, which changes nothing here: the values are multiples of one power of two, every
sum of a wire is exact, and peeling adds in float64.

A round of peeling is one launch. Counts and sums are held twice: a round reads one copy, which nobody changes
meanwhile, and takes what it finds out of the other; what the round before found, of which the other does not know yet,
it takes out of that, too. The next round reads that copy. So what is found in a round does not depend on which thread
comes first. Nothing is looked at by the host: there are as many rounds as can be, of which the last have nothing to do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.device import streams, upload
from thinwire.ops import sketch as of
from thinwire.ops.gpu import kernel, launch
from thinwire.ops.mask.triton import _bits, _popcount
from thinwire.ops.programs import programs_of

if TYPE_CHECKING:
    from thinwire.ops.sketch import Parts

BLOCK = 512
"""Columns, or entries of a list, of one program."""
WORDS = 512
"""Mask words of one program that counts bits."""

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX2 = tl.constexpr(0x94D049BB133111EB)
MIX3 = tl.constexpr(0xD6E8FEB86659FD93)
ROUND = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting it rounds |v| < 2^22 to the nearest integer, ties to even."""


@triton.jit
def _part_of(programs, table, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """This program's row, its part's number and line in ``table``, and what it takes: entries of the part's list.

    ``programs``: of each the part, and its first entry there.
    """
    number = tl.load(programs + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(programs + 2 * tl.program_id(0) + 1)
    return tl.program_id(1).to(tl.int64), number, table + number * FIELDS, first + tl.arange(0, BLOCK)


@triton.jit
def _cells(part, element):
    """Of the elements (int64) of a part: their cells in its three tables, and whether their sign is -1."""
    cells, seed = tl.load(part + 6), tl.load(part + 7)
    word = (element + 1).to(tl.uint64) * GOLDEN + seed.to(tl.uint64)
    word = (word ^ (word >> 30)) * MIX1
    word = (word ^ (word >> 27)) * MIX2
    first = word ^ (word >> 31)
    second = (first ^ (first >> 32)) * MIX3
    second = second ^ (second >> 32)
    size = tl.zeros_like(word) + cells.to(tl.uint64)
    a = (((first >> 32) * size) >> 32).to(tl.int64)
    b = (((first & 0xFFFFFFFF) * size) >> 32).to(tl.int64) + cells
    c = (((second >> 32) * size) >> 32).to(tl.int64) + 2 * cells
    return a, b, c, (second & 1) != 0


@triton.jit
def _add(cells, a, b, c, values, mask):
    """To three cells of each element."""
    tl.atomic_add(cells + a, values, mask=mask, sem="relaxed")
    tl.atomic_add(cells + b, values, mask=mask, sem="relaxed")
    tl.atomic_add(cells + c, values, mask=mask, sem="relaxed")


@kernel
def _peaks(payload, stride, found, programs, parts, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """``found``: the bits of |values|, which have their order, as integers."""
    row, number, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    values = tl.load(payload + row * stride + tl.load(part + 3) + i, mask=i < tl.load(part + 2), other=0)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(found + number, largest, sem="relaxed")


@kernel
def _round_to(
    payload, stride, rest, rest_stride, quantum, programs, parts, BLOCK: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    row, number, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    inside, place = i < tl.load(part + 2), tl.load(part + 3) + i
    values = tl.load(payload + row * stride + place, mask=inside, other=0)
    unit = tl.load(quantum + number)
    rounded = (tl.div_rn(values, tl.zeros_like(values) + unit) + ROUND - ROUND) * unit
    rounded = tl.where(tl.load(part + 6) == 0, values, rounded)
    tl.store(rest + row * rest_stride + place, values - rounded, mask=inside)
    tl.store(payload + row * stride + place, rounded, mask=inside)


@kernel
def _encode(
    payload, payload_stride, found, found_stride, whole, whole_stride, out, stride, programs, parts,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    start, to = tl.load(part), out + row * stride + tl.load(part + 5)
    if tl.load(part + 6) == 0:
        inside = i < tl.load(part + 1)
        tl.store(to + i, tl.load(whole + row * whole_stride + start + i, mask=inside), mask=inside)
    else:
        inside, place = i < tl.load(part + 2), tl.load(part + 3) + i
        column = tl.load(found + row * found_stride + place, mask=inside, other=-1)
        value = tl.load(payload + row * payload_stride + place, mask=inside, other=0)
        a, b, c, negative = _cells(part, column - start)
        value = tl.where(negative, -value, value)
        _add(to, a, b, c, value, column >= 0)


@kernel
def _tally(words, words_stride, tallies, tallies_stride, programs, parts, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """``tallies`` (R, 1 + programs): the set bits of each program's columns; a zero before them."""
    row, _, part, at = _part_of(programs, parts, BLOCK, FIELDS)
    bits = _bits(words + row * words_stride + tl.load(part) // 64, at, at < tl.load(part + 1))
    tallies += row * tallies_stride
    tl.store(tallies, 0, mask=tl.program_id(0) == 0)
    tl.store(tallies + tl.program_id(0) + 1, tl.sum(bits, 0))


@triton.jit
def _places(words, at, inside, tallies, tallies_stride, row):
    """Of a part's columns ``at``: which are set in its ``words``, and how many of its others come before.

    ``tallies``: the sums of ``_tally``.
    """
    bits = _bits(words, at, inside)
    tallies += row * tallies_stride + tl.program_id(0)
    earlier = tl.min(at, 0) // at.shape[0]  # programs of this part
    return bits != 0, tl.load(tallies) - tl.load(tallies - earlier) + tl.cumsum(bits, 0) - bits


@kernel
def _gather(
    rows, stride, words, words_stride, found, found_stride, payload, payload_stride, tallies, tallies_stride, programs,
    parts, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, part, at = _part_of(programs, parts, BLOCK, FIELDS)
    start = tl.load(part)
    words += row * words_stride + start // 64
    there, place = _places(words, at, at < tl.load(part + 1), tallies, tallies_stride, row)
    there = there & (place < tl.load(part + 2))
    column, place = start + at, tl.load(part + 3) + place
    tl.store(found + row * found_stride + place, column.to(tl.int32), mask=there)
    value = tl.load(rows + row * stride + column, mask=there, other=0)
    tl.store(payload + row * payload_stride + place, value, mask=there)


@kernel
def _hold(
    wire, wire_stride, counts, counts_stride, held, held_stride, programs, parts, count, row_of_wire, wired,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Both copies: no elements in any cell yet, and, of the rows of the wire, each cell's sum."""
    row, _, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    inside, cell = i < 3 * tl.load(part + 6), tl.load(part + 8) + i
    zeros = tl.zeros((BLOCK,), tl.int32)
    tl.store(counts + row * counts_stride + cell, zeros, mask=inside)
    tl.store(counts + (count + row) * counts_stride + cell, zeros, mask=inside)
    mine = row - row_of_wire
    if (mine >= 0) & (mine < wired):
        values = tl.load(wire + mine * wire_stride + tl.load(part + 5) + i, mask=inside).to(tl.float64)
        tl.store(held + mine * held_stride + cell, values, mask=inside)
        tl.store(held + (wired + mine) * held_stride + cell, values, mask=inside)


@kernel
def _list(
    wire, wire_stride, index, index_stride, left, left_stride, out, stride, tallies, tallies_stride, elements,
    elements_stride, counts, counts_stride, programs, parts, count, row_of_wire, wired, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Each part's elements of ``index``, in order, -> ``elements``; both copies of ``counts`` count them.

    Nothing is recovered yet: ``left`` = ``index``, ``out`` = 0. Parts without a sketch are done.
    """
    row, _, part, at = _part_of(programs, parts, BLOCK, FIELDS)
    start, width = tl.load(part), tl.load(part + 1)
    plain = tl.where(tl.load(part + 6) == 0, width, 0)
    inside, sketched = at < width, at < width - plain
    mine = row - row_of_wire
    if (mine >= 0) & (mine < wired):
        values = tl.load(wire + mine * wire_stride + tl.load(part + 5) + at, mask=at < plain, other=0)
        tl.store(out + mine * stride + start + at, values, mask=inside)
    index += row * index_stride + start // 64
    word = at // 64
    tl.store(
        left + row * left_stride + start // 64 + word,
        tl.load(index + word, mask=sketched, other=0), mask=inside & (at % 64 == 0),
    )  # fmt: skip
    there, place = _places(index, at, sketched, tallies, tallies_stride, row)
    there = there & (place < tl.load(part + 4))
    tl.store(elements + row * elements_stride + tl.load(part + 9) + place, at, mask=there)
    a, b, c, _ = _cells(part, at.to(tl.int64))
    one = tl.full((BLOCK,), 1, tl.int32)
    counts += row * counts_stride + tl.load(part + 8)
    _add(counts, a, b, c, one, there)
    _add(counts + tl.cast(count, tl.int64) * counts_stride, a, b, c, one, there)


@kernel
def _round(
    elements, elements_stride, counts, counts_stride, held, held_stride, out, stride, left, left_stride, programs,
    parts, count, row_of_wire, wired, turn, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """An element is its number while it waits, -2 less its number when the round before has found it, -1 after that.

    ``turn``: which copy is read.
    """
    row, _, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    elements += row * elements_stride + tl.load(part + 9)
    state = tl.load(elements + i, mask=i < tl.load(part + 4), other=-1)
    if tl.max((state != -1).to(tl.int32), 0) > 0:
        waits, late = state >= 0, state < -1
        element = tl.where(late, -2 - state, state).to(tl.int64)
        a, b, c, negative = _cells(part, element)
        cells, this = tl.load(part + 8), tl.cast(turn, tl.int64)
        read = counts + (this * count + row) * counts_stride + cells
        write = counts + ((1 - this) * count + row) * counts_stride + cells
        in_a = tl.load(read + a, mask=waits, other=0) == 1
        in_b = tl.load(read + b, mask=waits, other=0) == 1
        found = in_a | in_b | (tl.load(read + c, mask=waits, other=0) == 1)
        gone = found | late
        less = tl.full((BLOCK,), -1, tl.int32)
        _add(write, a, b, c, less, gone)
        mine = row - row_of_wire
        if (mine >= 0) & (mine < wired):
            to = out + mine * stride + tl.load(part) + element
            source = held + (this * wired + mine) * held_stride + cells
            sums = held + ((1 - this) * wired + mine) * held_stride + cells
            alone = tl.load(source + tl.where(in_a, a, tl.where(in_b, b, c)), mask=found, other=0)
            value = tl.where(negative, -alone, alone).to(tl.float32)
            tl.store(to, value, mask=found)
            value = tl.where(late, tl.load(to, mask=late, other=0), value).to(tl.float64)
            value = tl.where(negative, value, -value)
            _add(sums, a, b, c, value, gone)
        bit = tl.full((BLOCK,), 1, tl.int64) << (element & 63)
        words = left + row * left_stride + tl.load(part) // 64
        tl.atomic_and(words + (element >> 6), ~bit, mask=found, sem="relaxed")
        tl.store(elements + i, tl.where(found, -2 - state, -1), mask=gone)


@kernel
def _estimate(
    elements, elements_stride, held, held_stride, out, stride, programs, parts, row_of_wire, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """The median of its three signed cells for every element that still waits. ``held``: the copy that knows all."""
    row, _, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    elements += (row_of_wire + row) * elements_stride + tl.load(part + 9)
    element = tl.load(elements + i, mask=i < tl.load(part + 4), other=-1).to(tl.int64)
    waits = element >= 0
    a, b, c, negative = _cells(part, element)
    held += row * held_stride + tl.load(part + 8)
    x, y = tl.load(held + a, mask=waits, other=0), tl.load(held + b, mask=waits, other=0)
    z = tl.load(held + c, mask=waits, other=0)
    low, high = tl.where(x < y, x, y), tl.where(x < y, y, x)
    middle = tl.where(z < low, low, tl.where(z < high, z, high))
    to = out + row * stride + tl.load(part) + element
    tl.store(to, tl.where(negative, -middle, middle).to(tl.float32), mask=waits)


@kernel
def _settle(
    sent, sent_stride, rest, rest_stride, found, found_stride, left, left_stride, out, stride, programs, parts,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, part, i = _part_of(programs, parts, BLOCK, FIELDS)
    out += row * stride
    if tl.load(part + 6) == 0:
        tl.store(out + tl.load(part) + i, tl.zeros((BLOCK,), tl.float32), mask=i < tl.load(part + 1))
    else:
        inside, place = i < tl.load(part + 2), tl.load(part + 3) + i
        column = tl.load(found + row * found_stride + place, mask=inside, other=-1).to(tl.int64)
        there = column >= 0
        value = tl.load(rest + row * rest_stride + place, mask=there, other=0)
        word = tl.load(left + row * left_stride + (column >> 6), mask=there, other=0)
        lost = there & (((word >> (column & 63)) & 1) != 0)
        value += tl.load(sent + row * sent_stride + place, mask=lost, other=0)
        tl.store(out + column, value, mask=there)


@kernel
def _count(words, words_stride, found, found_stride, programs, parts, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    row, number, part, word = _part_of(programs, parts, BLOCK, FIELDS)
    words += row * words_stride + tl.load(part) // 64
    bits = _popcount(tl.load(words + word, mask=word < tl.load(part + 1) // 64, other=0))
    tl.atomic_add(found + row * found_stride + number, tl.sum(bits, 0), sem="relaxed")


def _programs(sizes: Iterable[int], parts: Parts, block: int = BLOCK) -> Tensor:
    """(2 programs,) int32: of each program along a row its part, and the first that it takes of that, of ``sizes``."""
    there = streams(parts.device)  # what one stream has copied is not there for another
    on = None if there is None else there.current_stream(parts.device)
    return _made(tuple(sizes), block, parts.device, on)


@functools.lru_cache(maxsize=256)
def _made(sizes: tuple[int, ...], block: int, device: torch.device, stream: Any) -> Tensor:
    numbers, firsts = programs_of(sizes, block)
    lines = ((number, (at - firsts[number]) * block) for at, number in enumerate(numbers))
    return upload([value for line in lines for value in line], device)


def _listed(parts: Parts) -> Tensor:
    """Programs that go through lists and, of parts without a sketch, through columns."""
    return _programs((part.k if part.cells else part.width for part in parts), parts)


def _run(
    kernel: Any, programs: Tensor, parts: Parts, rows: int, *given: Any, more: Any = (), block: int = BLOCK
) -> None:  # fmt: skip
    """``given``, then ``programs`` and the table of ``parts``, then ``more``."""
    if len(programs):
        grid = len(programs) // 2, rows
        launch(kernel, grid, *given, programs, parts.table.view(-1), *more, BLOCK=block, FIELDS=of.FIELDS)


def _tallied(words: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """Programs along columns, and how many bits each row of ``words`` has before each of them: (R, 1 + programs)."""
    columns = _programs((part.width for part in parts), parts)
    tallies = torch.empty((len(words), 1 + len(columns) // 2), dtype=torch.int32, device=words.device)
    _run(_tally, columns, parts, len(words), words, tallies)
    return columns, tallies.cumsum_(1)


def gather(rows: Tensor, words: Tensor, parts: Parts, found: Tensor, payload: Tensor) -> None:
    columns, tallies = _tallied(words, parts)
    _run(_gather, columns, parts, len(rows), rows, words, found.fill_(-1), payload.zero_(), tallies)


def peaks(payload: Tensor, parts: Parts, found: Tensor) -> None:
    programs = _programs((part.k for part in parts), parts)
    _run(_peaks, programs, parts, len(payload), payload, found.zero_().view(torch.int32))


def round_to(payload: Tensor, quantum: Tensor, parts: Parts, rest: Tensor) -> None:
    programs = _programs((part.k for part in parts), parts)
    _run(_round_to, programs, parts, len(payload), payload, rest, quantum)


def encode(payload: Tensor, found: Tensor, parts: Parts, whole: Tensor, out: Tensor) -> None:
    _run(_encode, _listed(parts), parts, len(payload), payload, found, whole, out.zero_())


def peel(wire: Tensor, index: Tensor, parts: Parts, row: int, out: Tensor, left: Tensor, estimate: bool) -> None:
    rows, wired = len(index), len(wire)
    rooms = [part.room if part.cells else 0 for part in parts]
    cells = [3 * part.cells for part in parts]
    counts = torch.empty((2 * rows, sum(cells)), dtype=torch.int32, device=index.device)
    held = torch.empty((2 * wired, sum(cells)), dtype=torch.float64, device=index.device)
    elements = torch.full((rows, sum(rooms)), -1, dtype=torch.int32, device=index.device)
    where = rows, row, wired
    _run(_hold, _programs(cells, parts), parts, rows, wire, counts, held, more=where)
    columns, tallies = _tallied(index, parts)
    _run(_list, columns, parts, rows, wire, index, left, out, tallies, elements, counts, more=where)
    waiting = _programs(rooms, parts)
    for number in range(of.ROUNDS):
        _run(_round, waiting, parts, rows, elements, counts, held, out, left, more=(*where, number % 2))
    if estimate:
        known = held[wired:] if of.ROUNDS % 2 else held[:wired]
        _run(_estimate, waiting, parts, wired, elements, known, out, more=(row,))


def settle(sent: Tensor, rest: Tensor, found: Tensor, left: Tensor, parts: Parts, out: Tensor) -> None:
    _run(_settle, _listed(parts), parts, len(out), sent, rest, found, left, out)


def count(words: Tensor, parts: Parts, found: Tensor) -> None:
    programs = _programs((part.width // 64 for part in parts), parts, WORDS)
    _run(_count, programs, parts, len(words), words, found.zero_(), block=WORDS)
