"""Masks and what is sent at them: choose, gather with error feedback, scatter, pack.

A mask is int64 words (R, n / 64), n a multiple of 64: bit j of word i of a row stands for element 64 i + j. Values are
float32. Rows may be apart in memory (any stride in dim 0); each row is contiguous. Payloads hold the values at the
set bits of each row, in order; the number of set bits is the caller's knowledge, so no shape depends on data. On a CPU
a row with another number of bits is refused; on a GPU asking would stall the stream: bits after the k-th count as none,
and so do positions that are out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.backends import backend
from thinwire.ops.rows import Places

__all__ = ["WORD", "Faded", "collect", "directory", "from_indices", "from_lists", "gather_keep",
           "pack", "popcount", "renew", "scatter", "unpack"]  # fmt: skip

WORD = 64
"""Elements per mask word."""

_backend = backend("thinwire.ops.mask")


def _check(
    words: Tensor, *values: Tensor | None, payload: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse what does not belong together, before a kernel reads or writes out of bounds."""
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
    """What a GPU has to know of ``words`` (R, w) before it gathers or scatters: worth keeping while they are the same.

    None where it is not needed.
    """
    found: Tensor | None = _backend(words).directory(words)
    return found


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    before: Tensor | None = None,
) -> Tensor:
    """h = ``rows`` + ``residual`` (R, n); ``payload`` (R, k) = h at the mask; ``residual_out`` = h off it, 0 on it.

    One pass. ``residual`` None: h = rows. ``residual_out`` None: not kept; it may be ``residual`` itself. ``before``:
    ``directory(words)``, if it is known.
    """
    _check(words, rows, residual, residual_out, payload=payload)
    if payload.numel() or residual_out is not None:
        _backend(rows).gather_keep(rows, residual, words, payload, residual_out, before)
    return payload


def scatter(payload: Tensor, words: Tensor, out: Tensor, before: Tensor | None = None) -> Tensor:
    """``out`` (R, n) = ``payload`` (R, k) at the mask, 0 elsewhere. One pass. ``before``: as ``gather_keep`` has it."""
    _check(words, out, payload=payload)
    _backend(out).scatter(payload, words, out, before)
    return out


class Faded(NamedTuple):
    """Columns ``[start, start + numel)`` of rows, with a mask of ``width`` columns; ``k``: its bits in each row.

    ``keep``: what is left of a value off the mask.
    """

    start: int
    numel: int
    width: int
    k: int
    keep: float


def collect(
    row: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, message: Tensor, before: Tensor | None = None
) -> Tensor:
    """``message`` (m,) = what ``renew`` takes of a ``row`` (n,): its values at the mask ``words`` (1, w), and behind
    them those that are ``kept``, whose places are those of one row. On a GPU one launch."""
    _check_parts(message.unsqueeze(0), words, parts, row.unsqueeze(0))
    _backend(row).collect(row, words, parts, kept, message, before)
    return message


def renew(
    messages: Tensor, words: Tensor, parts: Sequence[Faded], kept: Places, rows: Tensor, before: Tensor | None = None
) -> Tensor:
    """``rows`` (R, n) = what ``messages`` (R, m) say at the mask, ``keep`` times what it was off it, in all ``parts``.

    The masks of the parts lie beside each other in ``words`` (R, w), and their values in a message, in their order,
    from its first column on. What is ``kept`` is as it was sent. Other columns are left alone. ``before``:
    ``directory(words)``, if it is known.
    """
    _check_parts(messages, words, parts, rows)
    if rows.numel():
        _backend(rows).renew(messages, words, parts, kept, rows, before)
    return rows


def _check_parts(messages: Tensor, words: Tensor, parts: Sequence[Faded], rows: Tensor) -> None:
    if len(messages) != len(words) or len(rows) != len(words) or rows.dtype != torch.float32:
        raise ThinwireError(f"masks of {len(words)} rows do not go with {len(messages)} and {len(rows)} rows of values")
    if WORD * words.shape[1] != sum(part.width for part in parts) or messages.shape[1] < sum(p.k for p in parts):
        raise ThinwireError(
            f"masks of {words.shape[1]} words and {messages.shape[1]} values are not those of the parts"
        )


def pack(flags: Tensor, words: Tensor) -> Tensor:
    """``flags`` (R, n) bool -> ``words`` (R, n / 64)."""
    _check(words, flags, dtype=torch.bool)
    _backend(flags).pack(flags, words)
    return words


def unpack(words: Tensor, flags: Tensor) -> Tensor:
    """``words`` (R, n / 64) -> ``flags`` (R, n) bool."""
    _check(words, flags, dtype=torch.bool)
    _backend(words).unpack(words, flags)
    return flags


def popcount(words: Tensor) -> Tensor:
    """Set bits of every row of ``words`` (R, w): (R,) int64."""
    if words.is_meta:
        return words.new_empty(len(words))
    counts: Tensor = _backend(words).popcount(words)
    return counts


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> Tensor | None:
    """``from_indices`` of many parts of rows at once: (positions (R, k) int32, their part of ``words``' columns).

    Positions rise, and parts are in the order of their columns. What is no part of any is left alone. On a GPU one
    launch, which gives the masks' ``directory``, too, if the parts are all of ``words``; None otherwise.

    Raises:
        ThinwireError: as ``from_indices``, and where positions do not rise.
    """
    if not lists or not words.numel():
        return None
    before: Tensor | None = _backend(words).from_lists(lists, words)
    return before


def from_indices(positions: Tensor, words: Tensor) -> Tensor:
    """``words`` (R, n / 64) with the bits ``positions`` (R, k) int32 set, in any order, and no others.

    Raises:
        ThinwireError: one of them is none of the columns. (On a GPU, where nobody looks, it counts as no position.)
    """
    _backend(words).from_indices(positions, words)
    return words
