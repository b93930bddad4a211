"""A timeline has what a dry run counts and what a real run's ledger counts, in order, on any number of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

import thinwire
from breadth import dealt
from models import Net
from thinwire.base.knobs import knobs_of
from thinwire.methods import TABLE, Method, resolve
from thinwire.plan.doubles import Watch
from thinwire.plan.dry_run import dry_run
from thinwire.predict.layouts import timeline_of, virtual_of
from thinwire.predict.timeline import Message, RecordedStep

NAMES = [cls.name for cls in TABLE]
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
        dry = dry_run(virtual.layout, *virtual.road(method, None, None, 10_000), virtual.comms, Watch())
        sent, calls = 0.0, Counter[str]()
        for step in timeline.steps:
            sent += step.share * total(messages(step, weights=False))
            for message in messages(step, weights=False):
                calls[message.verb] += step.share
        assert sent == pytest.approx(sum(dry.sent.values()))
        assert calls == pytest.approx(dict(dry.collectives))
        assert timeline.memory.method_peak >= dry.memory.peak
        assert sum(step.share for step in timeline.steps) == pytest.approx(1)
