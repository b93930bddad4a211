"""SCAPE against its pseudo-code (``papers/scape.py``, float64, by someone who had not seen it), laws and limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import ranks
import thinwire
from breadth import spread
from engines import build, same_on_all_ranks, train
from papers.scape import SCAPE as ScapePaper
from programs import check_interpreted, needs_triton
from thinwire.base.errors import ThinwireError
from thinwire.core.method import Parameter, Run
from thinwire.methods import SCAPE, resolve
from thinwire.methods.parts.masks import cut
from thinwire.ops import mask as masks
from thinwire.ops.moments import Moments, MomentSegment, Sent, cpu, reference
from thinwire.optim import AdamS
from thinwire.proof.ranks import ThreadComm
from threaded import reduce_on_threads

STEPS = 50
TOPOLOGIES = ["all_reduce", "reduce_scatter"]
SHAPES = {"a": (24, 25), "b": (12, 12), "c": (36, 8)}


def gradients(rank: int, step: int, numel: int) -> torch.Tensor:
    common = torch.randn(numel, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))
    return common * (1 + 0.01 * step) + noise


def adams(lr: float = 1e-2, **more):
    return lambda weights: AdamS(weights, lr=lr, **more)


def run(topology, size, steps=STEPS, optimizer=None, shapes=SHAPES, **knobs):
    more = {name: knobs.pop(name) for name in ("max_norm", "skip") if name in knobs}
    made = {"smallest": 0, "send": ("*",), **knobs}
    return reduce_on_threads(
        lambda: SCAPE(**made), gradients, topology=topology, size=size, shapes=shapes, steps=steps,
        optimizer=optimizer or adams(weight_decay=0.1), **more,
    )  # fmt: skip


@pytest.mark.parametrize(("knobs", "topology", "size"), spread(3, [(0.3, 10), (0.02, 4)], TOPOLOGIES, [2, 3, 4]))
def test_against_the_pseudo_code(knobs, topology, size):
    """50 steps, density warm-up and clipping included; by bits and, at the low density, by positions.

    Replicated and sharded weights are the same algorithm: what differs is who owns a mask.
    """
    (density, warmup), max_norm = knobs, 5.0
    results = run(topology, size, density=density, warmup=warmup, max_norm=max_norm)
    rows = size if topology == "reduce_scatter" else 1
    columns = [math.prod(shape) // rows for shape in SHAPES.values()]
    by_size = sorted(range(3), key=lambda i: -columns[i])
    load, owners = [0] * size, [0, 0, 0]
    for i in by_size:
        owners[i] = load.index(min(load))
        load[owners[i]] += columns[i]
    paper = ScapePaper(
        [c for c in columns for _ in range(rows)], size, density, 1e-2, weight_decay=0.1, max_norm=max_norm,
        clip="code", warmup=warmup, owners=owners if rows == 1 else [r for _ in columns for r in range(rows)],
    )  # fmt: skip
    starts = np.cumsum([0, *columns])

    def parts(flat):
        flat = flat.reshape(rows, -1)
        return [row for i, c in enumerate(columns) for row in flat[:, starts[i] : starts[i] + c]]

    factors = []
    for step in range(STEPS):
        given = [parts(gradients(n, step, sum(columns) * rows).double().numpy()) for n in range(size)]
        expected = paper.step(given)
        factors.append(paper.clip_factor)
        means = [results[r if rows > 1 else 0][step]["mean"].double().numpy() for r in range(rows)]
        for i, name in enumerate(SHAPES):
            for row in range(rows):
                at = i * rows + row
                mean = means[row][starts[i] : starts[i] + columns[i]]
                assert np.abs(mean - paper.recovered[at]).max() < 1e-4 * max(1, np.abs(paper.recovered[at]).max())
                for n in range(size) if rows == 1 else [row]:
                    weights = results[n][step]["weights"][name].double().numpy()
                    assert np.abs(weights - expected[at]).max() < 1e-5 + 2e-4 * np.abs(expected[at]).max()
                # What waits: of sharded rows apart, in what differs by rank and what is common, which the owner holds.
                common = results[row][step][f"common/{name}"][0].double().numpy() if rows > 1 else 0
                for n in range(size):
                    residual = results[n][step].get(f"residual/{name}")
                    residual = 0 if residual is None else residual[row].double().numpy()
                    assert np.abs(residual + common - paper.residuals[n][at]).max() < 1e-3
    assert min(factors) < 0.5
    if rows == 1:
        assert all(torch.equal(r[-1]["weights"]["a"], results[0][-1]["weights"]["a"]) for r in results)


class Late(NamedTuple):
    """Work that has done nothing until it is waited for, as a network's may be."""

    wait: Callable[[], object]


