"""The largest values of rows, by lists of their positions: choose, pack the positions, put values back at them.

Values are (R, n) float32; rows may be apart in memory, each is contiguous. A row consists of *parts*, one of each
parameter, of whose columns ``k`` are chosen. ``found`` (R, m) int32 holds the chosen columns of the row, rising within
a part, from the part's ``place`` on; -1, no column, fills what lies between the parts. ``reference``, ``cpu`` and
``triton`` give the same bits. Where a wire says something that no packing does, CPUs refuse it; GPUs, which would have
to wait for the answer, leave out what lies beyond its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.backends import backend

__all__ = ["LOW", "Part", "largest", "marked", "pack", "packed_bytes", "put", "sum_at", "unpack"]

LOW = (8, 4)
"""Bits of a position that may be packed as they are; of those that take the fewest bytes the first."""

_backend = backend("thinwire.ops.sparse")


class Part(NamedTuple):
    """Of ``width`` columns from ``start`` on, ``k`` are chosen; they are listed from ``place`` on.

    Parts lie side by side, in order. ``width``: a multiple of 64.
    """

    start: int
    width: int
    k: int
    place: int

    @property
    def low(self) -> int:
        """Bits of a position that are packed as they are: 8, or 4 from about one chosen column in 68 on."""
        return min(LOW, key=lambda low: sum(self._sizes(low)))

    @property
    def string(self) -> int:
        """Bytes of what is packed of the upper bits: a multiple of 8."""
        return self._sizes(self.low)[0]

    @property
    def nbytes(self) -> int:
        """Of both: a multiple of 8."""
        return sum(self._sizes(self.low))

    def _sizes(self, low: int) -> tuple[int, int]:
        """Bytes of the upper bits and of the ``low`` lower ones."""
        return -(-(self.k + -(-self.width >> low)) // 64) * 8, -(-self.k * low // 64) * 8


def packed_bytes(parts: Sequence[Part]) -> int:
    """Of a row's packed positions."""
    return sum(part.nbytes for part in parts)


def _check(rows: Tensor, *others: Tensor | None) -> None:
    for tensor in (rows, *others):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ThinwireError(f"the largest values are chosen of float32, got {tensor.dtype}: convert them first")
        if tensor is not None and tensor.shape != rows.shape:
            raise ThinwireError(f"{tuple(tensor.shape)} values do not go with rows of {tuple(rows.shape)}")


def largest(
    rows: Tensor, old: Tensor | None, parts: tuple[Part, ...], new: Tensor | None, found: Tensor, payload: Tensor
) -> None:
    """``new`` = h = ``rows`` + ``old``; ``found``: where the ``k`` largest |h| of each part are; ``payload``: h there.

    Exactly k: of equals those of the lowest columns; a NaN is larger than everything. ``payload`` (R, m) float32 has
    zeros between the parts. ``old`` None: h = ``rows``. ``new`` may be ``rows`` or ``old``; None, which needs ``old``
    to be None: h is kept nowhere.
    """
    _check(rows, old, new)
    _backend(rows).largest(rows, old, parts, new, found, payload)


def marked(rows: Tensor, parts: tuple[Part, ...], words: Tensor) -> Tensor:
    """``words`` (R, n / 64) int64 = a mask of the ``k`` largest |``rows``| of each part, as ``largest`` finds them.

    Of columns that are in none of ``parts`` it has none.
    """
    _check(rows)
    if not parts:
        return words.zero_()
    _backend(rows).marked(rows, parts, words)
    return words


def pack(found: Tensor, parts: tuple[Part, ...], wire: Tensor) -> Tensor:
    """``found`` -> ``wire`` (R, packed_bytes) uint8, rows at multiples of 8 bytes.

    Of the i-th position p of a part the lower b = ``Part.low`` bits are written as they are; of the rest, which rises,
    a one at place (p >> b) + i of a string of k + width / 2^b bits: so many zeros before it as it is high (Elias 1974,
    Fano 1971). A position takes about 9 + width / (256 k) bits with b = 8 and 5 + width / (16 k) with b = 4. A part's
    string comes first, then its lower bits; what comes first is in the lowest bits of a byte.
    """
    if wire.numel():
        _backend(wire).pack(found, parts, wire)
    return wire


def unpack(wire: Tensor, parts: tuple[Part, ...], found: Tensor) -> Tensor:
    """The reverse of ``pack``."""
    if found.numel():
        _backend(wire).unpack(wire, parts, found)
    return found


def put(payload: Tensor, found: Tensor, out: Tensor) -> Tensor:
    """``out`` (R, n) = ``payload`` (R, m) at ``found``, as it was elsewhere."""
    if payload.numel():
        _backend(out).put(payload, found, out)
    return out


def sum_at(payload: Tensor, found: Tensor, parts: tuple[Part, ...], out: Tensor, scale: float = 1.0) -> Tensor:
    """``out`` (n,) = ``scale`` * the sum over peers of ``payload`` (P, m) at their ``found``, in order; 0 elsewhere."""
    if out.numel():
        _backend(out).sum_at(payload, found, parts, out, scale)
    return out
