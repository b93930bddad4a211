"""The state of a wire beside a framework's checkpoint: of these weights, on all ranks, or of none."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import ranks
from engines import build
from frameworks import launched, needs, net
from models import loss_of
from thinwire.adapters import files
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.network.comm import local
from thinwire.wire import Wire, compress

STALE = "belongs to other weights than those that were loaded"


def _made(engine: str, world: int, method: str) -> tuple[torch.nn.Module, torch.optim.Optimizer, Wire]:
    model = build(engine, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, compress(model, optimizer, method, steps=40)


def _lives(rank: int, world: int, engine: str, method: str, folder: str) -> dict[str, object]:
    """Save after six steps; load beside the same weights, beside others, and where the file of rank 1 is gone."""
    model, optimizer, wire = _made(engine, world, method)
    for step in range(6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    files.save(wire, Path(folder))
    saved, weights = wire.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    if engine == "ddp":  # a framework keeps rank 0's
        for value in weights.values():
            torch.distributed.broadcast(value, 0)
    wire.close()
    facts: dict[str, object] = {}
    for case in ("same", "changed on one rank", "lost"):
        model, optimizer, wire = _made(engine, world, method)
        model.load_state_dict(weights)
        empty = {key: value.clone() for key, value in wire.state_dict().items()}
        if case.startswith("changed") and rank == 0:
            with torch.no_grad():
                last = [local(weight) for weight in model.parameters() if local(weight).numel()][-1]
                last.view(-1)[-1] += 1e-3
        if case == "lost" and rank == 1:
            next(Path(folder).glob("rank-0001*")).unlink()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                files.load(wire, Path(folder))
            except ThinwireError as error:
                facts[f"{case}: refused"] = str(error)
        expected = saved if case == "same" else empty
        now = wire.state_dict()
        facts[case] = now.keys() == expected.keys() and all(torch.equal(now[key], expected[key]) for key in now)
        facts[f"{case}: said"] = [str(word.message) for word in caught if word.category is ThinwireWarning]
        wire.close()
    return facts


@pytest.mark.parametrize(
    ("engine", "method"),
    [
        ("ddp", "topk(feedback='gradients',smallest=0,density=0.05)"),
        ("ddp", "local-steps(every=4)"),  # in the middle of a round: rank 1 has weights of its own
        ("fsdp2", "trickle(smallest=0,density=0.05)"),
    ],
)
def test_a_state_is_loaded_with_the_weights_that_it_was_saved_with_or_on_no_rank(tmp_path, engine, method):
    for rank, facts in enumerate(ranks.run(_lives, 2, engine, method, str(tmp_path))):
        assert facts["same"] and facts["same: said"] == []
        assert facts["changed on one rank"] and facts["lost"]
        said = facts["changed on one rank: said"]
        assert [STALE in line for line in said] == ([True] if rank == 0 else [])
        assert "is missing" in facts["lost: refused"]


def _overwritten(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    """A folder that each save overwrites, by a program with Thinwire, by one without, and again by one with it."""
    launched(rank, world)
    from accelerate import Accelerator

    from thinwire.adapters import accelerate

    for life, thin in enumerate((True, False, True)):
        accelerator = Accelerator()
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        wire = accelerate.compress(accelerator, model, optimizer, "trickle(smallest=0)", steps=20) if thin else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if life:
                accelerator.load_state(folder)
        resumed = wire.step if wire else 0
        for step in range(3):
            accelerator.backward(loss_of(model, 3 * life + step, rank))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(folder)
        if wire is not None:
            wire.close()
        accelerator.free_memory()
    return resumed, [str(word.message) for word in caught if word.category is ThinwireWarning]


@needs("accelerate")
def test_a_checkpoint_that_a_program_without_thinwire_has_replaced_is_not_taken_for_ours(tmp_path):
    (step, said), (other, _) = ranks.run(_overwritten, 2, str(tmp_path), warm="warm_frameworks")
    assert step == other == 0
    assert len(said) == 1 and STALE in said[0]
