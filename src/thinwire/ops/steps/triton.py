# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch for all tensors, wherever they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from thinwire.base.device import uploaded
from thinwire.ops.gpu import along, kernel, launch, whole
from thinwire.ops.programs import programs_on

BLOCK = 1024


@kernel
def _take(weight, change, programs, table, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """Step each tensor. ``table``: its distances from the first ``weight`` and ``change`` in elements, its number of
    values, and the bits of its factor."""
    program = programs + 2 * tl.program_id(0)
    line = table + tl.load(program).to(tl.int64) * 4
    element = tl.load(program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < whole(tl.load(line + 2), ALIGN)
    factor = tl.load(line + 3).to(tl.int32).to(tl.float32, bitcast=True)
    weights = along(weight + tl.load(line), element, ALIGN)
    changes = along(change + tl.load(line + 1), element, ALIGN)
    values = factor * tl.load(weights, mask=inside, other=0)
    tl.store(weights, values - tl.load(changes, mask=inside, other=0), mask=inside)


def take(weights: Sequence[Tensor], changes: Sequence[Tensor], factors: Sequence[float]) -> None:
    sizes = [weight.numel() for weight in weights]
    places = np.array([[tensor.data_ptr() for tensor in tensors] for tensors in (weights, changes)], np.int64)
    bits = np.array(factors, np.float32).view(np.int32)
    table = np.stack([*((places - places[:, :1]) // 4), np.array(sizes, np.int64), bits], 1)
    device, programs = weights[0].device, programs_on(weights[0].device, sizes, BLOCK)
    launch(
        _take, (len(programs) // 2,), weights[0].view(-1), changes[0].view(-1), programs,
        uploaded(table.reshape(-1).tolist(), device, torch.int64), BLOCK=BLOCK,
        ALIGN=1 if (places % 16).any() or any(size % 16 for size in sizes) else 16,
    )  # fmt: skip
