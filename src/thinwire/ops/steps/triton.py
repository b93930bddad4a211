# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton: one launch for all tensors, wherever they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from thinwire.base.device import uploaded
from thinwire.ops.gpu import alignment, along, kernel, launch, whole
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
    bits = np.array(factors, np.float32).view(np.int32).tolist()
    bases = weights[0].data_ptr(), changes[0].data_ptr()
    table: list[int] = []
    for weight, change, factor_bits in zip(weights, changes, bits, strict=True):
        distances = [(tensor.data_ptr() - base) // 4 for tensor, base in zip((weight, change), bases, strict=True)]
        table += [*distances, weight.numel(), factor_bits]
    device, flat = weights[0].device, [tensor.view(-1) for tensor in (*weights, *changes)]
    programs = programs_on(device, (weight.numel() for weight in weights), BLOCK)
    launch(
        _take, (len(programs) // 2,), flat[0], flat[len(weights)], programs, uploaded(table, device, torch.int64),
        BLOCK=BLOCK, ALIGN=alignment(*flat),
    )  # fmt: skip
