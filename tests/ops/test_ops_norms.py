"""Copies that scale outliers down: the reference against a loop, Triton against it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from programs import check_interpreted, needs_triton
from thinwire.ops.norms import Statistics, reference
from thinwire.ops.rows import STAYS, CopySegment, CopyTable

CPU = torch.device("cpu")
TIMES, LEAVES, DECAY = 4.0, 0.5, 0.9
ROWS = 16_000
"""Elements of the rows' memory."""
Places = list[tuple[int, int]]
"""Where each value of a parameter lies in the buffer, and in the rows, or STAYS."""


def tables(device: torch.device = CPU) -> dict[str, tuple[CopyTable, int, list[Places]]]:
    """Three parameters whole, as rows of which the last is shorter, as shards; copied, or some or all of them not.

    With the buffer's length, and where each parameter's values lie.
    """
    made = {}
    for name, rows in (("whole", 1), ("rows", 3), ("shards", 4)):
        for stay in ((), (1,), (0, 2), (0, 1, 2)):
            offset, start, segments, places = 2, 5, [], []
            for i, numel in enumerate((3000, 7, 64)):
                stays, stride = i in stay, ROWS // rows // 64 * 64
                count = 1 if stays and name == "rows" else rows  # as the engine has it, in one run
                span = numel if name == "shards" else -(-numel // count)
                width = span if stays else -(-span // 64) * 64
                step, length = (3080, 3 * 3080 + span) if name == "shards" else (span, numel)
                first = STAYS if stays else start
                segments.append(CopySegment(offset, length, step, first, width, span, stride, count))
                places.append([
                    (offset + row * step + k, STAYS if stays else start + row * stride + k)
                    for row in range(count) for k in range(span) if row * step + k < length
                ])  # fmt: skip
                offset, start = offset + (span if name == "shards" else numel), start + width
            made[f"{name}, {stay} stay"] = CopyTable(segments, device), 4 * 3080 + 9, places
    return made


def check(module, device: torch.device = CPU, narrow: torch.dtype = torch.float32) -> None:
    for wide in {torch.float32, narrow}:  # of the rows
        for (table, length, places), loud in itertools.product(tables(device).values(), (1, 300)):
            generator = torch.Generator().manual_seed(length)
            flat = (torch.randn(length, generator=generator) * loud).to(narrow)
            flat[[source for source, _ in places[1]]] *= 300
            for spoilt in (None, math.inf, math.nan):
                if spoilt is not None:
                    flat[places[2][-1][0]] = spoilt
                check_once(module, flat.clone().to(device), table, places, wide)


def check_once(module, flat: torch.Tensor, table: CopyTable, places: list[Places], wide: torch.dtype) -> None:
    """Bounds and statistics are those of a loop over the parameters, and all values those times the factors."""
    device, given = flat.device, flat.cpu().clone()
    columns, usual = torch.tensor([3, 0, 2], device=device), torch.tensor([40.0, 5.0, 0.0, 50.0])
    current = torch.stack([usual, torch.arange(4.0), torch.ones(4), torch.zeros(4)])
    shares = torch.tensor([0.1, 0.2, 0.3, 0.9])
    updated = torch.full((4, 4), 7.0)
    statistics = Statistics(current.to(device), updated.to(device), shares.to(device), TIMES, LEAVES, DECAY)
    factors, residues, left = torch.full((3, 3), torch.nan, device=device).unbind()
    rows = torch.full((ROWS,), 7.0, dtype=wide, device=device)
    all_stay = not table.copied.segments
    module.bound(flat, table, flat if all_stay else rows, columns, statistics, factors, residues, left)
    root = float(usual.norm())
    flat_wanted, rows_wanted, cuts = given.clone(), torch.full((ROWS,), 7.0, dtype=wide), 0
    for segment in table.copied.segments:
        for row in range(segment.rows):
            rows_wanted[segment.start + row * segment.stride :][: segment.width] = 0
    for i, (column, pairs) in enumerate(zip(columns.tolist(), places, strict=True)):
        sources, targets = map(torch.tensor, zip(*pairs, strict=True))
        norm, old = float(given[sources].float().norm()), float(usual[column])
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
        stays, factor, cuts = int(targets[0]) < 0, factors[i].cpu(), cuts + cut
        target, where = (flat_wanted, sources) if stays else (rows_wanted, targets)
        copied = given[sources].to(target.dtype)
        target[where] = copied * factor if module is reference else (copied.float() * factor).to(target.dtype)
    assert torch.equal(flat.cpu().nan_to_num(9), flat_wanted.nan_to_num(9))
    assert torch.equal(rows.cpu().nan_to_num(9), rows_wanted.nan_to_num(9))
    assert cuts >= 1 and statistics.updated[:, 1].tolist() == [7.0] * 4


def check_sample(module, device: torch.device = CPU) -> None:
    """Values of rows that lie apart, and norms: of each tensor, or of all, and zeros, where there are streams."""
    wide = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(device)
    rows, positions = wide[:, 20:276], torch.tensor([0, 255, 256, 700, 767, 3], device=device)
    memory = torch.full((2, 10), torch.nan, device=device)
    sums = memory[:, 1:9]
    of_tensors = torch.stack([rows[:, :64].norm(), rows[:, 64:].norm()])
    of_all = torch.stack([rows.norm(), torch.zeros((), device=device)])
    for known, norms in ((None, of_tensors if module is reference else of_all), (of_tensors, of_tensors)):
        module.sample(rows, positions, [slice(0, 64), slice(64, 256)], known, sums, 1 / 3)
        lines = torch.cat([rows.reshape(-1)[positions].view(2, 3), norms.view(2, 1)], 1)
        expected, sent = torch.stack([lines, lines.square()]) * (1 / 3), sums.reshape(2, 2, 4)
        assert torch.allclose(sent, expected, rtol=1e-5) and torch.equal(sent[:, :, :3], expected[:, :, :3])
        assert memory[:, ::9].isnan().all()


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
from thinwire.ops import gpu
assert gpu.counters(test_ops_norms.CPU, 3).tolist() == [0] * 4  # as the next launch needs them
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_launches_on_a_gpu_are_the_reference():
    from thinwire.ops.norms import triton

    check(triton, torch.device("cuda"))
    check_sample(triton, torch.device("cuda"))
