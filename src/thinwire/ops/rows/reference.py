"""Plain torch, any device: the specification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from thinwire.ops.rows import Part, Places


def pack(flat: Tensor, places: Places, rows: Tensor) -> None:
    for part in places.parts:
        whole, body, tail = _runs(flat, part)
        target = _columns(rows, part)
        if body is not None:
            target[:whole, : part.span].copy_(body)
        if whole < part.rows:
            target[whole:].zero_()
            if tail is not None:
                target[whole, : len(tail)].copy_(tail)
        if part.width > part.span:
            target[:whole, part.span :].zero_()


def unpack(rows: Tensor, places: Places, flat: Tensor, add: bool) -> None:
    put = Tensor.add_ if add else Tensor.copy_
    for part in places.parts:
        whole, body, tail = _runs(flat, part)
        source = _columns(rows, part)
        if body is not None:
            put(body, source[:whole, : part.span])
        if tail is not None:
            put(tail, source[whole, : len(tail)])


def _columns(rows: Tensor, part: Part) -> Tensor:
    """Those of ``part``: (R, width)."""
    return rows.as_strided((part.rows, part.width), (part.stride, 1), rows.storage_offset() + part.start)


def _runs(flat: Tensor, part: Part) -> tuple[int, Tensor | None, Tensor | None]:
    """How many rows are whole, a view (whole, span) of them, and the rest (the last, shorter row)."""
    offset, numel, step, _, _, span, _, rows = part
    whole = min(rows, (numel - span) // step + 1) if span and numel >= span else 0
    first = flat.storage_offset() + offset
    body = flat.as_strided((whole, span), (step, 1), first) if whole else None
    rest = min(numel - whole * step, span) if whole < rows else 0
    return whole, body, flat.as_strided((rest,), (1,), first + whole * step) if rest > 0 else None
