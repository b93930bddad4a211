# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""Numba: the fast Hadamard transform in a tile that stays in the cache. Equals ``reference`` up to rounding."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from thinwire.ops.kernels import flat, njit
from thinwire.ops.projection.reference import LANES


@njit
def _butterfly4(a, b, c, d):
    """Do two levels at once: each value is loaded and stored once for both."""
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
    """Apply H (not normalized) down the columns of ``tile`` (block * LANES,), in place."""
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


@njit
def _project(rows, stride, residual, residual_stride, residual_out, out_stride, payload, payload_stride, count, n,
             signs, chosen, feedback, keep):  # fmt: skip
    size = signs.size
    tile = np.empty(size, np.float32)
    for row in range(count):
        payload_offset = row * payload_stride
        for start in range(0, n, size):
            values = rows[row * stride + start : row * stride + start + size]
            if feedback:
                offset = row * residual_stride + start
                _sum_times(values, residual[offset : offset + size], signs, tile)
            else:
                _times(values, signs, tile)
            _transform(tile)
            for i in chosen:
                coefficients = tile[i * LANES : (i + 1) * LANES]
                payload[payload_offset : payload_offset + LANES] = coefficients
                coefficients[:] = np.float32(0)
                payload_offset += LANES
            if keep:
                _transform(tile)
                _times(tile, signs, residual_out[row * out_stride + start : row * out_stride + start + size])


@njit
def _reconstruct(payload, payload_stride, out, stride, count, n, signs, chosen):
    size = signs.size
    tile = np.empty(size, np.float32)
    for row in range(count):
        payload_offset = row * payload_stride
        for start in range(0, n, size):
            tile[:] = np.float32(0)
            for i in chosen:
                tile[i * LANES : (i + 1) * LANES] = payload[payload_offset : payload_offset + LANES]
                payload_offset += LANES
            _transform(tile)
            _times(tile, signs, out[row * stride + start : row * stride + start + size])


def _wide(signs: Tensor) -> np.ndarray:
    """Return sign times norm of H for every value of a tile, so that whole vectors are multiplied."""
    return signs.mul(signs.numel() ** -0.5).repeat_interleave(LANES).numpy()


def srht_project(
    rows: Tensor, residual: Tensor | None, signs: Tensor, chosen: Tensor, payload: Tensor, residual_out: Tensor | None
) -> None:
    old = flat(rows if residual is None else residual)
    new = flat(rows if residual_out is None else residual_out)  # not written to unless kept
    _project(*flat(rows), *old, *new, *flat(payload), *rows.shape, _wide(signs), chosen.numpy(),
             residual is not None, residual_out is not None)  # fmt: skip


def srht_reconstruct(payload: Tensor, signs: Tensor, chosen: Tensor, out: Tensor) -> None:
    _reconstruct(*flat(payload), *flat(out), *out.shape, _wide(signs), chosen.numpy())
