"""A shard and its message: every parameter in its groups or as it is, and back, onto what is there."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from programs import check_interpreted, needs_triton
from thinwire.base.random import Seeds
from thinwire.ops import quant, shards
from thinwire.ops.quant import Format
from thinwire.ops.rows import CopySegment, CopyTable
from thinwire.ops.shards import reference

CPU = torch.device("cpu")
ODD, EVEN = (2500, 37, 1, 4200, 5), (4096, 64, 48, 16, 32)
PEERS, MINE = 3, 1


class Case(NamedTuple):
    """Parameters of ``sizes``: the second and the last are kept, the others encoded in groups of ``group``."""

    sizes: tuple[int, ...] = ODD
    group: int = 64
    bits: int = 4
    dtype: torch.dtype = torch.float32
    adds: bool = True
    draws: bool = False

    @property
    def format(self) -> Format:
        return Format(self.bits, self.group)


CASES = (
    Case(), Case(EVEN, 2048), Case(EVEN, 64, 8, draws=True), Case(ODD, 4096, 4, torch.bfloat16),
    Case(ODD, 8, 8, torch.bfloat16, adds=False), Case(ODD, 128, 8, adds=False, draws=True), Case(ODD[1:2]),
    Case((300,), 32, 4, torch.bfloat16),
)  # fmt: skip


class Shard:
    """Weights, what others hold of them, and where all that lies in a shard and in a message, between what is not ours.
    """

    def __init__(self, case: Case, device: torch.device = CPU) -> None:
        gap = 16 if case.sizes == EVEN else 3
        place, first, tail, encoded, kept, drawn = gap, 0, 1, [], [], []
        for number, size in enumerate(case.sizes):
            if number in (1, 4) or case.sizes == ODD[1:2]:
                kept.append(CopySegment(place, size, 1, tail, size, size, 1, 1))
                tail += size
            else:
                width = -(-size // case.group) * case.group
                encoded.append(CopySegment(place, size, 1, first, width, size, 1, 1))
                drawn.append((first, first + width, 77 + number))
                first += width
            place += size
        self.case, self.n, self.width, self.tail, self.device = case, place + gap, first, tail + 2, device
        self.encoded, self.kept = CopyTable(encoded, device, shards.PER_PROGRAM), CopyTable(kept, device)
        self.drawn = Seeds(tuple(drawn)) if case.draws and drawn else None
        generator = torch.Generator().manual_seed(1)
        values = torch.randn((2 + PEERS, self.n), generator=generator)
        values[:, : min(100, self.n)] *= 1e4
        own, held, *rows = values.to(case.dtype).to(device)
        self.own, self.held, self.rows = own, held if case.adds else None, torch.stack(rows)
        if encoded:  # a group of zeros, and one that is not finite
            at = encoded[0].offset
            own[at : at + case.group] = held[at : at + case.group]
            own[encoded[-1].offset + encoded[-1].numel - 1] = math.inf

    def message(self, peers: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and what is kept, poisoned."""
        codes = torch.full((peers, self.width * self.case.bits // 8 + 16), 77, dtype=torch.uint8, device=self.device)
        scales = torch.full((peers, self.width // self.case.group + 2), math.nan, device=self.device)
        tail = torch.full((peers, self.tail), 7.0, dtype=self.case.dtype, device=self.device)
        return codes.view(torch.int8) if self.case.bits == 8 else codes, scales, tail

    def ours(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return codes[:, : self.width * self.case.bits // 8], scales[:, : self.width // self.case.group]

    def write(self, module: ModuleType) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, tail = self.message()
        module.write(
            self.own, self.held, self.encoded, self.kept, self.case.format, *self.ours(codes, scales), tail[0],
            self.drawn,
        )  # fmt: skip
        return codes, scales, tail

    def read(self, module: ModuleType, codes: Tensor, scales: Tensor, tail: Tensor) -> tuple[Tensor, Tensor | None]:
        """What becomes of rows, of which the own one holds anything, and of what is held."""
        rows, held = self.rows.clone(), None if self.held is None else self.held.clone()
        if held is not None:
            rows[MINE, : self.n // 2] = math.nan
        given = (*self.ours(codes, scales), tail)
        module.read(*given, self.encoded, self.kept, self.case.format, rows, MINE, held)
        return rows, held


def bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.element_size() == 1 else tensor.view(torch.int16)


def everybody(shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    """A message of each peer, all of them different."""
    found = shard.message(PEERS)
    for peer in range(PEERS):
        shard.own.mul_(1.5)
        for everyone, one in zip(found, shard.write(reference), strict=True):
            everyone[peer] = one[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_each_parameter_by_itself(case):
    """Quantized alone; what is kept, as it is; and nothing else is touched."""
    shard = Shard(case)
    codes, scales, tail = shard.write(reference)
    expected_codes, expected_scales, expected_tail = shard.message()
    difference = shard.own if shard.held is None else shard.own - shard.held
    for number, part in enumerate(shard.encoded.segments):
        values = torch.zeros(1, part.width)
        values[0, : part.numel] = difference[part.offset : part.offset + part.numel]
        at, groups = (slice(part.start // by, (part.start + part.width) // by) for by in (8 // case.bits, case.group))
        drawn = None if shard.drawn is None else Seeds(((0, part.width, shard.drawn.ranges[number][2]),))
        quant.quantize(values, case.format, expected_codes[:, at], expected_scales[:, groups], drawn)
    for part in shard.kept.segments:
        expected_tail[0, part.start : part.start + part.numel] = shard.own[part.offset : part.offset + part.numel]
    for found, expected in ((codes, expected_codes), (scales, expected_scales), (tail, expected_tail)):
        assert torch.equal(bits(found), bits(expected))

    messages = everybody(shard)
    rows, held = shard.read(reference, *messages)
    before = shard.rows.clone()
    if held is not None:
        before[MINE] = shard.held
    for peer in range(PEERS):
        for part in shard.encoded.segments:
            first, last = part.start, part.start + part.width
            at, groups = (slice(first // by, last // by) for by in (8 // case.bits, case.group))
            of, wire = slice(part.offset, part.offset + part.numel), slice(peer, peer + 1)
            values = torch.empty(1, part.width)
            quant.dequantize(messages[0][wire, at], messages[1][wire, groups], case.format, values)
            values = values[0, : part.numel] + (before[peer, of].float() if case.adds else 0)
            before[peer, of] = values.to(case.dtype)
        for part in shard.kept.segments:
            values = messages[2][peer, part.start : part.start + part.numel]
            before[peer, part.offset : part.offset + part.numel] = values
    assert torch.equal(rows.nan_to_num(9), before.nan_to_num(9)) and bool(before.isnan().any()) == bool(shard.width)
    assert held is None or torch.equal(held.nan_to_num(9), rows[MINE].nan_to_num(9))


def check(fast: ModuleType, case: Case) -> None:
    """The same bits as the reference's, in poisoned memory."""
    shard = Shard(case)
    for found, expected in zip(shard.write(fast), shard.write(reference), strict=True):
        assert torch.equal(bits(found), bits(expected)), case
    messages = everybody(shard)
    (rows, held), (expected, expected_held) = shard.read(fast, *messages), shard.read(reference, *messages)
    taken = torch.zeros(shard.n, dtype=torch.bool)
    for part in (*shard.encoded.segments, *shard.kept.segments):
        taken[part.offset : part.offset + part.numel] = True
    expected[MINE] = torch.where(taken, expected[MINE], rows[MINE])  # the reference copies what is between, too
    for one, other in ((rows, expected), (held, expected_held)):
        if one is not None:
            assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(9), other.nan_to_num(9)), case


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
import test_ops_shards as t
from thinwire.ops.shards import triton
for case in t.CASES:
    t.check(triton, case)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_one_launch_on_a_gpu_is_the_reference(case):
    here, there = Shard(case), Shard(case, torch.device("cuda"))
    for found, expected in zip(there.write(shards), here.write(shards), strict=True):
        assert torch.equal(bits(found.cpu()), bits(expected))
