"""Plain torch: the specification, for one moment after the other. Lines are those of SCAPE's Alg. 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.ops.mask import reference as masks
from thinwire.ops.moments import Moments, MomentSegment, Sent, each_segment


def add_up(gradient: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool) -> None:
    _add_up(gradient, residual, moments, sent.words[0], beta1, choose)
    gather(gradient.unsqueeze(0), sent)


@each_segment
def _add_up(
    gradient: Tensor, residual: Tensor, segment: MomentSegment, words: Tensor, beta1: float, choose: bool
) -> None:
    m = segment.moment.numel()
    gradient.mul_(1 - beta1).add_(residual)
    gradient[:m].add_(segment.moment, alpha=beta1)  # l. 10
    if choose and segment.scores is not None:
        segment.scores.copy_(gradient)  # for l. 15
    gradient[:m].sub_(torch.where(masks.flags_of(words)[:m], beta1 * segment.moment, 0))


def blend(
    rows: Tensor, residual: Tensor, own_row: int, common: Tensor, moments: Moments, beta1: float, sent: Sent,
    choose: bool,
) -> None:  # fmt: skip
    rows.mul_(1 - beta1).add_(residual)  # l. 10
    if choose:
        score(rows[own_row], common, moments, beta1)  # for l. 15
    gather(rows, sent)


def gather(rows: Tensor, sent: Sent, split: Callable[..., None] = masks.gather_keep) -> None:
    """Split ``rows`` at the mask into payload and residual; ``split``: this or another backend's pass."""
    split(rows, None, sent.words, sent.payload, sent.residual_out)  # l. 11-13
    if sent.share != 1.0:
        sent.payload.mul_(sent.share)


@each_segment
def score(row: Tensor, common: Tensor, segment: MomentSegment, beta1: float) -> None:
    """Make every segment's scores = ``row`` + ``common`` + b1 moment."""
    if segment.scores is not None:
        torch.add(row, common, out=segment.scores)
        segment.scores[: segment.moment.numel()].add_(segment.moment, alpha=beta1)


def advance(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, next_moment: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, bit_offsets: Tensor | None,
) -> None:  # fmt: skip
    if payload.data_ptr() != gradient.data_ptr():
        masks.scatter(payload.unsqueeze(0), words.unsqueeze(0), gradient.unsqueeze(0))
    _advance(gradient, moments, words, beta1, next_moment, common, common_out)


@each_segment
def _advance(
    mean: Tensor, segment: MomentSegment, words: Tensor, beta1: float, next_moment: Tensor, common: Tensor | None,
    common_out: Tensor | None,
) -> None:  # fmt: skip
    m, on_mask = segment.moment.numel(), masks.flags_of(words)
    if common is not None and common_out is not None:
        mean.add_(torch.where(on_mask, common, 0))
        unsent = common.clone()
        unsent[:m].add_(segment.moment, alpha=beta1)
        common_out.copy_(torch.where(on_mask, 0, unsent))
    next_moment[:m].copy_(torch.where(on_mask[:m], beta1 * segment.moment + mean[:m], 0))  # l. 16
    mean.div_(1 - beta1)  # l. 17: (b - b1 m) / (1-b1)
