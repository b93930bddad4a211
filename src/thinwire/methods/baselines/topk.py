"""Naive top-k with error feedback: every rank sends its own largest values with their positions (Stich et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from thinwire.codecs.base import Residual
from thinwire.core.bucket import Bucket
from thinwire.core.method import Card, Promise
from thinwire.methods.parts.feedback import GRADIENTS, UPDATES, Gradients, Updates
from thinwire.methods.parts.largest import Largest


@dataclass
class TopK(Largest):
    """Each rank's own k largest values with their positions, all-gathered; the rest waits (Stich et al. 2018).

    For each tensor, on rank n: h = g_n + e; send the k largest |h|; e = h elsewhere (and a share of it where sent: see
    ``Updates.delivered_share``). A value takes 32 bits, and its position about 9. The mean has up to N k non-zeros, and
    what a rank receives grows with N: the baseline that methods with a common mask improve on. By default g_n is the
    step that AdamW would take (``feedback``); "topk:paper" sends gradients, for any optimizer, of every tensor.

    Args:
        error_feedback: keep what was not sent for the next step (8 bytes per element). False: it is lost.
    """

    name: ClassVar[str] = "topk"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"feedback": GRADIENTS, "smallest": 0, "send": ("*",)},
    }

    feedback: Gradients | Updates = UPDATES
    error_feedback: bool = True

    def describe(self) -> Card:
        promise = self.conserves
        if not self.error_feedback:
            promise = Promise("lossy", "what is not among the largest values is dropped: error_feedback=True keeps it")
        return replace(
            super().describe(), promise=promise, keeps_state=self.error_feedback or self.updates is not None
        )  # fmt: skip

    def residual(self, bucket: Bucket) -> Residual | None:
        return super().residual(bucket) if self.error_feedback else None
