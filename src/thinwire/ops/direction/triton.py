# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory, and one launch, whatever the number of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.base.device import upload
from thinwire.ops.direction import DirectionSegment
from thinwire.ops.gpu import alignment, along, kernel, launch, row_of, segment_of, whole
from thinwire.ops.programs import per_stream, programs_on

BLOCK, FIELDS = 1024, 6
LARGEST = torch.finfo(torch.float32).max


@triton.jit
def _real(bits):
    """Read a float32 whose bits are in the table."""
    return tl.load(bits).to(tl.float32, bitcast=True)


@triton.jit
def second_of(x, old, segment, largest):
    """Return v' of the gradients ``x`` and v."""
    return tl.minimum(_real(segment + 3) * old + _real(segment + 4) * x * x, largest)


@triton.jit
def step_along(x, second, segment, lr, scale, factor, inside):
    """Return Adam's step along ``x``, ``inside``, with v' = ``second``."""
    index = tl.load(segment + 2)
    root = tl.sqrt_rn(second * (tl.load(factor) * tl.load(scale + index))) + _real(segment + 5)
    return tl.div_rn(tl.load(lr + index) * x, tl.where(inside, root, 1.0))


@kernel
def _direction(
    g, g_step, v, v_step, v_out, v_out_step, m, m_step, m_out, m_out_step, lr, scale, factor, programs, table, beta1,
    rest1, largest, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Take each segment's start, width, index in ``lr`` and ``scale``, bits of beta2, 1 - beta2, eps from ``table``."""
    row, _, segment, column = segment_of(programs, table, BLOCK, FIELDS)
    start, inside = tl.load(segment), column < whole(tl.load(segment + 1), ALIGN)
    element = tl.multiple_of(start, ALIGN) + column
    x = tl.load(along(row_of(g, g_step, row, ALIGN), element, ALIGN), mask=inside, other=0)
    old = tl.load(along(row_of(v, v_step, row, ALIGN), element, ALIGN), mask=inside, other=0)
    second = second_of(x, old, segment, largest)
    tl.store(along(row_of(v_out, v_out_step, row, ALIGN), element, ALIGN), second, mask=inside)
    if MOMENTUM:
        x = beta1 * tl.load(along(row_of(m, m_step, row, ALIGN), element, ALIGN), mask=inside, other=0) + rest1 * x
        tl.store(along(row_of(m_out, m_out_step, row, ALIGN), element, ALIGN), x, mask=inside)
    x = step_along(x, second, segment, lr, scale, factor, inside)
    tl.store(along(row_of(g, g_step, row, ALIGN), element, ALIGN), x, mask=inside)


@per_stream
def tables(device: torch.device, segments: tuple[DirectionSegment, ...]) -> tuple[Tensor, Tensor, bool]:
    """Return the programs, the table, and whether every segment begins and ends at a multiple of 16."""
    table: list[int] = []
    for segment in segments:
        knobs = np.array([segment.beta2, 1 - segment.beta2, segment.eps], np.float32).view(np.int32)
        table += [segment.start, segment.width, segment.tensor_index, *knobs.tolist()]
    aligned = all(segment.start % 16 == segment.width % 16 == 0 for segment in segments)
    return programs_on(device, (segment.width for segment in segments), BLOCK), upload(table, device), aligned


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    segments: Sequence[DirectionSegment], lr: Tensor, scale: Tensor, factor: Tensor, beta1: float,
) -> None:  # fmt: skip
    first_in, first_out_memory = (second, second_out) if first is None or first_out is None else (first, first_out)
    programs, table, aligned = tables(rows.device, tuple(segments))
    launch(
        _direction, (len(programs) // 2, len(rows)), rows, second, second_out, first_in, first_out_memory, lr, scale,
        factor, programs, table, beta1, 1 - beta1, LARGEST,
        MOMENTUM=first is not None, BLOCK=BLOCK, FIELDS=FIELDS,
        ALIGN=alignment(rows, second, second_out, first_in, first_out_memory) if aligned else 1,
    )  # fmt: skip
