# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba kernels for CPU tensors, the same bits as ``reference``: masks are walked word by word, set bits by their
trailing zeros, so that the cost follows the number of set bits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numba import uint64
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.ops.kernels import by_row
from thinwire.ops.mask import reference

WORD = 64


@intrinsic
def trailing_zeros(context, word):
    def code(compiler, builder, signature, arguments):
        return builder.cttz(arguments[0], compiler.get_constant(types.boolean, False))

    return types.uint64(types.uint64), code


@intrinsic
def set_bits(context, word):
    def code(compiler, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), code


@by_row
def _gather_keep(rows, residual, words, payload, residual_out):
    buffer = np.empty(WORD, np.float32)
    slot = 0
    for i in range(words.size):
        word = words[i]
        if word == 0 and residual_out is None:
            continue
        if slot + np.int64(set_bits(word)) > payload.size:
            return False
        values = rows[WORD * i : WORD * (i + 1)]
        total = buffer if residual_out is None else residual_out[WORD * i : WORD * (i + 1)]
        if residual is None:
            for j in range(WORD):
                total[j] = values[j]
        else:
            addends = residual[WORD * i : WORD * (i + 1)]
            for j in range(WORD):
                total[j] = values[j] + addends[j]
        while word != 0:
            j = trailing_zeros(word)
            payload[slot] = total[j]
            if residual_out is not None:
                total[j] = np.float32(0)
            slot += 1
            word &= word - uint64(1)
    return slot == payload.size


@by_row
def _scatter(payload, words, out, factor):
    """Write ``payload`` at the mask; off it a value becomes 0 (``factor`` None), or ``factor`` times itself.

    A mask with more bits than values, or one beyond the columns, is refused, as is one with fewer when all is written.
    """
    full_words, tail = out.size // WORD, out.size % WORD
    if tail != 0 and words[full_words] >> uint64(tail) != 0:
        return False
    slot = 0
    for start in range(0, out.size, WORD):
        values, word = out[start : start + WORD], words[start // WORD]
        if factor is None:
            values[:] = np.float32(0)
        else:
            for j in range(values.size):
                values[j] *= np.float32(factor)
        if slot + np.int64(set_bits(word)) > payload.size:
            return False
        while word != 0:
            values[trailing_zeros(word)] = payload[slot]
            slot += 1
            word &= word - uint64(1)
    return slot == payload.size


@by_row
def _popcount(words, count):
    total = uint64(0)
    for i in range(words.size):
        total += set_bits(words[i])
    count[0] = total


@by_row
def _from_indices(positions, words, rise):
    """Refuse positions out of range, which would become addresses, and with ``rise`` those that do not rise."""
    previous = np.int64(-1)
    for i in range(positions.size):
        position = np.int64(positions[i])
        if not 0 <= position < WORD * words.size or (rise and position <= previous):
            return False
        words[position >> 6] |= uint64(1) << uint64(position & 63)
        previous = position
    return True


def _expect(exact: bool, payload: Tensor) -> None:
    if not exact:
        raise ThinwireError(f"a row's mask does not have the {payload.shape[1]} bits that its payload has room for")


directory = reference.directory


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    bit_offsets: Tensor | None = None,
) -> None:
    _expect(_gather_keep(rows, residual, words, payload, residual_out), payload)


def scatter(payload: Tensor, words: Tensor, out: Tensor, bit_offsets: Tensor | None = None) -> None:
    _expect(_scatter(payload, words, out, None), payload)


collect = functools.partial(reference.collect, gather=gather_keep)
renew = functools.partial(reference.renew, scatter_segment=_scatter)


def pack(flags: Tensor, words: Tensor) -> None:
    packed = np.packbits(flags.numpy(), axis=1, bitorder="little")
    words.copy_(torch.from_numpy(packed.view(np.int64)))


def popcount(words: Tensor) -> Tensor:
    counts = torch.empty((len(words), 1), dtype=torch.int64)
    _popcount(words, counts)
    return counts.squeeze(1)


def from_indices(positions: Tensor, words: Tensor, rise: bool = False) -> None:
    words.zero_()
    if not _from_indices(positions, words, rise):
        raise reference.list_error(words)


def from_lists(lists: Sequence[tuple[Tensor, slice]], words: Tensor) -> None:
    for positions, columns in lists:
        from_indices(positions, words[:, columns], rise=True)