@pytest.mark.parametrize("density", [0.1, 0.02])
def test_a_parameter_too_large_for_one_chooser_is_the_papers_in_chunks(density, monkeypatch):
    """4 ranks, of 2064 values: 2000 are more than three quarters. Each chunk is a tensor of the paper's."""

    def gather_late(comm, out, row, async_op):
        rows = torch.stack(comm._swap(row.reshape(-1))).view_as(out)
        if async_op:
            return Late(lambda: out.copy_(rows))
        out.copy_(rows)
        return None

    monkeypatch.setattr(ThreadComm, "_all_gather", gather_late)
    shapes, size, warmup = {"a": (40, 50), "b": (8, 8)}, 4, 2
    chunks = cut(2000, 2064 // size)
    assert [chunk.span for chunk in chunks] == [576, 576, 576, 272]
    results = run("all_reduce", size, steps=8, shapes=shapes, density=density, warmup=warmup)
    columns, owners = [576, 576, 576, 272, 64], [0, 1, 2, 3, 3]
    paper = ScapePaper(columns, size, density, 1e-2, weight_decay=0.1, warmup=warmup, owners=owners)
    starts = np.cumsum([0, *columns])
    for step in range(8):
        flats = [gradients(n, step, 2064).double().numpy() for n in range(size)]
        expected = paper.step([[flat[a:b] for a, b in itertools.pairwise(starts)] for flat in flats])
        for found in results:
            weights = torch.cat([found[step]["weights"][name].flatten() for name in shapes])
            assert np.abs(weights.double().numpy() - np.concatenate(expected)).max() < 1e-5
            assert torch.equal(found[step]["mean"], results[0][step]["mean"])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_density_one_is_adams_exactly(topology):
    found = run(topology, 3, density=1.0, max_norm=1.0, steps=10)
    dense = reduce_on_threads(
        lambda: resolve("dense"), gradients, topology=topology, size=3, shapes=SHAPES, steps=10, max_norm=1.0,
        optimizer=adams(weight_decay=0.1),
    )  # fmt: skip
    for ours, theirs in zip(found, dense, strict=True):
        assert all(torch.equal(ours[-1]["weights"][name], theirs[-1]["weights"][name]) for name in SHAPES)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("density", [0.2, 0.02])
def test_nothing_is_lost(topology, density):
    """m' + what waits = b1 m + what waited + (1-b1) mean of the gradients, element by element, in every step.

    With a schedule of beta1, as OneCycleLR makes one.
    """
    size, rows = 3, 3 if topology == "reduce_scatter" else 1

    def beta1(step):
        return 0.85 + 0.01 * (step % 7)

    def scheduled(weights):
        optimizer, done = AdamS(weights, lr=1e-2, betas=(beta1(0), 0.999)), itertools.count(1)
        change = lambda *_: optimizer.param_groups[0].update(betas=(beta1(next(done)), 0.999))  # noqa: E731
        optimizer.register_step_post_hook(change)
        return optimizer

    results = run(topology, size, density=density, warmup=3, steps=30, optimizer=scheduled)
    moment, waited = torch.zeros(rows, 1), torch.zeros(rows, 1)
    for step in range(30):
        now = [rank[step] for rank in results]
        given = sum(state["input"].view(rows, -1) for state in now) / size
        arrived = torch.stack([now[row]["mean"] for row in range(rows)])

        def side_by_side(kind, row, state):
            return torch.cat([state[f"{kind}/{name}"][row] for name in SHAPES])

        waits = sum(torch.stack([side_by_side("residual", row, s) for row in range(rows)]) for s in now) / size
        if rows > 1:
            waits += torch.stack([side_by_side("common", 0, now[row]) for row in range(rows)])
        b1 = beta1(step)
        new = torch.where(arrived != 0, b1 * moment + (1 - b1) * arrived, 0)
        assert torch.allclose(new + waits, b1 * moment + waited + (1 - b1) * given, atol=1e-5)
        moment, waited = new, waits
    assert waited.abs().max() > 0.1


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("knobs", [{"density": 0.2}, {"density": 0.02}, {"density": 0.2, "refresh": 3}])
def test_bytes_are_the_plans(topology, knobs):
    results = run(topology, 4, warmup=3, steps=3 + 9, **knobs)
    exchange_bytes = [r["bytes"].item() for r in results[0]]
    planned = _planned(topology, 4, knobs)
    period = knobs.get("refresh", 1)
    steady = exchange_bytes[3 : 3 + 2 * period] if period > 1 else exchange_bytes[4:]
    assert sum(steady) / len(steady) == pytest.approx(planned, abs=1e-6)


def _planned(topology, size, knobs):
    from thinwire.network.ledger import Ledger
    from thinwire.plan.plan import plan_of
    from thinwire.proof.ranks import Threads, parameters_for
    from threaded import exchange_on

    method = SCAPE(smallest=0, send=("*",), warmup=3, **knobs)
    exchange = exchange_on(topology, Threads(size), 0, Ledger())
    parameters = parameters_for(exchange, SHAPES)
    weights = {name: torch.nn.Parameter(torch.zeros(p.local)) for name, p in parameters.items()}
    method.begin(Run(parameters, exchange, 12, 0, (AdamS(weights.values()),), weights))
    return plan_of(method, parameters.values(), exchange).wire_bytes


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_skipped_step_leaves_no_trace(topology):
    """The steps after it are those of a run in which it did not happen."""

    def shifted(rank, step, numel):
        return gradients(rank, step if step < 6 else step - 1, numel) if step != 6 else torch.full((numel,), math.nan)

    make = lambda: SCAPE(density=0.2, warmup=0, smallest=0, send=("*",))  # noqa: E731
    common = {"topology": topology, "size": 2, "shapes": SHAPES, "optimizer": adams()}
    whole = reduce_on_threads(make, gradients, steps=12, **common)
    skipped = reduce_on_threads(make, shifted, steps=13, skip=(6,), **common)
    for name in SHAPES:
        assert torch.equal(whole[0][-1]["weights"][name], skipped[0][-1]["weights"][name])


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_offloading_changes_nothing(topology):
    """Bit for bit, a skipped step included; the state that is saved is the same."""
    common = {"density": 0.2, "warmup": 2, "steps": 10, "skip": (6,)}
    here, there = (run(topology, 2, offload=offload, **common) for offload in (False, True))
    for ours, theirs in zip(there[1], here[1], strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            if isinstance(ours[key], torch.Tensor):
                assert torch.equal(ours[key], theirs[key]), key


def _run_of(weight, optimizer, **others):
    weights = {"weight": weight, **others}
    parameters = {
        name: Parameter(name, tuple(w.shape), w.numel(), "matrix", w.dtype, w.numel()) for name, w in weights.items()
    }
    return Run(parameters, None, 100, 0, (optimizer,), weights)


def test_what_does_not_fit_is_refused():
    weight = torch.nn.Parameter(torch.zeros(1000, 100))
    with pytest.raises(ThinwireError, match="built on AdamS"):
        SCAPE().begin(_run_of(weight, torch.optim.AdamW([weight])))
    other = torch.nn.Parameter(torch.zeros(1000, 100))
    two = AdamS([{"params": [weight]}, {"params": [other], "betas": (0.8, 0.9)}])
    with pytest.raises(ThinwireError, match="one beta1"):
        SCAPE().begin(_run_of(weight, two, other=other))
    for knobs in ("density=0", "refresh=0", "clip='return'"):
        with pytest.raises(ThinwireError, match="scape"):
            resolve(f"scape({knobs})")


def operands(n: int, m: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    values = [torch.randn(n, generator=generator) for _ in range(3)]
    return [x.to(device) for x in (*values, torch.randn(m, generator=generator))]


def check(module, n: int, m: int, device: str = "cpu") -> None:
    results = []
    for which in (reference, module):
        a, b, c, moment = operands(n, m, device)
        rest, given = torch.full((n,), math.nan, device=device), torch.full((n,), 7.0, device=device)
        words = torch.randint(-(2**62), 2**62, (n // 64,), generator=torch.Generator().manual_seed(1)).to(device)
        half = n // 128 * 64  # several parameters, one of which may have no moment here, and whose mask others choose
        scores = torch.full((n - half + 64,), math.nan, device=device)
        first, last = moment[:half], moment[half:]
        parts = [MomentSegment(0, half, first), MomentSegment(half, n - half, last, scores[: n - half])]
        held = Moments(parts, torch.device(device))
        results.append([])

        def seen(*values):
            results[-1] += [value.clone() for value in values]

        three = torch.stack([words, words.flip(0), words.roll(1)])  # as many bits in each row
        k = int(masks.popcount(words.view(1, -1)))
        ones = torch.full((3, n // 64), -1, device=device)
        rows, residual = torch.stack([a, b, c]), torch.stack([c, a, b])
        for mask, bits in ((three, k), (ones, n)):
            known = module.directory(mask) if hasattr(module, "directory") else None
            for before in (None, known):
                for choose in (False, True):
                    scores.fill_(math.nan)
                    payload = torch.full((3, bits + 2), math.nan, device=device)[:, :bits]
                    sent = Sent(mask, before, payload, torch.full((3, n), math.nan, device=device), 0.25)
                    which.add_up(rows.clone(), residual, held, 0.9, sent, choose, c, 1)
                    seen(sent.payload, sent.residual_out, *([scores[: n - half]] if choose else []))
                    assert choose or scores.isnan().all()
                    scores.fill_(math.nan)
                    gradient, left = a.view(1, n).clone(), torch.full((1, n), math.nan, device=device)
                    payload = torch.full((1, k), math.nan, device=device) if bits == k else gradient
                    sent = Sent(mask[:1], before, payload, left)
                    which.add_up(gradient, b.view(1, n), held, 0.9, sent, choose, None, 0)
                    seen(payload, left, *([scores[: n - half]] if choose else []))
                    assert choose or scores.isnan().all()
                row = None if before is None else before[0]
                for common, common_out in ((c, rest), (c.clone(), None), (None, None)):
                    if common is not None and common_out is None:
                        common_out = common  # in place
                    gradient = torch.full((n,), math.nan, device=device)
                    mean = gradient.copy_(payload[0]) if bits == n else payload[0]  # what is all sent may be in place
                    which.advance(mean, held, mask[0], 0.9, given, gradient, common, common_out, row)
                    seen(gradient, given, *([] if common_out is None else [common_out]))
        assert scores[n - half :].isnan().all()
    for actual, expected in zip(results[1], results[0], strict=True):
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n, m", [(64, 64), (640, 601), (128, 0)])
def test_kernels_are_the_reference(n, m):
    check(cpu, n, m)


@needs_triton
def test_triton_interpreted_is_the_reference():
    code = """
from papers import test_scape
from thinwire.ops.moments import triton
for n, m in ((64, 64), (1088, 1030), (2048, 1)):
    test_scape.check(triton, n, m)
"""
    check_interpreted(code)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_is_the_reference():
    from thinwire.ops.moments import triton

    for n, m in ((64, 64), (1088, 1030)):
        check(triton, n, m, "cuda")


def _weights(rank, world):
    found = {}
    for weights in ("masked", "dense"):
        for kind in ("fsdp2", "fsdp2-keep"):
            model = build(kind, world)
            optimizer = AdamS(model.parameters(), lr=3e-3, weight_decay=0.3)
            method = f"scape(density=0.1, warmup=3, smallest=100, weights='{weights}')"
            wire = thinwire.compress(model, optimizer, method)
            losses = train(model, optimizer, rank, range(6), wire)
            wire.reset_stats()
            losses += train(model, optimizer, rank, range(6, 9), wire, poison=(7, 1))
            found[weights, kind] = losses, wire.ledger.stats()["weight_bytes_per_step"] * 3 / 2, wire.plan.weight_bytes
            before = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict({name: value * 1.5 for name, value in before.items()})
            found[weights, kind][0].extend(train(model, optimizer, rank, range(9, 11), wire))
            wire.close()
    return found


def test_weights_gathered_at_the_mask_are_the_weights():
    """Losses bit for bit those of whole gathers: resharded or not, after a skipped step and after other weights."""
    for found in ranks.run(_weights, 3):
        losses = [str(found[key][0]) for key in found]
        assert len(set(losses)) == 1, losses
        for kind in ("fsdp2", "fsdp2-keep"):
            _, sent, planned = found["masked", kind]
            assert sent == planned  # of three steps one was skipped: its weights had been there
        assert found["masked", "fsdp2"][1] < 0.3 * found["dense", "fsdp2-keep"][1]


def _mixed(rank, world):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors, trained = [], []
    for method in ("scape(density=0.1, warmup=1, smallest=100)", "scape(smallest=100, weights='masked')"):
        model = build("fsdp2", world, policy=policy)
        optimizer = AdamS(model.parameters(), lr=3e-3)
        try:
            wire = thinwire.compress(model, optimizer, method, steps=10)
        except ThinwireError as error:
            errors.append(str(error))
            continue
        losses = train(model, optimizer, rank, range(4), wire)
        trained.append((losses[-1] < losses[0], same_on_all_ranks(model)))
        wire.close()
    return trained, errors


def test_weights_that_are_gathered_in_few_bits_are_gathered_whole_or_refused_at_once():
    for trained, errors in ranks.run(_mixed, 2):
        assert trained == [(True, True)]
        assert len(errors) == 1 and "FSDP2 gathers them in torch.bfloat16: use weights='auto'" in errors[0]
