"""``benchmarks/loss/regimes.py``: one process plays N ranks, bit for bit; no run is repeated; its tables."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run
from thinwire.network.comm import GroupComm
from thinwire.network.ledger import Ledger
from thinwire.train import loop
from thinwire.train.config import from_arguments
from thinwire.train.job import setup

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "loss"))
import regime_tables
import regimes
import virtual
import waiting

SMALLEST = "--preset tiny --layers 1 --width 16 --heads 2 --seq-len 16"
METHODS = (
    "dense",
    "topk(density=0.1,feedback='updates',smallest=64)",
    "onebit-adam(warmup=0.5,smallest=64)",
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = random.Random(0).choices(["signal", "noise", "the", "of", "network", "rank", "and"], k=4000)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return path


def trained_on_processes(rank: int, world: int, runs: list[list[str]]) -> None:
    assert dist.group.WORLD is not None
    for arguments in runs:
        ranks = setup.Ranks(GroupComm(dist.group.WORLD, Ledger()), 1, torch.device("cpu"))
        loop.train_on(from_arguments(arguments), ranks)


def test_virtual_ranks_have_the_bits_of_processes(text: Path, tmp_path: Path) -> None:
    configs = [
        from_arguments([*SMALLEST.split(), *f"--ranks 2 --batch-size 2 --steps 3 --lr 4e-3 --method {method}".split()])
        for method in METHODS
    ]
    outs = {config: tmp_path / str(at) for at, config in enumerate(configs)}
    run(trained_on_processes, 2, [regimes.arguments(config, str(text), out) for config, out in outs.items()])
    for config, out in outs.items():
        windows = regimes.windows_of(text.parent, text.name, config.sequence_length, config.seed)
        real = regimes.finished(out, config.steps)
        found = virtual.train(config, windows)
        assert len(found.losses) == 3 and regimes.differs(found, real) == "equal", config.method
        found.losses[2] += 1
        assert "the loss of step 3" in regimes.differs(found, real)


@pytest.fixture
def place(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> regimes.Place:
    """With a model and texts of this test's own."""
    monkeypatch.setattr(regimes, "MODELS", {"smallest": SMALLEST})
    monkeypatch.setattr(regimes, "TEXTS", {"words": (text.name, text.name)})
    monkeypatch.setattr(regimes, "EVALUATED", 8)
    monkeypatch.setattr(regimes, "SMALLEST", 64)
    monkeypatch.setattr(regimes, "commit", lambda: "none")
    monkeypatch.setattr(regimes.torch, "set_num_threads", lambda _: None)
    return regimes.Place(text.parent, tmp_path / "data" / "runs.jsonl", tmp_path / "out")


def job(method: str, lr: float = 4e-3) -> regimes.Job:
    return regimes.Job("scratch", "words", "smallest", 2, method, lr, seed=0, steps=2)


def test_what_is_there_is_not_run_again(place: regimes.Place) -> None:
    for method in ("dense", "topk(density=0.1)"):
        made = regimes.run(job(method), place)
        assert made is not None and made["error"] is None and made["valid"] > 0
    before = place.data.read_text()
    with mock.patch.object(regimes, "_train", side_effect=AssertionError("a run is repeated")):
        assert regimes.run(job("dense"), place) is None
        assert regimes.run(job("topk(density=0.1)"), place) is None
    assert place.data.read_text() == before
    assert regimes.run(job("dense", lr=2e-3), place) is not None

    dense, topk = regime_tables.rows(regime_tables.read(place.data).values())
    assert (dense.method, dense.gap, dense.lr in dense.tried, len(dense.tried)) == ("dense", 0.0, True, 2)
    assert topk.gap is not None and topk.gap_same_lr is not None
    assert topk.share is not None and topk.share_all is not None and topk.share < topk.share_all < 100


def test_a_run_that_failed_is_repeated_if_that_is_asked_for(place: regimes.Place) -> None:
    with mock.patch.object(regimes, "_train", side_effect=ValueError("no luck")), mock.patch("traceback.print_exc"):
        made = regimes.run(job("dense"), place)
    assert made is not None and made["error"] == "ValueError: no luck"
    assert regimes.run(job("dense"), place) is None
    (row,) = regime_tables.rows(regime_tables.read(place.data).values())
    assert row.failures == ("lr 0.004, seed 0: ValueError: no luck",)
    again = regimes.Place(place.corpora, place.data, place.out, again=True)
    assert regimes.run(job("dense"), again) is not None
    (row,) = regime_tables.rows(regime_tables.read(place.data).values())
    assert math.isfinite(row.losses[0]) and row.failures == ()


def line(method: str, lr: float, seed: int, valid: float | None, bytes: int = 1000, **more: object) -> str:
    """Of a run whose compressed tensors are 80% of dense's 1000 bytes."""
    return json.dumps({
        "regime": "scratch", "model": "small", "text": "peps", "ranks": 4, "steps": 800, "base": "", "method": method,
        "lr": lr, "seed": seed, "valid": valid, "error": None, "diverged": valid is None, "optimizer": "adamw",
        "bytes": bytes, "bytes_compressed": bytes - 200, "dense_bytes": 1000, "dense_bytes_compressed": 800,
    } | more)  # fmt: skip


