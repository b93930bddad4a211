"""A timeline has what a dry run counts and what a real run's ledger counts, in order, on any number of ranks."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import thinwire
from breadth import ALL, dealt, spread
from engines import adamw, build, train
from models import Net, loss_of
from ranks import run
from thinwire.base.knobs import knobs_of
from thinwire.methods import TABLE, Method, resolve
from thinwire.network.comm import local
from thinwire.plan.doubles import Watch
from thinwire.plan.dry_run import dry_run
from thinwire.predict.layouts import timeline_of, virtual_of
from thinwire.predict.timeline import Message, Pass, RecordedStep
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import ModelConfig

NAMES = [cls.name for cls in TABLE]
LINKS = ("inter", "intra")
ENGINES = [("ddp", None), ("ddp", True), ("fsdp2", None), ("fsdp2", True), ("hsdp", None)]
SHAPE = {"vocabulary": 96, "width": 64, "layers": 2}


def meta(**shape: int) -> Net:
    with torch.device("meta"):
        return Net(**{**SHAPE, **shape})


def method_of(name: str) -> Method:
    """With small tensors sent, and without a start."""
    method = resolve(name)
    for knob, value in (("smallest", 256), ("start", 0), ("warmup", 1), ("every", 2), ("refresh", 3)):
        if knob in {field.name for field in knobs_of(method)}:
            method = replace(method, **{knob: value})
    return method


def messages(step: RecordedStep, *, weights: bool) -> list[Message]:
    stretches = [*step.forward, *step.again] if weights else [*step.gradients, step.update]
    return [message for stretch in stretches for message in stretch.messages]


def total(found: Iterable[Message]) -> float:
    return sum(message.nbytes for message in found)


def both(found: Iterable[Message]) -> list[float]:
    """The mean rank's bytes by link."""
    found = list(found)
    return [sum(message.rank_bytes(link) for message in found) for link in LINKS]


@pytest.mark.parametrize("name", NAMES)
def test_its_sums_are_those_of_the_dry_run(name):
    for number, (engine, two_level) in enumerate(ENGINES):
        method = method_of(name)
        if engine not in method.engines or (two_level and not dealt([name], name, NAMES)):
            continue
        options = {"engine": engine, "nodes": (4, 2)[number % 2], "per_node": 2, "two_level": two_level}
        try:
            timeline = timeline_of(meta(), method, bucket_cap_mb=0.05, **options)
        except thinwire.ThinwireError as refused:
            assert two_level, refused
            continue
        method = method_of(name)
        virtual = virtual_of(meta(), method, bucket_cap_mb=0.05, **options)
        dry = dry_run(virtual.layout, *virtual.road(method, None, 10_000), virtual.comms, Watch())
        sent, calls = 0.0, Counter[str]()
        for step in timeline.steps:
            sent += step.share * total(messages(step, weights=False))
            for message in messages(step, weights=False):
                calls[message.verb] += step.share
        assert sent == pytest.approx(sum(dry.sent.values()))
        assert calls == pytest.approx(dict(dry.collectives))
        assert timeline.memory.method >= dry.memory.peak
        assert sum(step.share for step in timeline.steps) == pytest.approx(1)


class Real(NamedTuple):
    """A run's steps: bytes by link, those of them for weights, collectives by verb. Of the last: the optimizer's."""

    sent: list[tuple[list[float], float, dict[str, int]]]
    moments: int
    stepped: int


def really_sent(rank: int, world: int, kind: str, two_level: bool | None, names: list[str]) -> dict[str, Real | str]:
    found: dict[str, Real | str] = {}
    stepped = Counter[str]()
    module = sys.modules[torch.optim.Adam.__module__]
    adam = module.adam

    def counted(weights: list[Tensor], *others: Any, **how: Any) -> None:
        stepped[name] += sum(local(weight).numel() for weight in weights)
        adam(weights, *others, **how)

    module.adam = counted
    for name in names:
        method = method_of(name)
        options = {"bucket_cap_mb": 0.05} if kind == "ddp" else {}
        model = build(kind, world, net=lambda: Net(**SHAPE), **options)
        optimizer = method.OPTIMIZER(model.parameters(), lr=1e-3)
        try:
            wire = thinwire.compress(model, optimizer, method, two_level=two_level)
        except thinwire.ThinwireError as refused:
            found[name] = str(refused)
            continue
        train(model, optimizer, rank, range(5), wire)
        stepped.clear()
        train(model, optimizer, rank, range(5, 6), wire)
        moments = (local(tensor) for state in optimizer.state.values() for tensor in state.values() if tensor.dim())
        found[name] = Real(
            [([step.bytes[link] for link in LINKS], step.weight_bytes, dict(step.calls)) for step in wire.ledger.steps],
            sum(tensor.nbytes for tensor in moments), stepped[name],
        )  # fmt: skip
        wire.close()
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("engine", "two_level"), ENGINES if ALL else ENGINES[::2])
def test_every_step_sends_what_the_ledger_of_a_real_run_counts(engine, two_level):
    """By link, for the mean of the ranks: one of a node sends around a ring across nodes, and all send to peers.

    The optimizer steps and remembers what is foretold: not what the method steps in its place.
    """
    names = dealt(spread(2, [name for name in NAMES if engine in resolve(name).engines]), (engine, two_level), ENGINES)
    real = run(really_sent, 4, engine, two_level, names, LOCAL_WORLD_SIZE="2")
    for name in names:
        method, options = method_of(name), {"engine": engine, "nodes": 2, "per_node": 2, "two_level": two_level}
        if isinstance(real[0][name], str):
            with pytest.raises(thinwire.ThinwireError) as refused:
                timeline_of(meta(), method, **options)
            assert str(refused.value) == real[0][name]
            continue
        timeline = timeline_of(meta(), method, bucket_cap_mb=0.05, gloo=True, **options)
        numbers = [number + (share == 1) for number, share in method.card.steady_steps.items()]
        for number, step in zip(numbers, timeline.steps, strict=True):
            ranks = [of_rank[name].sent[number] for of_rank in real]
            sent = [sum(of[0][i] for of in ranks) / len(ranks) for i in range(2)]
            gathered, calls = sum(of[1] for of in ranks) / len(ranks), ranks[0][2]
            weights, gradients = messages(step, weights=True), messages(step, weights=False)
            planned = both([*weights, *gradients])
            if method.card.bytes_follow_data:
                assert all(few <= many * (1 + 1e-9) for few, many in zip(sent, planned, strict=True)), name
            else:
                assert planned == pytest.approx(sent), (name, number)
            assert total(weights) == pytest.approx(gathered), (name, number)
            if number or engine != "ddp":  # in its very first backward pass DDP has other buckets
                assert Counter(message.verb for message in (*weights, *gradients)) == calls, (name, number)
        assert timeline.memory.optimizer == real[0][name].moments, name
        assert method.OPTIMIZER is not torch.optim.AdamW or timeline.optimizer_bytes == 28 * real[0][name].stepped, name


