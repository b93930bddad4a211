"""Int4 and int8, nearest and stochastic, plain and after a Hadamard transform: layouts, errors, and what follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.random import Seeds
from thinwire.codecs.base import Codec
from thinwire.codecs.intquant import Int4, Int8, Integers

Kind = tuple[int, bool]  # bits, and whether there is a transform
KINDS: list[Kind] = [(4, False), (8, False), (4, True), (8, True)]
SHAPES = [(kind, group) for kind in KINDS for group in ((32, 128, 2048) if kind[1] else (8, 128, 2048))]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_shape = pytest.mark.parametrize(("kind", "group"), SHAPES)
every_rounding = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def make(kind: Kind, group: int = 128, rounding: str = "nearest") -> Integers:
    return Integers(group, *kind, rounding)


def seeds(codec: Codec, seed: int = 11) -> Seeds:
    return Seeds(((0, codec.group, seed),))


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Codec, rows: Tensor, seed: Seeds | None = None) -> Tensor:
    wire = torch.full((len(rows), codec.wire_numel(rows.shape[1])), 255, dtype=torch.uint8)
    assert codec.encode(rows, wire, seed=seed or seeds(codec)) is wire
    return wire


def decoded(codec: Codec, wire: Tensor, n: int) -> Tensor:
    out = torch.full((len(wire), n), torch.nan)
    assert codec.decode(wire, out) is out
    return out


def through(codec: Codec, rows: Tensor, seed: Seeds | None = None) -> Tensor:
    return decoded(codec, encoded(codec, rows, seed), rows.shape[1])


def levels(codec: Integers) -> int:
    return 7 if codec.bits == 4 else 127


def sylvester() -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < 32:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / np.sqrt(32)


def transformed(x: np.ndarray) -> np.ndarray:
    """Every 32 neighbours, in float64."""
    return (x.reshape(-1, 32) @ sylvester()).reshape(x.shape)


def simulated(codec: Integers, x: np.ndarray, seed: int = 5) -> np.ndarray:
    """What ``codec`` makes of ``x``, written anew in float64 with numpy's own random numbers."""
    hadamard = codec.hadamard
    groups = (transformed(x) if hadamard else x).reshape(-1, codec.group)
    step = np.abs(groups).max(axis=1, keepdims=True) / levels(codec)
    shift = np.random.default_rng(seed).random(groups.shape) if codec.rounding == "stochastic" else 0.5
    values = (np.floor(groups / step + shift) * step).reshape(x.shape)
    return transformed(values) if hadamard else values


def relative_error(values: np.ndarray, x: np.ndarray) -> float:
    return float(np.linalg.norm(values - x) / np.linalg.norm(x))


@pytest.mark.parametrize(
    ("codec", "bits"),
    [(Int4(), 4.25), (Int4(2048), 4.015625), (Int8(), 8.25), (Int4(hadamard=True), 4.25), (Int8(hadamard=True), 8.25)],
    ids=repr,
)
def test_bits_per_value(codec: Integers, bits: float) -> None:
    assert not codec.linear and codec.wire_dtype == torch.uint8
    for n in (codec.group, 37 * codec.group):
        assert codec.wire_bytes(n) * 8 / n == bits


@every_rounding
@every_shape
def test_round_trip_within_the_bound(kind: Kind, group: int, rounding: str) -> None:
    """Half a step for the nearest, a step for stochastic rounding; on transformed values where there is a transform."""
    codec = make(kind, group, rounding)
    for exponent in (-30, 0, 30):
        rows = gaussian(3, 5 * codec.group, seed=group) * 10.0**exponent
        values, x = through(codec, rows).double().numpy(), rows.double().numpy()
        if codec.hadamard:
            values, x = transformed(values), transformed(x)
        largest = np.abs(x.reshape(-1, group)).max(axis=1, keepdims=True)
        bound = largest / levels(codec) * (0.5 if rounding == "nearest" else 1) + largest * 2e-6
        assert bool((np.abs(values - x).reshape(-1, group) <= bound).all())


