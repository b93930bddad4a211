# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import alignment, kernel, launch, row_of, whole

BLOCK = 1024


@kernel
def _direction(
    g, g_step, v, v_step, out, out_step, m, m_step, m_out, m_out_step, lr, scale, beta1, rest1, beta2, rest2, eps, n,
    largest, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < whole(n, ALIGN)
    x = tl.load(row_of(g, g_step, row, ALIGN) + at, mask=inside, other=0)
    second = beta2 * tl.load(row_of(v, v_step, row, ALIGN) + at, mask=inside, other=0) + rest2 * x * x
    second = tl.minimum(second, largest)
    tl.store(row_of(out, out_step, row, ALIGN) + at, second, mask=inside)
    if MOMENTUM:
        x = beta1 * tl.load(row_of(m, m_step, row, ALIGN) + at, mask=inside, other=0) + rest1 * x
        tl.store(row_of(m_out, m_out_step, row, ALIGN) + at, x, mask=inside)
    root = tl.sqrt_rn(second * tl.load(scale)) + eps
    tl.store(row_of(g, g_step, row, ALIGN) + at, tl.div_rn(tl.load(lr) * x, tl.where(inside, root, 1.0)), mask=inside)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    count, n = rows.shape
    before, after = (second, second_out) if first is None or first_out is None else (first, first_out)
    launch(
        _direction, (triton.cdiv(n, BLOCK), count), rows, second, second_out, before, after, lr, scale, beta1,
        1 - beta1, beta2, 1 - beta2, eps, n, 3.4028234663852886e38, MOMENTUM=first is not None, BLOCK=BLOCK,
        ALIGN=alignment(rows, second, second_out, before, after),
    )  # fmt: skip
