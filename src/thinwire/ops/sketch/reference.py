"""Plain torch, any device: the specification. Sums are in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.base.random import hash_of, shifted
from thinwire.ops import sketch as of
from thinwire.ops.mask import reference as mask

if TYPE_CHECKING:
    from thinwire.ops.sketch import SketchSegment, SketchSegments

MIX = 0xD6E8FEB86659FD93 - 2**64


def hashes(seed: int, elements: Tensor, cells: int) -> tuple[Tensor, Tensor]:
    """Return cells (3, k) int64, table j's in [j * cells, (j + 1) * cells), and signs (k,) of +-1, int64."""
    word1 = hash_of(seed, elements)
    word2 = (word1 ^ shifted(word1, 32)) * MIX
    word2 = word2 ^ shifted(word2, 32)
    halves = (shifted(word1, 32), word1 & 0xFFFFFFFF, shifted(word2, 32))
    cell_indices = torch.stack([shifted(half * cells, 32) + j * cells for j, half in enumerate(halves)])
    return cell_indices, 1 - 2 * (word2 & 1)


def gather(rows: Tensor, words: Tensor, segments: SketchSegments, positions: Tensor, payload: Tensor) -> None:
    positions.fill_(-1)
    payload.zero_()
    for segment in segments:
        for row, flags in enumerate(mask.flags_of(words[:, segment.words])):
            columns = segment.start + flags.nonzero()[: segment.k, 0]
            listed = slice(segment.list_start, segment.list_start + len(columns))
            positions[row, listed], payload[row, listed] = columns.int(), rows[row, columns]


def peaks(payload: Tensor, segments: SketchSegments, magnitudes: Tensor) -> None:
    for i, segment in enumerate(segments):
        magnitudes[i] = payload[:, segment.listed].abs().amax()


def round_to(payload: Tensor, quantum: Tensor, segments: SketchSegments, residual: Tensor) -> None:
    for i, segment in enumerate(segments):
        values, remainder = payload[:, segment.listed], residual[:, segment.listed]
        rounded = (values / quantum[i]).round() * quantum[i] if segment.cells else values
        torch.sub(values, rounded, out=remainder)
        values.copy_(rounded)


def encode(payload: Tensor, positions: Tensor, segments: SketchSegments, whole: Tensor, out: Tensor) -> None:
    out.zero_()
    for segment in segments:
        if not segment.cells:
            out[:, segment.wire].copy_(whole[:, segment.columns])
            continue
        listed = payload[:, segment.listed], positions[:, segment.listed], out[:, segment.wire]
        for values, columns, cells in zip(*listed, strict=True):
            is_listed = columns >= 0
            cell_indices, signs = hashes(segment.seed, columns[is_listed].long() - segment.start, segment.cells)
            for table in cell_indices:
                cells.index_add_(0, table, values[is_listed] * signs)


def peel(
    wire: Tensor, index: Tensor, segments: SketchSegments, first: int, out: Tensor, lost: Tensor, estimate: bool
) -> None:
    lost.zero_()
    out.zero_()
    for segment in segments:
        if not segment.cells:
            out[:, segment.columns].copy_(wire[:, segment.wire])
            continue
        for row in range(len(index)):
            wanted = first <= row < first + len(wire)
            cells = wire[row - first, segment.wire] if wanted else wire.new_zeros(segment.wire_numel)
            values = out[row - first, segment.columns] if wanted else None
            words = slice(row, row + 1), segment.words
            _peel(cells, index[words], segment, values, lost[words], estimate)


def _peel(
    cells: Tensor, index: Tensor, segment: SketchSegment, out: Tensor | None, lost: Tensor, estimate: bool
) -> None:
    """Peel all elements that are alone in a cell at once."""
    elements = mask.flags_of(index)[0].nonzero()[:, 0]
    cell_indices, signs = hashes(segment.seed, elements, segment.cells)
    counts = torch.zeros(3 * segment.cells, dtype=torch.int64, device=index.device)
    for table in cell_indices:
        counts.index_add_(0, table, torch.ones_like(table))
    sums = cells.double()
    waiting = torch.ones(len(elements), dtype=torch.bool, device=index.device)
    for _ in range(of.rounds_on(index.device)):
        alone = (counts[cell_indices] == 1) & waiting
        peeled = alone.any(0)
        if not peeled.any():
            break
        table = alone.to(torch.uint8).argmax(0)[peeled]
        cell = cell_indices[table, peeled.nonzero()[:, 0]]
        values = sums[cell] * signs[peeled]
        if out is not None:
            out[elements[peeled]] = values.float()
        for j in range(3):
            counts.index_add_(0, cell_indices[j, peeled], torch.full_like(cell, -1))
            sums.index_add_(0, cell_indices[j, peeled], -values * signs[peeled])
        waiting &= ~peeled
    if estimate and out is not None:
        signed = sums[cell_indices[:, waiting]] * signs[waiting]
        out[elements[waiting]] = signed.median(0).values.float()
    flags = torch.zeros(1, index.shape[1] * mask.WORD, dtype=torch.bool, device=index.device)
    flags[0, elements[waiting]] = True
    mask.pack(flags, lost)


def restore(
    sent: Tensor, residual: Tensor, positions: Tensor, lost: Tensor, segments: SketchSegments, out: Tensor
) -> None:
    is_lost = mask.flags_of(lost)
    for segment in segments:
        if not segment.cells:
            out[:, segment.columns].zero_()
            continue
        listed = (values[:, segment.listed] for values in (sent, residual, positions))
        for row, (values, remainders, listed_columns) in enumerate(zip(*listed, strict=True)):
            is_listed = listed_columns >= 0
            columns = listed_columns[is_listed].long()
            returned = torch.where(is_lost[row, columns], values[is_listed], 0)
            out[row, columns] = remainders[is_listed] + returned


def count(words: Tensor, segments: SketchSegments, counts: Tensor) -> None:
    for i, segment in enumerate(segments):
        counts[:, i] = mask.flags_of(words[:, segment.words]).sum(1)
