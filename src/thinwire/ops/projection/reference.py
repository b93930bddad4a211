"""Plain torch, any device: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16
"""Blocks interleaved in a tile."""


def hadamard(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal Hadamard matrix (size, size) in Sylvester's order, float32."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


def projection_of(signs: Tensor, chosen: Tensor) -> Tensor:
    """Return P (m, B)."""
    return hadamard(signs.numel(), signs.device)[chosen] * signs


def srht_project(
    rows: Tensor, residual: Tensor | None, signs: Tensor, chosen: Tensor, payload: Tensor, residual_out: Tensor | None
) -> None:
    total = rows if residual is None else rows + residual
    projection = projection_of(signs, chosen)
    tiles = total.reshape(len(rows), -1, signs.numel(), LANES)
    coefficients = projection @ tiles
    if residual_out is not None:
        residual_out.copy_((tiles - projection.T @ coefficients).flatten(1))
    payload.copy_(coefficients.flatten(1))


def srht_reconstruct(payload: Tensor, signs: Tensor, chosen: Tensor, out: Tensor) -> None:
    coefficients = payload.reshape(len(out), -1, chosen.numel(), LANES)
    out.copy_((projection_of(signs, chosen).T @ coefficients).flatten(1))
