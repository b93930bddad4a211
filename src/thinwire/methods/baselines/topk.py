"""Naive top-k with error feedback: every rank sends its own largest values with their positions (Stich et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from thinwire.codecs.intquant import Integers
from thinwire.codecs.sparse import Sparse
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card, Density, count_of
from thinwire.methods.parts.feedback import GRADIENTS, UPDATES, Gradients, Lossy, Updates, share_of
from thinwire.ops import mask as masks


@dataclass
class TopK(Lossy):
    """Each rank's k largest values and their positions, sent to all ranks; the rest waits (Stich et al. 2018).

    For each tensor, on rank n: h = g_n + e; send the k largest |h|; e = h elsewhere (and a share of it where sent: see
    ``Updates.delivered_share``). A value takes 32 bits, its position about 9. The mean has up to N k non-zeros, and a
    rank receives more bytes with more ranks: methods with a common mask improve on that. By default g_n is AdamW's step
    (``feedback``); "topk:paper" sends gradients of every tensor, for any optimizer.

    Args:
        density: share of each tensor's values that a rank sends (k = max(int(density * numel), 1)); lower => fewer
            bytes, longer waits. With sharded weights, a share of each shard; with a merged mask, of each rank's row.
    """

    name: ClassVar[str] = "topk"
    encodes_steps: ClassVar[bool] = True
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"feedback": GRADIENTS, "smallest": 0, "send": ("*",)},
    }

    feedback: Gradients | Updates | None = UPDATES
    density: Density = 0.01

    def describe(self) -> Card:
        return replace(super().describe(), group=masks.WORD, grows_with_ranks=True, rows_apart=True)

    @property
    def default_share(self) -> float:
        return share_of(self.density)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        exchange.mean(bucket, self.largest(bucket, self.density), residual=self.residual(bucket))

    def largest(self, bucket: Bucket, density: float) -> Sparse:
        """Return the codec that sends the ``density`` largest values of each of the bucket's segments."""
        codec = self.codec
        assert codec is None or isinstance(codec, Integers)

        def make() -> Sparse:
            return Sparse(tuple((segment.width, count_of(density, segment.span)) for segment in bucket.segments), codec)

        return bucket.once(("largest", density), make, codec)
