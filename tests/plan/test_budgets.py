"""What a step may launch, send and hold on CUDA, for GPT-2's 148 tensors: figures that must not grow unnoticed.

The tables are those of ``benchmarks/speed/budgets.py``; a change that lowers a figure lowers it here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "speed"))

from budgets import budget, gpt2, llama
from thinwire.ops.sketch import ROUNDS

BUDGETS = {
    # method, engine, ranks: launches, of them ours, collectives, host syncs, MB held
    ("dense", "fsdp2", 512): (1, 0, 14, 1, 0),
    ("int8", "fsdp2", 512): (66, 65, 27, 1, 242),
    ("int8", "ddp", 64): (108, 107, 71, 1, 235),
    ("int8", "ddp", 512): (108, 107, 71, 1, 235),
    ("sdp4bit", "ddp", 64): (110, 107, 71, 1, 196),
    ("sdp4bit", "fsdp2", 64): (106, 91, 27, 1, 773),
    ("sdp4bit", "fsdp2", 512): (106, 91, 27, 1, 837),
    ("scape", "ddp", 8): (120, 113, 54, 1, 1719),
    ("scape", "ddp", 512): (121, 113, 54, 1, 1578),
    ("scape", "fsdp2", 512): (137, 112, 28, 1, 1884),
    ("topk(feedback='gradient')", "ddp", 8): (520, 321, 53, 1, 1055),
    ("trickle", "ddp", 64): (808, 393, 71, 1, 2275),
    ("trickle", "fsdp2", 64): (591, 286, 40, 1, 2159),
    ("trickle:merged", "ddp", 512): (1417, 683, 89, 1, 2200),
    ("trickle:merged", "fsdp2", 512): (996, 507, 53, 1, 3045),
    ("tagc", "ddp", 8): (1690, 969, 125, 1, 2064),
    ("tagc", "ddp", 512): (1312, 375, 125, 1, 2198),
    ("tagc", "fsdp2", 8): (1228, 702, 79, 1, 2224),
    ("lhc", "ddp", 8): (880, 267, 107, 1, 1659),
    ("radius(density=0.4, T=200, residual_scale=1.0)", "ddp", 64): (114, 90, 53, 1, 1115),
    ("radius(density=0.4, T=200, residual_scale=1.0)", "fsdp2", 64): (74, 68, 28, 1, 1252),
}
DENSE = {"ddp": (19, 35), "fsdp2": (1, 26)}
"""Launches of dense, and buckets of methods that leave the small tensors dense."""


def test_the_models_are_what_they_are_called():
    shapes = [shape for module in gpt2() for shape in module.values()]
    assert len(shapes) == 148 and sum(len(module) for module in llama()) == 291


@pytest.mark.parametrize(("method", "engine", "ranks"), BUDGETS)
def test_a_step_stays_within_its_budget(method, engine, ranks):
    budget(method, "gpt2", engine, ranks)  # what a process copies to a device once is copied
    found = budget(method, "gpt2", engine, ranks)
    launches, ours, collectives, syncs, held = BUDGETS[method, engine, ranks]
    assert found.launches <= launches and found.ours <= ours, found
    assert found.collectives <= collectives and found.syncs <= syncs, found
    assert found.held <= held * 1e6, found


@pytest.mark.parametrize("engine", DENSE)
def test_a_bucket_of_gradients_is_a_few_launches_however_many_ranks_there_are(engine):
    """Three beyond dense's, those of gradients and those of weights; none of them is one per parameter or per peer."""
    dense, buckets = DENSE[engine]
    assert budget("dense", "gpt2", engine, 8).launches == dense
    for method in ("int8", "radius(density=0.4, T=200, residual_scale=1.0)", "sdp4bit", "scape"):
        weights = buckets if engine == "fsdp2" and method in ("sdp4bit", "scape") else 0  # parts of messages of them
        found = [budget(method, "gpt2", engine, ranks) for ranks in (8, 512)]
        # Tables of places are copied when they are first met; a mask of many choosers is joined by one launch.
        assert found[0].buckets == buckets and found[0].launches == pytest.approx(found[1].launches, abs=4)
        assert found[0].launches - dense <= 3 * (buckets + weights), found[0].names


def test_sketches_are_as_many_launches_whatever_the_number_of_tensors():
    """And of ranks: of each kernel one per bucket, and a round of peeling is one."""
    buckets = {"ddp": 18, "fsdp2": 13}
    for engine, count in buckets.items():
        for ranks in (4, 8):
            names = budget("tagc", "gpt2", engine, ranks).names
            found = {name.rpartition(".")[2]: times / count for name, times in names.items() if ".sketch." in name}
            assert found.pop("_round") == ROUNDS and found.pop("_count") == 2, found
            assert set(found.values()) == {1}, found


def test_scape_on_many_ranks_sends_a_twentieth_of_dense():
    """On DDP, where everybody gets every mask: no message is much longer than the others."""
    for ranks in (64, 512):
        assert budget("scape", "gpt2", "ddp", ranks).sent < 0.05 * budget("dense", "gpt2", "ddp", ranks).sent


def test_int8_on_a_model_of_seven_billion_holds_less_than_two_gigabytes():
    """With 64 ranks on FSDP2: what the largest module needs, not what all of them do."""
    found = budget("int8", "llama", "fsdp2", 64)
    assert found.held < 2e9 and found.peak < 2e9
