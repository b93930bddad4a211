"""A flat buffer and rows: every parameter in its columns, whoever owns which part, and back."""

from __future__ import annotations

import pytest
import torch

from programs import needs_triton, run_python
from thinwire.ops.rows import Part, Places, pack, reference, unpack

CPU = torch.device("cpu")


def engines(rows: int) -> dict[str, tuple[list[Part], int]]:
    """Parts of three parameters as DDP and as FSDP2 lays them out, odd sizes, and the length of the buffer."""
    sizes, ddp, fsdp2, place, column, start = (2500, 1, 37), [], [], 5, 0, 0
    stride = sum(sizes) + 3
    for size in sizes:
        span = -(-size // rows)
        width = -(-span // 8) * 8
        ddp.append(Part(place, size, span, start, width, span))
        place, start = place + size, start + width
    start = 0
    for size in sizes:
        width = -(-size // 8) * 8
        fsdp2.append(Part(column, (rows - 1) * stride + size, stride, start, width, size))
        column, start = column + size, start + width
    return {"ddp": (ddp, place + 2), "fsdp2": (fsdp2, rows * stride)}


def check(module, rows: int, narrow: torch.dtype) -> None:
    for parts, length in engines(rows).values():
        places = Places(parts, CPU)
        n = parts[-1].start + parts[-1].width
        flat = torch.randn(length, generator=torch.Generator().manual_seed(rows)).to(narrow)
        expected = torch.zeros(rows, n)
        for part in parts:
            for row in range(rows):
                for i in range(part.span):
                    if row * part.step + i < part.numel:
                        expected[row, part.start + i] = flat[part.offset + row * part.step + i].float()
        packed = torch.full((rows, n + 3), torch.nan)[:, :n]
        module.pack(flat, places, packed)
        assert torch.equal(packed, expected)
        back = torch.full((length,), 7.0, dtype=narrow)
        module.unpack(packed, places, back)
        taken = torch.zeros(length, dtype=torch.bool)
        for part in parts:
            for row in range(rows):
                first = part.offset + row * part.step
                taken[first : min(first + part.span, part.offset + part.numel)] = True
        assert torch.equal(back, torch.where(taken, flat, 7.0))


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
def test_the_reference_puts_every_value_where_it_belongs(rows, narrow):
    check(reference, rows, narrow)


def test_nothing_to_do():
    places = Places([], CPU)
    assert pack(torch.ones(3), places, torch.full((1, 2), 5.0)).tolist() == [[5, 5]]
    assert unpack(torch.ones(1, 0), places, torch.full((2,), 5.0)).tolist() == [5, 5]


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
import torch
import test_ops_rows
from thinwire.ops.rows import triton
for rows in (1, 3):
    for narrow in (torch.float32, torch.bfloat16):
        test_ops_rows.check(triton, rows, narrow)
print("checked")
"""
    done = run_python(code, TRITON_INTERPRET="1")
    assert done.stdout.strip().endswith("checked"), done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_one_launch_on_a_gpu_is_the_reference():
    cuda = torch.device("cuda")
    for parts, length in engines(3).values():
        flat, n = torch.randn(length), parts[-1].start + parts[-1].width
        expected = pack(flat, Places(parts, CPU), torch.empty(3, n))
        found = pack(flat.to(cuda), Places(parts, cuda), torch.full((3, n), torch.nan, device=cuda))
        assert torch.equal(found.cpu(), expected)
        back = unpack(found, Places(parts, cuda), torch.zeros(length, device=cuda))
        assert torch.equal(back.cpu(), unpack(expected, Places(parts, CPU), torch.zeros(length)))
