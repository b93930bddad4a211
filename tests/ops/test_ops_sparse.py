"""Masks and projections: the fast code against the reference, on odd sizes and poisoned outputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from programs import check_interpreted, needs_triton
from projections import matrix_of
from thinwire.base.errors import ThinwireError
from thinwire.base.random import random_bits, random_normal, random_order, random_signs, seed_of
from thinwire.codecs import Masked, Sparse
from thinwire.codecs.projection import ESTIMATORS, Estimator, Projection
from thinwire.ops import mask, projection, sparse
from thinwire.ops.mask import cpu as mask_cpu
from thinwire.ops.mask import reference as mask_reference
from thinwire.ops.projection import cpu as projection_cpu
from thinwire.ops.projection import reference as projection_reference
from thinwire.ops.sparse import cpu as sparse_cpu
from thinwire.ops.sparse import reference as sparse_reference

POISON = float("nan")


def values(kind: str, rows: int, n: int, seed: int = 0) -> Tensor:
    """Rows that are apart in memory."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n + 64, generator=generator)[:, :n]
    if kind == "ties":
        x = x.round()
    elif kind == "nan":
        x[:, ::7] = math.nan
        x[:, 1::9] = -math.inf
    elif kind == "zero":
        x.zero_()
    elif kind == "heavy":
        x.mul_(torch.randn(rows, n, generator=generator).mul_(2).exp_())
    return x


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7e7), b.nan_to_num(nan=7e7))


