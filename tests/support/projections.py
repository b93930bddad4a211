"""What a projection is, written as a matrix."""

from __future__ import annotations

from torch import Tensor

from thinwire.codecs.projection import Projection
from thinwire.ops.projection import reference


def matrix_of(codec: Projection, segment: int = 0) -> Tensor:
    """(block, m) of a segment: a block x is sent as x @ matrix."""
    drawn = codec.segments[segment][2]
    return reference.projection_of(*drawn).T if codec.estimator.srht else drawn[0]
