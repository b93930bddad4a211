"""Plain torch: the specification, for one moment after the other. Lines are those of SCAPE's Alg. 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.ops.mask import reference as masks
from thinwire.ops.moments import Moments, Part, Sent, each


def add_up(gradient: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool) -> None:
    _add_up(gradient, residual, moments, sent.words[0], beta1, choose)
    gather(gradient.unsqueeze(0), sent)


@each
def _add_up(gradient: Tensor, residual: Tensor, part: Part, words: Tensor, beta1: float, choose: bool) -> None:
    m = part.moment.numel()
    gradient.mul_(1 - beta1).add_(residual)
    gradient[:m].add_(part.moment, alpha=beta1)  # l. 10
    if choose and part.scores is not None:
        part.scores.copy_(gradient)  # for l. 15
    gradient[:m].sub_(torch.where(masks.flags_of(words)[:m], beta1 * part.moment, 0))


def blend(
    rows: Tensor, residual: Tensor, mine: int, common: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool
) -> None:
    rows.mul_(1 - beta1).add_(residual)  # l. 10
    if choose:
        score(rows[mine], common, moments, beta1)  # for l. 15
    gather(rows, sent)


def gather(rows: Tensor, sent: Sent, by: Callable[..., None] = masks.gather_keep) -> None:
    """Split ``rows`` at the mask into what is sent and what is left, ``by`` this or another backend's pass."""
    by(rows, None, sent.words, sent.payload, sent.left)  # l. 11-13
    if sent.share != 1.0:
        sent.payload.mul_(sent.share)


@each
def score(row: Tensor, common: Tensor, part: Part, beta1: float) -> None:
    """The scores of every part = ``row`` + ``common`` + b1 moment."""
    if part.scores is not None:
        torch.add(row, common, out=part.scores)
        part.scores[: part.moment.numel()].add_(part.moment, alpha=beta1)


def settle(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, given: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, before: Tensor | None,
) -> None:  # fmt: skip
    if payload.data_ptr() != gradient.data_ptr():
        masks.scatter(payload.unsqueeze(0), words.unsqueeze(0), gradient.unsqueeze(0))
    _settle(gradient, moments, words, beta1, given, common, common_out)


@each
def _settle(
    mean: Tensor, part: Part, words: Tensor, beta1: float, given: Tensor, common: Tensor | None,
    common_out: Tensor | None,
) -> None:  # fmt: skip
    m, on = part.moment.numel(), masks.flags_of(words)
    if common is not None and common_out is not None:
        mean.add_(torch.where(on, common, 0))
        rest = common.clone()
        rest[:m].add_(part.moment, alpha=beta1)
        common_out.copy_(torch.where(on, 0, rest))
    given[:m].copy_(torch.where(on[:m], beta1 * part.moment + mean[:m], 0))  # l. 16
    mean.div_(1 - beta1)  # l. 17: (b - b1 m) / (1-b1)
