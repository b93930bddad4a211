"""Masks at their limits: every kind of tie, rows apart in memory, and what does not belong together is refused.

The operations on ordinary rows, and the Triton kernels' types, are in ``test_ops_sparse``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from programs import check_interpreted, needs_triton
from thinwire.base.errors import ThinwireError
from thinwire.codecs import Masked, Residual, Sparse
from thinwire.ops import mask, sparse
from thinwire.ops.mask import cpu, reference
from thinwire.ops.rows import CopySegment, CopyTable
from thinwire.ops.sparse import cpu as sparse_cpu
from thinwire.ops.sparse import reference as sparse_reference

LONG = 64 * 700  # long enough for a sample instead of a full partition


def gaussian(count: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(seed))


def topk_mask(values: Tensor, k: int, words: Tensor, backend: ModuleType = sparse) -> Tensor:
    """The mask of the ``k`` largest of each row."""
    backend.marked(values, (sparse.ListSegment(0, values.shape[1], k, 0),), words)
    return words


def with_bits(value: int, shape: Tensor) -> Tensor:
    """float32 of these bits, as many as the elements of ``shape``."""
    return torch.full(shape.shape, value, dtype=torch.int32).view(torch.float32)


SPECIAL: dict[str, Callable[[Tensor], object]] = {
    "zeros": lambda x: x.zero_(),
    "signed zeros": lambda x: x.zero_()[:, ::2].neg_(),
    "all equal": lambda x: x.fill_(-2.5),
    "mostly zero": lambda x: x.mul_(torch.arange(x.shape[1]) % 50 == 0),
    "one of four": lambda x: x.copy_((x * 2).round().clamp(-1, 2)),
    "denormal": lambda x: x.mul_(1e-41),
    "huge": lambda x: x.sign_().mul_(torch.finfo(torch.float32).max),
    "infinite": lambda x: x[:, 3::5].fill_(-math.inf),
    "all nan": lambda x: x.fill_(math.nan),
    "nans of other bits": lambda x: (
        x[:, 5::64].copy_(with_bits(0x7F800001, x[:, 5::64])),
        x[:, 40::64].copy_(with_bits(-1, x[:, 40::64])),
        x[:, 2::640].fill_(math.inf),
    ),
    "ascending": lambda x: x.copy_(torch.arange(x.shape[1]).expand_as(x)),
    "periodic": lambda x: x.copy_((torch.arange(x.shape[1]) % 3).expand_as(x)),
}


def check_topk(fast: ModuleType, n: int, kinds: tuple[str, ...], ks: tuple[int, ...]) -> None:
    """``fast`` against the reference, on columns of a wider row and into words of a wider row."""
    for kind in kinds:
        wide = gaussian(2, n + 192, seed=n)
        values = wide[:, 64 : 64 + n]
        SPECIAL[kind](values)
        for k in ks:
            words = [torch.full((2, n // 64 + 2), -7)[:, 1:-1] for _ in range(2)]
            for module, out in zip((sparse_reference, fast), words, strict=True):
                topk_mask(values, k, out, module)
            assert torch.equal(*words), (kind, n, k)
            assert mask.popcount(words[1]).tolist() == [k, k]
            whole = words[1].as_strided((2, n // 64 + 2), (n // 64 + 2, 1), 0)
            assert (whole[:, 0] == -7).all() and (whole[:, -1] == -7).all(), "wrote beside the row"


@pytest.mark.parametrize("kind", SPECIAL)
def test_topk_equals_reference(kind):
    for n in (64, 64 * 7):
        check_topk(sparse_cpu, n, (kind,), (1, n // 2, n - 1))
    check_topk(sparse_cpu, LONG, (kind,), (1, LONG // 100, LONG // 50 + 1, LONG // 3, LONG - 1))


def test_a_wrong_sample_costs_time_and_nothing_else():
    """The sampled places hold the smallest values: the bracket misses, on either side."""
    step = (LONG // sparse_cpu.SAMPLE) | 1
    assert step > 1
    for factor in (0.0, 1e9):
        values = gaussian(1, LONG)
        values[:, ::step] *= factor
        for k in (10, LONG // 10, LONG // 2):
            words = [torch.full((1, LONG // 64), -7) for _ in range(2)]
            for module, out in zip((sparse_reference, sparse_cpu), words, strict=True):
                topk_mask(values, k, out, module)
            assert torch.equal(*words)


@example([(1, 0.0)], 2, 0, False)  # an empty wire
@given(
    st.lists(st.tuples(st.integers(1, 6), st.floats(0, 1)), min_size=1, max_size=4),
    st.integers(1, 3), st.integers(0, 2**31), st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_topk_codec_keeps_the_budget_of_every_segment(segments, peers, seed, ties):
    places, start = [], 0
    for count, density in segments:
        places.append((start, 64 * count, int(density * 64 * count)))
        start += 64 * count
    x = gaussian(peers, start, seed)
    if ties:
        x.round_()
    codec = Sparse(tuple((width, k) for _, width, k in places))
    wire = torch.full((peers, codec.wire_numel(start)), 255, dtype=torch.uint8)
    codec.encode(x, wire)
    out = codec.decode(wire, torch.full((peers, start), math.nan))
    for first, width, k in places:
        part, kept = x[:, first : first + width], out[:, first : first + width]
        largest = part.abs().sort(dim=1, descending=True, stable=True).indices[:, :k]
        expected = torch.zeros_like(part).scatter_(1, largest, part.gather(1, largest))
        assert torch.equal(kept, expected)
    assert torch.equal(out + (x - out), x)
    total = torch.zeros(start)
    for row in out:
        total += row
    assert torch.equal(codec.decode_sum(wire, torch.full((start,), math.nan), 0.25), total * 0.25)


def test_limits_of_k():
    x = gaussian(2, 128)
    for k in (0, 128):
        words = topk_mask(x, k, torch.full((2, 2), -7))
        codec = Masked(words, k)
        rest = torch.full_like(x, math.nan)
        wire = codec.encode(x, torch.full((2, k), math.nan), residual=Residual(torch.zeros_like(x), rest))
        out = codec.decode(wire, torch.full_like(x, math.nan))
        assert torch.equal(out, x if k else torch.zeros_like(x)) and torch.equal(out + rest, x)


def test_the_order_of_bits():
    """Bit j of word i is element 64 i + j; the last bit is the sign of the word."""
    flags = torch.zeros(1, 192, dtype=torch.bool)
    flags[0, [0, 63, 64, 130]] = True
    for module in (reference, cpu):
        words = torch.full((1, 3), -7)
        module.pack(flags, words)
        assert words.tolist() == [[1 - 2**63, 1, 4]]
        positions = torch.tensor([[0, 63, 64, 130]], dtype=torch.int32)
        again = torch.full((1, 3), -7)
        module.from_indices(positions, again)
        assert torch.equal(again, words)


def test_set_bits_are_counted():
    words = torch.tensor([[0, -1, 1, -(2**63)], [2**63 - 1, -2, 0x5555555555555555, -0x5555555555555556]])
    random = torch.randint(-(2**63), 2**63 - 1, (2, 700), generator=torch.Generator().manual_seed(0))
    for some in (words, random, random[:, 5:9]):
        expected = [sum((word % 2**64).bit_count() for word in row) for row in some.tolist()]
        assert mask.popcount(some).tolist() == expected


def columns_of(words: Tensor, k: int) -> Tensor:
    """The columns of the ``k`` set bits of each row: (R, k)."""
    return reference.flags_of(words).nonzero()[:, 1].view(len(words), k)


def words_of(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize("words", [words_of([7, 1], [3, 1]), words_of([3, 1], [7, 1]), words_of([3, 0], [3, 1])])
def test_a_mask_of_another_size_is_refused_before_memory_is_overwritten(words):
    """Three places in a payload; one row has more or fewer bits."""
    x, payload = gaussian(2, 128), torch.full((2, 6), 9.0)
    calls: list[Callable[[], object]] = [
        lambda: mask.gather_keep(x, None, words, payload[:, :3], None),
        lambda: mask.scatter(payload[:, :3], words, torch.empty(2, 128)),
    ]
    for call in calls:
        with pytest.raises(ThinwireError, match="does not have the 3 bits"):
            call()
    assert (payload[:, 3:] == 9).all()


def test_what_does_not_belong_together_is_refused():
    x, words = gaussian(2, 128), words_of([1, 0], [1, 0])
    with pytest.raises(ThinwireError, match=r"float32, got torch\.bfloat16"):
        Masked(words, 1).encode(x.bfloat16(), torch.empty(2, 1))
    with pytest.raises(ThinwireError, match=r"float32, got torch\.float64"):
        topk_mask(x.double(), 1, words)
    with pytest.raises(ThinwireError, match="1 rows does not go with 2 rows"):
        mask.gather_keep(x, None, words[:1], torch.empty(2, 1), None)
    with pytest.raises(ThinwireError, match="2 rows does not go with 1 rows"):
        Masked(words, 1).decode(torch.empty(1, 1), torch.empty(1, 128))  # owner_row was not said
    with pytest.raises(ThinwireError, match="the row has 64"):
        mask.gather_keep(x, x[:, :64], words, torch.empty(2, 1), None)
    with pytest.raises(ThinwireError, match="as many rows of float32"):
        mask.scatter(torch.empty(3, 1), words, torch.empty(2, 128))
    with pytest.raises(ThinwireError, match="must be contiguous"):
        mask.gather_keep(gaussian(128, 2).t(), None, words, torch.empty(2, 1), None)
    for width, k in ((100, 3), (64, 65), (64, -1)):
        with pytest.raises(ThinwireError, match="must be a multiple of 64"):
            Sparse(((width, k),))


@needs_triton
def test_triton_topk_interpreted_equals_reference():
    code = """