@every_rounding
@every_kind
@pytest.mark.parametrize("peers", [1, 2, 5])
def test_decode_sum_is_the_sum_of_the_decodes(kind: Kind, rounding: str, peers: int) -> None:
    codec = make(kind, rounding=rounding)
    n = 3 * codec.group
    wire = encoded(codec, gaussian(peers, n))
    values = decoded(codec, wire, n)
    expected = values[0].clone()
    for row in values[1:]:
        expected += row
    expected *= 1 / 3
    out = torch.full((n,), torch.nan)
    assert codec.decode_sum(wire, out, 1 / 3) is out
    if not codec.hadamard:
        assert torch.equal(out, expected)
    else:  # one transform of the sum instead of a sum of transforms
        assert torch.allclose(out, expected, rtol=0, atol=1e-6 * peers)


@every_rounding
@every_kind
def test_rows_may_be_apart_and_bfloat16_is_its_float32_value(kind: Kind, rounding: str) -> None:
    codec = make(kind, rounding=rounding)
    n = 5 * codec.group
    rows = gaussian(3, n + 12).to(torch.bfloat16)[:, :n]
    size = codec.wire_numel(n)
    wide = torch.full((3, size + 8), 7, dtype=torch.uint8)
    expected = encoded(codec, rows.float().contiguous())
    wire = codec.encode(rows, wide[:, :size], seed=seeds(codec))
    assert torch.equal(wire, expected)
    assert bool((wide[:, size:] == 7).all())
    values = torch.zeros(3, n + 4)
    codec.decode(wire, values[:, :n])
    assert torch.equal(values[:, :n], decoded(codec, wire.contiguous(), n)) and not values[:, n:].any()


@every_rounding
@every_kind
def test_zero_is_exact_and_non_finite_stays_non_finite(kind: Kind, rounding: str) -> None:
    codec = make(kind, rounding=rounding)
    rows = torch.zeros(1, 6 * codec.group)
    for place, value in ((1, torch.nan), (3, torch.inf), (5, -torch.inf)):
        rows[0, place * codec.group + 17] = value
    values = through(codec, rows).unflatten(1, (-1, codec.group))[0]
    assert bool(values[1::2].isnan().all()) and bool((values[::2] == 0).all())


