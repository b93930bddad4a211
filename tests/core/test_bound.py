"""What one step may put into a method's state, and the state of a step that exchanges twice: in one process."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.core.bucket import Bucket, Piece
from thinwire.core.outliers import NORM_DECAY, WATCHED, OutlierClip
from thinwire.core.safety import Safety
from thinwire.core.state import State, dump_state, next_exchange

CPU = torch.device("cpu")
PIECES = (Piece("a", 0, 30), Piece("b", 30, 70))


def bound(times: float = 10.0) -> OutlierClip:
    return OutlierClip(times, {"a": 30, "b": 70})


def step(of: OutlierClip, a: float, b: float) -> tuple[float, float]:
    """One step that counts, with gradients of these norms; the norms that it lets through."""
    flat = torch.cat([torch.full((30,), a / math.sqrt(30)), torch.full((70,), b / math.sqrt(70))])
    of.apply(flat, PIECES)
    of.commit()
    return float(flat[:30].norm()), float(flat[30:].norm())


def test_a_gradient_more_than_ten_times_as_large_as_usual_becomes_one_ten_times_as_large_and_is_counted():
    of = bound()
    assert step(of, 1e6, 1e6) == pytest.approx((1e6, 1e6))  # nothing is usual in the first step
    of = bound()
    for _ in range(20):
        assert step(of, 2.0, 1.0) == pytest.approx((2.0, 1.0))
    assert of.facts() == {"cut": 0, "norm": 0}
    assert step(of, 19.9, 1.0) == pytest.approx((19.9, 1.0))
    usual = 2 * NORM_DECAY + 19.9 * (1 - NORM_DECAY)
    # b's share of what is usual in the model is more than its own norm was
    share = math.sqrt(0.7) * math.hypot(usual, 1.0)
    assert step(of, 1e4, 1e5) == pytest.approx((10 * usual, 10 * share), rel=1e-5)
    assert of.facts()["cut"] == 2
    assert of.facts()["norm"] == pytest.approx(1e4 - 10 * usual + 1e5 - 10 * share, rel=1e-5)


def test_gradients_that_stay_large_are_usual_after_a_few_steps():
    of = bound()
    for _ in range(5):
        step(of, 1.0, 1.0)
    let_through = [step(of, 1000.0, 1000.0)[0] for _ in range(12)]
    assert let_through[0] == pytest.approx(10) and let_through[-1] == pytest.approx(1000.0)


def test_a_parameter_whose_gradients_begin_at_zero_may_grow_at_once():
    of = bound()
    for _ in range(5):
        step(of, 1.0, 0.0)
    assert step(of, 1.0, 5.0) == pytest.approx((1.0, 5.0))


def test_a_step_that_does_not_count_leaves_no_trace():
    of, plain = bound(), bound()
    for both in (of, plain):
        step(both, 1.0, 2.0)
    of.apply(torch.full((100,), 1e5), PIECES)
    of.rollback()
    assert step(of, 500.0, 2.0) == step(plain, 500.0, 2.0)
    assert of.facts() == plain.facts()


@pytest.mark.parametrize("every", [1, 5, 40])
def test_a_gradient_that_comes_once_in_many_steps_comes_whole(every):
    """Experts, heads, languages: zeros in the steps that do not use them say nothing of what is usual."""
    of = bound()
    for number in range(6 * every):
        rare = 3.0 if number % every == 0 else 0.0
        assert step(of, rare, 100.0) == pytest.approx((rare, 100.0))
    assert of.facts() == {"cut": 0, "norm": 0}


def test_a_parameter_whose_gradients_are_cut_often_is_named_once():
    def cuts(size: float, every: int) -> list[str]:
        of = bound()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for number in range(3 * WATCHED):
                step(of, size if number % every == every - 1 else 1.0, 1.0)
        return [str(warning.message) for warning in seen]

    assert cuts(100.0, 1000) == cuts(100.0, 300) == []
    (said,) = cuts(100.0, 40)
    assert "gradients of a on this rank were more than 10 times as large as usual" in said


def test_a_parameter_can_be_left_out_of_a_step_that_counts():
    of, plain = bound(), bound()
    for both in (of, plain):
        step(both, 1.0, 2.0)
    flat = torch.full((100,), 1e5)
    of.apply(flat, PIECES)
    of.rollback(["a"])
    of.commit()
    assert of.state_dict()["usual norm/a"] == plain.state_dict()["usual norm/a"]
    assert of.state_dict()["usual norm/b"] > plain.state_dict()["usual norm/b"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_left_to_the_guard_and_does_not_become_usual(bad):
    of = bound()
    step(of, 1.0, 1.0)
    flat = torch.ones(100)
    flat[3] = bad
    of.apply(flat, PIECES)
    assert not bool(flat.isfinite().all())
    of.commit()  # as without a guard
    assert step(of, 1.0, 1.0) == pytest.approx((1.0, 1.0))


def test_it_is_saved_by_parameter_and_goes_on_from_there():
    of, other = bound(), bound()
    for _ in range(3):
        step(of, 1.0, 3.0)
    step(of, 100.0, 3.0)
    saved = of.state_dict()
    assert set(saved) == {"usual norm/a", "usual norm/b", "cut"}
    other.load_state_dict(saved)
    assert other.facts() == of.facts()
    assert step(other, 77.0, 3.0) == step(of, 77.0, 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_are_bounded_where_they_lie(dtype):
    """FSDP2: two ranks' rows of a (2, 5) buffer; the columns of the other parameter are not touched."""
    pieces = (Piece("a", 0, 6, 2, 5), Piece("b", 3, 4, 2, 5))
    of = OutlierClip(10.0, {"a": 3, "b": 2})
    of.apply(torch.ones(10, dtype=dtype), pieces)
    of.commit()
    flat = torch.ones(2, 5, dtype=dtype)
    flat[:, :3] = 1e4
    of.apply(flat.view(-1), pieces)
    assert torch.equal(flat[:, 3:], torch.ones(2, 2, dtype=dtype))
    assert flat[:, :3].float().norm().item() == pytest.approx(10 * math.sqrt(6), rel=0.01)


