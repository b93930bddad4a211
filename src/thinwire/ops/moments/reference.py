"""Plain torch: the specification, one moment after the other. Lines are those of SCAPE's Alg. 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.ops.mask import reference as masks
from thinwire.ops.moments import Moments, Sent


def add_up(
    rows: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool, common: Tensor | None,
    own_row: int,
) -> None:  # fmt: skip
    rows.mul_(1 - beta1).add_(residual)  # l. 10
    if common is None:
        for segment, words, total in moments.split(sent.words[0], rows[0]):
            m = segment.moment.numel()
            total[:m].add_(segment.moment, alpha=beta1)  # l. 10
            if choose and segment.scores is not None:
                segment.scores.copy_(total)  # for l. 15
            total[:m].sub_(torch.where(masks.flags_of(words)[:m], beta1 * segment.moment, 0))
    elif choose:
        score(rows[own_row], common, moments, beta1)
    gather(rows, sent)


def gather(rows: Tensor, sent: Sent, split: Callable[..., None] = masks.gather_keep) -> None:
    """Split ``rows`` at the mask into payload and residual, by a backend's ``gather_keep``."""
    split(rows, None, sent.words, sent.payload, sent.residual_out)  # l. 11-13
    if sent.share != 1.0:
        sent.payload.mul_(sent.share)


def score(row: Tensor, common: Tensor, moments: Moments, beta1: float) -> None:
    """Set every segment's scores to ``row`` + ``common`` + b1 moment, for l. 15."""
    for segment in moments.segments:
        if segment.scores is not None:
            torch.add(row[segment.columns], common[segment.columns], out=segment.scores)
            segment.scores[: segment.moment.numel()].add_(segment.moment, alpha=beta1)


def advance(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, next_moment: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, bit_offsets: Tensor | None,
) -> None:  # fmt: skip
    if payload.data_ptr() != gradient.data_ptr():
        masks.scatter(payload.unsqueeze(0), words.unsqueeze(0), gradient.unsqueeze(0))
    old, new = (gradient if memory is None else memory for memory in (common, common_out))
    for segment, bits, mean, next_m, x, next_x in moments.split(words, gradient, next_moment, old, new):
        m, on_mask = segment.moment.numel(), masks.flags_of(bits)
        if common is not None:
            mean.add_(torch.where(on_mask, x, 0))
            unsent = x.clone()
            unsent[:m].add_(segment.moment, alpha=beta1)
            next_x.copy_(torch.where(on_mask, 0, unsent))
        next_m[:m].copy_(torch.where(on_mask[:m], beta1 * segment.moment + mean[:m], 0))  # l. 16
        mean.div_(1 - beta1)  # l. 17: (b - b1 m) / (1-b1)
