"""Steps along Muon's direction on the engines, with the user's own ``torch.optim.Muon`` and AdamW."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import ranks
import thinwire
from breadth import ALL, spread
from engines import build, same_on_all_ranks, train
from models import flat, loss_of
from thinwire.base.errors import ThinwireError
from thinwire.network.comm import local

SPEC = "trickle:muon(smallest=100)"


class Pair:
    """Muon of the hidden matrices and AdamW of the rest, as one object for a training loop."""

    def __init__(self, model: torch.nn.Module, kind: str) -> None:
        weights = dict(model.named_parameters())
        self.hidden = {n: w for n, w in weights.items() if w.dim() == 2 and "embed" not in n and "head" not in n}
        if kind == "adamw":
            self.hidden = {}
        rest = [weight for name, weight in weights.items() if name not in self.hidden]
        self.adamw = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95))
        self.each: list[Any] = [self.adamw]
        if self.hidden:
            self.muon = torch.optim.Muon(self.hidden.values(), lr=6e-3, adjust_lr_fn="match_rms_adamw")
            self.each.append(self.muon)

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()


def begun(
    engine: str, world: int, kind: str = "muon", method: str = SPEC
) -> tuple[torch.nn.Module, Pair, thinwire.Wire]:
    model = build(engine, world)
    pair = Pair(model, kind)
    return model, pair, thinwire.compress(model, pair.each, method)


def _on_engines(rank: int, world: int) -> list[str]:
    found = []
    for engine in spread(2, ["ddp", "fsdp2", "hsdp"]):
        model, pair, wire = begun(engine, world)
        train(model, pair, rank, range(3), wire)
        saved = (
            {name: value.clone() for name, value in model.state_dict().items()},
            [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.each],
            wire.state_dict(),
        )
        momenta = [state.get("momentum_buffer") for state in saved[1][1]["state"].values()]
        if len(momenta) != len(pair.hidden) or not all(m is not None and local(m).any() for m in momenta):
            found.append(f"{engine}: a checkpoint of Muon lacks momenta")
        losses = train(model, pair, rank, range(3, 6), wire)
        plain = flat(model)
        if not same_on_all_ranks(model):
            found.append(f"{engine}: ranks differ")
        planned, sent = wire.plan.wire_bytes, sum(wire.stats()["wire_bytes_per_step"].values())
        if engine == "ddp" and planned != sent:  # the others gather weights besides
            found.append(f"{engine}: planned {planned}, sent {sent}")
        if any(optimizer.state for optimizer in pair.each if optimizer is not pair.adamw):
            found.append(f"{engine}: Muon made momenta of its own")
        wire.close()

        model, pair, wire = begun(engine, world)
        model.load_state_dict(saved[0])
        for optimizer, state in zip(pair.each, saved[1], strict=True):
            optimizer.load_state_dict(state)
        wire.load_state_dict(saved[2])
        train(model, pair, rank, [3], wire, poison=(3, 0))
        again = train(model, pair, rank, range(3, 6), wire)
        if wire.skipped != 1 or again != losses or not torch.equal(plain, flat(model)):
            found.append(f"{engine}: resumed and skipped, it is another run")
        wire.close()

        model, pair, wire = begun(engine, world, "adamw")
        try:
            wire.load_state_dict(saved[2])
            found.append(f"{engine}: AdamW took Muon's momenta for second moments")
        except ThinwireError as error:
            if "seen" not in str(error) and "turned" not in str(error):
                found.append(f"{engine}: {error}")
        wire.close()
    return found


def test_muon_and_adamw_on_every_engine():
    """Resumed and with a skipped step it is the same run, bit for bit; Muon's own momenta are never made."""
    for found in ranks.run(_on_engines, 4, LOCAL_WORLD_SIZE="2"):
        assert not found, "\n".join(found)


def _handed_over(rank: int, world: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Muon's momentum after ``wire.hand_over()``, and that of dense Muon, of the same gradients, none clipped."""
    momenta = []
    for method in (SPEC, "dense"):
        model, pair, wire = begun("ddp", world, method=method)
        for group in (group for optimizer in pair.each for group in optimizer.param_groups):
            group["lr"] = 1e-12  # weights stay: both see the same gradients
        for step in range(3):
            loss_of(model, step, rank).backward()
            pair.step()
            pair.zero_grad()
        wire.hand_over()
        momenta.append([pair.muon.state[weight]["momentum_buffer"].numpy() for weight in pair.hidden.values()])
        wire.close()
    return list(zip(*momenta, strict=True))


def test_what_is_handed_over_is_dense_muons_momentum():
    """A momentum is a sum: that of the mean gradient is the mean of the ranks'."""
    for ours, dense in ranks.run(_handed_over, 2)[0]:
        np.testing.assert_allclose(ours, dense, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(not ALL, reason="three more starts of ranks: make test-all")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp"])
def test_it_learns_as_on_ddp(engine):
    for losses in ranks.run(_learns, 4, engine, LOCAL_WORLD_SIZE="2"):
        assert losses[-1] < losses[0]


def _learns(rank: int, world: int, engine: str) -> list[float]:
    model, pair, wire = begun(engine, world)
    losses = train(model, pair, rank, [0] * 12, wire)
    wire.close()
    return losses
