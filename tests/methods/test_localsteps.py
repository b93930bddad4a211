"""Local steps against their papers' equations in float64, their limits, what travels when, checkpoints in a round."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import warnings
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import thinwire
from breadth import dealt
from engines import build, refusal, same_on_all_ranks, train
from models import flat, loss_of
from papers.local_steps import LS1, AdamW, DiLoCo, StreamingDiLoCo
from thinwire import methods
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.base.knobs import knobs_of
from thinwire.core.method import Parameter, Step
from thinwire.methods import LocalSteps, resolve
from thinwire.methods.parts.fragments import Timetable, split
from thinwire.methods.parts.own_adam import OwnNumbers, check_patchwork, step_by_mean_moment
from thinwire.network.comm import local
from thinwire.network.ledger import Ledger
from thinwire.proof.ranks import ThreadEngine, Threads, VirtualRank
from threaded import entries, reduce_on_threads

SHAPES = {"a": (12, 16), "b": (5, 7)}
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}
TOPK = "topk(feedback='gradients', smallest=0, density=0.1)"


def gradients(rank: int, step: int, numel: int) -> Tensor:
    common = torch.randn(numel, generator=torch.Generator().manual_seed(8))
    return common + torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def sgd(weights):
    return torch.optim.SGD(weights, lr=0.1)


def adamw(weights):
    return torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)


def play(make, size=3, steps=8, *, optimizer=sgd, topology="all_reduce", **more):
    return reduce_on_threads(make, gradients, topology=topology, size=size, shapes=SHAPES, steps=steps,
                             optimizer=optimizer, **more)  # fmt: skip


def weights_of(taken: dict[str, Any]) -> np.ndarray:
    return torch.cat([taken["weights"][name].reshape(-1) for name in SHAPES]).double().numpy()


# The papers' equations.


def adamw64() -> AdamW:
    return AdamW(0.9, 0.999, 1e-8, 0.1)


def given64(results, step: int) -> list[np.ndarray]:
    return [rank[step]["input"].double().numpy() for rank in results]


def given_by_tensor(results, step: int) -> list[list[np.ndarray]]:
    """[worker][tensor]."""
    return [np.split(g, [math.prod(SHAPES["a"])]) for g in given64(results, step)]


def zeros64() -> list[np.ndarray]:
    return [np.zeros(math.prod(shape)) for shape in SHAPES.values()]


@pytest.mark.parametrize(("every", "lr", "mu"), [(1, 1.0, 0.0), (2, 0.7, 0.9), (3, 0.5, 0.5)])
def test_diloco_against_its_equations(every, lr, mu):
    size, steps = 3, 12
    results = play(lambda: LocalSteps(every=every, outer_lr=lr, outer_momentum=mu), size, steps, optimizer=adamw)
    paper = DiLoCo(zeros64(), size, adamw64, lr, mu)
    for step in range(steps):
        for n, gradient in enumerate(given_by_tensor(results, step)):
            paper.inner_step(n, gradient, 1e-2)
        if (step + 1) % every == 0:
            paper.round()
        for n in range(size):
            assert np.abs(weights_of(results[n][step]) - np.concatenate(paper.local[n])).max() < 2e-6


STREAMS = [
    (1, 4, 2, 0.5, 0.9), (1, 3, 3, 0.5, 0.0), (2, 4, 1, 0.5, 0.9), (2, 4, 2, 0.0, 0.5), (2, 6, 3, 0.25, 0.9),
    (2, 5, 2, 0.5, 0.9), (2, 2, 1, 0.5, 0.5),
]  # fmt: skip
"""Fragments, steps of a round, delay, mix, outer momentum."""


def streaming(fragments: int, every: int, delay: int, mix: float, mu: float, size: int, **more: Any) -> StreamingDiLoCo:
    lists = [[0, 1]] if fragments == 1 else [[0], [1]]
    offsets = [(number + 1) * every // fragments for number in range(fragments)]
    return StreamingDiLoCo(zeros64(), size, adamw64, 0.7, mu, lists, offsets, every, delay, mix, **more)


@pytest.mark.parametrize(("fragments", "every", "delay", "mix", "mu"), STREAMS)
def test_streaming_diloco_against_its_equations(fragments, every, delay, mix, mu):
    """On threads a message arrives at once, and is taken up after the delay all the same."""
    size, steps = 3, 13
    make = partial(LocalSteps, every=every, outer_momentum=mu, fragments=fragments, delay=delay, mix=mix)
    results = play(make, size, steps, optimizer=adamw)
    paper = streaming(fragments, every, delay, mix, mu, size)
    for step in range(steps):
        for n, gradient in enumerate(given_by_tensor(results, step)):
            paper.inner_step(n, gradient, 1e-2)
        paper.clock(last=step == steps - 1)
        for n in range(size):
            assert np.abs(weights_of(results[n][step]) - np.concatenate(paper.local[n])).max() < 2e-6


def test_fragments_without_a_delay_against_their_equations():
    make = partial(LocalSteps, every=4, fragments=2)
    results, paper = play(make, 3, 10, optimizer=adamw), streaming(2, 4, 0, 0.0, 0.9, 3)
    for step in range(10):
        for n, gradient in enumerate(given_by_tensor(results, step)):
            paper.inner_step(n, gradient, 1e-2)
        paper.clock(last=step == 9)
        for n in range(3):
            assert np.abs(weights_of(results[n][step]) - np.concatenate(paper.local[n])).max() < 2e-6
        for name, due in (("a", (step + 1) % 4 == 2), ("b", (step + 1) % 4 == 0)):  # equal as its round ends
            equal = all(torch.equal(rank[step]["weights"][name], results[0][step]["weights"][name]) for rank in results)
            assert equal == (due or step == 9)


def ls1_agrees(results, size: int, every: int, start: int, steps: int, compress) -> None:
    paper = LS1(zeros64(), size, (0.9, 0.999), 1e-8, 0.1, None, compress=compress, handover="scaled")
    for step in range(steps):
        given = given_by_tensor(results, step)
        if step < start:
            paper.warm_step(given, 1e-2)
        else:
            for n, gradient in enumerate(given):
                paper.inner_step(n, gradient, 1e-2)
            if (step + 1 - start) % every == 0 or step == steps - 1:
                paper.round()
        for n in range(size):
            assert np.abs(weights_of(results[n][step]) - np.concatenate(paper.local[n])).max() < 5e-6


@pytest.mark.parametrize("start", [0, 3])
def test_a_second_moment_of_the_mean(start):
    """LS1's step: w -= lr (m^ / (sqrt(v^ / N) + eps) + decay w); after a dense start v is N times the mean's."""
    size, steps = 4, 12
    make = partial(LocalSteps, every=4, start=start, second_moment="mean", **PLAIN)
    ls1_agrees(play(make, size, steps, optimizer=adamw), size, 4, start, steps, lambda x: x)


@pytest.mark.parametrize("fails", [False, True])
def test_the_optimizer_of_the_user_stays_as_it_is(fails):
    """Adam steps with v N, lr sqrt(N), eps sqrt(N) and decay / sqrt(N), which are put back, whatever it raises."""
    weight = torch.nn.Parameter(torch.ones(3))
    rests, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))  # of another model
    optimizer = adamw([weight, rests, other])
    for each in (weight, rests, other):
        each.grad = torch.full_like(each, 4.0)
    optimizer.step()
    rests.grad = None
    groups, values = optimizer.param_groups, [dict(group) for group in optimizer.param_groups]
    moments = {each: dict(entry) for each, entry in optimizer.state.items()}
    kept = copy.deepcopy([list(entry.values()) for entry in moments.values()])
    seen = []

    def own_step(stepping):
        (group,) = stepping.param_groups
        seen.append([group[key] for key in ("lr", "eps", "weight_decay", "params")])
        seen.append(optimizer.state[weight]["exp_avg_sq"].tolist())
        if fails:
            raise KeyboardInterrupt

    step = Step(0, (optimizer,), {"a": weight, "b": rests}, own_step=own_step)
    with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        step_by_mean_moment(step, 4)
    assert seen[0] == [0.02, 2e-8, 0.05, [weight]] and seen[1] == [4 * float(kept[0][2][0])] * 3
    assert optimizer.param_groups is groups and groups == values and other.grad is not None
    assert all(torch.equal(a, b) for a, b in zip(itertools.chain(*(entry.values() for entry in moments.values())),
                                                  itertools.chain(*kept), strict=True))  # fmt: skip
    assert (weight.grad is None) != fails
    step.restore()
    assert weight.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize(("kind", "more"), [
    (torch.optim.Adam, {}), (torch.optim.AdamW, {}), (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
])  # fmt: skip
def test_each_kind_of_adam_steps_with_the_second_moment_of_the_mean(kind, more):
    """w -= lr (m^ / (sqrt(v^ / N) + eps) + decay w); Adam's own decay joins the gradient."""
    ranks_, decay, eps = 4, 0.1, 1e-3
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
    optimizer = kind([weight], **{"lr": 0.01, "weight_decay": decay, "eps": eps, **more})
    w, m, v, most = weight.detach().double().numpy().copy(), 0.0, 0.0, 0.0
    for t in range(1, 6):
        weight.grad = torch.randn(5, generator=torch.Generator().manual_seed(t)) / t
        g = weight.grad.double().numpy() + (decay * w if kind is torch.optim.Adam else 0)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        most = np.maximum(most, v) if "amsgrad" in more else v
        step = Step(t, (optimizer,), {"a": weight})
        step_by_mean_moment(step, ranks_)
        optimizer.step()  # which finds no gradient
        step.restore()
        w = w * (1 - (0.01 * decay if kind is torch.optim.AdamW else 0))
        w = w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(most / ranks_ / (1 - 0.999**t)) + eps)
        assert np.abs(weight.detach().numpy() - w).max() < 1e-6


