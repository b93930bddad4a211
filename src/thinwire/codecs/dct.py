"""The codec that sends the largest frequencies of every block of values."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire import device as devices
from thinwire.codecs.base import Codec, Space
from thinwire.errors import ThinwireError
from thinwire.streams import Seeds

WIDTH = 64
"""Columns of a block."""
BLOCKS = 128
"""Blocks that are transformed at once. More => fewer kernel launches, more memory for a moment."""


@dataclass(frozen=True)
class DctTopK(Codec):
    """The k largest coefficients of each block's discrete cosine transform, with their positions (arXiv 2411.19870).

    A block is ``chunk`` consecutive values of a row, seen as X (chunk / 64, 64) row by row. Its coefficients are
    A X B^T with A and B the orthonormal DCT-II matrices of its two sides (at 64 values, a transform in one dimension).
    The wire of a row is that of its blocks: k values each, then k positions in int16, in no order. Not linear: ranks
    choose different positions. A block with a NaN or an infinity decodes to nothing finite.

    Attributes:
        chunk: values per block, a multiple of 64 up to 32768, as many as int16 counts; larger => fewer bytes for
            the same k, and frequencies of longer stretches.
        k: coefficients sent per block, 1 to ``chunk``; higher => more bytes, less left out.
        dtype: of the values on the wire, float32 or bfloat16 (8 significant bits).

    Raises:
        ThinwireError: anything else.
    """

    linear = False

    chunk: int = 4096
    k: int = 32
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        chunk, k = self.chunk, self.k
        if not isinstance(chunk, int) or not WIDTH <= chunk <= 2**15 or chunk % WIDTH:
            raise ThinwireError(f"DCT: chunk is a multiple of 64 values, from 64 to 32768, got {chunk}; use 4096")
        if not isinstance(k, int) or not 1 <= k <= chunk:
            raise ThinwireError(f"DCT: k is a number of coefficients per chunk, from 1 to {chunk}, got {k}")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ThinwireError(f"DCT: coefficients travel in float32 or bfloat16, not in {self.dtype}")

    @property
    def group(self) -> int:
        return self.chunk

    def wire_numel(self, n: int) -> int:
        return n // self.group * sum(self._parts)

    def _encode(self, rows: Tensor, out: Tensor, seed: Seeds | None, space: Space) -> None:
        down, across = self._matrices(rows.device)
        for blocks, wire in zip(self._slices(rows, self.group), self._slices(out, sum(self._parts)), strict=True):
            coefficients = _sandwich(down, blocks.float().unflatten(2, self._shape), across.T).flatten(2)
            positions = coefficients.abs().topk(self.k, sorted=False).indices
            values = coefficients.gather(2, positions).to(self.dtype)
            wire.copy_(torch.cat([values.view(torch.uint8), positions.to(torch.int16).view(torch.uint8)], 2))

    def _decode(self, wire: Tensor, out: Tensor, space: Space) -> None:
        for part, blocks in zip(self._slices(wire, sum(self._parts)), self._slices(out, self.group), strict=True):
            values, positions = self._open(part)
            self._write(values.new_zeros(*values.shape[:2], self.group).scatter_(2, positions, values), blocks)

    def _decode_sum(self, wire: Tensor, out: Tensor, scale: float, space: Space) -> None:
        """One transform of the sum: equal to the sum of the decodes up to float32 rounding."""
        parts = self._slices(wire, sum(self._parts))
        targets = out.view(1, -1, self.group).split([part.shape[1] for part in parts], 1)
        for part, blocks in zip(parts, targets, strict=True):
            values, positions = self._open(part)
            total = values.new_zeros(values.shape[1], self.group)
            for theirs, where in zip(values * scale, positions, strict=True):
                total.scatter_add_(1, where, theirs)  # a peer's positions differ, so the order is that of the peers
            self._write(total.unsqueeze(0), blocks)

    @property
    def _shape(self) -> tuple[int, int]:
        """Of a block."""
        return self.group // WIDTH, WIDTH

    @property
    def _parts(self) -> tuple[int, int]:
        """Bytes of a block's values and of its positions."""
        return self.dtype.itemsize * self.k, 2 * self.k

    def _matrices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A and B: the transforms along the two sides of a block."""
        down, across = self._shape
        return _dct(down, device), _dct(across, device)

    @staticmethod
    def _slices(rows: Tensor, size: int) -> tuple[Tensor, ...]:
        """``rows`` (R, B * size), some blocks at a time: views (R, b, size)."""
        return rows.unflatten(1, (-1, size)).split(max(BLOCKS // len(rows), 1), 1) if rows.numel() else ()

    def _open(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Values (R, blocks, k) float32 and positions, int64, of ``wire`` (R, blocks, bytes)."""
        parts = wire.split(self._parts, 2)
        # k of every chunk's values: a copy costs nothing, and may lie where view() to a wider dtype wants it
        values, positions = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        columns = positions.view(torch.int16).long()
        seen = columns.numel() and not columns.is_meta and devices.streams(columns.device) is None
        if seen and not bool(((columns >= 0) & (columns < self.group)).all()):
            raise ThinwireError(f"{self}: a position that came is none of a block of {self.group} values")
        return values.view(self.dtype).float(), columns.clamp_(0, self.group - 1)  # a GPU is not waited for

    def _write(self, coefficients: Tensor, out: Tensor) -> None:
        """``out`` (R, blocks, chunk) = what ``coefficients``, of the same shape, are the transform of."""
        down, across = self._matrices(out.device)
        out.copy_(_sandwich(down.T, coefficients.unflatten(2, self._shape), across).flatten(2))


def _sandwich(left: Tensor, blocks: Tensor, right: Tensor) -> Tensor:
    """``left @ block @ right`` of each of ``blocks`` (R, B, h, w) by itself.

    ``matmul`` would make one product of several, whose bits depend on their number, and so on the engine's buckets.
    """
    flat = blocks.flatten(0, 1)
    once = torch.bmm(left.expand(len(flat), -1, -1), flat)
    return torch.bmm(once, right.expand(len(flat), -1, -1)).view(blocks.shape)


@functools.cache
def _dct(size: int, device: torch.device) -> Tensor:
    """(size, size) float32, orthonormal: row u is the cosine of frequency u, ``matrix @ x`` the DCT-II of x."""
    places = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * torch.outer(places, places + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device, torch.float32)
