"""Backward passes and what becomes of them: two in a step, none before a step, after the end; weights in any order."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ranks
import thinwire
from breadth import alternating, dealt, falls_on, spread
from engines import build, same_on_all_ranks
from models import flat
from test_edges import CASES, LAW, SHAPES, STATEFUL, Case, Given, conserve, each, error_of, findings, on, same, tensors
from threaded import entries

OWN_MOMENTUM = ("scape", "onebit-adam", "dgc")


def _given(step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


# ------------------------------------------------------------------------------------------ two exchanged passes a step

PAIRS = {"ddp": ["AA", "AA", "AA"], "fsdp2": ["AA", "AB", "BA", "CB", "AA"]}


def _pairs(rank, world, engine):
    """Two passes per step, outside ``accumulate()`` and each inside it with last=True: the same thing."""

    def look(case):
        bare, wrapped = (conserve(rank, world, engine, case, PAIRS[engine], wrap=wrap) for wrap in (False, True))
        return {
            "broken": max(bare["broken"], wrapped["broken"]), "alike": bare["weights"] == wrapped["weights"],
            "skipped": (bare["skipped"], wrapped["skipped"]), "warned": (bare["warned"], wrapped["warned"]),
            "steps": (bare["steps"], wrapped["steps"]),
        }  # fmt: skip

    cases = [case for case in STATEFUL if case.law and case.name not in OWN_MOMENTUM]
    return findings(on(engine, cases, ("ddp", "fsdp2")), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_exchanged_passes_in_a_step_lose_nothing_and_are_warned_of_once(engine):
    """sum over ranks of the inputs of both passes = N * sum of gradients + sum over ranks of what waits."""

    def check(method, what):
        wrong = [f"{what['broken']:.2g} of the inputs is lost or sent twice"] * (what["broken"] > LAW)
        wrong += ["with accumulate() around each pass other weights"] * (not what["alike"])
        wrong += [f"steps skipped without a reason: {what['skipped']}"] * (what["skipped"] != (0, 0))
        wrong += [f"took {what['steps']} steps"] * (what["steps"] != (len(PAIRS[engine]),) * 2)
        for heard in what["warned"]:
            about = [message for message in heard if "accumulate" in message]
            wrong += [f"warned {len(about)} times of it: {heard}"] * (len(about) != 1)
        return wrong

    each(ranks.run(_pairs, 2, engine), engine, check)


def _spoilt_pairs(rank, world, engine):
    """A NaN in the first or the second of a step's two passes, on one rank: as if the step had not been."""

    def trained(case, steps, poison):
        model = build(engine, world, net=Given)
        optimizer = case.make(model.parameters())
        wire = thinwire.compress(model, optimizer, case.method, steps=8)
        for step in steps:
            for half in (0, 1):
                factor = float("nan") if (step, half) == poison and rank == 1 else 1.0
                (model(_given(2 * step + half, rank)) * factor).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = entries(wire.state_dict())
        state.pop("about")
        counts = int(state.pop("step")), int(state.pop("skipped"))
        kept = [flat(model), *tensors(optimizer), *(values for _, values in sorted(state.items()))]
        wire.close()
        return kept, counts

    def look(case):
        without, _ = trained(case, [0, 1, 3, 4], None)
        found: dict[str, Any] = {}
        for half in (0, 1):
            kept, counts = trained(case, range(5), (2, half))
            found[f"pass {half}"] = same(kept, without), counts
        return found

    names = ("int8", "radius", "topk", "powersgd")
    return findings(on(engine, [case for case in STATEFUL if case.name in names], ("ddp", "fsdp2")), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_nan_in_either_of_two_passes_leaves_no_trace(engine):
    def check(method, what):
        return [f"NaN in {key}: as if not is {alike}, steps that count and skipped are {counts}"
                for key, (alike, counts) in ((k, v) for k, v in what.items() if k != "error")
                if (alike, counts) != (True, (4, 1))]  # fmt: skip

    each(ranks.run(_spoilt_pairs, 2, engine), engine, check)


def _dense_pairs(rank, world, engine):
    found = []
    for compressed in (False, True):
        model = build(engine, world, net=Given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wire = thinwire.compress(model, optimizer, "dense") if compressed else None
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(3):
            for _ in range(2):
                model({n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(flat(model))
        if wire is not None:
            wire.close()
    return torch.equal(*found)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_two_exchanged_passes_under_dense_are_the_stock_engine_bit_for_bit(engine):
    assert ranks.run(_dense_pairs, 2, engine) == [True, True], f"dense on {engine}"


def _refused_pairs(rank, world, engine):
    """Three ordinary steps, so that the warm-up is over; then two passes in one."""

    def look(case):
        return {"raised": error_of(lambda: conserve(rank, world, engine, case, ["A", "A", "A", "AA"], wrap=False))}

    first = {case.name: case for case in on(engine) if case.name in OWN_MOMENTUM}
    return findings(first.values(), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_methods_with_a_momentum_of_their_own_refuse_a_second_exchange(engine):
    def check(method, what):
        refused = what["raised"].startswith(("ThinwireError", "RuntimeError")) and "accumulate" in what["raised"]
        return [] if refused else [f"two passes in one step: {what['raised'] or 'taken without a word'}"]

    each(ranks.run(_refused_pairs, 2, engine), engine, check)


# ------------------------------------------------------------------------- a second pass that DDP does not exchange


def _second_pass(model: nn.Module, step: int, rank: int, form: str) -> None:
    """Two losses. DDP exchanges one backward pass after a forward pass, so what the second one adds stays local."""
    if form == "one forward":
        loss = model(_given(step, rank))
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return
    losses = [model(_given(2 * step + half, rank)) for half in (0, 1)]
    if form == "two forwards":
        for loss in losses:
            loss.backward()
    elif form == "summed":
        sum(losses).backward()
    else:  # the second is looked at only: nothing is added to .grad
        losses[0].backward()
        torch.autograd.grad(losses[1], list(model.parameters()))


def _not_exchanged(rank, world):
    def look(case):
        found: dict[str, Any] = {}
        pairs = [(form, first) for form in ("one forward", "two forwards") for first in (0, 2)]
        for form, first in (pair for pair in pairs if falls_on(CASES.index(case), pair, pairs)):
            model = build("ddp", world, net=Given)
            optimizer = case.make(model.parameters())
            wire = thinwire.compress(model, optimizer, case.method, steps=8)
            raised = ""
            for step in range(3):
                before = flat(model)
                _second_pass(model, step, rank, form if step == first else ("summed", "looked at")[step % 2])
                if raised := error_of(optimizer.step):
                    break
                optimizer.zero_grad()
            found[f"{form} in step {first}"] = raised, step, torch.equal(before, flat(model)), wire.step
            optimizer.zero_grad()
            _second_pass(model, 3, rank, "summed")
            optimizer.step()
            found[f"{form} in step {first}"] += (
                wire.step - wire.skipped,
                wire.method.rank_equal,
                same_on_all_ranks(model),
            )
            wire.close()
        return found

    return findings(spread(2, on("ddp")), look)


def test_gradients_that_ddp_does_not_exchange_go_into_no_step():
    """They would be added to the mean, on each rank its own: an error on all ranks, and the next step is taken."""

    def check(method, what):
        wrong = []
        for label, (raised, step, untouched, taken, then, equal_ranks, same_weights) in (
            (label, found) for label, found in what.items() if label != "error"
        ):
            first = int(label.split()[-1])
            if method.startswith(("local-steps", "none")):  # each rank goes its own way there, with its own gradients
                wrong += [f"{label}: {raised}, {then} steps taken"] * (bool(raised) or then != 4)
                continue
            named = raised.startswith("ThinwireError: w") and "DDP exchanges one backward pass" in raised
            wrong += [f"{label}: {raised or 'taken without a word'}"] * (not named)
            wrong += [f"{label}: stopped in step {step}, after {taken} steps"] * ((step, taken) != (first, first))
            wrong += [f"{label}: weights moved"] * (not untouched)
            wrong += [f"{label}: the next step is not taken, {then}"] * (then != first + 1)
            wrong += [f"{label}: weights differ between ranks"] * (equal_ranks and not same_weights)
        return wrong

    each(ranks.run(_not_exchanged, 2), "ddp", check)


def _harmless(rank, world):
    """Programs that add local gradients after an exchange, too, but none of them to a step; and one that does."""
    found: dict[str, Any] = {}
    for way in ("then exchanged", "dropped", "dropped to zeros", "no_sync", "second optimizer"):
        model = build("ddp", world, net=Given)
        optimizers = [torch.optim.SGD(list(model.parameters())[part], lr=0.01) for part in (slice(1), slice(1, 3))]
        wire = thinwire.compress(model, optimizers, "int8(smallest=0)", steps=8)
        raised = ""
        for step in range(3):
            model(_given(step, rank)).backward()
            if way == "second optimizer":
                optimizers[0].step()
            with contextlib.nullcontext() if "dropped" in way else model.no_sync():
                loss = model.module(_given(step + 3, rank)) if "dropped" in way else model(_given(step + 3, rank))
                loss.backward()
            if "dropped" in way:
                model.zero_grad(set_to_none=way == "dropped")
            if way in ("then exchanged", "dropped", "dropped to zeros"):
                model(_given(step + 6, rank)).backward()
            for optimizer in optimizers[way == "second optimizer" :]:
                raised = raised or error_of(optimizer.step)
            model.zero_grad()
        found[way] = raised, same_on_all_ranks(model)
        wire.close()
    return found


def test_local_gradients_are_refused_only_where_a_step_would_take_them():
    for found in ranks.run(_harmless, 2):
        for way in ("then exchanged", "dropped", "dropped to zeros"):
            assert found[way] == ("", True), (way, found[way])
        for way in ("no_sync", "second optimizer"):
            assert "none inside no_sync()" in found[way][0], (way, found[way])


def _lone_passes(rank, world):
    """FSDP2 exchanges each backward pass of such programs: with dense they end as without Thinwire."""
    found = {}
    for form in ("one forward", "two forwards"):
        ends = []
        for compressed in (False, True):
            model = build("fsdp2", world, net=Given)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            wire = thinwire.compress(model, optimizer, "dense") if compressed else None
            for step in range(3):
                _second_pass(model, step, rank, form)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(flat(model))
            if wire is not None:
                wire.close()
        found[form] = torch.equal(*ends)
    return found


def test_fsdp2_exchanges_both_passes_of_such_programs():
    assert ranks.run(_lone_passes, 2) == [{"one forward": True, "two forwards": True}] * 2


# ------------------------------------------------------------------------------ weights that are not contiguous, on DDP


class Ordered(nn.Module):
    """The same weights in two orders in memory. Their gradients follow the weights, element by element."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        kernel, matrix, plain = torch.randn(24, 8, 3, 3), torch.randn(40, 48), torch.randn(16, 32)
        if not contiguous:
            kernel, matrix = kernel.to(memory_format=torch.channels_last), matrix.t().contiguous().t()
        self.kernel, self.matrix, self.plain = nn.Parameter(kernel), nn.Parameter(matrix), nn.Parameter(plain)

    def forward(self, step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        total = torch.zeros(())
        for parameter in self.parameters():
            given = torch.randn(parameter.shape, generator=generator)
            total = total + (parameter * given).sum() + (parameter * parameter).sum() / 4
        return total


def _ordered(rank, world):
    def look(case):
        found, strides = [], []
        for contiguous in (True, False):
            model = build("ddp", world, net=lambda: Ordered(contiguous=contiguous))  # noqa: B023
            optimizer = case.make(model.parameters(), lr=0.05)
            wire = thinwire.compress(model, optimizer, case.method, steps=8)
            for step in range(5):
                with wire.accumulate():
                    model(step, rank).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(flat(model))
            strides.append([parameter.is_contiguous() for parameter in model.parameters()])
            wire.close()
        return {"apart": float((found[0] - found[1]).abs().max()), "strides": strides}

    return findings(spread(2, on("ddp")), look)


def test_the_order_of_a_weight_in_memory_changes_no_bit():
    def check(method, what):
        assert what["strides"] == [[True, True, True], [False, False, True]]
        return [f"weights differ by {what['apart']:.2g} from those in order"] * (what["apart"] > 0)

    each(ranks.run(_ordered, 2), "ddp", check)


# --------------------------------------------------------------------------------- optimizer.step() without an exchange


def _unsynced(model: nn.Module, engine: str):
    """The engine's own way to leave the exchange out."""
    if engine == "ddp":
        return model.no_sync()

    @contextlib.contextmanager
    def off():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return off()


def _inside_nodes(rank, world):
    model = build("hsdp", 4, net=Given)
    optimizer = torch.optim.AdamW(model.parameters())
    wire = thinwire.compress(model, optimizer, "int8(smallest=0)")
    model.set_requires_all_reduce(False)
    try:
        model(_given(0, rank)).backward()
    except thinwire.ThinwireError as error:
        return str(error)
    finally:
        wire.close()
    return "nothing is refused"


def test_a_sum_inside_nodes_alone_is_refused_by_name():
    assert all("set_requires_all_reduce(False)" in said for said in ranks.run(_inside_nodes, 4))


UNEXCHANGED = [
    Case("dense"), Case("int8(smallest=0)"), Case("topk(feedback='gradients', smallest=0, density=0.1)"),
    Case("scape(smallest=0, density=0.1, warmup=2)", "", "adams"),
]  # fmt: skip


def _unexchanged(rank, world, engine):
    """After two ordinary steps, one is tried on micro-batches none of which was the last."""

    def look(case):
        found: dict[str, Any] = {}
        for label, own, guard in (("accumulate", False, True), ("own", True, True), ("no guard", False, False)):
            ends = []
            for tried in (True, False):
                model = build(engine, world, net=Given)
                optimizer = case.make(model.parameters())
                wire = thinwire.compress(model, optimizer, case.method, steps=8, safety=thinwire.Safety(guard))
                for step in (0, 1):
                    with wire.accumulate():
                        model(_given(step, rank)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with _unsynced(model, engine) if own else wire.accumulate(last=False):
                    model(_given(2, rank)).backward()
                if tried:
                    before = flat(model)
                    found[f"{label}: raised"] = error_of(optimizer.step)
                    found[f"{label}: untouched"] = torch.equal(before, flat(model))
                with wire.accumulate():  # the last one comes after all
                    model(_given(3, rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                with wire.accumulate():
                    model(_given(4, rank)).backward()
                optimizer.step()
                ends.append((flat(model), wire.step, wire.skipped))
                wire.close()
            found[f"{label}: goes on"] = torch.equal(ends[0][0], ends[1][0]) and ends[0][1:] == ends[1][1:] == (4, 0)
        return found

    return findings(dealt(UNEXCHANGED, engine), look)


@pytest.mark.parametrize(("engine", "world"), alternating(0, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)]))
def test_a_step_without_an_exchange_is_refused_on_every_rank_and_the_next_one_works(engine, world):
    def check(method, what):
        wrong = []
        for label in ("accumulate", "own", "no guard"):
            raised = what[f"{label}: raised"]
            named = raised.startswith("ThinwireError") and "before gradients were exchanged" in raised
            wrong += [f"{label}: optimizer.step() {raised or 'took it without a word'}"] * (not named)
            wrong += [f"{label}: weights moved"] * (not what[f"{label}: untouched"])
            wrong += [f"{label}: with the last micro-batch it is not the step that it would have been"] * (
                not what[f"{label}: goes on"]
            )
        return wrong

    each(ranks.run(_unexchanged, world, engine), engine, check)


def _unused(rank, world):
    """DDP, without a gradient for ``lacks`` in the third step; with a bucket per parameter, and with one for all."""

    def look(case):
        found: dict[str, Any] = {}
        for (label, megabytes), lacks in spread(2, (("several buckets", 0.001), ("one bucket", 25)), ("w0", "w1")):
            model = build("ddp", world, net=Given, bucket_cap_mb=megabytes)
            optimizer = case.make(model.parameters())
            wire = thinwire.compress(model, optimizer, case.method, steps=8)
            for step in range(3):
                before, given = flat(model), _given(step, rank)
                if step == 2:
                    given.pop(lacks)
                with wire.accumulate():
                    model(given).backward()
                raised = error_of(optimizer.step)
                optimizer.zero_grad()
            untouched = torch.equal(before, flat(model))
            found[f"{label}, without {lacks}"] = {"name": lacks, "raised": raised, "untouched": untouched}
        return found

    return findings(spread(2, UNEXCHANGED), look)


def test_a_parameter_without_gradient_on_ddp_is_named_before_weights_move():
    """torch says so in the next forward pass only: when each rank has stepped with what it alone has."""

    def check(method, what):
        wrong = []
        for label in [key for key in what if key != "error"]:
            raised, name = what[label]["raised"], what[label]["name"]
            named = raised.startswith("ThinwireError") and f"{name} has no gradient" in raised
            wrong += [f"{label}: optimizer.step() {raised or 'took it without a word'}"] * (not named)
            wrong += [f"{label}: weights moved"] * (not what[label]["untouched"])
        return wrong

    each(ranks.run(_unused, 2), "ddp", check)


def _named(rank, world):
    """The cause of a missing exchange: a model that was converted."""
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        model = build("ddp", world, net=Given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        wire = thinwire.compress(model, optimizer, "dense")
        model.to(dtype)
        model(_given(0, rank)).backward()
        found[str(dtype)] = error_of(optimizer.step)
        wire.close()
    return found


def test_a_model_converted_later_is_named():
    for found in ranks.run(_named, 2):
        for dtype in ("float64", "bfloat16"):
            expected = f"w0 was float32 on cpu at compress() and is {dtype} on cpu now"
            assert expected in found[f"torch.{dtype}"], found


STRAYS = ("without a backward pass", "on one rank", "outside", "without one, before no_sync()")


def _strays(rank, world):
    """Is the run of each method the same where forward passes have no backward pass, or begin outside the block?"""

    def end(case, stray):
        model = build("ddp", world, net=Given)
        optimizer = case.make(model.parameters())
        wire = thinwire.compress(model, optimizer, case.method, steps=20)
        for step in range(4):
            if stray.startswith("without") or (stray == "on one rank" and step and rank == step % world):
                model(_given(99, rank))  # DDP now expects gradients, also in no_sync()
            for micro in range(3):
                given = _given(10 * step + micro, rank)
                if stray == "outside" and micro < 2:
                    output = model(given)
                    with wire.accumulate(last=False):
                        output.backward()
                else:
                    with model.no_sync() if "no_sync" in stray and micro < 2 else wire.accumulate(last=micro == 2):
                        model(given).backward()
            optimizer.step()
            optimizer.zero_grad()
        ended = flat(model), wire.ledger.stats()["wire_bytes_per_step"]
        wire.close()
        return ended

    def look(case):
        weights, sent = end(case, "")
        ends = {stray: end(case, stray) for stray in STRAYS}
        return {stray: torch.equal(of[0], weights) and of[1] == sent for stray, of in ends.items()}

    return findings(spread(2, on("ddp")), look)


def test_a_forward_pass_that_ddp_waits_for_in_vain_changes_nothing():
    """A loss that is only logged, a batch that is thrown away: stock DDP goes on, too."""
    each(
        ranks.run(_strays, 2), "ddp",
        lambda method, what: [f"another end with a pass {stray}" for stray in STRAYS if not what[stray]],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- after close()


def _closed(rank, world, engine):
    def look(case):
        model = build(engine, world, net=Given)
        optimizer = case.make(model.parameters())
        wire = thinwire.compress(model, optimizer, case.method, steps=8)
        with wire.accumulate():
            model(_given(0, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        equal = same_on_all_ranks(model)
        wire.close()
        with torch.no_grad():
            value = float(model(_given(1, rank)))
        return {
            "equal": equal, "value": value, "raised": error_of(lambda: model(_given(1, rank)).backward()),
            "accumulate": error_of(lambda: wire.accumulate(last=False).__enter__()),
        }  # fmt: skip

    return findings(spread(2, UNEXCHANGED), look)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_backward_pass_after_close_raises_and_a_forward_pass_does_not(engine):
    def check(method, what):
        kinds = ("ThinwireError", "RuntimeError") if engine == "ddp" else ("ThinwireError",)
        named = what["raised"].startswith(kinds) and "close()" in what["raised"]
        wrong = [] if named else [f"backward: {what['raised'] or 'trained on without a word'}"]
        return wrong + ["accumulate(last=False): taken"] * ("after wire.close()" not in what["accumulate"])

    each(ranks.run(_closed, 2, engine), engine, check)
