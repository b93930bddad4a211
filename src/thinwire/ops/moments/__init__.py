"""SCAPE's passes over first moments: what masks are chosen by, and what becomes of everything once a sum is there.

``reference``, ``cpu`` and ``triton`` agree to float32 rounding. All tensors are adjacent and float32, except masks
(int64 words of 64 elements, ``thinwire.ops.mask``). A pass is over a whole row; the moments in it lie elsewhere, each
in a tensor of its own (:class:`Moments`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.device import upload
from thinwire.ops.backends import backend
from thinwire.ops.programs import programs_of

__all__ = ["Moments", "Part", "Sent", "add_up", "settle"]

PER_PROGRAM = 1024
"""Columns of one moment that one program of a GPU takes."""

_backend = backend("thinwire.ops.moments")


class Part(NamedTuple):
    """Columns ``[start, start + width)`` of a row, multiples of 64, with their moment (m,): none for padding.

    ``scores``: (width,) what this rank chooses a mask of these columns by; None: others do.
    """

    start: int
    width: int
    moment: Tensor
    scores: Tensor | None = None

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)


class Moments:
    """The moments of a row's parameters, beside each other from column 0 to n, wherever they are in memory."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self.parts, self.device = tuple(parts), device

    @functools.cached_property
    def programs(self) -> Tensor:
        """(B,) int32: of each program along a row, the number of its part."""
        return upload(self._programs[0], self.device)

    @functools.cached_property
    def table(self) -> Tensor:
        """(parts * 6,) int64: of each the moment's address, m, start, width, the number of its first program, and the
        address of its scores, or 0."""
        values: list[int] = []
        for part, first in zip(self.parts, self._programs[1], strict=True):
            scores = 0 if part.scores is None else part.scores.data_ptr()
            values += [part.moment.data_ptr(), part.moment.numel(), part.start, part.width, first, scores]
        return upload(values, self.device, torch.int64)

    @property
    def _programs(self) -> tuple[list[int], list[int]]:
        return programs_of((part.width for part in self.parts), PER_PROGRAM)


class Sent(NamedTuple):
    """Where the result (R, n) of a pass goes; the rows that it was made of may then hold anything.

    ``payload`` (R, k) = its values at the mask ``words`` (R, n / 64), times ``share``; ``left`` (R, n) = those off it,
    0 on it. ``before``: ``mask.directory(words)``. Where the mask is all ones, ``payload`` may be those rows.
    """

    words: Tensor
    before: Tensor | None
    payload: Tensor
    left: Tensor
    share: float = 1.0


def add_up(
    rows: Tensor, residual: Tensor, moments: Moments, beta1: float, *, sent: Sent, choose: bool,
    common: Tensor | None = None, mine: int = 0,
) -> None:  # fmt: skip
    """Make m~ = (1-b1) ``rows`` + ``residual`` (R, n) + b1 moment: the scores, if it is to ``choose``, and ``sent``.

    What is sent is without b1 moment on the mask, which whoever gets it has. Where all ranks have it, there is one row.
    Else it is row ``mine`` that this rank's moments are of: their part, and ``common`` (n,), is in the scores alone.
    """
    if not rows.numel():
        return
    if common is None:
        _backend(rows).add_up(rows[0], residual[0], moments, beta1, sent, choose)
    else:
        _backend(rows).blend(rows, residual, mine, common, moments, beta1, sent, choose)


def settle(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, given: Tensor, gradient: Tensor,
    common: Tensor | None = None, common_out: Tensor | None = None, before: Tensor | None = None,
) -> None:  # fmt: skip
    """Of the ranks' mean of what was sent, ``payload``: the next moment, and the gradient that belongs to it.

    On the mask: ``given`` = b1 moment + ``payload``; ``gradient`` = ``payload`` / (1-b1). Off it both are 0.
    ``common``, what all ranks have in common and a row's owner alone knows, joins the mean before: on the mask it is
    added to it, and ``common_out`` = 0; off it ``common_out`` = ``common`` + b1 moment.

    Args:
        payload: (k,) the mean at the mask ``words`` (n / 64,), of which ``before`` is the directory; where that is all
            ones, it may be ``gradient``.
        given, gradient, common, common_out: (n,), n a multiple of 64; common_out may be common; what stands for no
            moment is left alone in given.
    """
    if gradient.numel():
        _backend(gradient).settle(payload, moments, words, beta1, given, gradient, common, common_out, before)


def each(of: Callable[..., None]) -> Callable[..., None]:
    """``of``, which takes one part and its columns, for all of them: arguments as above, ``Moments`` in its place."""

    @functools.wraps(of)
    def all_of(*arguments: object) -> None:
        moments = next(argument for argument in arguments if isinstance(argument, Moments))
        for part in moments.parts:
            of(*(_of_part(argument, part) for argument in arguments))

    return all_of


def _of_part(argument: object, part: Part) -> object:
    if isinstance(argument, Moments):
        return part
    if not isinstance(argument, Tensor):
        return argument
    words = argument.dtype == torch.int64
    return argument[part.start // 64 : (part.start + part.width) // 64] if words else argument[part.columns]
