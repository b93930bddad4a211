"""Codecs that send small integers and one scale per group."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.codecs.grouped import GroupedBytes
from thinwire.ops import quant


class Int8(GroupedBytes):
    """Symmetric integers from -127 to 127 with one float32 scale per group: 1 + 4 / group bytes per value.

    The step is max|x| / 127 of the group and values are rounded to the nearest (ties to even): absolute error up to
    step / 2. A zero group has scale 1. A group with a NaN or an infinity decodes to NaN throughout.
    """

    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        self._check_encode(rows, out)
        codes, scales = self._split(out, rows.shape[1])
        quant.quantize_int8(rows, self.group, codes.view(torch.int8), scales)
        return out

    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        self._check_decode(wire, out)
        codes, scales = self._split(wire, out.shape[1])
        return quant.dequantize_int8(codes.view(torch.int8), scales, self.group, out)

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        self._check_sum(wire, out)
        codes, scales = self._split(wire, out.shape[0])
        return quant.dequantize_sum_int8(codes.view(torch.int8), scales, self.group, out, scale)
