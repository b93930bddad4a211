"""A step's life on one rank, in random programs, held against plain torch: who steps, what counts, what is left."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from test_edges import Given, parts
from thinwire.base.errors import ThinwireError, ThinwireWarning
from threaded import entries

SHAPES = {"a": (5, 4), "b": (3, 7), "c": (6,)}
TOPK = "topk(feedback='gradients', smallest=0, density=0.2, start=0)"


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(lr: float = 0.1, **options: float) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model, and one optimizer for a and b, another for c."""
    torch.manual_seed(0)
    model = Given(SHAPES)
    of = parts(model)
    return model, [torch.optim.SGD([of["a"], of["b"]], lr, **options), torch.optim.SGD([of["c"]], lr, **options)]


def given(draw: random.Random, names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(2**30))
    return {name: torch.randn(SHAPES[name], generator=generator) for name in names}


def equal(one: nn.Module, other: nn.Module) -> bool:
    there = parts(other)
    return all(torch.equal(weight, there[name]) for name, weight in parts(one).items())


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(weight.grad is not None for group in optimizer.param_groups for weight in group["params"])


@pytest.mark.parametrize("seed", range(10))
def test_a_program_under_dense_is_plain_training_without_the_steps_that_are_not_finite(seed):
    """Whatever has a gradient, in how many passes, thrown away and made again; in whatever order optimizers step, by a
    closure, or one of them not at all; with a state saved and loaded. After each step: the same bits, and counts."""
    draw = random.Random(seed)
    (plain, theirs), (model, ours) = made(momentum=0.9), made(momentum=0.9)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    wire = thinwire.compress(ddp, ours, "dense")
    step = skipped = 0
    for _ in range(12):
        *earlier, last = (given(draw, draw.choice(["abc", "abc", "ab", "c"])) for _ in range(draw.choice([1, 1, 2, 3])))
        if draw.random() < 0.2:
            ddp(given(draw, "abc")).backward()
            for optimizer in ours:
                optimizer.zero_grad()
            skipped += 1
        spoilt = draw.random() < 0.2
        if spoilt:
            next(iter(draw.choice([*earlier, last]).values())).view(-1)[0] = draw.choice([torch.nan, torch.inf])
        for values in (*earlier, last):
            plain(values).backward()
        for values in earlier:
            with wire.accumulate(last=False):
                ddp(values).backward()
        order = draw.sample([0, 1], 2)
        if draw.random() < 0.3:
            order = [next(number for number in order if has_gradients(theirs[number]))]
        if draw.random() < 0.3:
            ours[order[0]].step(lambda last=last: ddp(last).backward())
        else:
            ddp(last).backward()
            ours[order[0]].step()
        for number in order[1:]:
            ours[number].step()
        if spoilt:
            skipped += 1
            assert not any(has_gradients(ours[number]) for number in order)
        else:
            step += 1
            for number in order:
                theirs[number].step()
        assert equal(plain, model)
        if draw.random() < 0.3:
            wire.load_state_dict(wire.state_dict())
            assert (wire.step, wire.skipped) == (step + skipped, skipped)
        for optimizer in (*theirs, *ours):
            optimizer.zero_grad()
    wire.state_dict()  # ends a step that an optimizer has not joined
    assert (wire.step, wire.skipped) == (step + skipped, skipped)
    wire.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_program_with_feedback_loses_nothing_of_the_steps_that_count_and_keeps_nothing_of_others(seed):
    """What weights have moved by and what waits is the sum of what was given, in steps of one exchange or of two."""
    draw = random.Random(seed)
    model, ours = made(lr=1.0)
    began = {name: weight.detach().clone() for name, weight in parts(model).items()}
    ddp = DistributedDataParallel(model)
    wire = thinwire.compress(ddp, ours, TOPK, safety=thinwire.Safety(outlier_clip=None))
    total = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(10):
        passes = [given(draw, "abc") for _ in range(draw.choice([1, 1, 2]))]
        bad = draw.random() < 0.3
        if bad:
            draw.choice(passes)["b"][0, 0] = torch.nan
        if draw.random() < 0.2:
            ddp(given(draw, "abc")).backward()
            for optimizer in ours:
                optimizer.zero_grad()
        for values in passes:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ThinwireWarning)
                ddp(values).backward()
        for optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()
        for values in [] if bad else passes:
            for name, value in values.items():
                total[name] += value
        waits = entries(wire.state_dict())
        for name, weight in parts(model).items():
            moved = began[name] - weight.detach()
            rest = waits[f"residual/{name}"].flatten() if f"residual/{name}" in waits else torch.zeros(())
            assert (moved.flatten() + rest - total[name].flatten()).abs().max() < 1e-5
    wire.close()


