"""The step that Adam would take along gradients. ``reference``, ``cpu`` and ``triton`` agree to rounding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from thinwire.ops.backends import backend
from thinwire.ops.norms import Limit, Samples
from thinwire.ops.programs import check_width

__all__ = ["Adam", "DirectionSegment", "direction"]

_backend = backend("thinwire.ops.direction")


class DirectionSegment(NamedTuple):
    """A tensor: columns ``[start, start + width)`` of all rows, index of its lr and scale, Adam's beta2 and eps."""

    start: int
    width: int
    tensor_index: int
    beta2: float
    eps: float

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.width)


class Adam(NamedTuple):
    """Steps of Adam without momentum along gradients (R, n), to take them later: the arguments of ``direction``.

    Before, ``limit`` cuts outliers among the gradients, and ``samples`` of them are taken. Its parameters are the
    ``segments``. ``second_out`` is other memory than ``second``.
    """

    second: Tensor
    second_out: Tensor
    segments: Sequence[DirectionSegment]
    lr: Tensor
    scale: Tensor
    factor: Tensor
    samples: Samples | None = None
    limit: Limit | None = None

    def take(self, rows: Tensor) -> None:
        """Replace the gradients in ``rows``, which lie in the memory that ``limit`` cuts."""
        if self.limit is not None:
            self.limit.cut()
        if self.samples is not None:
            self.samples.take(rows)
        direction(
            rows, self.second, self.second_out, None, None, self.segments, lr=self.lr, scale=self.scale,
            factor=self.factor, beta1=0.0,
        )  # fmt: skip


def direction(
    rows: Tensor, second: Tensor, second_out: Tensor, first: Tensor | None, first_out: Tensor | None,
    segments: Sequence[DirectionSegment], *, lr: Tensor, scale: Tensor, factor: Tensor, beta1: float,
) -> None:  # fmt: skip
    """Replace the gradients g in ``rows`` (R, n) by the steps that Adam would take along them.

    v' = b2 v + (1-b2) g^2;  m' = b1 m + (1-b1) g, or g itself;  ``rows`` = lr m' / (sqrt(v' scale factor) + eps).

    All are float32; a v' beyond float32 becomes its largest value. Rows may be apart in memory, each is contiguous.

    Args:
        second, second_out: v and v' (R, n). first, first_out: m and m' (R, n), or None: no momentum.
        lr, scale: (tensors,), on the device of the rows; they include bias corrections, if any. factor: 0-dim.
    """
    check_width(rows)
    if rows.numel() and segments:
        _backend(rows).direction(rows, second, second_out, first, first_out, segments, lr, scale, factor, beta1)