import test_ops_mask
from thinwire.ops.sparse import triton
test_ops_mask.check_topk(triton, 64 * 9, tuple(test_ops_mask.SPECIAL), (1, 200, 575))
"""
    check_interpreted(code)


def check_positions(fast: ModuleType, device: str = "cpu") -> None:
    """Masks, lists and values of rows that lie apart, some full and some empty; nothing is written beside them."""
    for n, k, rows in ((64, 1, 1), (64 * 9, 100, 3), (64 * 17, 64 * 17, 2), (64 * 9, 0, 2)):
        x = gaussian(rows, n, seed=n + k)
        words = topk_mask(x, k, torch.empty(rows, n // 64, dtype=torch.int64)).to(device)
        found = []
        for module in (reference, fast):
            listed = torch.full((rows, k + 3), -9, dtype=torch.int32, device=device)
            again = torch.full((rows, n // 64 + 2), -7, device=device)
            listed[:, 1 : k + 1] = columns_of(words, k)
            module.from_indices(listed[:, 1 : k + 1].flip(1), again[:, 1:-1])
            beside = torch.full((rows, n // 32 + 3), -7, device=device)  # twice, and what is no part of either
            parts = slice(1, 1 + n // 64), slice(2 + n // 64, 2 + n // 32)
            assert module.from_lists([(listed[:, 1 : k + 1], at) for at in parts], beside) is None
            both = torch.full((rows, n // 32 + 2), -7, device=device)[:, 1:-1]  # the same beside each other: all of it
            halves = slice(0, n // 64), slice(n // 64, n // 32)
            known = module.from_lists([(listed[:, 1 : k + 1], at) for at in halves], both)
            assert torch.equal(both, words.repeat(1, 2))
            directory = module.directory(both.contiguous())
            assert (known is None) == (directory is None) and (known is None or torch.equal(known, directory))
            assert (beside[:, [0, 1 + n // 64, -1]] == -7).all()
            assert all(torch.equal(beside[:, at], words) for at in parts)
            payload, spread = (torch.full((rows, size), math.nan, device=device) for size in (k, n))
            before = module.directory(words)  # which somebody has kept
            module.gather_keep(x.to(device), None, words, payload, None, before)
            module.scatter(payload[-1:], words[-1:], spread[-1:], None if before is None else before[-1:])
            found.append((again, payload, spread[-1:]))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), (n, k, rows)


def check_renewed(fast: ModuleType, device: str = "cpu") -> None:
    """Parts whose masks are longer than they are, apart from each other in rows that are apart in memory.

    Between them, values that are sent as they are: some before the first, and more than one program copies.
    """
    columns = (5, 100, 128, 30, 0.75), (105, 640, 640, 64, 1.0), (800, 3, 64, 3, 0.5)
    parts = tuple(mask.MaskedSegment(*segment) for segment in columns)
    rows, words = 3, []
    for i, part in enumerate(parts):
        sizes = gaussian(rows, part.width, seed=i).abs_().add_(1)
        sizes[:, part.numel :] = 0
        words.append(topk_mask(sizes, part.k, torch.empty(rows, part.width // 64, dtype=torch.int64)))
    n, k = 2500, sum(part.k for part in parts)
    places = ((0, 5, k), (900, 1500, k + 7), (2450, 1, k + 5))
    copied = [CopySegment(at, size, 1, first, size, size, 1, 1) for at, size, first in places]
    kept = CopyTable(copied, torch.device(device))
    joined, payload = torch.cat(words, 1).to(device), gaussian(rows, k + 1510).to(device)
    before, found, sent = gaussian(rows, n, seed=9).to(device), [], []
    for module in (reference, fast):
        target, message = before.clone(), torch.full((k + 1510,), math.nan, device=device)
        module.renew(payload[:, :-2], joined, parts, kept, target[:, : n - 20])
        module.collect(target[1, : n - 20], joined[1:2], parts, kept, message[:-2])
        found.append(target)
        sent.append(message.nan_to_num(9))
    assert torch.equal(*found) and torch.equal(*sent)
    expected = torch.full((k + 1510,), 9.0, device=device)
    expected[:k] = payload[1, :k]
    taken, first = torch.zeros(n, dtype=torch.bool), 0
    for at, size, start in places:
        assert torch.equal(found[1][:, at : at + size], payload[:, start : start + size])
        expected[start : start + size], taken[at : at + size] = payload[1, start : start + size], True
    assert torch.equal(sent[1], expected)
    for part, of in zip(parts, words, strict=True):
        on = reference.flags_of(of)[:, : part.numel].to(device)
        values = found[1][:, part.start : part.start + part.numel]
        assert torch.equal(values[on].view(rows, -1), payload[:, first : first + part.k])
        assert torch.equal(values[~on], before[:, part.start : part.start + part.numel][~on] * part.factor)
        taken[part.start : part.start + part.numel], first = True, first + part.k
    assert torch.equal(found[1][:, ~taken], before[:, ~taken])


def test_values_at_a_mask_are_renewed_and_others_fade():
    check_renewed(cpu)
    words, rows, kept = words_of([3, 1]), gaussian(1, 128), CopyTable([], torch.device("cpu"))
    with pytest.raises(ThinwireError, match="does not have the 2 bits"):
        mask.renew(torch.ones(1, 2), words, [mask.MaskedSegment(0, 128, 128, 2, 1.0)], kept, rows)
    with pytest.raises(ThinwireError, match="masks of 2 words and 3 values are not those of the segments"):
        mask.renew(torch.ones(1, 3), words, [mask.MaskedSegment(0, 64, 64, 3, 1.0)], kept, rows)
    with pytest.raises(ThinwireError, match="masks of 1 rows do not go with 2 and 1 rows of"):
        mask.renew(torch.ones(2, 3), words, [mask.MaskedSegment(0, 128, 128, 3, 1.0)], kept, rows)


def check_a_wrong_mask_stays_in_its_row(fast: ModuleType, device: str = "cpu") -> None:
    """Of a mask with more bits than its payload has room for, the others count as none, and nothing is lost."""
    words = torch.full((2, 10), -1, device=device)
    words[1] = 5
    x, wide = gaussian(2, 640).to(device), torch.full((2, 40), 9.0, device=device)
    payload, rest = wide[:, :30], torch.full((2, 640), math.nan, device=device)
    fast.gather_keep(x, None, words, payload, rest)
    assert torch.equal(payload[0], x[0, :30]) and (rest[0, :30] == 0).all() and torch.equal(rest[0, 30:], x[0, 30:])
    assert (wide[:, 30:] == 9).all()
    out = torch.full((2, 640), math.nan, device=device)
    fast.scatter(payload, words, out)
    assert torch.equal(out[0], x[0] - rest[0])
    positions = torch.tensor([[3, -1, 640, 2**31 - 1, -(2**31)]], dtype=torch.int32, device=device)
    around = torch.full((1, 12), -7, device=device)
    fast.from_indices(positions, around[:, 1:-1])
    assert around[0].tolist() == [-7, 8, *[0] * 9, -7]


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("beyond", [100, 127])
def test_a_bit_beyond_its_part_is_refused_where_values_are_renewed(module: ModuleType, beyond: int):
    memory, words = torch.full((228,), 7.0), torch.zeros(1, 2, dtype=torch.int64)
    mask.from_indices(torch.tensor([[3, beyond]], dtype=torch.int32), words)
    part, kept = mask.MaskedSegment(0, 100, 128, 2, 1.0), CopyTable([], torch.device("cpu"))
    with pytest.raises(ThinwireError, match="beyond 100 columns"):
        module.renew(torch.tensor([[-1.0, -2.0]]), words, [part], kept, memory[64:164].view(1, 100))
    assert (memory[:64] == 7).all() and (memory[164:] == 7).all()


@needs_triton
def test_triton_positions_interpreted_equal_the_reference():
    code = """
