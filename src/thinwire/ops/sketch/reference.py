"""Plain torch, any device: the specification of every operation, and the oracle of its tests.

Peeling goes in rounds: all elements that are alone in a cell at once. Sums are in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.ops.mask import reference as mask
from thinwire.streams import hash_of, shifted

MIX = 0xD6E8FEB86659FD93 - 2**64


def hashes(seed: int, elements: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Cells (3, k) int64, table j in [j * cells, (j + 1) * cells), and signs (k,) of +-1, int64."""
    first = hash_of(seed, elements)
    second = (first ^ shifted(first, 32)) * MIX
    second = second ^ shifted(second, 32)
    parts = (shifted(first, 32), first & 0xFFFFFFFF, shifted(second, 32))
    places = torch.stack([shifted(part * cells, 32) + j * cells for j, part in enumerate(parts)])
    return places, 1 - 2 * (second & 1)


def _elements(words: Tensor) -> Tensor:
    flags = torch.zeros(1, words.numel() * mask.WORD, dtype=torch.bool, device=words.device)
    mask.unpack(words.view(1, -1), flags)
    return flags[0].nonzero()[:, 0]


def sketch_encode(payload: Tensor, words: Tensor, seed: int, out: Tensor) -> None:
    out.zero_()
    for values, row, sketch in zip(payload, words, out, strict=True):
        places, signs = hashes(seed, _elements(row), sketch.numel() // 3)
        for table in places:
            sketch.index_add_(0, table, values[: len(signs)] * signs)


def sketch_peel(sketch: Tensor, index: Tensor, seed: int, out: Tensor | None, left: Tensor, estimate: bool) -> None:
    left.copy_(index)
    if out is not None:
        out.zero_()
    for row in range(len(index)):
        elements, cells = _elements(index[row]), sketch.shape[1] // 3
        places, signs = hashes(seed, elements, cells)
        counts = torch.zeros(3 * cells, dtype=torch.int64, device=index.device)
        for table in places:
            counts.index_add_(0, table, torch.ones_like(table))
        held = sketch[row].double()
        waiting = torch.ones(len(elements), dtype=torch.bool, device=index.device)
        while True:
            alone = (counts[places] == 1) & waiting
            found = alone.any(0)
            if not found.any():
                break
            table = alone.to(torch.uint8).argmax(0)[found]
            cell = places[table, found.nonzero()[:, 0]]
            values = held[cell] * signs[found]
            if out is not None:
                out[row, elements[found]] = values.float()
            for j in range(3):
                counts.index_add_(0, places[j, found], torch.full_like(cell, -1))
                held.index_add_(0, places[j, found], -values * signs[found])
            waiting &= ~found
        if estimate and out is not None:
            signed = held[places[:, waiting]] * signs[waiting]
            out[row, elements[waiting]] = signed.median(0).values.float()
        flags = torch.zeros(1, index.shape[1] * mask.WORD, dtype=torch.bool, device=index.device)
        flags[0, elements[waiting]] = True
        mask.pack(flags, left[row : row + 1])


def round_to(payload: Tensor, quantum: Tensor, rest: Tensor) -> None:
    rounded = (payload / quantum).round() * quantum
    torch.sub(payload, rounded, out=rest)
    payload.copy_(rounded)


def settle(sent: Tensor, rest: Tensor, words: Tensor, left: Tensor, out: Tensor) -> None:
    lost = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
    mask.unpack(left, lost)
    for row in range(len(out)):
        elements = _elements(words[row])
        back = torch.where(lost[row, elements], sent[row, : len(elements)], 0)
        out[row, elements] = rest[row, : len(elements)] + back
