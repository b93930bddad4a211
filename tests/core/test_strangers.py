"""Others change what a method relies on: the optimizer's state and groups, gradients, weights, the wire itself.

The laws of this file are held over all methods, dealt out over the engines.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import _global_optimizer_pre_hooks

import ranks
import thinwire
from breadth import alternating, dealt, spread
from engines import build, made, refusal
from models import flat, loss_of
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.core.selection import keep_dense
from thinwire.network.comm import local
from thinwire.proof.record import small
from threaded import entries

BY_NAME = {cls.name: cls for cls in methods.TABLE}
NAMES = [name for name in BY_NAME if name != "dense"]
WORLDS = [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]
STEPS = 8


def begun(kind, world, name, *, model=None, optimizer=None, check_every=None, **knobs):
    """A model, its optimizer as the method wants it, and the wire."""
    method = small(BY_NAME[name], **knobs)
    model = build(kind, world) if model is None else model
    if optimizer is None:
        optimizer = made(type(method).OPTIMIZER, model)
    safety = thinwire.Safety(check_every=check_every)
    return model, optimizer, thinwire.compress(model, optimizer, method, steps=100, safety=safety)


def advance(model, optimizer, wire, rank, step):
    """One step, at the rate that a schedule gives it."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (0.5 + step % 3)
    with wire.accumulate(last=True):
        loss_of(model, step, rank).backward()
    wire.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def runs(kind, name, engines=("ddp", "fsdp2", "hsdp")):
    engine = kind.removesuffix("-keep")
    return engine in BY_NAME[name].engines


def dealt_to(kind, turn):
    """The methods that are tried on the engine ``kind``: laws take ``turn``s in having every fourth one."""
    return [name for name in dealt(dealt(NAMES, turn, range(4)), kind) if runs(kind, name)]


def undisturbed(rank, world, kind, name):
    """The weights in the end, and all that is saved in the middle."""
    model, optimizer, wire = begun(kind, world, name)
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), wire.state_dict()))
        advance(model, optimizer, wire, rank, step)
    found = flat(model)
    wire.close()
    return found, saved


def reloaded_and_closed(rank, world, kind, name):
    """Before most steps the optimizer's state is loaded as it is: torch puts new dicts in place of its groups. In the
    middle the wire is closed, and the same model and optimizer are given to compress() once more; what that leaves
    behind is not loaded over in the two steps after it."""
    model, optimizer, wire = begun(kind, world, name)
    for step in range(STEPS):
        if step == STEPS // 2:
            state = copy.deepcopy(wire.state_dict())
            wire.close()
            _, _, wire = begun(kind, world, name, model=model, optimizer=optimizer)
            wire.load_state_dict(state)
        elif step != STEPS // 2 + 1:
            optimizer.load_state_dict(optimizer.state_dict())
        advance(model, optimizer, wire, rank, step)
    found = flat(model)
    wire.close()
    return found


def resumed(rank, world, kind, name, saved, *, before):
    """A new model goes on from the middle. ``before``: the optimizer is loaded before compress(), else after."""
    model = build(kind, world)
    optimizer = made(BY_NAME[name].OPTIMIZER, model)
    if before:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    _, _, wire = begun(kind, world, name, model=model, optimizer=optimizer)
    if not before:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    wire.load_state_dict(saved[2])
    for step in range(STEPS // 2, STEPS):
        advance(model, optimizer, wire, rank, step)
    found = flat(model)
    wire.close()
    return found


def _changes_nothing(rank, world, kind):
    warnings.simplefilter("ignore")
    found = []
    for name in dealt_to(kind, 0):
        plain, saved = undisturbed(rank, world, kind, name)
        others = {
            "reloaded between steps, closed, and compressed again": reloaded_and_closed(rank, world, kind, name),
            "state loaded before compress()": resumed(rank, world, kind, name, copy.deepcopy(saved), before=True),
            "state loaded after compress()": resumed(rank, world, kind, name, saved, before=False),
        }
        found += [f"{name} on {kind}: {what}" for what, other in others.items() if not torch.equal(plain, other)]
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_an_optimizer_or_a_run_that_is_loaded_goes_on_bit_for_bit(kind, world):
    for broken in ranks.run(_changes_nothing, world, kind):
        assert not broken


class Given(nn.Module):
    """The gradient of each parameter is what is passed in."""

    def __init__(self, *shapes):
        super().__init__()
        torch.manual_seed(0)
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(0.1 * torch.randn(shape)))

    def forward(self, gradients):
        return sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())


def given(kind, world, *shapes):
    return build(kind, world, net=lambda: Given(*shapes))


def noise(model, generator):
    return {
        re.sub("^module.", "", name): torch.randn(weight.shape, generator=generator)
        for name, weight in model.named_parameters()
    }


def waiting(wire, name=""):
    """What waits of a parameter, or of all."""
    kinds = wire.method.card.promise.waits
    return {
        key: value for key, value in entries(wire.state_dict()).items()
        if key.partition("/")[0] in kinds and key.endswith(name)
    }  # fmt: skip


