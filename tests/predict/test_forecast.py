"""Predictions for ``auto``: of the user's own module, as the engine has it, with what the trials showed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import ranks
from breadth import spread
from engines import refusal
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.core.names import describe
from thinwire.predict import choice as choices
from thinwire.predict import forecast as forecasts
from thinwire.predict.choice import Auto, Training
from thinwire.predict.cluster import Cluster, Constant
from thinwire.predict.forecast import Forecast, on_meta
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS


def _cluster(**changes):
    rate = Constant(1e9)
    constants = dict.fromkeys(("flops", "memory_rate", "intra_rate", "inter_rate"), rate)
    share = dict.fromkeys(("compute_share", "memory_share", "inter_share"), Constant(1.0))
    short = dict.fromkeys(("intra_latency", "inter_latency", "launch_seconds"), Constant(1e-5))
    return Cluster("test", "cpu", 1, Constant(8e9), **constants, **share, **short, codec_on_core=True, **changes)


def test_a_double_has_the_model_s_names_shapes_and_shared_weights_and_runs():
    model = Decoder(PRESETS["tiny"])
    double = on_meta(model, set(), {})
    assert type(double) is Decoder
    assert [(p.name, p.shape, p.role) for p in describe(double).values()] == [
        (p.name, p.shape, p.role) for p in describe(model).values()
    ]
    assert all(tensor.is_meta for tensor in (*double.parameters(), *double.buffers()))
    tokens = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    assert double(tokens, tokens).is_meta
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    tied[0].register_forward_pre_hook(lambda *args: pytest.fail("a hook of the original ran"))
    double = on_meta(tied, set(), {})
    assert double[0].weight is double[1].weight
    double(torch.zeros(1, 4, device="meta"))


def _sharded(rank, world):
    model = Decoder(PRESETS["tiny"])
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids: set[int] = set()
    double = on_meta(model, ids, {})
    return (
        type(double) is Decoder and not any(isinstance(module, FSDPModule) for module in double.modules()),
        names == {name: tuple(p.shape) for name, p in double.named_parameters()},
        [name for name, module in double.named_modules() if id(module) in ids],
    )


def test_a_double_of_a_sharded_model_is_whole_and_knows_its_modules():
    blocks = [f"blocks.{i}" for i in range(PRESETS["tiny"].layers)]
    for plain, whole, sharded in ranks.run(_sharded, 2):
        assert plain
        assert whole
        assert sharded == ["", *blocks]


def _forecast(engine="ddp", model=None, inputs=None, steps=800):
    model = model or nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    training = Training(model, engine, [torch.optim.AdamW(model.parameters())], steps)
    inputs = (torch.zeros(8, 512, device="meta"),) if inputs is None else inputs
    return Forecast(
        training,
        SimpleNamespace(
            comm=SimpleNamespace(size=2, rank=0),
            network=SimpleNamespace(reduce_scatter_is_all_reduce=True),
            inputs=inputs,
            micro_batches=1,
        ),
    )


def test_the_constants_are_fitted_to_the_steps_that_were_measured():
    forecast = _forecast()
    forecast.fit(_cluster(), silent=0.2, dense=0.21)
    assert forecast("none").seconds == pytest.approx(0.2, rel=0.01)
    assert forecast("dense").seconds == pytest.approx(0.21, rel=0.02)
    assert forecast.cluster.compute_share.source.startswith("fitted:")
    assert forecast("topk").seconds > forecast("none").seconds
    forecast.fit(_cluster(), silent=None, dense=0.5)  # as on engines that cannot be silent
    assert forecast("dense").seconds == pytest.approx(0.5, rel=0.01)
    assert forecast.cluster.inter_share == Constant(1.0)


class _OnGpu(Training):
    device = torch.device("cuda")


def _by_backend(rank, world):
    import torch.testing._internal.distributed.fake_pg  # which registers the backend "fake"

    dist.group.WORLD = dist.new_group(backend="cpu:gloo,cuda:fake")
    forecasts.timeline_of = lambda *args, **named: named["gloo"]
    model = nn.Linear(4, 4)
    settings = model, "ddp", [torch.optim.AdamW(model.parameters())], 800
    found = []
    for training in (Training(*settings), _OnGpu(*settings)):
        trials = choices.Trials(Auto(print), training, print)
        trials.inputs = (torch.zeros(1, 4, device="meta"),)
        found.append(Forecast(training, trials).record("dense"))
    return found


def test_bytes_are_those_of_the_backend_that_carries_the_gradients():
    """torch's own choice with GPUs is NCCL for these, and gloo for what ranks agree on beside them."""
    assert ranks.run(_by_backend, 1) == [[True, False]]


