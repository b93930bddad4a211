"""Norms of a buffer's parameters and the factors that cut outliers: the reference against a loop, Triton against it."""

from __future__ import annotations

import math

import pytest
import torch

from programs import check_interpreted, needs_triton
from thinwire.ops.norms import Statistics, reference
from thinwire.ops.rows import CopySegment, CopyTable

CPU = torch.device("cpu")
TIMES, LEAVES, DECAY = 4.0, 0.5, 0.9


def tables(device: torch.device = CPU) -> dict[str, tuple[CopyTable, int, list[torch.Tensor]]]:
    """Three parameters whole, as rows of which the last is shorter, as shards; the buffer's length, whose is what."""
    found = {}
    for name, rows in (("whole", 1), ("rows", 3), ("shards", 4)):
        offset, segments, owned = 2, [], []
        for numel in (3000, 7, 64):
            span = numel if name == "shards" else -(-numel // rows)
            step, length = (3080, 3 * 3080 + span) if name == "shards" else (span, numel)
            segments.append(CopySegment(offset, length, step, 0, -(-span // 64) * 64, span, span, rows))
            places = [offset + row * step + i for row in range(rows) for i in range(span) if row * step + i < length]
            owned.append(torch.tensor(places))
            offset += span if name == "shards" else numel
        found[name] = CopyTable(segments, device), 4 * 3080 + 9, owned
    return found


def check(module, device: torch.device = CPU, narrow: torch.dtype = torch.float32) -> None:
    columns = torch.tensor([3, 0, 2], device=device)
    for table, length, owned in tables(device).values():
        generator = torch.Generator().manual_seed(length)
        flat = torch.randn(length, generator=generator).to(narrow)
        flat[owned[1]] *= 300
        usual = torch.tensor([40.0, 5.0, 0.0, 50.0])
        current = torch.stack([usual, torch.arange(4.0), torch.ones(4), torch.zeros(4)])
        shares = torch.tensor([0.1, 0.2, 0.3, 0.9])
        for spoilt in (None, math.inf, math.nan):
            if spoilt is not None:
                flat[owned[2][-1]] = spoilt
            updated = torch.full((4, 4), 7.0)
            statistics = Statistics(current.to(device), updated.to(device), shares.to(device), TIMES, LEAVES, DECAY)
            factors, residues, left = torch.full((3, 3), torch.nan, device=device).unbind()
            module.factors_of(flat.to(device), table, columns, statistics, factors, residues, left)
            root = float(usual.norm())
            for i, (column, places) in enumerate(zip(columns.tolist(), owned, strict=True)):
                norm, old = float(flat[places].float().norm()), float(usual[column])
                most = TIMES * max(old, float(shares[column]) * root)
                counted, cut = math.isfinite(norm) and norm > 0, norm > most and old > 0 and math.isfinite(norm)
                assert float(factors[i]) == pytest.approx(LEAVES * most / norm if cut else 1.0, rel=1e-5)
                assert math.isnan(float(residues[i])) != math.isfinite(norm)
                if math.isfinite(norm):
                    assert float(left[i]) == pytest.approx(LEAVES * most if cut else norm, rel=1e-5)
                now = most if cut else norm if counted else old
                expected = [DECAY * old + (1 - DECAY) * now if old else now, current[1, column] + counted,
                            1 + cut, norm - LEAVES * most if cut else 0.0]  # fmt: skip
                assert statistics.updated[:, column].tolist() == pytest.approx([float(e) for e in expected], rel=1e-5)
            assert (float(factors[1]) < 1) == (float(usual[0]) > 0) and statistics.updated[:, 1].tolist() == [7.0] * 4


def check_sample(module, device: torch.device = CPU) -> None:
    """Values of rows that lie apart, and norms: of each tensor, or of all, and zeros, where there are streams."""
    wide = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(device)
    rows, positions = wide[:, 20:276], torch.tensor([0, 255, 256, 700, 767], device=device)
    sums = torch.full((2, 7), torch.nan, device=device)
    of_tensors = torch.stack([rows[:, :64].norm(), rows[:, 64:].norm()])
    of_all = torch.stack([rows.norm(), torch.zeros((), device=device)])
    for known, norms in ((None, of_tensors if module is reference else of_all), (of_tensors, of_tensors)):
        module.sample(rows, positions, [slice(0, 64), slice(64, 256)], known, sums, 1 / 3)
        lines = torch.cat([rows.reshape(-1)[positions], norms])
        assert torch.allclose(sums, torch.stack([lines, lines.square()]) / 3, rtol=1e-5)
        assert torch.equal(sums[:, :5], torch.stack([lines, lines.square()])[:, :5] * (1 / 3))


def test_samples_and_norms_of_rows():
    check_sample(reference)


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_the_reference_is_a_loop_over_parameters(narrow):
    check(reference, narrow=narrow)


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
import torch
import test_ops_norms
from thinwire.ops.norms import triton
for narrow in (torch.float32, torch.bfloat16):
    test_ops_norms.check(triton, narrow=narrow)
test_ops_norms.check_sample(triton)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_launches_on_a_gpu_are_the_reference():
    from thinwire.ops.norms import triton

    check(triton, torch.device("cuda"))
    check_sample(triton, torch.device("cuda"))
