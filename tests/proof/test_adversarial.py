"""Cases of the search for inputs that break a method; the search itself, which must find planted faults."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from adversarial import KINDS, draw, judge, search
from breadth import spread
from thinwire import AdamS, methods
from thinwire.base.errors import ThinwireError
from thinwire.codecs.intquant import Integers
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method, bucket_of
from thinwire.methods import LHC, SCAPE, PowerSGD
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadEngine, Threads
from threaded import reduce_on_threads

CHUNKS, CASES = 10, 120


@pytest.mark.parametrize("chunk", spread(5, range(CHUNKS)))
def test_no_input_breaks_a_method(chunk):
    found = search(range(chunk * CASES, (chunk + 1) * CASES))
    assert not found.failures, "\n".join(map(str, found.failures))
    assert found.refusals.total() < CASES / 10


def test_the_cases_are_many_kinds():
    """Every method, topology, number of ranks and kind of input comes up, and often enough."""
    cases = [draw(seed) for seed in range(CHUNKS * CASES)]
    by_method = Counter(case.method.partition("(")[0] for case in cases)
    assert set(by_method) == set(methods.names())
    assert min(by_method.values()) > CASES / 4
    assert {case.topology for case in cases} == {"all_reduce", "reduce_scatter", "weights"}
    assert {1, 2, 3, 5, 7} <= {case.size for case in cases}
    assert {kind for case in cases for step in case.kinds for kinds in step for kind in kinds} == set(KINDS)


def test_a_seed_is_a_case():
    assert draw(7) == draw(7) != draw(8)
    assert "--case 7" in judge(draw(7)).case.command


# Planted faults: each is a method that is wrong in one way.


class Forgetful(Integers):
    """Loses the first value of every row."""

    def _decode_sum(self, wire, out, scale, space):
        super()._decode_sum(wire, out, scale, space)
        out[0] = 0


class OffByOnePercent(Integers):
    def _encode(self, rows, out, seed, space):
        super()._encode(rows, out, seed, space)
        self.codes_of(out, rows.shape[1])[1].mul_(1.01)


def with_codec(kind: type[Integers]) -> Callable[[Method], Method]:
    def spoil(method: Method) -> Method:
        method.codec = kind(method.codec.group)
        return method

    return spoil


def forgets_a_weight(method: Method) -> Method:
    class Spoilt(Integers):
        def codes_of(self, wire, n):
            codes, scales = super().codes_of(wire, n)
            codes[..., 0] = 0  # what is to be written will be, what is read has been
            return codes, scales

    method.make_weight_codec = lambda shift=0.0: Spoilt(method.weight_group, method.weight_bits)
    return method


def after(change: Callable[[Method, Bucket, Exchange], object]) -> Callable[[Method], Method]:
    """Do ``change`` when the mean is there."""

    def spoil(method: Method) -> Method:
        reduce = method.reduce

        def spoilt(bucket: Bucket, exchange: Exchange) -> None:
            reduce(bucket, exchange)
            change(method, bucket, exchange)

        method.reduce = spoilt
        return method

    return spoil


def one_rank_differs(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    if exchange.rank == 1:
        first = bucket.mean.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.tensor(9.0)))


def off_by_one_percent(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    bucket.mean.mul_(1.01)


def forgets_what_waits(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    method.state.write("residual", bucket)[0, 0] = 0


def never_zero(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    bucket.mean.view(-1)[0] += 1e-38


def hides_what_is_not_finite(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    bucket.mean.nan_to_num_(0, 0, 0)


def sends_more(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    exchange.all_max(torch.zeros(2))


def remembers_a_step_that_was_taken_back(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    method.state.keep("calls", "", torch.tensor(float((method.state.get("calls", "") or 0) + 1)))


def depends_on_the_past(method: Method, bucket: Bucket, exchange: Exchange) -> None:
    calls = getattr(method, "calls", 0)
    method.calls = calls + 1
    bucket.mean.mul_(1 + calls * 2.0**-24)


FAULTS = [
    ("int8", with_codec(Forgetful), "the mean"),
    ("int8", with_codec(OffByOnePercent), "the mean"),
    ("fp32", after(off_by_one_percent), "the mean"),
    ("topk", after(off_by_one_percent), "what waited"),
    ("separate", after(off_by_one_percent), "what waited"),
    ("powersgd", after(off_by_one_percent), "what waited"),
    ("int8", after(one_rank_differs), "different means"),
    ("topk", after(forgets_what_waits), "what waited"),
    ("fp32", after(never_zero), "of zeros"),
    ("int8", after(hides_what_is_not_finite), "finite"),
    ("dense", after(sends_more), "announced"),
    ("int8", after(remembers_a_step_that_was_taken_back), "taken back"),
    ("fp32", after(depends_on_the_past), "another mean"),
    ("sdp4bit", forgets_a_weight, "(+- "),
]


@pytest.mark.parametrize(("method", "spoil", "said"), FAULTS)
def test_a_planted_fault_is_found(method, spoil, said):
    """By the law that it breaks, in fewer cases than the suite has of each method."""
    for seed in range(CHUNKS * CASES // len(methods.TABLE)):
        if any(said in problem for problem in judge(draw(seed, method), spoil).problems):
            return
    raise AssertionError("not found")


def test_a_refusal_that_names_no_knob_is_a_failure():
    def spoil(method: Method) -> Method:
        method.begin = lambda run: (_ for _ in ()).throw(ThinwireError("no"))
        return method

    assert "no knob is named" in judge(draw(0, "int8"), spoil).problems[0]


# Ranks that take turns.


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_swap_values(size):
    ranks = Threads(size)

    def body(rank: int) -> list[list[int]]:
        return [ranks.swap(rank, 10 * turn + rank) for turn in range(4)]

    everybody = [[10 * turn + rank for rank in range(size)] for turn in range(4)]
    assert ranks.run(body) == [everybody] * size
    assert threading.active_count() < 20


@pytest.mark.parametrize("at_home", [0, 1, 2])
def test_a_rank_that_goes_home_is_noticed_at_once(at_home):
    ranks = Threads(3)
    with pytest.raises(TimeoutError):
        ranks.run(lambda rank: None if rank == at_home else ranks.swap(rank, rank))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_on_one_rank_ends_all(wrong):
    ranks = Threads(3)

    def body(rank: int) -> None:
        ranks.swap(rank, rank)
        if rank == wrong:
            raise ValueError("here")
        ranks.swap(rank, rank)

    with pytest.raises(ValueError, match="here"):
        ranks.run(body)


# What the search has found.


def sent(make: Callable[[], Method], shape: tuple[int, ...], gradients: list[Tensor], size: int = 1) -> list[Tensor]:
    results = reduce_on_threads(
        make, lambda rank, step, numel: gradients[step].reshape(-1).clone(), topology="all_reduce", size=size,
        shapes={"w": shape}, steps=len(gradients),
    )  # fmt: skip
    return [step["mean"].view(shape) for step in results[0]]


def test_powersgd_goes_on_after_a_gradient_of_zeros():
    noise = torch.randn(9, 16, 16, generator=torch.Generator().manual_seed(0))
    noise[0] = 0
    means = sent(lambda: PowerSGD(rank=2, feedback="gradients"), (16, 16), list(noise))
    assert all(mean.any() for mean in means[1:])


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e25])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_of_a_gradient_of_rank_one(rank, scale):
    """It is sent whole, whatever the rank and the size; never more of it than there is."""
    gradient = torch.outer(torch.arange(1.0, 18.0), torch.ones(16)) * scale
    for mean in sent(lambda: PowerSGD(rank=rank, feedback="gradients"), (17, 16), [gradient] * 5):
        torch.testing.assert_close(mean / scale, gradient / scale, rtol=1e-4, atol=0)


def test_powersgd_finds_a_column_that_the_last_gradients_had_not():
    first, second = torch.zeros(8, 4), torch.zeros(8, 4)
    first[:, 0], second[:, 2] = 1, 1
    means = sent(lambda: PowerSGD(rank=1, feedback="gradients"), (8, 4), [first, second, second])
    assert means[2][:, 2].any()


def test_lhc_keeps_what_rounding_cut_off_of_every_tensor():
    """Of the second one, too, where the first has sent fewer values than it might."""
    gradient = torch.zeros(512)
    gradient[[3, 300, 301]] = torch.tensor([1.0, 1 / 3, 2.0])
    results = reduce_on_threads(
        LHC, lambda rank, step, numel: gradient * (1 + rank), topology="all_reduce", size=2,
        shapes={"a": (16, 16), "b": (16, 16)}, steps=2,
    )  # fmt: skip
    before, waits = (sum(rank[step]["residual/b"].double().view(-1) for rank in results) for step in (0, 1))
    assert waits.any() and not before.any()  # the first step goes dense: how sparse they are is not known yet
    torch.testing.assert_close(2 * results[0][1]["mean"][256:] + waits, 3 * gradient[256:].double(), rtol=1e-7, atol=0)


def test_scape_at_density_one_pads_nothing():
    """What goes out as it is has the bytes that the plan announces."""
    engine = ThreadEngine("all_reduce", Threads(1), 0, Ledger(), {"a": 7, "b": 65})
    bucket = bucket_of(SCAPE(density=1), engine.pieces, engine.hops[0], torch.device("cpu"))
    assert bucket.shape[1] == engine.numel


def test_scape_lists_positions_with_zeros_behind_them():
    """Masks travel as positions, in rows of 8 bytes: what fills up an odd number of them is the same every time."""
    results = reduce_on_threads(
        lambda: SCAPE(density=0.02, warmup=1, send=("*",)),
        lambda rank, step, numel: torch.randn(numel, generator=torch.Generator().manual_seed(step)),
        topology="all_reduce", size=2, shapes={"w": (15, 10)}, steps=4, optimizer=lambda weights: AdamS(weights),
    )  # fmt: skip
    masks = [step["=mask/w"].view(torch.int32) for step in results[0][1:]]
    assert all(mask.shape[1] == 4 and not mask[:, 3:].any() for mask in masks)  # k = 3
