"""A parameter that is frozen in mid-run keeps its bits, or is refused: neither what waits of it nor moments move it."""

from __future__ import annotations

import pytest
import torch

import ranks
import thinwire
from engines import build
from models import flat
from test_edges import CASES, SHAPES, Case, Given, each, findings, full, on, parts

FREEZING = [*(case for case in CASES if case.name != "none"), Case("local-steps(every=2)")]
"""All methods but the one whose ranks differ; the last one's outer momentum is not 0, and a round ends at FROZEN_AT."""
STEPS, FROZEN_AT = 7, 4


def _freeze(rank, world, engine):
    def look(case):
        model = build(engine, world, net=Given)
        optimizer = case.make(model.parameters())
        wire = thinwire.compress(model, optimizer, case.method, steps=STEPS)
        weights, kept = parts(model), torch.zeros(())
        generator = torch.Generator().manual_seed(100 + rank)
        said, before = "", flat(model)
        try:
            for step in range(STEPS):
                if step == FROZEN_AT:
                    weights["w1"].requires_grad_(False)
                    kept, before = full(weights["w1"]).clone(), flat(model)
                model({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}).backward()
                optimizer.step()
                optimizer.zero_grad()
        except thinwire.ThinwireError as error:
            said = str(error)
        found = {
            "said": said,
            "kept": torch.equal(kept, full(weights["w1"])),
            "moved": not torch.equal(before, flat(model)),
        }
        wire.close()
        return found

    few = FREEZING[::6]  # DDP refuses them all
    return findings(on("ddp", few) if engine == "ddp" else on(engine, FREEZING, ("fsdp2", "fsdp2", "hsdp")), look)


@pytest.mark.parametrize(("engine", "world"), [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)])
def test_a_parameter_that_is_frozen_in_mid_run_rests_or_is_refused(engine, world):
    def check(method, what):
        if what["said"]:
            return [f"refused without its name: {what['said']}"] * ("w1" not in what["said"])
        return ["a frozen parameter moved"] * (not what["kept"]) + ["nothing else moved"] * (not what["moved"])

    each(ranks.run(_freeze, world, engine), engine, check)
