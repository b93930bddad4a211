"""Copies to rows in which outliers among the parameters are scaled down, by their norms; and samples.

``reference``, which runs on CPUs too, and ``triton``, one launch for all parameters, agree to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.ops.backends import backend
from thinwire.ops.rows import CopyTable

__all__ = ["Bounds", "Limit", "Samples", "Statistics", "bound", "sample"]

_backend = backend("thinwire.ops.norms", cpu="reference")


class Statistics(NamedTuple):
    """The usual norms of a model's P parameters, and how a gradient is held against them.

    Attributes:
        current, updated: (4, P) float32: the usual norm, gradients counted, gradients cut, the sum of norms cut off.
        shares: (P,) float32, the square root of each parameter's share of all values.
        times: usual norms from which on a gradient is cut. leaves: the share of these that is left.
        decay: of the usual norm, per step.
    """

    current: Tensor
    updated: Tensor
    shares: Tensor
    times: float
    leaves: float
    decay: float


class Bounds(NamedTuple):
    """Cuts of the outliers among T parameters: (T,) float32 each.

    Attributes:
        factors: 1 where nothing is cut, or the norm is not finite.
        residues: 0, or NaN where the norm is not finite.
        norms: of what the factors leave.
    """

    factors: Tensor
    residues: Tensor
    norms: Tensor


def bound(flat: Tensor, table: CopyTable, rows: Tensor, columns: Tensor, statistics: Statistics) -> Bounds:
    """Copy ``flat`` to ``rows`` as ``rows.pack`` does, with outliers scaled down; return the cuts.

    ``statistics.updated`` is updated in ``columns``.

    Args:
        table: its T segments are a parameter each, whole. Those that stay are scaled down in ``flat``; ``rows`` may be
            ``flat`` where all do. columns: (T,) int64, theirs in ``statistics``.
    """
    bounds = _bounds(flat, table)
    _backend(flat).bound(flat, table, rows, columns, statistics, *bounds)
    return bounds


def _bounds(flat: Tensor, table: CopyTable) -> Bounds:
    make = torch.empty if all(segment.width for segment in table.segments) else torch.zeros  # none comes to nothing
    return Bounds(*make(3, len(table.segments), dtype=torch.float32, device=flat.device).unbind())


class Limit(NamedTuple):
    """Arguments of ``bound`` where all parameters stay, to cut them later; it fills ``bounds``."""

    flat: Tensor
    table: CopyTable
    columns: Tensor
    statistics: Statistics
    bounds: Bounds

    @staticmethod
    def make(flat: Tensor, table: CopyTable, columns: Tensor, statistics: Statistics) -> Limit:
        return Limit(flat, table, columns, statistics, _bounds(flat, table))

    def cut(self) -> None:
        _backend(self.flat).bound(self.flat, self.table, self.flat, self.columns, self.statistics, *self.bounds)


class Samples(NamedTuple):
    """Arguments of ``sample`` but the rows, to take them later."""

    positions: Tensor
    tensors: Sequence[slice]
    norms: Tensor | None
    sums: Tensor
    share: float

    def take(self, rows: Tensor) -> None:
        sample(rows, *self)


def sample(
    rows: Tensor, positions: Tensor, tensors: Sequence[slice], norms: Tensor | None, sums: Tensor, share: float
) -> Tensor:
    """Write ``share`` times values of ``rows`` (R, n), and norms, to ``sums[0]``, and of their squares to ``sums[1]``.

    Args:
        positions: (T S,) int64, places of values in the flattened rows. tensors: T columns' slices, which a norm is of.
        norms: (T,) these; None: they are not known. Then, on a GPU, where each would be a launch, the first one is that
            of all rows, and the others are zero.
        sums: (2, T (S + 1)) float32: of each tensor S values, then its norm.
    """
    _backend(rows).sample(rows, positions, tensors, norms, sums, share)
    return sums
