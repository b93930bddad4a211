"""What a step may launch, send and hold on CUDA, for GPT-2's 148 tensors: figures that must not grow unnoticed.

The tables are those of ``benchmarks/budgets.py``; a change that lowers a figure lowers it here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from budgets import budget, gpt2, llama

BUDGETS = {
    # method, engine, ranks: launches, of them ours, collectives, host syncs, MB held
    ("dense", "fsdp2", 512): (1, 0, 14, 1, 0),
    ("int8", "fsdp2", 512): (96, 91, 27, 1, 242),
    ("int8", "ddp", 64): (170, 159, 71, 1, 238),
    ("int8", "ddp", 512): (170, 159, 71, 1, 235),
    ("sdp4bit", "fsdp2", 64): (161, 91, 27, 1, 773),
    ("scape", "ddp", 8): (357, 232, 54, 1, 1567),
    ("scape", "ddp", 512): (395, 232, 54, 1, 1570),
    ("topk(feedback='gradient')", "ddp", 8): (1165, 315, 53, 1, 1095),
    ("trickle", "ddp", 64): (1840, 459, 71, 1, 2275),
    ("trickle", "fsdp2", 64): (1478, 349, 40, 1, 2165),
    ("radius(density=0.4, T=200, residual_scale=1.0)", "ddp", 64): (239, 157, 53, 1, 1114),
}


def test_the_models_are_what_they_are_called():
    shapes = [shape for module in gpt2() for shape in module.values()]
    assert len(shapes) == 148 and sum(len(module) for module in llama()) == 291


@pytest.mark.parametrize(("method", "engine", "ranks"), BUDGETS)
def test_a_step_stays_within_its_budget(method, engine, ranks):
    found = budget(method, "gpt2", engine, ranks)
    launches, ours, collectives, syncs, held = BUDGETS[method, engine, ranks]
    assert found.launches <= launches and found.ours <= ours, found
    assert found.collectives <= collectives and found.syncs <= syncs, found
    assert found.held <= held * 1e6, found


def test_scape_on_many_ranks_sends_a_twentieth_of_dense():
    """On DDP, where everybody gets every mask: no message is much longer than the others."""
    for ranks in (64, 512):
        assert budget("scape", "gpt2", "ddp", ranks).sent < 0.05 * budget("dense", "gpt2", "ddp", ranks).sent


def test_int8_on_a_model_of_seven_billion_holds_less_than_two_gigabytes():
    """With 64 ranks on FSDP2: what the largest module needs, not what all of them do."""
    found = budget("int8", "llama", "fsdp2", 64)
    assert found.held < 2e9 and found.peak < 2e9