def a_mask(x: Tensor, k: int) -> Tensor:
    return sparse.marked(x, (sparse.ListSegment(0, x.shape[1], k, 0),), torch.full((len(x), x.shape[1] // 64), -7))


@pytest.mark.parametrize("kind", ["normal", "ties", "nan", "zero", "heavy"])
@pytest.mark.parametrize("n", [64, 640, 64 * 999, 64 * 2048])
def test_topk_is_exact_with_ties_to_the_lowest_index(n, kind):
    x = values(kind, 2, n)
    for k in {1, 2, n // 100 + 1, n // 10, n // 2, n - 1}:
        slow, fast = torch.full((2, n // 64), -7), torch.full((2, n // 64), -9)
        for module, words in ((sparse_reference, slow), (sparse_cpu, fast)):
            module.marked(x, (sparse.ListSegment(0, n, k, 0),), words)
        assert torch.equal(slow, fast), k
        assert mask.popcount(fast).tolist() == [k, k]
    assert a_mask(x, 0).eq(0).all() and a_mask(x, n).eq(-1).all()


@pytest.mark.parametrize("kind", ["normal", "nan"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 64, 1), (3, 640, 63), (2, 64 * 501, 3200)])
def test_gather_scatter_and_positions(rows, n, k, kind):
    x, e = values(kind, rows, n), values("normal", rows, n, 1)
    words = a_mask(values("heavy", rows, n, 2), k)
    found = []
    for module in (mask_reference, mask_cpu):
        payload, rest = torch.full((rows, k), POISON), torch.full((rows, n), POISON)
        module.gather_keep(x, e, words, payload, rest)
        plain = torch.full((rows, k), POISON)
        module.gather_keep(x, None, words, plain, None)
        out = torch.full((rows, n), POISON)
        module.scatter(payload, words, out)
        flags = mask_reference.flags_of(words)
        positions = flags.nonzero()[:, 1].view(rows, k).int()
        again = torch.full_like(words, -7)
        module.from_indices(positions, again)
        assert torch.equal(again, words)
        again.fill_(-7)
        module.pack(flags, again)
        assert torch.equal(again, words)
        assert same(out + rest, torch.where(flags, (x + e) + 0.0, x + e))  # nothing is lost, bit for bit
        found.append((payload, rest, plain, out))
    for slow, fast in zip(*found, strict=True):
        assert same(slow, fast)
    in_place = e.clone()
    mask.gather_keep(x, in_place, words, torch.empty(rows, k), in_place)
    assert same(in_place, found[0][1])


@given(st.integers(1, 20), st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_masks_of_any_density(count, density, seed):
    n = 64 * count
    x = values("normal", 2, n, seed)
    k = int(density * n)
    words = a_mask(x, k)
    kept, rest = torch.empty(2, k), torch.empty(2, n)
    mask.gather_keep(x, None, words, kept, rest)
    assert torch.equal(mask.scatter(kept, words, torch.empty(2, n)) + rest, x)
    if 0 < k < n:
        assert (kept.abs().amin(1) >= rest.abs().amax(1)).all()


def test_values_at_a_shared_mask_are_linear():
    x, y = values("normal", 2, 640), values("heavy", 2, 640, 1)
    codec = Masked(a_mask(x, 100), 100)
    a, b, c = (codec.encode(v, torch.empty(2, 100)) for v in (x, y, x + y))
    assert torch.equal(a + b, c)
    half = Masked(codec.words, 100, dtype=torch.bfloat16)
    narrow = half.decode(half.encode(x, torch.empty(2, 100, dtype=torch.bfloat16)), torch.empty(2, 640))
    assert torch.allclose(narrow, codec.decode(a, torch.empty(2, 640)), rtol=2**-8)
    owner = Masked(codec.words, 100, owner_row=1)
    assert torch.equal(owner.decode(a[1:], torch.empty(1, 640)), codec.decode(a, torch.empty(2, 640))[1:])


def test_topk_wire():
    x = values("normal", 3, 640)
    codec = Sparse(((128, 5), (512, 11)))
    wire = codec.encode(x, torch.zeros(3, codec.wire_numel(640), dtype=torch.uint8))
    out = codec.decode(wire, torch.full((3, 640), POISON))
    kept = out != 0
    assert kept[:, :128].sum(1).tolist() == [5] * 3 and kept[:, 128:].sum(1).tolist() == [11] * 3
    assert torch.equal(out[kept], x[kept])
    total = codec.decode_sum(wire, torch.full((640,), POISON), 0.5)
    assert torch.equal(total, ((out[0] + out[1]) + out[2]) * 0.5)


@pytest.mark.parametrize("block", [2, 8, 64, 256, 512])
def test_srht_is_an_orthogonal_projection(block):
    lanes = projection.LANES
    n, kept = 3 * block * lanes, max(block // 8, 1)
    x, e = values("normal", 2, n), values("normal", 2, n, 1)
    signs, chosen = random_signs(3, block), random_order(4, block)[:kept]
    found = []
    for module in (projection_reference, projection_cpu):
        payload, rest = torch.full((2, n // block * kept), POISON), torch.full((2, n), POISON)
        module.srht_project(x, e, signs, chosen, payload, rest)
        out = torch.full((2, n), POISON)
        module.srht_reconstruct(payload, signs, chosen, out)
        assert torch.allclose(out + rest, x + e, atol=1e-4)
        again, nothing = torch.empty_like(payload), torch.empty(2, n)
        module.srht_project(out, None, signs, chosen, again, nothing)
        assert torch.allclose(again, payload, atol=1e-4) and nothing.abs().max() < 1e-4  # P P = P
        found.append((payload, rest, out))
    for slow, fast in zip(*found, strict=True):
        assert torch.allclose(slow, fast, atol=1e-4)


def projection_of(of: Estimator, seed: int, step: int, *segments: tuple[str, int, int]) -> Projection:
    device = torch.device("cpu")
    return Projection(of, [(start, width, of.draw(seed, name, step, device)) for name, start, width in segments])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_projections_are_linear_and_what_their_matrix_says(estimator):
    block, ratio = 32, 8
    of, segments = Estimator(estimator, ratio, block), (("a", 0, 1024), ("b", 1024, 512))
    codec = projection_of(of, 5, 3, *segments)
    n = 1536
    x, y = values("normal", 2, n), values("heavy", 2, n, 1)
    wires = [codec.encode(v, torch.full((2, n // ratio), POISON)) for v in (x, y, x + y)]
    assert torch.allclose(wires[0] + wires[1], wires[2], atol=1e-4)
    matrix, other = matrix_of(codec), matrix_of(codec, 1)
    assert matrix.shape == (block, block // ratio) and not torch.equal(matrix, other)
    lanes = 16 if "srht" in estimator else 1
    blocks = x[:, :1024].reshape(2, -1, block, lanes).transpose(2, 3)
    sent = wires[0][:, : 1024 // ratio].reshape(2, -1, block // ratio, lanes).transpose(2, 3)
    assert torch.allclose(blocks @ matrix, sent, atol=1e-4)
    if estimator != "paper":
        assert torch.allclose(matrix.T @ matrix, torch.eye(block // ratio), atol=1e-5)
    assert not torch.equal(matrix_of(projection_of(of, 5, 4, *segments)), matrix)


def test_a_cycle_sends_every_direction_once():
    of = Estimator("cyclic_srht", 8, 32)
    cycle = [matrix_of(projection_of(of, 0, step, ("a", 0, 512))) for step in range(8, 16)]
    whole = torch.cat(cycle, 1)
    assert torch.allclose(whole @ whole.T, torch.eye(32), atol=1e-5)


def test_gaussians_are_unbiased():
    torch.manual_seed(0)
    h = torch.randn(1, 64)
    mean, error = torch.zeros(1, 64), 0.0
    for step in range(2000):
        codec = projection_of(Estimator("paper", 4, 64), 1, step, ("a", 0, 64))
        out = codec.decode(codec.encode(h, torch.empty(1, 16)), torch.empty(1, 64))
        mean += out / 2000
        error += float((out - h).square().sum() / h.square().sum()) / 2000
    variance = 65 / 16  # w = (B + 1) / m
    assert (mean - h).norm() < 3 * math.sqrt(variance / 2000) * h.norm()
    assert error == pytest.approx(variance, rel=0.05)


def test_streams_depend_on_everything_and_on_nothing_else():
    assert seed_of(0, "a", 1) == seed_of(0, "a", 1)
    seeds = [seed_of(0, "a", 1), seed_of(1, "a", 1), seed_of(0, "b", 1), seed_of(0, "a", 2), seed_of(0, "a", 11)]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert torch.equal(random_bits(7, 100)[:50], random_bits(7, 50))
    normal = random_normal(3, 200_001)
    assert abs(normal.mean()) < 0.01 and abs(normal.std() - 1) < 0.01 and abs(normal.pow(4).mean() - 3) < 0.1
    assert abs(random_signs(3, 100_000).mean()) < 0.02
    assert random_order(9, 1000).sort().values.tolist() == list(range(1000))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ThinwireError, match="a mask of 2 words covers 128 elements"):
        mask.scatter(torch.zeros(1, 1), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 64))
    with pytest.raises(ThinwireError, match="not tiles of 8 x 16"):
        projection.srht_reconstruct(torch.zeros(1, 8), torch.ones(8), torch.arange(1), torch.zeros(1, 64))
    with pytest.raises(ThinwireError, match="a power of two that ratio divides"):
        Estimator("cyclic_srht", 3, 64)
    with pytest.raises(ThinwireError, match="float32 or bfloat16"):
        Masked(torch.zeros(1, 1, dtype=torch.int64), 1, dtype=torch.float16)


@needs_triton
def test_triton_interpreted_equals_reference():
    code = """
import torch
from test_ops_sparse import POISON, a_mask, random_order, random_signs, same, values
from thinwire.ops.mask import reference as mr, triton as mt
from thinwire.ops.projection import reference as pr, triton as pt

x, e = values("normal", 2, 1216), values("heavy", 2, 1216, 1)
words = a_mask(e, 100)
found = []
for m in (mr, mt):
    payload, rest = torch.full((2, 100), POISON), torch.full((2, 1216), POISON)
    m.gather_keep(x, e, words, payload, rest)
    plain = torch.full((2, 100), POISON)
    m.gather_keep(x, None, words, plain, None)
    out = torch.full((2, 1216), POISON)
    m.scatter(payload, words, out)
    again = torch.full_like(words, -7)
    m.pack(out != 0, again)
    found.append((payload, rest, plain, out, again))
assert all(same(a, b) for a, b in zip(*found, strict=True))

for block in (256,):
    signs, chosen = random_signs(3, block), random_order(4, block)[:16]
    n = 2 * block * 16
    x, e = values("normal", 1, n), values("normal", 1, n, 1)
    found = []
    for m in (pr, pt):
        payload, rest = torch.full((1, n // block * 16), POISON), torch.full((1, n), POISON)
        m.srht_project(x, e, signs, chosen, payload, rest)
        out = torch.full((1, n), POISON)
        m.srht_reconstruct(payload, signs, chosen, out)
        found.append((payload, rest, out))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*found, strict=True))
"""
    check_interpreted(code)
