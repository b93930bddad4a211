"""``method="auto"``: which methods are looked at, how one is chosen, and that nothing of the trials stays."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import json
import math
import random
from contextlib import suppress
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ranks
from breadth import spread
from engines import refusal
from thinwire.base.errors import ThinwireError
from thinwire.core.card import Card
from thinwire.methods import resolve
from thinwire.plan.measured import MeasuredLoss
from thinwire.predict import choice as choices
from thinwire.predict.choice import Auto, Choice, Option, Training, candidates, decide


def _job(engine="ddp", steps=800, optimizer=torch.optim.AdamW):
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
    return Training(model, engine, [optimizer(model.parameters(), lr=1e-3)], steps)


def _rows(monkeypatch, *rows, error=0.1):
    """``rows``: (method, regime, steps, gap), and the gap's ± if it is not ``error``."""
    made = tuple(
        MeasuredLoss(method, regime, "peps", 4, 1000, steps, 2, gap, *(own or [error]), 20.0)
        for method, regime, steps, gap, *own in rows
    )
    monkeypatch.setattr(choices, "read_measured", lambda: made)


def _looked_at(auto, job):
    return {option.method: option.reason for option in candidates(auto, job, 2)}


def _auto(**settings):
    return Auto(lambda wire: None, **settings)


def test_a_method_needs_measured_runs_of_this_length_and_start_below_the_largest_loss(monkeypatch):
    _rows(
        monkeypatch,
        ("topk", "scratch", 800, -2.0), ("topk", "long", 3200, 0.8), ("int8", "scratch", 800, 1.3),
        ("sdp4bit", "finetune", 300, 0.1), ("trickle", "scratch", 80, -3.0), ("gone(knob=1)", "scratch", 800, -9.0),
    )  # fmt: skip
    looked_at = _looked_at(_auto(), _job())
    assert looked_at["topk"] == ""
    assert looked_at["int8"] == "loss not known to be at most 1% above dense's, ± included"
    assert "not measured in runs of this length and start" in looked_at["sdp4bit"]
    assert looked_at["trickle"] == ""
    assert "not measured" in _looked_at(_auto(), _job(steps=801))["trickle"]  # ten times its length, and a step
    assert set(looked_at) == {"topk", "int8", "sdp4bit", "trickle"}
    assert _looked_at(_auto(max_loss=0.02), _job())["int8"] == ""
    assert "loss" in _looked_at(_auto(max_loss=0.005), _job())["topk"]  # its worst run counts
    assert _looked_at(_auto(max_loss=math.inf), _job(steps=10**6))["int8"] == ""
    assert _looked_at(_auto(finetune=True), _job())["sdp4bit"] == ""


@pytest.mark.parametrize(
    ("rows", "refused"),
    [
        ([(-0.5, 1.5)], False),
        ([(-0.5, 1.51)], True),
        ([(0.9, 0.1), (0.0, 1.0)], False),
        ([(-9.0, 0.1), (-0.9, 2.0)], True),  # the one whose gap is lower than 1% in each reading, but not its interval
        ([(-9.0, math.nan)], True),  # one seed, of which nobody knows how far others lie apart
        ([(-9.0, math.nan), (5.0, 0.1)], True),
    ],
)
def test_a_gap_counts_with_its_error(monkeypatch, rows, refused):
    _rows(monkeypatch, *(("topk", "scratch", 800, *row) for row in rows))
    (option,) = candidates(_auto(), _job(), 2)
    assert bool(option.reason) == refused
    worst = max(rows, key=lambda row: (math.isnan(row[1]), sum(row)))
    assert option.loss == worst[0] and option.error == (None if math.isnan(worst[1]) else worst[1])
    (option,) = candidates(_auto(max_loss=math.inf), _job(), 2)
    assert option.reason == "", "any is any"


@functools.cache
def _delivered():
    """The rows of measured.csv as they stand there, with the method's whole ``name``; "": this version has it not."""
    rows = list(csv.DictReader(files("thinwire.plan").joinpath("measured.csv").read_text().splitlines()))
    for row in rows:
        row["name"] = ""
        with suppress(ThinwireError):
            row["name"] = str(resolve(row["method"]))
    return rows


