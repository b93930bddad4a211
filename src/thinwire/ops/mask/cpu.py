# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable, var-annotated"
"""Numba, the same bits as ``reference``. Kernels find set bits by trailing zeros; the cost follows their number."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import uint64
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from thinwire.ops.kernels import by_row, njit
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


@njit
def list_bits(values, words, start, positions, payload):
    """List the set bits, numbered from ``start``, and the values there while there is room; fill up with -1 and 0."""
    entry = 0
    for i in range(words.size):
        word = words[i]
        while word != 0 and entry < positions.size:
            column = WORD * i + np.int64(trailing_zeros(word))
            positions[entry] = start + column
            payload[entry] = values[column]
            entry += 1
            word &= word - uint64(1)
    positions[entry:] = -1
    payload[entry:] = np.float32(0)


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
def _write_at(payload, words, out, factor):
    """Write as ``reference.write_at``, and never more bits than values."""
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
def _from_indices(positions, words, rise):
    """Refuse positions out of range, which would become addresses, and, with ``rise``, positions that do not rise."""
    previous = np.int64(-1)
    for i in range(positions.size):
        position = np.int64(positions[i])
        if not 0 <= position < WORD * words.size or (rise and position <= previous):
            return False
        words[position >> 6] |= uint64(1) << uint64(position & 63)
        previous = position
    return True


directory = reference.directory


def gather_keep(
    rows: Tensor,
    residual: Tensor | None,
    words: Tensor,
    payload: Tensor,
    residual_out: Tensor | None,
    bit_offsets: Tensor | None = None,
) -> None:
    if not _gather_keep(rows, residual, words, payload, residual_out):
        raise reference.size_error(payload)


collect = functools.partial(reference.collect, gather=gather_keep)
scatter = functools.partial(reference.scatter, write_at=_write_at)
renew = functools.partial(reference.renew, write_at=_write_at)


def pack(flags: Tensor, words: Tensor) -> None:
    packed = np.packbits(flags.numpy(), axis=1, bitorder="little")
    words.copy_(torch.from_numpy(packed.view(np.int64)))


def from_indices(positions: Tensor, words: Tensor, rise: bool = False) -> None:
    words.zero_()
    if not _from_indices(positions, words, rise):
        raise reference.list_error(words)


from_lists = functools.partial(reference.from_lists, from_indices=from_indices)
