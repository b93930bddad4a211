"""What the engines share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.comm import Comm, local


def all_zero(gradients: Iterable[Tensor | None], comms: Sequence[Comm] = ()) -> bool:
    """Have these ``gradients`` been thrown away, by None or by zeros?

    Collective over ``comms`` unless all are None, because a rank may own nothing but zeros. Waits for the device.
    """
    there = [local(gradient) for gradient in gradients if gradient is not None]
    if not there:
        return True
    found = torch.stack([gradient.any() for gradient in there]).any().float().reshape(1)
    for comm in comms:
        comm.all_reduce(found, "max")
    return not bool(found)
