"""Codecs that change the number format and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec, Space
from thinwire.ops import quant


@dataclass(frozen=True)
class _Cast(Codec):
    """The wire is the values in ``wire_dtype``."""

    linear = True

    def wire_numel(self, n: int) -> int:
        return n

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        out.copy_(rows)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        out.copy_(wire)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        quant.sum_rows(wire, out, scale)


@dataclass(frozen=True)
class Fp32(_Cast):
    """4 bytes per value, exact."""

    wire_dtype = torch.float32
    verbatim = True


@dataclass(frozen=True)
class Bf16(_Cast):
    """2 bytes per value, rounded to nearest even: relative error up to 2^-8 (for values from 2^-126 on)."""

    wire_dtype = torch.bfloat16
