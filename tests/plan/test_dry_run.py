"""A dry run tells what is sent and launched on any number of ranks, without any, and the kernels are compiled."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from breadth import dealt
from launches import LaunchWatch
from thinwire.core.bucket import Layout, Piece, Shard
from thinwire.core.exchange import AllReduce, Exchange, ReduceScatter
from thinwire.core.method import Parameter
from thinwire.engines import ddp
from thinwire.methods import TABLE, Method, resolve
from thinwire.network.comm import CountingComm
from thinwire.network.ledger import Ledger
from thinwire.ops import quant
from thinwire.plan.doubles import Watch, optimizer_like, step_once
from thinwire.plan.dry_run import DryRun, compile_kernels, dry_run, separate_buffers, stand_in_run
from thinwire.plan.plan import MB, Plan, plan_of, road_of
from thinwire.proof.ranks import parameters_for

SHAPES = {"a": (512, 256), "b": (384, 512), "c": (64,)}
NAMES = [cls.name for cls in TABLE]


def exchange_of(kind: str, size: int, per_node: int = 8) -> Exchange:
    comm = CountingComm(0, [rank // per_node for rank in range(size)], Ledger())
    return AllReduce(comm) if kind == "ddp" else ReduceScatter(comm)


def run_dry(method: Method, kind: str, size: int, watch: Watch | None = None) -> DryRun:
    exchange = exchange_of(kind, size)
    parameters = parameters_for(exchange, SHAPES).values()
    run = stand_in_run(method, parameters, exchange)
    road = road_of(method, parameters, exchange)
    return dry_run(separate_buffers(parameters, road), road, run, watch=watch)


@pytest.mark.parametrize("name", NAMES)
def test_any_number_of_ranks(name):
    """What a simulator of large clusters asks for."""
    method = resolve(name)
    for kind in set(method.engines) - {"hsdp"}:
        for size in dealt([1, 2, 8, 3, 16384, 1024], NAMES.index(name) % 2, range(2)):
            found = run_dry(method, kind, size)
            assert sum(found.parameters.values()) == pytest.approx(sum(found.sent.values()))
            assert (sum(found.sent.values()) == 0) == (size == 1 or name == "none")
            assert bool(found.collectives) == (size > 1 and name != "none")
            assert set(found.sent) <= {"inter", "intra"} and (size > 8 or "inter" not in found.sent)


@pytest.mark.parametrize("spec", ["trickle(smallest=0)", "topk(smallest=0)"])
def test_where_the_least_message_is_more_than_dense_it_is_from_two_ranks_on(spec):
    """A sample of 64 values from a tensor of 25."""
    exchange = exchange_of("ddp", 4)
    plan = plan_of(resolve(spec), parameters_for(exchange, {"w": (5, 5)}).values(), exchange)
    assert plan.dense_from == 2 and "from 2 on, dense sends less" in " ".join(str(plan).split())


@pytest.mark.parametrize("name", [*NAMES, "trickle(mask='merged')"])
def test_what_grows_with_the_ranks_is_declared_and_told(name):
    """Four times as many ranks: as many bytes, but for what is gathered."""
    method = resolve(name)
    if name != "none":
        few, many = (run_dry(method, "ddp", size).parameters["b"] for size in (8, 32))
        grows = method.card.grows_with_ranks or name == "tagc"  # whose united masks grow until they are full
        assert (many > 3 * few) == grows
    plan = plan_of(method, parameters_for(exchange_of("ddp", 8), SHAPES).values(), exchange_of("ddp", 8))
    assert (plan.dense_from is not None) == method.card.grows_with_ranks
    if method.card.grows_with_ranks:
        dense = resolve("dense")
        for size in (plan.dense_from - 1, plan.dense_from):
            sent, by_dense = (run_dry(of, "ddp", size).parameters["b"] for of in (method, dense))
            assert (sent > by_dense) == (size == plan.dense_from)
        assert f"from {plan.dense_from} on, dense sends less" in " ".join(str(plan).split())


def test_more_ranks_than_a_method_is_for_are_warned_of():
    method = resolve("topk(density=0.1)")
    for size in (8, 64):
        exchange = exchange_of("ddp", size)
        warning = plan_of(method, parameters_for(exchange, SHAPES).values(), exchange).warning or ""
        assert ("dense sends less" in warning) == (size == 64)


def test_buckets_are_as_small_as_messages_allow():
    """A sixteenth of the gradients, if half a megabyte of it is sent; torch's own size, if that is less."""
    exchange, net = exchange_of("ddp", 2), parameters_for(exchange_of("ddp", 2), {"a": (1024, 4096), "b": (4096, 4096)})
    names = ("int8", "topk(density=0.02)", "scape(density=0.01)", "powersgd", "dense", "fp32", "local-steps")
    of = {name: plan_of(resolve(name), net.values(), exchange).bucket_cap_mb for name in names}
    assert of["int8"] == 80 / 16 and of["scape(density=0.01)"] == of["powersgd"] == 25
    assert of["topk(density=0.02)"] == pytest.approx(0.5e6 / (5.016 * 0.02 / 4) / 2**20, rel=0.01)  # 32 and 8.1 bits
    assert of["dense"] is of["fp32"] is of["local-steps"] is None
    many = exchange_of("ddp", 256)
    little = parameters_for(many, {"a": (256, 256), "b": (256, 256)})
    small = plan_of(resolve("topk(density=0.1)"), little.values(), many)
    assert small.bucket_cap_mb == 0.1  # 0 would be a bucket for each tensor
    large = parameters_for(exchange, {"a": (16384, 16384)})
    plan = plan_of(resolve("int8"), large.values(), exchange)
    assert plan.bucket_cap_mb == 25  # torch's own