@every_kind
def test_a_seed_decides_every_bit_of_stochastic_rounding(kind: Kind) -> None:
    codec, n = make(kind, rounding="stochastic"), 2048
    rows, first = gaussian(2, n), seeds(codec, 1)
    wire = encoded(codec, rows, first)
    assert torch.equal(wire, encoded(make(kind, rounding="stochastic"), rows, seeds(codec, 1)))
    again = torch.empty_like(wire)
    codec.encode(rows, again, seed=first)
    assert torch.equal(again, wire)
    # the hops of one exchange draw different bits
    for seed in (seeds(codec, 2), seeds(codec, 1 << 40), first.next()):
        differs = (encoded(codec, rows, seed) != wire)[:, : n * codec.bits // 8].float().mean()
        assert float(differs) > 0.25
        assert torch.equal(encoded(make(kind), rows, seed), encoded(make(kind), rows, first))


@every_kind
def test_a_parameter_s_random_bits_do_not_depend_on_its_place(kind: Kind) -> None:
    """Behind another parameter, in front of it, or alone: DDP makes other buckets after its first step."""
    codec, a, b = make(kind, rounding="stochastic"), gaussian(2, 1024), gaussian(2, 1536, seed=1)
    decodes = []
    for rows, streams in (
        (b, ((0, 1536, 7),)),
        (torch.cat([a, b], 1), ((0, 1024, 5), (1024, 2560, 7))),
        (torch.cat([b, a], 1), ((0, 1536, 7), (1536, 2560, 5))),
    ):
        decodes.append(through(codec, rows, Seeds(streams)))
    alone, behind, before = decodes
    assert torch.equal(alone, behind[:, 1024:]) and torch.equal(alone, before[:, :1536])
    seed = Seeds(((0, 1536, 7),))
    twice = through(codec, torch.cat([b, b], 1), seed)  # two levels: the rows of several nodes side by side
    assert torch.equal(alone, twice[:, :1536]) and not torch.equal(alone, twice[:, 1536:])


@every_kind
def test_stochastic_rounding_is_unbiased_and_its_variance_is_that_of_a_coin(kind: Kind) -> None:
    """Each value's mean over 2048 roundings against its own standard error: 32 seeds of 64 equal rows."""
    codec, rows = make(kind, rounding="stochastic"), gaussian(1, 512, seed=3)
    total, square = np.zeros(512), np.zeros(512)
    x = rows.double().numpy()[0]
    hadamard = codec.hadamard
    target = transformed(x) if hadamard else x
    for seed in range(32):
        values = through(codec, rows.expand(64, 512), Seeds(((0, 512, seed * 7919),))).double().numpy()
        values = (transformed(values) if hadamard else values) - target
        total += values.sum(axis=0)
        square += (values**2).sum(axis=0)
    groups = target.reshape(-1, 128)
    step = np.abs(groups).max(axis=1, keepdims=True) / levels(codec)
    fraction = groups / step - np.floor(groups / step)
    variance = (fraction * (1 - fraction) * step**2).reshape(-1)
    fair = (fraction.reshape(-1) > 0.01) & (fraction.reshape(-1) < 0.99)
    z = (total / 2048)[fair] / np.sqrt(variance[fair] / 2048)
    assert abs(z.mean()) < 4 / np.sqrt(fair.sum())
    assert abs((z**2).mean() - 1) < 4 * np.sqrt(2 / fair.sum())
    assert (square / 2048)[fair].sum() == pytest.approx(variance[fair].sum(), rel=0.01)


def samples(name: str) -> np.ndarray:
    draw = np.random.default_rng(17)
    n = 1 << 20
    if name == "student-t(3)":
        return draw.standard_t(3, n)
    x = draw.standard_normal(n)
    return np.where(draw.random(n) < 1e-3, 30 * x, x) if name == "outliers" else x


@every_rounding
@pytest.mark.parametrize("name", ["gaussian", "student-t(3)", "outliers"])
def test_error_is_that_of_an_independent_simulation(name: str, rounding: str) -> None:
    x = samples(name)
    rows = torch.from_numpy(x.astype(np.float32)).unsqueeze(0)
    errors = {}
    for kind in KINDS:
        codec = make(kind, rounding=rounding)
        error = relative_error(through(codec, rows)[0].double().numpy(), x)
        assert error == pytest.approx(relative_error(simulated(codec, x), x), rel=0.02)
        errors[kind] = error
    for plain, smooth in (((4, False), (4, True)), ((8, False), (8, True))):
        if name == "gaussian":
            assert errors[smooth] == pytest.approx(errors[plain], rel=0.01)
        else:
            assert errors[smooth] < (0.6 if name == "student-t(3)" else 0.75) * errors[plain]


def test_int4_errors_with_the_transform_and_without() -> None:
    """The table in docs/log.md, the same draws: half of its last digit, and as much for another machine's sums."""
    draw, n = np.random.default_rng(0), 512 * 256
    for name, x, expected in (
        ("gaussian", draw.standard_normal(n), (0.118, 0.117)),
        ("student-t(3)", draw.standard_t(3, n), (0.227, 0.116)),
        ("student-t(2)", draw.standard_t(2, n), (0.236, 0.109)),
        ("one of 512 x100", np.where(np.arange(n) % 512 == 5, 100, 1) * draw.standard_normal(n), (0.106, 0.082)),
    ):
        rows = torch.from_numpy(x.astype(np.float32)).unsqueeze(0)
        codecs = Int4(), Int4(hadamard=True)
        errors = [relative_error(through(codec, rows)[0].double().numpy(), x) for codec in codecs]
        assert errors == pytest.approx(expected, abs=0.001), name


def test_gaussian_error_is_that_of_theory() -> None:
    """Uniform error of a step m / 7: variance E[m^2] / (12 * 49), m the largest of 128 values."""
    grid = np.linspace(0, 8, 200_001)
    below = torch.erf(torch.from_numpy(grid) / 2**0.5).numpy() ** 128  # P(m <= grid)
    second_moment = float(np.trapezoid(2 * grid * (1 - below), grid))
    codec = Int4()
    measured = relative_error(
        through(codec, gaussian(1, 1 << 20, seed=4)).numpy(), gaussian(1, 1 << 20, seed=4).numpy()
    )
    assert measured == pytest.approx(np.sqrt(second_moment / 12) / 7, rel=0.02)


def test_hops_of_two_levels_need_no_transform_between_them() -> None:
    """SDP4Bit, Algorithm 3 as simplified: transform, int8 hop, int4 hop, one transform at the end."""
    first, second, nodes, local, n = Int8(hadamard=True), Int4(hadamard=True), 2, 4, 1 << 14
    gradients = torch.from_numpy(np.random.default_rng(2).standard_t(3, (nodes, local, n)).astype(np.float32))
    hop = torch.empty(nodes, second.wire_numel(n), dtype=torch.uint8)
    for node in range(nodes):
        total = Int8().decode_sum(encoded(first, gradients[node]), torch.empty(n))
        Int4().encode(total.unsqueeze(0), hop[node : node + 1])
    mean = second.decode_sum(hop, torch.empty(n), 1 / (nodes * local)).double().numpy()
    x = gradients.double().numpy()
    sums = np.stack([sum(simulated(first, x[node, i]) for i in range(local)) for node in range(nodes)])
    expected = simulated(second, sums[0]) + simulated(second, sums[1])
    exact = x.sum(axis=(0, 1))
    error = relative_error(mean * nodes * local, exact)
    assert error == pytest.approx(relative_error(expected, exact), rel=0.02)
    assert relative_error(mean * nodes * local, expected) < 0.01


def test_weights_in_four_bits_stick_where_their_differences_converge() -> None:
    """SDP4Bit, counterexample 4.1, with 4 bits for ternary and 8 weights for 2: f(w) = |w|^2, one coordinate a step."""
    codec, draw, rate = Int4(group=8), np.random.default_rng(0), 0.004  # a step of 2 * 8 * rate < 1/14 of the largest
    start = torch.tensor([[1.0, -1.0] * 4])
    plain, master, replica = start.clone(), start.clone(), start.clone()
    for coordinate in draw.integers(0, 8, 2000):
        gradient = torch.zeros(2, 8)
        gradient[:, coordinate] = 2 * 8 * torch.stack([plain[0, coordinate], replica[0, coordinate]])
        plain = through(codec, plain - rate * gradient[:1])
        master -= rate * gradient[1:]
        difference = master - replica
        replica += through(codec, difference)
        # nothing accumulates: the replica is off by the rounding of the last difference, and no more
        assert float((replica - master).abs().max()) <= float(difference.abs().max()) / 14 + 1e-6
    assert torch.allclose(plain, start, atol=1e-5)
    assert float(master.norm()) < 1e-3 and float(replica.norm()) < 1e-3


@every_kind
def test_refuses_what_it_cannot_do(kind: Kind) -> None:
    with pytest.raises(ThinwireError, match="rounding is nearest or stochastic, not up"):
        make(kind, rounding="up")
    codec, rows = make(kind, rounding="stochastic"), gaussian(1, 512)
    for seed in (None, Seeds(()), Seeds(((0, 384, 1),))):
        with pytest.raises(ThinwireError, match="pass seeds for all 512 columns"):
            codec.encode(rows, torch.empty(1, codec.wire_numel(512), dtype=torch.uint8), seed=seed)
    with pytest.raises(ThinwireError, match="multiple of"):
        codec.encode(gaussian(1, 516), torch.empty(1, codec.wire_numel(516), dtype=torch.uint8))
    with pytest.raises(ThinwireError, match="power of two"):
        make(kind, group=100)
    memory = torch.zeros(codec.wire_numel(512) + 1, dtype=torch.uint8)
    with pytest.raises(ThinwireError, match="multiple of 4 bytes"):
        make(kind).encode(gaussian(1, 512), memory[1:].unsqueeze(0))


@pytest.mark.parametrize("group", [8, 16])
def test_groups_of_a_transform_hold_whole_ones(group: int) -> None:
    with pytest.raises(ThinwireError, match="from 32 to 4096"):
        Int4(group, hadamard=True)


def test_integers_have_four_or_eight_bits() -> None:
    with pytest.raises(ThinwireError, match="4 or 8 bits, not 5"):
        Integers(bits=5)
