# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory, and one launch, whatever the number of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.device import uploaded
from thinwire.ops.direction import Part
from thinwire.ops.gpu import alignment, along, kernel, launch, row_of, whole
from thinwire.ops.programs import programs_of

BLOCK = 1024


@triton.jit
def _real(bits):
    """A number whose bits are in the table."""
    return tl.load(bits).to(tl.float32, bitcast=True)


@kernel
def _direction(
    g, g_step, v, v_step, out, out_step, m, m_step, m_out, m_out_step, lr, scale, programs, table, beta1, rest1,
    largest, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """``programs``: of each program the number of its part. ``table``: of each part its start and width, its first
    program, its place in ``lr`` and ``scale``, and the bits of beta2, 1 - beta2 and eps."""
    number, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part = table + tl.load(programs + number) * 7
    column = (number - tl.load(part + 2)) * BLOCK + tl.arange(0, BLOCK)
    start, inside = tl.load(part), column < whole(tl.load(part + 1), ALIGN)
    at, place = tl.multiple_of(start, ALIGN) + column, tl.load(part + 3)
    x = tl.load(along(row_of(g, g_step, row, ALIGN), at, ALIGN), mask=inside, other=0)
    old = tl.load(along(row_of(v, v_step, row, ALIGN), at, ALIGN), mask=inside, other=0)
    second = tl.minimum(_real(part + 4) * old + _real(part + 5) * x * x, largest)
    tl.store(along(row_of(out, out_step, row, ALIGN), at, ALIGN), second, mask=inside)
    if MOMENTUM:
        x = beta1 * tl.load(along(row_of(m, m_step, row, ALIGN), at, ALIGN), mask=inside, other=0) + rest1 * x
        tl.store(along(row_of(m_out, m_out_step, row, ALIGN), at, ALIGN), x, mask=inside)
    root = tl.sqrt_rn(second * tl.load(scale + place)) + _real(part + 6)
    x = tl.div_rn(tl.load(lr + place) * x, tl.where(inside, root, 1.0))
    tl.store(along(row_of(g, g_step, row, ALIGN), at, ALIGN), x, mask=inside)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    parts: Sequence[Part], lr: Tensor, scale: Tensor, beta1: float,
) -> None:  # fmt: skip
    before, after = (second, second_out) if first is None or first_out is None else (first, first_out)
    programs, firsts = programs_of((part.width for part in parts), BLOCK)
    table: list[int] = []
    for part, program in zip(parts, firsts, strict=True):
        knobs = np.array([part.beta2, 1 - part.beta2, part.eps], np.float32).view(np.int32)
        table += [part.start, part.width, program, part.place, *knobs.tolist()]
    aligned = all(part.start % 16 == part.width % 16 == 0 for part in parts)
    launch(
        _direction, (len(programs), len(rows)), rows, second, second_out, before, after, lr, scale,
        uploaded(programs, rows.device), uploaded(table, rows.device), beta1, 1 - beta1,
        torch.finfo(torch.float32).max, MOMENTUM=first is not None, BLOCK=BLOCK,
        ALIGN=alignment(rows, second, second_out, before, after) if aligned else 1,
    )  # fmt: skip
