"""The interface of a codec: values <-> wire."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from thinwire.errors import ThinwireError

WIRE_DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


class Codec(ABC):
    """Values <-> wire, pure, no communication.

    A *row* is the part of a bucket that belongs to one rank: ``n`` values, ``n`` a multiple of ``group``. Rows may be
    apart in memory (any stride in dim 0); each row is contiguous. Every result goes into ``out``; scratch memory is
    kept on the codec, one buffer per (n, device), so one codec object must not be used by two threads at once.
    """

    linear: bool
    """encode(a) + encode(b) == encode(a + b) up to the rounding of the wire: the network may sum the wire."""

    wire_dtype: torch.dtype
    """uint8, bfloat16 or float32: all that the network carries."""

    divisible: bool = True
    """A float32 wire may be divided by the number of ranks before or while it is summed, as dense gradients are."""

    group: int = 1
    """Elements that are encoded together. Segments are padded to a multiple, so no group straddles two parameters."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.device], Tensor] = {}

    @abstractmethod
    def wire_numel(self, n: int) -> int:
        """Elements of ``wire_dtype`` for a row of ``n`` values (``n`` a multiple of ``group``)."""

    def wire_bytes(self, n: int) -> int:
        """Bytes on the wire for a row of ``n`` values."""
        return self.wire_numel(n) * self.wire_dtype.itemsize

    @abstractmethod
    def encode(self, rows: Tensor, out: Tensor) -> Tensor:
        """Write the wire of ``rows`` (R, n), float32 or bfloat16, to ``out`` (R, wire_numel(n)); return ``out``."""

    @abstractmethod
    def decode(self, wire: Tensor, out: Tensor) -> Tensor:
        """Write the values of ``wire`` (R, wire_numel(n)) to ``out`` (R, n), float32; return ``out``."""

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0) -> Tensor:
        """Write ``scale`` * the sum over peers of ``wire`` (N, wire_numel(n)), one row per peer, to ``out`` (n,).

        Float32 throughout, added in rank order: every rank that decodes the same wire gets the same bits.
        """
        self._check_sum(wire, out)
        row = self._scratch_row(out.numel(), out.device)
        self.decode(wire[:1], out.unsqueeze(0))
        for peer in range(1, wire.shape[0]):
            self.decode(wire[peer : peer + 1], row)
            out.add_(row[0])
        return out.mul_(scale) if scale != 1.0 else out

    def try_out(self, device: torch.device) -> None:
        """Compile kernels now, on a little data."""
        values = torch.zeros((1, self.group), device=device)
        wire = torch.zeros((1, self.wire_numel(self.group)), dtype=self.wire_dtype, device=device)
        self.encode(values, wire)
        self.decode(wire, values)
        self.decode_sum(wire, values[0])

    def _scratch_row(self, n: int, device: torch.device) -> Tensor:
        key = (n, device)
        if key not in self._scratch:
            self._scratch[key] = torch.empty((1, n), dtype=torch.float32, device=device)
        return self._scratch[key]

    def _check(self, values: Tensor, wire: Tensor) -> None:
        """Refuse shapes and dtypes that do not belong together, before a kernel writes out of bounds."""
        if values.dim() != 2 or values.shape[1] % self.group:
            raise ThinwireError(
                f"{self}: values must be rows of a multiple of {self.group} elements, got shape {tuple(values.shape)}"
            )
        expected = (values.shape[0], self.wire_numel(values.shape[1]))
        if tuple(wire.shape) != expected or wire.dtype != self.wire_dtype:
            raise ThinwireError(
                f"{self}: the wire of {tuple(values.shape)} values is {expected} {self.wire_dtype}, "
                f"got {tuple(wire.shape)} {wire.dtype}"
            )
        if (values.shape[1] > 1 and values.stride(1) != 1) or (wire.shape[1] > 1 and wire.stride(1) != 1):
            raise ThinwireError(f"{self}: each row must be contiguous; only the distance between rows is free")

    def _check_encode(self, rows: Tensor, out: Tensor) -> None:
        self._check(rows, out)
        if rows.dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"{self}: encodes float32 or bfloat16, got {rows.dtype}")

    def _check_decode(self, wire: Tensor, out: Tensor) -> None:
        self._check(out, wire)
        if out.dtype != torch.float32:
            raise ThinwireError(f"{self}: decodes to float32, got {out.dtype}")

    def _check_sum(self, wire: Tensor, out: Tensor) -> None:
        if out.dim() != 1 or wire.dim() != 2 or wire.shape[0] < 1:
            raise ThinwireError(
                f"{self}: decode_sum takes a wire of one row per peer and a 1-D result, "
                f"got {tuple(wire.shape)} and {tuple(out.shape)}"
            )
        self._check_decode(wire[:1], out.unsqueeze(0))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()" if self.group == 1 else f"{type(self).__name__}(group={self.group})"
