"""Laws that every codec obeys."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.codecs import Bf16, Codec, Fp32, Int8, Integers, Residual, Sign

CODECS: list[Codec] = [
    Fp32(), Bf16(), Int8(), Int8(group=64), Int8(group=1024), Sign(), Sign(group=32),
]  # fmt: skip
GROUPED = [codec for codec in CODECS if codec.group > 1]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)
every_grouped = pytest.mark.parametrize("codec", GROUPED, ids=repr)
every_bytes = pytest.mark.parametrize("codec", [c for c in GROUPED if not isinstance(c, Sign)], ids=repr)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wire_for(codec: Codec, rows: Tensor) -> Tensor:
    """A wire of the right shape whose bytes are all 0xFF: NaN in every float format."""
    count, n = rows.shape
    return torch.full((count, codec.wire_bytes(n)), 255, dtype=torch.uint8).view(codec.wire_dtype)


def encoded(codec: Codec, rows: Tensor) -> Tensor:
    wire = wire_for(codec, rows)
    assert codec.encode(rows, wire) is wire
    return wire


def decoded(codec: Codec, wire: Tensor, n: int) -> Tensor:
    out = torch.full((wire.shape[0], n), torch.nan)
    assert codec.decode(wire, out) is out
    return out


def error_bound(codec: Codec, rows: Tensor) -> Tensor:
    """What the format promises for each value of ``rows`` (float32)."""
    if isinstance(codec, Fp32):
        return torch.zeros_like(rows)
    if isinstance(codec, Bf16):  # 8 significant bits: half a unit in the last place is 2^-8; 2^-134 below 2^-126
        return (rows.abs() * 2.0**-8).clamp_min(2.0**-134)
    groups = rows.unflatten(1, (-1, codec.group))
    largest = groups.abs().amax(2, keepdim=True)
    if isinstance(codec, Sign):  # a value and the mean of all have the same sign: the larger of the two is the bound
        bound = torch.maximum(groups.abs(), groups.abs().double().mean(2, keepdim=True).float())
    elif isinstance(codec, Integers):
        bound = (largest / 127 / 2).expand_as(groups)
    else:  # 4 significant bits, and below the smallest normal number 2^-6 a step of 2^-9
        bound = torch.maximum(groups.abs() * 2.0**-4, largest / 448 * 2.0**-10)
    # float32 arithmetic itself; and scales never fall below 2^-126
    return (bound * (1 + 1e-5) + largest * 2.0**-22 + 2.0**-127).flatten(1)


@every_codec
def test_declares_what_the_network_carries(codec: Codec) -> None:
    assert codec.wire_dtype in (torch.uint8, torch.bfloat16, torch.float32)
    assert codec.linear == isinstance(codec, (Fp32, Bf16))
    for groups in (1, 2, 37):
        n = groups * codec.group
        expected = {"Fp32": 4 * n, "Bf16": 2 * n, "Sign": n // 8 + 4 * groups}.get(
            type(codec).__name__, n + 4 * groups
        )
        assert codec.wire_bytes(n) == expected == codec.wire_numel(n) * codec.wire_dtype.itemsize


@every_codec
@settings(max_examples=25, deadline=None)
@given(groups=st.integers(1, 40), count=st.integers(1, 4), exponent=st.integers(-40, 36), seed=st.integers(0, 99))
def test_round_trip_within_the_bound(codec: Codec, groups: int, count: int, exponent: int, seed: int) -> None:
    rows = gaussian(count, groups * codec.group, seed=seed) * 10.0**exponent
    values = decoded(codec, encoded(codec, rows), rows.shape[1])
    assert bool(((values - rows).abs() <= error_bound(codec, rows)).all())


@every_codec
def test_bfloat16_input_encodes_as_its_float32_value(codec: Codec) -> None:
    rows = gaussian(3, 7 * codec.group).to(torch.bfloat16)
    assert torch.equal(encoded(codec, rows), encoded(codec, rows.float()))


@every_codec
@pytest.mark.parametrize("peers", [1, 2, 5])
@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_decode_sum_is_the_sum_of_the_decodes(codec: Codec, peers: int, scale: float) -> None:
    n = 9 * codec.group
    wire = encoded(codec, gaussian(peers, n))
    expected = decoded(codec, wire, n)[0].clone()
    for row in decoded(codec, wire, n)[1:]:
        expected += row
    expected *= scale
    out = torch.full((n,), torch.nan)
    assert codec.decode_sum(wire, out, scale) is out
    assert torch.equal(out, expected)
    base = torch.full((n,), torch.nan)
    Codec._decode_sum(codec, wire, base, scale, lambda use, shape, dtype: torch.empty(shape, dtype=dtype))
    assert torch.equal(base, expected)


@every_codec
@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_left_out_is_kept(codec: Codec, in_place: bool) -> None:
    """h = rows + old goes out, h - decode stays."""
    rows, old = gaussian(2, 6 * codec.group), gaussian(2, 6 * codec.group, seed=1)
    h, new = rows + old, old if in_place else torch.full_like(old, torch.nan)
    wire = wire_for(codec, h)
    assert codec.encode(rows.clone(), wire, residual=Residual(old, new)) is wire
    assert torch.equal(wire, encoded(codec, h))
    assert torch.equal(new, h - decoded(codec, wire, h.shape[1]))
    codec.encode(h.clone(), wire, residual=Residual(None, new.fill_(torch.nan)))
    assert torch.equal(new, h - decoded(codec, wire, h.shape[1]))


@every_codec
def test_a_codec_is_a_value(codec: Codec) -> None:
    assert codec == dataclasses.replace(codec) and hash(codec) == hash(dataclasses.replace(codec))
    assert sum(codec == other for other in CODECS) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        codec.anything = 1  # type: ignore[attr-defined]


@every_codec
def test_rows_may_be_apart(codec: Codec) -> None:
    n = 5 * codec.group
    rows = gaussian(3, n + 12)[:, :n]
    wide = torch.zeros(3, codec.wire_numel(n) + 8, dtype=codec.wire_dtype)
    wire = codec.encode(rows, wide[:, : codec.wire_numel(n)])
    assert torch.equal(wire, encoded(codec, rows.contiguous()))
    assert not wide[:, codec.wire_numel(n) :].any()
    values = torch.zeros(3, n + 4)
    codec.decode(wire, values[:, :n])
    assert torch.equal(values[:, :n], decoded(codec, wire.contiguous(), n))
    assert not values[:, n:].any()
    one = wide[1:2, : codec.wire_numel(n)]
    assert torch.equal(decoded(codec, one, n), decoded(codec, wire[1:2].contiguous(), n))


@every_codec
def test_zero_is_exact_and_non_finite_stays_non_finite(codec: Codec) -> None:
    rows = torch.zeros(1, 6 * codec.group)
    rows[0, codec.group] = torch.nan
    rows[0, 3 * codec.group] = torch.inf
    rows[0, 5 * codec.group] = -torch.inf
    values = decoded(codec, encoded(codec, rows), rows.shape[1])
    assert not values[rows.isinf() | rows.isnan()].isfinite().any()
    assert not values.unflatten(1, (-1, codec.group))[0, ::2].any()


@pytest.mark.parametrize("codec", [c for c in CODECS if c.linear], ids=repr)
def test_linear_wires_may_be_summed(codec: Codec) -> None:
    a, b = gaussian(1, 4096, seed=1), gaussian(1, 4096, seed=2)
    summed, direct = encoded(codec, a) + encoded(codec, b), encoded(codec, a + b)
    if isinstance(codec, Fp32):
        assert torch.equal(summed, direct)
    else:  # four roundings of at most 2^-8: of a, of b, and of the sum on either side
        bound = (a.abs() + b.abs() + 2 * (a + b).abs()) * 2.0**-8 * 1.01
        assert bool(((summed.float() - direct.float()).abs() <= bound).all())


@every_bytes
def test_a_group_changes_only_its_own_bytes(codec: Codec) -> None:
    rows = gaussian(1, 5 * codec.group)
    changed = rows.clone()
    changed[0, 2 * codec.group : 3 * codec.group] *= -3
    n = rows.shape[1]
    differs = (encoded(codec, rows) != encoded(codec, changed))[0].nonzero().flatten()
    payload = (differs >= 2 * codec.group) & (differs < 3 * codec.group)
    scale = (differs >= n + 8) & (differs < n + 12)
    assert bool((payload | scale).all()) and bool(payload.any()) and bool(scale.any())


@every_grouped
def test_equal_groups_in_other_places_encode_alike(codec: Codec) -> None:
    group = gaussian(codec.group)
    values = decoded(codec, encoded(codec, group.repeat(2, 3)), 3 * codec.group).view(6, codec.group)
    assert torch.equal(values, values[:1].expand(6, -1))


def test_int8_error_on_gaussian_values_is_that_of_a_simulation() -> None:
    n = 1 << 20
    x = np.random.default_rng(7).standard_normal(n)
    step = np.abs(x.reshape(-1, 128)).max(axis=1, keepdims=True) / 127
    simulated = math.sqrt(float(np.mean((np.round(x.reshape(-1, 128) / step) * step - x.reshape(-1, 128)) ** 2)))
    y = np.random.default_rng(8).standard_normal(n).astype(np.float32)
    rows = torch.from_numpy(y).unsqueeze(0)
    measured = float((decoded(Int8(), encoded(Int8(), rows), n) - rows).double().square().mean().sqrt())
    assert measured == pytest.approx(simulated, rel=0.02)


@every_bytes
def test_no_value_gets_the_wrong_sign_and_the_largest_is_kept(codec: Codec) -> None:
    rows = gaussian(2, 8 * codec.group)
    values = decoded(codec, encoded(codec, rows), rows.shape[1])
    assert bool((values * rows >= 0).all())
    groups, back = (x.unflatten(1, (-1, codec.group)).abs().amax(2) for x in (rows, values))
    assert torch.allclose(back, groups, rtol=1e-6)


@every_grouped
def test_float32_extremes_stay_finite(codec: Codec) -> None:
    rows = torch.full((1, codec.group), torch.finfo(torch.float32).max)
    assert bool(decoded(codec, encoded(codec, rows), codec.group).isfinite().all())


@pytest.mark.parametrize("group", [0, -128, 7, 100, 8192, 1.5])
def test_refuses_groups_it_cannot_do(group: int) -> None:
    with pytest.raises(ThinwireError, match=r"^group must be a power of two from 8 to 4096"):
        Int8(group=group)


@every_codec
def test_refuses_what_does_not_fit(codec: Codec) -> None:
    n = 2 * codec.group
    rows = gaussian(2, n)
    wire = encoded(codec, rows)
    with pytest.raises(ThinwireError, match="the wire of"):
        codec.encode(rows, wire[:1])
    with pytest.raises(ThinwireError, match="float32 or bfloat16"):
        codec.encode(rows.double(), wire)
    with pytest.raises(ThinwireError, match="decodes to float32"):
        codec.decode(wire, rows.to(torch.float16))
    with pytest.raises(ThinwireError, match="1-D result"):
        codec.decode_sum(wire, rows)
    with pytest.raises(ThinwireError, match="contiguous"):
        codec.encode(gaussian(n, 2).t(), wire)
    if codec.group > 1:
        with pytest.raises(ThinwireError, match="multiple of"):
            codec.encode(gaussian(2, n + 1), wire)


@every_grouped
def test_refuses_a_wire_that_cannot_hold_float32_scales(codec: Codec) -> None:
    n = codec.group
    memory = torch.zeros(codec.wire_numel(n) + 1, dtype=torch.uint8)
    with pytest.raises(ThinwireError, match="multiple of 4 bytes"):
        codec.encode(gaussian(1, n), memory[1:].unsqueeze(0))
