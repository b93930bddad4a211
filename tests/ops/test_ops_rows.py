"""A flat buffer and rows: every parameter in its columns, whoever owns which part, and back."""

from __future__ import annotations

import pytest
import torch

from breadth import spread
from programs import check_interpreted, needs_triton
from thinwire.ops.rows import LARGE, STAYS, CopySegment, CopyTable, pack, reference, unpack

CPU = torch.device("cpu")
APART = 3
"""Elements between rows."""
APART = 3
"""Elements between rows."""


def engines(rows: int) -> dict[str, tuple[list[CopySegment], int, int]]:
    """Parts of three parameters as DDP and as FSDP2 lays them out, odd sizes; elements of the buffer and of the rows.

    The last of them is in a bucket of its own, behind the others' rows, with one row less if there are several.
    """
    sizes, found = (2500, 1, 37), {}
    of = (rows, rows, max(rows - 1, 1))
    for engine in ("ddp", "fsdp2"):
        stride, place, start, parts = sum(sizes) + 3, 5, 0, []
        for size, count in zip(sizes, of, strict=True):
            span = size if engine == "fsdp2" else -(-size // count)
            width = -(-span // 8) * 8
            numel, step = ((count - 1) * stride + size, stride) if engine == "fsdp2" else (size, span)
            parts.append(CopySegment(place, numel, step, start, width, span, 0, count))
            place, start = place + size, start + width
        n, last = parts[2].start + APART, parts[2]
        parts = [part._replace(stride=n) for part in parts[:2]]
        parts.append(last._replace(start=rows * n + 7, stride=last.width + APART))
        found[engine] = parts, rows * stride + 7, parts[2].start + of[2] * parts[2].stride
    return found


def check(module, rows: int, narrow: torch.dtype) -> None:
    for parts, length, size in engines(rows).values():
        places = CopyTable(parts, CPU)
        flat = torch.randn(length, generator=torch.Generator().manual_seed(rows)).to(narrow)
        expected, taken = torch.full((size,), torch.nan), torch.zeros(length, dtype=torch.bool)
        for part in parts:
            for row in range(part.rows):
                expected[part.start + row * part.stride :][: part.width] = 0
                for i in range(part.span):
                    if row * part.step + i < part.numel:
                        at = part.offset + row * part.step + i
                        expected[part.start + row * part.stride + i], taken[at] = flat[at].float(), True
        packed = torch.full((size,), torch.nan)
        module.pack(flat, places, packed)
        assert torch.equal(packed.nan_to_num(9), expected.nan_to_num(9))
        back = torch.full((length,), 7.0, dtype=narrow)
        module.unpack(packed, places, back, False)
        assert torch.equal(back, torch.where(taken, flat, 7.0))
        module.unpack(packed, places, back, True)
        assert torch.equal(back, torch.where(taken, flat + flat, 7.0))


@pytest.mark.parametrize(("narrow", "rows"), spread(2, [torch.float32, torch.bfloat16], [1, 2, 3, 64]))
def test_the_reference_puts_every_value_where_it_belongs(rows, narrow):
    check(reference, rows, narrow)


@pytest.mark.parametrize(("narrow", "rows"), spread(2, [torch.float32, torch.bfloat16], [1, 2, 3, 64]))
def test_a_cpu_copies_small_and_large_parameters_as_the_reference_does(rows, narrow, monkeypatch):
    pytest.importorskip("numba")
    from thinwire.ops.rows import cpu

    check(cpu, rows, narrow)
    monkeypatch.setattr("thinwire.ops.rows.LARGE", 30)  # of the three parameters one stays small
    check(cpu, rows, narrow)
    assert LARGE >= 4096


def test_what_stays_in_the_buffer_is_copied_neither_way():
    parts, length, size = engines(3)["ddp"]
    some, every = CopyTable([parts[0], parts[1]._replace(start=STAYS), parts[2]], CPU), CopyTable(parts, CPU)
    assert every.copied is every and some.copied.segments == (parts[0], parts[2])
    flat, places = torch.randn(length), slice(parts[1].offset, parts[1].offset + parts[1].numel)
    packed = pack(flat, some, torch.full((size,), 7.0))
    assert torch.equal(packed, pack(flat, some.copied, torch.full((size,), 7.0)))
    back = unpack(packed, some, torch.full((length,), 5.0))
    assert back[places].eq(5).all() and not back.eq(5).all()


def test_nothing_to_do():
    places = CopyTable([], CPU)
    assert pack(torch.ones(3), places, torch.full((2,), 5.0)).tolist() == [5, 5]
    assert unpack(torch.ones(0), places, torch.full((2,), 5.0)).tolist() == [5, 5]


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
import torch
import test_ops_rows
from thinwire.ops.rows import triton
for rows in (1, 3):
    for narrow in (torch.float32, torch.bfloat16):
        test_ops_rows.check(triton, rows, narrow)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_launch_on_a_gpu_is_the_reference():
    cuda = torch.device("cuda")
    for parts, length, size in engines(3).values():
        flat = torch.randn(length)
        expected = pack(flat, CopyTable(parts, CPU), torch.zeros(size))
        found = pack(flat.to(cuda), CopyTable(parts, cuda), torch.zeros(size, device=cuda))
        assert torch.equal(found.cpu(), expected)
        back = unpack(found, CopyTable(parts, cuda), torch.zeros(length, device=cuda))
        assert torch.equal(back.cpu(), unpack(expected, CopyTable(parts, CPU), torch.zeros(length)))
