"""Two hops, inside a node and across: what waits, waits per node, and on every engine the second hop is the same."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import ranks
import thinwire
from breadth import spread
from engines import adamw, build, same_on_all_ranks, stats_of, train
from models import flat
from thinwire import methods
from thinwire.base.knobs import knobs_of
from thinwire.proof.record import small
from threaded import reduce_on_threads

STEPS = 6
SHAPES = {"a": (13, 11), "b": (5, 7), "c": (6, 1)}


def of_gradients(cls: type[methods.Method]) -> partial[methods.Method]:
    """``cls``, small, so that gradients wait, if it can be."""
    knobs = {"feedback": "gradients"} if "feedback" in {knob.name for knob in knobs_of(cls)} else {}
    return partial(small, cls, **knobs, **({"beta": None} if cls is methods.SEPARATE else {}))


KEEPS = [
    make for make in map(of_gradients, methods.TABLE)
    if (promise := make().card.promise).kind == "conserves" and promise.of == "gradients" and make().card.keeps_state
]  # fmt: skip
FEEDBACK = [
    *KEEPS, partial(small, methods.Int8, feedback="gradients"),
    partial(small, methods.LoCo, reset=0, beta=0),
]  # fmt: skip


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def chunks(values: torch.Tensor, shape: tuple[int, ...], many: int) -> torch.Tensor:
    """A parameter's values (numel,), or those of its padded rows, as (many, chunk of dim 0), zeros behind."""
    width = -(-shape[0] // many) * int(torch.tensor(shape[1:]).prod())
    found = torch.zeros(many * width, dtype=torch.float64)
    found[: values.numel()] = values.reshape(-1).double()
    return found.view(many, width)


@pytest.mark.parametrize(("make", "of"), spread(2, FEEDBACK, [(4, 2), (6, 2), (6, 3)]))
def test_what_a_node_sends_and_what_waits_there_is_what_its_ranks_had(make, of):
    """By the promise of a sum: over the nodes, means of their ranks = nodes * what arrived + what waits."""
    (size, per_node), method = of, make()
    nodes = size // per_node
    optimizer = (lambda weights: torch.optim.AdamW(weights, lr=1e-3)) if method.name == "radius" else None
    results = reduce_on_threads(
        make, gradients, topology="two_level", size=size, per_node=per_node, shapes=SHAPES, steps=STEPS,
        optimizer=optimizer,
    )  # fmt: skip
    place = 0
    for name, shape in SHAPES.items():
        numel = int(torch.tensor(shape).prod())
        at = slice(place, place + numel)
        place += numel
        had = sum(chunks(step["input"][at], shape, per_node) for rank in results for step in rank) / per_node
        arrived = nodes * sum(chunks(step["mean"][at], shape, per_node) for step in results[0])
        waits = torch.zeros_like(had)
        for number, rank in enumerate(results):
            for kind in method.card.promise.waits:
                if (values := rank[-1].get(f"{kind}/{name}")) is None:
                    continue
                own = kind == "server"  # a row that this node serves, which stands for all
                start = number // per_node * values.numel() if own else 0
                there = waits[number % per_node, start : start + values.numel()]
                there += values.reshape(-1)[: len(there)].double() * (nodes if own else 1)
        off = (had - arrived - waits).view(-1)[:numel]  # behind it, padding has no gradient to lose
        assert off.abs().max() < 1e-5 * STEPS * size, name


@pytest.mark.parametrize("method", ["int8(feedback='gradients', smallest=0)", "sdp4bit(smallest=0, send='*')",
                                    "topk(smallest=0, density=0.2, feedback='gradients')",
                                    "powersgd(smallest=0, rank=1, feedback='gradients')"])  # fmt: skip
def test_ddp_on_two_levels_is_hsdp(method):
    """Bit for bit: chunks of dim 0 are what HSDP's ranks hold."""
    found = {
        topology: reduce_on_threads(
            lambda: methods.resolve(method), gradients, topology=topology, size=4, per_node=2, shapes={"w": (8, 12)},
            steps=4,
        )
        for topology in ("two_level", "hsdp")
    }  # fmt: skip
    for rank, (whole, shard) in enumerate(zip(found["two_level"], found["hsdp"], strict=True)):
        for ours, theirs in zip(whole, shard, strict=True):
            assert torch.equal(ours["mean"].view(2, -1)[rank % 2], theirs["mean"])


def _trained(rank: int, world: int, kind: str, method: str) -> tuple:
    """Uninterrupted, and stopped and resumed after half of the steps."""

    def start():
        model = build(kind, world)
        optimizer = adamw(model)
        return model, optimizer, thinwire.compress(model, optimizer, method, two_level=True, steps=20)

    model, optimizer, wire = start()
    losses = train(model, optimizer, rank, range(4), wire)
    saved = {name: values.clone() for name, values in wire.state_dict().items()}
    weights = {name: values.clone() for name, values in model.state_dict().items()}
    moments = optimizer.state_dict()
    moments = {**moments, "state": {key: {k: v.clone() for k, v in of.items()} for key, of in moments["state"].items()}}
    losses += train(model, optimizer, rank, range(4, 8), wire)
    stats = stats_of(wire)
    sent = sum(stats["wire_bytes_per_step"].values()) - stats["weight_bytes_per_step"]
    surprise, equal, end = sent - wire.plan.wire_bytes, same_on_all_ranks(model), flat(model)
    wire.close()
    model, optimizer, wire = start()
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    wire.load_state_dict(saved)
    train(model, optimizer, rank, range(4, 8), wire)
    wire.close()
    return losses, surprise, equal, torch.equal(end, flat(model))


@pytest.mark.parametrize(("kind", "method"), spread(2, [
    ("ddp", "int8(feedback='gradients', smallest=100)"), ("ddp", "radius(smallest=100, start=0, T=2, density=0.3)"),
    ("fsdp2", "topk(feedback='gradients', smallest=100, density=0.2)"),
]))  # fmt: skip
def test_feedback_on_two_levels_trains_resumes_and_sends_what_is_planned(kind, method):
    for losses, surprise, equal, resumed in ranks.run(_trained, 4, kind, method, LOCAL_WORLD_SIZE="2"):
        assert losses[-1] < losses[0] - 0.05 and equal and resumed
        assert "radius" in method or abs(surprise) < 1e-6  # radius: an average over its period, from a dense first step


def _rounded(rank: int, world: int, kind: str) -> tuple[str, float]:
    model = build(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.compress(model, optimizer, "sdp4bit(smallest=0)")
    train(model, optimizer, rank, [0], wire)
    plan, bits = str(wire.plan), wire.method.facts()["bits per gradient"]
    wire.close()
    return plan, bits


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize(("per_node", "bits"), [(2, 8), (1, 4)])
def test_a_plan_says_to_as_many_bits_as_are_sent_where_it_runs(kind, per_node, bits):
    for plan, sent in ranks.run(_rounded, 2, kind, LOCAL_WORLD_SIZE=str(per_node)):
        assert f"rounding the gradients to {bits} bits" in " ".join(plan.split())
        assert bits < sent < 1.25 * bits  # with scales and padding


def _refused(rank: int, world: int) -> list[str]:
    found = []
    for method in ("scape(warmup=1)", "onebit-adam(warmup=1)"):
        model = build("ddp", world)
        kind = thinwire.AdamS if method.startswith("scape") else torch.optim.AdamW
        try:
            thinwire.compress(model, kind(model.parameters(), lr=1e-3), method, two_level=True)
        except thinwire.ThinwireError as error:
            found.append(str(error))
    return found


def test_methods_of_the_optimizers_moments_say_that_ddp_has_one_level():
    for found in ranks.run(_refused, 4, LOCAL_WORLD_SIZE="2"):
        assert len(found) == 2 and all("on DDP works on one level only" in line and "HSDP" in line for line in found)