def test_the_arithmetic_of_a_table(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    lines = [
        # Dense: at 0.004 the mean of seeds 0 and 1 is 2.1, at 0.008 it is 2.2: seed 2, which only one has, is left out.
        line("dense", 0.004, 0, 2.0), line("dense", 0.004, 1, 2.2), line("dense", 0.004, 2, 9.0),
        line("dense", 0.008, 0, 1.9), line("dense", 0.008, 1, 2.5),
        # Its best is 0.008. Against dense's best +5% and -5% by seed: nothing.
        line("topk", 0.008, 0, 2.1, 240), line("topk", 0.008, 1, 2.09, 280), line("topk", 0.004, 0, 3.0, 240),
        line("topk", 0.016, 0, 5.0), line("topk", 0.016, 0, None),  # the later one of the two counts
        line("sign", 0.004, 0, None, error="RuntimeError: gone"),
        line("scape", 0.004, 0, 2.0, optimizer="adams"),
        line("topk", 0.001, 0, 2.4, regime="going-on", steps=300, base="peps long lr=0.004"),
    ]  # fmt: skip
    file.write_text("\n".join(lines) + "\n")
    rows = regime_tables.rows(regime_tables.read(file).values())
    assert [row.method for row in rows] == ["dense", "scape", "sign", "topk", "topk"]
    dense, scape, sign, topk, later = rows

    assert (dense.lr, dense.losses, dense.gap, dense.gap_same_lr) == (0.004, {0: 2.0, 1: 2.2, 2: 9.0}, 0, 0)
    assert dense.tried == pytest.approx({0.004: 2.1, 0.008: 2.2})
    assert (topk.lr, topk.losses) == (0.008, {0: 2.1, 1: 2.09})
    assert topk.tried == {0.004: 3.0, 0.008: 2.1, 0.016: math.inf}  # seed 0 is the one that all have
    assert topk.gap == pytest.approx((5 - 5) / 2, abs=1e-9)
    assert topk.gap_same_lr == pytest.approx(100 * ((2.1 / 1.9 - 1) + (2.09 / 2.5 - 1)) / 2)
    assert (topk.share, topk.share_all) == pytest.approx((7.5, 26.0))
    assert topk.failures == ("lr 0.016, seed 0: diverged",)
    assert (sign.gap, sign.losses) == (math.inf, {0: math.inf})
    assert sign.failures == ("lr 0.004, seed 0: RuntimeError: gone",)
    assert (scape.gap, scape.gap_same_lr) == (None, None), "there is no dense run of AdamS"
    assert (later.setting[0], later.gap, later.losses) == ("going-on", None, {0: 2.4}), "no dense in that regime"
    # topk's two seeds are all that tell how far seeds lie apart: 12.706 is the t of one degree, 50 the variance of +-5.
    assert regime_tables.error_of_one(rows, "scratch") == pytest.approx(12.706 * math.sqrt(50))
    assert regime_tables.error_of_one(rows, "going-on") is None

    first, second = regime_tables.markdown(rows).split("\n\ngoing-on")
    assert "| `topk` | 0.008 | 2.1000, 2.0900 | +0.00% ± 63.5% | -2.94% | 7.50% | 26.00% | 0.004: 3.0000, "\
            "0.016: none |"\
        in first  # fmt: skip
    assert "| `sign` | 0.004 | none | none | none |" in first
    assert "* `sign`, lr 0.004, seed 0: RuntimeError: gone" in first
    assert "from the end of dense on peps long lr=0.004; seed 0." in second


def test_learning_rates_without_a_seed_in_common(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join([line("dense", 0.1, 0, 1.0), line("dense", 0.2, 1, 3.0), line("dense", 0.2, 2, 3.0)]))
    (row,) = regime_tables.rows(regime_tables.read(file).values())
    assert (row.lr, row.tried) == (0.2, {0.1: 1.0, 0.2: 3.0})


@pytest.mark.parametrize("word", ["", "mask=shared", "mask=shared,choosers=4", "mask=sum", "mask=cycle", "mask=all"])
def test_a_variant_of_what_waits_sends_its_share(word):
    h = torch.randn(4, 400, generator=torch.Generator().manual_seed(0))
    sent = waiting.chosen(of := waiting.variant(word), h, h, t=3)
    assert ((sent == h) | (sent == 0)).all()
    assert ((sent != 0).sum(1) == (400 if word == "mask=all" else 20)).all()
    assert of.mask == "own" or torch.equal((sent != 0).all(0), (sent != 0).any(0)), "one mask for all"


def test_a_variant_is_read():
    assert waiting.variant("density=0.01,r=0,until=7") == waiting.Variant(density=0.01, r=False, until=7)
