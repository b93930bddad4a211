# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernels for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``), the same bits as ``reference``.

A program takes 512 elements of a row. Where its payload begins is read from the *rank directory*: the number of set
bits before each 512, an exclusive prefix sum of the counts; so programs are independent, and no shape depends on data.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.mask import reference

NAN_BITS = 0x7F800001  # any NaN, as an integer: all are equal, and larger than infinity
BLOCK = 512
"""Elements per program, and per entry of the directory."""


@triton.jit
def _bits(words, at, inside):
    """The mask bits (0 or 1) of the elements ``at``."""
    word = tl.load(words + at // 64, mask=inside, other=0)
    return ((word >> (at % 64)) & 1).to(tl.int32)


@triton.jit
def _count(words, words_stride, counts, counts_stride, n, BLOCK: tl.constexpr):
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + row * counts_stride + block, tl.sum(_bits(words + row * words_stride, at, at < n)))


@triton.jit
def _gather_keep(
    rows, stride, old, old_stride, words, words_stride, before, before_stride, payload, payload_stride, new, new_stride,
    n, FEEDBACK: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(rows + row * stride + at, mask=inside, other=0)
    if FEEDBACK:
        total += tl.load(old + row * old_stride + at, mask=inside, other=0)
    bits = _bits(words + row * words_stride, at, inside)
    place = tl.load(before + row * before_stride + block) + tl.cumsum(bits, 0) - bits
    tl.store(payload + row * payload_stride + place, total, mask=bits != 0)
    if KEEP:
        tl.store(new + row * new_stride + at, tl.where(bits != 0, 0.0, total), mask=inside)


@triton.jit
def _scatter(
    payload, payload_stride, words, words_stride, before, before_stride, out, stride, n, ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    bits = _bits(words + row * words_stride, at, inside)
    place = tl.load(before + row * before_stride + block) + tl.cumsum(bits, 0) - bits
    values = tl.load(payload + row * payload_stride + place, mask=bits != 0, other=0.0)
    tl.store(out + row * stride + at, values, mask=inside if ALL else bits != 0)


@triton.jit
def _pack(flags, flags_stride, words, words_stride, count, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 64)
    at = word[:, None] * 64 + bit[None, :]
    inside = (word < count)[:, None]
    flag = tl.load(flags + row * flags_stride + at, mask=inside, other=0).to(tl.int64)
    tl.store(words + row * words_stride + word, tl.sum(flag << bit[None, :].to(tl.int64), axis=1), mask=word < count)


def _grid(words: Tensor) -> tuple[int, int]:
    return triton.cdiv(words.shape[1] * reference.WORD, BLOCK), words.shape[0]


def directory(words: Tensor) -> Tensor:
    """Set bits of each row before every 512 elements: (R, blocks) int32."""
    counts = torch.empty(_grid(words)[::-1], dtype=torch.int32, device=words.device)
    _count[_grid(words)](words, words.stride(0), counts, counts.stride(0), words.shape[1] * reference.WORD, BLOCK)
    return (counts.cumsum(1) - counts).int()


def popcount(words: Tensor) -> Tensor:
    counts = torch.empty(_grid(words)[::-1], dtype=torch.int32, device=words.device)
    _count[_grid(words)](words, words.stride(0), counts, counts.stride(0), words.shape[1] * reference.WORD, BLOCK)
    return counts.sum(1)


def gather_keep(
    rows: Tensor, residual: Tensor | None, words: Tensor, payload: Tensor, residual_out: Tensor | None
) -> None:
    before = directory(words)
    old = rows if residual is None else residual
    new = rows if residual_out is None else residual_out  # not written to unless kept
    _gather_keep[_grid(words)](
        rows, rows.stride(0), old, old.stride(0), words, words.stride(0), before, before.stride(0), payload,
        payload.stride(0), new, new.stride(0), rows.shape[1], residual is not None, residual_out is not None, BLOCK,
    )  # fmt: skip


def scatter(payload: Tensor, words: Tensor, out: Tensor) -> None:
    _spread(payload, words, out, everything=True)


def write_at(payload: Tensor, words: Tensor, out: Tensor) -> None:
    _spread(payload, words, out, everything=False)


def _spread(payload: Tensor, words: Tensor, out: Tensor, *, everything: bool) -> None:
    before = directory(words)
    _scatter[_grid(words)](
        payload, payload.stride(0), words, words.stride(0), before, before.stride(0), out, out.stride(0), out.shape[1],
        everything, BLOCK,
    )  # fmt: skip


def scatter_add(payload: Tensor, words: Tensor, out: Tensor, scale: float) -> None:
    expanded = torch.empty((1, out.numel()), dtype=out.dtype, device=out.device)
    out.zero_()
    for values, row in zip(payload.split(1), words.split(1), strict=True):
        scatter(values, row, expanded)
        out.add_(expanded[0])
    if scale != 1.0:
        out.mul_(scale)


def pack(flags: Tensor, words: Tensor) -> None:
    grid = (triton.cdiv(words.shape[1], 64), words.shape[0])
    _pack[grid](flags.view(torch.uint8), flags.stride(0), words, words.stride(0), words.shape[1], 64)


def topk_mask(values: Tensor, k: int, words: Tensor) -> None:
    """The selection is torch's own (by radix on CUDA). It does not say which of equal values it takes: those above its
    smallest are all in, and of those that equal it the first ones."""
    magnitudes = (values.view(torch.int32) & 0x7FFFFFFF).clamp_max_(NAN_BITS)
    smallest = magnitudes.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    flags, equal = magnitudes > smallest, magnitudes == smallest
    missing = k - flags.sum(1, keepdim=True)
    pack(flags.logical_or_(equal & (equal.cumsum(1, dtype=torch.int32) <= missing)), words)


# Not on any hot path, or one pass of torch's already.
unpack, indices, from_indices = reference.unpack, reference.indices, reference.from_indices
