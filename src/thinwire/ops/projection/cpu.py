# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba kernels for CPU tensors: the fast Hadamard transform down the columns of a tile that stays in the cache.

The same numbers as ``reference`` up to the order of additions.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from thinwire.ops.kernels import by_row, njit
from thinwire.ops.projection.reference import LANES


@njit
def _butterfly4(a, b, c, d):
    """Two levels at once: each value is loaded and stored once for both."""
    for lane in range(a.size):
        low, high = a[lane] + b[lane], a[lane] - b[lane]
        low2, high2 = c[lane] + d[lane], c[lane] - d[lane]
        a[lane], b[lane] = low + low2, high + high2
        c[lane], d[lane] = low - low2, high - high2


@njit
def _butterfly(a, b):
    for lane in range(a.size):
        a[lane], b[lane] = a[lane] + b[lane], a[lane] - b[lane]


@njit
def _transform(tile):
    """H (not normalized) down the columns of ``tile`` (block * LANES,), in place."""
    step = LANES
    while 4 * step <= tile.size:
        # neighbours in memory: at the upper levels one call does ``step`` values
        for start in range(0, tile.size, 4 * step):
            second, third, fourth = start + step, start + 2 * step, start + 3 * step
            _butterfly4(tile[start:second], tile[second:third], tile[third:fourth], tile[fourth : fourth + step])
        step *= 4
    if step < tile.size:  # an odd number of levels; the last has the longest neighbours
        _butterfly(tile[:step], tile[step:])


@njit
def _times(values, factors, out):
    for i in range(out.size):
        out[i] = values[i] * factors[i]


@njit
def _sum_times(a, b, factors, out):
    for i in range(out.size):
        out[i] = (a[i] + b[i]) * factors[i]


@by_row
def _project(rows, residual, residual_out, payload, signs, chosen):
    size, slot = signs.size, 0
    tile = np.empty(size, np.float32)
    for start in range(0, rows.size, size):
        values = rows[start : start + size]
        if residual is None:
            _times(values, signs, tile)
        else:
            _sum_times(values, residual[start : start + size], signs, tile)
        _transform(tile)
        for i in chosen:
            coefficients = tile[i * LANES : (i + 1) * LANES]
            payload[slot : slot + LANES] = coefficients
            coefficients[:] = np.float32(0)
            slot += LANES
        if residual_out is not None:
            _transform(tile)
            _times(tile, signs, residual_out[start : start + size])


@by_row
def _reconstruct(payload, out, signs, chosen):
    size, slot = signs.size, 0
    tile = np.empty(size, np.float32)
    for start in range(0, out.size, size):
        tile[:] = np.float32(0)
        for i in chosen:
            tile[i * LANES : (i + 1) * LANES] = payload[slot : slot + LANES]
            slot += LANES
        _transform(tile)
        _times(tile, signs, out[start : start + size])


def _wide(signs: Tensor) -> Tensor:
    """Return signs and the norm of H in one factor for every value of a tile, so that whole vectors are multiplied."""
    return signs.mul(signs.numel() ** -0.5).repeat_interleave(LANES)


def srht_project(
    rows: Tensor, residual: Tensor | None, signs: Tensor, chosen: Tensor, payload: Tensor, residual_out: Tensor | None
) -> None:
    _project(rows, residual, residual_out, payload, _wide(signs), chosen.int())


def srht_reconstruct(payload: Tensor, signs: Tensor, chosen: Tensor, out: Tensor) -> None:
    _reconstruct(payload, out, _wide(signs), chosen.int())
