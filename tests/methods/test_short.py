"""Runs of a few steps, as of a smoke test: every method and preset takes them, whatever share of a run its start is."""

from __future__ import annotations

import torch

import ranks
import thinwire
from engines import build, train
from thinwire import methods
from thinwire.base.errors import ThinwireError

MAKES = {"scape": thinwire.AdamS, "dgc": torch.optim.SGD}
NAMES = [name for cls in methods.TABLE for name in (cls.name, *(f"{cls.name}:{preset}" for preset in cls.PRESETS))]


def _short(rank, world):
    said = {}
    for name in NAMES:
        for steps in (1, 3):
            model = build("ddp", world)
            optimizer = MAKES.get(name.partition(":")[0], torch.optim.AdamW)(model.parameters(), lr=1e-3)
            try:
                wire = thinwire.compress(model, optimizer, name, steps=steps)
            except ThinwireError as error:
                said[name, steps] = str(error)
                continue
            losses = train(model, optimizer, rank, range(steps), wire)
            if wire.step != steps or not torch.tensor(losses).isfinite().all():
                said[name, steps] = f"{wire.step} steps, losses {losses}"
            wire.close()
    return said


def test_every_method_trains_for_a_few_steps():
    for said in ranks.run(_short, 2):
        assert said == {}