def test_so_many_steps_in_a_row_that_are_not_finite_are_the_end():
    """Counted from the last step that was, or from when weights were put back; it says from which step on, and what is
    not finite."""
    model, ours = made()
    ddp = DistributedDataParallel(model)
    wire = thinwire.compress(ddp, ours, "dense", safety=thinwire.Safety(max_skipped=3))
    draw = random.Random(0)

    def step(bad: str = "") -> None:
        values = given(draw, "abc")
        for name in bad:
            values[name].fill_(torch.nan)
        ddp(values).backward()
        for optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()

    step()
    saved = wire.state_dict()
    for put_back in (lambda: wire.load_state_dict(saved), wire.reset):
        for bad in "ab":
            step(bad)
        put_back()
    wire.load_state_dict(saved)
    for bad in ("a", "b", "", "c", "b"):
        step(bad)
    with pytest.raises(ThinwireError) as error:
        step("b")
    assert str(error.value).startswith("3 steps in a row were skipped, from step 5 on, because of values")
    assert "(the gradient of b among them): go back to a checkpoint before step 5" in str(error.value)
    assert (wire.step, wire.skipped) == (7, 5)
    wire.close()


def test_the_clip_factor_of_a_step_is_that_of_all_its_clips():
    model, ours = made()
    ddp = DistributedDataParallel(model)
    wire = thinwire.compress(ddp, ours, "radius(start=0, smallest=0)")
    ddp(given(random.Random(0), "abc")).backward()
    norm = float(wire.clip_grad_norm_(1e9))
    for limit in (norm / 4, norm):
        wire.clip_grad_norm_(limit)
    for optimizer in ours:
        optimizer.step()
    assert wire.stats()["method"]["clip factor at the last resample"] == pytest.approx(0.25, rel=1e-3)
    wire.close()


class SharpnessAware(torch.optim.SGD):
    """As SAM: the closure's gradients are those at weights that it has moved along the ones before."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        weights = self.param_groups[0]["params"]
        for weight in weights:
            weight.add_(weight.grad)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        super().step()


@pytest.mark.parametrize("method", ["dense", "dgc(smallest=0)"])
@pytest.mark.parametrize("first_pass", ["exchanged", "not exchanged", "none"])
def test_a_closure_at_weights_that_the_optimizer_has_changed_is_refused(method, first_pass):
    """It was run before them: the step took no gradient, or that of other weights. One warning said another reason."""
    model, _ = made()
    ddp = DistributedDataParallel(model)
    optimizer = SharpnessAware(model.parameters(), 0.1)
    wire = thinwire.compress(ddp, optimizer, method)
    values = given(random.Random(0), "abc")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ThinwireWarning)
        if first_pass != "none":
            with wire.accumulate(last=first_pass == "exchanged"):
                ddp(values).backward()
        with pytest.raises(
            ThinwireError, match=r"SharpnessAware.step\(closure\) asks for gradients at weights that it"
        ):
            optimizer.step(lambda: ddp(values).backward())
    wire.close()


def test_a_closure_may_drop_what_came_before_it_or_make_no_gradient():
    draw = random.Random(0)
    before, after = given(draw, "abc"), given(draw, "abc")
    ends = []
    for known in (False, True):
        model, _ = made()
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wire = thinwire.compress(ddp, optimizer, "dense") if known else None

        def closure(ddp=ddp, optimizer=optimizer):
            optimizer.zero_grad()
            ddp(after).backward()

        for step in (closure, lambda: None):
            ddp(before).backward()
            optimizer.step(step)
        ends.append(model)
        if wire is not None:
            wire.close()
    assert equal(*ends)


def test_moments_that_were_emptied_after_the_warm_up_are_named_as_the_reason():
    model, _ = made()
    ddp, draw = DistributedDataParallel(model), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    wire = thinwire.compress(ddp, optimizer, "onebit-adam(smallest=0, warmup=1, group=32)")
    for _ in range(2):
        ddp(given(draw, "abc")).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.state.clear()
    ddp(given(draw, "abc")).backward()
    with pytest.raises(ThinwireError, match=r"the optimizer has no moments of a: .* optimizer.state was emptied since"):
        optimizer.step()
    wire.close()


def test_what_is_no_step_is_refused_and_the_next_one_is_taken():
    model, ours = made()
    ddp = DistributedDataParallel(model)
    wire = thinwire.compress(ddp, ours, TOPK)
    values = given(random.Random(0), "abc")

    class Twice(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[override]
            closure()
            closure()

    ddp(values).backward()
    ours[0].step()
    with pytest.raises(ThinwireError, match="SGD steps a second time after one exchange of gradients"):
        ours[0].step()
    ours[1].step()
    wire.close()
    model, _ = made()
    ddp = DistributedDataParallel(model)
    wire = thinwire.compress(ddp, twice := Twice(model.parameters(), 0.1), "dense")
    with pytest.raises(ThinwireError, match="Twice calls its closure several times in one step"):
        twice.step(lambda: ddp(values).backward())
    stranger = torch.optim.SGD([parts(model)["a"]], 0.1)
    with pytest.raises(ThinwireError, match="a"):
        stranger.step()
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.optim.SGD([other], 0.1).step()
    assert other.lt(1).all()
    wire.close()
    stranger.step()
