# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton, the same bits as ``reference``. One launch per stage for all segments of all rows.

The k-th size of each segment is found digit by digit, from the highest: count the values of each digit, take the digit
whose values include the k-th, go on with these alone. A chosen column's list index is the number chosen before it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.alignment import viewable
from thinwire.ops import sparse as of
from thinwire.ops.gpu import alignment, along, kernel, launch, row_of, segment_of
from thinwire.ops.mask.triton import _bits, _slots, count_before, directory, from_indices, tallied
from thinwire.ops.programs import programs_on

if TYPE_CHECKING:
    from thinwire.ops.sparse import ListSegment

BLOCK = 512
"""Columns, or entries of a list, of one program."""
COUNTED, WARPS = 2048, 8
"""Columns per program that counts digits, and its warps. Triton 3.6 makes up to 199 registers of 4096 columns in 4
warps, and 128 of these; 3.9 makes fewer than 64 of either (``tests/support/aot.py``)."""
DIGITS = ((20, 1 << 11), (9, 1 << 11), (0, 1 << 9))
"""The lowest bit and the number of values of each digit of a size, which has 31 bits."""

NAN = tl.constexpr(0x7F800001)
"""Any NaN, as a size: all are equal, and larger than infinity."""


@triton.jit
def _size(values):
    """Return |values| as int32, which have the same order."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, NAN)


@kernel
def _count(
    programs, segments, rows, stride, residual, residual_stride, total, total_stride, state, counts, segment_count,
    shift, FIRST: tl.constexpr, FEEDBACK: tl.constexpr, KEEP: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add to ``counts`` the digits at ``shift`` of sizes that begin as ``state``. The first launch makes ``total``."""
    row, number, segment, column = segment_of(programs, segments, BLOCK, FIELDS)
    inside = column < tl.load(segment + 1) // 16 * 16
    start = tl.load(segment)
    values = tl.load(row_of(rows + start, stride, row, ALIGN) + column, mask=inside, other=0)
    if FEEDBACK:
        values += tl.load(row_of(residual + start, residual_stride, row, ALIGN) + column, mask=inside, other=0)
    if KEEP:
        tl.store(row_of(total + start, total_stride, row, ALIGN) + column, values, mask=inside)
    size, entry = _size(values), row * segment_count + number
    if not FIRST:
        digits = tl.load(state + entry * 2)
        inside = inside & ((size >> shift) // BINS == (digits >> shift) // BINS)
    histogram = tl.histogram((size >> shift) % BINS, BINS, mask=inside)
    target = counts + entry * BINS + tl.arange(0, BINS)
    tl.atomic_add(target, histogram, mask=histogram > 0, sem="relaxed")


@kernel
def _digit(
    segments, state, counts, segment_count, shift, FIRST: tl.constexpr, BINS: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    """Add the k-th size's next digit to ``state``: (digits, number of values with them to choose). Zero ``counts``."""
    row, number = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    state += (row * segment_count + number) * 2
    if FIRST:
        digits, remaining = 0, tl.load(segments + number * FIELDS + 2).to(tl.int32)
    else:
        digits, remaining = tl.load(state), tl.load(state + 1)
    digit = tl.arange(0, BINS)
    counts += (row * segment_count + number) * BINS + digit
    count = tl.load(counts)
    count_from = tl.cumsum(count, 0, reverse=True)
    chosen = tl.maximum(tl.sum((count_from >= remaining).to(tl.int32), 0) - 1, 0)
    tl.store(state, digits | (chosen << shift))
    tl.store(state + 1, remaining - tl.sum(tl.where(digit > chosen, count, 0), 0))
    tl.store(counts, tl.zeros((BINS,), tl.int32))


@triton.jit
def _compared(
    programs, segments, total, stride, state, segment_count, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Return this program's segment, columns, values, which are above the k-th size, which equal it, and the ties."""
    row, number, segment, column = segment_of(programs, segments, BLOCK, FIELDS)
    inside = column < tl.load(segment + 1) // 16 * 16
    values = tl.load(row_of(total + tl.load(segment), stride, row, ALIGN) + column, mask=inside, other=0)
    state += (row * segment_count + number) * 2
    threshold = tl.load(state)
    above, equal = inside & (_size(values) > threshold), inside & (_size(values) == threshold)
    return segment, column, values, above, equal, state + 1


@kernel
def _tally(
    programs, segments, total, stride, state, tallies, tallies_stride, segment_count, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the counts above and equal to the k-th size to ``tallies`` (2 R, 1 + programs), after a zero."""
    _, _, _, above, equal, _ = _compared(programs, segments, total, stride, state, segment_count, BLOCK, FIELDS, ALIGN)
    tallies += 2 * tl.program_id(1).to(tl.int64) * tallies_stride
    first = tl.program_id(0) == 0
    tl.store(tallies, 0, mask=first)
    tl.store(tallies + tallies_stride, 0, mask=first)
    tallies += tl.program_id(0) + 1
    tl.store(tallies, tl.sum(above.to(tl.int32), 0))
    tl.store(tallies + tallies_stride, tl.sum(equal.to(tl.int32), 0))


@triton.jit
def _clear(positions, payload, first, end, BLOCK: tl.constexpr):
    """List nothing from ``first`` to ``end``."""
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(positions + entry, tl.full((BLOCK,), -1, tl.int32), mask=entry < end)
        tl.store(payload + entry, tl.zeros((BLOCK,), tl.float32), mask=entry < end)


@kernel
def _list(
    programs, segments, total, stride, state, tallies, tallies_stride, positions, positions_stride, payload,
    payload_stride, segment_count, m, BLOCK: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """List what is chosen, in ``m`` entries. A segment's first program clears what is behind its list."""
    segment, column, values, above, equal, ties = _compared(
        programs, segments, total, stride, state, segment_count, BLOCK, FIELDS, ALIGN
    )
    row = tl.program_id(1).to(tl.int64)
    tallies += 2 * row * tallies_stride
    ties = tl.load(ties)
    equals_before = count_before(tallies + tallies_stride, column, equal.to(tl.int32))
    above_before = count_before(tallies, column, above.to(tl.int32))
    positions, payload = positions + row * positions_stride, payload + row * payload_stride
    first = tl.load(segment + 3)
    list_index = first + above_before + tl.minimum(equals_before, ties)
    chosen = above | (equal & (equals_before < ties))
    tl.store(positions + list_index, (tl.load(segment) + column).to(tl.int32), mask=chosen)
    tl.store(payload + list_index, values, mask=chosen)
    if tl.program_id(0) == 0:
        _clear(positions, payload, 0, first, BLOCK)
    if tl.min(column, 0) == 0:
        end = tl.load(segment + 7)
        _clear(positions, payload, first + tl.load(segment + 2), tl.where(end < 0, m, end), BLOCK)


@triton.jit
def _low_bits_of(words, segment, i, low_bits):
    """Return pointers to the words of the i-th positions' lower bits, after the high bits, and the first bit there."""
    bit = i * low_bits
    return words + tl.load(segment + 5) // 64 + bit // 64, bit % 64


@kernel
def _pack(
    programs, segments, positions, positions_stride, words, words_stride, BLOCK: tl.constexpr, FIELDS: tl.constexpr
):  # fmt: skip
    """Set bits of zeroed ``words``; several programs may share a word."""
    row, _, segment, i = segment_of(programs, segments, BLOCK, FIELDS)
    inside = i < tl.load(segment + 2)
    column = tl.load(positions + row * positions_stride + tl.load(segment + 3) + i, mask=inside, other=0).to(tl.int64)
    column -= tl.load(segment)
    inside = inside & (column >= 0) & (column < tl.load(segment + 1))
    low_bits = tl.load(segment + 6)
    words += row * words_stride + tl.load(segment + 4) // 64
    low_word, shift = _low_bits_of(words, segment, i, low_bits)
    tl.atomic_or(low_word, (column & ((1 << low_bits) - 1)) << shift, mask=inside, sem="relaxed")
    bit = (column >> low_bits) + i
    bit_mask = tl.full((BLOCK,), 1, tl.int64) << (bit & 63)
    tl.atomic_or(words + (bit >> 6), bit_mask, mask=inside, sem="relaxed")


@kernel
def _unpack(
    programs, segments, words, words_stride, tallies, tallies_stride, positions, positions_stride, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    row, _, segment, bit = segment_of(programs, segments, BLOCK, FIELDS)
    words += row * words_stride + tl.load(segment + 4) // 64
    ones = _bits(words, bit, bit < tl.load(segment + 5))
    i = count_before(tallies + row * tallies_stride, bit, ones)
    inside = (ones != 0) & (i < tl.load(segment + 2))
    low_bits = tl.load(segment + 6)
    low_word, shift = _low_bits_of(words, segment, i, low_bits)
    column = ((bit - i) << low_bits) + (tl.load(low_word, mask=inside, other=0) >> shift & ((1 << low_bits) - 1))
    target = positions + row * positions_stride + tl.load(segment + 3) + i
    tl.store(target, (tl.load(segment) + column).to(tl.int32), mask=inside & (column < tl.load(segment + 1)))


@kernel
def _put(
    payload, payload_stride, minus, minus_stride, positions, positions_stride, out, stride, m, SUBTRACT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(positions + row * positions_stride + i, mask=i < m, other=-1)
    values = tl.load(payload + row * payload_stride + i, mask=i < m, other=0)
    if SUBTRACT:
        values -= tl.load(minus + row * minus_stride + i, mask=i < m, other=0)
    tl.store(out + row * stride + column, values, mask=column >= 0)


@kernel
def _sum_at(
    payload, payload_stride, words, words_stride, bit_offsets, bit_offsets_stride, shifts, out, scale, peers, n, k,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Sum peers' values. ``shifts``: for each 64 columns, the padding in lists before their segment."""
    block = tl.program_id(0).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < n // 16 * 16
    shift = tl.load(shifts + column // 64, mask=inside, other=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(peers):
        row = tl.cast(peer, tl.int64)
        offset = bit_offsets + row * bit_offsets_stride + block
        on_mask, index = _slots(words + row * words_stride, offset, column, inside, k)
        total += tl.load(payload + row * payload_stride + index + shift, mask=on_mask, other=0.0)
    tl.store(along(out, column, ALIGN), total * scale, mask=inside)


@functools.cache
def _shifts(segments: tuple[ListSegment, ...], device: torch.device) -> Tensor:
    """Return ``_sum_at``'s shifts: (n / 64,) int32."""
    shifts: list[int] = []
    length = 0
    for segment in segments:
        shifts += [segment.list_start - length] * (segment.width // 64)
        length += segment.k
    return torch.tensor(shifts, dtype=torch.int32, device=device)


def largest(
    rows: Tensor, residual: Tensor | None, segments: tuple[ListSegment, ...], total_out: Tensor | None,
    positions: Tensor, payload: Tensor,
) -> None:  # fmt: skip
    count, total = len(rows), rows if total_out is None else total_out
    addend = rows if residual is None else residual
    aligned = alignment(rows, addend, total)
    state = torch.empty(count * len(segments) * 2, dtype=torch.int32, device=rows.device)
    counts = torch.zeros(count * len(segments) * DIGITS[0][1], dtype=torch.int32, device=rows.device)
    widths, table = [segment.width for segment in segments], of.wire_table(segments, rows.device).view(-1)
    programs = programs_on(rows.device, widths, COUNTED)
    for shift, bins in DIGITS:
        first = (shift, bins) == DIGITS[0]
        source = rows if first else total
        launch(
            _count, (len(programs) // 2, count), programs, table, source, addend, total, state, counts, len(segments),
            shift, FIRST=first, FEEDBACK=first and residual is not None, KEEP=first and total_out is not None,
            BINS=bins, BLOCK=COUNTED, FIELDS=of.FIELDS, ALIGN=aligned, num_warps=WARPS,
        )  # fmt: skip
        grid = len(segments), count
        launch(_digit, grid, table, state, counts, len(segments), shift, FIRST=first, BINS=bins, FIELDS=of.FIELDS)
    programs = programs_on(rows.device, widths, BLOCK)
    grid = len(programs) // 2, count
    tallies = torch.empty((2 * count, 1 + grid[0]), dtype=torch.int32, device=rows.device)
    constants: dict[str, Any] = {"BLOCK": BLOCK, "FIELDS": of.FIELDS, "ALIGN": aligned}
    launch(_tally, grid, programs, table, total, state, tallies, len(segments), **constants)
    lists = tallies.cumsum_(1), positions, payload
    launch(_list, grid, programs, table, total, state, *lists, len(segments), positions.shape[1], **constants)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> None:
    size = max(segment.list_start + segment.k for segment in segments)
    positions = torch.empty((len(rows), size), dtype=torch.int32, device=rows.device)
    largest(rows, None, segments, None, positions, torch.empty_like(positions, dtype=torch.float32))
    from_indices(positions, words)


def pack(positions: Tensor, segments: tuple[ListSegment, ...], wire: Tensor) -> None:
    wire.zero_()
    programs = programs_on(wire.device, (segment.k for segment in segments), BLOCK)
    if len(programs):
        table, words = of.wire_table(segments, wire.device).view(-1), viewable(wire).view(torch.int64)
        grid = len(programs) // 2, len(wire)
        launch(_pack, grid, programs, table, positions, words, BLOCK=BLOCK, FIELDS=of.FIELDS)


def unpack(wire: Tensor, segments: tuple[ListSegment, ...], positions: Tensor) -> None:
    positions.fill_(-1)
    words, table = viewable(wire).view(torch.int64), of.wire_table(segments, wire.device).view(-1)
    programs = programs_on(wire.device, (8 * segment.high_bytes for segment in segments), BLOCK)
    tallies = tallied(programs, table, words, START=4, COUNT=5, FIELDS=of.FIELDS)
    grid = len(programs) // 2, len(wire)
    launch(_unpack, grid, programs, table, words, tallies, positions, BLOCK=BLOCK, FIELDS=of.FIELDS)


def put(payload: Tensor, positions: Tensor, out: Tensor, minus: Tensor | None) -> None:
    grid, subtrahend = (triton.cdiv(positions.shape[1], BLOCK), len(positions)), payload if minus is None else minus
    launch(
        _put, grid, payload, subtrahend, positions, out, positions.shape[1], SUBTRACT=minus is not None, BLOCK=BLOCK
    )  # fmt: skip


def sum_at(payload: Tensor, positions: Tensor, segments: tuple[ListSegment, ...], out: Tensor, scale: float) -> None:
    words = torch.empty((len(positions), out.numel() // 64), dtype=torch.int64, device=out.device)
    from_indices(positions, words)
    launch(
        _sum_at, (triton.cdiv(out.numel(), BLOCK),), payload, words, directory(words), _shifts(segments, out.device),
        out, scale, len(payload), out.numel(), sum(segment.k for segment in segments), BLOCK=BLOCK,
        ALIGN=alignment(out),
    )  # fmt: skip