import test_ops_mask
from thinwire.ops.mask import triton
test_ops_mask.check_positions(triton)
test_ops_mask.check_renewed(triton)
test_ops_mask.check_a_wrong_mask_stays_in_its_row(triton)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_positions():
    from thinwire.ops.mask import triton

    check_positions(triton, "cuda")
    check_renewed(triton, "cuda")
    check_a_wrong_mask_stays_in_its_row(triton, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_equals_reference():
    n, k = 64 * 1000, 6400
    for kind, change in SPECIAL.items():
        x, e = gaussian(2, n), gaussian(2, n, 1)
        change(x)
        results = []
        for device in ("cpu", "cuda"):
            a, b = x.to(device), e.to(device, copy=True)  # b is written
            words = topk_mask(a, k, torch.full((2, n // 64), -7, device=device))
            payload, out = (torch.full((2, size), math.nan, device=device) for size in (k, n))
            mask.gather_keep(a, b, words, payload, b)
            mask.scatter(payload, words, out)
            positions = columns_of(words, k).int()
            again = mask.from_indices(positions, torch.full_like(words, -7))
            results.append([y.cpu() for y in (words, payload, b, out, positions, again, mask.popcount(words))])
        for cpu_result, cuda_result in zip(*results, strict=True):
            assert torch.equal(cpu_result.nan_to_num(nan=7e7), cuda_result.nan_to_num(nan=7e7)), kind
