# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton, the same bits as ``reference``.

Atomic additions come in any order, which changes nothing here: values are multiples of one power of two, every sum of
a wire is exact, and peeling adds in float64.

A round of peeling is one launch. Counts and sums have two copies. A round reads one, which no thread changes meanwhile,
and subtracts from the other the elements that it finds, and those that the round before found, which are still in that
copy. The next round reads that copy. So the order of threads does not matter. The host reads nothing: all ``ROUNDS``
are launched, of which the last have nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops import sketch as of
from thinwire.ops.gpu import kernel, launch, segment_of
from thinwire.ops.mask.triton import _bits, count_before, set_bits, tallied
from thinwire.ops.programs import programs_on

if TYPE_CHECKING:
    from thinwire.ops.sketch import SketchSegments

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
def _cells(segment, element):
    """Hash a segment's elements (int64): return their cells in three tables, and whether their sign is -1."""
    cells, seed = tl.load(segment + 6), tl.load(segment + 7)
    word = (element + 1).to(tl.uint64) * GOLDEN + seed.to(tl.uint64)
    word = (word ^ (word >> 30)) * MIX1
    word = (word ^ (word >> 27)) * MIX2
    word1 = word ^ (word >> 31)
    word2 = (word1 ^ (word1 >> 32)) * MIX3
    word2 = word2 ^ (word2 >> 32)
    size = tl.zeros_like(word) + cells.to(tl.uint64)
    a = (((word1 >> 32) * size) >> 32).to(tl.int64)
    b = (((word1 & 0xFFFFFFFF) * size) >> 32).to(tl.int64) + cells
    c = (((word2 >> 32) * size) >> 32).to(tl.int64) + 2 * cells
    return a, b, c, (word2 & 1) != 0


@triton.jit
def _add(cells, a, b, c, values, mask):
    tl.atomic_add(cells + a, values, mask=mask, sem="relaxed")
    tl.atomic_add(cells + b, values, mask=mask, sem="relaxed")
    tl.atomic_add(cells + c, values, mask=mask, sem="relaxed")