def _gathered_again(rank, world):
    again = []
    for reshard in (True, False, None):
        model = Decoder(PRESETS["tiny"])
        for block in (*model.blocks, model):
            fully_shard(block, mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=reshard)
        training = Training(model, "fsdp2", [torch.optim.AdamW(model.parameters())], 800)
        trials = choices.Trials(Auto(print), training, print)
        trials.inputs = tuple(torch.zeros(2, 1, 16, dtype=torch.int64, device="meta"))
        model(*torch.zeros(2, 1, 16, dtype=torch.int64))  # as a trial of dense has done
        timeline = Forecast(training, trials).record("dense")
        again.append((len(timeline.steps[0].again), timeline.memory.weights))
    return again


def test_weights_that_stay_gathered_are_not_gathered_again():
    """Those of the root stay by default, if the user does not say."""
    (every, least), (none, most), (blocks, between) = ranks.run(_gathered_again, 2)[0]
    assert (every, none, blocks) == (1 + PRESETS["tiny"].layers, 0, PRESETS["tiny"].layers)
    assert least < between == most  # two blocks and the root are all


def _broadcast(rank, world):
    sent = []
    for kept in (True, False):
        model = nn.parallel.DistributedDataParallel(nn.BatchNorm1d(64), broadcast_buffers=kept)
        options = {"two_level": None, "intra": None}
        training = Training.of(model, [torch.optim.AdamW(model.parameters())], 800, options)
        trials = choices.Trials(Auto(print), training, print)
        trials.inputs = (torch.zeros(8, 64, device="meta"),)
        forward = Forecast(training, trials).record("dense").steps[0].forward
        sent.append([message.nbytes for stretch in forward for message in stretch.messages])
    return sent


def test_buffers_that_stay_where_they_are_take_no_time():
    assert ranks.run(_broadcast, 2)[0] == [[2 * 64 * 4 + 8], []]


def _no_prediction(rank, world):
    def fit(*_):
        raise ThinwireError("no such model")

    forecasts.Forecast.fit = fit
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    optimizers, auto = [torch.optim.AdamW(model.parameters())], Auto(print, cluster="l40s-1g")
    training = Training.of(model, optimizers, 8, {"two_level": None, "intra": None})
    trials = choices.Trials(auto, training, print)
    trials.inputs, trials.run = (torch.zeros(1, 4, device="meta"),), lambda method: 0.1
    return refusal(forecasts.predictor, auto, training, trials, 0.2)


def test_a_prediction_that_fails_on_rank_0_is_raised_on_all_ranks():
    first, other = ranks.run(_no_prediction, 2)
    assert (first, other) == ("no such model", f"rank 0 could not choose a method: ThinwireError: {first}")


class _Reads(nn.Module):
    """A model that reads values: nobody can run it without them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(512, 1024)

    def forward(self, x):
        return self.inner(x) if float(x.sum()) else x


def test_a_model_that_reads_values_is_taken_by_its_parameters():
    with pytest.warns(ThinwireWarning, match=r"by the numbers of parameters alone: cannot profile _Reads"):
        forecast = _forecast(model=_Reads())
    forecast.fit(_cluster(), silent=0.1, dense=0.11)
    assert forecast("none").seconds == pytest.approx(0.1, rel=0.01)


def _whole(rank, world, engine):
    """Choose with real predictions and real clocks between two methods."""
    import thinwire

    forecasts.read_cluster = choices.read_cluster = lambda name: _cluster()
    rows = [row for row in choices.read_measured() if row.method in ("bf16", "zeropp")]
    choices.read_measured = lambda: rows
    torch.manual_seed(0)
    model = Decoder(PRESETS["tiny"])
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(wire):
        for last in (False, True):
            with wire.accumulate(last=last):
                tokens = torch.zeros(2, 32, dtype=torch.int64)
                model(tokens, targets=tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    wire = thinwire.compress(model, optimizer, Auto(step, cluster="test", max_loss=0.05), steps=800)
    step(wire)
    return wire.plan.choice


@pytest.mark.parametrize("engine", spread(2, ["fsdp2", "ddp"]))
def test_a_real_choice_on_two_ranks(engine):
    one, two = ranks.run(_whole, 2, engine, LOCAL_WORLD_SIZE="1")
    assert one == two
    assert {option.method for option in one.options} == {"dense", "bf16", "zeropp"}
    for option in one.options:
        assert option.measured > 0
        if option.method != "dense":
            assert 0 < option.low <= option.predicted <= option.high
