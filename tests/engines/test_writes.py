"""Weights that a program writes by itself, on one rank alone or on all: a gather brings them, or all ranks say why not.

Ranks choose what a gather sends. Modules are equal here, so that gloo lets a rank read another module's message.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ranks
import thinwire
from engines import build
from thinwire.base.errors import ThinwireError

METHODS = {  # and by how much rounding may move the output
    "dense": 0.0,
    "zeropp(smallest=0)": 0.1,
    "qsdp(smallest=0)": 0.1,
    "sdp4bit(smallest=0)": 0.1,
    "scape(smallest=0, density=0.1, warmup=1)": 1e-6,
    "trickle:merged(smallest=0, density=0.05)": 1e-6,
}
BETWEEN = ("forward", "micro-batch", "unshard", "prefetched", "step", "second step", "skipped step")
"""Before what of each step weights are written."""
SENDS_ALL = ("dense", "zeropp(smallest=0)", "qsdp(smallest=0)")
WORLDS = {"fsdp2": 2, "fsdp2-keep": 2, "hsdp": 4}
DATA = (
    "blocks.0.weight, or a weight of the same module, was changed through .data, which torch does not notice: call "
    "wire.weights_changed() after that, on all ranks, or write parameter.copy_(...)"
)
OTHER = "another rank cannot take this step: see its message"


class Equal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


class Program:
    """Training of ``Equal``, whose outputs are compared with those of a model that was given the whole weights."""

    def __init__(self, kind: str, rank: int, world: int, method: str, writers: set[int]) -> None:
        self.model, self.plain = build(kind, world, net=Equal), Equal()
        weights = list(self.model.parameters())
        make = thinwire.AdamS if method.startswith("scape") else torch.optim.AdamW
        self.optimizers = [make(weights[:4], lr=1e-2), make(weights[4:], lr=1e-2)]
        self.wire = thinwire.compress(self.model, self.optimizers, method)
        self.rank, self.writes, self.off, self.spoilt = rank, rank in writers, 0.0, False

    def write(self, *, data: bool = False) -> None:
        """Cut off what stands out of some rows of a shard, as a projection does, and shift it."""
        if self.writes:
            rows = self.model.blocks[0].weight.to_local()
            with torch.no_grad():
                (rows.data if data else rows)[:4].clamp_(-0.05, 0.05).add_(0.3)

    def forward(self, number: int):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * number + self.rank))
        self.plain.load_state_dict({key: of.full_tensor() for key, of in self.model.state_dict().items()})
        out = self.model(x)
        self.off = max(self.off, (out - self.plain(x)).abs().max().item())
        return out.square().mean() * (torch.nan if self.spoilt else 1.0)

    def step(self, number: int, place: str = "", *, data: bool = False, told: bool = False) -> None:
        def turn(here: str) -> None:
            if place == here:
                self.write(data=data)
                if told:
                    self.wire.weights_changed()

        with self.wire.accumulate(last=False):
            self.forward(number).backward()
        turn("micro-batch")
        if place == "unshard":
            self.write(data=data)
            self.model.blocks[0].unshard()
        if place == "prefetched":
            self.write(data=data)
            self.model.set_modules_to_forward_prefetch([self.model.blocks[0]])
        self.spoilt = place == "skipped step"
        with self.wire.accumulate(last=True):
            loss = self.forward(number)
            turn("backward")
            loss.backward()
        self.spoilt = False
        turn("step")
        turn("skipped step")
        self.optimizers[0].step()
        turn("second step")
        self.optimizers[1].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        turn("forward")


def _between(rank, world, kind, writers):
    """By how much the outputs of each method are off after each place of the writes."""
    off = {}
    for method in METHODS:
        program = Program(kind, rank, world, method, writers)
        for number, place in enumerate(["micro-batch", *BETWEEN, ""]):  # the very first pass makes what others follow
            program.step(number, place)
            off[method, number, place], program.off = program.off, 0.0
        program.wire.close()
    return off


@pytest.mark.parametrize(
    ("kind", "writers"), [("fsdp2", {1}), ("fsdp2", {0, 1}), ("fsdp2-keep", {1}), ("hsdp", {1, 3})]
)
def test_the_next_forward_pass_has_what_was_written(kind, writers):
    for off in ranks.run(_between, WORLDS[kind], kind, writers):
        assert {key: by for key, by in off.items() if not by <= METHODS[key[0]]} == {}


def _refused(rank, world):
    """By how much outputs are off, or the error, by method, place of the write, way, and whether ranks were told."""
    outcomes = {}
    for method in METHODS:
        for place, data, told in (("forward", True, False), ("step", True, False), ("step", True, True),
                                  ("backward", False, False), ("backward", False, True)):  # fmt: skip
            program = Program("fsdp2", rank, world, method, {1})
            try:
                program.step(0, place, data=data, told=told)
                program.step(1)
                outcomes[method, place, data, told] = program.off
            except ThinwireError as error:
                outcomes[method, place, data, told] = str(error)
            program.wire.close()
    return outcomes


def test_what_no_gather_can_bring_is_refused_on_all_ranks():
    """A write through .data, of which nobody told; and, of weights that stay gathered, one inside a pass."""
    one, other = ranks.run(_refused, 2)
    for key in one:
        method, place, data, told = key
        if method != "dense" and data and not told:
            assert one[key] == other[key] == DATA, key
        elif method not in SENDS_ALL and place == "backward" and not told:
            assert one[key] == OTHER and other[key].startswith("blocks.0.weight, or a weight of the same"), key
        else:
            assert one[key] <= METHODS[method] and other[key] <= METHODS[method], key
