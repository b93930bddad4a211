"""Plain torch, any device: the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from thinwire.ops.rows import STAYS
from thinwire.ops.rows.reference import columns_of, pack, runs

if TYPE_CHECKING:
    from thinwire.ops.norms import Statistics
    from thinwire.ops.rows import CopyTable


def bound(
    flat: Tensor, table: CopyTable, rows: Tensor, columns: Tensor, statistics: Statistics, factors: Tensor,
    residues: Tensor, bounded: Tensor,
) -> None:  # fmt: skip
    current, updated, shares, times, leaves, decay = statistics
    norms = _norms(flat, table)
    old = current[:, columns]
    usual_before = old[0]
    share_of_all = shares[columns] * torch.linalg.vector_norm(current[0])
    largest = times * torch.maximum(usual_before, share_of_all)
    counted = norms.isfinite() & (norms > 0)
    exceeds = (norms > largest) & (usual_before > 0) & counted
    cut_to = leaves * largest
    norm = torch.where(exceeds, largest, torch.where(counted, norms, usual_before))
    usual_after = torch.where(usual_before > 0, decay * usual_before + (1 - decay) * norm, norm)
    counts = torch.stack([counted.float(), exceeds.float(), torch.where(exceeds, norms - cut_to, 0.0)])
    updated[:, columns] = torch.cat([usual_after.unsqueeze(0), old[1:] + counts])
    factors.copy_(torch.where(exceeds, cut_to / norms, 1.0))
    torch.sub(norms, norms, out=residues)
    bounded.copy_(torch.where(exceeds, cut_to, norms))
    pack(flat, table.copied, rows)
    if bool(exceeds.any()):  # mostly saves a pass
        for segment, factor in zip(table.segments, factors, strict=True):
            if segment.start == STAYS:
                segment = segment._replace(start=segment.offset, width=segment.span, stride=segment.step)
                columns_of(flat, segment).mul_(factor)
            else:
                columns_of(rows, segment).mul_(factor)


def sample(
    rows: Tensor, positions: Tensor, tensors: Sequence[slice], norms: Tensor | None, sums: Tensor, share: float
) -> None:
    places = sums[0].view(len(tensors), -1)
    places[:, :-1] = torch.take(rows, positions.view(len(tensors), -1))
    lengths = torch._foreach_norm([rows[:, columns] for columns in tensors]) if norms is None else norms.unbind()
    torch.stack(lengths, out=places[:, -1])
    torch.square(sums[0], out=sums[1])
    sums.mul_(share)


def _norms(flat: Tensor, table: CopyTable) -> Tensor:
    """Return the norm of each segment's values, (T,) float32."""
    bodies, tails = [], []
    for segment in table.segments:
        _, body, tail = runs(flat, segment)
        bodies.append(flat[:0] if body is None else body)
        tails.append(tail)
    norms = torch.stack(torch._foreach_norm(bodies, dtype=torch.float32))
    for i, tail in enumerate(tails):
        if tail is not None:
            norms[i] = torch.hypot(norms[i], torch.linalg.vector_norm(tail, dtype=torch.float32))
    return norms