@pytest.mark.parametrize("times", [0.5, math.nan, math.inf, True, "10"])
def test_a_bound_that_makes_no_sense_is_refused(times):
    with pytest.raises(ThinwireError, match="outlier_clip must be 1 or more"):
        Safety(outlier_clip=times)


@pytest.mark.parametrize("name", ["guard", "checksum"])
def test_a_switch_of_words_is_refused(name):
    """``guard="no"`` was a guard."""
    with pytest.raises(ThinwireError, match=f"{name} is True or False, got 'no'"):
        Safety(**{name: "no"})


def bucket(*names: str) -> Bucket:
    pieces = [Piece(name, 10 * i, 10) for i, name in enumerate(names)]
    return Bucket(pieces, rows=1, owner=False, group=4, dtype=torch.float32, device=CPU)


def add(state: State, of: Bucket, values: dict[str, float]) -> None:
    """What a method with a residual does: the next one is the last one plus something."""
    old, new = state.read("residual", of), state.write("residual", of)
    new.copy_(old)
    for segment in of.segments:
        new[:, segment.columns] += values[segment.name]


def values(state: State) -> dict[str, float]:
    found = {key.removeprefix("residual/"): value for key, value in dump_state(state).items()}
    assert all(bool((value == value[0, 0]).all()) for value in found.values())
    return {name: float(value[0, 0]) for name, value in found.items()}


@pytest.mark.parametrize("counts", [True, False])
def test_a_second_exchange_of_a_step_goes_on_from_the_first_in_whatever_buckets(counts):
    state = State()
    for of in (bucket("a", "b"), bucket("c")):
        add(state, of, {"a": 1, "b": 2, "c": 3})
    state.commit()
    add(state, bucket("a", "b"), {"a": 10, "b": 10})
    next_exchange(state)
    add(state, bucket("b", "c"), {"b": 100, "c": 100})  # b was exchanged before, c was not
    next_exchange(state)
    add(state, bucket("a"), {"a": 1000})
    add(state, bucket("c", "b"), {"b": 1000, "c": 1000})
    if counts:
        state.commit()
        assert values(state) == {"a": 1011, "b": 1112, "c": 1103}
    else:
        state.rollback()
        assert values(state) == {"a": 1, "b": 2, "c": 3}
    add(state, bucket("a", "b", "c"), {"a": 1, "b": 1, "c": 1})
    state.commit()
    assert values(state) == ({"a": 1012, "b": 1113, "c": 1104} if counts else {"a": 2, "b": 3, "c": 4})


