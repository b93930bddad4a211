"""The specification: one operation after the other, each on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.base.random import Drawn
from thinwire.ops import quant
from thinwire.ops.quant import Format
from thinwire.ops.rows import Places, pack, unpack


def write(
    own: Tensor, held: Tensor | None, encoded: Places, kept: Places, format: Format, codes: Tensor, scales: Tensor,
    message: Tensor, drawn: Drawn | None,
) -> None:  # fmt: skip
    values = torch.empty((1, scales.shape[1] * format.group), dtype=torch.float32, device=own.device)
    if encoded.parts:
        pack(own if held is None else own - held, encoded, values[0])
    if drawn is None:
        quant.quantize(values, format, codes, scales)
    else:
        quant.quantize_segments(values, format, codes, scales, drawn)
    pack(own, kept, message)


def read(
    codes: Tensor, scales: Tensor, messages: Tensor, encoded: Places, kept: Places, format: Format, rows: Tensor,
    mine: int, held: Tensor | None,
) -> None:  # fmt: skip
    values = torch.empty((1, scales.shape[1] * format.group), dtype=torch.float32, device=rows.device)
    for number, row in enumerate(rows):
        at, target = slice(number, number + 1), held if held is not None and number == mine else row
        quant.dequantize(codes[at], scales[at], format, values)
        unpack(values[0], encoded, target, add=held is not None)
        unpack(messages[number], kept, target)
        if target is held:
            row.copy_(held)