@kernel
def _peaks(programs, segments, payload, stride, magnitudes, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    """Write the bits of the largest |values| to ``magnitudes``: integers have the order of the values."""
    row, number, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    values = tl.load(payload + row * stride + tl.load(segment + 3) + entry, mask=entry < tl.load(segment + 2), other=0)
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.atomic_max(magnitudes + number, largest, sem="relaxed")


@kernel
def _round_to(
    programs, segments, payload, stride, residual, residual_stride, quantum, BLOCK: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    row, number, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    inside, slot = entry < tl.load(segment + 2), tl.load(segment + 3) + entry
    values = tl.load(payload + row * stride + slot, mask=inside, other=0)
    unit = tl.load(quantum + number)
    rounded = (tl.div_rn(values, tl.zeros_like(values) + unit) + ROUND - ROUND) * unit
    rounded = tl.where(tl.load(segment + 6) == 0, values, rounded)
    tl.store(residual + row * residual_stride + slot, values - rounded, mask=inside)
    tl.store(payload + row * stride + slot, rounded, mask=inside)


@kernel
def _encode(
    programs, segments, payload, payload_stride, positions, positions_stride, whole, whole_stride, out, stride,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    start, target = tl.load(segment), out + row * stride + tl.load(segment + 5)
    if tl.load(segment + 6) == 0:
        inside = entry < tl.load(segment + 1)
        tl.store(target + entry, tl.load(whole + row * whole_stride + start + entry, mask=inside), mask=inside)
    else:
        inside, slot = entry < tl.load(segment + 2), tl.load(segment + 3) + entry
        column = tl.load(positions + row * positions_stride + slot, mask=inside, other=-1)
        value = tl.load(payload + row * payload_stride + slot, mask=inside, other=0)
        a, b, c, negative = _cells(segment, column - start)
        value = tl.where(negative, -value, value)
        _add(target, a, b, c, value, column >= 0)


@kernel
def _gather(
    programs, segments, rows, stride, words, words_stride, positions, positions_stride, payload, payload_stride,
    tallies, tallies_stride, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, segment, element = segment_of(programs, segments, BLOCK, FIELDS)
    start = tl.load(segment)
    bits = _bits(words + row * words_stride + start // 64, element, element < tl.load(segment + 1))
    slot = count_before(tallies + row * tallies_stride, element, bits)
    is_set = (bits != 0) & (slot < tl.load(segment + 2))
    column, slot = start + element, tl.load(segment + 3) + slot
    tl.store(positions + row * positions_stride + slot, column.to(tl.int32), mask=is_set)
    value = tl.load(rows + row * stride + column, mask=is_set, other=0)
    tl.store(payload + row * payload_stride + slot, value, mask=is_set)


@kernel
def _hold(
    programs, segments, wire, wire_stride, counts, counts_stride, cell_sums, cell_sums_stride, count, row_of_wire,
    wired, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Initialize both copies: zero counts in all cells, and the sums of the wire's rows."""
    row, _, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    inside, cell = entry < 3 * tl.load(segment + 6), tl.load(segment + 8) + entry
    zeros = tl.zeros((BLOCK,), tl.int32)
    tl.store(counts + row * counts_stride + cell, zeros, mask=inside)
    tl.store(counts + (count + row) * counts_stride + cell, zeros, mask=inside)
    wire_row = row - row_of_wire
    if (wire_row >= 0) & (wire_row < wired):
        values = tl.load(wire + wire_row * wire_stride + tl.load(segment + 5) + entry, mask=inside).to(tl.float64)
        tl.store(cell_sums + wire_row * cell_sums_stride + cell, values, mask=inside)
        tl.store(cell_sums + (wired + wire_row) * cell_sums_stride + cell, values, mask=inside)


@kernel
def _list(
    programs, segments, wire, wire_stride, index, index_stride, lost, lost_stride, out, stride, tallies,
    tallies_stride, elements, elements_stride, counts, counts_stride, count, row_of_wire, wired, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """List each segment's elements of ``index`` in ``elements``, in order, and count them in both copies of ``counts``.

    ``lost`` = ``index`` and ``out`` = 0 at first. Segments without a sketch are finished.
    """
    row, _, segment, element = segment_of(programs, segments, BLOCK, FIELDS)
    start, width = tl.load(segment), tl.load(segment + 1)
    plain = tl.where(tl.load(segment + 6) == 0, width, 0)
    inside, sketched = element < width, element < width - plain
    wire_row = row - row_of_wire
    if (wire_row >= 0) & (wire_row < wired):
        values = tl.load(wire + wire_row * wire_stride + tl.load(segment + 5) + element, mask=element < plain, other=0)
        tl.store(out + wire_row * stride + start + element, values, mask=inside)
    index += row * index_stride + start // 64
    word = element // 64
    tl.store(
        lost + row * lost_stride + start // 64 + word,
        tl.load(index + word, mask=sketched, other=0), mask=inside & (element % 64 == 0),
    )  # fmt: skip
    bits = _bits(index, element, sketched)
    slot = count_before(tallies + row * tallies_stride, element, bits)
    is_set = (bits != 0) & (slot < tl.load(segment + 4))
    tl.store(elements + row * elements_stride + tl.load(segment + 9) + slot, element, mask=is_set)
    a, b, c, _ = _cells(segment, element.to(tl.int64))
    ones = tl.full((BLOCK,), 1, tl.int32)
    counts += row * counts_stride + tl.load(segment + 8)
    _add(counts, a, b, c, ones, is_set)
    _add(counts + tl.cast(count, tl.int64) * counts_stride, a, b, c, ones, is_set)


@kernel
def _round(
    programs, segments, elements, elements_stride, counts, counts_stride, cell_sums, cell_sums_stride, out, stride,
    lost, lost_stride, count, row_of_wire, wired, turn, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Do one round; ``turn`` is the copy to read.

    An entry of ``elements`` is i while element i waits, -2 - i in the round after it was found, and then -1.
    """
    row, _, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    elements += row * elements_stride + tl.load(segment + 9)
    state = tl.load(elements + entry, mask=entry < tl.load(segment + 4), other=-1)
    if tl.max((state != -1).to(tl.int32), 0) > 0:
        waits, found_before = state >= 0, state < -1
        element = tl.where(found_before, -2 - state, state).to(tl.int64)
        a, b, c, negative = _cells(segment, element)
        cells, copy_read = tl.load(segment + 8), tl.cast(turn, tl.int64)
        read = counts + (copy_read * count + row) * counts_stride + cells
        write = counts + ((1 - copy_read) * count + row) * counts_stride + cells
        in_a = tl.load(read + a, mask=waits, other=0) == 1
        in_b = tl.load(read + b, mask=waits, other=0) == 1
        peeled = in_a | in_b | (tl.load(read + c, mask=waits, other=0) == 1)
        removed = peeled | found_before
        minus_one = tl.full((BLOCK,), -1, tl.int32)
        _add(write, a, b, c, minus_one, removed)
        wire_row = row - row_of_wire
        if (wire_row >= 0) & (wire_row < wired):
            target = out + wire_row * stride + tl.load(segment) + element
            current_sums = cell_sums + (copy_read * wired + wire_row) * cell_sums_stride + cells
            next_sums = cell_sums + ((1 - copy_read) * wired + wire_row) * cell_sums_stride + cells
            alone = tl.load(current_sums + tl.where(in_a, a, tl.where(in_b, b, c)), mask=peeled, other=0)
            value = tl.where(negative, -alone, alone).to(tl.float32)
            tl.store(target, value, mask=peeled)
            value = tl.where(found_before, tl.load(target, mask=found_before, other=0), value).to(tl.float64)
            value = tl.where(negative, value, -value)
            _add(next_sums, a, b, c, value, removed)
        bit = tl.full((BLOCK,), 1, tl.int64) << (element & 63)
        words = lost + row * lost_stride + tl.load(segment) // 64
        tl.atomic_and(words + (element >> 6), ~bit, mask=peeled, sem="relaxed")
        tl.store(elements + entry, tl.where(peeled, -2 - state, -1), mask=removed)


@kernel
def _estimate(
    programs, segments, elements, elements_stride, cell_sums, cell_sums_stride, out, stride, row_of_wire,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Give each element that still waits the median of its three signed cells, from the up-to-date copy."""
    row, _, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    elements += (row_of_wire + row) * elements_stride + tl.load(segment + 9)
    element = tl.load(elements + entry, mask=entry < tl.load(segment + 4), other=-1).to(tl.int64)
    waits = element >= 0
    a, b, c, negative = _cells(segment, element)
    cell_sums += row * cell_sums_stride + tl.load(segment + 8)
    x, y = tl.load(cell_sums + a, mask=waits, other=0), tl.load(cell_sums + b, mask=waits, other=0)
    z = tl.load(cell_sums + c, mask=waits, other=0)
    low, high = tl.where(x < y, x, y), tl.where(x < y, y, x)
    middle = tl.where(z < low, low, tl.where(z < high, z, high))
    target = out + row * stride + tl.load(segment) + element
    tl.store(target, tl.where(negative, -middle, middle).to(tl.float32), mask=waits)


@kernel
def _restore(
    programs, segments, sent, sent_stride, residual, residual_stride, positions, positions_stride, lost, lost_stride,
    out, stride, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, segment, entry = segment_of(programs, segments, BLOCK, FIELDS)
    out += row * stride
    if tl.load(segment + 6) == 0:
        tl.store(out + tl.load(segment) + entry, tl.zeros((BLOCK,), tl.float32), mask=entry < tl.load(segment + 1))
    else:
        inside, slot = entry < tl.load(segment + 2), tl.load(segment + 3) + entry
        column = tl.load(positions + row * positions_stride + slot, mask=inside, other=-1).to(tl.int64)
        is_listed = column >= 0
        value = tl.load(residual + row * residual_stride + slot, mask=is_listed, other=0)
        word = tl.load(lost + row * lost_stride + (column >> 6), mask=is_listed, other=0)
        is_lost = is_listed & (((word >> (column & 63)) & 1) != 0)
        value += tl.load(sent + row * sent_stride + slot, mask=is_lost, other=0)
        tl.store(out + column, value, mask=is_listed)


@kernel
def _count(programs, segments, words, words_stride, counts, counts_stride, BLOCK: tl.constexpr, FIELDS: tl.constexpr):
    row, number, segment, word = segment_of(programs, segments, BLOCK, FIELDS)
    words += row * words_stride + tl.load(segment) // 64
    bits = set_bits(tl.load(words + word, mask=word < tl.load(segment + 1) // 64, other=0))
    tl.atomic_add(counts + row * counts_stride + number, tl.sum(bits, 0), sem="relaxed")


def _programs(sizes: Iterable[int], segments: SketchSegments) -> Tensor:
    return programs_on(segments.device, sizes, BLOCK)


def _listed(segments: SketchSegments) -> Tensor:
    """Return programs along lists or, in segments without a sketch, along columns."""
    return _programs((segment.k if segment.cells else segment.width for segment in segments), segments)


def _run(
    kernel: Any, programs: Tensor, segments: SketchSegments, rows: int, *arguments: Any, block: int = BLOCK
) -> None:
    if len(programs):
        grid = len(programs) // 2, rows
        launch(kernel, grid, programs, segments.table.view(-1), *arguments, BLOCK=block, FIELDS=of.FIELDS)


def _tallied(words: Tensor, segments: SketchSegments) -> tuple[Tensor, Tensor]:
    """Return programs along columns, and the set bits of each row of ``words`` before each: (R, 1 + programs)."""
    columns = _programs((segment.width for segment in segments), segments)
    return columns, tallied(columns, segments.table.view(-1), words, START=0, COUNT=1, FIELDS=of.FIELDS)


def gather(rows: Tensor, words: Tensor, segments: SketchSegments, positions: Tensor, payload: Tensor) -> None:
    columns, tallies = _tallied(words, segments)
    _run(_gather, columns, segments, len(rows), rows, words, positions.fill_(-1), payload.zero_(), tallies)


def peaks(payload: Tensor, segments: SketchSegments, magnitudes: Tensor) -> None:
    programs = _programs((segment.k for segment in segments), segments)
    _run(_peaks, programs, segments, len(payload), payload, magnitudes.view(torch.int32))


def round_to(payload: Tensor, quantum: Tensor, segments: SketchSegments, residual: Tensor) -> None:
    programs = _programs((segment.k for segment in segments), segments)
    _run(_round_to, programs, segments, len(payload), payload, residual, quantum)


def encode(payload: Tensor, positions: Tensor, segments: SketchSegments, whole: Tensor, out: Tensor) -> None:
    _run(_encode, _listed(segments), segments, len(payload), payload, positions, whole, out.zero_())


def peel(
    wire: Tensor, index: Tensor, segments: SketchSegments, row: int, out: Tensor, lost: Tensor, estimate: bool
) -> None:
    rows, wired = len(index), len(wire)
    rooms = [segment.room if segment.cells else 0 for segment in segments]
    cells = [3 * segment.cells for segment in segments]
    counts = torch.empty((2 * rows, sum(cells)), dtype=torch.int32, device=index.device)
    cell_sums = torch.empty((2 * wired, sum(cells)), dtype=torch.float64, device=index.device)
    elements = torch.full((rows, sum(rooms)), -1, dtype=torch.int32, device=index.device)
    rows_of_wire = rows, row, wired
    _run(_hold, _programs(cells, segments), segments, rows, wire, counts, cell_sums, *rows_of_wire)
    columns, tallies = _tallied(index, segments)
    _run(_list, columns, segments, rows, wire, index, lost, out, tallies, elements, counts, *rows_of_wire)
    waiting = _programs(rooms, segments)
    for number in range(of.ROUNDS):
        _run(_round, waiting, segments, rows, elements, counts, cell_sums, out, lost, *rows_of_wire, number % 2)
    if estimate:
        final_sums = cell_sums[wired:] if of.ROUNDS % 2 else cell_sums[:wired]
        _run(_estimate, waiting, segments, wired, elements, final_sums, out, row)


def restore(
    sent: Tensor, residual: Tensor, positions: Tensor, lost: Tensor, segments: SketchSegments, out: Tensor
) -> None:
    _run(_restore, _listed(segments), segments, len(out), sent, residual, positions, lost, out)


def count(words: Tensor, segments: SketchSegments, counts: Tensor) -> None:
    programs = programs_on(segments.device, (segment.width // 64 for segment in segments), WORDS)
    _run(_count, programs, segments, len(words), words, counts.zero_(), block=WORDS)
