"""One mask for all ranks, of which a few ranks choose a part each, by their own values.

A rank knows its own values alone. Where one chooses for all, the large values of the others wait, and what they send in
their place is noise; of four choosers (each a quarter of the positions) one value in four is large somewhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.bucket import Bucket
from thinwire.ops import mask as masks


def choosers_of(most: int, density: float, ranks: int) -> int:
    """How many of the ranks choose a mask, ``most`` at most. At a high ``density`` all would choose the same: one."""
    return min(ranks, most) if density * most <= 1 else 1


def settle(bucket: Bucket, words: Tensor, counts: Sequence[int]) -> Tensor:
    """``words`` (R, n / 64), what several have chosen, with ``counts[i]`` bits in each row of the bucket's segment i.

    Where choosers agree, a few places are left: they go to the first positions that are free.
    """
    flags = masks.unpack(words, bucket.scratch("chosen flags", bucket.shape, torch.bool))
    scores = bucket.scratch("chosen scores", bucket.shape, torch.float32).copy_(flags)
    for segment, count in zip(bucket.segments, counts, strict=True):
        masks.topk_mask(scores[:, segment.columns], count, words[:, segment.groups(masks.WORD)])
    return words
