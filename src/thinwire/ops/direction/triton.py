# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _direction(
    g, g_step, v, v_step, out, out_step, m, m_step, m_out, m_out_step, lr, scale, beta1, rest1, beta2, rest2, eps, n,
    largest, MOMENTUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(g + row * g_step + at, mask=inside, other=0)
    second = beta2 * tl.load(v + row * v_step + at, mask=inside, other=0) + rest2 * x * x
    second = tl.minimum(second, largest)
    tl.store(out + row * out_step + at, second, mask=inside)
    if MOMENTUM:
        x = beta1 * tl.load(m + row * m_step + at, mask=inside, other=0) + rest1 * x
        tl.store(m_out + row * m_out_step + at, x, mask=inside)
    root = tl.sqrt_rn(second * tl.load(scale)) + eps
    tl.store(g + row * g_step + at, tl.div_rn(tl.load(lr) * x, tl.where(inside, root, 1.0)), mask=inside)


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None, lr: Tensor,
    scale: Tensor, beta1: float, beta2: float, eps: float,
) -> None:  # fmt: skip
    count, n = rows.shape
    before, after = (second, second_out) if first is None or first_out is None else (first, first_out)
    _direction[(triton.cdiv(n, BLOCK), count)](
        rows, rows.stride(0), second, second.stride(0), second_out, second_out.stride(0), before, before.stride(0),
        after, after.stride(0), lr, scale, beta1, 1 - beta1, beta2, 1 - beta2, eps, n,
        3.4028234663852886e38, MOMENTUM=first is not None, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
