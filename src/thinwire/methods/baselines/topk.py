"""Naive top-k with error feedback: every rank sends its own largest values with their positions (Stich et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from thinwire.codecs.base import Residual
from thinwire.codecs.mask import TopK as TopKCodec
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card, Promise, check_density, count_of
from thinwire.methods.parts.feedback import ErrorFeedback, portion_of
from thinwire.ops import mask as masks


@dataclass
class TopK(ErrorFeedback):
    """Each rank's own k largest values with their positions, all-gathered; the rest waits (Stich et al. 2018).

    For each tensor, on rank n: h = g_n + e; send the k largest |h|; e = h elsewhere (and a share of it where sent: see
    ``portion``). The mean has up to N k non-zeros,
    and what a rank receives grows with N: the baseline that methods with a common mask improve on. By default g_n is
    the step that AdamW would take (``feedback``); "topk:paper" sends gradients, for any optimizer, of every tensor.

    Args:
        density: share of each tensor's values that a rank sends (k = max(int(density * numel), 1)); lower => fewer
            bytes, longer waits. With weights sharded, of each shard's.
        error_feedback: keep what was not sent for the next step (8 bytes per element). False: it is lost.
    """

    name: ClassVar[str] = "topk"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"feedback": "gradient", "smallest": 0, "send": ("*",)},
    }

    feedback: Literal["gradient", "update"] = "update"
    density: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density("topk", self.density)

    def describe(self) -> Card:
        promise = self.conserves
        if not self.error_feedback:
            promise = Promise("lossy", "what is not among the largest values is dropped: error_feedback=True keeps it")
        return replace(
            super().describe(), promise=promise, group=masks.WORD, grows_with_ranks=True,
            keeps_state=self.error_feedback or self.feedback == "update",
        )  # fmt: skip

    @property
    def usual_portion(self) -> float:
        return portion_of(self.density)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        self.send_largest(bucket, exchange)

    def send_largest(self, bucket: Bucket, exchange: Exchange) -> Tensor | None:
        """``compress``; the new residual, (R, n) float32 with zeros where values were sent, unless none is kept."""
        residual: Residual | None = None
        if self.error_feedback:
            residual = Residual(self.state.read("residual", bucket), self.state.write("residual", bucket))
        segments = [(segment.start, segment.width, self._k(segment.span)) for segment in bucket.segments]
        exchange.mean(bucket, self._codec(segments), residual=residual)
        return None if residual is None else residual.new

    def _k(self, columns: int) -> int:
        return count_of(self.density, columns)

    def _codec(self, segments: list[tuple[int, int, int]]) -> TopKCodec:
        return TopKCodec(tuple(segments), listed=self.density < 1 / 32)  # where 4 k bytes are fewer than n / 8