def test_values_follow_their_parameters_through_buckets_that_alternate():
    state, whole, part = State(), bucket("a", "b", "c"), bucket("a", "c")
    expected = dict.fromkeys("abc", 0.0)
    for of in (whole, part, part, whole, bucket("b"), part, bucket("a", "b", "c"), part, whole):
        for segment in of.segments:
            expected[segment.name] += 1
        add(state, of, dict.fromkeys("abc", 1.0))
        state.commit()
        assert values(state) == {name: value for name, value in expected.items()}


def test_small_state_of_a_second_exchange():
    state = State()
    state.put("n", "w", torch.tensor(1.0))
    assert state.get("n", "w") is None
    next_exchange(state)
    assert state.get("n", "w") == 1
    state.rollback()
    assert state.get("n", "w") is None


@pytest.mark.parametrize("leaves", [None, 2.0, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_it_is_what_a_loop_over_parameters_says(rows, dtype, leaves):
    """In buffers that begin anywhere in memory, of whole parameters or of every rank's shard, side by side with
    another's and with values that are nobody's: those stay as they are."""
    sizes, times, width = {"a": 3 * rows, "b": 5 * rows, "c": 4}, 4.0, 12
    pieces = tuple(
        Piece(name, at, rows * span, rows, width) if rows > 1 else Piece(name, at, span)
        for name, at, span in (("a", 1, 3), ("b", 4, 5), ("nobody", 9, 2))
    )
    of = OutlierClip(times, sizes, leaves)
    usual = dict.fromkeys(sizes, 0.0)
    cut, norm, generator = 0, 0.0, torch.Generator().manual_seed(rows)
    left = times if leaves is None else min(leaves, times)
    for number in range(12):
        scale = 100.0 if number in (4, 7, 8) else 0.0 if number == 2 else 1.0
        memory = torch.randn(7 + rows * width, generator=generator).to(dtype)
        flat = memory[7:]
        every = flat.view(rows, width)
        every[:, 1:4] *= scale
        given, together = memory.clone(), math.hypot(*usual.values())
        of.apply(flat, pieces)
        of.commit()
        for name, at, span in (("a", 1, 3), ("b", 4, 5)):
            values = given[7:].view(rows, width)[:, at : at + span]
            size = float(values.float().norm())
            most = times * max(usual[name], math.sqrt(sizes[name] / sum(sizes.values())) * together)
            over = size > most and usual[name] > 0
            expected = values.float() * (left / times * most / size if over else 1.0)
            off = 1e-5 if dtype == torch.float32 else 2e-2
            assert torch.allclose(every[:, at : at + span].float(), expected, rtol=off)
            cut, norm = cut + over, norm + over * (size - left / times * most)
            if size:
                size = most if over else size
                usual[name] = NORM_DECAY * usual[name] + (1 - NORM_DECAY) * size if usual[name] else size
        rest = torch.ones(len(memory), dtype=torch.bool)
        rest[7:].view(rows, width)[:, 1:9] = False
        assert torch.equal(memory[rest], given[rest])
    assert of.facts() == {"cut": cut, "norm": pytest.approx(norm, rel=1e-2)} and cut >= 3
    for name, value in usual.items():
        assert float(of.state_dict()[f"usual norm/{name}"]) == pytest.approx(value, rel=1e-2)


def test_a_warning_says_how_many_of_how_many_and_of_whom_and_names_the_knob():
    """At the first look after it, once; a single cut is an accident."""
    of = OutlierClip(10.0, {"a": 30, "b": 70})
    for number in range(1, 2 * WATCHED):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(of, 1e3 if number in (50, 100, 150) else 1.0, 1e3 if number in (50, 100, 150) else 1.0)
        assert bool(seen) == (number == WATCHED)
        for warning in seen:
            said = str(warning.message)
            assert warning.category is ThinwireWarning
            assert said.startswith(f"3 of {WATCHED} gradients of a on this rank were more than 10 times as large as us")
            assert (
                "(also for 1 more parameters). What is cut off is lost: if gradients are often that large here, pass "
                "safety=Safety(outlier_clip=...)"
            ) in said
