"""What the papers' experiments measure with: virtual ranks that own shards, spectra, constants fitted to a table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import sdp4bit
import sharded
import spectrum
from measures import regimes, virtual
from thinwire.train.data.windows import Windows


def job(method: str, steps: int = 4) -> regimes.Job:
    return regimes.Job("test", "wikitext", "tiny", sharded.RANKS, method, 4e-3, 0, steps)


def text(length: int) -> Windows:
    tokens = torch.randint(0, 256, (20_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return Windows(tokens, length, 0)


def test_sharded_weights_train_as_replicated_ones():
    """Dense on sharded ranks and on DDP's is the same up to the order of sums."""
    config = job("dense").config()
    windows = text(config.sequence_length)
    replicated = virtual.train(config, windows, batched=True).losses
    assert sharded.train(config, windows)["losses"] == pytest.approx(replicated, abs=1e-5)


def test_all_ranks_compute_with_the_same_bits():
    config = job("sdp4bit:paper").config()
    held = dict[tuple[int, int], torch.Tensor]()
    gather = sharded.Owner.gather

    def watching(owner: sharded.Owner, step: int) -> torch.Tensor:
        everything = gather(owner, step)
        held[step, owner.rank.engine.rank] = everything.clone()
        return everything

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded.Owner, "gather", watching)
        sharded.train(config, text(config.sequence_length))
    assert len(held) == (config.steps + 1) * sharded.RANKS
    for step in range(config.steps + 1):
        assert all(torch.equal(held[step, 0], held[step, rank]) for rank in range(sharded.RANKS))
    assert not torch.equal(held[0, 0], held[1, 0])


class Bowl(nn.Module):
    """A loss whose Hessian has the eigenvalues ``curvatures``."""

    def __init__(self, curvatures: torch.Tensor) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.ones(len(curvatures)))
        self.curvatures = curvatures

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 0.5 * (self.curvatures * self.point.square()).sum()


def test_the_spectrum_of_a_known_hessian():
    torch.manual_seed(0)
    curvatures = torch.tensor([1.0, 2.0, 50.0]).repeat_interleave(torch.tensor([30, 30, 4]))
    places, weights = spectrum.density(Bowl(curvatures), (torch.empty(0), torch.empty(0)), 3)
    assert sorted(places) == pytest.approx([1.0, 2.0, 50.0], rel=1e-3)
    assert sum(weights) == pytest.approx(1.0, abs=1e-5)


def test_the_effective_rank_of_equal_eigenvalues_is_their_number():
    gradient = torch.zeros(16, 16)
    gradient[:5, :5] = 2 * torch.eye(5)
    assert spectrum.effective_rank(spectrum.of_gradient(gradient)) == pytest.approx(5.0)


def test_two_constants_explain_the_dense_rows_of_the_h800():
    assert max(abs(error) for error in sdp4bit.fit("H800").errors.values()) < 0.05


@pytest.mark.parametrize(("name", "gpus"), [("A100", 64), ("H800", 128)])
def test_a_predicted_row_is_near_to_the_printed_one(name, gpus):
    printed = sdp4bit.FIGURES("Table 2", f"1.3B, {name}", "SDP4Bit")
    assert sdp4bit.predicted("1.3B", name, gpus, "sdp4bit:paper").throughput == pytest.approx(printed, rel=0.15)
