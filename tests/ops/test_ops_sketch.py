"""The count sketch: fast code against the reference, how much is left at which load, sums that are not exact."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from torch import Tensor

from programs import check_interpreted, needs_triton
from thinwire.base.errors import ThinwireError
from thinwire.ops import mask, sketch, sparse
from thinwire.ops.mask.reference import flags_of
from thinwire.ops.sketch import SketchSegment, SketchSegments, cpu, reference

POISON = float("nan")
CPU = torch.device("cpu")


def parts_of(
    widths: Sequence[int], load: float, density: float = 0.05, ranks: int = 2, plain: Sequence[int] = ()
) -> SketchSegments:
    """Beside each other; those whose number is in ``plain`` have no sketch."""
    parts: list[SketchSegment] = []
    start = place = first = 0
    for number, width in enumerate(widths):
        k = max(int(width * density), 1)
        room = min(ranks * k, width)
        cells = 0 if number in plain else int(room / load / 3) + 8
        parts.append(SketchSegment(start, width, k, place, room, first, cells, 2**62 + 12345 * number))
        start, place, first = start + width, place + k, parts[-1].wire.stop
    return SketchSegments(parts, CPU)


def chosen(parts: SketchSegments, rows: int, seed: int, holes: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, where the largest of them are, these, and their mask; ``holes``: lists that are not full."""
    n = parts.segments[-1].columns.stop
    h = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    found = torch.empty(rows, parts.k, dtype=torch.int32)
    sent = torch.empty(rows, parts.k)
    listed = tuple(sparse.ListSegment(part.start, part.width, part.k, part.list_start) for part in parts)
    sparse.largest(h, None, listed, h.clone(), found, sent)
    words = mask.from_indices(found, torch.empty(rows, n // mask.WORD, dtype=torch.int64))
    if holes:
        words &= ~0x6666
        reference.gather(h, words, parts, found.fill_(-7), sent.fill_(POISON))
    return h, found, sent, words


def everything(
    module: ModuleType, parts: SketchSegments, rows: int, wired: int, row: int, ranks: int = 2, holes: bool = False
) -> dict[str, Tensor]:
    """All operations, one after the other; what they write is poisoned before."""
    n, result = parts.segments[-1].columns.stop, dict[str, Tensor]()
    index, wire = torch.zeros(rows, n // mask.WORD, dtype=torch.int64), torch.zeros(rows, parts.wire_numel)
    for rank in range(ranks):
        h, found, sent, words = chosen(parts, rows, rank, holes)
        index |= words
        listed, payload = torch.full_like(found, -7), torch.full_like(sent, POISON)
        module.gather(h, words, parts, listed, payload)
        assert torch.equal(listed, found) and torch.equal(payload, sent)
        module.peaks(sent, parts, result.setdefault(f"peaks {rank}", torch.zeros(len(parts))))
        rest = torch.full_like(sent, POISON)
        module.round_to(sent, torch.full((len(parts),), 2.0**-16), parts, rest)
        own = torch.full((rows, parts.wire_numel), POISON)
        module.encode(sent, found, parts, h, own)
        wire += own
        result |= {f"sent {rank}": sent, f"rest {rank}": rest, f"wire {rank}": own}
    for estimate in (True, False):
        out, left = torch.full((wired, n), POISON), torch.full_like(index, -7)
        module.peel(wire[row : row + wired].clone(), index, parts, row, out, left, estimate)
        result |= {f"out {estimate}": out, f"left {estimate}": left}
    for name, bits in (("union", index), ("lost", left)):
        module.count(bits, parts, result.setdefault(name, torch.full((rows, len(parts)), -7, dtype=torch.int32)))
    acc = torch.full((rows, n), 3.0)
    module.restore(sent, rest, found, left, parts, acc)
    return result | {"acc": acc, "total": wire, "index": index}


CASES = {  # widths, load, rows of the index, those of the wire, and which; parts without a sketch
    "one row": ((640, 64, 6400), 0.7, 1, 1, 0, ()),
    "an owner's row": ((640, 64, 6400, 128), 0.6, 3, 1, 2, ()),
    "all rows, some parts whole": ((640, 1920, 128), 0.5, 2, 2, 0, (0, 2)),
    "all parts whole": ((64, 128), 0.5, 2, 1, 1, (0, 1)),
    "overloaded": ((640, 1280), 1.2, 3, 1, 0, (1,)),
}


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_as_the_reference(case, holes):
    widths, load, rows, wired, row, plain = CASES[case]
    parts = parts_of(widths, load, plain=plain)
    slow, fast = (everything(module, parts, rows, wired, row, holes=holes) for module in (reference, cpu))
    for name in slow:
        assert torch.equal(slow[name], fast[name]), name


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_peeled_comes_back_exactly_and_the_rest_is_known(case):
    widths, load, rows, wired, row, plain = CASES[case]
    parts = parts_of(widths, load, plain=plain)
    found = everything(cpu, parts, rows, wired, row)
    lost = flags_of(found["left False"])[row : row + wired]
    truth, total = torch.zeros(wired, sum(widths)), found["total"][row : row + wired]
    for rank in range(2):
        _, at, _, _ = chosen(parts, rows, rank)
        sent = found[f"sent {rank}"]
        for i in range(wired):
            truth[i].index_add_(0, at[row + i].long(), sent[row + i])
    for part in parts:
        out, guess = (found[f"out {estimate}"][:, part.columns] for estimate in (False, True))
        here, there = lost[:, part.columns], truth[:, part.columns]
        if not part.cells:
            assert torch.equal(out, total[:, part.wire]) and not here.any()
            continue
        assert torch.equal(out[~here], there[~here]) and (out[here] == 0).all()
        assert torch.equal(guess[~here], there[~here])
        if load <= 0.7:
            assert not here.any()
        if load > 0.818:
            assert here.sum() > 0.4 * there.count_nonzero()
            assert (guess[here] - there[here]).norm() > 0.5 * there[here].norm()  # the median knows little
    words = found["left False"]
    assert torch.equal(found["lost"], torch.stack([mask.popcount(words[:, p.words]) for p in parts], 1).int())
    # what has not arrived of this rank's values is back, and the rest beside it
    _, at, sent, _ = chosen(parts, rows, 1)
    lost = flags_of(words)
    for i in range(rows):
        own = at[i].long()
        back = found["acc"][i, own]
        expected = torch.where(lost[i, own], sent[i], sent[i] - found["sent 1"][i])
        whole = torch.cat([torch.full((p.k,), p.cells == 0) for p in parts])
        assert torch.equal(back[~whole], expected[~whole]) and (back[whole] == 0).all()


def share_left(k: int, load: float, seed: int) -> float:
    n = 16 * k
    flags = torch.zeros(1, n, dtype=torch.bool)
    flags[0, torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k]] = True
    words = mask.pack(flags, torch.empty(1, n // mask.WORD, dtype=torch.int64))
    parts = SketchSegments([SketchSegment(0, n, k, 0, k, 0, int(k / load / 3) + 8, seed)], CPU)
    left = torch.empty_like(words)
    cpu.peel(torch.empty(0, parts.wire_numel), words, parts, 0, torch.empty(0, n), left, False)
    return int(mask.popcount(left)) / k


def test_left_overs_by_load():
    """The table of docs/tagc.md: pytest tests/ops/test_ops_sketch.py -k load -s"""
    table = {}
    for load in (0.5, 0.7, 0.75, 0.79, 0.82, 0.85, 0.9, 1.0, 1.2, 2.0):
        table[load] = [max(share_left(k, load, seed) for seed in range(5)) for k in (200, 2000, 50000)]
        print(f"| {load:.2f} | " + " | ".join(f"{share:.1%}" for share in table[load]) + " |")
    assert table[0.7] == [0, 0, 0] and table[0.79][2] == 0  # small tables fail earlier
    assert all(share > 0.3 for share in table[0.85][1:]) and all(share > 0.7 for share in table[1.0])


@pytest.mark.parametrize("module", [reference, cpu])
def test_sums_that_are_not_exact_come_out_to_rounding(module):
    """Load 0.75, values that were not rounded: a stack is off by 0.19 here."""
    parts = SketchSegments([SketchSegment(0, 64 * 2000, 6000, 0, 6000, 0, 2667, 5)], CPU)
    _, found, payload, words = chosen(parts, 1, 1)
    wire, out, left = torch.empty(1, parts.wire_numel), torch.empty(1, 64 * 2000), torch.empty_like(words)
    module.encode(payload, found, parts, out, wire)
    module.peel(wire, words, parts, 0, out, left, False)
    assert not left.any() and out.count_nonzero() <= 6000
    assert (out[0, found[0].long()] - payload[0]).abs().max() < 2e-5


def test_what_does_not_fit_is_refused():
    parts = parts_of((64, 128), 0.7)
    payload, found = torch.zeros(1, parts.k), torch.zeros(1, parts.k, dtype=torch.int32)
    with pytest.raises(ThinwireError, match="three tables"):
        sketch.encode(payload, found, parts, torch.zeros(1, 192), torch.zeros(1, parts.wire_numel - 1))
    with pytest.raises(ThinwireError, match="values per row, the payload has 3"):
        sketch.round_to(torch.zeros(1, 3), torch.zeros(2), parts, torch.zeros(1, 3))
    with pytest.raises(ThinwireError, match="a wire of 1 rows from 2 on"):
        words = torch.zeros(2, 3, dtype=torch.int64)
        sketch.peel(torch.zeros(1, parts.wire_numel), words, parts, 2, torch.zeros(1, 192), words)


@needs_triton
@pytest.mark.parametrize("case", CASES)
def test_triton_interpreted_equals_reference(case):
    """Cut short after as many rounds as on a GPU, and after fewer."""
    code = f"""
import torch
from test_ops_sketch import CASES, everything, parts_of
from thinwire.ops import sketch
from thinwire.ops.sketch import reference, triton

widths, load, rows, wired, row, plain = CASES[{case!r}]
parts = parts_of([width if width <= 1920 else width // 5 for width in widths], load, plain=plain)
sketch.rounds_on = lambda device: sketch.ROUNDS
for sketch.ROUNDS, holes in ((7, True), (2, False)):
    slow, fast = (everything(module, parts, rows, wired, row, holes=holes) for module in (reference, triton))
    for name in slow:
        assert torch.equal(slow[name], fast[name]), (name, sketch.ROUNDS)
"""
    check_interpreted(code)
