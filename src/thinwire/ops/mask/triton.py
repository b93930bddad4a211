# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``), the same bits as ``reference``.

A program takes 512 elements of a row. Where its payload begins is read from the *rank directory*: the number of set
bits before each 512, an exclusive prefix sum of the counts; so programs are independent, and no shape depends on data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.device import upload, uploaded
from thinwire.ops.gpu import alignment, kernel, launch, row_of, whole
from thinwire.ops.mask import reference
from thinwire.ops.programs import programs_of
from thinwire.ops.rows import FIELDS
from thinwire.ops.rows import PER_PROGRAM as COPIED
from thinwire.ops.rows.triton import _places

if TYPE_CHECKING:
    from thinwire.ops.mask import Faded
    from thinwire.ops.rows import Places

BLOCK = 512
"""Elements per program, and per entry of the directory."""
WORDS = 64
"""Words per program that makes them of a list."""


@triton.jit
def _bits(words, at, inside):
    """The mask bits (0 or 1) of the elements ``at``."""
    word = tl.load(words + at // 64, mask=inside, other=0)
    return ((word >> (at % 64)) & 1).to(tl.int32)


@triton.jit
def _place(words, before, at, inside, k):
    """Of the elements ``at``: is it on the mask, and which of the row's bits is it? ``before``: of the block's first.

    Bits after the k-th are taken for none: a mask with too many does not reach beyond its row of a payload.
    """
    bits = _bits(words, at, inside)
    place = tl.load(before) + tl.cumsum(bits, 0) - bits
    return (bits != 0) & (place < k), place


@kernel
def _count(words, words_stride, counts, counts_stride, n, BLOCK: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    counts += row * counts_stride
    tl.store(counts, 0, mask=block == 0)
    tl.store(counts + block + 1, tl.sum(_bits(words + row * words_stride, at, at < n)))


@triton.jit
def _bits_of(words):
    """How many bits are set in each of ``words`` (int64): pairs, fours and bytes, then the sum of the bytes."""
    words = words - ((words >> 1) & 0x5555555555555555)
    words = (words & 0x3333333333333333) + ((words >> 2) & 0x3333333333333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((words * 0x0101010101010101) >> 56).to(tl.int32)


@kernel
def _gather_keep(
    rows, stride, old, old_stride, words, words_stride, before, before_stride, payload, payload_stride, new, new_stride,
    n, k, FEEDBACK: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < whole(n, ALIGN)
    total = tl.load(row_of(rows, stride, row, ALIGN) + at, mask=inside, other=0)
    if FEEDBACK:
        total += tl.load(row_of(old, old_stride, row, ALIGN) + at, mask=inside, other=0)
    on, place = _place(words + row * words_stride, before + row * before_stride + block, at, inside, k)
    tl.store(payload + row * payload_stride + place, total, mask=on)
    if KEEP:
        tl.store(row_of(new, new_stride, row, ALIGN) + at, tl.where(on, 0.0, total), mask=inside)


@kernel
def _scatter(
    payload, payload_stride, words, words_stride, before, before_stride, out, stride, n, k,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < whole(n, ALIGN)
    on, place = _place(words + row * words_stride, before + row * before_stride + block, at, inside, k)
    values = tl.load(payload + row * payload_stride + place, mask=on, other=0.0)
    tl.store(row_of(out, stride, row, ALIGN) + at, values, mask=inside)


@triton.jit
def _part(places, table, block, n, BLOCK: tl.constexpr):
    """Of a block's columns: which of them their part has, where in a shard they are, and where in ``keep`` its bits.

    ``places``: of each word the number of its part. ``table``: of each part what lies between a column of the masks
    and one of a shard, its last column among the former, and the place in ``keep``.
    """
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    part = table + tl.load(places + at // 64, mask=at < n, other=0).to(tl.int64) * 3
    return at, (at < n) & (at < tl.load(part + 1)), at + tl.load(part), tl.load(part + 2)


@kernel
def _collect(
    row, words, before, message, places, table, blocks, n, k, kept, kept_table, BLOCK: tl.constexpr,
    COPIED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """The first ``blocks`` programs take what is at masks, the others what is kept."""
    number = tl.program_id(0)
    if number < blocks:
        at, inside, column, _ = _part(places, table, number, n, BLOCK)
        on, place = _place(words, before + number, at, inside, k)
        tl.store(message + place, tl.load(row + column, mask=on, other=0), mask=on)
    else:
        start, to, filled, there = _places(number - blocks, kept, kept_table, COPIED, FIELDS)
        tl.store(message + to, tl.load(row + start, mask=there, other=0), mask=filled)


@kernel
def _renew(
    message, message_stride, words, words_stride, before, before_stride, rows, stride, places, table, keep, blocks, n,
    k, kept, kept_table, BLOCK: tl.constexpr, COPIED: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """Of each row: as ``_collect``, the other way."""
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    message, rows = message + row * message_stride, rows + row * stride
    if number < blocks:
        at, inside, column, factor = _part(places, table, number, n, BLOCK)
        on, place = _place(words + row * words_stride, before + row * before_stride + number, at, inside, k)
        fresh = tl.load(message + place, mask=on, other=0.0)
        factor = tl.load(keep + factor).to(tl.float32, bitcast=True)
        faded = tl.load(rows + column, mask=inside, other=0.0) * factor
        tl.store(rows + column, tl.where(on, fresh, faded), mask=inside)
    else:
        start, to, _, there = _places(number - blocks, kept, kept_table, COPIED, FIELDS)
        tl.store(rows + start, tl.load(message + to, mask=there, other=0), mask=there)


@kernel
def _from_indices(positions, stride, words, words_stride, n, k, BLOCK: tl.constexpr):
    """Several positions may be of one word: their bits are added by an atomic or. Positions out of range are none."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(positions + row * stride + i, mask=i < k, other=-1).to(tl.int64)
    bit = tl.full((BLOCK,), 1, tl.int64) << (at & 63)
    tl.atomic_or(words + row * words_stride + (at >> 6), bit, mask=(at >= 0) & (at < n), sem="relaxed")


@triton.jit
def _first_at(positions, k, column, steps):
    """Of each ``column`` how many of the ``k`` ``positions``, which rise, are before it: 2 ** ``steps`` > k."""
    low, high = column * 0, column * 0 + k
    for _ in range(steps):
        middle = (low + high) // 2
        open = low < high
        below = open & (tl.load(positions + middle, mask=open, other=0).to(tl.int64) < column)
        low, high = tl.where(below, middle + 1, low), tl.where(open & ~below, middle, high)
    return low


@kernel
def _from_lists(base, table, lists, words, words_stride, before, before_stride, steps, count, BLOCK: tl.constexpr):
    """A program makes up to ``BLOCK`` words of a list. ``table``: of each list where it is from ``base`` on, in
    elements, the distance of its rows, k, its first word and how many, the bits before it, and its first program;
    behind that the list of each program. ``before``: their directory."""
    row, number = tl.program_id(1).to(tl.int64), tl.program_id(0)
    part = table + tl.load(table + tl.cast(lists, tl.int64) * 7 + number) * 7
    positions, k = base + tl.load(part) + row * tl.load(part + 1), tl.load(part + 2)
    word = (number - tl.load(part + 6)) * BLOCK + tl.arange(0, BLOCK)
    inside = word < tl.load(part + 4)
    first, last = _first_at(positions, k, word * 64, steps), _first_at(positions, k, word * 64 + 64, steps)
    bits = word * 0
    for i in range(tl.minimum(tl.max(last - first, 0), 64)):
        at = tl.load(positions + first + i, mask=first + i < last, other=-1).to(tl.int64)
        bits |= tl.where((at >> 6) == word, tl.full((BLOCK,), 1, tl.int64) << (at & 63), 0)
    word, before, earlier = word + tl.load(part + 3), before + row * before_stride, tl.load(part + 5)
    tl.store(words + row * words_stride + word, bits, mask=inside)
    tl.store(before + word // 8, (first + earlier).to(tl.int32), mask=inside & (word % 8 == 0))
    ends = tl.max(tl.where(inside, word, 0), 0) + 1 == count
    tl.store(before + tl.cdiv(count, 8), (k + earlier).to(tl.int32), mask=ends)


@kernel
def _unpack(words, words_stride, flags, stride, n, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = _bits(words + row * words_stride, at, at < whole(n, ALIGN))
    tl.store(row_of(flags, stride, row, ALIGN) + at, bits.to(tl.uint8), mask=at < whole(n, ALIGN))


@kernel
def _pack(flags, flags_stride, words, words_stride, count, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 64)
    at = word[:, None] * 64 + bit[None, :]
    inside = (word < count)[:, None]
    flag = tl.load(row_of(flags, flags_stride, row, ALIGN) + at, mask=inside, other=0).to(tl.int64)
    tl.store(words + row * words_stride + word, tl.sum(flag << bit[None, :].to(tl.int64), axis=1), mask=word < count)


def _grid(words: Tensor) -> tuple[int, int]:
    return triton.cdiv(words.shape[1] * reference.WORD, BLOCK), words.shape[0]


def _counts(words: Tensor) -> Tensor:
    """A zero, then the set bits of every 512 elements of each row: (R, 1 + blocks) int32."""
    blocks, count = _grid(words)
    counts = torch.empty((count, 1 + blocks), dtype=torch.int32, device=words.device)
    launch(_count, (blocks, count), words, counts, words.shape[1] * reference.WORD, BLOCK=BLOCK)
    return counts


def directory(words: Tensor) -> Tensor:
    """Set bits of each row before every 512 elements, and of all: (R, 1 + blocks) int32."""
    return _counts(words).cumsum_(1)


def popcount(words: Tensor) -> Tensor:
    return _counts(words).sum(1)


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    before: Tensor | None = None,
) -> None:
    old = rows if residual is None else residual
    new = rows if residual_out is None else residual_out  # not written to unless kept
    before = directory(words) if before is None else before
    launch(
        _gather_keep, _grid(words), rows, old, words, before, payload, new, rows.shape[1], payload.shape[1],
        FEEDBACK=residual is not None, KEEP=residual_out is not None, BLOCK=BLOCK, ALIGN=alignment(rows, old, new),
    )  # fmt: skip


def scatter(payload: Tensor, words: Tensor, out: Tensor, before: Tensor | None = None) -> None:
    before = directory(words) if before is None else before
    launch(
        _scatter, _grid(words), payload, words, before, out, out.shape[1], payload.shape[1], BLOCK=BLOCK,
        ALIGN=alignment(out),
    )  # fmt: skip


def collect(
    row: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, message: Tensor, before: Tensor | None = None
) -> None:
    grid, given, constants = _of_parts(words, parts, kept)
    before = directory(words) if before is None else before
    launch(_collect, grid, row, words[0], before[0], message, *given[:2], *given[3:], **constants)


def renew(
    messages: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, rows: Tensor, before: Tensor | None = None
) -> None:
    grid, given, constants = _of_parts(words, parts, kept)
    before = directory(words) if before is None else before
    launch(_renew, (*grid, len(words)), messages, words, before, rows, *given, **constants)


def _of_parts(
    words: Tensor, parts: Sequence[Faded], kept: Places
) -> tuple[tuple[int], tuple[Tensor | int, ...], dict[str, Any]]:
    """Programs for a row; places, table, what is left off the masks, and all else that both kernels ask for."""
    factors = {of: place for place, of in enumerate(dict.fromkeys(part.keep for part in parts))}
    keep = np.array(list(factors), np.float32).view(np.int32).tolist()
    table, first = [], 0
    for part in parts:
        table += [part.start - first, first + part.numel, factors[part.keep]]
        first += part.width
    numbers = _numbers(tuple(part.width for part in parts), words.device)
    tables = uploaded(table, words.device, torch.int64), uploaded(keep, words.device)
    (blocks, _), k = _grid(words), sum(part.k for part in parts)
    given = (numbers, *tables, blocks, first, k, kept.programs, kept.table)
    return (blocks + len(kept.programs),), given, {"BLOCK": BLOCK, "COPIED": COPIED, "FIELDS": FIELDS}


@functools.cache
def _numbers(widths: tuple[int, ...], device: torch.device) -> Tensor:
    """(w,) int32: of each mask word of parts beside each other, the number of its part."""
    return upload(programs_of(widths, reference.WORD)[0], device)


def from_indices(positions: Tensor, words: Tensor) -> None:
    words.zero_()
    count, k = positions.shape
    if k:
        grid = (triton.cdiv(k, BLOCK), count)
        launch(_from_indices, grid, positions, words, words.shape[1] * reference.WORD, k, BLOCK=BLOCK)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> Tensor | None:
    table: list[int] = []
    base, bits = lists[0][0], 0
    widths = [groups.stop - groups.start for _, groups in lists]
    programs, firsts = programs_of(widths, WORDS)
    for (positions, groups), width, first in zip(lists, widths, firsts, strict=True):
        away = (positions.data_ptr() - base.data_ptr()) // 4  # the same in every step, for lists in one memory
        table += [away, positions.stride(0), positions.shape[1], groups.start, width, bits, first]
        bits += positions.shape[1]
    before = torch.empty((len(words), 1 + _grid(words)[0]), dtype=torch.int32, device=words.device)
    steps = max(positions.shape[1] for positions, _ in lists).bit_length()
    launch(
        _from_lists, (len(programs), len(words)), base[0],
        uploaded([*table, *programs], words.device, torch.int64), len(lists), words, before, steps, words.shape[1],
        BLOCK=WORDS,
    )  # fmt: skip
    return before if sum(widths) == words.shape[1] else None


def pack(flags: Tensor, words: Tensor) -> None:
    grid = (triton.cdiv(words.shape[1], 64), words.shape[0])
    flags = flags.view(torch.uint8)
    launch(_pack, grid, flags, words, words.shape[1], BLOCK=64, ALIGN=alignment(flags))


def unpack(words: Tensor, flags: Tensor) -> None:
    flags = flags.view(torch.uint8)
    launch(_unpack, _grid(words), words, flags, flags.shape[1], BLOCK=BLOCK, ALIGN=alignment(flags))
