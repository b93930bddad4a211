"""The codec of TAGC: the kept values of all ranks in one count sketch, which the network sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Space
from thinwire.ops import mask, sketch
from thinwire.streams import Seeds


@dataclass(frozen=True)
class Part:
    """One parameter's columns: up to ``k`` values per row and rank, in three tables of ``cells``; 0: all, plainly.

    ``seed``: of its hashes.
    """

    name: str
    start: int
    width: int
    k: int
    cells: int
    seed: int = 0

    @property
    def sent(self) -> int:
        """Values on the wire per row."""
        return 3 * self.cells or self.width

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)

    @property
    def words(self) -> slice:
        """The columns counted in mask words."""
        return slice(self.start // mask.WORD, (self.start + self.width) // mask.WORD)


def places(parts: tuple[Part, ...]) -> list[tuple[Part, slice, slice]]:
    """Each part with the place of its values among all that a rank keeps, and on the wire."""
    found, kept, sent = [], 0, 0
    for part in parts:
        found.append((part, slice(kept, kept + part.k), slice(sent, sent + part.sent)))
        kept, sent = kept + part.k, sent + part.sent
    return found


@dataclass(frozen=True, eq=False)
class CountSketch(Codec):
    """Linear and lossless up to the load: the sum of all ranks' sketches is inverted with the union of their masks.

    Made anew for every exchange: it is encoded with this rank's mask (TAGC, Alg. 1, l. 5) and decoded with all ranks'
    masks (l. 10).

    Attributes:
        sent: (R, k) this rank's values at ``words``, multiples of a power of two (``ops.sketch.round_to``).
        words: (R, n / 64) this rank's mask. index: the union over ranks.
        left: (R, n / 64) where ``decode`` says what could not be recovered.
        owner_row: where each rank keeps one row of the result, the row that a wire of one row stands for.
        estimate: guess what could not be recovered (paper).
    """

    group: ClassVar[int] = mask.WORD
    linear = True
    divisible = False  # the sums are exact as long as nothing is divided
    wire_dtype = torch.float32

    parts: tuple[Part, ...]
    sent: Tensor = field(repr=False)
    words: Tensor = field(repr=False)
    index: Tensor = field(repr=False)
    left: Tensor = field(repr=False)
    owner_row: int | None = None
    estimate: bool = False

    def wire_numel(self, n: int) -> int:
        return sum(part.sent for part in self.parts)

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        for part, kept, place in places(self.parts):
            if part.cells:
                sketch.sketch_encode(self.sent[:, kept], self.words[:, part.words], part.seed, out[:, place])
            else:
                out[:, place].copy_(rows[:, part.columns])

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        all_rows = len(wire) == len(self.index)
        first, last = (0, len(wire)) if all_rows or self.owner_row is None else (self.owner_row, self.owner_row + 1)
        for part, _, place in places(self.parts):
            values = out[:, part.columns]
            if not part.cells:
                values.copy_(wire[:, place])
                continue
            index, left = self.index[:, part.words], self.left[:, part.words]
            sketch.sketch_peel(
                wire[:, place], index[first:last], part.seed, values, left[first:last], estimate=self.estimate
            )
            for a, b in ((0, first), (last, len(index))):  # others' rows: what they cannot recover, without values
                if b > a:
                    sketch.sketch_peel(wire[:1, place].expand(b - a, -1), index[a:b], part.seed, None, left[a:b])
