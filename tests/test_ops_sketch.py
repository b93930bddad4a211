"""The count sketch: how much is left at which load, rows that are not full, and sums that are not exact.

Fast code against the reference: test_ops_sparse.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.ops import mask
from thinwire.ops.sketch import cpu, reference


def marked(n: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """k of n elements: flags (1, n), their mask and normal values."""
    generator = torch.Generator().manual_seed(seed)
    flags = torch.zeros(1, n, dtype=torch.bool)
    flags[0, torch.randperm(n, generator=generator)[:k]] = True
    words = mask.pack(flags, torch.empty(1, n // mask.WORD, dtype=torch.int64))
    return flags, words, torch.randn(1, k, generator=generator)


def share_left(k: int, load: float, seed: int) -> float:
    _, words, _ = marked(64 * k // 4, k, seed)
    left = torch.empty_like(words)
    cpu.sketch_peel(torch.empty(1, 3 * (int(k / load / 3) + 8)), words, seed, None, left, False)
    return int(mask.popcount(left)) / k


def test_left_overs_by_load():
    """The table of docs/tagc.md: pytest tests/test_ops_sketch.py -k load -s"""
    table = {}
    for load in (0.5, 0.7, 0.75, 0.79, 0.82, 0.85, 0.9, 1.0, 1.2, 2.0):
        table[load] = [max(share_left(k, load, seed) for seed in range(5)) for k in (200, 2000, 50000)]
        print(f"| {load:.2f} | " + " | ".join(f"{share:.1%}" for share in table[load]) + " |")
    assert table[0.7] == [0, 0, 0] and table[0.79][2] == 0  # small tables fail earlier
    assert all(share > 0.3 for share in table[0.85][1:]) and all(share > 0.7 for share in table[1.0])


@pytest.mark.parametrize("module", [reference, cpu])
def test_sums_that_are_not_exact_come_out_to_rounding(module):
    """Load 0.75, values that were not rounded: a stack is off by 0.19 here."""
    flags, words, payload = marked(64 * 2000, 6000, 1)
    wire, out, left = torch.empty(1, 3 * 2667), torch.empty(1, 64 * 2000), torch.empty_like(words)
    module.sketch_encode(payload, words, 5, wire)
    module.sketch_peel(wire, words, 5, out, left, False)
    assert not left.any() and (out[~flags] == 0).all()
    assert (out[flags] - payload[0]).abs().max() < 2e-5


def test_what_follows_the_set_bits_is_not_read():
    _, words, payload = marked(6400, 300, 2)
    found = []
    for module in (reference, cpu):
        padded = torch.cat([payload, torch.full((1, 50), torch.nan)], 1)
        wire, acc = torch.full((1, 600), torch.nan), torch.zeros(1, 6400)
        module.sketch_encode(padded, words, 3, wire)
        module.settle(padded, padded, words, words.clone().bitwise_and_(0xFFFF), acc)
        found.append((wire, acc))
    assert found[0][1].isfinite().all() and torch.equal(found[0][1], found[1][1])
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
