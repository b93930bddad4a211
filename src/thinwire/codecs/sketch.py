"""The codec of TAGC: count sketches of each rank's chosen values, which the network sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Space
from thinwire.ops import mask, sketch


@dataclass(frozen=True, eq=False)
class CountSketch(Codec):
    """Sends count sketches, and inverts their sum with the union of all masks. Linear, and lossless up to the load.

    Made anew for every exchange: ``encode`` takes this rank's chosen values (TAGC, Alg. 1, l. 5), ``decode`` all ranks'
    masks (l. 10).

    Attributes:
        segments: the row's parameters, in order.
        whole: (R, n) this rank's values, which segments without a sketch send.
        sent: (R, m) the values at ``positions`` (R, m), multiples of a power of two (``ops.sketch.round_to``).
        index: (R, n / 64) the union of all ranks' masks.
        unrecovered: (R, n / 64) mask in which ``decode`` marks the elements that it could not recover.
        owner_row: the row that a wire of one row stands for, if each rank keeps one row of the result.
        estimate: guess the elements that could not be recovered (paper).
    """

    group: ClassVar[int] = mask.WORD
    linear = True
    divisible = False  # the sums are exact as long as nothing is divided
    wire_dtype = torch.float32

    segments: sketch.SketchSegments
    whole: Tensor = field(repr=False)
    sent: Tensor = field(repr=False)
    positions: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    unrecovered: Tensor = field(repr=False)
    owner_row: int = 0
    estimate: bool = False

    def wire_numel(self, n: int) -> int:
        return self.segments.wire_numel

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        sketch.encode(self.sent, self.positions, self.segments, self.whole, out)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        first = 0 if len(wire) == len(self.index) else self.owner_row
        sketch.peel(wire, self.index, self.segments, first, out, self.unrecovered, estimate=self.estimate)
