"""Engines without processes have the buffers, groups and parameters of those with processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import thinwire
from engines import adamw, build
from models import Net
from ranks import run
from thinwire.core.bucket import Layout
from thinwire.core.exchange import Exchange
from thinwire.core.road import Levels
from thinwire.methods import resolve
from thinwire.network.comm import local
from thinwire.predict.layouts import timeline_of, virtual_of

CASES = {  # the model, the engine's options, those of the virtual one
    "ddp": ({}, {"bucket_cap_mb": 0.01}, {"bucket_cap_mb": 0.01}),
    "ddp, torch's buckets": ({"layers": 4, "width": 128}, {"bucket_cap_mb": None}, {}),
    "ddp, tied": ({"tied": True}, {"bucket_cap_mb": 0.02}, {"bucket_cap_mb": 0.02}),
    "ddp, two levels": ({}, {"bucket_cap_mb": 0.01}, {"bucket_cap_mb": 0.01, "two_level": True}),
    "fsdp2": ({}, {}, {}),
    "fsdp2, tied": ({"tied": True, "width": 20}, {}, {}),
    "fsdp2, bf16": (
        {}, {"policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"gather_dtype": torch.bfloat16},
    ),
    "fsdp2, two levels": ({}, {}, {"two_level": True}),
    "hsdp": ({}, {}, {}),
}  # fmt: skip


def freeze(model: nn.Module) -> None:
    model.blocks[0].up.weight.requires_grad_(False)


def described(
    layout: Layout, hops: tuple[Exchange, ...], levels: Levels | None, parameters: Any, shapes: Any
) -> dict[str, Any]:
    return {
        "buffers": list(layout.buffers), "dtypes": list(layout.dtypes), "shards": list(layout.shards),
        "gathered over": None if layout.comm is None else layout.comm.nodes,
        "hops": [(type(hop).__name__, hop.comm.nodes, hop.divide) for hop in hops],
        "levels": None if levels is None else {type(levels).__name__: (
            levels.stock.comm.nodes, getattr(levels, "widths", None), getattr(levels, "local", None))},
        "parameters": list(parameters.values()), "shapes": shapes,
    }  # fmt: skip


def real_engines(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for case, (shape, options, virtual) in CASES.items():
        kind = case.partition(",")[0]
        model = build(kind, world, net=lambda shape=shape: Net(**shape), prepare=freeze, **options)
        wire = thinwire.compress(model, adamw(model), "int8", two_level=virtual.get("two_level"))
        engine, weights = wire.engine, wire._run.weights
        shapes = {name: tuple(local(weight).shape) for name, weight in weights.items()}
        layout = engine.layout()
        found[case] = described(layout, engine.hops, engine.levels, engine.parameters, shapes)
        wire.close()
    return found


def test_they_are_those_of_real_engines():
    real = run(real_engines, 4, LOCAL_WORLD_SIZE="2")[0]
    for case, (shape, _, options) in CASES.items():
        with torch.device("meta"):
            model = Net(**shape)
        freeze(model)
        kind, method = case.partition(",")[0], resolve("dense" if "torch" in case else "int8")
        virtual = virtual_of(model, method, engine=kind, nodes=2, per_node=2, **options)
        way = virtual.way
        made = described(virtual.layout, way.hops, way.levels, way.parameters, dict(virtual.shapes))
        for what, value in real[case].items():
            assert made[what] == value, (case, what)


def meta(**shape: int) -> Net:
    with torch.device("meta"):
        return Net(**shape)


def test_only_what_an_engine_carries():
    with pytest.raises(thinwire.ThinwireError, match="runs on ddp, hsdp only"):
        timeline_of(meta(), "local-steps", engine="fsdp2", nodes=2, per_node=2)
    with pytest.raises(thinwire.ThinwireError, match="what HSDP does anyway"):
        timeline_of(meta(), "int8", engine="hsdp", nodes=2, per_node=2, two_level=True)
    model = meta()
    model.requires_grad_(False)
    with pytest.raises(thinwire.ThinwireError, match="no parameter"):
        timeline_of(model, "int8", engine="ddp", nodes=2, per_node=2)


def test_padding_of_dim_0_is_told():
    few, many = (timeline_of(meta(), "dense", engine="fsdp2", nodes=nodes, per_node=1) for nodes in (3, 64))
    assert not few.notes and "a multiple of 64 ranks" in many.notes[0]


def test_a_users_modules_are_sharded_as_the_user_says():
    names = [
        {stretch.parameters for stretch in timeline_of(
            meta(layers=2), "dense", engine="fsdp2", nodes=2, per_node=1, wrap=wrap).steps[0].gradients}
        for wrap in (None, lambda name, module: isinstance(module, nn.Linear), lambda name, module: False)
    ]  # fmt: skip
    assert [len(each) for each in names] == [3, 6, 1]
    assert ("blocks.0.up.weight", "blocks.0.up.bias") in names[1]
