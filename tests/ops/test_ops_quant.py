"""The fast operations against the plain-torch reference: the same bits, on odd sizes and into poisoned results."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from programs import check_interpreted, needs_triton, run_python
from thinwire.base.random import Pool, Seeds
from thinwire.ops import quant as ops
from thinwire.ops.quant import cpu, reference

GROUPS = (8, 64, 128, 1024)
SEED = 0x1234_5678_9ABC_DEF0


def hard_rows(count: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows with a zero stretch, denormals, huge values, ties, NaN and infinities among Gaussian ones."""
    rows = torch.randn(count, n, generator=torch.Generator().manual_seed(n))
    special = [
        lambda x: x.zero_(),
        lambda x: x.mul_(1e-41),
        lambda x: x.mul_(1e-37),
        lambda x: x.fill_(torch.finfo(torch.float32).max),
        lambda x: x.mul_(-1e37),
        lambda x: x.copy_(torch.arange(x.numel()) * 0.5 - 3),
        lambda x: x[-1:].fill_(torch.nan),
        lambda x: x[:1].fill_(-torch.inf),
        lambda x: x.fill_(-0.0),
        lambda x: x.copy_(torch.arange(x.numel()) * 2.0**-11),
    ]
    flat = rows.view(-1)
    for i in range(flat.numel() // 128):
        if i % 2:
            special[i // 2 % len(special)](flat[i * 128 : i * 128 + 128])
    return rows.to(dtype)


def apart(rows: Tensor, extra: int = 128) -> Tensor:
    """The same rows with ``extra`` elements between them."""
    wide = torch.empty(rows.shape[0], rows.shape[1] + extra, dtype=rows.dtype)
    return wide[:, : rows.shape[1]].copy_(rows)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, except that every NaN is the same."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        assert torch.equal(actual.isnan(), expected.isnan())
        actual, expected = (x.contiguous().nan_to_num(0.0).view(torch.int32) for x in (actual, expected))
    assert torch.equal(actual, expected)


def poisoned(count: int, n: int, dtype: torch.dtype, extra: int = 128) -> Tensor:
    """Rows apart from each other, filled with 0xFF (NaN as float32) between the rows, too."""
    return torch.full((count, (n + extra) * dtype.itemsize), 255, dtype=torch.uint8).view(dtype)[:, :n]


def margin(rows: Tensor) -> Tensor:
    """The bytes between the rows of ``poisoned``."""
    count, n = rows.shape
    whole = rows.as_strided((count, rows.stride(0) - n), rows.stride(), rows.storage_offset() + n)
    return whole.contiguous().view(torch.uint8)


Kind = tuple[ops.Format, torch.dtype, int, Seeds | None]
"""A format, dtype and number of its codes, source of random bits."""


def kinds(n: int, group: int) -> list[Kind]:
    codes = ((8, torch.int8, n), (4, torch.uint8, n // 2))
    return [
        (ops.Format(bits, group, hadamard), dtype, size, drawn)
        for bits, dtype, size in codes
        for drawn in (None, Seeds(((0, n, SEED),)))
        for hadamard in (False, True)
        if not hadamard or group % ops.ORDER == 0
    ]


def drawn_of(parts: list[tuple[int, int, int]]) -> Seeds:
    """Seeds of a pool, which has them in another order, and some that are not asked for."""
    pool = Pool([5, *(seed for _, _, seed in reversed(parts))])
    drawn = Seeds(tuple(parts), pool).over(parts[-1][1])
    assert drawn is not None and drawn.ranges == tuple(parts) and drawn.pool is pool
    return drawn


def requantized(
    module: ModuleType, kind: ops.Format, codes: Tensor, scales: Tensor, draws: bool
) -> tuple[Tensor, ...]:
    """Codes and scales of a third of the sum of all rows; drawn in two parts."""
    n, group = scales.shape[1] * kind.group, kind.group
    half = n // group // 2 * group
    parts = [part for part in ((0, half, SEED + 1), (half, n, SEED + 2)) if part[1] > part[0]]
    again, scales_again = poisoned(1, codes.shape[1], codes.dtype), poisoned(1, scales.shape[1], torch.float32)
    drawn = drawn_of(parts) if draws else None
    module.requantize(codes, scales, kind, again, scales_again, kind.norm / 3, drawn)
    return again, scales_again


def check_all(fast: ModuleType, count: int, n: int, group: int, dtype: torch.dtype) -> None:
    """Every operation of ``fast`` against the reference."""
    rows = apart(hard_rows(count, n, dtype))
    for kind, code_dtype, size, drawn in kinds(n, group):
        results = []
        for module in (reference, fast):
            codes = poisoned(count, size, code_dtype)
            scales = poisoned(count, n // group, torch.float32)
            out = poisoned(count, n, torch.float32)
            total = torch.full((n,), torch.nan)
            module.quantize(rows, kind, codes, scales, drawn)
            module.decode(codes, scales, kind, out, 1, kind.norm)
            module.decode(codes, scales, kind, total.unsqueeze(0), count, kind.norm / 3)
            if drawn is not None and not kind.hadamard:  # parameters beside each other have random bits of their own
                third = n // group // 3 * group
                parts = [(0, third, SEED + 1), (third, 2 * third, SEED + 2), (2 * third, n, SEED + 3)]
                separate = drawn_of([part for part in parts if part[0] < part[1]])
                module.quantize(rows, kind, codes, scales, separate)
                results.append((codes.clone(), scales.clone(), out, total))
            for x in (codes, scales, out):
                assert bool((margin(x) == 255).all()), f"{kind}: wrote between the rows"
            results.append(requantized(module, kind, codes, scales, drawn is not None))
            results.append((codes, scales, out, total))
        half = len(results) // 2
        for actual, expected in zip(sum(results[half:], ()), sum(results[:half], ()), strict=True):
            assert_same_bits(actual, expected)
    for scale in (1.0, 1 / 3):
        totals = [torch.full((n,), torch.nan) for _ in range(2)]
        reference.sum_rows(rows, totals[0], scale)
        fast.sum_rows(rows, totals[1], scale)
        assert_same_bits(totals[1], totals[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("count", [1, 3])
def test_cpu_equals_reference(count: int, group: int, dtype: torch.dtype) -> None:
    for groups in (1, 3, 37):
        check_all(cpu, count, groups * group, group, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 96, 4096])
def test_cpu_transforms_groups_of_any_multiple_of_32(group: int, dtype: torch.dtype) -> None:
    for groups in (1, 3):
        check_all(cpu, 3, groups * group, group, dtype)


def test_int4_layout() -> None:
    """Byte i of a group: element i in the low half, element i + group / 2 in the high half, both plus 8."""
    rows = torch.tensor([[7.0, -7.0, 1.0, 0.0, -3.0, 2.5, 3.5, -0.5, *[0.0] * 8]])
    codes, scales = torch.empty(1, 8, dtype=torch.uint8), torch.empty(1, 2)
    ops.quantize(rows, ops.Format(4, 8), codes, scales)
    assert scales.tolist() == [[1.0, 1.0]]
    assert codes[0].tolist() == [15 | 5 << 4, 1 | 10 << 4, 9 | 12 << 4, 8 | 8 << 4, *[0x88] * 4]


def test_the_transform_is_a_hadamard_matrix_times_32_neighbours() -> None:
    """Against the matrix itself, in float64; twice is the identity, to int8's resolution."""
    rows = torch.randn(2, 12 * 128, generator=torch.Generator().manual_seed(0))
    parity = torch.tensor([[bin(i & j).count("1") % 2 for j in range(32)] for i in range(32)])
    expected = (rows.double().view(2, -1, 32) @ (1 - 2 * parity).double() / 32**0.5).flatten(1)
    codes, scales = torch.empty(2, 12 * 128, dtype=torch.int8), torch.empty(2, 12)
    transformed, back = torch.empty_like(rows), torch.empty_like(rows)
    ops.quantize(rows, ops.Format(8, 128, hadamard=True), codes, scales)
    ops.dequantize(codes, scales, ops.Format(8, 128), transformed)
    step = scales.double().repeat_interleave(128, 1)
    assert bool(((transformed.double() - expected).abs() <= step * 0.5001).all())
    ops.dequantize(codes, scales, ops.Format(8, 128, hadamard=True), back)
    assert torch.allclose((back - rows).double().norm(), (transformed.double() - expected).norm(), rtol=1e-5)


@pytest.mark.parametrize("group", [32, 128, 512])
@pytest.mark.parametrize("place", [0, 31, 37, 127])
def test_an_outlier_stays_in_its_group(group: int, place: int) -> None:
    """A large value reaches the 32 neighbours that it is transformed with, and changes no byte of another group."""
    rows = torch.randn(1, 8 * group, generator=torch.Generator().manual_seed(1))
    spoilt = rows.clone()
    spoilt[0, 3 * group + place % group] = 1e4
    wires = []
    for x in (rows, spoilt):
        codes, scales = torch.empty(1, 4 * group, dtype=torch.uint8), torch.empty(1, 8)
        ops.quantize(x, ops.Format(4, group, hadamard=True), codes, scales)
        wires.append((codes.view(8, -1), scales[0]))
    apart = (wires[0][0] != wires[1][0]).any(1) | (wires[0][1] != wires[1][1])
    assert apart.nonzero().flatten().tolist() == [3]
    codes, scales = torch.empty(1, 8 * group, dtype=torch.int8), torch.empty(1, 8)
    ops.quantize(torch.where(spoilt == 1e4, spoilt, 0), ops.Format(8, group, hadamard=True), codes, scales)
    first = 3 * group + place % group // 32 * 32
    assert codes[0].nonzero().flatten().tolist() == list(range(first, first + 32))
    assert bool((codes[0, first : first + 32].abs() == 127).all())


def test_random_bits_are_those_of_the_mixer() -> None:
    """16 bits per element from Python's own integers, where groups, rows and the seed's halves meet."""

    def mixed(word: int) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D & 0xFFFFFFFF
        word = (word ^ word >> 15) * 0x846CA68B & 0xFFFFFFFF
        return word ^ word >> 16

    key = (SEED ^ SEED >> 32) & 0xFFFFFFFF
    count, n, group = 2, 24, 8
    expected = []
    for place in range(count * n):
        g, i = divmod(place, group)
        word = mixed((g * group // 2 + i % (group // 2)) ^ key)
        bits = word >> 16 if i >= group // 2 else word & 0xFFFF
        expected.append(int(0.5 * 65536 + bits) >> 16 if i else 127)
    rows = torch.full((count, n), 0.5)
    rows[:, ::group] = 127.0  # scale 1
    codes, scales = torch.empty(count, n, dtype=torch.int8), torch.empty(count, n // group)
    ops.quantize(rows, ops.Format(8, group), codes, scales, Seeds(((0, n, SEED),)))
    assert codes.flatten().tolist() == expected
    assert 5 < sum(code == 1 for code in expected) < 37


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 5000), count=st.integers(1, 5), bf16=st.booleans())
def test_sum_rows_of_any_length(n: int, count: int, bf16: bool) -> None:
    rows = apart(hard_rows(count, n, torch.bfloat16 if bf16 else torch.float32), extra=3)
    totals = [torch.full((n,), torch.nan) for _ in range(2)]
    reference.sum_rows(rows, totals[0], 0.25)
    cpu.sum_rows(rows, totals[1], 0.25)
    assert_same_bits(totals[1], totals[0])


def test_scales_of_special_groups() -> None:
    rows = torch.zeros(1, 8 * 5)
    rows[0, 8] = 127.0
    rows[0, 16] = torch.nan
    rows[0, 24] = torch.inf
    rows[0, 32] = 1e-45
    codes, scales = torch.full((1, 40), 99, dtype=torch.int8), torch.empty(1, 5)
    ops.quantize(rows, ops.Format(8, 8), codes, scales)
    assert scales[0, 0] == 1.0 and scales[0, 1] == pytest.approx(1.0)
    assert bool(scales[0, 2:4].isnan().all())
    assert scales[0, 4] == 2.0**-126
    assert codes[0].nonzero().tolist() == [[8]] and codes[0, 8] == 127


def test_empty_rows_are_left_alone() -> None:
    empty = torch.empty(2, 0)
    ops.quantize(empty, ops.Format(8, 128), torch.empty(2, 0, dtype=torch.int8), torch.empty(2, 0))
    assert ops.sum_rows(empty, torch.empty(0)).numel() == 0


def test_numba_is_imported_at_first_use_only() -> None:
    code = """
import sys, torch, thinwire.codecs as c
assert "numba" not in sys.modules and "triton" not in sys.modules
c.Fp32().encode(torch.ones(1, 8), torch.empty(1, 8))
assert "numba" not in sys.modules
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_without_numba_the_reference_runs_and_says_so_once() -> None:
    code = """
import pathlib, sys, warnings
sys.modules["numba"] = sys.modules["llvmlite"] = None  # as in an empty environment: what comes with numba is not there
import torch
from thinwire import ops
from thinwire.codecs import Int8
from thinwire.ops.backends import _load
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as caught:
    for _ in range(2):
        wire = Int8().encode(torch.ones(1, 128), torch.empty(1, 132, dtype=torch.uint8))
        assert Int8().decode(wire, torch.empty(1, 128))[0, 0].sub(1).abs() < 1e-6
assert [str(w.message) for w in caught if "numba" in str(w.message)] == [
    "numba is not installed: thinwire's kernels run as plain torch, slower: pip install 'thinwire[cpu]'"
]
warnings.simplefilter("ignore")
families = [file.parent.name for folder in ops.__path__ for file in pathlib.Path(folder).glob("*/cpu.py")]
assert len(families) > 8 and all(
    _load(f"thinwire.ops.{family}", "cpu", "numba").__name__.endswith(".reference") for family in families
)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@needs_triton
def test_triton_interpreted_equals_reference() -> None:
    code = """
import torch
import test_ops_quant as test_ops
from thinwire.ops.quant import triton as triton_int8
cases = (
    (3, 37, 128, torch.float32), (2, 64, 8, torch.bfloat16), (1, 2, 4096, torch.float32), (2, 130, 32, torch.bfloat16),
)
for count, groups, group, dtype in cases:
    n = groups * group
    test_ops.check_all(triton_int8, count, n, group, dtype)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_reference() -> None:
    for count, group, dtype in ((1, 128, torch.float32), (3, 8, torch.bfloat16), (2, 512, torch.float32)):
        rows = hard_rows(count, 36 * group, dtype)
        n = rows.shape[1]
        for kind, code_dtype, size, drawn in kinds(n, group):
            results = []
            for device in ("cpu", "cuda"):
                codes = torch.full((count, size), 99, dtype=code_dtype, device=device)
                scales = torch.full((count, 36), torch.nan, device=device)
                out = torch.full(rows.shape, torch.nan, device=device)
                total = torch.full((n,), torch.nan, device=device)
                ops.quantize(rows.to(device), kind, codes, scales, drawn)
                ops.dequantize(codes, scales, kind, out)
                ops.dequantize_sum(codes, scales, kind, total, 1 / 3)
                results.append([x.cpu() for x in (codes, scales, out, total)])
            for actual, expected in zip(results[1], results[0], strict=True):
                assert_same_bits(actual, expected)