def adam_after(betas: tuple[float, float], seed: int) -> torch.optim.Adam:
    """After 60 steps along gradients of many sizes, most of them 0 for some values, one of them huge."""
    weight = torch.nn.Parameter(torch.zeros(40))
    optimizer = torch.optim.AdamW([weight], betas=betas)
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-20, 10, 40)[torch.randperm(40, generator=generator)]
    for step in range(60):
        there = torch.rand(40, generator=generator) < torch.linspace(0, 1, 40)
        weight.grad = torch.randn(40, generator=generator) ** 3 * scales * there * (1e4 if step == 30 else 1)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.5, 0.9999), (0.95, 0.95), (0.99, 0.9)])
def test_moments_of_one_rank_are_known_from_those_of_two(betas):
    own, other = (adam_after(betas, seed) for seed in (0, 1))
    check_patchwork("local-steps", own, 1)
    check_patchwork("local-steps", torch.optim.AdamW(own.param_groups[0]["params"]), 1)  # before its first step
    (moments,), (others,) = own.state.values(), other.state.values()
    moments["exp_avg_sq"] = others["exp_avg_sq"]
    has_bound = betas[0] ** 2 < betas[1]
    with pytest.raises(ThinwireError, match="not of one rank") if has_bound else contextlib.nullcontext():
        check_patchwork("local-steps", own, 1)


def _patched(rank: int, world: int) -> list[str]:
    """What the first step says after moments were loaded: the own, a mixture of two ranks', and that and the wire's."""
    said = []
    for what in ("own", "mixed", "mixed, wire"):
        model = build("ddp", world)
        optimizer = adamw(model.parameters())
        wire = thinwire.compress(model, optimizer, "local-steps(every=3)")
        train(model, optimizer, rank, range(4), wire)
        saved, state = copy.deepcopy(optimizer.state_dict()), wire.state_dict()
        if what != "own":
            for moments in saved["state"].values():
                moments["exp_avg_sq"] *= 1e-4  # of one whose gradients were a hundredth
        optimizer.load_state_dict(saved)
        if "wire" in what:
            wire.load_state_dict(state)
        said.append(refusal(train, model, optimizer, rank, [4], wire))
        wire.close()
    return said


def test_moments_of_several_ranks_are_refused_in_the_step_after_they_were_loaded():
    for own, mixed, with_wire in ranks.run(_patched, 2):
        assert own == with_wire == "" and "not of one rank" in mixed


