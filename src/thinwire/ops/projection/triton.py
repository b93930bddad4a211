# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one program per tile. Equals ``reference`` up to rounding.

The Hadamard matrix of size B = A * C is the Kronecker product of those of sizes A and C, so two small matrix products,
along each of the two digits of its row number, transform a tile of B x 16. Blocks of other sizes than 256 take the
reference: smaller factors are too small for a matrix product, and larger tiles do not fit into a program's registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import alignment, kernel, launch, row_of
from thinwire.ops.projection import reference

LANES = tl.constexpr(reference.LANES)
BLOCK, WARPS = 256, 8
FACTORS = {"A": 16, "C": 16}


@triton.jit
def _hadamard(SIZE: tl.constexpr):
    """Make (SIZE, SIZE) of +-1: the sign is the parity of the bits that row and column share."""
    common = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = common ^ (common >> 1)
    return 1.0 - 2.0 * (common & 1).to(tl.float32)


@triton.jit
def _transform(tile, A: tl.constexpr, C: tl.constexpr):
    """Apply H down the A * C rows of ``tile`` (A, C * LANES), row a * C + c in [a, c * LANES :]."""
    tile = tl.dot(_hadamard(A), tile, input_precision="ieee")
    tile = tl.permute(tl.reshape(tile, (A, C, LANES)), (1, 0, 2))
    tile = tl.dot(_hadamard(C), tl.reshape(tile, (C, A * LANES)), input_precision="ieee")
    return tl.reshape(tl.permute(tl.reshape(tile, (C, A, LANES)), (1, 0, 2)), (A, C * LANES))


@kernel
def _project(
    rows, stride, residual, residual_stride, signs, slots, payload, payload_stride, residual_out, out_stride,
    chosen_count, norm, FEEDBACK: tl.constexpr, KEEP: tl.constexpr, A: tl.constexpr, C: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    row, tile_number = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C * LANES)[None, :]
    offset = tl.arange(0, A)[:, None] * (C * LANES) + column
    number = tl.arange(0, A)[:, None] * C + column // LANES
    start = tile_number * (A * C * LANES)
    total = tl.load(row_of(rows, stride, row, ALIGN) + start + offset)
    if FEEDBACK:
        total += tl.load(row_of(residual, residual_stride, row, ALIGN) + start + offset)
    sign = tl.load(signs + number) * norm
    tile = _transform(total * sign, A, C)
    slot = tl.load(slots + number)
    target = payload + row * payload_stride + (tile_number * chosen_count + slot) * LANES + column % LANES
    tl.store(target, tile, mask=slot >= 0)
    if KEEP:
        remainder = _transform(tl.where(slot >= 0, 0.0, tile), A, C)
        tl.store(row_of(residual_out, out_stride, row, ALIGN) + start + offset, remainder * sign)


@kernel
def _reconstruct(
    payload, payload_stride, signs, slots, out, stride, chosen_count, norm, A: tl.constexpr, C: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    row, tile_number = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C * LANES)[None, :]
    offset = tl.arange(0, A)[:, None] * (C * LANES) + column
    number = tl.arange(0, A)[:, None] * C + column // LANES
    slot = tl.load(slots + number)
    source = payload + row * payload_stride + (tile_number * chosen_count + slot) * LANES + column % LANES
    tile = _transform(tl.load(source, mask=slot >= 0, other=0.0), A, C)
    out = row_of(out, stride, row, ALIGN) + tile_number * (A * C * LANES)
    tl.store(out + offset, tile * tl.load(signs + number) * norm)


def _slots(chosen: Tensor, block: int) -> Tensor:
    """Return each row of H D's index in the payload: (block,) int32, -1 for rows that are not sent."""
    slots = torch.full((block,), -1, dtype=torch.int32, device=chosen.device)
    return slots.scatter_(0, chosen, torch.arange(chosen.numel(), dtype=torch.int32, device=chosen.device))


def srht_project(
    rows: Tensor, residual: Tensor | None, signs: Tensor, chosen: Tensor, payload: Tensor, residual_out: Tensor | None
) -> None:
    block = signs.numel()
    if block != BLOCK:
        reference.srht_project(rows, residual, signs, chosen, payload, residual_out)
        return
    old = rows if residual is None else residual
    new = rows if residual_out is None else residual_out  # not written to unless kept
    grid = (rows.shape[1] // (block * reference.LANES), rows.shape[0])
    launch(
        _project, grid, rows, old, signs, _slots(chosen, block), payload, new, chosen.numel(), block**-0.5,
        FEEDBACK=residual is not None, KEEP=residual_out is not None, ALIGN=alignment(rows, old, new), fused=True,
        num_warps=WARPS, **FACTORS,
    )  # fmt: skip


def srht_reconstruct(payload: Tensor, signs: Tensor, chosen: Tensor, out: Tensor) -> None:
    block = signs.numel()
    if block != BLOCK:
        reference.srht_reconstruct(payload, signs, chosen, out)
        return
    grid = (out.shape[1] // (block * reference.LANES), out.shape[0])
    launch(
        _reconstruct, grid, payload, signs, _slots(chosen, block), out, chosen.numel(), block**-0.5,
        ALIGN=alignment(out), fused=True, num_warps=WARPS, **FACTORS,
    )  # fmt: skip
