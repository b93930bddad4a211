"""The largest values of rows by lists of positions: every backend against plain torch, bit for bit."""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import numpy as np
import pytest
import torch

from breadth import ALL
from programs import check_interpreted, needs_triton
from test_ops_mask import SPECIAL, gaussian, topk_mask
from thinwire.base.errors import ThinwireError
from thinwire.codecs.base import Residual
from thinwire.codecs.intquant import Integers
from thinwire.codecs.sparse import Positions, Sparse
from thinwire.ops import mask, sparse
from thinwire.ops.direction import Adam, DirectionSegment
from thinwire.ops.norms import Limit, Samples, Statistics
from thinwire.ops.quant import Format
from thinwire.ops.rows import STAYS, CopySegment, CopyTable
from thinwire.ops.sparse import ListSegment, WireValues, cpu, reference

POISON = -77


def parts_of(*shapes: tuple[int, int], group: int = 8) -> tuple[ListSegment, ...]:
    """Of (width, k) of each."""
    return Positions(shapes, group).lists


PARTS = (
    parts_of((64, 1)),
    parts_of((64 * 9, 100), (64, 64), (64, 0), (64 * 5, 3)),
    parts_of((64 * 80, 300), (64 * 2, 64 * 2), group=64),
)
BEHIND = tuple(part._replace(list_start=part.list_start + 128) for part in parts_of((64 * 9, 100), (64, 3), group=64))
"""Their lists begin behind the row's beginning, which is cleared."""
LONG = parts_of((64 * 700, 448), (64 * 300, 9000), group=64)
"""Long enough for samples."""


FEEDBACK = (None, "apart", "over the rows", "over the old")