def _momentum_of_what_came(rank: int, world: int) -> list[bool]:
    """Is m that of the gradients that were here, whatever rests, fails or is resumed with another start?"""
    module = build("ddp", world).module
    weights = list(module.parameters())
    halves = weights[: len(weights) // 2], weights[len(weights) // 2 :]
    optimizers = [adamw(half) for half in halves]
    expected, found, wire = [torch.zeros_like(weight) for weight in weights], [], None
    for number in range(10):
        if number in (0, 6):  # goes on as a longer run, whose start is longer: it is over, and then it is not
            saved = None if wire is None else wire.state_dict()
            if wire is not None:
                wire.close()
            method = method_of(second_moment="mean", every=2, start=0.25)
            model = DistributedDataParallel(module, bucket_cap_mb=0.01)
            wire = thinwire.compress(model, optimizers, method, steps=12 if saved is None else 32)
            if saved is not None:
                wire.load_state_dict(saved)
        loss_of(model, number, rank).backward()
        rests = number == 3  # the first local step, of one optimizer
        if rests:
            for weight in halves[1]:
                weight.grad = None
        for weight, moment in zip(weights, expected, strict=True):
            if weight.grad is not None:
                moment.lerp_(weight.grad, 0.1)
        for optimizer in optimizers[: 1 if rests else 2]:
            if number == 4:
                with (
                    mock.patch.object(torch.optim.AdamW, "_init_group", side_effect=MemoryError),
                    pytest.raises(MemoryError),
                ):
                    optimizer.step()
                found.append({group["lr"] for group in optimizer.param_groups} == {1e-2})
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        own = {weight: entry for optimizer in optimizers for weight, entry in optimizer.state.items()}
        found.append(all(torch.allclose(own[weight]["exp_avg"], moment, rtol=1e-5, atol=1e-9)
                         for weight, moment in zip(weights, expected, strict=True)))  # fmt: skip
    wire.close()
    return found


def test_the_momentum_is_that_of_the_gradients_that_came():
    """In the start, after it, after an error, after a rest, and after a resume in which the start has another end."""
    for found in ranks.run(_momentum_of_what_came, 2):
        assert found == [True] * len(found)


def signs(values: np.ndarray, size: int, group: int) -> np.ndarray:
    """C of LS1, for one parameter whose chunk j is with server j: signs, times the mean of |x| in groups."""
    span, coded = -(-len(values) // size), np.empty_like(values)
    for row in range(0, len(values), span):
        for first in range(row, min(row + span, len(values)), group):
            at = slice(first, min(first + group, row + span))
            coded[at] = np.where(values[at] < 0, -1, 1) * np.abs(values[at]).mean()
    return coded


@pytest.mark.parametrize(("size", "every"), [(2, 2), (3, 4)])
def test_ls1_against_its_equations(size, every):
    """One bit both ways: q_n = C[W - w_n + e_n], q = C[mean q_n + s]; W -= q; errors at both ends."""
    start, steps, group = 2, 2 + 4 * every, 32
    make = partial(LocalSteps, every=every, start=start, second_moment="mean",
                   outer=f"sign(group={group}, smallest=0)", **PLAIN)  # fmt: skip
    results = play(make, size, steps, optimizer=adamw)
    ls1_agrees(results, size, every, start, steps, lambda x: signs(x, size, group))


# Limits.


@pytest.mark.parametrize("size", [2, 4])
def test_one_step_with_sgd_is_dense(size):
    local, dense = play(lambda: LocalSteps(every=1, **PLAIN), size), play(lambda: resolve("dense"), size)
    for step, taken in enumerate(local[0]):
        assert np.abs(weights_of(taken) - weights_of(dense[0][step])).max() < 1e-6
        assert all(np.array_equal(weights_of(rank[step]), weights_of(taken)) for rank in local)


@pytest.mark.parametrize("every", [1, 3])
def test_one_rank_trains_as_ever(every):
    local, dense = (play(make, 1, optimizer=adamw) for make in (lambda: LocalSteps(every=every, **PLAIN),
                                                                lambda: resolve("dense")))  # fmt: skip
    for taken, other in zip(local[0], dense[0], strict=True):
        assert np.abs(weights_of(taken) - weights_of(other)).max() < 1e-6


def test_the_start_is_dense_bit_for_bit():
    local, dense = play(lambda: LocalSteps(every=2, start=5), optimizer=adamw), play(lambda: resolve("dense"),
                                                                                     optimizer=adamw)  # fmt: skip
    for step in range(5):
        assert np.array_equal(weights_of(local[1][step]), weights_of(dense[1][step]))
    assert local[0][4]["bytes"] > 0 == local[0][5]["bytes"]


@pytest.mark.parametrize("topology", ["all_reduce", "hsdp"])
@pytest.mark.parametrize(
    ("start_with", "share"),
    [("loco(beta=0,reset=0,smallest=0)", 1 / 8 + 1 / 128), ("int8(feedback='gradients')", 1 / 4 + 1 / 128),
     ("powersgd(feedback='gradients',rank=1)", None), ("trickle:merged(feedback='gradients',density=0.1)", None),
     ("tagc(feedback='gradients',theta=0.9)", None)],
)  # fmt: skip
def test_a_start_in_few_bits_loses_nothing_and_keeps_nothing(start_with, share, topology):
    """Its last step is dense and brings what waits: then SGD is where a dense start would have brought it."""
    few, dense = (play(partial(LocalSteps, every=2, start=4, start_with=method), 4, 6, topology=topology,
                       per_node=2 if topology == "hsdp" else 1) for method in (start_with, "dense"))  # fmt: skip
    apart = [np.abs(weights_of(few[0][step]) - weights_of(dense[0][step])).max() for step in range(4)]
    assert min(apart[:3]) > 1e-4 and apart[3] < 1e-6
    if topology == "all_reduce" and share is not None:  # (HSDP's hop inside the node is dense)
        assert few[0][0]["bytes"] / few[0][3]["bytes"] == pytest.approx(share)
    waits = [{key for key in taken if key.lstrip("=").startswith("start ")} for taken in few[0]]
    assert waits[0] and not waits[4]


def outers() -> list[str]:
    """Every method that averages gradients, with small tensors sent and no start."""
    found = []
    for cls in methods.TABLE:
        if cls is LocalSteps or not cls().rank_equal or cls().card.promise.of != "gradients":
            continue
        knobs = {"smallest": 0, "start": 0, "warmup": 1, "group": 32, "sign": False}
        mine = [f"{knob.name}={knobs[knob.name]}" for knob in knobs_of(cls) if knob.name in knobs]
        found.append(f"{cls.name}({', '.join(mine)})")
    return found


@pytest.mark.parametrize("outer", outers())
def test_every_outer_method_runs(outer):
    """Ranks hold the same bits after each round, and weights go where the gradients point."""
    results = play(lambda: LocalSteps(every=2, outer=outer, **PLAIN), 3, 8)
    for step in (1, 3, 5, 7):
        ends = [weights_of(rank[step]) for rank in results]
        assert all(np.array_equal(ends[0], end) for end in ends) and np.isfinite(ends[0]).all()
    common = torch.randn(len(ends[0]), generator=torch.Generator().manual_seed(8)).double().numpy()
    assert ends[0] @ common < -0.01 * np.linalg.norm(ends[0]) * np.linalg.norm(common)


@pytest.mark.parametrize("outer", outers())
def test_every_outer_method_runs_beside_the_steps(outer):
    """Each fragment's method is a run of its own: its masks, matrices and counts do not meet the others'."""
    results = play(lambda: LocalSteps(every=2, outer=outer, fragments=2, delay=1, **PLAIN), 3, 8)
    ends = [weights_of(rank[7]) for rank in results]
    assert all(np.array_equal(ends[0], end) for end in ends) and np.isfinite(ends[0]).all()
    common = torch.randn(len(ends[0]), generator=torch.Generator().manual_seed(8)).double().numpy()
    assert ends[0] @ common < -0.01 * np.linalg.norm(ends[0]) * np.linalg.norm(common)


@pytest.mark.parametrize("topology", ["all_reduce", "hsdp"])
@pytest.mark.parametrize(
    "outer", [TOPK, "int8(smallest=0, feedback='gradients')", "powersgd(feedback='gradients', smallest=0, rank=1)"]
)
def test_what_was_moved_has_arrived_or_waits(outer, topology):
    """Of plain averaging with SGD: N times how far all are from the start + what waits = all local steps."""
    size, steps, per_node = 4, 8, 2 if topology == "hsdp" else 1
    results = play(lambda: LocalSteps(every=4, outer=outer, **PLAIN), size, steps, topology=topology,
                   per_node=per_node)  # fmt: skip
    for first in range(per_node):  # HSDP: the ranks with the same shard
        group = results[first::per_node]
        made = sum(0.1 * rank[step]["mean"].double() for rank in group for step in range(steps)).numpy()
        arrived, place = -len(group) * weights_of(group[0][-1]), 0
        for name, values in group[0][-1]["weights"].items():
            waits = sum(rank[-1][f"residual/{name}"].double().reshape(-1) for rank in group)[: values.numel()].numpy()
            at = slice(place, place := place + values.numel())
            assert np.abs(made[at] - arrived[at] - waits).max() < 1e-5
            assert np.abs(waits).max() > 1e-4


def test_a_run_whose_length_is_known_ends_with_a_round():
    results = play(lambda: LocalSteps(every=3), steps=8)
    equal = [all(np.array_equal(weights_of(results[0][s]), weights_of(rank[s])) for rank in results) for s in range(8)]
    assert equal == [False, False, True, False, False, True, False, True]


@pytest.mark.parametrize("outer", [TOPK, "int8(smallest=0, feedback='gradients')"])
@pytest.mark.parametrize(("fragments", "delay"), [(2, 0), (2, 2), (1, 4)])
def test_each_round_of_a_fragment_conserves(outer, fragments, delay):
    """N times how far W goes + what waits after = how far the ranks are from W + what waited before: each round."""
    size, steps = 3, 12
    make = partial(LocalSteps, every=4, outer=outer, fragments=fragments, delay=delay, **PLAIN)
    results = play(make, size, steps, optimizer=sgd)
    rounds = 0
    for name in SHAPES:
        waits, common, at = f"residual/{name}", f"=anchor/{name}", slice(0, math.prod(SHAPES[name]))
        for step in range(1, steps - 1):  # the last one ends with a round of all, after what arrives
            old, new = results[0][step - 1][common], results[0][step][common]
            if torch.equal(old, new):
                continue
            rounds += 1
            # What arrives in this step has been mixed in before its round leaves.
            own = [rank[step]["weights"][name] if delay else stepped(rank, step, name) for rank in results]
            before, after = (
                sum(rank[number].get(waits, torch.zeros(1, len(old.flatten()))).double().reshape(-1)[at]
                    for rank in results) for number in (step - 1, step)
            )  # fmt: skip
            moved = sum(old.double().flatten() - weight.double() for weight in own)
            assert (moved + before - after - size * (old - new).double().flatten()).abs().max() < 1e-5
            assert after.abs().max() > 1e-5
    assert rounds >= 4


def stepped(rank: list[dict[str, Any]], step: int, name: str) -> Tensor:
    """Its weight after SGD's step, before anything of the others arrived."""
    begin = 0 if name == "a" else math.prod(SHAPES["a"])
    gradient = rank[step]["mean"][begin : begin + math.prod(SHAPES[name])]
    return rank[step - 1]["weights"][name].flatten() - 0.1 * gradient


def test_layers_are_dealt_out_in_turn():
    """By layer, strided where layers are of one size; what lies outside of layers, to the smallest."""
    names = ["tokens.weight", *(f"layers.{n}.{of}.weight" for n in range(6) for of in ("up", "down")), "head.weight"]
    parameters = {name: Parameter(name, (8, 8), 64, "matrix", torch.float32, 64) for name in names}
    tokens, *_ = parts = split(parameters, 3)
    assert tokens == ["tokens.weight", *names[5:7], *names[11:13]] and sorted(itertools.chain(*parts)) == sorted(names)
    assert parts[1][:2] == names[1:3] and parts[2][:2] == names[3:5]
    with pytest.raises(ThinwireError, match="fragments=3 of a model with 2 layers"):
        play(lambda: LocalSteps(fragments=3), 2)


@pytest.mark.parametrize("every", range(1, 8))
def test_a_timetable_has_one_round_at_a_time(every):
    for fragments in range(1, every + 1):
        for delay in range(every // fragments + 1):
            table = Timetable(every, fragments, delay)
            due = [table.due(step) for step in range(1, 2 * every + 1)]
            assert all(len(numbers) < 2 for numbers in due) and sum(map(len, due)) == 2 * fragments
            sends = [step for step, numbers in enumerate(due, 1) if numbers]
            assert all(later - earlier >= delay for earlier, later in itertools.pairwise(sends))
            cycle = table.cycle({0: 0.5, 1: 0.5})
            assert sum(cycle.values()) == pytest.approx(1)
            assert all(step >= 0 for step in cycle)


# What is refused.


@pytest.mark.parametrize(("knobs", "word"), [
    ({"every": 0}, "every"), ({"outer_lr": 0.0}, "outer_lr"), ({"outer_momentum": 1.0}, "outer_momentum"),
    ({"outer": "none"}, "averages"),
    ({"outer": "local-steps"}, "averages"), ({"outer": "onebit-adam"}, "an Adam"), ({"outer": "nothing"}, "there"),
    ({"dense": "*bias"}, "outer method"), ({"start_with": "int8"}, "start=0"),
    ({"start": 2, "start_with": "radius"}, "the same in each step"),
    ({"start": 4, "start_with": "sign(start=2)"}, "the same in each step"),
    ({"fragments": 0}, "fragments"), ({"fragments": 21}, "every=20"), ({"delay": -1}, "delay"),
    ({"fragments": 4, "delay": 6}, "every / fragments = 5"), ({"mix": 0.3}, "delay=0"),
    ({"delay": 1, "mix": 1.0}, "mix"),
    ({"start": 2, "start_with": "topk"}, "write topk"), ({"start": 2, "start_with": "none"}, "averages"),
])  # fmt: skip
def test_what_cannot_be_is_refused(knobs, word):
    with pytest.raises(ThinwireError, match=word):
        LocalSteps(**knobs)


def test_it_can_be_written_on_the_command_line():
    method = resolve("local-steps(every=4, outer='int8:feedback:gradients', outer_lr=0.7, outer_momentum=0.9)")
    assert isinstance(method, LocalSteps) and method.card.carrier == resolve("int8(feedback='gradients')")
    assert resolve(str(method)) == method
    assert LocalSteps(outer=methods.TopK(feedback="gradients", density=0.5)).card.carrier.density == 0.5
    preset = resolve("local-steps:recommended(every=15)")
    assert (preset.every, preset.outer_momentum, preset.card.carrier.name) == (15, 0.0, "trickle")


# On engines.


def method_of(**knobs: Any) -> LocalSteps:
    return LocalSteps(**{"every": 3, "outer": TOPK, "start": 1, **knobs})


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def inter_bytes(wire: Any) -> float:
    return wire.ledger.last.bytes["inter"]


def several(rank: int, world: int, function: Any, cases: list[tuple]) -> list[Any]:
    """``function(rank, world, *case)`` of each case, in one process group."""
    return [function(rank, world, *case) for case in cases]


def _travels(rank: int, world: int, kind: str, outer: str) -> tuple[list[float], list[bool], float, float]:
    """Bytes across nodes of each step, whether ranks were equal after it; bytes of a step, planned and sent."""
    model = build(kind, world)
    optimizer = adam(model)
    wire = thinwire.compress(model, optimizer, method_of(outer=outer))
    bytes_, equal, sent = [], [], []
    for step in range(10):
        train(model, optimizer, rank, [step], wire)
        bytes_.append(inter_bytes(wire))
        sent.append(sum(wire.ledger.last.bytes.values()) - wire.ledger.last.weight_bytes)
        equal.append(_equal(model, kind))
    planned = wire.plan.dry_run.sent
    wire.close()
    return bytes_, equal, sum(planned.values()), sum(sent[4:]) / 6


def _equal(model: Any, kind: str) -> bool:
    if kind == "ddp":
        return same_on_all_ranks(model)
    shards = torch.cat([p.to_local().detach().flatten() for p in model.parameters()])
    peers = [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    everybody = [None] * 4
    dist.all_gather_object(everybody, shards)
    return torch.equal(everybody[peers[0]], everybody[peers[1]])


@pytest.mark.parametrize(("kind", "world", "per_node"), [("ddp", 2, 1), ("ddp", 4, 1), ("hsdp", 4, 2)])
def test_between_rounds_nothing_travels(kind, world, per_node):
    cases = [(kind, outer) for outer in dealt(["dense", TOPK, "int8(smallest=0)"], world, (2, 4))]
    for found in ranks.run(several, world, _travels, cases, LOCAL_WORLD_SIZE=str(per_node)):
        for bytes_, equal, planned, sent in found:
            rounds = [step % 3 == 0 for step in range(10)]
            assert equal == rounds
            assert [nbytes > 0 for nbytes in bytes_] == rounds, "the guard's flag included"
            assert sent == pytest.approx(planned, rel=1e-9)


def _absent(rank: int, world: int, kind: str) -> list[list[tuple[np.ndarray, bool]]]:
    """The weights after each step, and whether ranks have the same; the second optimizer has no part in each second."""
    runs = []
    for called in (True, False):  # without a gradient, in place of not at all
        model, after = build(kind, world), []
        weights = list(model.parameters())
        optimizers = [torch.optim.AdamW(half, lr=1e-3) for half in (weights[::2], weights[1::2])]
        wire = thinwire.compress(model, optimizers, LocalSteps(every=2))
        for step in range(6):
            loss_of(model, step, rank).backward()
            optimizers[0].step()
            if step % 2:
                optimizers[1].zero_grad()
            if called or not step % 2:
                optimizers[1].step()
            model.zero_grad()
            with torch.no_grad():
                loss_of(model, step, rank)
            values = torch.cat([local(weight).detach().flatten() for weight in weights])
            after.append((values.numpy(), _equal(model, kind)))
        runs.append(after)
        wire.close()
    return runs


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_an_optimizer_that_is_absent_from_the_last_step_of_a_round_does_not_put_it_off(kind, world):
    """The round ended in the next backward pass, for which a forward pass with other weights had been; or never."""
    for called, absent in ranks.run(_absent, world, kind):
        assert [equal for _, equal in absent] == [equal for _, equal in called] == [False, True] * 3
        assert all(np.array_equal(one, other) for (one, _), (other, _) in zip(called, absent, strict=True))


def _poisoned(rank: int, world: int, kind: str, at: int, every: int) -> dict[str, Any]:
    """A loss that is not finite on rank 1 in step ``at``; what each rank did, and what it would have done without."""
    found: dict[str, Any] = {}
    for poison in (None, (at, 1)):
        model = build(kind, world)
        optimizer = adam(model)
        wire = thinwire.compress(model, optimizer, method_of(every=every, outer="dense"))
        equal, own = [], []
        for step in range(9):
            train(model, optimizer, rank, [step], wire, poison=poison)
            equal.append(_equal(model, kind))
            own.append(torch.cat([getattr(p, "_local_tensor", p).detach().flatten() for p in model.parameters()]))
        found[str(poison)] = (equal, [values.numpy() for values in own], wire.skipped, wire.step)
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world", "ats"), [("ddp", 2, (1, 2, 3)), ("hsdp", 4, (2,))])
def test_a_spoilt_step_costs_its_rank_one_step_and_nobody_waits(kind, world, ats):
    """At the beginning, in the middle and at the end of a round of 3, after one dense step."""
    cases = [(kind, at, 3) for at in ats]
    results = ranks.run(several, world, _poisoned, cases, LOCAL_WORLD_SIZE="2" if world == 4 else "1")
    for rank, at, found in ((rank, *one) for rank, of in enumerate(results) for one in zip(ats, of, strict=True)):
        equal, own, skipped, steps = found[str((at, 1))]
        clean = found["None"]
        spoilt = rank == 1 or (kind == "hsdp" and rank == 0)  # the node of rank 1
        assert (skipped, steps) == (int(spoilt), 9) and clean[2:] == (0, 9)
        assert equal == clean[0] == [step % 3 == 0 for step in range(9)]
        for step in range(at):
            assert np.array_equal(own[step], clean[1][step])
        if at != 3:  # in the middle of the round: the others do as they would have
            assert np.array_equal(own[at], clean[1][at]) == (not spoilt)
            assert np.array_equal(own[at], own[at - 1]) == spoilt
        assert all(np.isfinite(values).all() for values in own)


def _ruined(rank: int, world: int) -> tuple[bool, bool, float, bool]:
    """Weights that are not finite on rank 1 at the end of the second round."""
    model = build("ddp", world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = iter(range(100))

    def ruin(*unused: Any) -> None:
        if next(steps) == 3 and rank == 1:
            next(model.parameters()).data[0, 0] = torch.inf

    optimizer.register_step_pre_hook(ruin)
    wire = thinwire.compress(model, optimizer, LocalSteps(every=2, outer=TOPK))
    train(model, optimizer, rank, range(3), wire)
    kinds = ("=anchor", "=outer momentum", "residual")
    before = {key: value for key, value in entries(wire.state_dict()).items() if key.startswith(kinds)}
    train(model, optimizer, rank, [3], wire)
    after = entries(wire.state_dict())
    there = all(any(key.startswith(kind) for key in before) for kind in kinds)
    kept = there and all(torch.equal(value, after[key]) for key, value in before.items())
    back = all(torch.equal(weight, after[f"=anchor/{name.removeprefix('module.')}"])
               for name, weight in model.named_parameters())  # fmt: skip
    lost = wire.method.facts()["rounds that did not count"]
    train(model, optimizer, rank, range(4, 8), wire)
    return kept, back, lost, same_on_all_ranks(model) and bool(flat(model).isfinite().all())


def test_a_round_with_weights_that_are_not_finite_does_not_count():
    """All go back to where it began, what waits and the outer momentum too."""
    assert ranks.run(_ruined, 2) == [(True, True, 1.0, True)] * 2


STREAM = {"every": 4, "fragments": 2, "delay": 2, "start": 1}


def _beside(rank: int, world: int, kind: str, outer: str, poison: tuple[int, int] | None) -> dict[str, Any]:
    """A run whose rounds travel on a thread, and one whose rounds are over before they are due."""
    found: dict[str, Any] = {"planned": 0.0}
    for way in ("beside", "at once"):
        model = build(kind, world)
        optimizer = adam(model)
        wire = thinwire.compress(model, optimizer, method_of(outer=outer, **STREAM), steps=14)
        if way == "at once":
            comm = wire.method.run.exchange.comm
            comm.twin = lambda comm=comm: comm
        train(model, optimizer, rank, range(14), wire, poison=poison)
        found[way] = torch.cat([getattr(p, "_local_tensor", p).detach().flatten() for p in model.parameters()]).numpy()
        found[f"{way}, sent"] = sum(wire.ledger.total.bytes.values()) - wire.ledger.total.weight_bytes
        found[f"{way}, skipped"], found["equal"] = wire.skipped, _equal(model, kind)
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_what_travels_beside_brings_the_bits_of_what_all_wait_for(kind, world):
    """Also where a rank skips a step while its fragment is under way. As the run ends all hold the same weights."""
    cases = dealt([(kind, TOPK, (4, 1)), (kind, "int8(smallest=0)", None)], kind, ("ddp", "hsdp"))
    found = ranks.run(several, world, _beside, cases, LOCAL_WORLD_SIZE="2" if world == 4 else "1")
    for rank, of_rank in enumerate(found):
        for (_, _, poison), case in zip(cases, of_rank, strict=True):
            assert np.array_equal(case["beside"], case["at once"]) and np.isfinite(case["beside"]).all()
            assert case["beside, sent"] == case["at once, sent"] > 0 and case["equal"]
            spoilt = poison is not None and (rank == 1 or (kind == "hsdp" and rank == 0))
            assert case["beside, skipped"] == case["at once, skipped"] == int(spoilt)


def _late(rank: int, world: int) -> tuple[list[float], float]:
    """Rank 1 comes to the round only when rank 0 has told it that it has gone on, two steps beyond the round."""
    store = dist.distributed_c10d._get_default_store()
    model = build("ddp", world)
    optimizer = adam(model)
    wire = thinwire.compress(model, optimizer, method_of(every=4, fragments=1, delay=3, start=1, outer="dense"))
    arrived = []
    for step in range(9):
        if step == 4 and rank == 1:  # whose end begins the round
            store.wait(["gone on"], timedelta(seconds=60))
        train(model, optimizer, rank, [step], wire)
        if step == 6 and rank == 0:
            store.set("gone on", "")
        arrived.append(float(entries(wire.state_dict())["=merge at/"]) if step > 6 else -1.0)
    equal = same_on_all_ranks(model)
    wire.close()
    return arrived[7:], float(equal)


def test_a_rank_computes_on_while_its_round_is_under_way():
    """It would wait for ever, did it wait at the end of the round."""
    assert ranks.run(_late, 2) == [([0.0, 11.0], 0.0)] * 2


def _lost_beside(rank: int, world: int) -> tuple[bool, float, bool]:
    """Weights that are not finite on rank 1 as its fragment leaves."""
    model = build("ddp", world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = iter(range(100))

    def ruin(*unused: Any) -> None:
        if next(steps) == 3 and rank == 1:
            for weight in model.parameters():
                weight.data.fill_(torch.inf)

    optimizer.register_step_pre_hook(ruin)
    wire = thinwire.compress(model, optimizer, LocalSteps(every=4, delay=2, outer=TOPK, outer_momentum=0.5), steps=16)
    train(model, optimizer, rank, range(3), wire)
    kinds = ("=anchor", "=outer momentum", "residual")
    before = {key: value for key, value in entries(wire.state_dict()).items() if key.startswith(kinds)}
    train(model, optimizer, rank, range(3, 6), wire)
    after = entries(wire.state_dict())
    kept = all(torch.equal(value, after[key]) for key, value in before.items())
    lost = wire.method.facts()["rounds that did not count"]
    train(model, optimizer, rank, range(6, 16), wire)
    return kept, lost, same_on_all_ranks(model) and bool(flat(model).isfinite().all())


def test_a_round_beside_that_does_not_count_leaves_no_trace():
    assert ranks.run(_lost_beside, 2) == [(True, 1.0, True)] * 2


def test_where_replicas_come_and_go_nothing_travels_beside():
    comm = ThreadEngine("all_reduce", Threads(1), 0, Ledger(), SHAPES)
    comm.hops[0].comm.elastic = True
    with pytest.raises(ThinwireError, match="replicas come and go"):
        VirtualRank(LocalSteps(delay=1), comm, 8, optimizer=sgd)


class Keeper(torch.optim.Optimizer):
    """It keeps numbers, lists and dicts, as SOAP and Adafactor do; if it ``reads`` values, no dry run can step it."""

    def __init__(self, weights: Any, lr: float = 1e-2, *, reads: bool = False) -> None:
        super().__init__(weights, {"lr": lr, "reads": reads})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if (gradient := weight.grad) is not None:
                    self._step(self.state[weight], weight, gradient, group)

    def _step(self, state: dict[str, Any], weight: Any, gradient: Any, group: dict[str, Any]) -> None:
        if not state:
            state |= {"step": 0, "scale": 0.0, "note": "", "none": None, "seen": {"last": torch.zeros_like(weight)},
                      "Q": [torch.zeros_like(weight), 0]}  # fmt: skip
        state["step"] += 1
        state["Q"][1] += 2
        state["scale"] += float(gradient.square().sum() > 1e-3) if group["reads"] else 0.5
        state["Q"][0].lerp_(gradient, 0.1)
        state["seen"]["last"].lerp_(gradient.sign(), 0.1)
        factor = group["lr"] / (1 + 0.1 * state["step"] + 0.01 * state["scale"] + 0.01 * state["Q"][1])
        weight.sub_(state["Q"][0] + state["seen"]["last"], alpha=factor)


class Counter(torch.optim.Optimizer):
    """It keeps numbers of its own in its groups, as ScheduleFree (k) and Prodigy (d) do."""

    def __init__(self, weights: Any, lr: float = 1e-2) -> None:
        super().__init__(weights, {"lr": lr, "k": 0, "d": 1.0, "decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
            group["k"] += 1
            group["d"] += sum(float(local(gradient).abs().sum()) for gradient in gradients)
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=group["lr"] / (1 + 0.1 * group["k"] + 1e-3 * group["d"]))


def test_numbers_that_a_group_lacks_hold_no_step_up():
    """torch replaces groups by those of a loaded state, which an earlier version of the optimizer may have saved."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Counter([weight])
    del optimizer.param_groups[0]["decay"]
    numbers, step = OwnNumbers(SimpleNamespace(optimizers=[optimizer])), SimpleNamespace(put_back=[])
    numbers.watch(step)
    weight.grad = torch.ones(2)
    optimizer.step()
    for put_back in step.put_back:
        put_back()
    saved = numbers.save()
    optimizer.param_groups[0] |= {"k": 0, "d": 0.0}
    numbers.restore(saved)
    assert {key: optimizer.param_groups[0].get(key) for key in ("k", "d", "decay")} == {"k": 1, "d": 3.0, "decay": None}


KEEPERS = {"keeper": Keeper, "reader": partial(Keeper, reads=True), "counter": Counter}


def _resumed(
    rank: int, world: int, kind: str, stop: int, poison: tuple[int, int] | None, keeper: str = "", **knobs: Any
) -> bool:  # fmt: skip
    """Does a run that is killed after ``stop`` steps and goes on hold the bits of one that is not?"""

    def make() -> tuple[Any, Any, Any]:
        model = build(kind, world)
        optimizer = KEEPERS[keeper](model.parameters()) if keeper else adam(model)
        moment = "own" if keeper else "mean"
        method = method_of(second_moment=moment, every=4, start=3, start_with="loco(beta=0,reset=0)", **knobs)
        wire = thinwire.compress(model, optimizer, method, steps=14)
        return model, optimizer, wire

    model, optimizer, wire = make()
    train(model, optimizer, rank, range(stop), wire, poison=poison)
    saved = wire.state_dict()
    zero = {name: value.clone() for name, value in model.state_dict().items()}  # of which a program saves rank 0's
    moments = copy.deepcopy(optimizer.state_dict())
    if kind == "ddp":
        box = [zero, moments]
        dist.broadcast_object_list(box, 0)
        zero, moments = box
    train(model, optimizer, rank, range(stop, 14), wire, poison=poison)
    whole = [getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()]
    wire.close()
    model, optimizer, wire = make()
    model.load_state_dict(zero)
    optimizer.load_state_dict(moments)
    wire.load_state_dict(saved)
    train(model, optimizer, rank, range(stop, 14), wire, poison=poison)
    again = [getattr(p, "_local_tensor", p).detach() for p in model.parameters()]
    equal = _equal(model, kind)
    wire.close()
    return equal and all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_killed_inside_a_round_and_resumed_bit_for_bit(kind, world):
    """Inside the start; just after a round, in which one rank has skipped a step; inside the second round."""
    cases = dealt([(kind, 1, None), (kind, 7, (4, 1)), (kind, 9, None)], kind, ("ddp", "hsdp"))
    for found in ranks.run(several, world, _resumed, cases, LOCAL_WORLD_SIZE="2" if world == 4 else "1"):
        assert found == [True] * len(cases)


def _flushed_and_skipped(rank: int, world: int, kind: str, how: str, flush: int, skip: int) -> tuple[bool, float]:
    """Are nodes equal after the rounds, and what waits after the one with the flush, where node 0 skips a step?"""
    model = build(kind, world)
    wire = thinwire.compress(model, optimizer := adam(model), method_of())
    skips = rank < world // 2
    for step in range(10):
        if step == flush:
            wire.flush(with_next=True)
        if how == "dropped" and step == skip and skips:
            loss_of(model, step, rank).backward()
            optimizer.zero_grad()
        elif how == "not finite" and step == skip and skips:
            train(model, optimizer, rank, [step], wire, poison=(step, rank))
        else:
            train(model, optimizer, rank, [step], wire)
        if step == 6:
            residual = max(float(value.abs().max()) for key, value in wire.state_dict().items() if "residual" in key)
    equal = _equal(model, kind)
    wire.close()
    return equal, residual


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_a_flush_ends_with_its_round_whoever_skips_a_step_of_it(kind, world):
    steps = [(6, 6), (4, 6), (5, 5)]
    places = [(kind, how, *flush_and_skip) for flush_and_skip in steps for how in ("dropped", "not finite")]
    cases = dealt(places, kind, ("ddp", "hsdp"))
    for of_rank in ranks.run(several, world, _flushed_and_skipped, cases, LOCAL_WORLD_SIZE=str(world // 2)):
        assert of_rank == [(True, 0.0)] * len(cases)


def _loads_the_model_last(rank: int, world: int, kind: str) -> list[bool]:
    """Is there a warning, where the model comes with each node's own weights, and where with another's?"""
    warned, source = [], None
    for others in (None, False, True):
        model = build(kind, world)
        wire = thinwire.compress(model, optimizer := adam(model), LocalSteps(every=4))
        if others is None:
            train(model, optimizer, rank, range(6), wire)
            saved, source = wire.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
            wire.close()
            continue
        wire.load_state_dict(saved)
        for value in source.values() if others else ():
            part = getattr(value, "_local_tensor", value)
            part.copy_(wire.engine.comms[-1].all_reduce(part.clone()) - part)  # of two nodes
        model.load_state_dict(source)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            train(model, optimizer, rank, range(6, 8), wire)
        warned.append(any("weights were replaced" in str(one.message) for one in heard))
        wire.close()
    return warned


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_another_ranks_weights_are_warned_of_where_they_are_loaded_after_the_wire(kind, world):
    for warned in ranks.run(_loads_the_model_last, world, kind, LOCAL_WORLD_SIZE=str(world // 2)):
        assert warned == [False, True]


def _loads_the_optimizer_last(rank: int, world: int) -> list[str]:
    """Train on with a state of its own, and with one of rank 0's first and rank 1's second moments, as DCP saves it."""
    said = []
    for mixes in (False, True):
        model = build("ddp", world)
        optimizer = adam(model)
        wire = thinwire.compress(model, optimizer, LocalSteps(every=4))
        train(model, optimizer, rank, range(6), wire)
        saved, moments = wire.state_dict(), copy.deepcopy(optimizer.state_dict())
        weights = copy.deepcopy(model.state_dict())
        for state in moments["state"].values() if mixes else ():
            for source, kind in enumerate(("exp_avg", "exp_avg_sq")):
                dist.broadcast(state[kind], source)
        wire.close()
        model = build("ddp", world)
        optimizer = adam(model)
        wire = thinwire.compress(model, optimizer, LocalSteps(every=4))
        wire.load_state_dict(saved)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        said.append(refusal(train, model, optimizer, rank, range(6, 8), wire))
        wire.close()
    return said


def test_another_ranks_moments_are_refused_where_they_are_loaded_after_the_wire():
    for own, mixed in ranks.run(_loads_the_optimizer_last, 2):
        assert own == "" and mixed.endswith("load the wire last")


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_whatever_an_optimizer_keeps_is_resumed_bit_for_bit(kind, world):
    """Numbers, lists and dicts, after a step that one rank has skipped; if it reads values or has numbers in groups."""
    cases = [(kind, 6, (4, 1), keeper) for keeper in KEEPERS]
    for found in ranks.run(several, world, _resumed, cases, LOCAL_WORLD_SIZE="2" if world == 4 else "1"):
        assert found == [True] * len(cases)


class Late(torch.optim.SGD):
    """It adds to its state once its hooks have been called."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["shape"] = weight.shape


class Early(Keeper):
    """It keeps a shape from its first step on."""

    def _step(self, state: dict[str, Any], *gradient: Any) -> None:
        super()._step(state, *gradient)
        state["Q"].append(torch.Size([1]))


def _set_anew(rank: int, world: int) -> list[float]:
    """A run that is resumed at another rate."""
    saved = None
    for rate in (1e-2, 5e-3):
        model = build("ddp", world)
        optimizer = Counter(model.parameters(), lr=rate)
        wire = thinwire.compress(model, optimizer, LocalSteps(every=4))
        if saved is not None:
            wire.load_state_dict(saved)
            break
        train(model, optimizer, rank, range(2), wire)
        saved = wire.state_dict()
    group = optimizer.param_groups[0]
    return [group["k"], group["lr"], group["d"] > 1]


def test_of_an_optimizers_groups_only_what_its_steps_change_is_put_back():
    assert ranks.run(_set_anew, 1) == [[2, 5e-3, True]]


def _unsaved(rank: int, world: int, kind: str) -> list[tuple[int, str]]:
    """In which local step an optimizer is refused whose state no checkpoint could hold; closing says no more."""
    found = []
    for make in (Early, Late):
        model = build(kind, world)
        optimizer = make(model.parameters(), lr=1e-2)
        wire = thinwire.compress(model, optimizer, LocalSteps(every=4), steps=20)
        with pytest.raises(ThinwireError) as refused:
            for step in range(9):
                train(model, optimizer, rank, range(step, step + 1))
        wire.close()
        found.append((step, str(refused.value)))
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_a_state_that_could_not_be_saved_is_refused_in_the_first_local_steps(kind, world):
    for (early, listed), (late, word) in ranks.run(_unsaved, world, kind, LOCAL_WORLD_SIZE="2" if world == 4 else "1"):
        assert (early, late) == (0, 1)
        assert "keeps a Size as 'Q[2]'" in listed and "keeps a Size as 'shape'" in word and "\n" not in listed + word


def _kept(rank: int, world: int) -> list[str]:
    """Of an optimizer that has not loaded its own state, and of one that keeps something else."""
    found = []
    for keeps in ([], {1, 2}):
        model = build("ddp", world)
        optimizer = Keeper(model.parameters())
        wire = thinwire.compress(model, optimizer, LocalSteps(every=4))
        train(model, optimizer, rank, range(2), wire)
        next(iter(optimizer.state.values()))["more"] = keeps
        with pytest.raises(ThinwireError) if keeps else contextlib.nullcontext() as refused:
            saved = wire.state_dict()
        if not keeps:
            optimizer.state.clear()
            with pytest.raises(ThinwireError) as refused:
                wire.load_state_dict(saved)
        found.append(str(refused.value))
    return found


def test_what_an_optimizer_keeps_is_not_left_out_in_silence():
    early, strange = ranks.run(_kept, 1)[0]
    assert "load the optimizer's own state before the wire's" in early
    assert "keeps a set as 'more' of embedding.weight" in strange
    assert "\n" not in early + strange


def _resumed_beside(rank: int, world: int, kind: str, stop: int, poison: tuple[int, int] | None) -> bool:
    return _resumed(rank, world, kind, stop, poison, fragments=2, delay=2, outer_momentum=0.5)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("hsdp", 4)])
def test_killed_while_a_fragment_is_under_way_and_resumed_bit_for_bit(kind, world):
    """As it has left; in the middle of the delay, in which one rank has skipped a step; as it has been mixed in."""
    cases = dealt([(kind, 5, None), (kind, 6, (5, 1)), (kind, 7, None)], kind, ("ddp", "hsdp"))
    for found in ranks.run(several, world, _resumed_beside, cases, LOCAL_WORLD_SIZE="2" if world == 4 else "1"):
        assert found == [True] * len(cases)


def _resized(rank: int, world: int, states: list[dict[str, Any]] | None) -> Any:
    """Four ranks save while a fragment is under way; two go on."""
    model = build("ddp", world)
    optimizer = adam(model)
    wire = thinwire.compress(model, optimizer, method_of(outer=TOPK, **STREAM), steps=14)
    if states is None:
        train(model, optimizer, rank, range(7), wire)
        saved = {key: value.clone().numpy() for key, value in wire.state_dict().items()}
        wire.close()
        return saved, flat(model).numpy()
    merged = {key: torch.from_numpy(value) for state in states for key, value in state.items()}
    wire.load_state_dict(merged, resize="redistribute")
    resumed = flat(model).numpy()
    train(model, optimizer, rank, range(7, 14), wire)
    equal = same_on_all_ranks(model) and bool(flat(model).isfinite().all())
    wire.close()
    return resumed, equal


def test_on_another_number_of_ranks_each_goes_on_from_the_mean_of_their_weights():
    saved = ranks.run(_resized, 4, None)
    mean = np.mean([weights.astype(np.float64) for _, weights in saved], axis=0)
    for resumed, equal in ranks.run(_resized, 2, [state for state, _ in saved]):
        assert np.abs(resumed - mean).max() < 1e-6 and equal


class TwoModes(torch.optim.AdamW):
    """As ScheduleFree: what is evaluated is made of the weights and of the optimizer's state."""

    def eval(self) -> None: ...


def _refused(rank: int, world: int) -> list[str]:
    found = []
    for kind, optimizer_class, options in (
        ("fsdp2", torch.optim.AdamW, {}), ("ddp", torch.optim.AdamW, {"two_level": True}),
        ("ddp", torch.optim.AdamW, {"scaler": torch.amp.GradScaler("cpu")}), ("ddp", torch.optim.SGD, {}),
        ("ddp", TwoModes, {}),
    ):  # fmt: skip
        model = build(kind, world)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        try:
            thinwire.compress(model, optimizer, method_of(second_moment="mean"), **options)
        except ThinwireError as error:
            found.append(str(error))
    return found


def test_what_an_engine_cannot_do_is_refused_by_name():
    fsdp2, levels, scaler, adamless, modes = ranks.run(_refused, 4, LOCAL_WORLD_SIZE="2")[0]
    assert "fsdp2" in fsdp2 and "('replicate', 'shard') mesh (HSDP)" in fsdp2
    assert "works on one level only" in levels and "bfloat16" in scaler and "AdamW" in adamless
    assert "TwoModes.eval() makes the weights" in modes
    assert all("\n" not in line for line in (fsdp2, levels, scaler, adamless, modes))


def _closed(rank, world, kind):
    """By the method, the steps and how it ends: is a warning due, and does one come on rank 0 as the wire is closed?"""
    found = {}
    for method, steps, leaves in (
        ("local-steps(every=3)", 3, ""), ("local-steps(every=3)", 4, ""), ("local-steps(every=3)", 5, "reset"),
        ("local-steps(every=3,start=4)", 3, ""), ("local-steps(every=4,fragments=2)", 4, ""),
        ("local-steps(every=3,delay=1)", 3, ""), ("local-steps(every=4,fragments=2)", 8, ""), ("none", 2, ""),
    ):  # fmt: skip
        model = build(kind, world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wire = thinwire.compress(model, optimizer, method, steps=8)
        train(model, optimizer, rank, range(steps), wire)
        if leaves:
            getattr(wire, leaves)()
        held = [None] * world
        dist.all_gather_object(held, torch.cat([p.detach().flatten() for p in model.parameters()]))
        apart = not all(torch.equal(held[0], other) for other in held) and method != "none"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wire.close()
            wire.close()
        said = [str(word.message) for word in caught if word.category is ThinwireWarning]
        found[method, steps, leaves] = apart and rank == 0, ["is closed inside a round" in line for line in said]
    return found


def test_a_wire_that_is_closed_inside_a_round_says_that_ranks_hold_different_weights():
    first, second = ranks.run(_closed, 2, "ddp")
    for case, (due, said) in first.items():
        assert said == [True] * due and second[case] == (False, []), case
    assert sum(due for due, _ in first.values()) == 3
