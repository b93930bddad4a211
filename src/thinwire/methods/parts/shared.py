"""One mask for all ranks, of which a few ranks choose a part each, by their own values.

A rank knows its own values alone. Where one chooses for all, the large values of the others wait, and what they send in
their place is noise; of four choosers (each a quarter of the positions) one value in four is large somewhere else.

In update space (``methods/update.py``) a step is nothing off the mask, so that sharded weights are gathered at it, too
(``methods/atmask.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.base.knobs import refuse_idle
from thinwire.core.bucket import Bucket, Shard
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card
from thinwire.core.run import Run, Step
from thinwire.core.weights import Message
from thinwire.methods.parts.atmask import Unfolded, WeightsAtMask
from thinwire.methods.parts.feedback import ErrorFeedback
from thinwire.ops import mask as masks


def choosers_of(most: int, density: float, ranks: int) -> int:
    """How many of the ranks choose a mask, ``most`` at most. At a high ``density`` all would choose the same: one."""
    return min(ranks, most) if density * most <= 1 else 1


@dataclass
class SharedMask(ErrorFeedback):
    """What methods have in common that can send values at one mask for all ranks: sharded weights follow it.

    Args:
        weights: with one mask for all ranks (mask="shared", or "merged") and feedback="update", what is gathered of
            weights that FSDP2 shards: "masked", the values at the mask (a copy of all weights stays in memory,
            float32), or "dense"; the same weights bit for bit. "auto": masked where FSDP2 gathers float32, dense where
            MixedPrecisionPolicy(param_dtype=) has it gather fewer bits, which cannot be kept up to date.
    """

    weights: Literal["auto", "masked", "dense"] = field(default="auto", kw_only=True)

    def __post_init__(self) -> None:
        self._encodes_weights = False
        super().__post_init__()
        if self.feedback == "gradient":
            refuse_idle(self, "feedback='gradient' (the optimizer moves all weights)", "weights")

    @property
    def at_one_mask(self) -> bool:
        """Does what is sent lie at one mask for all ranks, which leaves something out?"""
        raise NotImplementedError

    def begin(self, run: Run) -> None:
        super().begin(run)
        of_steps = self.at_one_mask and self.feedback == "update"
        self._gathered = WeightsAtMask(self.name, self.weights if of_steps else "dense", run)
        self._encodes_weights = self._gathered.encoded

    def describe(self) -> Card:
        return replace(super().describe(), encodes_weights=self._encodes_weights)

    def words_of(self, bucket: Bucket) -> Tensor:
        """Memory for a mask of the bucket's rows, (R, n / 64): until weights have been gathered at it, if they are."""
        rows, n = bucket.shape
        memory = bucket.buffer if self._encodes_weights else bucket.scratch
        return memory("words", (rows, n // masks.WORD), torch.int64)

    def settle(self, bucket: Bucket, words: Tensor, counts: Sequence[int], choosers: int) -> Tensor | None:
        """``words``, from ``words_of``, are what ``choosers`` ranks have chosen, and become the mask of this exchange.

        ``counts[i]`` bits in each row of the bucket's segment i: where choosers agree, a few places are left, which go
        to the first positions that are free. The result: the mask's directory.
        """
        if choosers > 1:
            parts = [(segment.groups(masks.WORD), k) for segment, k in zip(bucket.segments, counts, strict=True)]
            masks.fill(words, parts)
        before = masks.directory(words)
        if self._encodes_weights:
            names = tuple(segment.name for segment in bucket.segments)
            self._gathered.note(bucket, Unfolded(names, tuple(counts), words, before))
        return before

    def _exchange(self, bucket: Bucket, exchange: Exchange, send: Callable[[Bucket, Exchange], None]) -> None:
        self._gathered.note(bucket, None)  # unless it comes to a mask
        super()._exchange(bucket, exchange, send)

    def before_step(self, step: Step) -> None:
        self._gathered.before_step(step, () if self.update_space is None else self.update_space.names)
        super().before_step(step)

    def state_changed(self) -> None:
        self._gathered.state_changed()

    def weight_message(self, shard: Shard, rank: int) -> Message:
        return self._gathered.message(shard, rank)
