"""SCAPE's passes over first moments, before and after the ranks' sum.

``reference``, ``cpu`` and ``triton`` agree to float32 rounding. All tensors are adjacent and float32, except masks
(int64 words, ``thinwire.ops.mask``). A pass goes over a whole row, whose moments are separate tensors (``Moments``).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.base.device import upload
from thinwire.ops.backends import backend
from thinwire.ops.programs import programs_on

__all__ = ["MomentSegment", "Moments", "Sent", "add_up", "advance"]

PER_PROGRAM = 1024
"""Columns of one moment that one program of a GPU takes."""

_backend = backend("thinwire.ops.moments")


class MomentSegment(NamedTuple):
    """Columns ``[start, start + width)`` of a row, multiples of 64; the moment (m,) covers those without padding.

    ``scores``: (width,), by which this rank chooses the columns' mask; None: another rank does.
    """

    start: int
    width: int
    moment: Tensor
    scores: Tensor | None = None

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)


class Moments:
    """The moments of a row's parameters, in the order of their columns 0 to n, anywhere in memory."""

    def __init__(self, segments: Sequence[MomentSegment], device: torch.device) -> None:
        self.segments, self.device = tuple(segments), device

    @functools.cached_property
    def programs(self) -> Tensor:
        """(2 B,) int32: see ``programs_on``."""
        return programs_on(self.device, (segment.width for segment in self.segments), PER_PROGRAM)

    @functools.cached_property
    def table(self) -> Tensor:
        """(segments * 5,) int64: each segment's moment's address, m, start, width, and its scores' address, or 0."""
        values: list[int] = []
        for segment in self.segments:
            scores = 0 if segment.scores is None else segment.scores.data_ptr()
            values += [segment.moment.data_ptr(), segment.moment.numel(), segment.start, segment.width, scores]
        return upload(values, self.device, torch.int64)

    def split(self, words: Tensor, *rows: Tensor) -> Iterator[tuple[Any, ...]]:
        """Yield each segment, its part of the mask ``words`` (n / 64,), and its columns of ``rows`` (n,)."""
        for segment in self.segments:
            first, last = segment.start // 64, (segment.start + segment.width) // 64
            yield segment, words[first:last], *(row[segment.columns] for row in rows)


class Sent(NamedTuple):
    """The result (R, n) of a pass, split at a mask; the pass may overwrite its input rows.

    ``payload`` (R, k) = the values at the mask ``words`` (R, n / 64), times ``share``; ``residual_out`` (R, n) = the
    values off it, 0 on it. ``bit_offsets``: ``mask.directory(words)``. ``payload`` may be the rows if all bits are set.
    """

    words: Tensor
    bit_offsets: Tensor | None
    payload: Tensor
    residual_out: Tensor
    share: float = 1.0


def add_up(
    rows: Tensor, residual: Tensor, moments: Moments, beta1: float, *, sent: Sent, choose: bool,
    common: Tensor | None = None, own_row: int = 0,
) -> None:  # fmt: skip
    """Make m~ = (1-b1) ``rows`` + ``residual`` (R, n) + b1 moment, and from it ``sent`` and, to ``choose``, scores.

    The payload lacks b1 moment, which the receiver has. If all ranks have the moments, there is one row. Else
    ``common`` (n,) is given, this rank's moments belong to ``own_row``, and b1 moment and ``common`` enter scores only.
    """
    if rows.numel():
        _backend(rows).add_up(rows, residual, moments, beta1, sent, choose, common, own_row)


def advance(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, next_moment: Tensor, gradient: Tensor,
    common: Tensor | None = None, common_out: Tensor | None = None, bit_offsets: Tensor | None = None,
) -> None:  # fmt: skip
    """Make the next moment and its gradient from the ranks' mean ``payload``.

    On the mask: ``next_moment`` = b1 moment + mean; ``gradient`` = mean / (1-b1). Off it both are 0. ``common`` is a
    term of all ranks that only a row's owner knows: on the mask it is first added to the mean, and ``common_out`` = 0;
    off it ``common_out`` = ``common`` + b1 moment.

    Args:
        payload: (k,) at the mask ``words`` (n / 64,) with the directory ``bit_offsets``; may be ``gradient`` if the
            mask is all ones.
        next_moment, gradient, common, common_out: (n,), n a multiple of 64; common_out may be common; next_moment is
            not written in columns without a moment.
    """
    if gradient.numel():
        arguments = payload, moments, words, beta1, next_moment, gradient, common, common_out, bit_offsets
        _backend(gradient).advance(*arguments)
