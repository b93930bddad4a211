"""Naive top-k with error feedback: every rank sends its own largest values with their positions (Stich et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.methods.parts.feedback import GRADIENTS, UPDATES, Gradients, Updates
from thinwire.methods.parts.largest import Largest


@dataclass
class TopK(Largest):
    """Each rank's own k largest values with their positions, all-gathered; the rest waits (Stich et al. 2018).

    For each tensor, on rank n: h = g_n + e; send the k largest |h|; e = h elsewhere (and a share of it where sent: see
    ``Updates.delivered_share``). A value takes 32 bits, and its position about 9. The mean has up to N k non-zeros, and
    what a rank receives grows with N: the baseline that methods with a common mask improve on. By default g_n is the
    step that AdamW would take (``feedback``); "topk:paper" sends gradients, for any optimizer, of every tensor.
    """

    name: ClassVar[str] = "topk"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"feedback": GRADIENTS, "smallest": 0, "send": ("*",)},
    }

    feedback: Gradients | Updates | None = UPDATES
