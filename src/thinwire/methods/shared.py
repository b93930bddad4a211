"""One mask for all ranks, of which a few ranks choose a part each, by their own values.

A rank knows its own values alone. Where one chooses for all, the large values of the others wait, and what they send in
their place is noise; of four choosers (each a quarter of the positions) one value in four is large somewhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    parts = [(segment.groups(masks.WORD), k) for segment, k in zip(bucket.segments, counts, strict=True)]
    return masks.fill(words, parts)
