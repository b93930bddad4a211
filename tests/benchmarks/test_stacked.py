"""``benchmarks/loss/stacked.py``: each run of a stack is the run that the library's own methods make."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "loss"))
import fleet
import ladder
import ladder_tables
import regimes
import stacked
import virtual
from thinwire.base.errors import ThinwireError
from thinwire.train.data.windows import Windows

SMALLEST = "--preset tiny --layers 2 --width 32 --heads 2 --seq-len 16"
JOB = ladder.Job("smallest", "words", 4, 8, "dense", "adamw", 4e-3, 0.0, 0.9, 1.0, 3, 0)
MUON = replace(JOB, optimizer="muon", lr=1.2e-2, beside=4e-3)
WARM, STEPS = 4, 6


@pytest.fixture(scope="module")
def windows() -> Windows:
    draw = random.Random(0)
    words = draw.choices(["signal", "noise", "the", "of", "network", "rank", "and"], k=4000)
    return Windows(torch.tensor(list(" ".join(words).encode())), 16)


@pytest.mark.parametrize(
    "job",
    [
        JOB, MUON, replace(JOB, method="trickle"), replace(JOB, method="trickle(density=0.05,bits=4)"),
        replace(JOB, method="trickle:merged"), replace(MUON, method="trickle(density=0.03)"),
        # As trickle:muon, but that servers send all they have: many sums of 4-bit values are equal, of which rounding
        # alone chooses the largest.
        replace(MUON, method="trickle(density=0.03,bits=4,mask='merged',server_density=0.25)"),
        replace(MUON, method="trickle(density=0.06,feedback='updates(delivered_share=0.5)')"),
        replace(MUON, method="trickle(density=0.03,dense=('embedding*',))"),
    ],
    ids=["adamw", "muon", "trickle", "trickle-4bit", "merged", "muon-own", "muon-merged", "delivered", "kept"],
)  # fmt: skip
def test_a_run_of_a_stack_is_the_librarys(job, windows, monkeypatch):
    """Two runs in one stack, with other rates, seeds, betas and clips, each from the library's state after four steps:
    in the first step of Adam all values are alike in size, so that rounding alone chooses the largest."""
    monkeypatch.setattr(ladder, "MODELS", {"smallest": SMALLEST})
    jobs = [job, replace(job, lr=job.lr / 2, beside=job.beside / 4, seed=1, beta1=0.8, clip=0.3)]
    members = [stacked.member(of, WARM + STEPS) for of in jobs]
    stack = stacked.Stack(
        job.config(9), stacked.way_of(job.method, job.ranks), members, windows, WARM + STEPS, torch.device("cpu")
    )
    stack.set_rates([member.rate for member in members])
    played = []
    for at, of in enumerate(jobs):
        one = virtual.Played(of.config(WARM + STEPS), Windows(windows.tokens, 16, of.seed), batched=True)
        one.run(WARM, of.rate(WARM + STEPS))
        transplant(one.save(), stack, at)
        one.run(WARM + STEPS, of.rate(WARM + STEPS))
        played.append(one)
    stack.turn = WARM
    stack.state["turn"].fill_(WARM)
    starts = stack.weights.clone()
    stack.run(WARM + STEPS)
    for at, one in enumerate(played):
        model = dict(one.replicas[0].model.named_parameters())
        ends = torch.cat([model[piece.name].detach().reshape(-1) for piece in stack.pieces])
        apart, way = float((stack.weights[at] - ends).norm()), float((ends - starts[at]).norm())
        # A value at the edge of being chosen, or of a rounding, goes another way now and then, as sums are rounded;
        # torch's Muon iterates in bfloat16.
        assert apart < 0.05 * way, apart / way
        # Such values move the loss, at most by their share of the way: on a CPU with AMX, whose sums differ, by 5e-5.
        losses = one.found.losses[WARM:]
        moved = apart / way * abs(losses[-1] - losses[0])
        assert stack.losses[at, WARM:].tolist() == pytest.approx(losses, rel=2e-5, abs=moved)


def transplant(saved: dict[str, torch.Tensor], stack: stacked.Stack, at: int) -> None:
    """Give run ``at`` of ``stack`` what the library's ranks have: ``virtual.Played.save``."""
    state, sent = stack.state, stack.sent_from
    rows = range(at * stack.own, (at + 1) * stack.own)
    for number, piece in enumerate(stack.pieces):
        here = slice(piece.start, piece.start + piece.numel)
        state["weights"][at, here] = saved[f"replica-0/model/{piece.name}"].reshape(-1)
        if stack.sent:
            for rank, row in enumerate(rows):
                state["usual"][row, number] = saved[f"rank-{rank}/bound/usual norm/{piece.name}"]
        if piece.kind == "muon":
            state["first"][at, here] = saved[f"replica-0/momentum_buffer/{piece.name}"].reshape(-1)
        elif piece.kind == "adam":
            state["first"][at, here] = saved[f"replica-0/exp_avg/{piece.name}"].reshape(-1)
            state["second"][at, here] = saved[f"replica-0/exp_avg_sq/{piece.name}"].reshape(-1)
        else:
            here = slice(here.start - sent, here.stop - sent)
            for rank, row in enumerate(rows):
                for ours, theirs in (("v", "second"), ("waits", "residual")):
                    state[ours][row, here] = saved[f"rank-{rank}/state/{theirs}/{piece.name}"].reshape(-1)
            if stack.way.merged:
                of = [saved[f"rank-{rank}/state/server/{piece.name}"].reshape(-1) for rank in range(stack.own)]
                state["served"][at, here] = torch.cat(of)
    if stack.sent:
        state["r"][at] = saved["rank-0/state/=alike/"]


