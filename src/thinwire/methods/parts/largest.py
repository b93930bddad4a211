"""Methods whose ranks send their own largest values with their positions stand on this: topk, dgc and trickle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from thinwire.codecs.intquant import Integers
from thinwire.codecs.sparse import Sparse
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card, Density, count_of
from thinwire.methods.parts.feedback import Lossy, share_of
from thinwire.ops import mask as masks


@dataclass
class Largest(Lossy):
    """Each rank sends its own k largest values of each tensor with their positions; the rest waits.

    Args:
        density: share of each tensor's values that a rank sends (k = max(int(density * numel), 1)); lower => fewer
            bytes, longer waits. With weights sharded, of each shard's; with servers, of each row's.
    """

    density: Density = 0.01

    def describe(self) -> Card:
        return replace(super().describe(), group=masks.WORD, grows_with_ranks=True)

    @property
    def default_share(self) -> float:
        return share_of(self.density)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        self.send_largest(bucket, exchange)

    def send_largest(self, bucket: Bucket, exchange: Exchange) -> Tensor | None:
        """Exchange the mean of all ranks' largest values; return the residual, (R, n) float32, if one is kept."""
        residual = self.residual(bucket)
        exchange.mean(bucket, self.largest(bucket, self.density), residual=residual)
        return None if residual is None else residual.new

    def largest(self, bucket: Bucket, density: float) -> Sparse:
        """The codec of the ``density`` largest values of each of the bucket's segments."""
        assert self.codec is None or isinstance(self.codec, Integers)
        counts = ((segment.width, count_of(density, segment.span)) for segment in bucket.segments)
        return Sparse(tuple(counts), self.codec)
