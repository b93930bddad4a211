"""A copy of a compressed DDP model (an EMA's, say) is a model of its own: it shares nothing, and can be compressed."""

from __future__ import annotations

import copy
import io
import warnings

import torch
from torch.optim.swa_utils import AveragedModel

import ranks
import thinwire
from breadth import dealt
from engines import build, refusal, train
from models import flat
from thinwire.methods import TABLE, LocalSteps
from thinwire.proof.record import small


def _through_bytes(model):
    """As torch.save and torch.load do it."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "AveragedModel": lambda model: AveragedModel(model).module, "save": _through_bytes}


def _begin(model, cls):
    optimizer = cls.OPTIMIZER(model.parameters(), lr=1e-3)
    return model, optimizer, thinwire.compress(model, optimizer, small(cls), steps=100)


def _advance(run, rank, steps):
    train(run[0], run[1], rank, steps, run[2])
    return flat(run[0])


def _copied(rank, world):
    warnings.simplefilter("ignore")
    broken = []
    cases = [(cls, list(COPIES)[number % len(COPIES)]) for number, cls in enumerate(
        dealt((cls for cls in TABLE if "ddp" in cls.engines), "ddp"))]  # fmt: skip
    for number, (cls, how) in enumerate([*cases, (LocalSteps, "save")]):  # it has a hook in the model itself
        first, undisturbed = (_begin(build("ddp", world), cls) for _ in range(2))
        for run in (first, undisturbed):
            _advance(run, rank, range(3))
        if kept := number % 2 == 0:
            first[0].wire = first[2]  # as docs/integrations.md does
        if closed := number % 4 == 1:
            first[2].close()
        copied, fresh = COPIES[how](copy.deepcopy(first[0])), build("ddp", world)
        if kept and "this is a copy" not in refusal(lambda copied=copied: copied.wire.step):
            broken.append(f"{cls.name}, {how}: the copy's wire does not say that it is one")
        fresh.load_state_dict(first[0].state_dict())
        weights, sent = [], []
        for model in (copied, fresh):
            run = _begin(model, cls)
            weights.append(_advance(run, rank, range(3, 6)))
            sent.append(run[2].ledger.stats()["wire_bytes_per_step"])
            run[2].close()
        if not torch.equal(*weights) or sent[0] != sent[1]:
            broken.append(f"{cls.name}, {how}: the copy does not train as such a model does")
        if not closed:
            if not torch.equal(_advance(first, rank, range(3, 6)), _advance(undisturbed, rank, range(3, 6))):
                broken.append(f"{cls.name}, {how}: the model has another end than without a copy")
            first[2].close()
        undisturbed[2].close()
    return broken


def test_a_copy_of_a_compressed_model_is_compressed_as_any_model():
    for broken in ranks.run(_copied, 2):
        assert not broken
