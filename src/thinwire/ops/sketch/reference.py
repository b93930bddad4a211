"""Plain torch, any device: the specification of every operation, and the oracle of its tests. Sums are in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.base.random import hash_of, shifted
from thinwire.ops import sketch as of
from thinwire.ops.mask import reference as mask

if TYPE_CHECKING:
    from thinwire.ops.sketch import Part, Parts

MIX = 0xD6E8FEB86659FD93 - 2**64


def hashes(seed: int, elements: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Cells (3, k) int64, table j in [j * cells, (j + 1) * cells), and signs (k,) of +-1, int64."""
    first = hash_of(seed, elements)
    second = (first ^ shifted(first, 32)) * MIX
    second = second ^ shifted(second, 32)
    parts = (shifted(first, 32), first & 0xFFFFFFFF, shifted(second, 32))
    places = torch.stack([shifted(part * cells, 32) + j * cells for j, part in enumerate(parts)])
    return places, 1 - 2 * (second & 1)


def gather(rows: Tensor, words: Tensor, parts: Parts, found: Tensor, payload: Tensor) -> None:
    found.fill_(-1)
    payload.zero_()
    for part in parts:
        for row, flags in enumerate(mask.flags_of(words[:, part.words])):
            at = part.start + flags.nonzero()[: part.k, 0]
            listed = slice(part.place, part.place + len(at))
            found[row, listed], payload[row, listed] = at.int(), rows[row, at]


def peaks(payload: Tensor, parts: Parts, found: Tensor) -> None:
    for i, part in enumerate(parts):
        found[i] = payload[:, part.listed].abs().amax()


def round_to(payload: Tensor, quantum: Tensor, parts: Parts, rest: Tensor) -> None:
    for i, part in enumerate(parts):
        values, left = payload[:, part.listed], rest[:, part.listed]
        rounded = (values / quantum[i]).round() * quantum[i] if part.cells else values
        torch.sub(values, rounded, out=left)
        values.copy_(rounded)


def encode(payload: Tensor, found: Tensor, parts: Parts, whole: Tensor, out: Tensor) -> None:
    out.zero_()
    for part in parts:
        if not part.cells:
            out[:, part.wire].copy_(whole[:, part.columns])
            continue
        for values, at, cells in zip(payload[:, part.listed], found[:, part.listed], out[:, part.wire], strict=True):
            there = at >= 0
            places, signs = hashes(part.seed, at[there].long() - part.start, part.cells)
            for table in places:
                cells.index_add_(0, table, values[there] * signs)


def peel(wire: Tensor, index: Tensor, parts: Parts, first: int, out: Tensor, left: Tensor, estimate: bool) -> None:
    left.zero_()
    out.zero_()
    for part in parts:
        if not part.cells:
            out[:, part.columns].copy_(wire[:, part.wire])
            continue
        for row in range(len(index)):
            wanted = first <= row < first + len(wire)
            cells = wire[row - first, part.wire] if wanted else wire.new_zeros(part.sent)
            values = out[row - first, part.columns] if wanted else None
            _peel(cells, index[row : row + 1, part.words], part, values, left[row : row + 1, part.words], estimate)


def _peel(cells: Tensor, index: Tensor, part: Part, out: Tensor | None, left: Tensor, estimate: bool) -> None:
    """All elements that are alone in a cell at once."""
    elements = mask.flags_of(index)[0].nonzero()[:, 0]
    places, signs = hashes(part.seed, elements, part.cells)
    counts = torch.zeros(3 * part.cells, dtype=torch.int64, device=index.device)
    for table in places:
        counts.index_add_(0, table, torch.ones_like(table))
    held = cells.double()
    waiting = torch.ones(len(elements), dtype=torch.bool, device=index.device)
    for _ in range(of.rounds_on(index.device)):
        alone = (counts[places] == 1) & waiting
        found = alone.any(0)
        if not found.any():
            break
        table = alone.to(torch.uint8).argmax(0)[found]
        cell = places[table, found.nonzero()[:, 0]]
        values = held[cell] * signs[found]
        if out is not None:
            out[elements[found]] = values.float()
        for j in range(3):
            counts.index_add_(0, places[j, found], torch.full_like(cell, -1))
            held.index_add_(0, places[j, found], -values * signs[found])
        waiting &= ~found
    if estimate and out is not None:
        signed = held[places[:, waiting]] * signs[waiting]
        out[elements[waiting]] = signed.median(0).values.float()
    flags = torch.zeros(1, index.shape[1] * mask.WORD, dtype=torch.bool, device=index.device)
    flags[0, elements[waiting]] = True
    mask.pack(flags, left)


def settle(sent: Tensor, rest: Tensor, found: Tensor, left: Tensor, parts: Parts, out: Tensor) -> None:
    lost = mask.flags_of(left)
    for part in parts:
        if not part.cells:
            out[:, part.columns].zero_()
            continue
        listed = (each[:, part.listed] for each in (sent, rest, found))
        for row, (values, remains, at) in enumerate(zip(*listed, strict=True)):
            there = at >= 0
            columns = at[there].long()
            back = torch.where(lost[row, columns], values[there], 0)
            out[row, columns] = remains[there] + back


def count(words: Tensor, parts: Parts, found: Tensor) -> None:
    for i, part in enumerate(parts):
        found[:, i] = mask.popcount(words[:, part.words])
