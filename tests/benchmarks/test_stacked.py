"""``benchmarks/loss/stacked.py``: each run of a stack is the run that the library's own methods make."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "loss"))
import ladder
import regimes
import stacked
import virtual
from thinwire.train.data.windows import Windows

SMALLEST = "--preset tiny --layers 2 --width 32 --heads 2 --seq-len 16"
JOB = ladder.Job("smallest", "words", 4, 8, "dense", "adamw", 4e-3, 0.0, 0.9, 1.0, 3, 0)
MUON = replace(JOB, optimizer="muon", lr=1.2e-2, beside=4e-3)
STEPS = 8


@pytest.fixture(scope="module")
def windows() -> Windows:
    draw = random.Random(0)
    words = draw.choices(["signal", "noise", "the", "of", "network", "rank", "and"], k=4000)
    return Windows(torch.tensor(list(" ".join(words).encode())), 16)


@pytest.mark.parametrize(
    "job",
    [
        JOB, MUON, replace(JOB, method="trickle"), replace(JOB, method="trickle(density=0.05,bits=4)"),
        replace(JOB, method="trickle:merged"), replace(MUON, method="trickle:muon"),
        replace(MUON, method="trickle(density=0.06,feedback='updates(delivered_share=0.5)')"),
        replace(MUON, method="trickle(density=0.03,dense=('embedding*',))"),
    ],
    ids=["adamw", "muon", "trickle", "trickle-4bit", "merged", "trickle-muon", "delivered", "kept"],
)  # fmt: skip
def test_a_run_of_a_stack_is_the_librarys(job, windows, monkeypatch):
    """Two runs in one stack, with other rates, seeds, betas and clips: losses of each, and weights at the end."""
    monkeypatch.setattr(ladder, "MODELS", {"smallest": SMALLEST})
    jobs = [job, replace(job, lr=job.lr / 2, beside=job.beside / 4, seed=1, beta1=0.8, clip=0.3)]
    members = [stacked.member(of, STEPS) for of in jobs]
    stack = stacked.Stack(job.config(STEPS), stacked.way_of(job.method), members, windows, STEPS, torch.device("cpu"))
    stack.set_rates([member.rate for member in members])
    stack.run(STEPS)
    for at, of in enumerate(jobs):
        config = of.config(STEPS)
        played = virtual.Played(config, Windows(windows.tokens, 16, of.seed), batched=True)
        played.run(STEPS, of.rate(STEPS))
        assert stack.losses[at].tolist() == pytest.approx(played.found.losses, rel=2e-5), of
        model = dict(played.replicas[0].model.named_parameters())
        for piece in stack.pieces:
            if piece.name.endswith("key.bias"):  # its gradient is rounding alone: softmax does not see it
                continue
            mine = stack.weights[at, piece.start : piece.start + piece.numel]
            theirs = model[piece.name].detach().reshape(-1)
            moved = (mine - theirs).norm() / theirs.norm().clamp(min=1e-3)
            assert moved < 1e-3, (piece.name, float(moved))