def test_smaller_buckets_are_advised_only_where_they_split_one():
    """DDP closes a bucket once it has as many bytes, so each holds up to one tensor more."""
    exchange = exchange_of("ddp", 2)
    method, net = resolve("int8(smallest=0)"), parameters_for(exchange, dict.fromkeys("abcdefgh", (256, 512))).values()
    run, road = stand_in_run(method, net, exchange), road_of(method, net, exchange)
    weights = [torch.empty(parameter.shape) for parameter in net]
    described = {id(weight): parameter for weight, parameter in zip(weights, net, strict=True)}
    advised, line = [], "begin earlier: DistributedDataParallel(model, bucket_cap_mb=1.8)"
    for cap in (None, 4, 2, 1.8, 0.5):  # in megabytes; each tensor has half of one
        buckets = functools.partial(ddp.buckets, weights, described, cap and int(cap * MB))
        advised.append(line in str(Plan(road, run, layout=buckets)))
    assert advised == [True, True, False, False, False]


def test_links_and_collectives_of_int8():
    """Counted by hand: 8 bits and a scale of 4 bytes per 128 values, to every peer, twice on DDP."""
    watch = LaunchWatch()
    found = run_dry(resolve("int8(smallest=0, send='*')"), "ddp", 16, watch)
    rows = [-(-numel // 16 // 128) * 128 for numel in (512 * 256, 384 * 512, 64 * 16)]
    each = sum(width + width // 128 * 4 for width in rows)
    assert found.sent == {"intra": 2 * 7 * each, "inter": 2 * 8 * each}
    assert found.collectives == {"all_to_all": 3, "all_gather": 3}
    kernels = {name.rpartition(".")[2] for name in watch.steady() if name.startswith("thinwire.")}
    assert any("quantize" in name for name in kernels)


def test_a_period_is_averaged():
    """Radius: one dense step in T, the others at the mask."""
    dense, radius = run_dry(resolve("fp32"), "fsdp2", 4), resolve("radius(T=10, density=0.25, smallest=0, send='*')")
    share = sum(run_dry(radius, "fsdp2", 4).sent.values()) / sum(dense.sent.values())
    assert share == pytest.approx(0.1 + 0.9 * 0.25 + 0.1 / 32, rel=1e-3)


class Growth(Watch):
    """Notes the share of the steps that leave memory behind, among those that the plan counts."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.share = 0, 0.0

    def end_step(self, share: float) -> None:
        self.share += share * (self.live > self.before)
        self.before = self.live
        super().end_step(share)


@pytest.mark.parametrize("name", [
    *NAMES, *(f"{cls.name}:{preset}" for cls in TABLE for preset in cls.PRESETS), "local-steps(every=2,delay=1)",
    "local-steps(every=4,fragments=2)",
])  # fmt: skip
def test_no_step_that_a_plan_counts_is_the_first_of_its_kind(name):
    """The first one makes what stays: copies of the weights, momenta, workspaces. A run has it once.

    Where all steps are alike, those who count kernels take the second. Radius' steps of masks are one in ``T`` each.
    """
    method = resolve(name)
    for kind in {*method.engines} - {"hsdp"}:
        run_dry(method, kind, 4, growth := Growth())
        assert growth.share < 0.05 or 1.0 in method.card.cycle.values(), kind


@pytest.mark.parametrize("name", ["trickle", "trickle:merged", "topk", "sign(feedback='updates')", "tagc", "powersgd"])
def test_what_stays_dense_beside_steps_sends_what_dense_does(name):
    """What is sent about steps is theirs alone: samples of their gradients."""
    method, dense = resolve(name), run_dry(resolve("fp32"), "ddp", 4).parameters
    exchange = exchange_of("ddp", 4)
    stay = road_of(method, parameters_for(exchange, SHAPES).values(), exchange).last.dense
    found = run_dry(method, "ddp", 4).parameters
    assert stay and all(found[name] == dense[name] for name in stay)


def test_nothing_of_the_size_is_allocated():
    exchange = exchange_of("fsdp2", 64)
    shapes = {f"layers.{i}": (16384, 16384) for i in range(64)}  # 17 billion values
    plan = plan_of(resolve("sdp4bit"), parameters_for(exchange, shapes).values(), exchange)
    assert plan.wire_bytes == pytest.approx(63 / 64 * 64 * 16384**2 * (1 / 2 + 4 / 128))


@pytest.mark.parametrize("name", NAMES)
def test_kernels_are_compiled_by_the_same_steps(name):
    """On tensors of one rank alone, whatever the number of ranks and the rank; nothing remains in the method."""
    method = resolve(name)
    exchange = exchange_of("ddp", 4)
    parameters = parameters_for(exchange, SHAPES).values()
    run = stand_in_run(method, parameters, exchange)
    assert method.card == method.describe()  # which is made once, when it is first read
    before = dict(vars(method))
    compile_kernels(road_of(method, parameters, exchange), run, torch.device("cpu"))
    assert vars(method) == before


@pytest.mark.parametrize("refresh", [1, 2, 5])
def test_weights_at_a_mask_are_planned_as_such_however_long_the_mask_is_used(refresh):
    """The density's share of them, not the whole gather that follows where a dry run leaves out steps."""
    method, exchange = resolve(f"scape(refresh={refresh}, smallest=0, density=0.01)"), exchange_of("fsdp2", 4)
    parameters = parameters_for(exchange, {"a": (512, 256)})
    n = parameters["a"].local
    shard = Shard((Piece("a", 0, n),), (), n, torch.float32)
    layout = Layout([(Piece("a", 0, 4 * n, 4, n),)], [torch.float32], [shard], exchange.comm)
    run = stand_in_run(method, parameters.values(), exchange)
    found = dry_run(layout, road_of(method, parameters.values(), exchange), run, watch=Watch())
    assert found.weights == 3 * 4 * int(0.01 * n)


def test_each_buffer_has_the_dtype_of_its_parameters():
    exchange = exchange_of("ddp", 4)
    half, full = (
        Parameter(str(dtype), (512, 256), 512 * 256, "matrix", dtype, 512 * 256)
        for dtype in (torch.bfloat16, torch.float32)
    )
    rows = plan_of(resolve("dense"), [half, full], exchange).rows
    sent = [1.5 * size * 512 * 256 for size in (2, 4)]
    assert [row.wire_bytes for row in rows] == [row.dense_bytes for row in rows] == sent


def test_kernels_of_both_hops_are_compiled(monkeypatch):
    """A group of one rank is not taken for a node: sdp4bit has 8 bits inside it, and 4 across."""
    seen = set()
    original = quant.quantize
    monkeypatch.setattr(quant, "quantize", lambda rows, of, *rest: (seen.add(of.bits), original(rows, of, *rest)))
    intra = ReduceScatter(CountingComm(0, [0, 0], Ledger()))
    inter = AllReduce(CountingComm(0, [0, 1], Ledger()), divide="after")
    method = resolve("sdp4bit(smallest=0)")
    parameters = parameters_for(intra, SHAPES).values()
    road = road_of(method, parameters, intra, inter, intra=method.card.intra)
    compile_kernels(road, stand_in_run(method, parameters, inter), torch.device("cpu"))
    assert seen == {4, 8}


def test_the_double_of_an_optimizer_with_a_schedule_steps_in_its_place():
    """A schedule wraps ``optimizer.step``: the wrapper of the original steps the original."""
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    stepped = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    twin = nn.Parameter(torch.empty(3, device="meta"))
    double = optimizer_like(optimizer, {id(weight): twin})
    step_once(double, {})
    assert not stepped and not optimizer.state and weight.tolist() == [1.0] * 3
    assert set(double.state[twin]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("name", NAMES)
def test_a_fast_beta2_is_named_where_each_rank_divides_its_steps_by_its_own_second_moments(name):
    method, exchange = resolve(name), exchange_of("ddp", 4)
    parameters = list(parameters_for(exchange, {"w": (512, 512)}).values())
    for beta2 in (0.95, 0.99):
        run = stand_in_run(method, parameters, exchange)
        for group in run.optimizers[0].param_groups:
            if "betas" in group:
                group["betas"] = (0.9, beta2)
        method.begin(run)
        own = method.card.step_maker is not None and "betas" in run.holders["w"].group
        named = "beta2 0.95 each rank's own" in " ".join(str(plan_of(method, parameters, exchange)).split())
        assert named == (own and beta2 == 0.95)
    assert own or name not in ("trickle", "topk", "powersgd", "tagc")
