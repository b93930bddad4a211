"""A batch that one rank, or one replica, drops after backward() while ranks step alone: its round has the step, too.

The law, over engines and ways to drop a batch, in the middle of a round, at its end and at the end of the run: a step
that is dropped is the step that the guard skips. All ranks count as many steps, nobody waits for ever, and after each
round the weights are the same bits on all ranks, and the bits of a run whose loss was not finite.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
import thinwire
from breadth import dealt, spread
from engines import adamw, build
from models import loss_of
from thinwire.base.errors import ThinwireWarning

STEPS = 7
METHODS = {
    "rounds": "local-steps(every=3, start=1, outer='int8(smallest=0)')",
    "fragments": "local-steps(every=4, fragments=2, delay=1)",
}
WAYS = {
    "to None": "zero_grad() at once",
    "to zeros": "zero_grad(set_to_none=False) at once",
    "accumulated": "two passes inside accumulate(), and zero_grad() at once",
    "late": "zero_grad() in the next step, between its forward and its backward pass",
    "stepped": "zero_grad(), and step() all the same",
}
ENDS = ("close", "state_dict", "evaluate")
"""What comes after the last step."""


def _replica(kind: str, world: int) -> int:
    """The number of ranks that step together."""
    return world // 2 if kind == "hsdp" else 1


def own_weights(model: Any) -> Tensor:
    """This rank's own values of all weights, 1-D."""
    return torch.cat([getattr(p, "_local_tensor", p).detach().flatten().clone() for p in model.parameters()])


def _play(rank: int, world: int, kind: str, method: str, way: str, at: int, end: str, *, poison: bool) -> dict:
    """A run in which rank 1 (HSDP: node 1) drops step ``at``, or with ``poison`` has a loss that is not finite.

    No collective call but Thinwire's own: between a dropped step and the next pass a rank does not wait for others.
    """
    model = build(kind, world)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, METHODS[method], steps=STEPS)
    drops = rank // _replica(kind, world) == 1
    begun = []
    for step in range(STEPS):
        spoilt = step == at and drops
        for last in (False, True) if way == "accumulated" else (True,):
            with wire.accumulate(last=last):
                loss = loss_of(model, step, rank)
                begun.append(own_weights(model))
                if way == "late":
                    optimizer.zero_grad()
                (loss * (torch.nan if spoilt and poison else 1.0)).backward()
        wire.clip_grad_norm_(1.0)
        if not spoilt or poison:
            optimizer.step()
        if way != "late":
            optimizer.zero_grad(set_to_none=way != "to zeros")
        if spoilt and way == "stepped" and not poison:
            optimizer.step()
    if end == "state_dict":
        wire.state_dict()
    elif end == "evaluate":
        with torch.no_grad():
            loss_of(model, 99, rank)
    counts = wire.step, wire.skipped
    wire.close()
    return {"begun": torch.stack(begun).numpy(), "end": own_weights(model).numpy(), "counts": counts}


def _dropped(rank: int, world: int, cases: list[tuple]) -> list[tuple]:
    warnings.simplefilter("error", ThinwireWarning)
    warnings.filterwarnings("ignore", ".*thrown away after backward.*", ThinwireWarning)  # which is what is done here
    return [tuple(_play(rank, world, *case, poison=poison) for poison in (False, True)) for case in cases]


def _cases(kind: str) -> list[tuple]:
    every = []
    # In the middle of a round, at its end, at the end of the run.
    for method, way, at in spread(3, METHODS, WAYS, (2, 3, STEPS - 1)):
        if (way, at) != ("late", STEPS - 1):  # whose gradients are there to the end, and may still be used
            every.append((kind, method, way, at, ENDS[len(every) % len(ENDS)]))
    return every


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("ddp", 3), ("hsdp", 4), ("hsdp-1", 2)])
def test_a_dropped_step_is_a_skipped_one(kind, world):
    cases = dealt(_cases(kind), (kind, world), [("ddp", 2), ("ddp", 3), ("hsdp", 4), ("hsdp-1", 2)])
    found = ranks.run(_dropped, world, cases, LOCAL_WORLD_SIZE="2" if kind == "hsdp" else "1")
    wrong = []
    for number, case in enumerate(cases):
        _, _, way, at, end = case
        for rank in range(world):
            dropped, skipped = found[rank][number]
            steps, skips = skipped["counts"]
            if way == "stepped":  # a step that moves nothing
                skips = 0
            if (at, end) == (STEPS - 1, "close") and way != "stepped" and skips:  # it is known as the wire closes
                steps, skips = steps - 1, 0
            if dropped["counts"] != (steps, skips):
                wrong.append((case, rank, dropped["counts"], (steps, skips)))
            if (dropped["end"] != found[rank % _replica(kind, world)][number][0]["end"]).any():
                wrong.append((case, rank, "ranks are unlike in the end"))
            # A pass that began before its round was over has the gradient of other weights.
            if way != "late" and (dropped["begun"] != skipped["begun"]).any():
                wrong.append((case, rank, "other weights than those of a skipped step"))
    assert not wrong
