# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable"
"""Numba: at most one pass over memory per kernel, and only over set bits where the mask alone matters."""

from __future__ import annotations

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import njit
from thinwire.ops.mask.cpu import WORD, gather_keep, scatter, trailing_zeros
from thinwire.ops.moments import Moments, Sent
from thinwire.ops.moments.reference import gather, score


@njit
def _add_up(gradient, residual, moment, beta1, rest1):
    m = moment.size
    for i in range(m):
        gradient[i] = rest1 * gradient[i] + residual[i] + beta1 * moment[i]
    for i in range(m, gradient.size):
        gradient[i] = rest1 * gradient[i] + residual[i]


@njit
def _subtract_moment(values, moment, words, beta1):
    for i in range(words.size):
        word = words[i]
        while word != 0:
            element = WORD * i + np.int64(trailing_zeros(word))
            if element < moment.size:
                values[element] -= beta1 * moment[element]
            word &= word - uint64(1)


@njit
def _join_common(mean, common, moment, words, beta1, common_out):
    m = moment.size
    for number in range(words.size):
        start = WORD * number
        word = words[number]
        while word != 0:
            element = start + np.int64(trailing_zeros(word))
            mean[element] += common[element]
            word &= word - uint64(1)
        for i in range(start, min(start + WORD, m)):
            common_out[i] = common[i] + beta1 * moment[i]
        for i in range(max(start, m), start + WORD):
            common_out[i] = common[i]
        word = words[number]
        while word != 0:
            common_out[start + np.int64(trailing_zeros(word))] = np.float32(0)
            word &= word - uint64(1)


@njit
def _advance(mean, moment, words, beta1, rest1, next_moment):
    next_moment[:] = np.float32(0)
    for i in range(words.size):
        word = words[i]
        while word != 0:
            element = WORD * i + np.int64(trailing_zeros(word))
            if element < moment.size:
                next_moment[element] = beta1 * moment[element] + mean[element]
            mean[element] /= rest1
            word &= word - uint64(1)


def add_up(
    rows: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool, common: Tensor | None,
    own_row: int,
) -> None:  # fmt: skip
    b1, rest1 = np.float32(beta1), np.float32(1 - beta1)
    if common is not None:
        values = rows.view(-1).numpy()
        _add_up(values, residual.view(-1).numpy(), values[:0], b1, rest1)
        if choose:
            score(rows[own_row], common, moments, beta1)
    else:
        for segment, words, total, old in moments.split(sent.words[0], rows[0], residual[0]):
            moment = segment.moment.numpy()
            _add_up(total.numpy(), old.numpy(), moment, b1, rest1)
            if choose and segment.scores is not None:
                segment.scores.copy_(total)
            _subtract_moment(total.numpy(), moment, words.numpy().view(np.uint64), b1)
    gather(rows, sent, gather_keep)


def advance(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, next_moment: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, bit_offsets: Tensor | None,
) -> None:  # fmt: skip
    if payload.data_ptr() != gradient.data_ptr():
        scatter(payload.unsqueeze(0), words.unsqueeze(0), gradient.unsqueeze(0))
    b1, rest1 = np.float32(beta1), np.float32(1 - beta1)
    old, new = (gradient if memory is None else memory for memory in (common, common_out))  # not touched
    for segment, bits, *values in moments.split(words, gradient, next_moment, old, new):
        moment, mask = segment.moment.numpy(), bits.numpy().view(np.uint64)
        mean, next_m, x, next_x = (value.numpy() for value in values)
        if common is not None:
            _join_common(mean, x, moment, mask, b1, next_x)
        _advance(mean, moment, mask, b1, rest1, next_m[: moment.size])
