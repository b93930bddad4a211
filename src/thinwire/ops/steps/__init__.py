"""Steps of many tensors: w = f w - c, with a factor for each.

``reference``, ``cpu`` and ``triton`` give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.ops.backends import backend
from thinwire.ops.steps import reference

__all__ = ["take"]

_backend = backend("thinwire.ops.steps")


def take(weights: Sequence[Tensor], changes: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Set each w of ``weights`` to f w - c, rounded twice; c of ``changes`` has its shape, f of ``factors`` is float32.

    One pass over adjacent float32; other tensors take torch's operations on lists.
    """
    tensors = (*weights, *changes)
    if all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors):
        if tensors:
            _backend(tensors[0]).take(weights, changes, factors)
            torch.autograd.graph.increment_version(weights)  # as an operation of torch does
        return
    reference.take(weights, changes, factors)
