"""Codecs that change the number format and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.base import Codec, Space
from thinwire.codecs.grouped import GroupedBytes
from thinwire.errors import ThinwireError
from thinwire.ops import quant
from thinwire.streams import Seeds


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


def _has_fp8_cast() -> bool:
    if not hasattr(torch, "float8_e4m3fn"):
        return False
    try:
        return torch.tensor([1.0]).to(torch.float8_e4m3fn).float().item() == 1.0
    except (RuntimeError, NotImplementedError):
        return False


@dataclass(frozen=True)
class Fp8(GroupedBytes):
    """E4M3 with one float32 scale per group: 1 + 4 / group bytes per value.

    The largest magnitude of a group maps to 448, the largest E4M3 number, so nothing overflows. Relative error up to
    2^-4 for values above 2^-6 / 448 of the group's largest; below that the absolute error is up to scale * 2^-10.
    A group with a NaN or an infinity decodes to NaN throughout.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _has_fp8_cast():
            raise ThinwireError(f"fp8 needs torch.float8_e4m3fn, which torch {torch.__version__} lacks; use int8")

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        codes, scales = self._split(out, rows.shape[1])
        quant.quantize_fp8(rows, self.group, codes, scales)

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        quant.dequantize_fp8(*self._split(wire, out.shape[1]), self.group, out)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        quant.dequantize_sum_fp8(*self._split(wire, out.shape[0]), self.group, out, scale)
