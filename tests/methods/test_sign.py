"""Signs with error feedback at both ends, against loops over workers and servers in float64, and its limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ranks
import thinwire
from engines import adamw, build
from thinwire.base.errors import ThinwireError
from thinwire.methods import Sign, resolve
from threaded import reduce_on_threads

GROUP, STEPS = 32, 30


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    common = torch.randn(numel, generator=torch.Generator().manual_seed(8))
    return common + torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def signs(x: np.ndarray, scale: str) -> np.ndarray:
    """C of one chunk: in groups, +-mean |x| or +-rms; zero counts as positive."""
    out = np.empty_like(x)
    for at in range(0, len(x), GROUP):
        part = x[at : at + GROUP]
        size = np.sqrt(np.mean(part**2)) if scale == "rms" else np.mean(np.abs(part))
        assert np.abs(part).min() > 2e-7 * size, "a sign that float32 cannot tell: take other gradients"
        out[at : at + GROUP] = np.where(part < 0, -size, size)
    return out


@pytest.mark.parametrize(("topology", "size"), [("all_reduce", 2), ("all_reduce", 3), ("reduce_scatter", 3)])
@pytest.mark.parametrize("scale", ["mean", "rms"])
def test_against_loops_over_workers_and_servers(topology, size, scale):
    """The mean and both errors, step by step. 101 values: chunks of different length, groups that are not full."""
    numel = 101 if topology == "all_reduce" else 43 * size
    results = reduce_on_threads(
        lambda: Sign(group=GROUP, scale=scale, smallest=0), gradients,
        topology=topology, size=size, shapes={"w": (numel,)}, steps=STEPS,
    )  # fmt: skip
    chunk = -(-numel // size)
    chunks = [slice(r * chunk, min((r + 1) * chunk, numel)) for r in range(size)]
    worker, server = [np.zeros(numel) for _ in range(size)], [np.zeros(at.stop - at.start) for at in chunks]
    for step in range(STEPS):
        arrived = []
        for n in range(size):
            x = gradients(n, step, numel).double().numpy() + worker[n]
            sent = np.concatenate([signs(x[at], scale) for at in chunks])
            worker[n] = x - sent
            arrived.append(sent)
        for r, at in enumerate(chunks):
            y = sum(sent[at] for sent in arrived) / size
            taken = results[r][step]
            if topology == "all_reduce":
                y = y + server[r]
                server[r] = y - signs(y, scale)
                assert np.abs(taken["server/w"][0, : len(y)].double().numpy() - server[r]).max() < 1e-4
                for rank in results:
                    assert np.abs(rank[step]["mean"][at].double().numpy() - signs(y, scale)).max() < 1e-4
            else:
                assert "server/w" not in taken, "what stays with the owner has no second error"
                assert np.abs(taken["mean"].double().numpy() - y).max() < 1e-4
            mine = taken["residual/w"].reshape(-1)[:numel].double().numpy()
            assert np.abs(mine - worker[r]).max() < 1e-4


@pytest.mark.parametrize("topology", ["all_reduce", "reduce_scatter"])
def test_with_one_magnitude_in_each_group_it_is_dense(topology):
    """Limit: nothing is left out by either encoding."""

    def given(rank, step, numel):
        return (step + 1.0) * torch.ones(numel) * (-1) ** (torch.arange(numel) % 3)

    for rank in reduce_on_threads(lambda: Sign(smallest=0), given, topology=topology, size=2, shapes={"w": 64},
                                  steps=3):  # fmt: skip
        for step, taken in enumerate(rank):
            rows = given(0, step, 64).view(-1, len(taken["mean"]))
            assert any(torch.allclose(taken["mean"], row, rtol=1e-6) for row in rows)
            assert taken["residual/w"].abs().max() < 1e-5


def test_it_starts_dense_where_it_is_told_to():
    results = reduce_on_threads(lambda: resolve("sign(start=2, smallest=0, group=32)"), gradients,
                                topology="all_reduce", size=2, shapes={"w": 64}, steps=3)  # fmt: skip
    mean = [(gradients(0, step, 64) + gradients(1, step, 64)) / 2 for step in range(3)]
    assert all(torch.allclose(results[0][step]["mean"], mean[step]) == (step < 2) for step in range(3))


class One(torch.nn.Module):
    """Its gradient is what is handed in. Of four ranks one has half a shard, and one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5, 32))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.weight * given).sum()


def _opposed(rank: int, world: int) -> tuple[int, int]:
    model = build("fsdp2", world, net=One)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, "sign(smallest=0, group=64, feedback='updates')", steps=3)
    for step in range(3):
        model((-1) ** rank * gradients(0, step, 160).view(5, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = wire.step, wire.skipped
    wire.close()
    return found


def test_as_steps_on_fsdp2_padding_is_not_taken_for_a_step():
    """Ranks cancel, but not where the engine pads: there all have zeros, whose sign is positive."""
    assert ranks.run(_opposed, 4) == [(3, 0)] * 4


def test_knobs_that_do_not_fit_are_refused():
    for knobs in ("group=16", "group=100", "scale='max'"):
        with pytest.raises(ThinwireError, match=r"sign|Sign"):
            resolve(f"sign({knobs})")