def test_ranks_share_their_momenta_when_it_is_due(windows, monkeypatch):
    monkeypatch.setattr(ladder, "MODELS", {"smallest": SMALLEST})
    jobs = [replace(MUON, method="trickle:muon", seed=seed) for seed in (0, 1)]
    way = stacked.way_of("trickle:muon", 4, shared=2)
    members = [stacked.member(of, STEPS) for of in jobs]
    stack = stacked.Stack(jobs[0].config(9), way, members, windows, STEPS, torch.device("cpu"))
    stack.set_rates([member.rate for member in members])
    for until in range(1, STEPS + 1):
        stack.run(until)
        of_muon = torch.cat([block.of(stack.state["v"]).flatten(1) for block in stack._sent_muon], 1)
        first, others = of_muon.unflatten(0, (2, -1)).tensor_split([1], 1)
        assert torch.equal(others, first.expand_as(others)) == (until % 2 == 0)
        assert not torch.equal(of_muon[0], of_muon[-1])  # each run has its own


@pytest.mark.parametrize(("second", "every"), [("own", 1), ("all", 1), ("mean", 1), ("mean", 2)])
def test_ranks_have_of_the_second_moment_what_they_should(second, every, windows, monkeypatch):
    monkeypatch.setattr(ladder, "MODELS", {"smallest": SMALLEST})
    jobs = [replace(JOB, method="trickle", seed=seed) for seed in (0, 1)]
    way = stacked.way_of("trickle", 4, second=second, every=every)
    members = [stacked.member(of, STEPS) for of in jobs]
    stack = stacked.Stack(jobs[0].config(9), way, members, windows, STEPS, torch.device("cpu"))
    stack.set_rates([member.rate for member in members])
    before = stack.state["v"].clone()
    for turn in range(STEPS):
        stack.run(turn + 1)
        v = stack.state["v"]
        first, others = v.unflatten(0, (2, -1)).tensor_split([1], 1)
        assert torch.equal(others, first.expand_as(others)) == (second != "own")
        assert torch.equal(v, before) == (turn % every != 0)
        before = v.clone()


def test_a_fleets_rows_are_the_ladders(tmp_path, monkeypatch, capsys):
    """With branches, by stack and by ``ladder.py``: the same losses; bytes come when rows are added to the data."""
    draw = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(draw.choices(["signal", "noise", "the", "of", "network"], k=3000)))
    monkeypatch.setattr(ladder, "MODELS", {"smallest": SMALLEST})
    monkeypatch.setattr(regimes, "TEXTS", {"words": ("text.txt", "text.txt")})
    monkeypatch.setattr(regimes, "_TOKENS", {})
    monkeypatch.setattr(regimes, "commit", lambda: "none")
    given = {
        "model": "smallest", "text": "words", "sequences": 8, "method": "dense", "lengths": [5, 10],
        "grids": [{"lrs": [4e-3], "seeds": [0, 1]}, {"lrs": [2e-3]}],
    }  # fmt: skip
    order = fleet.order_of(dict(given))
    rows = [row for row in fleet.play(order, tmp_path, torch.device("cpu")) if row]
    assert [(row["lr"], row["seed"], row["steps"]) for row in rows] == [
        (4e-3, 0, 5), (4e-3, 1, 5), (2e-3, 0, 5), (4e-3, 0, 10), (4e-3, 1, 10), (2e-3, 0, 10),
    ]  # fmt: skip
    place = ladder.Place(tmp_path, tmp_path / "ladder.jsonl", tmp_path / "out")
    played = [row for job in order.jobs for row in ladder.run(job, [5, 10], place)]
    for row in played:
        (mine,) = [
            one for one in rows if ladder_tables.key_of(one, one["steps"]) == ladder_tables.key_of(row, row["steps"])
        ]
        assert mine["spans"] == pytest.approx(row["spans"], rel=1e-4)
        assert mine["train"] == pytest.approx(row["train"], rel=1e-4)
        assert {mine[name] == row[name] for name in ("parameters", "tokens_per_parameter")} == {True}
    for row in rows[1:]:
        regimes.append(tmp_path / "rows.jsonl", row)
    regimes.append(place.data, played[0])
    words = ["fleet.py", "--corpora", str(tmp_path), "--add", str(tmp_path / "rows.jsonl"), "--data"]
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "all.jsonl")])
    assert fleet.main() == 0 and fleet.main() == 0
    assert capsys.readouterr().out.splitlines()[-2:] == ["5 rows are new", "0 rows are new"]
    added = ladder_tables.read(tmp_path / "all.jsonl")
    bytes_of = {ladder_tables.key_of(row, row["steps"]): row["bytes"] for row in played}
    assert all(row["bytes"] == bytes_of[key] for key, row in added.items())


def test_a_stack_plays_what_it_knows():
    assert stacked.way_of("trickle:muon", 4) == stacked.Way(density=0.03, merged=True, bits=4)
    assert stacked.way_of("trickle(density=0.03)", 4) == stacked.Way(density=0.03, delivered=0.0125 / 0.03)
    assert stacked.way_of("trickle:merged", 4, owner=0.5) == stacked.Way(0.01, True, 0.04, 4, owner=0.5)
    late = stacked.way_of("trickle:muon", 4, late=4)
    assert (late.decaying.density, late.decaying.server_density, late.density) == (0.12, 0.4, 0.03)
    assert fleet.named("trickle:muon", late) == "trickle:muon + density x 4 in the decay"
    assert fleet.named("dense", stacked.way_of("dense", 4, momentum=0.98)) == "dense + Muon's momentum 0.98"
    for spec in ("topk", "trickle(start=0.1)", "trickle(feedback='gradients')"):
        with pytest.raises(ThinwireError, match="no stack plays"):
            stacked.way_of(spec, 4)
