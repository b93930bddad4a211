# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch each way. A program takes groups of one encoded parameter, or columns of one copied parameter."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.random import Seeds
from thinwire.ops.gpu import alignment, along, kernel, launch, row_of, whole, wire_alignment
from thinwire.ops.quant import Format
from thinwire.ops.quant.triton import _encode, _load, _load_codes, _words
from thinwire.ops.rows import FIELDS, CopyTable
from thinwire.ops.rows import PER_PROGRAM as COPIED
from thinwire.ops.rows.triton import _copy_offsets
from thinwire.ops.shards import PER_PROGRAM


@triton.jit
def _locate_groups(
    programs, table, BLOCK: tl.constexpr, GROUP: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Return this program's groups in their segment, the segment's first group, number of groups and offset in a shard,
    the columns of the groups' low halves in the segment, and the columns' end."""
    program = programs + 2 * tl.program_id(0)
    segment = table + tl.load(program).to(tl.int64) * FIELDS
    group = tl.load(program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + tl.arange(0, GROUP // 2)[None, :]
    first_group, groups = tl.load(segment + 3) // GROUP, tl.load(segment + 4) // GROUP
    return group, first_group, groups, tl.load(segment), column, whole(tl.load(segment + 1), ALIGN)


@triton.jit
def _code_pointers(codes, first_group, group, GROUP: tl.constexpr, FOUR: tl.constexpr, WIRE: tl.constexpr):
    """Return pointers to the codes of the low halves of the groups ``first_group`` + ``group``."""
    SIZE: tl.constexpr = GROUP // 2 if FOUR else GROUP
    return along(codes, first_group * SIZE, WIRE) + group[:, None] * SIZE + tl.arange(0, GROUP // 2)[None, :]


@triton.jit
def _rounded(values, NARROW: tl.constexpr):
    """Round ``values``, float32, to bfloat16 if ``NARROW``: ties to even, every NaN to one."""
    if NARROW:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536, 0x7FC00000)
        return bits.to(tl.float32, bitcast=True)
    else:
        return values


@triton.jit
def _store_values(pointers, values, inside, NARROW: tl.constexpr):
    """Store ``values``, which are rounded; bfloat16 as int16."""
    if NARROW:
        tl.store(pointers, (values.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(pointers, values, mask=inside)


@kernel
def _write(
    own, resident, codes, scales, message, programs, table, keys, group_programs, copy_programs, copy_table,
    SUBTRACT: tl.constexpr, NARROW: tl.constexpr, STOCHASTIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    FOUR: tl.constexpr, COPIED: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr, WIRE: tl.constexpr,
):  # fmt: skip
    """Encode groups in the first ``group_programs`` programs, and copy columns in the others."""
    HALF: tl.constexpr = GROUP // 2
    program = tl.program_id(0)
    if program < group_programs:
        group, first_group, groups, offset, column, numel = _locate_groups(programs, table, BLOCK, GROUP, FIELDS, ALIGN)
        values, inside, high_inside = along(own, offset, ALIGN) + column, column < numel, column + HALF < numel
        low, high = _load(values, inside), _load(values + HALF, high_inside)
        if SUBTRACT:
            values = along(resident, offset, ALIGN) + column
            low = _rounded(low - _load(values, inside), NARROW)
            high = _rounded(high - _load(values + HALF, high_inside), NARROW)
        key = 0
        if STOCHASTIC:
            key = tl.load(keys + tl.load(programs + 2 * program))
        _encode(
            low, high, _code_pointers(codes, first_group, group, GROUP, FOUR, WIRE), 0, scales, first_group + group,
            first_group + groups, group[:, None] * HALF + tl.arange(0, HALF)[None, :], key, GROUP, BLOCK, FOUR,
            STOCHASTIC, False,
        )  # fmt: skip
    else:
        copy_program = program - group_programs
        source, target, filled, has_value = _copy_offsets(copy_program, copy_programs, copy_table, COPIED, FIELDS)
        tl.store(message + target, tl.load(own + source, mask=has_value, other=0), mask=filled)


@triton.jit
def _update(row, resident, values, column, numel, is_own, ADD: tl.constexpr, NARROW: tl.constexpr):
    """Store ``values`` to ``row`` at ``column`` < ``numel``. ``ADD`` adds ``row`` to them or, in this rank's own row,
    ``resident``, which becomes the same."""
    if ADD:
        in_resident, in_row = column < tl.where(is_own, numel, 0), column < tl.where(is_own, 0, numel)
        values += tl.where(is_own, _load(resident + column, in_resident), _load(row + column, in_row))
    values = _rounded(values, NARROW)
    _store_values(row + column, values, column < numel, NARROW)
    if ADD:
        _store_values(resident + column, values, in_resident, NARROW)


@kernel
def _read(
    codes, codes_stride, scales, scales_stride, message, message_stride, rows, stride, resident, own_row, programs,
    table, group_programs, copy_programs, copy_table, ADD: tl.constexpr, NARROW: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, FOUR: tl.constexpr, COPIED: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr,
    WIRE: tl.constexpr,
):  # fmt: skip
    """Decode each row's groups in the first ``group_programs`` programs, and copy columns in the others."""
    program, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = GROUP // 2
    row_start = row_of(rows, stride, row, ALIGN)
    if program < group_programs:
        group, first_group, groups, offset, column, numel = _locate_groups(programs, table, BLOCK, GROUP, FIELDS, ALIGN)
        scale = tl.load(scales + row * scales_stride + first_group + group, mask=group < groups, other=0.0)[:, None]
        sent = _code_pointers(row_of(codes, codes_stride, row, WIRE), first_group, group, GROUP, FOUR, WIRE)
        low, high = _load_codes(sent, 0, column < numel, HALF, FOUR)
        columns, resident_columns = along(row_start, offset, ALIGN), along(resident, offset, ALIGN)
        _update(columns, resident_columns, low * scale, column, numel, row == own_row, ADD, NARROW)
        _update(columns, resident_columns, high * scale, column + HALF, numel, row == own_row, ADD, NARROW)
    else:
        copy_program = program - group_programs
        target, source, _, has_value = _copy_offsets(copy_program, copy_programs, copy_table, COPIED, FIELDS)
        values = tl.load(message + row * message_stride + source, mask=has_value, other=0)
        tl.store(row_start + target, values, mask=has_value)
        if ADD:  # noqa: SIM102 (one is a constant, the other a value)
            if row == own_row:
                tl.store(resident + target, values, mask=has_value)


def _constants(format: Format, encoded: CopyTable, codes: Tensor, *values: Tensor) -> dict[str, Any]:
    aligned = all(segment.offset % 16 == segment.numel % 16 == 0 for segment in encoded.segments)
    aligned = aligned and alignment(*values) == 16
    return {
        "GROUP": format.group, "BLOCK": max(1, PER_PROGRAM // format.group), "FOUR": format.bits == 4,
        "NARROW": values[0].dtype == torch.bfloat16, "COPIED": COPIED, "FIELDS": FIELDS,
        "ALIGN": 16 if aligned else 1, "WIRE": wire_alignment(codes),
    }  # fmt: skip


def write(
    own: Tensor, resident: Tensor | None, encoded: CopyTable, copied: CopyTable, format: Format, codes: Tensor,
    scales: Tensor, message: Tensor, drawn: Seeds | None,
) -> None:  # fmt: skip
    subtrahend, keys = own if resident is None else resident, None  # not touched
    if drawn is not None:
        keys, key_indices = drawn.keys(own.device)
        assert key_indices == tuple(range(len(encoded.segments)))
    group_programs = len(encoded.programs) // 2
    launch(
        _write, (group_programs + len(copied.programs) // 2,), _words(own), _words(subtrahend), codes[0], scales[0],
        _words(message), encoded.programs, encoded.table, keys, group_programs, copied.programs, copied.table,
        SUBTRACT=resident is not None, STOCHASTIC=drawn is not None,
        **_constants(format, encoded, codes, own, subtrahend),
    )  # fmt: skip


def read(
    codes: Tensor, scales: Tensor, messages: Tensor, encoded: CopyTable, copied: CopyTable, format: Format,
    rows: Tensor, own_row: int, resident: Tensor | None,
) -> None:  # fmt: skip
    group_programs = len(encoded.programs) // 2
    target = rows[0] if resident is None else resident  # not touched
    launch(
        _read, (group_programs + len(copied.programs) // 2, len(rows)), codes, scales, _words(messages), _words(rows),
        _words(target), own_row, encoded.programs, encoded.table, group_programs, copied.programs, copied.table,
        ADD=resident is not None, **_constants(format, encoded, codes, rows, target),
    )  # fmt: skip
