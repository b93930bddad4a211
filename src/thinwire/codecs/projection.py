"""Codecs that send a random projection of every block of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds, random_normal, random_order, random_signs, seed_of
from thinwire.codecs.base import Codec, Residual, Space
from thinwire.ops import projection

ESTIMATORS = ("cyclic_srht", "paper")
"""``cyclic_srht`` contracts, E |C(h) - h|^2 < |h|^2; ``paper`` has E C(h) = h and E |C(h) - h|^2 = w |h|^2."""


@dataclass(frozen=True)
class Estimator:
    """Projects every block to m = block / ratio values by a random matrix, the same on all ranks, new every step.

    ``C(h) = decode(encode(h))``:

    * ``paper``: p = h M, C(h) = p M^T / m with M (block, m) Gaussian. Unbiased; the error is w = (block + 1) / m (about
      the ratio) times |h|^2.
    * ``cyclic_srht``: an orthogonal projection on rows of H D (Hadamard's matrix, random signs), in B log B without a
      stored matrix. One H D serves ``ratio`` steps, which send disjoint rows of it: a cycle sends every direction once.
    """

    name: str
    ratio: int
    block: int

    def __post_init__(self) -> None:
        block, ratio = self.block, self.ratio
        if ratio < 1 or block < 2 or block & (block - 1) or block % ratio:
            raise ThinwireError(f"block must be a power of two that ratio divides, got block={block} and ratio={ratio}")

    @property
    def srht(self) -> bool:
        """Tell whether the estimator is ``cyclic_srht``."""
        return self.name == "cyclic_srht"

    @property
    def sent_per_block(self) -> int:
        """m: values sent per block."""
        return self.block // self.ratio

    @property
    def granule(self) -> int:
        """Values encoded together: SRHT takes 16 blocks side by side."""
        return self.block * (projection.LANES if self.srht else 1)

    def draw(
        self, seed: int, name: str, step: int, device: torch.device, draw_once: Callable[..., Any] | None = None
    ) -> tuple[Tensor, ...]:
        """Draw parameter ``name``'s random numbers for optimizer step ``step``, from the arguments alone.

        They are M (block, m), Gaussian; or the signs (block,) of D and the rows (m,) of H D to send.
        ``draw_once``: a bucket's cache, so that numbers for several steps or exchanges are drawn once.
        """
        period, turn = divmod(step, self.ratio) if self.srht else (step, 0)

        block, m = self.block, self.sent_per_block

        def make() -> tuple[Tensor, ...]:
            own_seed = seed_of(seed, name, period)
            if self.srht:
                return random_signs(own_seed, block, device), random_order(seed_of(own_seed, "order"), block, device)
            return (random_normal(own_seed, block * m, device).view(block, m),)

        drawn = make() if draw_once is None else draw_once(("drawn", name), make, self, seed, period)
        if not self.srht:
            return drawn
        signs, order = drawn
        return signs, order[turn * m : (turn + 1) * m]


@dataclass(frozen=True, eq=False)
class Projection(Codec):
    """Sends the projections of an :class:`Estimator` in one step. Linear: the network may sum the wire.

    ``encode`` is STEP 2 and ``decode`` STEP 4 of SEPARATE's Algorithm 1.

    Attributes:
        segments: (start, width, result of ``estimator.draw``) of a row's columns.
    """

    linear = True
    wire_dtype = torch.float32

    estimator: Estimator
    segments: Sequence[tuple[int, int, tuple[Tensor, ...]]] = field(repr=False)

    @property
    def group(self) -> int:
        return self.estimator.granule

    def wire_numel(self, n: int) -> int:
        return n // self.estimator.ratio

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        rows = rows.float()  # no copy of float32, a bucket's dtype
        for columns, sent, drawn in self._slices():
            values, payload = rows[:, columns], out[:, sent]
            if self.estimator.srht:
                signs, chosen = drawn
                projection.srht_project(values, None, signs, chosen, payload, None)
                continue
            product = _shaped(space, "sent", payload, self._longest // self.estimator.ratio)
            blocks = values.reshape(-1, self.estimator.block)  # a view, if ``values`` is one row
            torch.mm(blocks, drawn[0], out=product.view(-1, self.estimator.sent_per_block))
            payload.copy_(product)

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual | None, seed: Seeds | None, space: Space
    ) -> None:
        if residual is None or not self.estimator.srht:
            super()._encode_and_keep(rows, out, residual, seed, space)
            return
        for columns, sent, (signs, chosen) in self._slices():
            old = None if residual.old is None else residual.old[:, columns]
            projection.srht_project(rows[:, columns], old, signs, chosen, out[:, sent], residual.new[:, columns])

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        m, block = self.estimator.sent_per_block, self.estimator.block
        for columns, sent, drawn in self._slices():
            payload, values = wire[:, sent], out[:, columns]
            if self.estimator.srht:
                signs, chosen = drawn
                projection.srht_reconstruct(payload, signs, chosen, values)
                continue
            blocks = _shaped(space, "blocks", values, self._longest)
            torch.mm(payload.reshape(-1, m), drawn[0].T, out=blocks.view(-1, block))
            torch.mul(blocks, 1 / m, out=values)

    @property
    def _longest(self) -> int:
        return max(width for _, width, _ in self.segments)

    def _slices(self) -> list[tuple[slice, slice, Any]]:
        """Return each segment's columns of the row, its columns of the wire and its random numbers."""
        ratio = self.estimator.ratio
        return [
            (slice(start, start + width), slice(start // ratio, (start + width) // ratio), drawn)
            for start, width, drawn in self.segments
        ]


def _shaped(space: Space, use: str, like: Tensor, longest: int) -> Tensor:
    """Return contiguous float32 memory shaped as ``like``, which all segments, up to the ``longest``, share."""
    rows = len(like)
    return space((use, rows), (rows * longest,), torch.float32)[: like.numel()].view(like.shape)
