"""Plain torch, any device: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from thinwire.ops.rows import CopySegment, CopyTable


def pack(flat: Tensor, copy_table: CopyTable, rows: Tensor) -> None:
    for segment in copy_table.segments:
        pack_segment(flat, segment, rows)


def unpack(rows: Tensor, copy_table: CopyTable, flat: Tensor, add: bool) -> None:
    for segment in copy_table.segments:
        unpack_segment(rows, segment, flat, add)


def pack_segment(flat: Tensor, segment: CopySegment, rows: Tensor) -> None:
    full_rows, body, tail = runs(flat, segment)
    columns = columns_of(rows, segment)
    if body is not None:
        columns[:full_rows, : segment.span].copy_(body)
    if full_rows < segment.rows:
        columns[full_rows:].zero_()
        if tail is not None:
            columns[full_rows, : len(tail)].copy_(tail)
    if segment.width > segment.span:
        columns[:full_rows, segment.span :].zero_()


def unpack_segment(rows: Tensor, segment: CopySegment, flat: Tensor, add: bool) -> None:
    write = Tensor.add_ if add else Tensor.copy_
    full_rows, body, tail = runs(flat, segment)
    columns = columns_of(rows, segment)
    if body is not None:
        write(body, columns[:full_rows, : segment.span])
    if tail is not None:
        write(tail, columns[full_rows, : len(tail)])


def columns_of(rows: Tensor, segment: CopySegment) -> Tensor:
    """View the columns of ``segment`` in the rows' memory: (R, width)."""
    return rows.as_strided((segment.rows, segment.width), (segment.stride, 1), rows.storage_offset() + segment.start)


def runs(flat: Tensor, segment: CopySegment) -> tuple[int, Tensor | None, Tensor | None]:
    """Return the number of full rows, a view (full rows, span) of them, and a view of the last, shorter row."""
    offset, numel, step, _, _, span, _, rows = segment
    full_rows = min(rows, (numel - span) // step + 1) if span and numel >= span else 0
    first = flat.storage_offset() + offset
    body = flat.as_strided((full_rows, span), (step, 1), first) if full_rows else None
    tail_numel = min(numel - full_rows * step, span) if full_rows < rows else 0
    return full_rows, body, flat.as_strided((tail_numel,), (1,), first + full_rows * step) if tail_numel > 0 else None
