"""Timelines written by hand, for tests of what is made of them: one buffer for each module, a ring or peers."""

from __future__ import annotations

from torch import nn

from thinwire.base.errors import ThinwireError
from thinwire.predict.timeline import Group, Memory, Message, Pass, RecordedStep, Stretch, Timeline

BITS = {"dense": 32, "bf16": 16, "int8": 8, "sign": 1}
"""Made-up methods -> bits per value. All but dense also have a kernel of 40 bytes per value."""


def hand_made(model: nn.Module, method: str, *, ranks: int, per_node: int) -> Timeline:
    """Make the timeline of a made-up method."""
    if method not in BITS:
        raise ThinwireError(f"unknown method '{method}'")
    group, buffers = Group(ranks, per_node), []
    names_by_module: dict[str, list[str]] = {}
    numel = {name: parameter.numel() for name, parameter in model.named_parameters()}
    for name in numel:
        names_by_module.setdefault(name.rpartition(".")[0], []).append(name)
    for names in reversed(list(names_by_module.values())):
        values = sum(numel[name] for name in names)
        sent = 2 * (ranks - 1) / ranks * values * BITS[method] / 8
        ring = Message("all_reduce", sent, group, 2 * (ranks - 1))
        kernels = () if method == "dense" else (Pass(f"{method}.encode", 40 * values),)
        buffers.append(Stretch(tuple(names), (*kernels, ring)))
    step = RecordedStep(1.0, (), (), tuple(buffers), Stretch((), ()))
    total = sum(numel.values())
    memory = Memory(4 * total, 4 * total, 8 * total, 0 if method == "dense" else 4 * total)
    return Timeline(method, ranks, per_node, numel, (step,), memory, 28 * total, ("padding is 3%",))
