"""Plain torch: the specification, for one moment after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.ops.mask import reference as masks
from thinwire.ops.moments import Moments, Part, each


@each
def add_up(
    gradient: Tensor, residual: Tensor, part: Part, words: Tensor, beta1: float, choose: bool
) -> None:
    m = part.moment.numel()
    gradient.mul_(1 - beta1).add_(residual)
    gradient[:m].add_(part.moment, alpha=beta1)
    if choose and part.scores is not None:
        part.scores.copy_(gradient)
    gradient[:m].sub_(torch.where(masks.flags_of(words)[:m], beta1 * part.moment, 0))


def blend(
    rows: Tensor, residual: Tensor, mine: int, common: Tensor, moments: Moments, beta1: float, choose: bool
) -> None:
    rows.mul_(1 - beta1).add_(residual)
    if choose:
        score(rows[mine], common, moments, beta1)


@each
def score(row: Tensor, common: Tensor, part: Part, beta1: float) -> None:
    """The scores of every part = ``row`` + ``common`` + b1 moment."""
    if part.scores is not None:
        torch.add(row, common, out=part.scores)
        part.scores[: part.moment.numel()].add_(part.moment, alpha=beta1)


@each
def settle(
    mean: Tensor, part: Part, words: Tensor, beta1: float, given: Tensor, common: Tensor | None,
    common_out: Tensor | None,
) -> None:  # fmt: skip
    m, on = part.moment.numel(), masks.flags_of(words)
    if common is not None and common_out is not None:
        mean.add_(torch.where(on, common, 0))
        rest = common.clone()
        rest[:m].add_(part.moment, alpha=beta1)
        common_out.copy_(torch.where(on, 0, rest))
    given[:m].copy_(torch.where(on[:m], beta1 * part.moment + mean[:m], 0))
    mean.div_(1 - beta1)
