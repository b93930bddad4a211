"""Ranks whose kernels differ hold the same bits, or are refused by name in compress()."""

from __future__ import annotations

import importlib
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ranks
import thinwire
from breadth import ALL, dealt
from engines import build
from models import flat, loss_of
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.core.agreement import _check, host_facts
from thinwire.ops import backends
from thinwire.proof.record import small

BY_NAME = {cls.name: cls for cls in methods.TABLE}


def plain_torch(family: str, module: str, needs: str):
    """As where numba is not installed."""
    return importlib.import_module(f"{family}.reference")


def _unlike(rank, world, kind):
    """By method: "equal", "DIFFER", or what compress() says, where the last rank's kernels are plain torch."""
    warnings.simplefilter("ignore")
    if rank == world - 1:
        backends._load.cache_clear()
        backends._load = plain_torch
    said = {}
    for name in BY_NAME if ALL or kind == "ddp" else dealt(BY_NAME, kind):
        if kind not in BY_NAME[name].engines:
            continue
        model, method = build(kind, world), small(BY_NAME[name])
        optimizer = type(method).OPTIMIZER(model.parameters(), lr=1e-3)
        try:
            wire = thinwire.compress(model, optimizer, method, steps=100)
        except ThinwireError as refused:
            said[name] = str(refused)
            continue
        for step in range(8):
            loss_of(model, step, rank).backward()
            wire.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # on FSDP2 of the weights as they were gathered here
            seen = torch.cat([flat(model), loss_of(model, 99, 0).reshape(1)])
        everybody = [torch.empty_like(seen) for _ in range(world)]
        dist.all_gather(everybody, seen)
        apart = not wire.method.rank_equal or name == "none"  # by their nature
        said[name] = "equal" if apart or all(torch.equal(seen, other) for other in everybody) else "DIFFER"
        wire.close()
    return said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_without_numba_holds_the_same_bits_or_is_refused(kind):
    for said in ranks.run(_unlike, 2, kind):
        assert said
        for name, word in said.items():
            assert word == "equal" or "Thinwire's CPU kernels = plain torch" in word, (name, word)
        assert said.get("scape", "thinwire[cpu]").find("thinwire[cpu]") >= 0 and said.get("int8", "equal") == "equal"


def _instructions(rank, world, kind):
    """Another instruction set on one rank, as torch tells it; the bits of such a run are in docs/faults.md."""
    warnings.simplefilter("ignore")
    said = {}
    for name in ("dense", "trickle", "separate"):
        model, method = build(kind, world), small(BY_NAME[name])
        with mock.patch("torch.backends.cpu.get_cpu_capability", lambda: ("AVX512", "AVX2")[rank]):
            try:
                thinwire.compress(model, torch.optim.AdamW(model.parameters()), method).close()
                said[name] = "taken"
            except ThinwireError as refused:
                said[name] = str(refused)
    return said


def test_another_instruction_set_is_refused_where_every_rank_steps_what_all_hold():
    for said in ranks.run(_instructions, 2, "ddp"):
        assert all("set ATEN_CPU_CAPABILITY" in word for word in said.values()), said
    for said in ranks.run(_instructions, 2, "fsdp2"):
        assert said["dense"] == said["trickle"] == "taken" and "ATEN_CPU_CAPABILITY" in said["separate"]


def test_unlike_gpus_are_refused_where_ranks_need_equal_products_of_matrices(monkeypatch):
    """As PowerSGD does, whose ranks orthonormalize the same matrix each for itself."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: ("NVIDIA A100", "NVIDIA H100")[device.index])

    def facts(method: methods.Method) -> list[tuple[int, dict[str, str]]]:
        return [(rank, host_facts(method, [], torch.device("cuda", rank), replicated=True)) for rank in range(2)]

    for name in ("powersgd", "separate"):
        with pytest.raises(ThinwireError, match=r"^rank . has the GPU = NVIDIA .*: use GPUs of one kind"):
            _check(facts(methods.resolve(name)))
    _check(facts(methods.resolve("int8")))
