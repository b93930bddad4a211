"""The interface of a codec: values <-> wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.ops.direction import Adam

Space = Callable[[object, Sequence[int], torch.dtype], Tensor]
"""(use, shape, dtype) -> scratch memory, zeros at its first use: a bucket's ``buffer``, or a new tensor."""


@dataclass(frozen=True)
class Residual:
    """Error feedback of one encoding: h = rows + ``old`` (None: rows) is encoded, ``new`` = h - its decoded wire.

    Both are (R, n) float32 and may be the same tensor. ``step``: makes steps of gradients, which the rows are then; a
    codec may take them in the pass that encodes. ``guess``: (R, segments) int32, in which a codec of the largest values
    keeps how large the k-th ones were; they save time alone.
    """

    old: Tensor | None
    new: Tensor
    step: Adam | None = None
    guess: Tensor | None = None


class Codec(ABC):
    """Turns values into a wire and back, without communication; holds settings and facts about one step, no state.

    A *row* is the part of a bucket that belongs to one rank: ``n`` values, ``n`` a multiple of ``group``. Rows may be
    apart in memory (any stride in dim 0); each row is contiguous. Results go into ``out`` and scratch memory comes from
    ``space``, so several threads may share a codec. A subclass writes ``wire_numel``, ``_encode`` and ``_decode``, and
    overrides other methods where it can do better.
    """

    linear: bool
    """encode(a) + encode(b) == encode(a + b) up to the rounding of the wire: the network may sum the wire."""

    divisible: bool = True
    """A float32 wire may be divided by the number of ranks before or during the sum, as dense gradients are."""

    verbatim: bool = False
    """The wire of float32 rows is the rows themselves."""

    takes_steps: bool = False
    """``_encode_and_keep`` takes a residual's ``step`` itself."""

    word: int = 4
    """Bytes of the widest dtype that a wire is viewed in: each of its rows begins at a multiple."""

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of the wire: uint8, bfloat16 or float32, the only ones that the network carries."""
        return torch.uint8

    @property
    def group(self) -> int:
        """Elements encoded together. Segments are padded to a multiple, so no group straddles two parameters."""
        return 1

    @property
    def draws(self) -> bool:
        """Tell whether ``encode`` takes random bits and therefore needs a ``seed``."""
        return False

    @abstractmethod
    def wire_numel(self, n: int) -> int:
        """Return the elements of ``wire_dtype`` for a row of ``n`` values (``n`` a multiple of ``group``)."""

    def wire_bytes(self, n: int) -> int:
        """Return the bytes on the wire for a row of ``n`` values."""
        return self.wire_numel(n) * self.wire_dtype.itemsize

    def encode(
        self,
        rows: Tensor,
        out: Tensor,
        *,
        residual: Residual | None = None,
        seed: Seeds | None = None,
        space: Space | None = None,
    ) -> Tensor:
        """Write the wire of ``rows`` (R, n), float32 or bfloat16, to ``out`` (R, wire_numel(n)); return ``out``.

        With ``residual``, ``rows`` are float32 and may be overwritten.
        """
        self._check(rows, out)
        if rows.dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"{self}: encodes float32 or bfloat16, got {rows.dtype}")
        if residual is not None and residual.step is not None and not self.takes_steps:
            residual.step.take(rows)
        self._encode_and_keep(rows, out, residual, seed, space or _new_on(rows.device))
        return out

    def decode(self, wire: Tensor, out: Tensor, *, space: Space | None = None) -> Tensor:
        """Write the values of ``wire`` (R, wire_numel(n)) to ``out`` (R, n), float32; return ``out``."""
        self._check_decode(wire, out)
        self._decode(wire, out, space or _new_on(out.device))
        return out

    def decode_sum(self, wire: Tensor, out: Tensor, scale: float = 1.0, *, space: Space | None = None) -> Tensor:
        """Write ``scale`` * the sum over peers of ``wire`` (N, wire_numel(n)), one row per peer, to ``out`` (n,).

        Float32 throughout, added in rank order: every rank that decodes the same wire gets the same bits.
        """
        if out.dim() != 1 or wire.dim() != 2 or wire.shape[0] < 1:
            raise ThinwireError(
                f"{self}: decode_sum takes a wire of one row per peer and a 1-D result, "
                f"got {tuple(wire.shape)} and {tuple(out.shape)}"
            )
        self._check_decode(wire[:1], out.unsqueeze(0))
        self._decode_sum(wire, out, scale, space or _new_on(out.device))
        return out

    def encode_sum(
        self,
        wire: Tensor,
        out: Tensor,
        n: int,
        scale: float = 1.0,
        *,
        seed: Seeds | None = None,
        space: Space | None = None,
    ) -> Tensor:
        """Encode the result of ``decode_sum`` of ``wire`` (N, wire_numel(n)) to ``out`` (1, wire_numel(n))."""
        for tensor in (wire, out):
            self._check_wire(tensor, (len(tensor), n))
        self._encode_sum(wire, out, n, scale, seed, space or _new_on(wire.device))
        return out

    def _encode_and_keep(
        self, rows: Tensor, out: Tensor, residual: Residual | None, seed: Seeds | None, space: Space
    ) -> None:
        """Encode; decode the wire and subtract it from the rows. Override where one pass can do both."""
        if residual is None:
            self._encode(rows, out, seed, space)
            return
        if residual.old is not None:
            rows.add_(residual.old)
        self._encode(rows, out, seed, space)
        self._decode(out, residual.new, space)
        torch.sub(rows, residual.new, out=residual.new)

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        """Encode without a residual. Not needed where ``_encode_and_keep`` is overridden."""
        raise NotImplementedError

    @abstractmethod
    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None: ...

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        row = space("one peer", (1, out.numel()), torch.float32)
        self._decode(wire[:1], out.unsqueeze(0), space)
        for peer in range(1, wire.shape[0]):
            self._decode(wire[peer : peer + 1], row, space)
            out.add_(row[0])
        if scale != 1.0:
            out.mul_(scale)

    def _encode_sum(self, wire: Tensor, out: Tensor, n: int, scale: float, seed: Seeds | None, space: Space) -> None:
        """Decode the sum, then encode it. Override where one pass can go from wire to wire."""
        if self.verbatim:
            self._decode_sum(wire, out[0], scale, space)
            return
        total = space("sum", (1, n), torch.float32)
        self._decode_sum(wire, total[0], scale, space)
        self._encode_and_keep(total, out, None, seed, space)

    def _check(self, values: Tensor, wire: Tensor) -> None:
        """Refuse shapes and dtypes that do not match, before a kernel writes out of bounds."""
        if values.dim() != 2 or values.shape[1] % self.group:
            raise ThinwireError(
                f"{self}: values must be rows of a multiple of {self.group} elements, got shape {tuple(values.shape)}"
            )
        self._check_wire(wire, (values.shape[0], values.shape[1]))
        self._check_rows(values)

    def _check_wire(self, wire: Tensor, values: tuple[int, int]) -> None:
        """Refuse a ``wire`` that does not match values of the shape ``values`` (R, n)."""
        expected = (values[0], self.wire_numel(values[1]))
        if tuple(wire.shape) != expected or wire.dtype != self.wire_dtype:
            raise ThinwireError(
                f"{self}: the wire of {values} values is {expected} {self.wire_dtype}, "
                f"got {tuple(wire.shape)} {wire.dtype}"
            )
        self._check_rows(wire)

    def _check_rows(self, rows: Tensor) -> None:
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ThinwireError(f"{self}: each row must be contiguous; only the distance between rows is free")

    def _check_decode(self, wire: Tensor, out: Tensor) -> None:
        self._check(out, wire)
        if out.dtype != torch.float32:
            raise ThinwireError(f"{self}: decodes to float32, got {out.dtype}")


def _new_on(device: torch.device) -> Space:
    return lambda use, shape, dtype: torch.zeros(*shape, dtype=dtype, device=device)
