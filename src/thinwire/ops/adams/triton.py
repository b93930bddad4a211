# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one pass over memory."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import alignment, along, cdiv, kernel, launch, whole

BLOCK = 1024


@kernel
def _adams(
    weight, moment, gradient, next_moment, rate, beta1, rest1, beta2, rest2, eps, keep, root, n,
    HAS_NEXT: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < whole(n, ALIGN)
    old = tl.load(along(moment, element, ALIGN), mask=inside, other=0).to(tl.float32)
    g = tl.load(along(gradient, element, ALIGN), mask=inside, other=0).to(tl.float32)
    new = beta1 * old + rest1 * g
    if HAS_NEXT:
        given = tl.load(along(next_moment, element, ALIGN), mask=inside, other=0).to(tl.float32)
        rounding = tl.abs(given - beta1 * old) * 0.0078125 + tl.abs(given) * 9.5367431640625e-7  # ROUNDED, EXACT
        rounding += 7.52316384526264e-37  # LEAST
        new = tl.where((given != 0) & (tl.abs(new - given) > rounding), new, given)
    denominator = tl.sqrt_rn(beta2 * old * old + rest2 * g * g) * root + eps
    w = tl.load(along(weight, element, ALIGN), mask=inside, other=0).to(tl.float32)
    w = w * keep - rate * tl.div_rn(new, tl.where(inside, denominator, 1.0))
    tl.store(along(weight, element, ALIGN), w.to(weight.dtype.element_ty), mask=inside)
    tl.store(along(moment, element, ALIGN), new.to(moment.dtype.element_ty), mask=inside)


def adams(
    weight: Tensor, moment: Tensor, gradient: Tensor, next_moment: Tensor | None, rate: float, beta1: float,
    beta2: float, eps: float, keep: float, root: float,
) -> None:  # fmt: skip
    n = weight.numel()
    source = moment if next_moment is None else next_moment
    launch(
        _adams, (cdiv(n, BLOCK),), weight, moment, gradient, source, rate, beta1, 1 - beta1, beta2, 1 - beta2,
        eps, keep, root, n, HAS_NEXT=next_moment is not None, BLOCK=BLOCK,
        ALIGN=alignment(weight, moment, gradient, source),
    )  # fmt: skip
