# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Triton kernel for CUDA tensors (and CPU tensors under ``TRITON_INTERPRET=1``): insertion by atomic additions.

Atomic additions come in any order, which changes nothing here: the values are multiples of one power of two and every
sum is exact. Peeling goes in rounds that end when nothing is found any more, which takes a barrier across the whole
grid: that is the reference's loop of torch operations, one kernel each, with one host synchronization per round.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.ops.gpu import kernel, launch
from thinwire.ops.mask.triton import BLOCK, _place, directory
from thinwire.ops.sketch import reference

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX2 = tl.constexpr(0x94D049BB133111EB)
_MIX3 = tl.constexpr(0xD6E8FEB86659FD93)


@kernel
def _encode(
    payload, payload_stride, words, words_stride, before, before_stride, out, stride, n, k, cells, seed,
    GOLDEN: tl.constexpr, MIX1: tl.constexpr, MIX2: tl.constexpr, MIX3: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    on, place = _place(words + row * words_stride, before + row * before_stride + block, at, at < n, k)
    value = tl.load(payload + row * payload_stride + place, mask=on, other=0.0)
    word = (at + 1).to(tl.uint64) * GOLDEN + seed.to(tl.uint64)
    word = (word ^ (word >> 30)) * MIX1
    word = (word ^ (word >> 27)) * MIX2
    first = word ^ (word >> 31)
    second = (first ^ (first >> 32)) * MIX3
    second = second ^ (second >> 32)
    size = tl.full((BLOCK,), 0, tl.uint64) + cells.to(tl.uint64)
    value = tl.where((second & 1) != 0, -value, value)
    to = out + row * stride
    tl.atomic_add(to + (((first >> 32) * size) >> 32).to(tl.int64), value, mask=on)
    tl.atomic_add(to + cells + (((first & 0xFFFFFFFF) * size) >> 32).to(tl.int64), value, mask=on)
    tl.atomic_add(to + 2 * cells + (((second >> 32) * size) >> 32).to(tl.int64), value, mask=on)


def sketch_encode(payload: Tensor, words: Tensor, seed: int, out: Tensor) -> None:
    out.zero_()
    before, n = directory(words), words.shape[1] * 64
    grid = (triton.cdiv(n, BLOCK), words.shape[0])
    launch(
        _encode, grid, payload, words, before, out, n, payload.shape[1], out.shape[1] // 3, seed, GOLDEN=_GOLDEN,
        MIX1=_MIX1, MIX2=_MIX2, MIX3=_MIX3, BLOCK=BLOCK,
    )  # fmt: skip


sketch_peel, round_to, settle = reference.sketch_peel, reference.round_to, reference.settle
