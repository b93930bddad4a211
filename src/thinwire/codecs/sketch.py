"""The codec of TAGC: the kept values of all ranks in one count sketch, which the network sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.ops import mask, sketch


@dataclass(frozen=True)
class Part:
    """One parameter's columns: up to ``k`` values per row and rank, in three tables of ``cells``; 0: all, plainly."""

    name: str
    start: int
    width: int
    k: int
    cells: int

    @property
    def sent(self) -> int:
        """Values on the wire per row."""
        return 3 * self.cells or self.width


class CountSketch(Codec):
    """Linear and lossless up to the load: the sum of all ranks' sketches is inverted with the union of their masks.

    Before ``encode`` the method sets what this step is about; ``decode`` writes ``left``.

    Attributes:
        sent: (R, k) this rank's values at ``words``, multiples of a power of two (``ops.sketch.round_to``).
        words: (R, n / 64) this rank's mask. index: the union over ranks. left: what could not be recovered.
        seeds: of the hashes, by parameter. estimate: guess what could not be recovered (paper).
    """

    linear = True
    divisible = False  # the sums are exact as long as nothing is divided
    wire_dtype = torch.float32
    group = mask.WORD

    def __init__(self, parts: tuple[Part, ...], rows: int, n: int, owner_row: int | None, device: torch.device) -> None:
        """``owner_row``: where each rank keeps one row of the result, the row that a wire of one row stands for."""
        super().__init__()
        self.parts, self.owner_row = parts, owner_row
        self.words, self.index, self.left = (
            torch.zeros((rows, n // mask.WORD), dtype=torch.int64, device=device) for _ in range(3)
        )
        k = sum(part.k for part in parts)
        self.sent, self.rest = torch.zeros((rows, k), device=device), torch.zeros((rows, k), device=device)
        self.seeds: dict[str, int] = {}
        self.estimate = False

    def wire_numel(self, n: int) -> int:
        return sum(part.sent for part in self.parts)

    def places(self) -> list[tuple[Part, slice, slice, slice, slice]]:
        """Each part with its columns, words, kept values and place on the wire."""
        found, kept, sent = [], 0, 0
        for part in self.parts:
            stop = part.start + part.width
            columns, words = slice(part.start, stop), slice(part.start // mask.WORD, stop // mask.WORD)
            found.append((part, columns, words, slice(kept, kept + part.k), slice(sent, sent + part.sent)))
            kept, sent = kept + part.k, sent + part.sent
        return found

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        for part, columns, words, kept, place in self.places():
            if part.cells:
                sketch.sketch_encode(self.sent[:, kept], self.words[:, words], self.seeds[part.name], out[:, place])
            else:
                out[:, place].copy_(rows[:, columns])
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        all_rows = len(wire) == len(self.index)
        first, last = (0, len(wire)) if all_rows or self.owner_row is None else (self.owner_row, self.owner_row + 1)
        for part, columns, words, _, place in self.places():
            if not part.cells:
                out[:, columns].copy_(wire[:, place])
                continue
            seed, index, left = self.seeds[part.name], self.index[:, words], self.left[:, words]
            sketch.sketch_peel(
                wire[:, place], index[first:last], seed, out[:, columns], left[first:last], estimate=self.estimate
            )
            for a, b in ((0, first), (last, len(index))):  # others' rows: what they cannot recover, without values
                if b > a:
                    sketch.sketch_peel(wire[:1, place].expand(b - a, -1), index[a:b], seed, None, left[a:b])
        return out