def accumulating(rank: int, world: int, names: list[str]) -> list[float]:
    sent = []
    for name in names:
        model = build("fsdp2", world, net=lambda: Net(**SHAPE))
        optimizer = thinwire.AdamS(model.parameters(), lr=1e-3) if name == "scape" else adamw(model)
        wire = thinwire.compress(model, optimizer, method_of(name))
        for step in range(5):
            for micro_batch in range(3):
                with wire.accumulate(last=micro_batch == 2):
                    loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        sent.append(sum(wire.ledger.steps[-1].bytes.values()))
        wire.close()
    return sent


def test_micro_batches_send_what_the_ledger_of_a_real_run_counts():
    """Weights are gathered in each, but those of which a method sends what changed, once."""
    names = ["dense", "sdp4bit", "trickle:merged"]
    real = run(accumulating, 2, names, LOCAL_WORLD_SIZE="2")
    for name, *of_ranks in zip(names, *real, strict=True):
        timeline = timeline_of(meta(), method_of(name), engine="fsdp2", nodes=1, per_node=2, gloo=True)
        assert total(timeline.steps[-1].sent(3)) == pytest.approx(sum(of_ranks) / 2), name


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_other_names_change_nothing(engine):
    model, renamed = meta(), nn.Module()
    renamed.a, renamed.b, renamed.c = model.embedding, model.blocks, model.head
    for name in ("int8", "sdp4bit", "trickle"):
        first, second = (
            [stretch.events for step in timeline_of(
                of, method_of(name), engine=engine, nodes=2, per_node=2).steps for stretch in step.stretches]
            for of in (model, renamed)
        )  # fmt: skip
        assert first == second


def total_of(step: RecordedStep) -> tuple[float, float]:
    passes = sum(event.nbytes for of in step.stretches for event in of.events if isinstance(event, Pass))
    return total(messages(step, weights=False)), passes


@pytest.mark.parametrize("engine", ["ddp", "hsdp"])
def test_a_ring_of_many_ranks_sends_what_one_of_more_does(engine):
    few, many = (
        sum(message.nic_bytes for step in timeline_of(meta(), "dense", engine=engine, nodes=nodes, per_node=8).steps
            for stretch in step.stretches for message in stretch.messages)
        for nodes in (512, 2048)
    )
    assert many == pytest.approx(few, rel=2e-3 if engine == "hsdp" else 1e-3) and many != few


@dataclass
class Halved(Method):
    """A method that nobody else knows."""

    name: ClassVar[str] = "halved"

    def describe(self):
        return replace(super().describe(), native=False)

    def reduce(self, bucket, exchange):
        exchange.mean(bucket)
        bucket.mean.mul_(0.5)


def test_a_method_of_the_user_is_recorded():
    halved, dense = (
        timeline_of(meta(), method, engine="ddp", nodes=2, per_node=2, bucket_cap_mb=100).steps[0]
        for method in (Halved(), "dense")
    )
    assert total_of(halved)[0] == total_of(dense)[0]
    kernels = [event.kernel for event in halved.gradients[0].events if isinstance(event, Pass)]
    assert kernels.count("aten.mul_") == 2 + (len(halved.gradients) > 1)  # the mean's, and its own


@pytest.mark.parametrize("name", spread(3, ["trickle", "int8", "scape", "sdp4bit"]))
def test_seven_billion_values_on_16384_ranks_take_seconds(name):
    """Of the processor, which other tests use, too; and no memory of the model's size."""
    shape = ModelConfig("llama", layers=32, width=4096, heads=32, hidden=11008, vocabulary=32000)
    with torch.device("meta"):
        model = Decoder(shape)
    began = time.process_time()
    timeline = timeline_of(model, name, engine="fsdp2", nodes=2048, per_node=8)
    assert time.process_time() - began < 6
    assert sum(timeline.numel.values()) > 6.7e9 and len(timeline.steps[0].gradients) == 33
