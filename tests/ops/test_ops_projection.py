"""Random projections: corners of the kernels and of the codec that the common tests of the sparse operations leave out.

(``test_ops_sparse.py`` holds the laws: fast = reference, P P = P, linearity, one cycle = a whole rotation, unbiased.)
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from programs import check_interpreted, needs_triton
from projections import matrix_of
from thinwire.base.errors import ThinwireError
from thinwire.base.random import random_order, random_signs
from thinwire.codecs import Residual
from thinwire.codecs.projection import ESTIMATORS, Estimator, Projection
from thinwire.core.bucket import Bucket
from thinwire.ops import projection
from thinwire.ops.projection import cpu, reference

POISON = float("nan")


def normal(rows: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))


def apart(rows: int, n: int, values: Tensor | None = None, extra: int = 48) -> Tensor:
    """Rows with poison between them, and poison in them if there are no ``values``."""
    view = torch.full((rows, n + extra), POISON)[:, :n]
    return view if values is None else view.copy_(values)


def margin(rows: Tensor) -> Tensor:
    count, n = rows.shape
    return rows.as_strided((count, rows.stride(0) - n), rows.stride(), rows.storage_offset() + n)


def made(
    estimator: str, segments: list[tuple[str, int, int]], block: int = 32, ratio: int = 8, seed: int = 5, step: int = 3
) -> Projection:
    of, cpu_ = Estimator(estimator, ratio, block), torch.device("cpu")
    return Projection(of, [(start, width, of.draw(seed, name, step, cpu_)) for name, start, width in segments])


@pytest.mark.parametrize(("block", "kept"), [(2, 2), (32, 1), (128, 128), (2048, 33)])
def test_rows_that_lie_apart(block, kept):
    """Odd and even numbers of levels, any number of kept rows; nothing is written between the rows."""
    n = 2 * block * projection.LANES
    x, e = normal(3, n), normal(3, n, 1)
    signs, chosen = random_signs(3, block), random_order(4, block)[:kept]
    found = []
    for module in (reference, cpu):
        payload, rest, out = apart(3, 2 * kept * projection.LANES), apart(3, n), apart(3, n)
        module.srht_project(apart(3, n, x), apart(3, n, e), signs, chosen, payload, rest)
        module.srht_reconstruct(payload, signs, chosen, out)
        assert all(bool(margin(each).isnan().all()) for each in (payload, rest, out))
        found.append((payload, rest, out))
    for slow, fast in zip(*found, strict=True):
        assert torch.allclose(slow, fast, atol=1e-5 * block**0.5)
    whole = x + e
    assert torch.allclose(found[1][1] + found[1][2], whole, atol=1e-5)
    squares = [each.double().square().sum() for each in (found[1][0], found[1][1], whole)]
    assert float(squares[0] + squares[1]) == pytest.approx(float(squares[2]), rel=1e-5)  # Pythagoras: orthogonal


def test_the_residual_may_be_updated_in_place():
    x, e = normal(1, 2048), normal(1, 2048, 1)
    signs, chosen = random_signs(3, 64), random_order(4, 64)[:4]
    payload, rest = torch.empty(1, 128), torch.empty(1, 2048)
    projection.srht_project(x, e, signs, chosen, payload, rest)
    in_place, again = e.clone(), torch.empty(1, 128)
    projection.srht_project(x, in_place, signs, chosen, again, in_place)
    assert torch.equal(in_place, rest) and torch.equal(again, payload)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_seen_by_the_guard_and_stays_in_its_block(bad):
    x = normal(1, 2048)
    x[0, 5 * 16 + 3] = bad  # value 5 of block 3 of the first tile
    payload, rest = torch.empty(1, 128), torch.empty(1, 2048)
    projection.srht_project(x, x, random_signs(3, 64), random_order(4, 64)[:4], payload, rest)
    touched = ~payload.view(2, 4, 16).isfinite()
    assert touched[0, :, 3].all() and touched.sum() == 4
    assert (~rest.isfinite()).sum() <= 64


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_encoding_with_a_residual(estimator):
    """h = g + e goes out, h - C(h) stays, for several segments and rows, also in place."""
    segments = [("a", 0, 1024), ("b", 1024, 512)]
    g, e = normal(2, 1536), normal(2, 1536, 1)
    codec = made(estimator, segments)
    plain = codec.encode(g + e, apart(2, 192))
    decoded = codec.decode(plain, apart(2, 1536))
    expected = g + e - decoded
    for write in (apart(2, 1536), apart(2, 1536, e)):
        in_place = not write.isnan().any()
        sent = codec.encode(apart(2, 1536, g), apart(2, 192), residual=Residual(write if in_place else e, write))
        assert torch.allclose(sent, plain, atol=1e-4)
        assert torch.allclose(write, expected, atol=1e-4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_bfloat16_rows_are_widened(estimator):
    codec = made(estimator, [("a", 0, 1024)])
    narrow = normal(1, 1024).bfloat16()
    expected = codec.encode(narrow.float(), torch.empty(1, 128))
    assert torch.equal(codec.encode(narrow, torch.empty(1, 128)), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_numbers_depend_on_seed_name_and_step_alone(estimator):
    """Not on the bucket, nor on what was drawn before: ranks that come from a checkpoint draw what the others draw."""
    device, of = torch.device("cpu"), Estimator(estimator, 8, 32)
    bucket = Bucket([], rows=1, owner=False, group=1, dtype=torch.float32, device=device)
    for step in (0, 7, 8, 3):
        drawn = [of.draw(5, name, step, device, bucket.once) for name in ("a", "b")]
        again = of.draw(5, "b", step, device, bucket.once)
        assert all(a.data_ptr() == b.data_ptr() for a, b in zip(again, drawn[1], strict=True))
    old = Projection(of, [(0, 512, drawn[0]), (512, 512, drawn[1])])
    fresh = made(estimator, [("b", 0, 512)])
    matrix = matrix_of(fresh)
    assert torch.equal(matrix, matrix_of(old, 1)) and not torch.equal(matrix, matrix_of(old))
    assert not torch.equal(matrix, matrix_of(made(estimator, [("b", 0, 512)], seed=6)))


@pytest.mark.parametrize("estimator", ["cyclic_srht"])
def test_a_scaled_subsample_of_rows_is_unbiased(estimator):
    """The projection has mean 1 / ratio of the identity: what E C(h) = h / ratio asks for."""
    mean, steps = torch.zeros(16, 16), 2000
    for step in range(steps):
        matrix = matrix_of(made(estimator, [("a", 0, 256)], block=16, ratio=4, seed=1, step=step))
        mean += matrix @ matrix.T / steps
    assert (mean - torch.eye(16) / 4).abs().max() < 5 * (0.25 * 0.75 / steps) ** 0.5


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_to_send(estimator):
    codec = made(estimator, [("a", 0, 0)])
    assert codec.decode(codec.encode(torch.empty(2, 0), torch.empty(2, 0)), torch.empty(2, 0)).shape == (2, 0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ThinwireError, match="got block=48 and ratio"):
        Estimator("cyclic_srht", 8, 48)
    codec = made("cyclic_srht", [("a", 0, 512)])
    with pytest.raises(ThinwireError, match="multiple of 512"):
        codec.encode(torch.zeros(1, 256), torch.zeros(1, 32))
    with pytest.raises(ThinwireError, match="the wire of"):
        codec.encode(torch.zeros(1, 512), torch.zeros(1, 65))


@needs_triton
def test_triton_interpreted_on_rows_that_lie_apart():
    """With and without a residual and its update, several rows, in place; small blocks are the reference's."""
    code = """
import torch
from test_ops_projection import apart, margin, normal
from thinwire.ops.projection import reference, triton
from thinwire.base.random import random_order, random_signs

for block, kept, rows in ((256, 16, 2), (512, 1, 1), (64, 4, 1)):
    n = block * 16
    signs, chosen = random_signs(3, block), random_order(4, block)[:kept]
    x, e = normal(rows, n), normal(rows, n, 1)
    for feedback in (False, True):
        found = []
        for module in (reference, triton):
            payload, out, rest = apart(rows, kept * 16), apart(rows, n), apart(rows, n, e)
            old, new = (rest, rest) if feedback else (None, None)
            module.srht_project(apart(rows, n, x), old, signs, chosen, payload, new)
            module.srht_reconstruct(payload, signs, chosen, out)
            assert all(bool(margin(each).isnan().all()) for each in (payload, out, rest))
            found.append((payload, out, rest))
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*found, strict=True))
"""
    check_interpreted(code)
