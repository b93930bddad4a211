"""LHC on plain DDP (arXiv 2402.07529): TAGC's index and sketch, without its sparsification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from thinwire.base import device as devices
from thinwire.base.alignment import padded
from thinwire.base.knobs import own_knobs_of
from thinwire.methods.papers.tagc import TAGC
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Updates
from thinwire.ops import mask as masks
from thinwire.ops import sketch

SMALLEST_SENT = 2.0**-14
"""Share of the rank's largest value; values below it wait."""


@dataclass
class LHC(TAGC):
    """A sketch and a bitmap of all values that are not zero, for gradients that are sparse anyway (arXiv 2402.07529).

    For gradients that are sparse by themselves, such as embeddings' (LHC's paper names 80-95% zeros). Others go dense,
    with 1/32 more bytes for the index that finds this out, and are counted. The accumulator holds what peeling left,
    what rounding to exact sums cut off, and values below 2^-14 of the rank's largest until they have grown, as rounding
    would otherwise fill every zero.
    """

    name: ClassVar[str] = "lhc"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(
        own_knobs_of(TAGC), "lhc sends whatever is not zero: tagc has it"
    )  # fmt: skip

    feedback: Gradients | Updates = GRADIENTS

    def _choose(
        self, rows: Tensor, old: Tensor | None, segments: sketch.SketchSegments, h: Tensor, positions: Tensor,
        sent: Tensor, words: Tensor,
    ) -> None:  # fmt: skip
        torch.add(rows, 0 if old is None else old, out=h)
        floor = (sketch.peaks(h, segments) * SMALLEST_SENT).clamp_(max=torch.finfo(torch.float32).max)
        widths = devices.uploaded([segment.width // masks.WORD for segment in segments], h.device, torch.int64)
        floor = floor.repeat_interleave(widths, output_size=words.shape[1]).unsqueeze(1)
        flags = ~(h.abs().view(*words.shape, masks.WORD) <= floor)  # with infinities and NaN
        flags = flags.view(h.shape)
        masks.pack(flags, words)
        sketch.gather(h, words, segments, positions, sent)

    def _k(self, columns: int) -> int:
        return padded(columns, masks.WORD)  # room for all: the number of non-zeros is not known beforehand
