"""The specification, made of other operations."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.base.random import Seeds
from thinwire.ops import quant
from thinwire.ops.quant import Format
from thinwire.ops.rows import CopyTable, pack, unpack


def write(
    own: Tensor, resident: Tensor | None, encoded: CopyTable, copied: CopyTable, format: Format, codes: Tensor,
    scales: Tensor, message: Tensor, drawn: Seeds | None,
) -> None:  # fmt: skip
    values = torch.empty((1, scales.shape[1] * format.group), dtype=torch.float32, device=own.device)
    if encoded.segments:
        pack(own if resident is None else own - resident, encoded, values[0])
    quant.quantize(values, format, codes, scales, drawn)
    pack(own, copied, message)


def read(
    codes: Tensor, scales: Tensor, messages: Tensor, encoded: CopyTable, copied: CopyTable, format: Format,
    rows: Tensor, own_row: int, resident: Tensor | None,
) -> None:  # fmt: skip
    values = torch.empty((1, scales.shape[1] * format.group), dtype=torch.float32, device=rows.device)
    for number, row in enumerate(rows):
        own, target = slice(number, number + 1), resident if resident is not None and number == own_row else row
        quant.dequantize(codes[own], scales[own], format, values)
        unpack(values[0], encoded, target, add=resident is not None)
        unpack(messages[number], copied, target)
        if target is resident:
            row.copy_(resident)
