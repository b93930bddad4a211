"""Masks and the values at them: choose, gather with error feedback, scatter, pack.

A mask is int64 words (R, n / 64), n a multiple of 64: bit j of word i of a row stands for element 64 i + j. Values are
float32. Rows may be apart in memory (any stride in dim 0); each row is contiguous. Payloads hold the values at the set
bits of each row, in order. The caller knows the number of set bits, k, so no shape depends on data. CPUs refuse a row
with another number of bits. GPUs, where the check would stall the stream, ignore bits after the k-th and positions out
of range; their kernels need the mask's *directory*, ``bit_offsets``: the number of set bits before each block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.backends import backend
from thinwire.ops.rows import CopyTable

__all__ = ["WORD", "MaskedSegment", "collect", "directory", "from_indices", "from_lists", "gather_keep",
           "pack", "popcount", "renew", "scatter"]  # fmt: skip

WORD = 64
"""Elements per mask word."""

_backend = backend("thinwire.ops.mask")


def _check(
    words: Tensor, *values: Tensor | None, payload: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse tensors that do not match, before a kernel reads or writes out of bounds."""
    for tensor in values:
        if tensor is None:
            continue
        if tensor.shape[-1] != WORD * words.shape[-1]:
            raise ThinwireError(f"a mask of {words.shape[-1]} words covers {WORD * words.shape[-1]} elements, "
                                f"the row has {tensor.shape[-1]}")  # fmt: skip
        if tensor.dim() == 2 and len(tensor) != len(words):
            raise ThinwireError(f"a mask of {len(words)} rows does not go with {len(tensor)} rows of values")
        if tensor.dtype != dtype:
            raise ThinwireError(f"masks take values in {dtype}, got {tensor.dtype}: convert them first")
    if payload is not None and (len(payload) != len(words) or payload.dtype != torch.float32):
        raise ThinwireError(f"a mask of {len(words)} rows needs as many rows of float32 at it, "
                            f"got {tuple(payload.shape)} {payload.dtype}")  # fmt: skip
    for tensor in (words, payload, *values):
        if tensor is not None and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ThinwireError("each row of a mask and its values must be contiguous: call contiguous() first")


def directory(words: Tensor) -> Tensor | None:
    """Return the ``bit_offsets`` of ``words`` (R, w), to keep as long as the mask; None on devices that need none."""
    bit_offsets: Tensor | None = _backend(words).directory(words)
    return bit_offsets


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    bit_offsets: Tensor | None = None,
) -> Tensor:
    """Write h at the mask to ``payload`` (R, k), and h off the mask, 0 on it, to ``residual_out``.

    h = ``rows`` + ``residual`` (R, n), or ``rows`` if ``residual`` is None. ``residual_out`` may be ``residual``; None:
    not stored. ``bit_offsets``: ``directory(words)``, if known.
    """
    _check(words, rows, residual, residual_out, payload=payload)
    if payload.numel() or residual_out is not None:
        _backend(rows).gather_keep(rows, residual, words, payload, residual_out, bit_offsets)
    return payload


def scatter(payload: Tensor, words: Tensor, out: Tensor, bit_offsets: Tensor | None = None) -> Tensor:
    """Write ``payload`` (R, k) at the mask, and 0 elsewhere, to ``out`` (R, n)."""
    _check(words, out, payload=payload)
    _backend(out).scatter(payload, words, out, bit_offsets)
    return out


class MaskedSegment(NamedTuple):
    """Columns ``[start, start + numel)`` of rows, with a mask of ``width`` columns and ``k`` set bits in each row.

    ``factor`` multiplies the values off the mask.
    """

    start: int
    numel: int
    width: int
    k: int
    factor: float


def collect(
    row: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, message: Tensor,
    bit_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Make the ``message`` (m,) for ``renew`` from ``row`` (n,), on a GPU in one launch.

    The values at the mask ``words`` (1, w) come first, then those of the ``copied`` segments, of one row.
    """
    _check_segments(message.unsqueeze(0), words, segments, row.unsqueeze(0))
    _backend(row).collect(row, words, segments, copied, message, bit_offsets)
    return message


def renew(
    messages: Tensor, words: Tensor, segments: Sequence[MaskedSegment], copied: CopyTable, rows: Tensor,
    bit_offsets: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the values of ``messages`` (R, m) at the mask to ``rows`` (R, n); multiply ``rows`` off it by ``factor``.

    The masks of the segments lie beside each other in ``words`` (R, w), and their values at the start of a message, in
    the same order. ``copied`` segments become the values sent; other columns stay as they are.
    """
    _check_segments(messages, words, segments, rows)
    if rows.numel():
        _backend(rows).renew(messages, words, segments, copied, rows, bit_offsets)
    return rows


def _check_segments(messages: Tensor, words: Tensor, segments: Sequence[MaskedSegment], rows: Tensor) -> None:
    if len(messages) != len(words) or len(rows) != len(words) or rows.dtype != torch.float32:
        raise ThinwireError(f"masks of {len(words)} rows do not go with {len(messages)} and {len(rows)} rows of values")
    width, k = sum(segment.width for segment in segments), sum(segment.k for segment in segments)
    if WORD * words.shape[1] != width or messages.shape[1] < k:
        raise ThinwireError(
            f"masks of {words.shape[1]} words and {messages.shape[1]} values are not those of the segments"
        )


def pack(flags: Tensor, words: Tensor) -> Tensor:
    """Pack ``flags`` (R, n) bool into ``words`` (R, n / 64)."""
    _check(words, flags, dtype=torch.bool)
    _backend(flags).pack(flags, words)
    return words


def popcount(words: Tensor) -> Tensor:
    """Count the set bits of every row of ``words`` (R, w): (R,) int64."""
    words = words - (words >> 1 & 0x5555555555555555)  # of pairs of bits, then of fours and of bytes
    words = (words & 0x3333333333333333) + (words >> 2 & 0x3333333333333333)
    words = words + (words >> 4) & 0x0F0F0F0F0F0F0F0F
    return (words * 0x0101010101010101 >> 56).sum(1)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> Tensor | None:
    """Call ``from_indices`` for many ``lists`` at once: (positions (R, k) int32, the columns of ``words`` they fill).

    Positions rise, and lists are in the order of their columns. Other columns stay as they are. A GPU takes one launch,
    which also returns the masks' ``bit_offsets`` if the lists fill all of ``words``; else None.

    Raises:
        ThinwireError: as ``from_indices``, and where positions do not rise.
    """
    if not lists or not words.numel():
        return None
    bit_offsets: Tensor | None = _backend(words).from_lists(lists, words)
    return bit_offsets


def from_indices(positions: Tensor, words: Tensor) -> Tensor:
    """Set in ``words`` (R, n / 64) the bits ``positions`` (R, k) int32, in any order, and no others.

    Raises:
        ThinwireError: a position is out of range, on a CPU.
    """
    _backend(words).from_indices(positions, words)
    return words
