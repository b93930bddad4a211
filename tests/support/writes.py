"""A training whose program writes weights by itself, beside a model that has what every rank should have."""

from __future__ import annotations

import torch
from torch import nn

import thinwire
from engines import build

METHODS = {
    "dense": 0.0,
    "zeropp(smallest=0)": 0.1,
    "qsdp(smallest=0)": 0.1,
    "sdp4bit(smallest=0)": 0.1,
    "scape(smallest=0, density=0.1, warmup=1)": 1e-6,
    "trickle:merged(smallest=0, density=0.05)": 1e-6,
}
"""Each method with how far rounding may move an output."""
SENDS_ALL = ("dense", "zeropp(smallest=0)", "qsdp(smallest=0)")
DATA = (
    "blocks.0.weight, or a weight of the same module, was changed through .data, which torch does not notice: call "
    "wire.weights_changed() after that, on all ranks, or write parameter.copy_(...)"
)
MODULE = "blocks.0.weight, or a weight of the same module"
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

    def __init__(
        self, kind: str, rank: int, world: int, method: str, writers: set[int], *, device: str = "cpu", **options
    ) -> None:
        self.model, self.plain = build(kind, world, net=Equal, device=device, **options), Equal().to(device)
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

    def refresh(self) -> None:
        self.plain.load_state_dict({key: of.full_tensor() for key, of in self.model.state_dict().items()})

    def forward(self, number: int, *, refresh: bool = True):
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * number + self.rank))
        if refresh:
            self.refresh()
        x = x.to(next(self.plain.parameters()).device)
        out = self.model(x)
        self.off = max(self.off, (out - self.plain(x)).abs().max().item())
        return out.square().mean() * (torch.nan if self.spoilt else 1.0)

    def step(self, number: int, place: str = "", *, data: bool = False, told: bool = False) -> None:
        def turn(here: str) -> None:
            if place == here:
                self.write(data=data)
                if told:
                    self.wire.weights_changed()

        if place == "unshard before":
            self.model.blocks[1].unshard()
            self.write(data=data)
        if place == "prefetched":
            self.write(data=data)
            self.model.set_modules_to_forward_prefetch([self.model.blocks[0]])
        with self.wire.accumulate(last=False):
            self.forward(number).backward()
        turn("micro-batch")
        if place == "unshard":
            self.write(data=data)
            self.model.blocks[0].unshard()
        if place == "evaluations":
            self.evaluate(number)
            self.write(data=True)
            self.evaluate(number)
        self.spoilt = place == "skipped step"
        with self.wire.accumulate(last=True):
            loss = self.forward(number)
            turn("backward")
            loss.backward()
        self.spoilt = False
        turn("step")
        turn("skipped step")
        self.update(turn)
        turn("forward")

    def uneven_step(self, number: int, *, keep: bool) -> None:
        """Take one to three micro-batches, on each rank another number. ``keep``: without resharding in between."""
        count = 1 + (self.rank + number) % 3
        self.refresh()
        for micro in range(count):
            last = micro == count - 1
            self.model.set_reshard_after_backward(last or not keep)
            with self.wire.accumulate(last=last):
                self.forward(number + micro, refresh=False).backward()
        self.update()

    def evaluate(self, number: int, batches: int = 1) -> None:
        self.refresh()
        self.model.eval()
        with torch.no_grad():
            for batch in range(batches):
                self.forward(number + batch, refresh=False)
        self.model.train()
        for module in (self.model, *self.model.blocks):
            module.reshard()

    def update(self, turn=lambda here: None) -> None:
        self.optimizers[0].step()
        turn("second step")
        self.optimizers[1].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