@pytest.mark.parametrize("max_loss", [0.0, 0.005, 0.01, 0.02, 0.05])
def test_no_candidate_s_interval_reaches_beyond_what_is_allowed(max_loss, monkeypatch):
    """A law over all rows that are delivered, for runs of all lengths."""
    monkeypatch.setattr(Training, "begun", lambda *_: SimpleNamespace(card=Card()))  # the loss alone is asked for
    rows = [row for row in _delivered() if row["dense"] != "Muon"]
    admitted = 0
    for steps, finetune in itertools.product((80, 800, 8001, 48_001), (False, True)):
        job = _job(steps=steps)
        for option in candidates(_auto(max_loss=max_loss, finetune=finetune), job, 2):
            if option.reason:
                continue
            admitted += 1
            for row in rows:
                alike = (row["regime"] in ("going-on", "finetune")) == finetune
                comparable = alike and int(row["steps"]) / 10 <= steps <= 10 * int(row["steps"])
                if row["name"] == option.method and comparable:
                    assert float(row["gap_percent"]) + float(row["error_percent"]) <= 100 * max_loss, row
    assert admitted


def test_a_method_needs_its_engine_its_optimizer_and_what_it_refuses(monkeypatch):
    _rows(
        monkeypatch,
        ("scape", "scratch", 800, 0.0), ("dgc", "scratch", 800, 0.0), ("topk", "scratch", 800, 0.0),
        ("local-steps:recommended", "scratch", 800, 0.0), ("onebit-adam", "scratch", 800, 0.0),
    )  # fmt: skip
    looked_at = _looked_at(_auto(), _job("fsdp2"))
    local_steps = next(method for method in looked_at if method.startswith("local-steps"))
    assert looked_at["scape"] == "measured with AdamS only"
    assert looked_at["dgc"] == "measured with SGD only"
    assert looked_at["topk"] == ""
    assert looked_at[local_steps] == "not for fsdp2"
    assert _looked_at(_auto(), _job(optimizer=torch.optim.SGD))["dgc"] == ""
    assert "compress(..., steps=" in _looked_at(_auto(), _job(steps=None))["onebit-adam"]


@pytest.mark.parametrize("steps", [None, 800])
def test_what_is_offered_is_known_in_full_or_has_a_reason(steps):
    """A law over all rows that are delivered: a share of a run whose length nobody gave is such a reason."""
    job, reasons = _job(steps=steps), []
    for option in candidates(_auto(max_loss=math.inf), job, 2):
        reasons.append(option.reason)
        if not option.reason:
            job.warm_up(job.begun(option.method, 2).card)
    assert any(reasons) and not all(reasons)
    assert any("compress(..., steps=" in reason for reason in reasons) == (steps is None)


@pytest.mark.parametrize(
    ("steps", "max_loss", "finetune", "offered"),
    [
        (80, 0.01, False, 8), (8000, 0.01, False, 8), (8001, 0.01, False, 1), (24_000, 0.01, False, 1),
        (24_001, 0.01, False, 0), (24_001, 0.02, False, 1), (96_000, 0.02, False, 1), (96_001, 0.02, False, 0),
        (300, 0.01, True, 4), (3000, 0.01, True, 4), (3001, 0.01, True, 0),
    ],
)  # fmt: skip
def test_how_many_candidates_there_are(steps, max_loss, finetune, offered):
    """docs/predict.md says these numbers."""
    looked_at = candidates(_auto(max_loss=max_loss, finetune=finetune), _job(steps=steps), 2)
    found = [option for option in looked_at if not option.reason]
    assert len(found) == offered, [option.method for option in found]
    assert all(option.loss + option.error <= 100 * max_loss for option in found)


@pytest.mark.parametrize(
    ("times", "method", "reason"),
    [
        ({"topk": 50.0, "int8": 60.0}, "topk", "2.00 times as fast"),
        ({"topk": 96.0, "int8": 97.0}, "dense", "nothing is 5% faster (the best is 1.04 times"),
        ({"topk": None, "int8": 95.0}, "int8", "1.05 times"),
        ({}, "dense", "nothing could be tried"),
    ],
)
def test_the_fastest_is_chosen_if_it_is_five_percent_faster(times, method, reason):
    options = [Option(name, predicted=1.0, low=1.0, high=1.0, measured=ms) for name, ms in times.items()]
    choice = decide(_auto(), 0.1, options)
    assert choice.method == method
    assert reason in choice.reason
    assert [option.method for option in choice.options if not option.reason] == [method]