def check(
    fast: ModuleType, parts: tuple[ListSegment, ...], kind: str | None = None, device: str = "cpu",
    ways: tuple = FEEDBACK,
) -> None:  # fmt: skip
    """All operations on rows that lie apart, into poisoned memory: nothing is written beside what is theirs."""
    n, m = parts[-1].start + parts[-1].width, parts[-1].list_start + -(-parts[-1].k // 64) * 64
    wide = gaussian(4, n + 128, seed=n).to(device)
    if kind is not None:
        SPECIAL[kind](wide[:2])
    rows, old = wide[:2, 64 : 64 + n], wide[2:, 32 : 32 + n]
    size = sparse.packed_bytes(parts)
    for feedback in ways:
        seen = []
        for module in (reference, fast):
            g, e = rows.clone(), old.clone()
            new = {None: None, "apart": torch.full_like(g, math.nan), "over the rows": g, "over the old": e}[feedback]
            found = torch.full((2, m + 3), POISON, dtype=torch.int32, device=device)
            payload = torch.full((2, m + 2), math.nan, device=device)
            wire = torch.full((2, size + 24), 77, dtype=torch.uint8, device=device)
            lists = found[:, 1 : 1 + m], payload[:, 1:-1], wire[:, 8 : 8 + size]
            module.largest(g, None if new is None else e, parts, new, *lists)
            kept = payload if new is None else new
            seen.append((found, payload.view(torch.int32), kept.view(torch.int32), wire))
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True)), (feedback, kind)
    for some in (parts, parts[-1:]):
        marked = [torch.full((2, n // 64 + 2), POISON, device=device) for _ in range(2)]
        unlisted = tuple(segment._replace(list_start=0) for segment in some)
        for module, words in zip((reference, fast), marked, strict=True):
            module.marked(rows, unlisted, words[:, 1:-1])
        assert torch.equal(*marked) and not marked[0][:, 1 : 1 + some[0].start // 64].any()
    found, packed = seen[0][0][:, 1 : 1 + m], wire[:, 8 : 8 + size]
    again = torch.full((2, m + 3), POISON, dtype=torch.int32, device=device)
    reference.unpack(packed, parts, again[:, 1 : 1 + m])
    assert torch.equal(again[:, 1 : 1 + m], found)
    for format in (None, Format(8, 8), Format(4, 8)):
        for keep in (True, False):
            results = [sent_and_back(module, payload[:, 1:-1], found, packed, parts, wide, format, keep)
                       for module in (reference, fast)]  # fmt: skip
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (kind, format, keep)


def check_steps(fast: ModuleType, device: str = "cpu") -> None:
    """Steps taken in the pass that chooses are those taken before it, bit for bit; samples are of the gradients."""
    parts = parts_of((64 * 80, 300), (64 * 2, 64), group=64)
    n, m = 64 * 82, parts[-1].list_start + 64
    g, e, v = (gaussian(2, n, seed=seed).to(device) for seed in range(3))
    g[0, 5], v = math.nan, v.square()
    lr, scale = torch.tensor([0.1, 0.3], device=device), torch.tensor([1.5, 2.0], device=device)
    segments = [DirectionSegment(part.start, part.width, i, 0.9 + i / 20, 1e-8) for i, part in enumerate(parts)]
    seen, columns = [], [slice(part.start, part.start + part.width) for part in parts]
    places = torch.randint(2 * n, (100,), generator=torch.Generator().manual_seed(1)).to(device)
    for before, norms in itertools.product((True, False), (torch.tensor([3.0, 0.5], device=device), None)):
        sums = torch.full((2, 104), math.nan, device=device)[:, 1:103]
        samples = Samples(places, columns, norms, sums, 0.25)
        rows, new, second = g.clone(), torch.full_like(g, math.nan), torch.full_like(v, math.nan)
        adam = Adam(v, second, segments, lr, scale, torch.tensor(0.7, device=device), samples)
        if before:
            adam.take(rows)
        found = torch.full((2, m), POISON, dtype=torch.int32, device=device)
        payload = torch.full((2, m), math.nan, device=device)
        fast.largest(rows, e, parts, new, found, payload, None, None if before else adam)
        seen.append([values.view(torch.int32) for values in (found, payload, new, second)])
        (values, norm), (squares, square) = (line.view(2, 51).split([50, 1], 1) for line in sums)
        assert torch.equal(values.flatten(), g.flatten()[places] * 0.25)
        assert torch.equal(squares.flatten(), g.flatten()[places].square() * 0.25)
        assert norms is None or torch.equal(torch.stack([norm, square])[:, :, 0], torch.stack([norms, norms**2]) * 0.25)
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def check_limits(fast: ModuleType, device: str = "cpu") -> None:
    """Outliers cut in the pass that makes steps are those cut before it, bit for bit, in lists, state and samples.

    Gradients are integers, so that no order of their squares changes a norm. Of three rows and four segments one is
    cut, one is as usual, one not finite and one zero; the second time none is cut. Guesses are the k-th sizes, or 0.
    """
    shapes = (64 * 700, 448), (64 * 80, 300), (64, 3), (64, 1)
    parts = parts_of(*shapes, group=64)
    n, m = parts[-1].start + parts[-1].width, parts[-1].list_start + 64
    flat = (gaussian(3, n + 128, seed=3) * 3).round().to(device).view(-1)
    rows = flat.view(3, -1)[:, 64 : 64 + n]
    rows[:, parts[0].start : parts[0].width] *= 64
    rows[2, parts[2].start + 5], rows[:, parts[3].start :] = math.nan, 0.0
    e, v = (gaussian(3, n, seed=seed).to(device) for seed in range(2))
    lr, scale = (torch.tensor(values, device=device) for values in ([0.1, 0.3, 0.2, 0.5], [1.5, 2.0, 1.0, 1.0]))
    segments = [DirectionSegment(part.start, part.width, i, 0.9, 1e-8) for i, part in enumerate(parts)]
    copies = [CopySegment(64 + of.start, 2 * (n + 128) + of.width, n + 128, STAYS, of.width, of.width, n + 128, 3)
              for of in parts]  # fmt: skip
    columns, whole = torch.tensor([2, 0, 3, 4], device=device), [slice(of.start, of.start + of.width) for of in parts]
    places = torch.randint(n, (200,), generator=torch.Generator().manual_seed(1))
    places = torch.cat([place % of.width + of.start + i % 3 * n for i, (place, of) in
                        enumerate(zip(places.view(4, 50), parts, strict=True))]).to(device)  # fmt: skip
    for usual in (64.0, 1e6):
        current = torch.zeros(4, 5, device=device)
        current[0] = usual
        seen, guess = [], torch.zeros(3, 4, dtype=torch.int32, device=device)
        for before, again, over in ((1, 0, 0), (0, 0, 0), (0, 1, 0), (0, 0, 1)):
            given, updated = flat.clone(), torch.full_like(current, 7.0)
            statistics = Statistics(current, updated, torch.zeros(5, device=device), 8.0, 0.5, 0.75)
            limit = Limit.make(given, CopyTable(copies, given.device), columns, statistics)
            own, new, second = given.view(3, -1)[:, 64 : 64 + n], torch.full_like(e, math.nan), torch.full_like(v, 9.0)
            sums = torch.full((2, 204), math.nan, device=device)
            samples = Samples(places, whole, limit.bounds.norms, sums, 0.5)
            adam = Adam(v.square(), second, segments, lr, scale, torch.tensor(0.7, device=device), samples, limit)
            found = torch.full((3, m), POISON, dtype=torch.int32, device=device)
            payload, old = torch.full((3, m), math.nan, device=device), e.clone()
            new = old if over else new
            if before:
                limit.cut()
                fast.largest(own, old, parts, new, found, payload, None, adam._replace(limit=None))
            else:
                fast.largest(own, old, parts, new, found, payload, None, adam, None, None, guess if again else None)
            for i, of in enumerate(parts):
                guess[:, i] = payload[:, of.list_start : of.list_start + of.k].abs().amin(1).view(torch.int32)
            values = found, payload, new, second, sums, updated, *limit.bounds
            seen.append([tensor.nan_to_num(7e7) for tensor in values])
        assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True)), usual
        factors = seen[0][-3].tolist()
        assert (factors[0] < 1) == (usual < 1e3) and factors[1:] == [1.0] * 3


def check_guesses(fast: ModuleType, device: str = "cpu") -> None:
    """Whatever is guessed, the same values are chosen, and the k-th sizes are kept. A good guess saves the second pass.

    Of the last part the k-th is 0 in the first row and 1e-30 in the second; of the second part none is chosen.
    """
    shapes, n = ((64 * 80, 300), (64 * 70, 0), (64 * 2, 64 * 2), (64 * 75, 900)), 64 * 227
    rows = gaussian(2, n, seed=5).to(device)
    rows[:, -64 * 75 :] = 0.0
    rows[:, -64 * 75 :: 5] = 1e-30
    rows[0, -64 * 75 :: 5][890:] = 0.0
    launch, saved = (
        fast.launch,
        lambda kernel, *given, **constants: kernel is fast._second or launch(kernel, *given, **constants),
    )
    for shift in (0, 1000, -(1 << 19), (1 << 20) - 1, 1 << 20, -(1 << 20), 1 << 21, 1 << 24, -(1 << 28)):
        parts = parts_of(*(shape for shape in shapes if shape[1] or shift > 1000), group=64)
        m = parts[-1].list_start + 960
        sizes = [
            row[of.start : of.start + of.width].abs().view(torch.int32).sort(descending=True).values[max(of.k - 1, 0)]
            for row in rows for of in parts
        ]  # fmt: skip
        sizes, own = torch.stack(sizes).view(2, -1), rows[:, : parts[-1].start + parts[-1].width].clone()
        lists, guess = [], (sizes + shift).clamp(min=0).int()
        for module in (reference, fast):
            fast.launch = saved if shift in (0, 1000) else launch
            lists += [
                torch.full((2, m), POISON, dtype=torch.int32, device=device),
                torch.full((2, m), math.nan, device=device),
            ]
            module.largest(own, None, parts, None, *lists[-2:], None, None, None, None, guess)
        fast.launch = launch
        assert torch.equal(lists[0], lists[2]) and torch.equal(lists[1], lists[3]), shift
        chosen = torch.tensor([of.k > 0 for of in parts], device=device)
        assert torch.equal(guess[:, chosen], sizes[:, chosen]), shift


def sent_and_back(module, payload, found, packed, parts, wide, format, keep):
    """What ``module`` sends, keeps if it shall, and makes of it: rows, their sum, and a mask; and ``put``."""
    (count, m), n = payload.shape, parts[-1].start + parts[-1].width

    def poisoned(width, dtype=torch.float32, rows=count):
        return torch.full((rows, width + 16), POISON, dtype=dtype, device=payload.device)

    decoded, scales = poisoned(m)[:, 8:-8], None
    codes = poisoned(m) if format is None else poisoned(m, torch.int8)
    if format is not None:
        scales = poisoned(m // format.group)
        codes = codes if format.bits == 8 else poisoned(m // 2, torch.int16).to(torch.uint8)
    values = WireValues(codes[:, 8:-8], None if scales is None else scales[:, 8:-8], format)
    rest, out, total, put = wide.clone(), poisoned(n), poisoned(n, rows=1), wide.clone()
    rows, old, kept = wide[:2, 64 : 64 + n].clone(), wide[2:, 32 : 32 + n], rest[2:, 64 : 64 + n]
    lists = torch.empty_like(found), torch.empty_like(payload)
    module.largest(rows, old if keep else None, parts, kept if keep else None, *lists, None, None, values, decoded)
    scratch = poisoned(m, torch.int32)[:, 8:-8], decoded
    module.decode(packed, values, parts, out[:, 8:-8], None, *scratch)
    module.decode(packed, values, parts, total[:, 8:-8], 0.3, *scratch)
    words = poisoned(n // 64, torch.int64)
    module.read(packed, parts, words[:, 8:-8], scratch[0])
    module.put(payload, found, put[2:, 64 : 64 + n])
    written = codes, codes if scales is None else scales, rest, out, total, put
    return (*(tensor.float().nan_to_num(7e7) for tensor in written), words)


MIXED = parts_of(
    (64, 0), (64, 64), (64 * 37, 1), (64 * 37, 30), (64 * 37, 40), (64 * 37, 1001), (64, 1), (1 << 16, 950),
    (1 << 16, 970), (128, 128), (1 << 14, 0), (1 << 14, 1 << 14), group=1,
)  # fmt: skip
"""Of both kinds, some of them just below and above where they meet; with 40 of 64 * 37 both take the same."""


MANY = parts_of((1 << 23, 1 << 16), (3 << 16, 3 << 13), group=1)
"""Of so many columns that several programs of a GPU decode their positions."""


def check_packing(fast: ModuleType, parts: tuple[ListSegment, ...], device: str = "cpu") -> None:
    """Positions that anybody may have chosen: ``fast`` writes what the reference writes, and both read it."""
    n, size = parts[-1].start + parts[-1].width, sparse.packed_bytes(parts)
    generator = torch.Generator().manual_seed(n)
    found = torch.full((3, parts[-1].list_start + parts[-1].k), -1, dtype=torch.int32)
    for row in found:
        for start, width, k, place in parts:
            row[place : place + k] = start + torch.randperm(width, generator=generator)[:k].sort().values
    found = found.to(device)
    wires = [torch.full((3, size + 16), 77, dtype=torch.uint8, device=device) for _ in range(2)]
    packing = [reference, fast if hasattr(fast, "pack") else reference]  # a GPU packs as it chooses
    masks = [torch.full((3, n // 64 + 2), POISON, device=device) for _ in range(2)]
    memory = torch.empty_like(found)
    for module, wire, packs, words in zip((reference, fast), wires, packing, masks, strict=True):
        packs.pack(found, parts, wire[:, 8:-8])
        module.read(wire[:, 8:-8], parts, words[:, 1:-1], memory)
        values = torch.arange(float(found.numel()), device=device).view(found.shape)
        out = torch.full((3, n), math.nan, device=device)
        module.decode(wire[:, 8:-8], WireValues(values), parts, out, None, memory, None)
        expected = torch.zeros(3, n, device=device)
        reference.put(values, found, expected)
        assert torch.equal(out, expected)
    assert torch.equal(*wires) and wires[0][:, :8].eq(77).all() and wires[0][:, -8:].eq(77).all()
    assert torch.equal(*masks) and masks[0][:, :: n // 64 + 1].eq(POISON).all()


@pytest.mark.parametrize("some", [0.0, 0.3, 0.9, 0.99, 1.0, 1.01, 1.1, 2.0, 30.0])
@pytest.mark.parametrize("kind", ["zeros", "equal"])
@pytest.mark.parametrize("share", [0.01, 0.02, 0.1])
def test_where_as_many_differ_from_the_rest_as_are_chosen_not_all_values_are_sorted(share, kind, some, monkeypatch):
    """As where servers choose what the ranks have sent, and all else is zero: that took 200 times as long."""
    n = 64 * 3000
    k = int(share * n)
    values = gaussian(1, n, seed=3)
    rest = torch.rand(n, generator=torch.Generator().manual_seed(4)) >= some * share
    values[0, rest] = 0.0 if kind == "zeros" else values[0].abs().min()
    wanted, words = torch.zeros(2, 1, n // 64, dtype=torch.int64)
    reference.marked(values, parts_of((n, k)), wanted)
    sizes: list[int] = []
    partition = np.partition
    monkeypatch.setattr(np, "partition", lambda array, *given: (sizes.append(array.size), partition(array, *given))[1])
    cpu.marked(values, parts_of((n, k)), words)
    assert torch.equal(words, wanted) and sum(sizes) < n // 2, sizes


@pytest.mark.parametrize("width", [64, 128, 64 * 37, 1 << 14, *([1 << 20] if ALL else [])])
def test_positions_of_any_density(width):
    for density in (0.0, 0.003, 0.0142, 0.0152, 0.05, 0.1, 0.5, 1.0):
        k = int(density * width)
        check_packing(cpu, parts_of((width, k)))
        check_packing(cpu, parts_of((width, min(k | 1, width)), (64, 7), (width, k), group=1))


def test_parts_of_both_kinds_in_a_row():
    assert [part.low_bits for part in MIXED] == [8, 4, 8, 8, 8, 4, 8, 8, 4, 4, 8, 4]
    check_packing(cpu, MIXED)


def test_a_sum_that_nobody_keeps_is_refused():
    """Later passes of a GPU's read it: without ``total_out`` they would choose among rows without what waited."""
    parts, rows = parts_of((64, 3)), torch.ones(1, 64)
    lists = torch.empty(1, 8, dtype=torch.int32), torch.empty(1, 8)
    adam = Adam(rows, rows.clone(), [DirectionSegment(0, 64, 0, 0.9, 1e-8)], rows[0], rows[0], rows[0, 0])
    for residual, step in ((rows, None), (None, adam)):
        with pytest.raises(ThinwireError, match="name total_out"):
            sparse.largest(rows, residual, parts, None, *lists, None, step)
        sparse.largest(rows.clone(), residual, parts, rows.clone(), *lists, None, step)


def test_the_size_of_positions():
    """What the documentation says, rounded up to 8 bytes; what takes fewer is chosen, 8 bits if both take the same."""
    for width in (64, 128, 640, 64 * 37, 1 << 14, 1 << 20):
        for k in sorted({int(density * width) for density in torch.linspace(0, 1, 101).tolist()} | {1, width // 68}):
            sizes = {
                low: 8 * (math.ceil((k + math.ceil(width / 2**low)) / 64) + math.ceil(k * low / 64)) for low in (8, 4)
            }
            part = ListSegment(0, width, k, 0)
            assert part.low_bits == (8 if sizes[8] <= sizes[4] else 4)
            assert part.nbytes == min(sizes.values()) and part.high_bytes % 8 == 0
            if width == 1 << 20 and k:
                bits = min(9 + width / (256 * k), 5 + width / (16 * k))
                assert 0 <= 8 * part.nbytes - k * bits < 128


def check_leaving_out(
    fast: ModuleType, parts: tuple[ListSegment, ...] = parts_of((64 * 9, 99), (64 * 9, 3), (128, 40), group=1),
    device: str = "cpu",
) -> None:  # fmt: skip
    """Of a wire that no packing makes, what lies beyond its part is left out: few ones, many, none, nothing else."""
    n, m = parts[-1].start + parts[-1].width, parts[-1].list_start + parts[-1].k
    one, other = torch.randint(256, (2, sparse.packed_bytes(parts)), generator=torch.Generator().manual_seed(0))
    wire = torch.stack([one & other, one | other, one * 0, one * 0 + 255]).to(torch.uint8).to(device)
    words = torch.full((4, n // 64 + 2), beside := 1 << 62, device=device)  # a bit set there is seen, or cleared
    memory = torch.empty(4, m, dtype=torch.int32, device=device)
    fast.read(wire, parts, words[:, 1:-1], memory)
    assert words[:, :: n // 64 + 1].eq(beside).all()
    for start, width, k, _ in parts:
        own = words[:, 1 + start // 64 : 1 + (start + width) // 64].tolist()
        assert all(sum((word % 2**64).bit_count() for word in row) <= k for row in own)
    out = torch.full((4, n + 2), math.nan, device=device)
    values = torch.ones(4, m + 2, device=device)
    fast.decode(wire, WireValues(values[:, 1:-1]), parts, out[:, 1:-1], None, memory, None)
    assert out[:, :: out.shape[1] - 1].isnan().all() and ((out[:, 1:-1] == 0) | (out[:, 1:-1] == 1)).all()


@pytest.mark.parametrize("kind", [None, *SPECIAL])
def test_lists_equal_the_reference(kind):
    for parts in (*PARTS, BEHIND) if kind is None else (PARTS[1], LONG):
        check(cpu, parts, kind)
    check(cpu, LONG, kind)


def test_a_wrong_sample_costs_time_and_nothing_else():
    """The sampled columns hold the smallest values, or the largest."""
    parts = parts_of((64 * 700, 448))
    step = (64 * 700 // 2800) | 1
    for factor in (0.0, 1e9):
        values = gaussian(1, 64 * 700)
        values[:, ::step] *= factor
        found = [torch.zeros(1, 448, dtype=torch.int32) for _ in range(2)]
        for module, out in zip((reference, cpu), found, strict=True):
            module.largest(values, None, parts, None, out, torch.empty(1, 448))
        assert torch.equal(*found)


def test_what_no_packing_says_is_refused():
    parts = parts_of((128, 3), (64, 2), group=1)
    found = torch.tensor([[0, 5, 127, 130, 191]], dtype=torch.int32)
    wire = torch.empty(1, sparse.packed_bytes(parts), dtype=torch.uint8)
    cpu.pack(found, parts, wire)
    again = torch.empty_like(found)
    cpu.unpack(wire, parts, again)
    assert torch.equal(again, found)
    for at, octet in ((0, 0b1111), (0, 0b0011), (8, 128), (0, 0b1011)):  # too many, too few, beyond its columns twice
        wrong = wire.clone()
        wrong[0, at] = octet
        with pytest.raises(ThinwireError, match="holds too few or too many positions"):
            cpu.unpack(wrong, parts, torch.empty_like(found))
    with pytest.raises(ThinwireError, match="as the part says"):
        cpu.pack(torch.tensor([[0, 5, 128, 130, 191]], dtype=torch.int32), parts, wire)
    with pytest.raises(ThinwireError, match="float32"):
        sparse.largest(torch.zeros(1, 192, dtype=torch.bfloat16), None, parts, None, found, torch.zeros(1, 5))


def test_what_no_packing_says_is_refused_with_four_bits():
    parts = parts_of((128, 40), (64, 21), group=1)
    assert [part.low_bits for part in parts] == [4, 4] and parts[0].nbytes == 32
    found = torch.cat([torch.arange(88, 128), torch.arange(128, 170, 2)])[None].int()
    wire, again = torch.empty(1, sparse.packed_bytes(parts), dtype=torch.uint8), torch.empty_like(found)
    cpu.pack(found, parts, wire)
    cpu.unpack(wire, parts, again)
    assert torch.equal(again, found)
    for at in (0, 32):
        k = parts[at // 32].k
        for ones in (0, 2**k // 2 - 1, 2 ** (k + 1) - 1, (2**k - 1) << (64 - k)):  # too few twice, too many, beyond
            wrong = wire.clone()
            wrong[0, at : at + 8] = torch.frombuffer(bytearray(ones.to_bytes(8, "little")), dtype=torch.uint8)
            with pytest.raises(ThinwireError, match="holds too few or too many positions"):
                cpu.unpack(wrong, parts, torch.empty_like(found))
    for column in (-1, 128):
        with pytest.raises(ThinwireError, match="as the part says"):
            cpu.pack(torch.cat([found[:, :39], torch.tensor([[column]]), found[:, 40:]], 1).int(), parts, wire)


def test_an_encoding_is_that_of_a_mask_and_a_quantizer():
    """In separate passes: h = g + e, its mask, the values at it, the integers, and what they leave out."""
    segments, quantizer = ((0, 640, 13), (640, 64 * 50, 300)), Integers(64, 8)
    codec = Sparse(tuple((w, k) for _, w, k in segments), quantizer)
    g, e = gaussian(2, 64 * 60), gaussian(2, 64 * 60, seed=1)
    h = g + e
    words = torch.cat([topk_mask(h[:, a : a + w], k, torch.empty(2, w // 64, dtype=torch.int64))
                       for a, w, k in segments], 1)  # fmt: skip
    new, wire = torch.full_like(g, math.nan), torch.zeros(2, codec.wire_numel(64 * 60), dtype=torch.uint8)
    codec.encode(g.clone(), wire, residual=Residual(e.clone(), new))
    decoded = codec.decode(wire, torch.full_like(g, math.nan))
    for a, w, k in segments:
        at, own = slice(a, a + w), words[:, a // 64 : (a + w) // 64]
        payload = torch.zeros(2, -(-k // 64) * 64)
        rest = torch.empty(2, w)
        mask.gather_keep(h[:, at], None, own, payload[:, :k], rest)
        codes = quantizer.encode(payload, torch.empty(2, quantizer.wire_numel(payload.shape[1]), dtype=torch.uint8))
        values = quantizer.decode(codes, torch.empty_like(payload))
        expected = mask.scatter(values[:, :k].contiguous(), own, torch.empty(2, w))
        assert torch.equal(decoded[:, at], expected)
        left = mask.scatter((payload - values)[:, :k].contiguous(), own, torch.empty(2, w))
        assert torch.equal(new[:, at], rest + left)
    total = codec.decode_sum(wire, torch.full((64 * 60,), math.nan), 0.3)
    assert torch.equal(total, (decoded[0] + decoded[1]) * 0.3)


def test_steps_taken_while_choosing_are_those_taken_before():
    check_steps(cpu)
    check_limits(cpu)
    check_limits(reference)
    check_steps(reference)


@needs_triton
def test_triton_interpreted_equals_the_reference():
    code = """
import importlib
import test_ops_lists as t
from thinwire.ops import backends, gpu
from thinwire.ops.sparse import triton
made, make = [], gpu._counters
gpu._counters = lambda *key: made.append(make(*key)) or made[-1]
for parts, kind, way in zip(t.PARTS[1:] * 2, (None, None, "one of four", "nans of other bits"), t.FEEDBACK):
    t.check(triton, parts, kind, ways=(way,))
triton.QUANTIZED = 64  # a list of several chunks, which other programs end than begin
for parts in (t.PARTS[2], t.BEHIND):
    t.check(triton, parts, ways=t.FEEDBACK[:1])
t.check_packing(triton, t.MIXED)
t.check_leaving_out(triton)
t.check_guesses(triton)
triton.HIGH, triton.ZEROS, triton.SHARERS, triton.SKIPPED = 128, 32, 3, triton.tl.constexpr(2)
parts = t.parts_of((64 * 37, 1001), (64 * 300, 100), (64 * 5, 90), group=1)
t.check_packing(triton, parts)  # several programs in a segment
t.check_leaving_out(triton, parts)
backends._load = lambda family, module, needs: importlib.import_module(family + ".triton")
t.check_steps(triton)
t.check_limits(triton)
assert made and not any(counters.any() for counters in made)  # as the next kernel has to find them
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_lists_on_a_gpu():
    from thinwire.ops.sparse import triton

    for parts in (*PARTS, BEHIND, LONG):
        check(triton, parts, device="cuda")
    check_guesses(triton, device="cuda")
    for parts in (MIXED, MANY):
        check_packing(triton, parts, device="cuda")
        check_leaving_out(triton, parts, device="cuda")
    check_steps(triton, device="cuda")
    check_limits(triton, device="cuda")
