# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton, the same bits as ``reference``. One launch per stage for all segments of all rows.

The k-th size of each segment is found digit by digit, from the highest: count the values of each digit, take the digit
whose values include the k-th, go on with these alone. A chosen column's list index is the number chosen before it.
The first digit, the exponent and a bit, is read off all values, by histograms of each program's. The pass of the
second one marks which values are above the first and which have it, mostly fewer than one in twenty: only these are
read again, word by word of the marks, bit by bit. The pass of the third one marks anew, by both digits, and leaves next
to nothing.

From step to step the k-th size moves little. So the first pass also marks, and counts by finer digits, the sizes near
the last step's: if the k-th is among them, the second pass has nothing to do. Else it reads all values, as ever.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.alignment import viewable
from thinwire.ops import sparse as of
from thinwire.ops.direction import triton as direction
from thinwire.ops.direction.triton import second_of, step_along
from thinwire.ops.gpu import (
    add_up,
    alignment,
    cdiv,
    counters,
    is_last,
    kernel,
    launch,
    row_of,
    segment_of,
    wire_alignment,
    zero_words,
)
from thinwire.ops.mask.triton import SUMS, _bits, count_before, from_indices, set_bits
from thinwire.ops.norms.triton import bound_segment, limit_arguments, sample_arguments, sample_of
from thinwire.ops.programs import per_stream, programs_on
from thinwire.ops.quant.triton import _encode, _group_elements

if TYPE_CHECKING:
    from thinwire.ops.direction import Adam
    from thinwire.ops.sparse import ListSegment, WireValues

BLOCK = of.BLOCK
"""Columns, or entries of a list, of one program."""
COUNTED, WARPS = 4096, 8
"""Columns per program that reads all values, and its warps."""
WORDS = tl.constexpr(32)
"""Columns of a word of marks."""
MARKED = COUNTED // 32
"""Words per program that reads those values alone that are marked."""
QUANTIZED = 1024
"""Values that a program quantizes and keeps at a time: of 4096, in 4 warps, Triton 3.6 makes 212 registers."""
DIGITS = ((22, 1 << 9), (11, 1 << 11), (0, 1 << 11))
"""The lowest bit and the number of values of each digit of a size, which has 31 bits. A histogram takes time by its
bins, of which each thread counts its own, but the more bins the first one has, the fewer values go on."""
HIGH, ZEROS, SHARERS = 2048, 1 << 13, 64
"""High bits that a program takes at a time to decode positions, in ``WARPS``, and its zeros: of 2^17 or 2^21 columns.
With fewer, more programs count what lies before theirs; with more, one is at work when all others are done. Where more
than ``SHARERS`` would share a segment, of which each counts all before its own, it has more."""
SKIPPED = tl.constexpr(256)
"""Words of high bits before a program's that it counts at a time."""
BINS = max(bins for _, bins in DIGITS)
NEAR_SHIFT, NEAR_BINS = tl.constexpr(11), tl.constexpr(1 << 10)
"""The lowest bit and the number of values of the digit of sizes near a guess, from which they differ by up to an eighth
or, if its mantissa is large, a sixteenth. More of them would hit more often, and wait longer for their counts."""
SAMPLED = tl.constexpr(512)
"""Samples that a program takes at a time: they need no more registers than values do."""
MEASURED = tl.constexpr(1024)
"""Sums of squares, or usual norms, that a program takes at a time."""
COPIES, ALL_COPIES = 8, 256
"""Copies of a segment's counts of the second digit, at most, and of all segments' together. Additions to counts that
lie close wait for each other, which took longer than to read the values: programs add to copies in turns."""

NEAR = tl.constexpr(1 << 21)
"""Sizes that are near a guess: ``NEAR_BINS`` digits."""
NAN = tl.constexpr(0x7F800001)
"""Any NaN, as a size: all are equal, and larger than infinity."""


@triton.jit
def _size(values):
    """Return |values| as int32, which have the same order."""
    return tl.minimum(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, NAN)