def _cancelled(rank, world, kind):
    """After some steps, the gradient of w1 is set to None after each exchange: as if it had had none."""
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt_to(kind, 1):
        if name == "local-steps":  # whose gradients stay where they are
            continue
        model = given(kind, world, (32, 32), (32, 32))
        model, optimizer, wire = begun(kind, world, name, model=model)
        generator = torch.Generator().manual_seed(rank)
        cancelled = [weight for key, weight in model.named_parameters() if key.endswith("w1")]
        for step in range(9):
            if step == 5:
                weight, waited = local(cancelled[0].detach()).clone(), waiting(wire, "w1")
            model(noise(model, generator)).backward()
            if step >= 5:
                cancelled[0].grad = None
            wire.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        now = waiting(wire, "w1")
        if not torch.equal(weight, local(cancelled[0].detach())):
            broken.append(f"{name} on {kind}: w1 has moved")
        if any(not torch.equal(value, now[key]) for key, value in waited.items()):
            broken.append(f"{name} on {kind}: what waits of w1 has changed")
        if wire.skipped:
            broken.append(f"{name} on {kind}: {wire.skipped} steps skipped")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_a_gradient_that_is_thrown_away_after_its_exchange_leaves_no_trace(kind, world):
    for broken in ranks.run(_cancelled, world, kind):
        assert not broken