def test_a_choice_is_text_and_survives_json():
    options = [
        Option("topk", -2.0, "3 seeds", 50.0, 40.0, 60.0, 55.0, error=1.25),
        Option("int8", 0.1, "1 seed", 51.0, 41.0, 61.0),
        Option("radius", 1.6, "2 seeds", reason="loss too high", error=0.5),
        Option("dgc", reason="measured with SGD only"),
    ]
    choice = decide(_auto(), 0.1, options)
    plain = json.loads(json.dumps(dataclasses.asdict(choice)))
    assert Choice.from_plain(plain) == choice
    text = str(choice)
    assert "topk: predicted 50 ms (40 to 60), measured 55 ms, loss -2.0% ± 1.2% (3 seeds): chosen" in text
    assert "dense: measured 100 ms: slower" in text
    assert "loss too high: radius +1.6% ± 0.5% (2 seeds)" in text
    assert "loss +0.1% ± ? (1 seed)" in text
    assert "measured with SGD only: dgc" in text


@pytest.mark.parametrize("settings", [{"max_loss": -0.1}, {"max_loss": math.nan}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ThinwireError, match="max_loss"):
        _auto(**settings)
    with pytest.raises(ThinwireError, match="step"):
        Auto("dense")


def test_the_name_alone_is_refused_where_a_method_is_needed():
    with pytest.raises(ThinwireError, match=r"thinwire\.Auto\(step\)"):
        resolve("auto")


def test_kinds_of_steps_count_by_their_share():
    card = SimpleNamespace(cycle={0: 0.75, 3: 0.25})
    times = [9.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 4.0]
    assert choices._mean_over_cycle(card, times) == pytest.approx(0.75 * 1.0 + 0.25 * 4.0)


# On two ranks, with a stand-in for the predictions.

LAX = {"max_loss": 0.05}
"""So that one seed lets zeropp, qsdp and bf16 be candidates."""


def _predictor(seconds, memory=0.0):
    """Predict what the dictionary says, and refuse the rest."""

    def predictor(auto, training, trials, dense):
        def predict(method):
            name = method.partition("(")[0]
            if name not in seconds:
                raise ThinwireError("no prediction")
            return SimpleNamespace(
                seconds=seconds[name], low=0.9 * seconds[name], high=2 * seconds[name], memory={"method": memory}
            )

        return predict

    return predictor


def _clock(seconds):
    """Let a step of a method last as ``seconds`` says by its name (0.03 if it does not): no test waits or is noisy."""

    def time(trials, wire):
        trials._auto.step(wire)
        return seconds.get(wire.method.name, 0.03)

    return time


class _Average(nn.Module):
    """Assigns its buffer in each forward pass, where BatchNorm writes into its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(300))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class _Task:
    """A model on its way through training."""

    def __init__(self, rank):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(256, 300), nn.BatchNorm1d(300), _Average(), nn.Linear(300, 256))
        self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.rank, self.count = rank, 0

    def step(self, wire):
        data = torch.randn(8, 256, generator=torch.Generator().manual_seed(10 * self.count + self.rank))
        self.count += 1
        with wire.accumulate():
            (self.model(data) - data).square().mean().backward()
        wire.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self):
        return [tensor.clone() for tensor in self.net.state_dict().values()]


def _choose_on_ranks(rank, world, clocks, predicted, options):
    import thinwire
    from thinwire import wire as wires

    memory = options.pop("memory", 0.0)
    wires.predictor = _predictor(predicted, memory)
    choices.Trials._time = _clock(clocks[rank] if isinstance(clocks, list) else clocks)
    task = _Task(rank)
    before, numbers = task.state(), torch.get_rng_state()
    wire = thinwire.compress(task.model, task.optimizer, Auto(task.step, **options), steps=800)
    unchanged = all(map(torch.equal, before, task.state())) and torch.equal(numbers, torch.get_rng_state())
    calls, task.count = task.count, 0
    for _ in range(5):
        task.step(wire)
    losses_state = [tensor.tolist() for tensor in task.state()]
    text, state = str(wire.plan), wire.state_dict()
    wire.close()
    named = _Task(rank)
    other = thinwire.compress(named.model, named.optimizer, wire.plan.choice.method, steps=800)
    for _ in range(5):
        named.step(other)
    same = losses_state == [tensor.tolist() for tensor in named.state()]
    other.close()
    resumed = _Task(rank)
    again = thinwire.compress(resumed.model, resumed.optimizer, Auto(resumed.step, resumed=state), steps=800)
    again.load_state_dict(state)
    return {
        "choice": wire.plan.choice, "plan": text, "unchanged": unchanged, "calls": calls, "as named": same,
        "fresh": not task.optimizer.state or calls > 0, "resumed": again.plan.choice, "tried again": resumed.count,
        "weights": losses_state,
    }  # fmt: skip


def test_the_ranks_try_three_put_everything_back_and_go_on_with_one():
    one, two = ranks.run(
        _choose_on_ranks, 2, {"zeropp": 0.02, "qsdp": 0.01}, {"zeropp": 0.001, "qsdp": 0.002, "bf16": 0.003}, LAX
    )
    choice = one["choice"]
    assert choice == two["choice"]
    assert choice.method == "qsdp"
    measured = [option.method for option in choice.options if option.measured is not None]
    assert measured == ["dense", "zeropp", "qsdp"]
    assert one["calls"] >= 3 * choices.TRIAL_STEPS
    assert "chosen by auto(max_loss=0.05" in one["plan"]
    for result in (one, two):
        assert result["unchanged"]
        assert result["as named"]
        assert result["resumed"] == choice
        assert result["tried again"] == 0
    assert one["weights"][0] == two["weights"][0]


def test_ranks_whose_clocks_differ_choose_the_same():
    """By its own clock, each rank would choose another method."""
    clocks = [{"zeropp": 0.001, "qsdp": 0.01}, {"zeropp": 0.03, "qsdp": 0.02}]
    one, two = ranks.run(_choose_on_ranks, 2, clocks, {"zeropp": 0.001, "qsdp": 0.002}, LAX)
    assert one["choice"] == two["choice"]
    assert one["choice"].method == "qsdp"
    assert one["choice"].options[2].measured == pytest.approx(20)  # the slowest rank counts


def test_dense_stays_where_nothing_is_faster_and_memory_counts():
    one, two = ranks.run(_choose_on_ranks, 2, {"qsdp": 0.029}, {"qsdp": 0.0001}, LAX)
    assert one["choice"] == two["choice"]
    assert one["choice"].method == "dense"
    assert "5% faster" in one["choice"].reason
    one, _ = ranks.run(_choose_on_ranks, 2, {}, {"qsdp": 0.0001}, LAX | {"memory": 1e18})
    assert one["choice"].reason == "nothing could be tried"
    assert "MB of memory" in str(one["choice"])


class _Drops(nn.Module):
    """Draws from every stream of random numbers that a program shares."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 300), nn.LayerNorm(300), nn.Dropout(0.2), nn.Linear(300, 256))

    def forward(self, x):
        return self.layers(x) * (random.random() + np.random.rand() + float(torch.rand(())))


class _Program:
    """Trains a model with what a program may have beside it.

    That is a second module in the same optimizer, further optimizers, a learning rate that is a tensor which its
    schedule fills, settings that steps add or change, and gradients from before ``compress()``.
    """

    def __init__(self, rank, world, engine, several):
        torch.manual_seed(0)
        self.net, self.beside = _Drops(), nn.Linear(256, 256)
        self.rate, self.betas = torch.tensor(1e-2), [0.9, 0.95]
        if engine == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.net)
        else:
            shape, names = ((world,), ("shard",)) if engine == "fsdp2" else ((world, 1), ("replicas", "shard"))
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            self.model = fully_shard(self.net, mesh=mesh)
        self.beside.weight.grad = torch.ones(256, 256)
        groups = [[*self.net.layers[0].parameters()], [*self.net.layers[1:].parameters(), *self.beside.parameters()]]
        self.optimizers = [
            torch.optim.AdamW(weights, lr=self.rate, betas=self.betas)
            for weights in (groups if several else [[*groups[0], *groups[1]]])
        ]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(self._count)
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)

    def _count(self, optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["weight_decay"] = 0.01 * group["count"]
            group["seen"] = [*group.get("seen", ()), group["count"]]

    def step(self, wire):
        data = torch.randn(8, 256)
        with wire.accumulate():
            (self.beside(self.model(data)) - data).square().mean().backward()
        wire.clip_grad_norm_(1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    def state(self):
        """Give all that the promise is about, as plain values; what the ranks' parts are is each rank's own."""
        weights = [*self.net.named_parameters(), *self.beside.named_parameters()]
        tensors = {name: (getattr(w, "to_local", lambda w=w: w)().tolist(), w.grad is None) for name, w in weights}
        tensors["beside's gradient"] = None if self.beside.weight.grad is None else self.beside.weight.grad.tolist()
        groups = [
            {name: str(value) for name, value in group.items() if name != "params"}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        moments = [len(optimizer.state) for optimizer in self.optimizers]
        numbers = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
        return {"weights": tensors, "settings": groups, "moments": moments, "numbers": numbers, "rate": str(self.rate)}


def _leave_nothing_behind(rank, world, engine, several):
    """Choose by a real prediction; return the method, what moved, and what differs from the run of the method."""
    import thinwire
    from thinwire.predict import forecast
    from thinwire.predict.cluster import Constant

    forecast.LINKS_S, forecast.KERNELS_S, choices.WORTH = 0.1, 0.3, 1e-9
    choices.TRIAL_STEPS, forecast.host_cost = 2, lambda *_: Constant(0.0)  # to measure it takes 7 s
    rows = [row for row in choices.read_measured() if row.method.startswith("trickle")]
    choices.read_measured = lambda: rows
    program = _Program(rank, world, engine, several)
    before = program.state()
    wire = thinwire.compress(program.model, program.optimizers, Auto(program.step, max_loss=math.inf), steps=400)
    after, method = program.state(), wire.plan.choice.method
    program.schedules = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9, last_epoch=0) for optimizer in program.optimizers
    ]  # the caller's to put back
    assert all(group["lr"] is program.rate for o in program.optimizers for group in o.param_groups)
    for _ in range(3):
        program.step(wire)
    went_on = program.state()
    wire.close()
    named = _Program(rank, world, engine, several)
    wire = thinwire.compress(named.model, named.optimizers, method, steps=400)
    for _ in range(3):
        named.step(wire)
    as_named = named.state()
    wire.close()
    moved = [key for key in before if before[key] != after[key]]
    return method, moved, [key for key in before if went_on[key] != as_named[key]]


@pytest.mark.parametrize(("engine", "several"), spread(2, [("ddp", False), ("fsdp2", True), ("hsdp", True)]))
def test_a_choice_leaves_nothing_behind_and_goes_on_as_the_method_would(engine, several):
    """A law over engines. Trials draw, step and schedule; predictions time kernels and run the model's own code."""
    for method, moved, unlike in ranks.run(_leave_nothing_behind, 2, engine, several):
        assert method.startswith("trickle")
        assert not moved and not unlike


def _differ(rank, world):
    import thinwire

    task = _Task(rank)
    try:
        thinwire.compress(task.model, task.optimizer, Auto(task.step, max_loss=0.01 + rank), steps=800)
    except ThinwireError as error:
        return str(error)


def _takes_none(rank, world):
    import thinwire

    task = _Task(rank)
    return refusal(thinwire.compress, task.model, task.optimizer, Auto(lambda wire: task.step, max_loss=math.inf))


def test_a_step_that_takes_none_is_refused():
    for line in ranks.run(_takes_none, 2):
        assert "took no optimizer step" in line


def test_ranks_with_other_settings_are_refused():
    for line in ranks.run(_differ, 2):
        assert "max_loss=1.01" in line
