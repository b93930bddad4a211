# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton, the same bits as ``reference``. The directory, a prefix sum of counts, makes programs independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.device import uploaded
from thinwire.ops.gpu import add_up, alignment, cdiv, counters, is_last, kernel, launch, row_of, segment_of, whole
from thinwire.ops.mask import reference
from thinwire.ops.programs import programs_on
from thinwire.ops.rows import FIELDS
from thinwire.ops.rows import PER_PROGRAM as COPIED
from thinwire.ops.rows.triton import _copy_offsets

if TYPE_CHECKING:
    from thinwire.ops.mask import MaskedSegment
    from thinwire.ops.rows import CopyTable

BLOCK = 512
"""Elements per program, and per entry of the directory."""
WORDS = 64
"""Words per program of ``_from_lists``."""
SUMS = tl.constexpr(1024)
"""Counts that the last program adds up at a time."""


@triton.jit
def _bits(words, element, inside):
    """Load the mask bits (0 or 1) of the elements ``element``."""
    word = tl.load(words + element // 64, mask=inside, other=0)
    return ((word >> (element % 64)) & 1).to(tl.int32)


@triton.jit
def _slots(words, bit_offsets, element, inside, k):
    """Return for each ``element`` whether it is on the mask, and its slot in the row's payload.

    ``bit_offsets`` points at the block's entry. Bits after the k-th are ignored: they would lie beyond the payload.
    """
    bits = _bits(words, element, inside)
    slot = tl.load(bit_offsets) + tl.cumsum(bits, 0) - bits
    return (bits != 0) & (slot < k), slot


@kernel
def _tally(
    programs, table, words, words_stride, tallies, tallies_stride, ends, START: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Write a zero, then the set bits up to the end of each program's elements, to ``tallies`` (R, 1 + programs).

    Fields ``START`` and ``COUNT`` of a segment are its first bit and its number of bits. ``ends``: a zero per row.
    """
    row, _, segment, element = segment_of(programs, table, BLOCK, FIELDS)
    words += row * words_stride + tl.load(segment + START) // 64
    bits = _bits(words, element, element < tl.load(segment + COUNT))
    tallies += row * tallies_stride
    tl.store(tallies, 0, mask=tl.program_id(0) == 0)
    tl.store(tallies + tl.program_id(0) + 1, tl.sum(bits, 0))
    if is_last(ends + row, tl.num_programs(0)):
        add_up(tallies + 1, tl.num_programs(0), SUMS)


@triton.jit
def count_before(tallies, element, bits):
    """Count the set ``bits`` (0 or 1) of a segment before each of this program's elements.

    ``tallies`` points at the row's zero, which its programs' sums of bits follow.
    """
    tallies += tl.program_id(0)
    earlier = tl.min(element, 0) // element.shape[0]  # programs of this segment
    return tl.load(tallies) - tl.load(tallies - earlier) + tl.cumsum(bits, 0) - bits


@kernel
def _count(words, words_stride, counts, counts_stride, ends, n, BLOCK: tl.constexpr):
    """Write a zero, then the set bits up to the end of each program's elements, to ``counts`` (R, 1 + programs)."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)
    counts += row * counts_stride
    tl.store(counts, 0, mask=block == 0)
    tl.store(counts + block + 1, tl.sum(_bits(words + row * words_stride, element, element < n)))
    if is_last(ends + row, tl.num_programs(0)):
        add_up(counts + 1, tl.num_programs(0), SUMS)


@triton.jit
def set_bits(words):
    """Count the set bits of each of ``words`` (int64 or uint32): in pairs, fours and bytes, then the bytes' sum."""
    ONES: tl.constexpr = 0x0101010101010101 if words.dtype == tl.int64 else 0x01010101  # one in each byte
    words = words - ((words >> 1) & (ONES * 0x55))
    words = (words & (ONES * 0x33)) + ((words >> 2) & (ONES * 0x33))
    words = (words + (words >> 4)) & (ONES * 0x0F)
    return ((words * ONES) >> (words.dtype.primitive_bitwidth - 8)).to(tl.int32)


@kernel
def _gather_keep(
    rows, stride, residual, residual_stride, words, words_stride, bit_offsets, offsets_stride, payload, payload_stride,
    residual_out, out_stride, n, k, FEEDBACK: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)
    inside = element < whole(n, ALIGN)
    total = tl.load(row_of(rows, stride, row, ALIGN) + element, mask=inside, other=0)
    if FEEDBACK:
        total += tl.load(row_of(residual, residual_stride, row, ALIGN) + element, mask=inside, other=0)
    offsets = bit_offsets + row * offsets_stride + block
    is_set, slot = _slots(words + row * words_stride, offsets, element, inside, k)
    tl.store(payload + row * payload_stride + slot, total, mask=is_set)
    if KEEP:
        target = row_of(residual_out, out_stride, row, ALIGN) + element
        tl.store(target, tl.where(is_set, 0.0, total), mask=inside)


@kernel
def _scatter(
    payload, payload_stride, words, words_stride, bit_offsets, offsets_stride, out, stride, n, k,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    element = block * BLOCK + tl.arange(0, BLOCK)
    inside = element < whole(n, ALIGN)
    offsets = bit_offsets + row * offsets_stride + block
    is_set, slot = _slots(words + row * words_stride, offsets, element, inside, k)
    values = tl.load(payload + row * payload_stride + slot, mask=is_set, other=0.0)
    tl.store(row_of(out, stride, row, ALIGN) + element, values, mask=inside)


@triton.jit
def _segment_columns(segment_numbers, table, block, n, BLOCK: tl.constexpr):
    """Return a block's elements, whether each is inside its segment, their columns in a row, and their factors.

    ``segment_numbers``: ``programs_on`` of words. ``table``: for each segment the distance from an element of the masks
    to its column in a row, the segment's end, and the bits of its factor.
    """
    element = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    segment = table + tl.load(segment_numbers + element // 64 * 2, mask=element < n, other=0).to(tl.int64) * 3
    factor = tl.load(segment + 2).to(tl.int32).to(tl.float32, bitcast=True)
    return element, (element < n) & (element < tl.load(segment + 1)), element + tl.load(segment), factor


@kernel
def _collect(
    row, words, bit_offsets, message, segment_numbers, table, blocks, n, k, copy_programs, copy_table,
    BLOCK: tl.constexpr, COPIED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Gather values at masks in the first ``blocks`` programs, and copy whole segments in the others."""
    program = tl.program_id(0)
    if program < blocks:
        element, inside, column, _ = _segment_columns(segment_numbers, table, program, n, BLOCK)
        is_set, slot = _slots(words, bit_offsets + program, element, inside, k)
        tl.store(message + slot, tl.load(row + column, mask=is_set, other=0), mask=is_set)
    else:
        source, target, filled, has_value = _copy_offsets(program - blocks, copy_programs, copy_table, COPIED, FIELDS)
        tl.store(message + target, tl.load(row + source, mask=has_value, other=0), mask=filled)


@kernel
def _renew(
    message, message_stride, words, words_stride, bit_offsets, offsets_stride, rows, stride, segment_numbers, table,
    blocks, n, k, copy_programs, copy_table, BLOCK: tl.constexpr, COPIED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Scatter each row's values to masks in the first ``blocks`` programs, and copy whole segments in the others."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message, rows = message + row * message_stride, rows + row * stride
    if program < blocks:
        element, inside, column, factor = _segment_columns(segment_numbers, table, program, n, BLOCK)
        offsets = bit_offsets + row * offsets_stride + program
        is_set, slot = _slots(words + row * words_stride, offsets, element, inside, k)
        fresh = tl.load(message + slot, mask=is_set, other=0.0)
        faded = tl.load(rows + column, mask=inside, other=0.0) * factor
        tl.store(rows + column, tl.where(is_set, fresh, faded), mask=inside)
    else:
        target, source, _, has_value = _copy_offsets(program - blocks, copy_programs, copy_table, COPIED, FIELDS)
        tl.store(rows + target, tl.load(message + source, mask=has_value, other=0), mask=has_value)


@kernel
def _from_indices(positions, stride, words, words_stride, n, k, BLOCK: tl.constexpr):
    """Set the bits by an atomic or, as several may share a word. Ignore positions out of range."""
    row = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + row * stride + entry, mask=entry < k, other=-1).to(tl.int64)
    bit = tl.full((BLOCK,), 1, tl.int64) << (position & 63)
    inside = (position >= 0) & (position < n)
    tl.atomic_or(words + row * words_stride + (position >> 6), bit, mask=inside, sem="relaxed")


@triton.jit
def _count_below(positions, k, column, steps):
    """Count, for each ``column``, the smaller ones of the rising ``positions`` (k,); 2 ** ``steps`` > k."""
    low, high = column * 0, column * 0 + k
    for _ in range(steps):
        middle = (low + high) // 2
        searching = low < high
        is_before = searching & (tl.load(positions + middle, mask=searching, other=0).to(tl.int64) < column)
        low, high = tl.where(is_before, middle + 1, low), tl.where(searching & ~is_before, middle, high)
    return low


@kernel
def _from_lists(
    programs, table, base, words, words_stride, bit_offsets, offsets_stride, steps, count, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Make up to ``BLOCK`` words of a list, and their entries of ``bit_offsets``.

    ``table``: each list's distance from ``base`` in elements, row stride, k, first word, words, and bits before it.
    """
    row, _, segment, word = segment_of(programs, table, BLOCK, FIELDS)
    positions, k = base + tl.load(segment) + row * tl.load(segment + 1), tl.load(segment + 2)
    word = word.to(tl.int64)
    inside = word < tl.load(segment + 4)
    first, end = _count_below(positions, k, word * 64, steps), _count_below(positions, k, word * 64 + 64, steps)
    bits = word * 0
    for i in range(tl.minimum(tl.max(end - first, 0), 64)):
        position = tl.load(positions + first + i, mask=first + i < end, other=-1).to(tl.int64)
        bits |= tl.where((position >> 6) == word, tl.full((BLOCK,), 1, tl.int64) << (position & 63), 0)
    word, bits_before = word + tl.load(segment + 3), tl.load(segment + 5)
    bit_offsets += row * offsets_stride
    tl.store(words + row * words_stride + word, bits, mask=inside)
    tl.store(bit_offsets + word // 8, (first + bits_before).to(tl.int32), mask=inside & (word % 8 == 0))
    is_last = tl.max(tl.where(inside, word, 0), 0) + 1 == count
    tl.store(bit_offsets + tl.cdiv(count, 8), (k + bits_before).to(tl.int32), mask=is_last)


@kernel
def _pack(flags, flags_stride, words, words_stride, count, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 64)
    element = word[:, None] * 64 + bit[None, :]
    inside = (word < count)[:, None]
    flag = tl.load(row_of(flags, flags_stride, row, ALIGN) + element, mask=inside, other=0).to(tl.int64)
    tl.store(words + row * words_stride + word, tl.sum(flag << bit[None, :].to(tl.int64), axis=1), mask=word < count)


def _grid(words: Tensor) -> tuple[int, int]:
    return cdiv(words.shape[1] * reference.WORD, BLOCK), words.shape[0]


def tallied(programs: Tensor, table: Tensor, words: Tensor, **fields: Any) -> Tensor:
    """Count the set bits of each row of ``words`` before each program's bits: (R, 1 + programs) int32."""
    grid = len(programs) // 2, len(words)
    tallies = torch.empty((len(words), 1 + grid[0]), dtype=torch.int32, device=words.device)
    launch(_tally, grid, programs, table, words, tallies, counters(words.device, len(words)), BLOCK=BLOCK, **fields)
    return tallies


def directory(words: Tensor) -> Tensor:
    """Count the set bits of each row before every 512 elements, and in total: (R, 1 + blocks) int32."""
    blocks, count = _grid(words)
    counts = torch.empty((count, 1 + blocks), dtype=torch.int32, device=words.device)
    ends = counters(words.device, count)
    launch(_count, (blocks, count), words, counts, ends, words.shape[1] * reference.WORD, BLOCK=BLOCK)
    return counts


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    bit_offsets: Tensor | None = None,
) -> None:
    constants = {"FEEDBACK": residual is not None, "KEEP": residual_out is not None}
    residual = rows if residual is None else residual
    residual_out = rows if residual_out is None else residual_out  # not written to without KEEP
    bit_offsets = directory(words) if bit_offsets is None else bit_offsets
    launch(
        _gather_keep, _grid(words), rows, residual, words, bit_offsets, payload, residual_out, rows.shape[1],
        payload.shape[1], BLOCK=BLOCK, ALIGN=alignment(rows, residual, residual_out), **constants,
    )  # fmt: skip


def scatter(payload: Tensor, words: Tensor, out: Tensor, bit_offsets: Tensor | None = None) -> None:
    bit_offsets = directory(words) if bit_offsets is None else bit_offsets
    launch(
        _scatter, _grid(words), payload, words, bit_offsets, out, out.shape[1], payload.shape[1], BLOCK=BLOCK,
        ALIGN=alignment(out),
    )  # fmt: skip


def collect(
    row: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, message: Tensor,
    bit_offsets: Tensor | None = None,
) -> None:  # fmt: skip
    grid, arguments, constants = _segment_arguments(words, segments, copied)
    bit_offsets = directory(words) if bit_offsets is None else bit_offsets
    launch(_collect, grid, row, words[0], bit_offsets[0], message, *arguments, **constants)


def renew(
    messages: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, rows: Tensor,
    bit_offsets: Tensor | None = None,
) -> None:  # fmt: skip
    grid, arguments, constants = _segment_arguments(words, segments, copied)
    bit_offsets = directory(words) if bit_offsets is None else bit_offsets
    launch(_renew, (*grid, len(words)), messages, words, bit_offsets, rows, *arguments, **constants)


def _segment_arguments(
    words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable
) -> tuple[tuple[int], tuple[Tensor | int, ...], dict[str, Any]]:
    """Return the grid of a row, and the arguments and constants that ``_collect`` and ``_renew`` share."""
    values, mask_start = [], 0
    for segment in segments:
        factor_bits = int(np.float32(segment.factor).view(np.int32))
        values += [segment.start - mask_start, mask_start + segment.numel, factor_bits]
        mask_start += segment.width
    segment_numbers = programs_on(words.device, (segment.width for segment in segments), reference.WORD)
    table = uploaded(values, words.device, torch.int64)
    (blocks, _), k = _grid(words), sum(segment.k for segment in segments)
    arguments = (segment_numbers, table, blocks, mask_start, k, copied.programs, copied.table)
    return (blocks + len(copied.programs) // 2,), arguments, {"BLOCK": BLOCK, "COPIED": COPIED, "FIELDS": FIELDS}


def from_indices(positions: Tensor, words: Tensor) -> None:
    words.zero_()
    count, k = positions.shape
    if k:
        grid = (cdiv(k, BLOCK), count)
        launch(_from_indices, grid, positions, words, words.shape[1] * reference.WORD, k, BLOCK=BLOCK)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> Tensor | None:
    table: list[int] = []
    base, bit_count = lists[0][0], 0
    widths = [columns.stop - columns.start for _, columns in lists]
    for (positions, columns), width in zip(lists, widths, strict=True):
        distance = (positions.data_ptr() - base.data_ptr()) // 4  # the same in every step, for lists in one memory
        table += [distance, positions.stride(0), positions.shape[1], columns.start, width, bit_count]
        bit_count += positions.shape[1]
    bit_offsets = torch.empty((len(words), 1 + _grid(words)[0]), dtype=torch.int32, device=words.device)
    steps = max(positions.shape[1] for positions, _ in lists).bit_length()
    programs = programs_on(words.device, widths, WORDS)
    launch(
        _from_lists, (len(programs) // 2, len(words)), programs, uploaded(table, words.device, torch.int64), base[0],
        words, bit_offsets, steps, words.shape[1], BLOCK=WORDS, FIELDS=6,
    )  # fmt: skip
    return bit_offsets if sum(widths) == words.shape[1] else None


def pack(flags: Tensor, words: Tensor) -> None:
    grid = (cdiv(words.shape[1], 64), words.shape[0])
    flags = flags.view(torch.uint8)
    launch(_pack, grid, flags, words, words.shape[1], BLOCK=64, ALIGN=alignment(flags))