def _rests(rank, world, kind):
    """At lr 0 no weight moves; what waited then comes when lr is above 0 again."""
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt_to(kind, 2):
        model, optimizer, wire = begun(kind, world, name, model=given(kind, world, (32, 32), (48, 16)))
        generator = torch.Generator().manual_seed(rank)

        def step(lr, model=model, optimizer=optimizer, generator=generator):
            for group in optimizer.param_groups:
                group["lr"] = lr
            model(noise(model, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step(1e-2)
        if name == "local-steps":  # a round that began at another rate ends
            step(0.0)
            step(0.0)
        before, waited = flat(model), waiting(wire)
        for _ in range(4):
            step(0.0)
        if not torch.equal(before, flat(model)):
            broken.append(f"{name} on {kind}: weights have moved at lr 0")
        now = waiting(wire)
        if wire.method.card.promise.of == "updates" and any(not torch.equal(waited[key], now[key]) for key in waited):
            broken.append(f"{name} on {kind}: what waits has changed at lr 0")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_at_lr_0_weights_hold_still_and_what_waits_goes_on_waiting(kind, world):
    for broken in ranks.run(_rests, world, kind):
        assert not broken


def _late_rates(rank, world, kind):
    """A schedule that moves between backward pass and step, as if it had moved before, or with a word."""
    broken = []
    for name in dealt_to(kind, 0):
        ends, heard = [], []
        for late in (False, True):
            model, optimizer, wire = begun(kind, world, name, model=given(kind, world, (32, 32), (48, 16)))
            generator = torch.Generator().manual_seed(rank)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(6):
                    if late:
                        model(noise(model, generator)).backward()
                    for group in optimizer.param_groups:
                        group["lr"] = 1e-2 / (1 + number)
                    if not late:
                        model(noise(model, generator)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            heard.append(sum("learning rate" in str(warning.message) for warning in caught))
            ends.append(flat(model))
            wire.close()
        if heard[0] or heard[1] > 1 or torch.equal(*ends) == bool(heard[1]):
            broken.append(f"{name} on {kind}: heard {heard}, same weights: {torch.equal(*ends)}")
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_a_rate_that_is_set_after_the_backward_pass_counts_in_its_step_or_is_warned_of_once(kind, world):
    for broken in ranks.run(_late_rates, world, kind):
        assert not broken


def _dropped(rank, world, kind):
    """Back to each rank's own snapshot, and wire.reset(): nothing waits, the run goes on, and ranks are equal again."""
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt_to(kind, 1):
        model, optimizer, wire = begun(kind, world, name)
        weights, moments = {}, {}
        for step in range(5):
            if step == 3:  # inside a round of local-steps
                weights = {key: value.clone() for key, value in model.state_dict().items()}
                moments = copy.deepcopy(optimizer.state_dict())
            advance(model, optimizer, wire, rank, step)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        wire.reset()
        if any(bool(value.any()) for value in waiting(wire).values()):
            broken.append(f"{name} on {kind}: something waits")
        for step in range(5, 9):
            advance(model, optimizer, wire, rank, step)
        while not wire.method.rank_equal and step < 30:
            advance(model, optimizer, wire, rank, step := step + 1)
        others = [torch.empty_like(flat(model)) for _ in range(world)]
        dist.all_gather(others, flat(model))
        if name != "none" and not all(torch.equal(other, others[0]) for other in others):
            broken.append(f"{name} on {kind}: ranks differ")
        if not bool(flat(model).isfinite().all()):
            broken.append(f"{name} on {kind}: not finite")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_after_a_reset_nothing_waits(kind, world):
    for broken in ranks.run(_dropped, world, kind):
        assert not broken


def grown(model):
    """A parameter that joins ``model`` now; its gradient differs by rank."""
    head = next(module for name, module in model.named_modules() if name.endswith("head"))
    head.late = nn.Parameter(torch.zeros(head.out_features))
    head.register_forward_hook(lambda module, inputs, output: output + module.late)
    return head.late


def _newcomer(rank, world, kind):
    """A parameter joins the model in mid-run (an adapter, say), and its optimizer or another one."""
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt_to(kind, 2):
        for holder in ("group", "new group", "optimizer"):
            model, optimizer, wire = begun(kind, world, name, check_every=0)
            advance(model, optimizer, wire, rank, 0)
            late = grown(model)
            if holder == "group":
                optimizer.param_groups[0]["params"].append(late)
            elif holder == "new group":
                optimizer.add_param_group({"params": [late]})
            stepped = torch.optim.SGD([late], lr=0.1) if holder == "optimizer" else optimizer
            loss_of(model, 1, rank).backward()
            said = refusal(stepped.step)
            if "head.late joined the model after compress()" not in said or bool(late.any()):
                broken.append(f"{name} on {kind}, {holder}: {said}")
            wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_a_parameter_that_joins_the_model_is_refused_by_name(kind, world):
    for broken in ranks.run(_newcomer, world, kind):
        assert not broken


def _bytes_of_steps(rank, world, kind):
    """The steps of a run sent other bytes of gradients, because something was exchanged between two of them."""
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt_to(kind, 0):
        if small(BY_NAME[name]).card.bytes_follow_data:
            continue
        expected = None
        for call in ("", "flush", "hand_over", "reset"):
            model, optimizer, wire = begun(kind, world, name)
            sent = []
            for step in range(STEPS):
                if step == 6 and call and refusal(getattr(wire, call)):
                    break  # it has nothing that could be delivered between steps
                advance(model, optimizer, wire, rank, step)
                last = wire.last_step()
                sent.append(sum(last["wire_bytes_per_step"].values()) - last["weight_bytes_per_step"])
            wire.close()
            expected = expected or sent
            if sent != expected[: len(sent)]:
                broken.append(f"{name} on {kind}, {call}: {sent}, not {expected}")
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_what_is_exchanged_between_two_steps_is_no_steps(kind, world):
    for broken in ranks.run(_bytes_of_steps, world, kind):
        assert not broken, "\n".join(broken)


class Scaled(nn.Module):
    def forward(self, weight):
        return 1.0 * weight


def _another_weight(rank, world, kind):
    """After compress() a weight is set anew, or computed of one of another name."""
    said = {}
    for how in ("set anew", "parametrized") if kind == "ddp" else ("set anew",):
        model = build(kind, world)
        optimizer = made(torch.optim.AdamW, model)
        wire = thinwire.compress(model, optimizer, "int8(smallest=100)")
        head = next(module for name, module in model.named_modules() if name.endswith("head"))
        if how == "parametrized":
            nn.utils.parametrize.register_parametrization(head, "weight", Scaled())
        else:
            head.weight = nn.Parameter(head.weight.detach().clone())
        said[how] = refusal(advance, model, optimizer, wire, rank, 0)
        wire.close()
    return said


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_a_weight_that_is_another_one_after_compress_is_named(kind, world):
    for said in ranks.run(_another_weight, world, kind):
        assert all("head.weight" in line and "another object now" in line for line in said.values()), said


def _reset_where_nothing_waits(rank, world, resets):
    model = given("ddp", world, (16, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = "local-steps(every=2, start=2, second_moment='mean', outer_lr=1.0, outer_momentum=0.0)"
    wire = thinwire.compress(model, optimizer, outer)
    generator = torch.Generator().manual_seed(rank)
    for step in range(10):
        if resets and step in (2, 6):  # before the first local step, and between two rounds
            wire.reset()
        model(noise(model, generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    wire.close()
    return flat(model)


def test_a_reset_where_nothing_waits_changes_no_bit():
    """local-steps with second_moment='mean' brings Adam's momentum to its unit once, not after each reset."""
    plain, reset = (ranks.run(_reset_where_nothing_waits, 2, resets) for resets in (False, True))
    assert torch.equal(plain[0], reset[0]) and torch.equal(plain[1], reset[1])


def _message(act):
    """What ``act`` is refused with, or what it warns of; "" where it says nothing."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            act()
        except ThinwireError as error:
            return str(error)
    return "\n".join(str(warning.message) for warning in seen if issubclass(warning.category, thinwire.ThinwireWarning))


def _put_back(rank, world, kind, spec):
    """An lr finder: weights and moments are put back after steps at larger and larger rates."""
    warnings.simplefilter("ignore")
    moved = {}
    for what in ("both", "weights", "swapped and back", "loaded"):
        model = given(kind, world, (64, 64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        wire = thinwire.compress(model, optimizer, spec)
        generator = torch.Generator().manual_seed(rank)

        def step(model=model, optimizer=optimizer, wire=wire, generator=generator):
            with wire.accumulate(last=True):
                model(noise(model, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        weight = next(iter(model.parameters()))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), wire.state_dict()))
        for t in range(8):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * 10 ** (t / 4)
            step()
        if what == "swapped and back":
            last = [local(each.detach()).clone() for each in model.parameters()]
            for factor in (0.5, None):
                with torch.no_grad():
                    for each, value in zip(model.parameters(), last, strict=True):
                        local(each).copy_(value if factor is None else factor * value)
        else:
            model.load_state_dict(saved[0])
        if what in ("both", "loaded"):
            optimizer.load_state_dict(saved[1])
        if what == "loaded":
            wire.load_state_dict(saved[2])
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        before = local(weight.detach()).clone()
        said = _message(step)
        moved[what] = float((local(weight.detach()) - before).abs().max()), said
        wire.close()
    return moved


@pytest.mark.parametrize(
    ("kind", "world", "spec"),
    [("ddp", 2, "trickle(smallest=0)"), ("fsdp2", 2, "topk(density=0.01,smallest=0)"),
     ("hsdp", 4, "trickle(smallest=0)"), ("fsdp2", 2, "trickle:merged(smallest=0)")],
)  # fmt: skip
def test_what_waits_does_not_move_weights_that_were_put_back(kind, world, spec):
    for moved in ranks.run(_put_back, world, kind, spec):
        size, said = moved["both"]
        assert size < 1e-2 and "they were dropped" in said  # some steps of lr 1e-3
        assert "call wire.reset()" in moved["weights"][1]
        assert moved["swapped and back"][1] == "" == moved["loaded"][1]
        assert moved["loaded"][0] < 1e-2


def _refused(rank, world, kind):
    """Each is refused by name, or served."""
    said = {}

    def fresh(method="trickle(smallest=0)", make=torch.optim.AdamW, shapes=((64, 64), (64,)), **more):
        model = given(kind, world, *shapes)
        optimizer = make(model.parameters(), lr=1e-2)
        return model, optimizer, thinwire.compress(model, optimizer, method, **more)

    def exchange(model, wire):
        model(noise(model, torch.Generator().manual_seed(rank))).backward()

    for method in ("trickle(smallest=0)", "int8(smallest=0)"):
        model, _, wire = fresh(method)
        before = flat(model)
        other = torch.optim.SGD(model.parameters(), lr=1e-2)
        exchange(model, wire)
        said[f"another optimizer, {method}"] = _message(other.step)
        assert torch.equal(before, flat(model))
        wire.close()

    class Seven(torch.optim.AdamW):
        def step(self, closure=None):
            raise AssertionError

    class Same(torch.optim.AdamW):
        pass

    for method in ("trickle(smallest=0)", "onebit-adam(smallest=0,warmup=2)"):
        said[f"a step of its own, {method}"] = _message(lambda method=method: fresh(method, Seven))
    _, _, wire = fresh("trickle(smallest=0)", Same)
    wire.close()

    model = given(kind, world, (64, 64))
    both = [torch.optim.AdamW(model.parameters(), lr=1e-2) for _ in range(2)]
    said["held twice"] = _message(lambda: thinwire.compress(model, both, "int8"))

    if kind == "ddp":  # torch's FSDP2 does not take it
        model, optimizer, wire = fresh(shapes=((64, 64), (3, 0)))
        exchange(model, wire)
        optimizer.step()
        wire.close()

    model, optimizer, wire = fresh()
    exchange(model, wire)
    weight = next(iter(model.parameters()))
    local(weight.grad).mul_(0.5)
    optimizer.step()
    said["scaled in the last step"] = _message(wire.close)
    return said


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_what_cannot_be_served_is_refused_by_name(kind, world):
    for said in ranks.run(_refused, world, kind):
        assert "compress() was not told of it" in said["another optimizer, trickle(smallest=0)"]
        assert "compress() was not told of it" in said["another optimizer, int8(smallest=0)"]
        assert "Seven has a step() of its own" in said["a step of its own, trickle(smallest=0)"]
        assert "Seven has a step() of its own" in said["a step of its own, onebit-adam(smallest=0,warmup=2)"]
        assert "w0 is in two optimizers" in said["held twice"]
        assert "something has scaled it" in said["scaled in the last step"]


def _between(rank, world, kind):
    """The calls for between two steps, between a backward pass and its step: refused, and the step is as without."""
    warnings.simplefilter("ignore")
    broken = []
    for name in dealt_to(kind, 1):
        ends = []
        for asks in (False, True):
            model, optimizer, wire = begun(kind, world, name)
            for step in range(3):
                with wire.accumulate(last=True):
                    loss_of(model, step, rank).backward()
                exchanged = not wire.method.card.alone(step)
                for call in (wire.reset, wire.hand_over, wire.flush) if asks and exchanged else ():
                    said = _message(call)
                    nothing_waits = call == wire.flush and "nothing to deliver" in said
                    if "call it before the step's backward pass" not in said and not nothing_waits:
                        broken.append(f"{name} on {kind}: {call.__name__} after an exchange: {said or 'nothing said'}")
                optimizer.step()
                optimizer.zero_grad()
            ends.append(flat(model))
            loss_of(model, 3, rank).backward()
            optimizer.zero_grad()  # of that step nothing is left
            if "after an exchange" in (said := _message(wire.hand_over)):
                broken.append(f"{name} on {kind}: hand_over after a step that was thrown away: {said}")
            wire.close()
        if not torch.equal(*ends):
            broken.append(f"{name} on {kind}: other weights")
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_calls_for_between_two_steps_are_refused_between_a_backward_pass_and_its_step(kind, world):
    for broken in ranks.run(_between, world, kind):
        assert not broken


def _clipped(rank, world, kind, options):
    """By what is done to gradients that hold steps: the warnings of three steps."""
    said = {}
    for name, act in {
        "norm": lambda model, wire: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        "values": lambda model, wire: nn.utils.clip_grad_value_(model.parameters(), 1e9),
        "one by one": lambda model, wire: [weight.grad.clamp_(-1e9, 1e9) for weight in model.parameters()],
        "our own": lambda model, wire: wire.clip_grad_norm_(1e-3),
    }.items():
        model = build(kind, world, **options)
        first, *others = model.parameters()
        optimizers = [torch.optim.AdamW(members, lr=1e-3) for members in ([first], others)]
        wire = thinwire.compress(model, optimizers, "trickle(smallest=100,start=0)", steps=100)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(3):
                loss_of(model, step, rank).backward()
                act(model, wire)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=step == 1)
        said[name] = [str(one.message) for one in warned if "was written" in str(one.message)]
        wire.close()
    return said


@pytest.mark.parametrize(("kind", "options"), [("ddp", {}), ("ddp", {"gradient_as_bucket_view": True}), ("fsdp2", {})])
def test_clipping_without_effect_is_said_once(kind, options):
    """Steps in place of gradients are too small to be clipped. On FSDP2 torch counts no writes to several at once."""
    for said in ranks.run(_clipped, 2, kind, options):
        assert said.pop("our own") == []
        for name, messages in said.items():
            assert len(messages) == (kind == "ddp" or name == "one by one"), (name, messages)
            assert all("clipping has no effect on it (call wire.clip_grad_norm_)" in message for message in messages)


def _inside(rank, world):
    said = {}
    model = given("ddp", world, (64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    thinwire.compress(model, optimizer, "int8(smallest=0)")
    generator = torch.Generator().manual_seed(rank)
    weight = next(iter(model.parameters()))
    handle = weight.register_post_accumulate_grad_hook(lambda weight: optimizer.step())
    said["inside"] = _message(lambda: model(noise(model, generator)).backward())
    handle.remove()
    return said


def _joined(rank, world):
    model = given("ddp", world, (64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    thinwire.compress(model, optimizer, "int8(smallest=0)")

    def train():
        with model.join():
            model(noise(model, torch.Generator().manual_seed(rank))).backward()

    return _message(train)


def test_an_optimizer_inside_the_backward_pass_and_ddps_join_are_refused_by_name():
    for said in ranks.run(_inside, 2):
        assert "steps inside a backward pass" in said["inside"]
    for said in ranks.run(_joined, 2):
        assert "DDP.join() is not supported" in said


def _swapped(rank, world, kind, spec, evaluates):
    """FSDP2: averaged weights are put in through .data, and taken out."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    mesh = None
    if kind == "hsdp":
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    model = nn.Sequential(fully_shard(first, mesh=mesh), fully_shard(second, mesh=mesh))
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    thinwire.compress(model, optimizer, spec)

    def step():
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def forward_is_right():
        with torch.no_grad():
            found = model(torch.eye(64))
            whole = [weight.detach().full_tensor() for weight in model.parameters()]
            return torch.allclose(found, whole[0].t() @ whole[1].t(), rtol=0.2, atol=0.2 * float(found.abs().max()))

    right = []
    for _ in range(2):
        step()
        last = [weight.detach().clone() for weight in model.parameters()]
        if evaluates:
            model.eval()
        for weight, value in zip(model.parameters(), last, strict=True):
            weight.data.copy_(-2 * value)
        right.append(forward_is_right())
        for weight, value in zip(model.parameters(), last, strict=True):
            weight.data.copy_(value)
        model.train()
        right.append(forward_is_right())
    step()
    for weight in model.parameters():  # in the middle of training, where no rank expects it
        if rank == world - 1:
            weight.data.mul_(-1)
    return right, _message(step)


@pytest.mark.parametrize("evaluates", [True, False])
@pytest.mark.parametrize(
    ("kind", "world", "spec"),
    [("fsdp2", 2, "dense"), ("fsdp2", 2, "trickle:merged(smallest=0)"), ("fsdp2", 2, "sdp4bit(smallest=0)"),
     ("hsdp", 4, "sdp4bit(smallest=0)")],
)  # fmt: skip
def test_weights_that_were_written_through_data_are_gathered_anew(kind, world, spec, evaluates):
    for rank, (right, said) in enumerate(ranks.run(_swapped, world, kind, spec, evaluates)):
        assert all(right)
        knows = rank >= world - 2  # all that gather with the one
        line = "changed through .data" if knows else "another rank cannot take this step"
        assert said == "" if spec == "dense" else line in said


# ---------------------------------------------------------------------------------- what another optimizer would need

UPDATES = [name for name, cls in BY_NAME.items() if small(cls).card.promise.of == "updates"]


def _other_settings(rank, world):
    """A loaded state brings groups that compress() would have refused."""
    ignored = []
    for name in [*UPDATES, "onebit-adam"]:
        for setting in ("maximize", "amsgrad"):
            model = build("ddp", world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            wire = thinwire.compress(model, optimizer, small(BY_NAME[name]), steps=STEPS)
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved | {"param_groups": [saved["param_groups"][0] | {setting: True}]})
            with contextlib.suppress(thinwire.ThinwireError):
                for step in range(STEPS):
                    advance(model, optimizer, wire, rank, step)
                ignored.append(f"{name} with {setting}")
            wire.close()
    return ignored


def test_a_loaded_state_cannot_bring_settings_that_compress_refuses():
    assert not any(ranks.run(_other_settings, 2))


def _refused_and_taken(rank, world, name, kind):
    """A setting of the last group is refused, put right, and the step taken again; the same without the setting."""
    ends = []
    for setting in (True, False):
        model = build(kind, world)
        weights = list(model.parameters())
        groups = [{"params": weights[:1]}, {"params": weights[1:]}]
        _, optimizer, wire = begun(kind, world, name, model=model, optimizer=torch.optim.AdamW(groups, lr=1e-3))
        for step in range(STEPS):
            with wire.accumulate(last=True):
                loss_of(model, step, rank).backward()
            if setting and step == STEPS - 2:
                optimizer.param_groups[-1]["maximize"] = True
                with pytest.raises(ThinwireError, match="maximize"):
                    optimizer.step()
                optimizer.param_groups[-1]["maximize"] = False
            optimizer.step()
            optimizer.zero_grad()
        ends.append(flat(model))
        wire.close()
    return torch.equal(*ends)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_refused_setting_leaves_the_step_to_be_taken_whole(kind):
    for name in dealt(spread(2, [*UPDATES, "onebit-adam"]), kind, ["ddp", "fsdp2"]):
        assert all(ranks.run(_refused_and_taken, 2, name, kind)), name


class _NoEps(torch.optim.SGD):
    """It has betas, as Lion has, and no eps."""

    def __init__(self, weights):
        super().__init__(weights, lr=1e-3)
        self.param_groups[0]["betas"] = 0.9, 0.99


def _steps_of_strangers(rank, world):
    """Rounds inside autocast and outside; an optimizer of dense weights."""
    ends, rounds = [], "local-steps(every=2, outer=\"powersgd(smallest=0, feedback='gradients')\")"
    for cast in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        model = build("ddp", world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wire = thinwire.compress(model, optimizer, rounds, steps=STEPS)
        for step in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step, rank)
            with cast:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        ends.append(flat(model))
        wire.close()
    model = build("ddp", world)
    sent = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    optimizers = [torch.optim.AdamW(sent, lr=1e-3), _NoEps(others)]
    wire = thinwire.compress(model, optimizers, "trickle(smallest=0)")
    loss_of(model, 0, rank).backward()
    for optimizer in optimizers:
        optimizer.step()
    wire.close()
    return torch.equal(*ends)


def test_rounds_do_not_lose_bits_in_autocast_and_dense_weights_need_no_eps():
    assert ranks.run(_steps_of_strangers, 2) == [True, True]


def moments_of(model, optimizer):
    """(step, exp_avg, exp_avg_sq) of each parameter, as ``optimizer.state_dict()`` has it."""
    state = optimizer.state_dict()["state"]
    return {
        name: tuple(state[i][kind] for kind in ("step", "exp_avg", "exp_avg_sq"))
        for i, (name, _) in enumerate(model.named_parameters())
    }


def _handed_over(rank, world, kind, more, names):
    """Against r mean_n v_n from the saved states of all ranks; and the run goes on as if nothing had been."""
    warnings.simplefilter("ignore")
    broken = []
    for name in names:
        ends, sent = [], []
        for hands in (False, True):
            model = build(kind, world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            wire = thinwire.compress(model, optimizer, small(BY_NAME[name], start=1), **more)
            for step in range(6):
                if hands and step == 4:
                    alone = moments_of(model, optimizer)
                    wire.hand_over()
                    together = moments_of(model, optimizer)
                    states = [None] * world
                    dist.all_gather_object(states, wire.state_dict())
                    broken += _differing(f"{name} on {kind}", model, wire, states, alone, together)
                advance(model, optimizer, wire, rank, step)
            ends.append(flat(model))
            held = [weight for weight in model.parameters() if "exp_avg" in optimizer.state.get(weight, {})]
            if len(held) != sum(keep_dense(wire.method, p) is not None for p in wire.engine.parameters.values()):
                broken.append(f"{name} on {kind}: moments of compressed parameters stay in memory")
            sent.append(wire.stats()["wire_bytes_per_step"])
            wire.close()
        if sent[0] != sent[1]:
            broken.append(f"{name} on {kind}: steps send {sent[1]} with it, {sent[0]} without")
        if not torch.equal(*ends):
            broken.append(f"{name} on {kind}: the run is another one after it")
    return broken


def _differing(case, model, wire, states, alone, together):
    merged = {key: value for state in states for key, value in state.items()}
    for name, weight in model.named_parameters():
        bare = name.removeprefix("module.")
        parts = [value for key, value in merged.items() if key.endswith(f"/second/{bare}")]
        count, first, second = together[name]
        if not parts:
            continue
        r = next(value for key, value in merged.items() if key.endswith("=alike/"))
        if int(count) != 4 or first.any():  # in the first step, which was dense, v is learned all the same
            yield f"{case}: step {count} and exp_avg of {name}"
        if wire.engine.kind == "hsdp":
            continue  # each node's rows are another shard's: below, against the local ones
        rows = torch.stack(parts).mean(0)  # (R, span), of as many rows as owners
        if wire.engine.levels is not None and wire.engine.kind == "ddp":
            continue
        expected = (r * rows).flatten()
        expected = expected[dist.get_rank() * rows.shape[1] :] if wire.engine.kind == "fsdp2" else expected
        expected = expected[: local(weight).numel()].view(local(weight).shape)
        if not torch.allclose(local(second), expected, rtol=1e-5, atol=0):
            yield f"{case}: exp_avg_sq of {name}"
        if local(alone[name][2]).shape != local(second).shape:
            yield f"{case}: alone, exp_avg_sq of {name}"


@pytest.mark.parametrize(
    ("place", "kind", "world", "more"),
    [(0, "ddp", 3, {}), (1, "fsdp2", 3, {}), (2, "hsdp", 4, {}), (3, "ddp", 4, {"two_level": True})],
)
def test_hand_over_gives_the_optimizer_what_another_would_need(place, kind, world, more):
    names = dealt(UPDATES, place, range(4))
    assert all(runs(kind, name) for name in names)
    for broken in ranks.run(_handed_over, world, kind, more, names, LOCAL_WORLD_SIZE="2" if more else str(world)):
        assert not broken


def _goes_on_dense(rank, world, kind):
    """How far plain AdamW's first step goes after a run of trickle, in lr, by what it has of the second moments."""
    warnings.simplefilter("ignore")
    found = {}
    model = build(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    wire = thinwire.compress(model, optimizer, "trickle(density=0.1, smallest=100)")
    for step in range(30):
        loss_of(model, step, rank).backward()
        wire.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    states = {how: copy.deepcopy(optimizer.state_dict()) for how in ("alone", "nothing")}
    kept = states["nothing"]["state"]
    states["nothing"]["state"] = {i: moments for i, moments in kept.items() if moments["exp_avg"].any()}
    wire.hand_over()
    states["handed over"] = copy.deepcopy(optimizer.state_dict())
    wire.close()
    weights = copy.deepcopy(model.state_dict())
    for how, state in states.items():
        model = build(kind, world)
        model.load_state_dict(weights)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        optimizer.load_state_dict(state)
        before, moved = [local(weight.detach()).clone() for weight in model.parameters()], 0.0
        loss_of(model, 30, rank).backward()
        optimizer.step()
        matrices = [(w, b) for w, b in zip(model.parameters(), before, strict=True) if w.dim() > 1]
        moved = torch.cat([(local(w.detach()) - b).abs().flatten() for w, b in matrices]).mean() / 3e-3
        found[how] = float(moved)
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2)])
def test_plain_adamw_goes_on_from_it_with_steps_of_their_usual_size(kind, world):
    """Without second moments Adam's first step moves every value by lr; with them by what its gradient is worth."""
    for moved in ranks.run(_goes_on_dense, world, kind):
        assert moved["nothing"] > 0.8
        assert moved["handed over"] < 0.5 * moved["nothing"] and moved["alone"] < 0.5 * moved["nothing"]


def _asked_by_torch(rank, world, kind):
    """Of a model whose parameters are all compressed torch takes the optimizer for fresh, and steps it at lr 0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    warnings.simplefilter("ignore")
    broken = []
    for name in dealt(spread(2, [name for name in UPDATES if runs(kind, name)]), kind):
        model, optimizer, wire = begun(kind, world, name, model=given(kind, world, (32, 32), (48, 16)))
        generator = torch.Generator().manual_seed(rank)
        for hands in (False, True):
            for _ in range(3):
                model(noise(model, generator)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if hands:
                wire.hand_over()
            alone = copy.deepcopy(moments_of(model, optimizer))
            asked = get_optimizer_state_dict(model, optimizer)["state"]
            for key, values in alone.items():
                found = asked[key.removeprefix("module.")]
                kinds = zip(values, ("step", "exp_avg", "exp_avg_sq"), strict=True)
                if not all(torch.equal(local(value), local(found[kind])) for value, kind in kinds):
                    broken.append(f"{name} on {kind}, handed over: {hands}: {key}")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_torchs_state_dict_has_the_moments_that_the_optimizers_has(kind, world):
    for broken in ranks.run(_asked_by_torch, world, kind):
        assert not broken


def _plain_dcp(rank, world, kind, folder):
    """Model, optimizer and wire in one call, as any checkpointer does it; a fresh run goes on bit for bit."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    warnings.simplefilter("ignore")
    broken = []
    # One copy of the weights is written: "none", whose ranks each have their own, has none that is all of them.
    names = [name for name in dealt_to(kind, 2) if name != "none"]
    for name in [*names, "trickle"]:
        model, optimizer, wire = begun(kind, world, name)
        for step in range(STEPS // 2):
            advance(model, optimizer, wire, rank, step)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments, "wire": wire}, checkpoint_id=f"{folder}/{kind}-{name}")
        for step in range(STEPS // 2, STEPS - 2):
            advance(model, optimizer, wire, rank, step)
        end = flat(model)
        wire.close()
        model, optimizer, wire = begun(kind, world, name)
        weights, moments = get_state_dict(model, optimizer)
        try:
            saved = {"model": weights, "optim": moments, "wire": wire}
            dcp.load(saved, checkpoint_id=f"{folder}/{kind}-{name}")
        except Exception as error:
            broken.append(f"{name} on {kind}: {type(error).__name__}: {error}"[:300])
            continue
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        for step in range(STEPS // 2, STEPS - 2):
            advance(model, optimizer, wire, rank, step)
        if not torch.equal(end, flat(model)):
            broken.append(f"{name} on {kind}: another run after it")
        wire.close()
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(1, WORLDS))
def test_a_plain_checkpoint_of_all_three_loads_into_a_fresh_run(kind, world, tmp_path):
    for broken in ranks.run(_plain_dcp, world, kind, str(tmp_path)):
        assert not broken


def _clips_by_the_whole(rank, world, kind, more):
    """The norm that ``clip_grad_norm_`` returns is that of the whole mean gradient, and dense parts are cut by it.

    All ranks have the same gradient: then r is 1 and the norm exact.
    """
    warnings.simplefilter("ignore")
    wrong = []
    for spec in ("trickle(density=0.5, smallest=100)", "int8(smallest=100)"):
        model = build(kind, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        wire = thinwire.compress(model, optimizer, spec, **more)
        stock = build(kind, world)
        for step in range(3):
            stock.load_state_dict(model.state_dict())
            stock.zero_grad()
            loss_of(stock, step, 0).backward()
            expected = nn.utils.clip_grad_norm_(stock.parameters(), 1e-3)
            expected = float(expected.full_tensor() if hasattr(expected, "full_tensor") else expected)
            loss_of(model, step, 0).backward()
            norm = float(wire.clip_grad_norm_(1e-3))
            if abs(norm / expected - 1) > 0.01:
                wrong.append(f"{spec} on {kind}, step {step}: {norm}, not {expected}")
            for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
                if ours.dim() == 1 and not torch.allclose(local(ours.grad), local(theirs.grad), rtol=0.03, atol=1e-9):
                    wrong.append(f"{spec} on {kind}, step {step}: a dense gradient is clipped otherwise")
            optimizer.step()
            optimizer.zero_grad()
        if spec.startswith("trickle"):
            loss_of(model, 3, 0).backward()
            if "norm_type=2" not in _message(lambda wire=wire: wire.clip_grad_norm_(1.0, float("inf"))):
                wrong.append("another norm is not refused")
        wire.close()
    return wrong


@pytest.mark.parametrize(
    ("kind", "world", "more"), [("ddp", 2, {}), ("fsdp2", 2, {}), ("hsdp", 4, {}), ("ddp", 4, {"two_level": True})]
)
def test_a_clip_means_what_it_means_without_a_method(kind, world, more):
    for wrong in ranks.run(_clips_by_the_whole, world, kind, more, LOCAL_WORLD_SIZE="2" if more else str(world)):
        assert not wrong


def _unlike(rank, world, kind, others):
    """All but ``others`` use w1 in their second step."""
    warnings.simplefilter("ignore")
    model = given(kind, world, (64, 64), (64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.compress(model, optimizer, "int8(smallest=0)", safety=thinwire.Safety(check_every=1))
    for step in range(2):
        gradients = noise(model, torch.Generator().manual_seed(rank))
        if step and rank in others:
            del gradients["w1"]

        def backward(gradients=gradients):
            model(gradients).backward()
            optimizer.step()

        said = _message(backward)
    wire.close()
    return said


@pytest.mark.parametrize(
    ("kind", "world", "others"), [("fsdp2", 2, (1,)), ("hsdp", 4, (1, 2, 3)), ("hsdp", 4, (2, 3)), ("hsdp-1", 2, (1,))]
)
def test_a_parameter_that_some_ranks_alone_use_is_named_where_ranks_are_compared(kind, world, others):
    for rank, said in enumerate(ranks.run(_unlike, world, kind, others)):
        assert f"rank {rank} has {'w0' if rank in others else 'w0, w1'}, another rank has others" in said


def _layer_anew(rank, world, kind):
    """How often weights are said to be replaced: a layer drawn anew; in the same way, but the user resets; a little
    changed; all weights there and back again, as ScheduleFree's eval and train take them; all decayed by hand."""
    said = {}
    names = [name for name in NAMES if runs(kind, name) and BY_NAME[name]().card.keeps_state]
    for name in dealt(spread(2, names), kind):
        model, optimizer, wire = begun(kind, world, name)
        layer = wire._step_loop.weights["head.weight"]
        told = said[name] = {}
        for case in ("little", "reset", "back", "decay", "anew", "again"):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                for step in range(2):
                    loss_of(model, step, rank).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 0:
                        with torch.no_grad():
                            if case == "back":
                                for weight in model.parameters():
                                    weight.mul_(1.1).mul_(1 / 1.1)
                            elif case == "decay":
                                for weight in model.parameters():
                                    weight.mul_(1 - 3e-4)
                            else:
                                layer.mul_(0.9 if case == "little" else 0)
                        if case == "reset":
                            wire.reset()
            told[case] = sum("weights were replaced" in str(warning.message) for warning in heard)
        wire.close()
    return said


@pytest.mark.parametrize(("kind", "world"), alternating(0, WORLDS))
def test_a_layer_that_begins_anew_is_warned_of_once(kind, world):
    for said in ranks.run(_layer_anew, world, kind):
        assert said
        for name, told in said.items():
            assert told == {"little": 0, "reset": 0, "back": 0, "decay": 0, "anew": 1, "again": 0}, (name, told)


def _hooks_on_all(rank, world):
    """torch's hooks on all optimizers, as wires come, are closed and are forgotten."""
    seen = []
    for name in NAMES[:3]:
        wire = begun("ddp", world, name)[2]
        seen.append(list(_global_optimizer_pre_hooks))
        wire.close()
        seen.append(list(_global_optimizer_pre_hooks))
    return seen


def test_hooks_on_all_optimizers_do_not_change_once_they_are_there():
    """torch walks through them while an optimizer steps: of another model, too, while this one's wire is collected."""
    for seen in ranks.run(_hooks_on_all, 2):
        assert len(seen[0]) == 1 and seen == [seen[0]] * len(seen)
