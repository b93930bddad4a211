"""Plain torch: the specification, for one moment after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.ops.mask import reference as masks
from thinwire.ops.moments import each


def blend(gradient: Tensor, residual: Tensor, beta1: float) -> None:
    gradient.mul_(1 - beta1).add_(residual)


@each
def add_up(gradient: Tensor, residual: Tensor, moment: Tensor, beta1: float) -> None:
    blend(gradient, residual, beta1)
    gradient[: moment.numel()].add_(moment, alpha=beta1)


@each
def take(values: Tensor, moment: Tensor, words: Tensor, beta1: float) -> None:
    m = moment.numel()
    values[:m].sub_(torch.where(masks.flags_of(words)[:m], beta1 * moment, 0))


@each
def rejoin(mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor) -> None:
    on = masks.flags_of(words)
    mean.add_(torch.where(on, common, 0))
    rest = common.clone()
    rest[: moment.numel()].add_(moment, alpha=beta1)
    common_out.copy_(torch.where(on, 0, rest))


@each
def settle(mean: Tensor, moment: Tensor, words: Tensor, beta1: float, given: Tensor) -> None:
    m = moment.numel()
    given[:m].copy_(torch.where(masks.flags_of(words)[:m], beta1 * moment + mean[:m], 0))
    mean.div_(1 - beta1)
