"""Radius against its pseudo-code in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ranks
import thinwire
from breadth import dealt, spread
from engines import build, refusal
from papers.against import SIZES, STEPS, TOPOLOGIES, given, received, run
from papers.radius import Radius as RadiusPaper
from test_edges import SHAPES, Given, parts
from thinwire.methods import Radius


@pytest.mark.parametrize(("topology", "size", "scale"), spread(2, TOPOLOGIES, SIZES, [1.0, 0.25]))
def test_against_the_pseudo_code(topology, size, scale):
    shapes = {"a": (24, 25), "b": (12, 7)}
    made = {"density": 0.3, "T": 7, "start": 5, "residual_scale": scale, "smallest": 0, "send": ("*",)}
    results = run(lambda: Radius(**made), topology, size, shapes, max_norm=1.0,
                  optimizer=lambda weights: torch.optim.AdamW(weights, lr=1e-2))  # fmt: skip
    rows = size if topology == "reduce_scatter" else 1
    columns = [600 // rows, 84 // rows]
    paper = RadiusPaper(
        [c for c in columns for _ in range(rows)], size, 0.3, 7, 5, 1e-2, 1.0, residual_scale=scale,
        decay_in_direction=True, floor_k=True, residual_at_mask=True,
    )  # fmt: skip

    def parts(flat):
        """By tensor and by owner's row: a mask is a row's."""
        flat = flat.reshape(rows, -1)
        return [*flat[:, : columns[0]], *flat[:, columns[0] :]]

    for step in range(STEPS):
        means = paper.step([parts(g) for g in given(size, step, 684)])
        assert np.abs(np.concatenate(parts(received(results, step, topology))) - np.concatenate(means)).max() < 2e-5
        for i, name in enumerate(shapes):
            for n in range(size):
                weights = paper.weights[i * rows + n] if rows > 1 else paper.weights[i]
                assert np.abs(results[n][step]["weights"][name].double().numpy() - weights).max() < 1e-5
                if step >= 5:
                    residual = results[n][step][f"residual/{name}"].double().numpy()
                    expected = np.stack(paper.residuals[n][i * rows : (i + 1) * rows])
                    assert np.abs(residual - expected).max() < 1e-4
    assert results[0][-1]["facts"]["last resample, step"] == 47


MAKERS = {"AdamW": {}, "Adam": {}, "SGD": {"momentum": 0.9}, "RAdam": {}, "Adagrad": {}}
WAYS = ("has none", "rests", "is absent", "has a rate of 0", "is bfloat16")


def _masks(rank: int, world: int, engine: str, maker: str, way: str, feedback: str) -> tuple[list[list[int]], str]:
    """Words of the masks that w1 has after each of three resample steps, in which it goes its ``way``, but does not
    rest in the first; what a last step raised."""
    make = getattr(torch.optim, maker)
    half = way == "is bfloat16"
    model = build(engine, world, net=Given, prepare=lambda model: model.bfloat16() if half else None)
    weights = parts(model)
    both = [make([weights.pop("w1")], lr=0.01, **MAKERS[maker]), make(weights.values(), lr=0.01, **MAKERS[maker])]
    wire = thinwire.compress(
        model, both, f"radius(smallest=0, T=2, start=2, density=0.25, feedback={feedback!r})", steps=9
    )
    words = []

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + rank)
        given = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        resamples = number in (2, 4, 6)
        if way == "rests" and resamples and number > 2:
            del given["w1"]
        rate = 1e-6 if half else 0.01
        both[0].param_groups[0]["lr"] = 0.0 if way == "has a rate of 0" and resamples else rate
        model(given).backward()
        for optimizer in both[way == "is absent" and resamples :]:
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = rate  # as its own scheduler does
        if resamples:
            state = wire.state_dict()
            words.append(next(value for key, value in state.items() if key.endswith("mask/w1")).flatten().tolist())

    error = refusal(lambda: [step(number) for number in range(8)])
    wire.close()
    return words, error


def _each_way(rank, world, engine):
    cases = [(maker, way, "gradients") for maker in MAKERS for way in WAYS]
    cases += [("AdamW", way, "updates") for way in WAYS if way != "is absent"]  # which it refuses
    some = dealt(cases, engine, ("fsdp2", "ddp", "hsdp-1"))
    # DDP would have to look for what no rank has used, which is refused.
    return {case: _masks(rank, world, engine, *case) for case in some if engine != "ddp" or case[1] != "rests"}


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp-1"])
def test_no_mask_is_that_of_a_direction_of_zeros(engine):
    for found in ranks.run(_each_way, 2, engine):
        for (maker, way, feedback), (masks, error) in found.items():
            case = f"{maker}, w1 {way}, {feedback}"
            assert not error, f"{case}: {error}"
            # Of zeros the first values are chosen: words of ones, and then none.
            assert not [words for words in masks if -1 in words], f"{case}: {masks}"
            keeps = way == "rests" and (maker != "AdamW" or feedback == "updates")
            assert len({tuple(words) for words in masks}) == (1 if keeps else 3), f"{case}: {masks}"
