# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch each way. A program takes groups of one parameter, or columns of one that is kept."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.random import Drawn
from thinwire.ops.gpu import alignment, along, kernel, launch, row_of, whole, wire_alignment
from thinwire.ops.quant import Format
from thinwire.ops.quant.triton import _encode, _load, _load_codes, _words
from thinwire.ops.rows import FIELDS, Places
from thinwire.ops.rows import PER_PROGRAM as COPIED
from thinwire.ops.rows.triton import _places
from thinwire.ops.shards import PER_PROGRAM


@triton.jit
def _groups(
    programs, table, BLOCK: tl.constexpr, GROUP: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Of this program's groups: their numbers in their part, the part's first among all and how many it has. Of the low
    halves: where in a shard the part begins, their columns of it, and where these end."""
    number = tl.program_id(0)
    part = table + tl.load(programs + number).to(tl.int64) * FIELDS
    g = (number - tl.load(part + 8)) * BLOCK + tl.arange(0, BLOCK)
    column = g[:, None] * GROUP + tl.arange(0, GROUP // 2)[None, :]
    first, groups = tl.load(part + 3) // GROUP, tl.load(part + 4) // GROUP
    return g, first, groups, tl.load(part), column, whole(tl.load(part + 1), ALIGN)


@triton.jit
def _bytes(codes, first, g, GROUP: tl.constexpr, FOUR: tl.constexpr, WIRE: tl.constexpr):
    """Where those of the low halves of the groups ``first`` + ``g`` are."""
    SIZE: tl.constexpr = GROUP // 2 if FOUR else GROUP
    return along(codes, first * SIZE, WIRE) + g[:, None] * SIZE + tl.arange(0, GROUP // 2)[None, :]


@triton.jit
def _rounded(values, NARROW: tl.constexpr):
    """``values``, float32, to bfloat16, if that is what they stand for: ties to even, every NaN to one."""
    if NARROW:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, 0x7FC00000)
        return bits.to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _put(pointers, values, inside, NARROW: tl.constexpr):
    """Store ``values``, which are rounded; bfloat16 as int16."""
    if NARROW:
        tl.store(pointers, (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(pointers, values, mask=inside)


@kernel
def _write(
    own, held, codes, scales, message, programs, table, keys, grouped, kept, kept_table, HELD: tl.constexpr,
    NARROW: tl.constexpr, STOCHASTIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, FOUR: tl.constexpr,
    COPIED: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """The first ``grouped`` programs encode, the others copy."""
    HALF: tl.constexpr = GROUP // 2
    number = tl.program_id(0)
    if number < grouped:
        g, first, groups, offset, column, end = _groups(programs, table, BLOCK, GROUP, FIELDS, ALIGN)
        values, inside, high_inside = along(own, offset, ALIGN) + column, column < end, column + HALF < end
        low, high = _load(values, inside), _load(values + HALF, high_inside)
        if HELD:
            values = along(held, offset, ALIGN) + column
            low = _rounded(low - _load(values, inside), NARROW)
            high = _rounded(high - _load(values + HALF, high_inside), NARROW)
        key = 0
        if STOCHASTIC:
            key = tl.load(keys + tl.load(programs + number))
        _encode(
            low, high, _bytes(codes, first, g, GROUP, FOUR, WIRE), 0, scales, first + g, first + groups,
            g[:, None] * HALF + tl.arange(0, HALF)[None, :], key, GROUP, BLOCK, FOUR, STOCHASTIC, False,
        )  # fmt: skip
    else:
        place, to, filled, there = _places(number - grouped, kept, kept_table, COPIED, FIELDS)
        tl.store(message + to, tl.load(own + place, mask=there, other=0), mask=filled)


@triton.jit
def _bring(row, held, values, column, end, own, ADD: tl.constexpr, NARROW: tl.constexpr):
    """``values`` are the new ones of ``row`` at ``column``; or they are added to what is there, or, in this rank's
    ``own`` row, to what is in ``held``, which gets the same. ``end``: of the part's columns."""
    if ADD:
        here, there = column < tl.where(own, end, 0), column < tl.where(own, 0, end)
        values += tl.where(own, _load(held + column, here), _load(row + column, there))
    values = _rounded(values, NARROW)
    _put(row + column, values, column < end, NARROW)
    if ADD:
        _put(held + column, values, here, NARROW)


@kernel
def _read(
    codes, codes_stride, scales, scales_stride, message, message_stride, rows, stride, held, mine, programs, table,
    grouped, kept, kept_table, ADD: tl.constexpr, NARROW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    FOUR: tl.constexpr, COPIED: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Of each row: the first ``grouped`` programs decode, the others copy."""
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = GROUP // 2
    target = row_of(rows, stride, row, ALIGN)
    if number < grouped:
        g, first, groups, offset, column, end = _groups(programs, table, BLOCK, GROUP, FIELDS, ALIGN)
        scale = tl.load(scales + row * scales_stride + first + g, mask=g < groups, other=0.0)[:, None]
        sent = _bytes(row_of(codes, codes_stride, row, WIRE), first, g, GROUP, FOUR, WIRE)
        low, high = _load_codes(sent, 0, column < end, HALF, FOUR)
        to, kept_to = along(target, offset, ALIGN), along(held, offset, ALIGN)
        _bring(to, kept_to, low * scale, column, end, row == mine, ADD, NARROW)
        _bring(to, kept_to, high * scale, column + HALF, end, row == mine, ADD, NARROW)
    else:
        place, at, _, there = _places(number - grouped, kept, kept_table, COPIED, FIELDS)
        values = tl.load(message + row * message_stride + at, mask=there, other=0)
        tl.store(target + place, values, mask=there)
        if ADD:  # noqa: SIM102 (one is a constant, the other a value)
            if row == mine:
                tl.store(held + place, values, mask=there)


def _constants(format: Format, encoded: Places, codes: Tensor, *values: Tensor) -> dict[str, Any]:
    aligned = all(of.offset % 16 == of.numel % 16 == 0 for of in encoded.parts) and alignment(*values) == 16
    return {
        "GROUP": format.group, "BLOCK": max(1, PER_PROGRAM // format.group), "FOUR": format.bits == 4,
        "NARROW": values[0].dtype == torch.bfloat16, "COPIED": COPIED, "FIELDS": FIELDS,
        "ALIGN": 16 if aligned else 1, "WIRE": wire_alignment(codes),
    }  # fmt: skip


def write(
    own: Tensor, held: Tensor | None, encoded: Places, kept: Places, format: Format, codes: Tensor, scales: Tensor,
    message: Tensor, drawn: Drawn | None,
) -> None:  # fmt: skip
    other, keys = own if held is None else held, None  # not touched
    if drawn is not None:
        keys, places = drawn.keys(own.device)
        assert places == tuple(range(len(encoded.parts)))
    grouped = len(encoded.programs)
    launch(
        _write, (grouped + len(kept.programs),), _words(own), _words(other), codes[0], scales[0], _words(message),
        encoded.programs, encoded.table, keys, grouped, kept.programs, kept.table, HELD=held is not None,
        STOCHASTIC=drawn is not None, **_constants(format, encoded, codes, own, other),
    )  # fmt: skip


def read(
    codes: Tensor, scales: Tensor, messages: Tensor, encoded: Places, kept: Places, format: Format, rows: Tensor,
    mine: int, held: Tensor | None,
) -> None:  # fmt: skip
    grouped = len(encoded.programs)
    other = rows[0] if held is None else held  # not touched
    launch(
        _read, (grouped + len(kept.programs), len(rows)), codes, scales, _words(messages), _words(rows),
        _words(other), mine, encoded.programs, encoded.table, grouped, kept.programs, kept.table, ADD=held is not None,
        **_constants(format, encoded, codes, rows, other),
    )  # fmt: skip