@triton.jit
def _word(flags):
    """Return 32 W ``flags`` as W words."""
    bits = tl.reshape(flags.to(tl.int32), (flags.shape[0] // WORDS, WORDS))
    return tl.sum(bits << tl.arange(0, WORDS)[None, :], axis=1)


@triton.jit
def _lowest(words):
    """Return the lowest set bit of each of ``words`` (uint32), and its place: the exponent of a power of two."""
    bit = words ^ (words & (words - 1))
    return bit, (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _marks(marks, stride, word, inside):
    """Load two lines of ``marks``."""
    above = tl.load(marks + word, mask=inside, other=0).to(tl.uint32, bitcast=True)
    return above, tl.load(marks + stride + word, mask=inside, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _store_marks(marks, stride, word, above, alike, inside):
    tl.store(marks + word, above.to(tl.int32, bitcast=True), mask=inside)
    tl.store(marks + stride + word, alike.to(tl.int32, bitcast=True), mask=inside)


@kernel
def _first(
    programs, segments, rows, stride, residual, residual_stride, total, total_stride, second, second_stride, second_out,
    second_out_stride, lr, scale, factor, adam, largest, state, counts, ends, guess, over, near, copies, marks,
    marks_stride, positions, norms, norm_count, sums, sums_stride, each, size, share, n, limited, squares, columns,
    usual, usual_now, shares, cuts, residues, bounded, parameters, times, leaves, decay, gain, segment_count, shift,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, MEASURE: tl.constexpr, CUT: tl.constexpr, FEEDBACK: tl.constexpr,
    KEEP: tl.constexpr, GUESS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    STEP_FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Make ``total``, with Adam's step along the rows if ``STEP``, and begin ``state`` with its first digits.

    ``state`` (R, segments, 3): the lowest size that begins so, how many to choose of those that do, and whether two
    digits are known. They may be with ``GUESS``: then what is near it, or above, is marked as ``_second`` would. If
    ``SAMPLE``, a further program of each row does a part of ``norms.sample``.

    With ``MEASURE`` the last program of each segment makes its factor, see ``norms.bound_segment``; with ``CUT`` all is
    done again where a segment's is not 1, and nothing elsewhere.
    """
    if SAMPLE:  # noqa: SIM102 (a constant around a branch)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            for first in range(tl.program_id(1) * SAMPLED, size, tl.num_programs(1) * SAMPLED):
                i = first + tl.arange(0, SAMPLED)
                sample_of(
                    rows, stride, n, positions, norms, norm_count, sums, sums_stride, each, size, share, cuts, i, CUT
                )
            return
    row, number, segment, column = segment_of(programs, segments, BLOCK, FIELDS)
    width, start = tl.load(segment + 1), tl.load(segment)
    inside = column < width // 16 * 16
    if CUT:
        cut = tl.load(cuts + number)
        if cut == 1.0:
            return
    values = tl.load(row_of(rows + start, stride, row, ALIGN) + column, mask=inside, other=0)
    if CUT:
        values *= cut
    if MEASURE:
        rows_count = tl.num_programs(1).to(tl.int64)
        tl.store(squares + tl.program_id(0) * rows_count + tl.program_id(1), tl.sum(values * values, 0))
    if STEP:
        adam += number * STEP_FIELDS
        old = tl.load(row_of(second + start, second_stride, row, ALIGN) + column, mask=inside, other=0)
        new = second_of(values, old, adam, largest)
        tl.store(row_of(second_out + start, second_out_stride, row, ALIGN) + column, new, mask=inside)
        values = step_along(values, new, adam, lr, scale, factor, inside)
    if FEEDBACK:
        values += tl.load(row_of(residual + start, residual_stride, row, ALIGN) + column, mask=inside, other=0)
    if KEEP:
        tl.store(row_of(total + start, total_stride, row, ALIGN) + column, values, mask=inside)
    entry = row * segment_count + number
    counts, size = counts + entry * BINS, _size(values)
    histogram = tl.histogram(size >> shift, BINS, mask=inside)
    tl.atomic_add(counts + tl.arange(0, BINS), histogram, mask=histogram > 0, sem="relaxed")
    if GUESS:
        low = tl.maximum(tl.minimum(tl.load(guess + entry), NAN) - NEAR // 2, 0)
        over, near = over + entry, near + entry * copies * NEAR_BINS
        above, alike = inside & (size >= low + NEAR), inside & (size >= low) & (size < low + NEAR)
        _mark(marks + 2 * row * marks_stride + start // WORDS, marks_stride, column, width, above, alike)
        _count(near, copies, alike, (size - low) >> NEAR_SHIFT, NEAR_BINS)
        _count_ones(over, above)
    if is_last(ends + entry, tl.cdiv(width, BLOCK)):
        state, k, known = state + entry * 3, tl.load(segment + 2).to(tl.int32), 0
        lowest, remaining, _ = _digit(0, k, counts, 1, shift, BINS)
        if GUESS:
            wanted = k - tl.load(over, cache_modifier=".cg")
            near_lowest, near_remaining, near_count = _digit(low, wanted, near, copies, NEAR_SHIFT, NEAR_BINS)
            tl.store(over, 0)
            is_near = (wanted > 0) & (wanted <= near_count)
            lowest, remaining = tl.where(is_near, near_lowest, lowest), tl.where(is_near, near_remaining, remaining)
            known = is_near.to(tl.int32)
        _store_state(state, lowest, remaining)
        tl.store(state + 2, known)
        if MEASURE:  # noqa: SIM102 (a constant around a branch)
            if is_last(limited + number, tl.num_programs(1)):  # of all rows
                first = (tl.program_id(0) - tl.load(programs + 2 * tl.program_id(0) + 1)) * rows_count
                end = first + tl.cdiv(width, BLOCK) * rows_count
                bound_segment(
                    number, squares, first, end, columns, usual, usual_now, shares, cuts, residues, bounded, parameters,
                    times, leaves, decay, gain, MEASURED,
                )  # fmt: skip


@kernel
def _second(
    programs, segments, total, stride, state, counts, copies, ends, marks, marks_stride, segment_count, shift,
    GUESS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Count the digits at ``shift`` of sizes that begin as ``state``; a segment's last program adds the k-th's to it.

    Mark sizes above ``state``, and those that begin as it, in two lines of ``marks`` (2 R, n / 32).
    """
    row, number, segment, column = segment_of(programs, segments, BLOCK, FIELDS)
    entry = row * segment_count + number
    state += entry * 3
    if GUESS:  # noqa: SIM102 (a constant around a branch)
        if tl.load(state + 2) != 0:
            return
    width, start = tl.load(segment + 1), tl.load(segment)
    inside = column < width // 16 * 16
    size = _size(tl.load(row_of(total + start, stride, row, ALIGN) + column, mask=inside, other=0))
    prefix, wanted, digit = (size >> shift) // BINS, (tl.load(state) >> shift) // BINS, (size >> shift) % BINS
    above, alike = inside & (prefix > wanted), inside & (prefix == wanted)
    counts += entry * copies * BINS
    _mark(marks + 2 * row * marks_stride + start // WORDS, marks_stride, column, width, above, alike)
    _count(counts, copies, alike, digit, BINS)
    if is_last(ends + entry, tl.cdiv(width, BLOCK)):
        lowest, remaining, _ = _digit(tl.load(state), tl.load(state + 1), counts, copies, shift, BINS)
        _store_state(state, lowest, remaining)


@triton.jit
def _store_state(state, lowest, remaining):
    tl.debug_barrier()  # several threads may have to read what was there
    tl.store(state, lowest)
    tl.store(state + 1, remaining)


@triton.jit
def _mark(marks, stride, column, width, above, alike):
    """Store the flags of ``column`` in two lines of ``marks``."""
    word = tl.min(column, 0) // WORDS + tl.arange(0, column.shape[0] // WORDS)
    tl.store(marks + word, _word(above), mask=word * WORDS < width)
    tl.store(marks + stride + word, _word(alike), mask=word * WORDS < width)


@triton.jit
def _count(counts, copies, counted, digit, BINS: tl.constexpr):
    """Count the digits that are ``counted`` in one of the copies of a segment's ``counts``."""
    counts += tl.program_id(0) % copies * BINS
    _count_ones(counts, counted & (digit == 0))
    tl.atomic_add(counts + digit, digit * 0 + 1, mask=counted & (digit != 0), sem="relaxed")


@triton.jit
def _count_ones(count, flags):
    """Add the number of ``flags`` to ``count`` at once: the digit of zeros may be that of all values."""
    ones = tl.sum(flags.to(tl.int32))
    tl.atomic_add(count, ones, mask=ones > 0, sem="relaxed")


@kernel
def _third(
    programs, segments, total, stride, state, counts, ends, guess, marks, marks_stride, segment_count,
    GUESS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Like ``_second``, of those values alone that are marked: of them the ``BINS`` sizes from ``state`` on begin so.

    With ``GUESS``, keep the k-th size for the next step. ``BLOCK``: words.
    """
    row, number, segment, word = segment_of(programs, segments, BLOCK, FIELDS)
    width, start = tl.load(segment + 1), tl.load(segment)
    inside = word * WORDS < width
    entry = row * segment_count + number
    counts, state = counts + entry * BINS, state + entry * 3
    marks += 2 * row * marks_stride + start // WORDS
    total += start + row * stride + word * WORDS
    lowest = tl.load(state)
    above, unread = _marks(marks, marks_stride, word, inside)
    alike, zeros = unread ^ unread, word * 0
    for _ in range(tl.max(set_bits(unread), 0)):
        bit, offset = _lowest(unread)
        size = _size(tl.load(total + offset, mask=unread != 0, other=0))
        digit = size - lowest
        above |= tl.where((unread != 0) & (digit >= BINS), bit, 0)
        counted = (unread != 0) & (digit >= 0) & (digit < BINS)
        alike |= tl.where(counted, bit, 0)
        zeros += (counted & (digit == 0)).to(tl.int32)
        tl.atomic_add(counts + digit, digit * 0 + 1, mask=counted & (digit != 0), sem="relaxed")
        unread ^= bit
    _store_marks(marks, marks_stride, word, above, alike, inside)
    _count_ones(counts, zeros)
    if is_last(ends + entry, tl.cdiv(width, BLOCK * WORDS)):
        kth, ties, _ = _digit(tl.load(state), tl.load(state + 1), counts, 1, 0, BINS)
        _store_state(state, kth, ties)
        if GUESS:
            tl.store(guess + entry, kth)


@triton.jit
def _digit(lowest, remaining, counts, copies, shift, BINS: tl.constexpr):
    """Find the next digit of the size that ``remaining`` of those counted reach. Zero ``counts``.

    Return ``lowest`` with it, how many of the sizes that begin so are to choose, and how many were counted.
    """
    digit, count = tl.arange(0, BINS), tl.zeros((BINS,), tl.int32)
    for copy in range(copies):
        count += tl.load(counts + copy * BINS + digit, cache_modifier=".cg")
    count_from = tl.cumsum(count, 0, reverse=True)
    chosen = tl.maximum(tl.sum((count_from >= remaining).to(tl.int32), 0) - 1, 0)
    tl.debug_barrier()  # several threads may have to read one count
    for copy in range(copies):
        tl.store(counts + copy * BINS + digit, tl.zeros((BINS,), tl.int32))
    left = remaining - tl.sum(tl.where(digit > chosen, count, 0), 0)
    return lowest + (chosen << shift), left, tl.sum(count, 0)


@kernel
def _tally(
    programs, segments, total, stride, state, marks, marks_stride, tallies, tallies_stride, ends, words, words_stride,
    segment_count, size, PACK: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Mark the values above and equal to the k-th size, and count them up to the end of each program's.

    The counts of a row are two lines of ``tallies`` (2 R, 1 + programs), after a zero. Zero the ``size`` words of the
    row on the wire. ``BLOCK``: words of marks.
    """
    row, number, segment, word = segment_of(programs, segments, BLOCK, FIELDS)
    if PACK:
        zero_words(words + row * words_stride, size, BLOCK)
    start, inside = tl.load(segment), word * WORDS < tl.load(segment + 1)
    marks += 2 * row * marks_stride + start // WORDS
    total += start + row * stride + word * WORDS
    threshold = tl.load(state + (row * segment_count + number) * 3)
    above, unread = _marks(marks, marks_stride, word, inside)
    equal = unread ^ unread
    for _ in range(tl.max(set_bits(unread), 0)):
        bit, offset = _lowest(unread)
        size_here = _size(tl.load(total + offset, mask=unread != 0, other=0))
        above |= tl.where(size_here > threshold, bit, 0)
        equal |= tl.where(size_here == threshold, bit, 0)
        unread ^= bit
    _store_marks(marks, marks_stride, word, above, equal, inside)
    tallies += 2 * row * tallies_stride
    first = tl.program_id(0) == 0
    tl.store(tallies, 0, mask=first)
    tl.store(tallies + tallies_stride, 0, mask=first)
    counted = tallies + tl.program_id(0) + 1
    tl.store(counted, tl.sum(set_bits(above), 0))
    tl.store(counted + tallies_stride, tl.sum(set_bits(equal), 0))
    if is_last(ends + row, tl.num_programs(0)):
        add_up(tallies + 1, tl.num_programs(0), SUMS)
        add_up(tallies + tallies_stride + 1, tl.num_programs(0), SUMS)


@triton.jit
def _clear(positions, payload, codes, first, end, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """List nothing from ``first`` to ``end``."""
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        tl.store(positions + entry, tl.full((BLOCK,), -1, tl.int32), mask=entry < end)
        tl.store(payload + entry, tl.zeros((BLOCK,), tl.float32), mask=entry < end)
        if BITS == 32:
            tl.store(codes + entry, tl.zeros((BLOCK,), tl.float32), mask=entry < end)


@triton.jit
def _keep(positions, entry, inside, remainder, values):
    """Write ``values`` to the columns of the row ``remainder`` that are listed at ``entry``."""
    column = tl.load(positions + entry, mask=inside, other=-1, cache_modifier=".cg")
    tl.store(remainder + column, values, mask=column >= 0)


@triton.jit
def _send(
    chunk, payload, positions, codes, scales, remainder, groups, KEEP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """Quantize a chunk of a row's list, which several programs have written; keep what that leaves out."""
    g, entry, byte = _group_elements(tl.cast(chunk, tl.int64) * BLOCK + tl.arange(0, BLOCK), GROUP, FOUR)
    inside = (g < groups)[:, None]
    low = tl.load(payload + entry, mask=inside, other=0, cache_modifier=".cg")
    high = tl.load(payload + entry + GROUP // 2, mask=inside, other=0, cache_modifier=".cg")
    sent_low, sent_high = _encode(
        low, high, codes, byte, scales, g, groups, entry, 0, GROUP, BLOCK, FOUR, False, False
    )  # fmt: skip
    if KEEP:
        _keep(positions, entry, inside, remainder, low - sent_low)
        _keep(positions, entry + GROUP // 2, inside, remainder, high - sent_high)


@triton.jit
def _low_bits_of(words, segment, i, low_bits):
    """Return pointers to the words of the i-th positions' lower bits, after the high bits, and the first bit there."""
    bit = i * low_bits
    return words + tl.load(segment + 5) // 64 + bit // 64, bit % 64


@triton.jit
def _pack(words, segment, i, column, inside):
    """Set the bits of the i-th ``column`` of a segment in a row's zeroed ``words``; several programs share a word."""
    low_bits = tl.load(segment + 6)
    words += tl.load(segment + 4) // 64
    low_word, shift = _low_bits_of(words, segment, i, low_bits)
    tl.atomic_or(low_word, (column & ((1 << low_bits) - 1)) << shift, mask=inside, sem="relaxed")
    bit = (column >> low_bits) + i
    tl.atomic_or(words + (bit >> 6), (column * 0 + 1) << (bit & 63), mask=inside, sem="relaxed")


@kernel
def _list(
    programs, segments, total, stride, state, marks, marks_stride, tallies, tallies_stride, positions, positions_stride,
    payload, payload_stride, words, words_stride, codes, codes_stride, scales, scales_stride, arrived, segment_count, m,
    PACK: tl.constexpr, BITS: tl.constexpr, KEEP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, FIELDS: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """List what is chosen, in ``m`` entries, and pack it. Send the values in ``BITS`` bits, if any, and keep the rest.

    Programs write the list one after the other: a row's first one clears what is before it, a segment's last one what
    is behind its part. Of each chunk of ``GROUPS`` groups the program that comes last to it, as ``arrived`` counts
    entries, quantizes it. ``BLOCK``: words of marks.
    """
    row, number, segment, word = segment_of(programs, segments, BLOCK, FIELDS)
    start, width = tl.load(segment), tl.load(segment + 1)
    inside = word * WORDS < width
    tallies += 2 * row * tallies_stride
    ties = tl.load(state + (row * segment_count + number) * 3 + 1)
    above, equal = _marks(marks + 2 * row * marks_stride + start // WORDS, marks_stride, word, inside)
    equals = count_before(tallies + tallies_stride, word, set_bits(equal))  # before this word, then this column
    i = count_before(tallies, word, set_bits(above)) + tl.minimum(equals, ties)
    unread = above | tl.where(equals < ties, equal, 0)
    total += row * stride
    positions, payload = positions + row * positions_stride, row_of(payload, payload_stride, row, 16 if WIRE > 1 else 1)
    codes = row_of(codes, codes_stride, row, WIRE)
    first = tl.load(segment + 3)
    begin = first + tl.min(i, 0)
    for _ in range(tl.max(set_bits(unread), 0)):
        bit, offset = _lowest(unread)
        ties_here = (equal & bit) != 0
        chosen = (unread != 0) & ((equals < ties) | ~ties_here)
        column = word * WORDS + offset
        values = tl.load(total + start + column, mask=chosen, other=0)
        tl.store(positions + first + i, (start + column).to(tl.int32), mask=chosen)
        tl.store(payload + first + i, values, mask=chosen)
        if PACK:
            _pack(words + row * words_stride, segment, i, column.to(tl.int64), chosen)
        if BITS == 32:
            tl.store(codes + first + i, values, mask=chosen)
            if KEEP:
                tl.store(total + start + column, values - values, mask=chosen)  # of finite ones nothing remains
        i += chosen.to(tl.int32)
        equals += ties_here.to(tl.int32)
        unread ^= bit
    end = first + tl.max(i, 0)
    if tl.program_id(0) == 0:
        _clear(positions, payload, codes, 0, begin, BITS, BLOCK)
        begin = begin * 0
    if (tl.max(word, 0) + 1) * WORDS >= width:
        next_list = tl.load(segment + 7)
        next_list = tl.where(next_list < 0, m, next_list)
        _clear(positions, payload, codes, end, next_list, BITS, BLOCK)
        end = next_list
    if BITS == 4 or BITS == 8:
        CHUNK: tl.constexpr = GROUP * GROUPS
        arrived += row * tl.cdiv(m, CHUNK)
        tl.debug_barrier()  # the release below covers what all threads of this program wrote
        for chunk in range(begin // CHUNK, tl.where(begin < end, tl.cdiv(end, CHUNK), 0)):
            chunk_end = tl.minimum((chunk + 1) * CHUNK, m)
            written = tl.minimum(end, chunk_end) - tl.maximum(begin, chunk * CHUNK)
            count = tl.atomic_add(arrived + chunk, written.to(tl.int32), sem="acq_rel") + written
            if count == chunk_end - chunk * CHUNK:
                tl.store(arrived + chunk, 0)
                _send(
                    chunk, payload, positions, codes, scales + row * scales_stride, total, m // GROUP, KEEP, GROUP,
                    GROUPS, BITS == 4,
                )  # fmt: skip


@kernel
def _put(payload, payload_stride, positions, positions_stride, out, stride, m, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(positions + row * positions_stride + i, mask=i < m, other=-1)
    values = tl.load(payload + row * payload_stride + i, mask=i < m, other=0)
    tl.store(out + row * stride + column, values, mask=column >= 0)


@kernel
def _spread(
    programs, segments, wire, wire_stride, words, words_stride, offsets, offsets_stride, log_zeros,
    PER_OFFSET: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Make ``words`` masks of the positions, and ``offsets``: how many lie before each ``PER_OFFSET`` columns.

    A position is a one among the high bits. The zero that ends its 256 or 16 columns has as many ones before it as
    there are positions up to there. A program clears the words of 2^``log_zeros`` zeros' columns, finds their high bits
    and sets what these say, ``BLOCK`` bits at a time. Of other programs' columns it may set some as well, to the same.
    """
    row, _, segment, _ = segment_of(programs, segments, BLOCK, FIELDS)
    lane, first = tl.arange(0, BLOCK), tl.load(programs + 2 * tl.program_id(0) + 1) << log_zeros
    low_bits, k, count = tl.load(segment + 6), tl.load(segment + 2).to(tl.int32), tl.load(segment + 5).to(tl.int32)
    start = first.to(tl.int64) << low_bits  # all further columns are counted from here, in 32 bits
    width, shift = (tl.load(segment + 1) - start).to(tl.int32), low_bits.to(tl.int32)
    wire += row * wire_stride + tl.load(segment + 4) // 64
    words += row * words_stride + (tl.load(segment) + start) // 64
    offsets += row * offsets_stride + tl.load(segment + 8) + start // PER_OFFSET
    tl.store(offsets, 0, mask=first == 0)
    size = tl.minimum(width.to(tl.int64), (start * 0 + 1) << (log_zeros + shift)).to(tl.int32) // 64
    for word in range(0, size, BLOCK):
        tl.store(words + word + lane, tl.zeros((BLOCK,), tl.int64), mask=word + lane < size)
    tl.debug_barrier()  # other threads than those that clear a word set its bits
    bit, ones = _skip(wire, count, first)
    while (bit < count) & (bit - ones < first + (1 << log_zeros)):
        bits = _bits(wire, bit + lane, bit + lane < count)
        i = ones + tl.cumsum(bits, 0) - bits
        zeros, listed = bit + lane - i - first, (bits != 0) & (i < k)
        low_word, low_shift = _low_bits_of(wire, segment, i, low_bits)
        low = (tl.load(low_word, mask=listed, other=0) >> low_shift).to(tl.int32) & ((1 << shift) - 1)
        column, end = (zeros << shift) + low, (zeros + 1) << shift
        one = tl.full((BLOCK,), 1, tl.int64) << (column & 63)
        tl.atomic_or(words + (column >> 6), one, mask=listed & (column < width), sem="relaxed")
        tl.store(offsets + end // PER_OFFSET, i, mask=(bits == 0) & (end % PER_OFFSET == 0) & (end < width))
        bit, ones = bit + BLOCK, ones + tl.sum(bits, 0)


@triton.jit
def _skip(wire, count, zeros):
    """Return a bit of the ``count`` at ``wire`` that so many ``zeros`` do not lie before, and the ones before it."""
    bit, ones, skips = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), zeros > 0
    while skips:
        word = bit // 64 + tl.arange(0, SKIPPED)
        more = tl.sum(set_bits(tl.load(wire + word, mask=word < count // 64, other=0)), 0)
        skips = bit + 64 * SKIPPED - ones - more < zeros
        bit, ones = bit + tl.where(skips, 64 * SKIPPED, 0), ones + tl.where(skips, more, 0)
    return bit, ones


@triton.jit
def _value(codes, scales, entry, inside, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Load the values at ``entry`` of a row's list, zeros elsewhere."""
    if BITS == 32:
        values = tl.load(codes + entry, mask=inside, other=0)
    elif BITS == 8:
        values = tl.load(codes + entry, mask=inside, other=0).to(tl.float32)
        values *= tl.load(scales + entry // GROUP, mask=inside, other=0)
    else:
        group, place = entry // GROUP, entry % GROUP
        pair = tl.load(codes + group * (GROUP // 2) + place % (GROUP // 2), mask=inside, other=0).to(tl.int32)
        values = (tl.where(place < GROUP // 2, pair & 15, pair >> 4) - 8).to(tl.float32)
        values *= tl.load(scales + group, mask=inside, other=0)
    return tl.where(inside, values, 0.0)


@kernel
def _decode(
    programs, segments, words, words_stride, offsets, offsets_stride, codes, codes_stride, scales, scales_stride, out,
    stride, scale, peers, SUM: tl.constexpr, BITS: tl.constexpr, PER_SCALE: tl.constexpr, BLOCK: tl.constexpr,
    FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Write the values of a row's peer at their columns, or ``scale`` * the sum of its ``peers``; zeros elsewhere."""
    row, _, segment, column = segment_of(programs, segments, BLOCK, FIELDS)
    start, first, k = tl.load(segment), tl.load(segment + 3), tl.load(segment + 2)
    inside, words = column < tl.load(segment + 1) // 16 * 16, words + start // 64
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(peers):
        of = row * peers + peer
        bits = _bits(words + of * words_stride, column, inside)
        i = tl.load(offsets + of * offsets_stride + tl.program_id(0)) + tl.cumsum(bits, 0) - bits
        listed = (bits != 0) & (i >= 0) & (i < k)
        values = _value(codes + of * codes_stride, scales + of * scales_stride, first + i, listed, BITS, PER_SCALE)
        total = total + values if SUM else values
    if SUM:
        total *= scale
    tl.store(row_of(out + start, stride, row, ALIGN) + column, total, mask=inside)


class _Tables(NamedTuple):
    """The table of some segments, which all launches for them read, and which programs take how much of which.

    ``programs``: of ``BLOCK`` columns, of which a row has ``blocks``. ``counted``: of ``COUNTED`` columns.
    ``spread``: of 2^``log_zeros`` zeros among the high bits.
    """

    table: Tensor
    programs: Tensor
    counted: Tensor
    spread: Tensor
    blocks: int
    log_zeros: int


@per_stream
def _tables(device: torch.device, segments: tuple[ListSegment, ...]) -> _Tables:
    widths = [segment.width for segment in segments]
    zeros = [cdiv(segment.width, 1 << segment.low_bits) for segment in segments]
    programs, counted = (programs_on(device, widths, columns) for columns in (BLOCK, COUNTED))
    each = 1 << (max(ZEROS, *(cdiv(count, SHARERS) for count in zeros)) - 1).bit_length()
    table = of.wire_table(segments, device).view(-1)
    spread = programs_on(device, zeros, each)
    return _Tables(table, programs, counted, spread, programs.shape[0] // 2, each.bit_length() - 1)


def largest(
    rows: Tensor, residual: Tensor | None, segments: tuple[ListSegment, ...], total_out: Tensor | None,
    positions: Tensor, payload: Tensor, wire: Tensor | None = None, adam: Adam | None = None,
    values: WireValues | None = None, decoded: Tensor | None = None, guess: Tensor | None = None,
) -> None:  # fmt: skip
    count, total, device = len(rows), rows if total_out is None else total_out, rows.device
    addend = rows if residual is None else residual
    entries = count * len(segments)
    copies = max(1, min(COPIES, ALL_COPIES // entries))
    state = torch.empty(entries * 3, dtype=torch.int32, device=device)
    bits, group, groups, sent = _sending(values, payload)
    (shift, bins), second, third = DIGITS
    chunks, counted_to = cdiv(positions.shape[1], group * groups), entries * copies * BINS
    counts = counters(device, counted_to + 2 * entries + count * chunks + len(segments))
    near, behind = counts[entries * bins :], counts[counted_to:]  # of the first pass, and of all
    ends, over, arrived = behind, behind[entries:], behind[2 * entries :]
    limited = arrived[count * chunks :]
    kth, guesses = (state if guess is None else guess.view(-1)), guess is not None
    marks = torch.empty((2 * count, rows.shape[1] // 32), dtype=torch.int32, device=device)
    table, _, counted, *_ = _tables(device, segments)
    grid = counted.shape[0] // 2, count
    wide: dict[str, Any] = {"BLOCK": COUNTED, "FIELDS": of.FIELDS, "num_warps": WARPS}
    if adam is None:
        moments, factors = (rows, rows), (state, state, state, table)  # not touched
    else:
        moments = adam.second, adam.second_out
        factors = adam.lr, adam.scale, adam.factor, direction.tables(device, tuple(adam.segments))[1]
    cuts, limit = _limiting((rows, addend), total, adam, grid[0] * count)
    takes_samples, samples = _sampling(rows, total, adam)
    for measure, cut in ((True, False), (False, True)) if cuts else ((False, False),):
        samples_now = takes_samples and not measure
        launch(
            _first, (grid[0] + samples_now, count), counted, table, rows, addend, total, *moments, *factors,
            direction.LARGEST, state, counts, ends, kth, over, near, copies, marks, *samples, limited, *limit,
            len(segments), shift, STEP=adam is not None, SAMPLE=samples_now, MEASURE=measure, CUT=cut,
            FEEDBACK=residual is not None, KEEP=total_out is not None, GUESS=guesses, BINS=bins,
            STEP_FIELDS=direction.FIELDS, ALIGN=alignment(rows, addend, total, *moments), **wide,
        )  # fmt: skip
    begun = counted, table, total, state, counts
    launch(
        _second, grid, *begun, copies, ends, marks, len(segments), second[0],
        GUESS=guesses, BINS=second[1], ALIGN=alignment(total), **wide,
    )  # fmt: skip
    by_word: dict[str, Any] = {"BLOCK": MARKED, "FIELDS": of.FIELDS}
    launch(_third, grid, *begun, ends, kth, marks, len(segments), GUESS=guesses, BINS=third[1], **by_word)
    tallies = torch.empty((2 * count, 1 + grid[0]), dtype=torch.int32, device=device)
    words = table.view(1, -1) if wire is None else viewable(wire).view(torch.int64)
    size, m, packs = words.shape[1], positions.shape[1], wire is not None
    chosen = counted, table, total, state, marks, tallies
    launch(_tally, grid, *chosen, ends, words, len(segments), size, PACK=packs, **by_word)
    launch(
        _list, grid, *chosen, positions, payload, words, *sent, arrived, len(segments), m, PACK=packs, BITS=bits,
        KEEP=total_out is not None, GROUP=group, GROUPS=groups, WIRE=wire_alignment(sent[0], payload), **by_word,
    )  # fmt: skip


def _limiting(
    addends: tuple[Tensor, ...], total: Tensor, adam: Adam | None, programs: int
) -> tuple[bool, tuple[Any, ...]]:
    """Return whether the first pass makes cuts, and its arguments for them; cut where it cannot.

    It reads all anew where it has cut, so it must leave ``addends`` as they are.
    """
    if adam is not None and adam.limit is not None:
        if all(total is not addend for addend in addends):
            return True, limit_arguments(adam.limit, programs)
        adam.limit.cut()
    return False, (*[total[0]] * 8, 0, 0.0, 0.0, 0.0, 0.0)  # not touched


def _sampling(rows: Tensor, total: Tensor, adam: Adam | None) -> tuple[bool, tuple[Any, ...]]:
    """Return whether the first pass takes samples, and its arguments for them; take those that it cannot take."""
    if adam is not None and adam.samples is not None:
        if total is not rows:
            return True, (*sample_arguments(rows, *adam.samples), rows.shape[1])
        adam.samples.take(rows)
    return False, (rows[0], rows[0], 0, rows, 0, 0, 0.0, 0)  # not touched


def _sending(values: WireValues | None, payload: Tensor) -> tuple[int, int, int, tuple[Tensor, Tensor]]:
    """Return the bits of a value on the wire (0: none), a group's values, groups of a chunk, codes and scales."""
    if values is None:
        return 0, 1, QUANTIZED, (payload, payload)  # not touched
    if values.format is None or values.scales is None:
        return 32, 1, QUANTIZED, (values.codes, payload)
    group = values.format.group
    return values.format.bits, group, max(1, QUANTIZED // group), (values.codes, values.scales)


def marked(rows: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> None:
    ends = tuple(accumulate(segment.k for segment in segments))
    segments = tuple(segment._replace(list_start=end - segment.k) for segment, end in zip(segments, ends, strict=True))
    positions = torch.empty((len(rows), ends[-1]), dtype=torch.int32, device=rows.device)
    largest(rows, None, segments, None, positions, torch.empty_like(positions, dtype=torch.float32))
    from_indices(positions, words)


def put(payload: Tensor, positions: Tensor, out: Tensor) -> None:
    grid = cdiv(positions.shape[1], BLOCK), len(positions)
    launch(_put, grid, payload, positions, out, positions.shape[1], BLOCK=BLOCK)


def decode(
    wire: Tensor, values: WireValues, segments: tuple[ListSegment, ...], out: Tensor, scale: float | None,
    positions: Tensor, decoded: Tensor | None,
) -> None:  # fmt: skip
    words = torch.empty((len(wire), out.shape[1] // 64), dtype=torch.int64, device=out.device)
    offsets = _read(wire, segments, words)
    bits, group = (32, 1) if values.format is None else (values.format.bits, values.format.group)
    table, programs, *_ = _tables(out.device, segments)
    launch(
        _decode, (programs.shape[0] // 2, len(out)), programs, table, words, offsets,
        values.codes, values.codes if values.scales is None else values.scales, out, scale or 1.0,
        len(wire) // len(out), SUM=scale is not None, BITS=bits, PER_SCALE=group, BLOCK=BLOCK, FIELDS=of.FIELDS,
        ALIGN=alignment(out),
    )  # fmt: skip


def read(wire: Tensor, segments: tuple[ListSegment, ...], words: Tensor, positions: Tensor) -> None:
    _read(wire, segments, words)


def _read(wire: Tensor, segments: tuple[ListSegment, ...], words: Tensor) -> Tensor:
    """Make ``words`` masks of the positions; return how many lie before each ``BLOCK`` columns, in their segment."""
    bits, (table, _, _, programs, blocks, log_zeros) = viewable(wire).view(torch.int64), _tables(wire.device, segments)
    offsets = torch.empty((len(wire), blocks), dtype=torch.int32, device=wire.device)
    launch(
        _spread, (programs.shape[0] // 2, len(wire)), programs, table, bits, words, offsets, log_zeros,
        PER_OFFSET=BLOCK, BLOCK=HIGH, FIELDS=of.FIELDS, num_warps=WARPS,
    )  # fmt: skip
    return offsets
