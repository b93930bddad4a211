"""Subsampled randomized Hadamard transform (SRHT), blockwise: project with error feedback, and reconstruct.

A row is cut into *tiles* of B x 16 values: 16 blocks of B values, interleaved, with value i of block c at 16 i + c, so
that the transform adds whole vectors of 16 neighbours. With D the diagonal of random signs and H the orthonormal
Hadamard matrix of size B (a power of two), a block x becomes the rows ``chosen`` of H D x:

    P = (H D)[chosen],  P P^T = 1,  so P^T P is an orthogonal projection on m of B dimensions.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.backends import backend
from thinwire.ops.projection.reference import LANES

__all__ = ["LANES", "srht_project", "srht_reconstruct"]

_backend = backend("thinwire.ops.projection")


def _check(rows: Tensor, signs: Tensor, chosen: Tensor, payload: Tensor) -> None:
    block = signs.numel()
    if block & (block - 1) or rows.shape[1] % (block * LANES):
        raise ThinwireError(f"SRHT: rows of {rows.shape[1]} values are not tiles of {block} x {LANES}")
    if payload.shape != (rows.shape[0], rows.shape[1] // block * chosen.numel()):
        raise ThinwireError(f"SRHT: {chosen.numel()} of {block} values do not make a payload of {tuple(payload.shape)}")


def srht_project(
    rows: Tensor, residual: Tensor | None, signs: Tensor, chosen: Tensor, payload: Tensor, residual_out: Tensor | None
) -> Tensor:
    """Project h = ``rows`` + ``residual`` (R, n): ``payload`` (R, n / B * m) = P h; ``residual_out`` = h - P^T P h.

    ``signs`` (B,) float32 of +-1, ``chosen`` (m,) int64 rows of H D; n is a multiple of 16 B. ``residual_out`` may be
    ``residual``; None: not stored. Rows may be apart in memory.
    """
    _check(rows, signs, chosen, payload)
    _backend(rows).srht_project(rows, residual, signs, chosen, payload, residual_out)
    return payload


def srht_reconstruct(payload: Tensor, signs: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
    """Write P^T ``payload`` (R, n / B * m) to ``out`` (R, n)."""
    _check(out, signs, chosen, payload)
    _backend(out).srht_reconstruct(payload, signs, chosen, out)
    return out
