# mypy: disable-error-code="no-untyped-def, no-untyped-call, call-arg, unreachable"
"""Numba: at most one pass over memory each; where only the mask matters, a walk over its set bits."""

from __future__ import annotations

import numpy as np
from numba import uint64
from torch import Tensor

from thinwire.ops.kernels import njit
from thinwire.ops.mask.cpu import WORD, gather_keep, scatter, trailing_zeros
from thinwire.ops.moments import Moments, MomentSegment, Sent, each_segment
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


def add_up(gradient: Tensor, residual: Tensor, moments: Moments, beta1: float, sent: Sent, choose: bool) -> None:
    _add_up_segment(gradient, residual, moments, sent.words[0], beta1, choose)
    gather(gradient.unsqueeze(0), sent, gather_keep)


@each_segment
def _add_up_segment(
    gradient: Tensor, residual: Tensor, segment: MomentSegment, words: Tensor, beta1: float, choose: bool
) -> None:
    moment, b1 = segment.moment.numpy(), np.float32(beta1)
    _add_up(gradient.numpy(), residual.numpy(), moment, b1, np.float32(1 - beta1))
    if choose and segment.scores is not None:
        segment.scores.copy_(gradient)
    _subtract_moment(gradient.numpy(), moment, words.numpy().view(np.uint64), b1)


def blend(
    rows: Tensor, residual: Tensor, own_row: int, common: Tensor, moments: Moments, beta1: float, sent: Sent,
    choose: bool,
) -> None:  # fmt: skip
    values, old = rows.view(-1).numpy(), residual.view(-1).numpy()
    _add_up(values, old, values[:0], np.float32(beta1), np.float32(1 - beta1))
    if choose:
        score(rows[own_row], common, moments, beta1)
    gather(rows, sent, gather_keep)


def advance(
    payload: Tensor, moments: Moments, words: Tensor, beta1: float, next_moment: Tensor, gradient: Tensor,
    common: Tensor | None, common_out: Tensor | None, bit_offsets: Tensor | None,
) -> None:  # fmt: skip
    if payload.data_ptr() != gradient.data_ptr():
        scatter(payload.unsqueeze(0), words.unsqueeze(0), gradient.unsqueeze(0))
    _advance_segment(gradient, moments, words, beta1, next_moment, common, common_out)


@each_segment
def _advance_segment(
    mean: Tensor, segment: MomentSegment, words: Tensor, beta1: float, next_moment: Tensor, common: Tensor | None,
    common_out: Tensor | None,
) -> None:  # fmt: skip
    values, moment, mask, b1 = mean.numpy(), segment.moment.numpy(), words.numpy().view(np.uint64), np.float32(beta1)
    if common is not None and common_out is not None:
        _join_common(values, common.numpy(), moment, mask, b1, common_out.numpy())
    _advance(values, moment, mask, b1, np.float32(1 - beta1), next_moment[: moment.size].numpy())
