"""DeMo against its algorithm in float64 with loops over workers, its laws and limits, and its codec."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.codecs.dct import DctTopK
from thinwire.errors import ThinwireError
from thinwire.ledger import Ledger
from thinwire.methods import DeMo, resolve
from thinwire.testing import Threads, exchange_on, parameters_for, plan_of, reduce_on_threads

TOPOLOGIES = ["all_reduce", "reduce_scatter"]
SHAPES = {"a": (24, 50), "b": (6, 40)}  # chunks that are not full; values in one line of a chunk alone would make ties
ALL = {"smallest": 0, "send": ("*",)}


def gradients(rank: int, step: int, numel: int) -> Tensor:
    """Noise of its own for every rank, around a common gradient."""
    common = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    return common + torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def run(topology="all_reduce", size=3, *, shapes=SHAPES, **knobs):
    more = {key: knobs.pop(key) for key in ("steps", "optimizer", "max_norm", "skip", "gradients") if key in knobs}
    return reduce_on_threads(
        lambda: DeMo(**ALL, **knobs), more.pop("gradients", gradients), topology=topology, size=size, shapes=shapes,
        **more,
    )  # fmt: skip


def tensors(flat: Tensor, topology: str, size: int) -> dict[str, np.ndarray]:
    """An engine's buffer by parameter: (rows, columns) float64. (The ranks divide every shape here.)"""
    rows = size if topology == "reduce_scatter" else 1
    widths = [math.prod(shape) // rows for shape in SHAPES.values()]
    parts = flat.double().view(rows, -1).split(widths, 1)
    return {name: part.numpy() for name, part in zip(SHAPES, parts, strict=True)}


def received(results, step: int, topology: str) -> dict[str, np.ndarray]:
    ranks = results if topology == "reduce_scatter" else results[:1]
    return tensors(torch.cat([rank[step]["mean"] for rank in ranks]), topology, len(results))


@functools.cache
def dct(size: int) -> np.ndarray:
    """DCT-II as it is written: X_u = c_u sum_x x cos(pi (2 x + 1) u / 2 size)."""
    matrix = np.empty((size, size))
    for u in range(size):
        for x in range(size):
            matrix[u, x] = math.sqrt((1 if u == 0 else 2) / size) * math.cos(math.pi * (2 * x + 1) * u / (2 * size))
    return matrix


class Paper:
    """One vector on N workers, in chunks of ``chunk`` = (chunk / 64) x 64 values."""

    def __init__(self, numel: int, workers: int, beta: float, k: int, chunk: int) -> None:
        self.beta, self.k, self.side = beta, k, (chunk // 64, 64)
        self.numel, self.chunks = numel, -(-numel // chunk)
        self.m = [np.zeros(numel) for _ in range(workers)]
        self.gap = np.inf  # between the last coefficient that was sent and the first that was not: ties could differ

    def blocks(self, values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, self.chunks * math.prod(self.side) - self.numel)).reshape(self.chunks, *self.side)

    def extract(self, m: np.ndarray) -> np.ndarray:
        """Coefficients (chunks, height, 64), zeros but for the k largest of each chunk."""
        kept = np.zeros((self.chunks, *self.side))
        for at, block in enumerate(self.blocks(m)):
            coefficients = dct(self.side[0]) @ block @ dct(64).T
            sizes = sorted(np.abs(coefficients).ravel(), reverse=True)
            self.gap = min(self.gap, sizes[self.k - 1] - sizes[self.k])
            kept[at] = np.where(np.abs(coefficients) >= sizes[self.k - 1], coefficients, 0)
        return kept

    def values(self, coefficients: np.ndarray) -> np.ndarray:
        return np.stack([dct(self.side[0]).T @ c @ dct(64) for c in coefficients]).ravel()[: self.numel]

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        total = np.zeros((self.chunks, *self.side))
        for n, g in enumerate(gradients):
            self.m[n] = self.beta * self.m[n] + g
            q = self.extract(self.m[n])
            self.m[n] = self.m[n] - self.values(q)
            total += q
        return self.values(total / len(gradients))


@pytest.mark.parametrize(("chunk", "k"), [(256, 9), (64, 4)])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_against_the_algorithm(topology, size, chunk, k):
    """30 steps. Weights follow sign(Q), whatever the gradients are clipped to."""
    steps, lr, beta = 30, 2.0**-10, 0.999
    results = run(topology, size, steps=steps, beta=beta, k=k, chunk=chunk, max_norm=0.1,
                  optimizer=lambda weights: torch.optim.SGD(weights, lr=lr))  # fmt: skip
    rows = size if topology == "reduce_scatter" else 1
    papers = {n: [Paper(math.prod(s) // rows, size, beta, k, chunk) for _ in range(rows)] for n, s in SHAPES.items()}
    weights = {name: np.zeros((rows, math.prod(shape) // rows)) for name, shape in SHAPES.items()}
    for step in range(steps):
        given = [tensors(gradients(n, step, 1440), topology, size) for n in range(size)]
        means = received(results, step, topology)
        for name in SHAPES:
            for row, paper in enumerate(papers[name]):
                q = paper.step([g[name][row] for g in given])
                assert np.abs(means[name][row] - q).max() < 1e-5
                sure = np.abs(q) > 1e-5
                weights[name][row] -= lr * np.sign(np.where(sure, q, means[name][row]))
                for n in range(size):
                    momentum = results[n][step][f"momentum/{name}"][row].double().numpy()
                    assert np.abs(momentum - paper.m[n]).max() < 5e-5
            for n in range(size):
                mine = weights[name][n if rows > 1 else 0]
                assert np.array_equal(results[n][step]["weights"][name].double().numpy(), mine)
    assert min(paper.gap for by_row in papers.values() for paper in by_row) > 1e-5


@pytest.mark.parametrize("chunk", [64, 128, 4096])
def test_no_bit_depends_on_how_many_blocks_there_are(chunk):
    """DDP cuts its buckets anew after the first step, and after a resume."""
    codec, few = DctTopK(chunk, k=9), 5
    rows = torch.randn(1, 40 * chunk, generator=torch.Generator().manual_seed(0))
    wire = codec.encode(rows, torch.empty(1, codec.wire_numel(40 * chunk), dtype=torch.uint8))
    back, total = codec.decode(wire, torch.empty_like(rows)), codec.decode_sum(wire, torch.empty(40 * chunk))
    for blocks in range(1, few):
        n = blocks * chunk
        part = codec.encode(rows[:, :n], torch.empty(1, codec.wire_numel(n), dtype=torch.uint8))
        assert torch.equal(codec.decode(part, torch.empty(1, n)), back[:, :n])
        assert torch.equal(codec.decode_sum(part, torch.empty(n)), total[:n])


@pytest.mark.parametrize("payload", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_is_lost(topology, size, payload):
    """beta m + g - m' is what each rank has sent, rounding left out: its sum over ranks is N times the mean."""
    beta, steps = 0.9, 6
    results = run(topology, size, steps=steps, beta=beta, k=5, chunk=128, payload=payload)
    for step in range(steps):
        means = received(results, step, topology)
        for name in SHAPES:
            total = np.zeros_like(means[name])
            for rank in results:
                total += tensors(rank[step]["input"], topology, size)[name]
                total -= rank[step][f"momentum/{name}"].double().numpy()
                if step:
                    total += beta * rank[step - 1][f"momentum/{name}"].double().numpy()
            assert np.abs(total - size * means[name]).max() < 2e-5


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_everything_sent_is_the_dense_mean(topology):
    results = run(topology, 3, steps=3, beta=0, k=128, chunk=128, sign=False)
    for step in range(3):
        dense = tensors(sum(rank[step]["input"] for rank in results) / 3, topology, 3)
        for name, mean in received(results, step, topology).items():
            assert np.abs(mean - dense[name]).max() < 1e-5
            assert max(float(rank[step][f"momentum/{name}"].abs().max()) for rank in results) < 1e-5


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("knobs", ["", "k=7, chunk=192", "k=7, chunk=64, payload='bf16'"])
def test_bytes_are_what_the_plan_says(knobs, topology, size):
    method = resolve(f"demo:paper({knobs})")
    results = run(topology, size, **{knob: getattr(method, knob) for knob in ("k", "chunk", "payload")})
    exchange = exchange_on(topology, Threads(size), 0, Ledger())
    parameters = parameters_for(exchange, SHAPES)
    planned = plan_of(method, parameters.values(), exchange).wire_bytes
    rows = size if topology == "reduce_scatter" else 1
    chunks = sum(-(-math.prod(shape) // rows // method.chunk) for shape in SHAPES.values())
    assert planned == (size - 1) * chunks * method.k * (4 if method.payload == "bf16" else 6)
    assert all(float(rank[0]["bytes"]) == planned for rank in results)


def test_all_ranks_hold_the_same_bits():
    results = run(size=4, steps=40, k=3, chunk=128, payload="bf16",
                  optimizer=lambda weights: torch.optim.SGD(weights, lr=0.01))  # fmt: skip
    for rank in results[1:]:
        assert all(torch.equal(rank[-1]["weights"][name], results[0][-1]["weights"][name]) for name in SHAPES)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_skipped_step_leaves_no_trace(topology):
    """As if it had not been: also for the step that comes after it."""
    knobs = {"k": 5, "chunk": 128}
    skipped = run(topology, 2, steps=6, skip=(3,), **knobs)
    without = run(topology, 2, steps=5, gradients=lambda r, step, n: gradients(r, step + (step >= 3), n), **knobs)
    for a, b in zip(skipped, without, strict=True):
        for name in SHAPES:
            assert torch.equal(a[3][f"momentum/{name}"], a[2][f"momentum/{name}"])
            assert torch.equal(a[5][f"momentum/{name}"], b[4][f"momentum/{name}"])
        assert torch.equal(a[5]["mean"], b[4]["mean"])


def test_a_constant_gradient_arrives_in_the_end():
    """k of 128 coefficients per step, of a momentum that does not decay: what is received averages to the gradient."""
    results = run(size=2, steps=200, k=16, chunk=128, beta=1 - 1e-9, gradients=lambda r, step, n: gradients(r, 0, n))
    mean = torch.stack([step["mean"] for step in results[0]]).mean(0)
    expected = (results[0][0]["input"] + results[1][0]["input"]) / 2
    assert (mean - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [("beta=1", "demo: beta is the decay"), ("beta=-0.1", "demo: beta is the decay"),
     ("k=0", "k is a number of coefficients per chunk, from 1 to 4096"), ("k=65, chunk=64", "from 1 to 64"),
     ("k=1.5", "k is a whole number"), ("chunk=100", "chunk is a multiple of 64 values"),
     ("chunk=0", "chunk is a multiple"),
     ("chunk=65536", "from 64 to 32768"), ("payload='int8'", "demo: payload is fp32 or bf16"),
     ("smallest=-1", "demo: smallest must be")],
)  # fmt: skip
def test_knobs_that_mean_nothing_are_refused(knobs, message):
    with pytest.raises(ThinwireError, match=message):
        resolve(f"demo({knobs})")


# the codec


def encoded(codec: DctTopK, rows: Tensor) -> Tensor:
    return codec.encode(rows, torch.full((len(rows), codec.wire_numel(rows.shape[1])), 255, dtype=torch.uint8))


def decoded(codec: DctTopK, wire: Tensor, n: int) -> Tensor:
    return codec.decode(wire, torch.full((len(wire), n), torch.nan))


@pytest.mark.parametrize("chunk", [64, 192, 4096, 32768])
def test_the_transform_and_its_inverse(chunk):
    """One coefficient is one cosine along each side; all of them are the values again."""
    codec = DctTopK(chunk, 1)
    u, v = chunk // 64 - 1, 63
    wave = torch.from_numpy(np.outer(dct(chunk // 64)[u], dct(64)[v])).float().reshape(1, -1)
    wire = encoded(codec, 3 * wave)
    assert wire[0, :4].view(torch.float32).item() == pytest.approx(3, rel=1e-5)
    assert wire[0, 4:].view(torch.int16).item() == u * 64 + v == chunk - 1
    assert torch.allclose(decoded(codec, wire, chunk), 3 * wave, atol=1e-6)
    values = torch.randn(2, 2 * chunk)
    whole = DctTopK(chunk, chunk)
    assert torch.allclose(decoded(whole, encoded(whole, values), 2 * chunk), values, atol=2e-5)


@pytest.mark.parametrize("codec", [DctTopK(), DctTopK(128, 7), DctTopK(64, 5, torch.bfloat16)], ids=repr)
def test_laws_of_a_codec(codec):
    n = 3 * codec.group
    rows = torch.randn(4, n + 5)[:, :n]
    wire = encoded(codec, rows)
    assert codec.wire_bytes(n) == wire.shape[1] == 3 * codec.k * (2 + codec.dtype.itemsize)
    values = decoded(codec, wire, n)
    assert torch.allclose(decoded(codec, encoded(codec, rows.contiguous()), n), values, atol=1e-5)
    bf16 = rows.bfloat16()
    assert torch.equal(encoded(codec, bf16), encoded(codec, bf16.float()))
    wide = torch.zeros(4, wire.shape[1] + 3, dtype=torch.uint8)[:, 1:-2]  # at no multiple of anything
    out = torch.zeros(4, n + 2)
    codec.decode(codec.encode(rows, wide), out[:, :n])
    assert torch.equal(out[:, :n], values) and not out[:, n:].any()
    total, base = torch.empty(n), torch.empty(n)
    codec.decode_sum(wide, total, 1 / 3)
    Codec._decode_sum(codec, wire, base, 1 / 3, lambda use, shape, dtype: torch.empty(shape, dtype=dtype))
    assert torch.allclose(total, base, atol=1e-6 * math.sqrt(codec.k))
    assert torch.allclose(codec.decode_sum(wire[:1], base), values[0], atol=1e-6)
    # the parts that are left out are orthogonal to those that were sent
    left = rows - values
    assert bool((left.norm(dim=1) < rows.norm(dim=1)).all())
    assert float((left * values).sum().abs() / rows.square().sum()) < (1e-5 if codec.dtype == torch.float32 else 3e-3)


def test_zero_is_exact_and_non_finite_stays_non_finite():
    codec = DctTopK(192, 3)
    rows = torch.zeros(1, 6, 192)
    rows[0, 1, 5], rows[0, 3, 100], rows[0, 5, 0] = torch.nan, torch.inf, -torch.inf
    values = decoded(codec, encoded(codec, rows.flatten(1)), 6 * 192).view(6, 192)
    assert not values[::2].any() and not values[1::2].isfinite().any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_sends_what_the_cpu_sends():
    codec, rows = DctTopK(), torch.randn(3, 8 * 4096)
    values = decoded(codec, encoded(codec, rows), rows.shape[1])
    there = torch.empty(3, codec.wire_numel(rows.shape[1]), dtype=torch.uint8, device="cuda")
    found = codec.decode(codec.encode(rows.cuda(), there), torch.empty_like(rows, device="cuda")).cpu()
    off = (found - values).unflatten(1, (-1, 4096)).abs().amax(2)
    assert int((off > 1e-4).sum()) <= 1  # a near tie may go either way
