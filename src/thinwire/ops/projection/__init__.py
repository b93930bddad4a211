"""Subsampled randomized Hadamard transform (SRHT), blockwise: project with error feedback, and reconstruct.

A row is cut into *tiles* of B x 16 values: 16 blocks of B values lie side by side, value i of block c at 16 i + c, so
that the transform adds whole vectors of 16 neighbours. With D the diagonal of random signs and H the orthonormal
Hadamard matrix of size B (a power of two), a block x becomes H D x, of which the rows ``chosen`` are kept:

    P = (H D)[chosen],  P P^T = 1,  so P^T P is an orthogonal projection on m of B dimensions.
"""

from __future__ import annotations

from torch import Tensor

from thinwire.ops.backends import backend
from thinwire.ops.projection.reference import LANES

__all__ = ["LANES", "srht_project", "srht_reconstruct"]

_backend = backend("thinwire.ops.projection")


def srht_project(
    rows: Tensor, residual: Tensor | None, signs: Tensor, chosen: Tensor, payload: Tensor, residual_out: Tensor | None
) -> Tensor:
    """h = ``rows`` + ``residual`` (R, n); ``payload`` (R, n / B * m) = P h; ``residual_out`` (R, n) = h - P^T P h.

    ``signs`` (B,) float32 of +-1, ``chosen`` (m,) int64 rows of H D; n is a multiple of 16 B. ``residual_out`` may be
    ``residual`` itself; None: not wanted. Rows may be apart in memory. One pass over tiles that stay in the cache.
    """
    _backend(rows).srht_project(rows, residual, signs, chosen, payload, residual_out)
    return payload


def srht_reconstruct(payload: Tensor, signs: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, n) = P^T ``payload`` (R, n / B * m)."""
    _backend(out).srht_reconstruct(payload, signs, chosen, out)
    return out
