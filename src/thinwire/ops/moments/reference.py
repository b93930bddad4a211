"""Plain torch: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.ops.mask import reference as masks


def score(gradient: Tensor, residual: Tensor, common: Tensor, moment: Tensor, beta1: float, out: Tensor) -> None:
    torch.add(gradient, residual, out=out)
    out.add_(common)
    out[: moment.numel()].add_(moment, alpha=beta1)


def settle(
    mean: Tensor, common: Tensor, moment: Tensor, words: Tensor, beta1: float, common_out: Tensor, given: Tensor
) -> None:
    flags = torch.empty((1, mean.numel()), dtype=torch.bool, device=mean.device)
    masks.unpack(words.view(1, -1), flags)
    on, m = flags[0], moment.numel()
    sent = torch.where(on, mean + common, 0)
    old = beta1 * moment
    given.copy_(torch.where(on[:m], old + sent[:m], 0))
    mean.copy_(sent / (1 - beta1))
    rest = common.clone()
    rest[:m] += old
    common_out.copy_(torch.where(on, 0, rest))
