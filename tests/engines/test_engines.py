"""compress() on DDP, FSDP2 and HSDP, on real gloo processes."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.nn import functional as F

import engines
import ranks
import thinwire
from breadth import alternating, dealt, spread
from engines import adamw, build, made, refusal, same_on_all_ranks, shown, stats_of, train
from models import Net, batch, flat, loss_of
from thinwire import methods
from thinwire.base.errors import ThinwireError
from thinwire.core.road import Stage
from thinwire.engines.fsdp2 import FSDP2
from thinwire.methods import TABLE
from thinwire.network.comm import GroupComm
from thinwire.proof.record import small
from threaded import entries

METHODS = [
    "dense", "fp32", "bf16", "int8(smallest=100)", "int8(smallest=100, feedback='gradients')",
]  # fmt: skip
REST = [method for method in METHODS if method not in ("bf16", "int8(smallest=100)")]


def _dense(rank, world, kind):
    stock = build(kind, world)
    train(stock, adamw(stock), rank, range(6))
    ours = build(kind, world)
    optimizer = adamw(ours)
    wire = thinwire.compress(ours, optimizer, "dense")
    train(ours, optimizer, rank, range(6), wire)
    wire.close()
    return torch.equal(flat(stock), flat(ours))


@pytest.mark.parametrize(
    ("kind", "world"),
    spread(2, [("ddp", 3), ("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2-keep", 3), ("fsdp2", 4), ("hsdp", 4),
               ("hsdp", 2), ("hsdp-1", 3), ("ddp", 4)]),
)  # fmt: skip
def test_dense_is_the_stock_engine_bit_for_bit(kind, world):
    assert all(ranks.run(_dense, world, kind))


def _methods(rank, world, kind):
    stock = build(kind, world)
    reference = train(stock, adamw(stock), rank, range(8))
    found = {}
    for method in ["bf16", "int8(smallest=100)", *dealt(REST, kind)]:
        model = build(kind, world)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        losses = train(model, optimizer, rank, range(8), wire)
        stats = stats_of(wire)
        found[method] = {
            "apart": max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
            "equal": same_on_all_ranks(model),
            "surprise": sum(stats["wire_bytes_per_step"].values()) - wire.plan.wire_bytes - wire.plan.weight_bytes,
            "share": wire.plan.wire_bytes / wire.plan.dense_bytes,
            "exposed": stats["exposed_ms"],
        }
        assert shown(wire)
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("ddp", 3), ("fsdp2", 3), ("hsdp", 4)]))
def test_methods_train_alike_and_send_what_the_plan_says(kind, world):
    for found in ranks.run(_methods, world, kind):
        for method, what in found.items():
            # Logits of a small net after 8 steps of lr 3e-3: an 8-bit wire moves the loss in the fourth digit.
            assert what["apart"] < (5e-3 if "8" in method else 1e-3), method
            assert what["equal"], method
            assert abs(what["surprise"]) < 1e-6, method  # to the byte; parts of a ring are no whole bytes
            assert what["exposed"] > 0
        # On HSDP the hop inside the node stays dense: 2 ranks send twice as much there as across, on gloo.
        # The flag of 4 bytes comes on top.
        assert found["bf16"]["share"] == pytest.approx(0.5 if kind != "hsdp" else 5 / 6, rel=1e-3)
        assert found["int8(smallest=100)"]["share"] < (0.4 if kind != "hsdp" else 0.8)


def _nan(rank, world, kind, method):
    poisoned = build(kind, world)
    optimizer = adamw(poisoned)
    wire = thinwire.compress(poisoned, optimizer, method)
    train(poisoned, optimizer, rank, range(7), wire, poison=(4, 1))
    skipped = wire.skipped, stats_of(wire)["skipped"], wire.step
    state = entries(wire.state_dict())
    wire.close()
    without = build(kind, world)
    optimizer = adamw(without)
    wire = thinwire.compress(without, optimizer, method)
    train(without, optimizer, rank, [0, 1, 2, 3, 5, 6], wire)
    other = entries(wire.state_dict())
    wire.close()
    assert state.pop("skipped") == 1 and other.pop("skipped") == 0
    same_state = state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)
    finite = bool(flat(poisoned).isfinite().all())
    return skipped, torch.equal(flat(poisoned), flat(without)), finite, same_state, len(state)


@pytest.mark.parametrize(
    ("of", "method"),
    spread(2, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4)], ["int8(smallest=100, feedback='gradients')", "dense"]),
)
def test_one_nan_on_one_rank_skips_the_step_everywhere_and_leaves_no_trace(of, method):
    kind, world = of
    for skipped, same, finite, same_state, states in ranks.run(_nan, world, kind, method):
        assert skipped == (1, 1, 7)
        assert finite
        assert same
        assert same_state
        assert states == 3 if method == "dense" else states > 6  # what it is, step, whether a flush is due; residuals


def _abandoned(rank, world, kind, method):
    """As a GradScaler does it: where a gradient is not finite, optimizer.step() is never called."""
    states = []
    for given in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5]):
        model = build(kind, world)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        if 3 not in given:
            optimizer.step()  # as some do before they make a schedule: it has no gradients, and is no step
        for step in given:
            with wire.accumulate(last=True):
                (loss_of(model, step, rank) * (float("inf") if step == 3 else 1.0)).backward()
            if step != 3:
                optimizer.step()
            optimizer.zero_grad()
        states.append((wire.skipped, wire.step, flat(model), entries(wire.state_dict())))
        wire.close()
    (skipped, steps, weights, state), (_, _, others, other) = states
    assert state.pop("skipped") == 1 and other.pop("skipped") == 0
    same_state = state.keys() == other.keys() and all(torch.equal(state[k], other[k]) for k in state)
    return skipped, steps, torch.equal(weights, others), same_state


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_that_is_never_taken_leaves_no_trace(kind):
    for skipped, steps, same, same_state in ranks.run(_abandoned, 2, kind, "int8(smallest=100, feedback='gradients')"):
        assert (skipped, steps) == (1, 6)
        assert same and same_state


class Odd(nn.Module):
    """A frozen part, a part used by turns, a tied head, a first dimension below the number of ranks."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(51, 18)
        self.left, self.right = nn.Linear(18, 18), nn.Linear(18, 18)
        self.frozen = nn.Linear(18, 18)
        self.frozen.requires_grad_(False)
        self.narrow = nn.Linear(18, 2)
        self.wide = nn.Linear(2, 18)
        self.head = nn.Linear(18, 51, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, turn=0):
        x = self.embedding(tokens)
        x = x + (self.left(x) if turn % 2 == 0 else self.right(x)) + self.frozen(x)
        return self.head(x + self.wide(torch.tanh(self.narrow(x))))


def odd_loss(model, step, rank):
    tokens, targets = batch(step, rank)
    return F.cross_entropy(model(tokens, step).flatten(0, 1).float(), targets.flatten())


def _odd(rank, world, kind):
    options = {"find_unused_parameters": True} if kind == "ddp" else {}
    stock = build(kind, world, net=Odd, **options)
    train(stock, adamw(stock), rank, range(6), loss=odd_loss)
    found = {}
    for method in ("dense", "int8(smallest=30)"):
        model = build(kind, world, net=Odd, **options)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        train(model, optimizer, rank, range(6), wire, loss=odd_loss)
        found[method] = float((flat(stock) - flat(model)).abs().max()), same_on_all_ranks(model)
        names = [row.parameter.name for row in wire.plan.rows]
        assert "frozen.weight" not in names and "head.weight" not in names and "embedding.weight" in names
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), spread(2, [("ddp", 3), ("hsdp", 4), ("fsdp2", 3)]))
def test_unused_frozen_tied_and_narrow_parameters(kind, world):
    for found in ranks.run(_odd, world, kind):
        assert found["dense"][0] == 0
        assert found["int8(smallest=30)"][0] < 0.02
        assert all(equal for _, equal in found.values())


def _bf16(rank, world, kind):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def to_bf16(model):
        model.to(torch.bfloat16)

    found = []
    for options in ({"prepare": to_bf16}, {"policy": policy}) if kind != "ddp" else ({"prepare": to_bf16},):
        stock = build(kind, world, **options)
        reference = train(stock, adamw(stock), rank, range(5))
        for method in ("dense", "int8(smallest=100)", "fp32"):
            model = build(kind, world, **options)
            optimizer = adamw(model)
            wire = thinwire.compress(model, optimizer, method)
            losses = train(model, optimizer, rank, range(5), wire)
            apart = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
            found.append((method, torch.equal(flat(stock), flat(model)), apart, same_on_all_ranks(model)))
            wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2)])
def test_bf16_models_and_mixed_precision(kind, world):
    for found in ranks.run(_bf16, world, kind):
        for method, identical, apart, equal in found:
            assert equal
            assert apart < 0.03, method  # one bf16 rounding of the logits
            if method == "dense":
                assert identical


def _unlike_policies(rank, world, kind):
    """Blocks and root of unlike dtypes: what the plan says, what is sent, and the dtypes of the buffers."""
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, output_dtype=torch.float32)
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    default = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # reduces in it, and from torch 2.15 on in float32
    reduce, found = Stage.reduce, []
    # The others send more or less in some steps than in others (TAGC by its sketch's buckets).
    cards = [(cls, small(cls).card) for cls in methods.TABLE if kind in cls.engines and cls.name != "tagc"]
    alike = [cls for cls, card in cards if card.steady == 0 and len(card.cycle) == 1]
    cases = itertools.product(alike, ((default, wide), (wide, narrow), (narrow, MixedPrecisionPolicy())))
    for cls, (blocks, root) in dealt(cases, kind, ("fsdp2", "", "hsdp", "")):
        model = build(kind, world, policy=blocks, root=root, reshard_after_forward=None)
        optimizer = made(cls.OPTIMIZER, model)
        wire = thinwire.compress(model, optimizer, small(cls), steps=60)
        handed = {}

        def spy(stage, flat, pieces, out, handed=handed):
            handed.update((piece.name, flat.dtype) for piece in pieces)
            reduce(stage, flat, pieces, out)

        with mock.patch.object(Stage, "reduce", spy):
            train(model, optimizer, rank, [0], wire)
            wire.reset_stats()  # the first step of a method that keeps state may send more
            train(model, optimizer, rank, [1, 2], wire)
        plan, layout, stats = wire.plan, wire.engine.layout(), wire.ledger.stats()
        laid = {p.name: dtype for pieces, dtype in zip(layout.buffers, layout.dtypes, strict=True) for p in pieces}
        sent = sum(stats["wire_bytes_per_step"].values()) - plan.weight_bytes
        more = sent - plan.wire_bytes, stats["dense_bytes_per_step"] - plan.dense_weight_bytes - plan.dense_bytes
        dtypes = 1 if blocks is default and hasattr(FSDPParam, "unsharded_grad_dtype") else 2
        found.append((cls.name, *more, laid == handed, len({*laid.values()}) == dtypes))
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(0, [("fsdp2", 2), ("hsdp", 4)]))
def test_modules_of_unlike_policies_are_planned_and_laid_out_as_they_are_sent(kind, world):
    for found in ranks.run(_unlike_policies, world, kind):
        assert len(found) > 5
        for method, more, more_dense, as_laid, as_many in found:
            assert abs(more) < 1e-6 and abs(more_dense) < 1e-6, method
            assert as_laid and as_many, method


def _accumulate(rank, world, kind):
    stock = build(kind, world)
    optimizer = adamw(stock)
    for step in range(5):
        for micro in range(3):
            last = micro == 2
            if kind == "ddp" and not last:
                with stock.no_sync():
                    (loss_of(stock, 3 * step + micro, rank) / 3).backward()
                continue
            if kind != "ddp":
                stock.set_requires_gradient_sync(last)
            (loss_of(stock, 3 * step + micro, rank) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = []
    for method in ("dense", "int8(smallest=100)"):
        model = build(kind, world)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        for step in range(5):
            for micro in range(3):
                with wire.accumulate(last=micro == 2):
                    (loss_of(model, 3 * step + micro, rank) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = stats_of(wire)
        gathers = stats["weight_bytes_per_step"]
        surprise = sum(stats["wire_bytes_per_step"].values()) - gathers - wire.plan.wire_bytes
        found.append((torch.equal(flat(stock), flat(model)), float((flat(stock) - flat(model)).abs().max()), surprise))
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), spread(2, [("ddp", 2), ("hsdp", 4), ("fsdp2", 2)]))
def test_accumulation_exchanges_once_per_step(kind, world):
    for dense, int8 in ranks.run(_accumulate, world, kind):
        assert dense[0]
        assert int8[1] < 0.02
        assert all(abs(surprise) < 1e-6 for *_, surprise in (dense, int8))


def _sizes(rank, world, kind):
    model = build(kind, world)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, "int8(smallest=100, feedback='gradients')")
    losses = train(model, optimizer, rank, range(4), wire)
    result = same_on_all_ranks(model), losses[-1] < losses[0], sum(stats_of(wire)["wire_bytes_per_step"].values())
    wire.close()
    return result


@pytest.mark.parametrize(
    ("kind", "world"),
    spread(2, [("ddp", 1), ("ddp", 5), ("fsdp2", 7), ("fsdp2", 1), ("hsdp", 8), ("ddp", 8)]),
)
def test_any_number_of_ranks(kind, world):
    for equal, falls, sent in ranks.run(_sizes, world, kind):
        assert equal and falls
        assert (sent == 0) == (world == 1)


def _one_rank_nan(rank, world, kind):
    model = build(kind, world)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, "dense")
    before = flat(model)
    train(model, optimizer, rank, [0], wire, poison=(0, 0))
    result = wire.skipped, torch.equal(before, flat(model))
    wire.close()
    return result


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_the_guard_works_on_one_rank_too(kind):
    assert ranks.run(_one_rank_nan, 1, kind) == [(1, True)]


def _resume(rank, world, kind):
    method = "int8(smallest=100, feedback='gradients')"
    whole = build(kind, world)
    optimizer = adamw(whole)
    wire = thinwire.compress(whole, optimizer, method)
    train(whole, optimizer, rank, range(3), wire)
    weights = {n: p.detach().clone() for n, p in whole.state_dict().items()}
    moments = {k: v for k, v in optimizer.state_dict().items()}
    import copy

    moments, state = copy.deepcopy(moments), wire.state_dict()
    train(whole, optimizer, rank, range(3, 6), wire)
    wire.close()
    again = build(kind, world)
    optimizer = adamw(again)
    again.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    wire = thinwire.compress(again, optimizer, method)
    wire.load_state_dict(state)
    train(again, optimizer, rank, range(3, 6), wire)
    result = torch.equal(flat(whole), flat(again)), wire.step
    wire.close()
    return result


@pytest.mark.parametrize(("kind", "world"), [("ddp", 3), ("fsdp2", 3)])
def test_state_resumes_bit_for_bit(kind, world):
    # Sums are taken in rank order, so that not even the buckets that DDP has in its first step change a bit.
    for identical, step in ranks.run(_resume, world, kind):
        assert identical
        assert step == 6


def _inside(rank, world, kind, options):
    found = []
    for method, inside in (("int8(smallest=100)", None), ("int8(smallest=100)", "int8(group=64, smallest=100)"),
                           ("bf16", "bf16")):  # fmt: skip
        model = build(kind, world)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method, intra=inside, **options)
        losses = train(model, optimizer, rank, range(8), wire)
        stats = stats_of(wire)
        surprise = sum(stats["wire_bytes_per_step"].values()) - stats["weight_bytes_per_step"] - wire.plan.wire_bytes
        gradients = stats["wire_bytes_per_step"]["intra"] - stats["weight_bytes_per_step"]
        found.append((losses[-1], same_on_all_ranks(model), surprise, gradients))
        wire.close()
    errors = []
    for inside in ("int8(feedback='gradients')", "sdp4bit"):
        try:
            thinwire.compress(build(kind, world), adamw(build(kind, world)), "bf16", intra=inside, **options)
        except thinwire.ThinwireError as error:
            errors.append(str(error))
    return found, errors


@pytest.mark.parametrize(
    ("kind", "options"), spread(2, [("hsdp", {}), ("ddp", {"two_level": True}), ("fsdp2", {"two_level": True})])
)
def test_the_hop_inside_a_node_may_be_cheap_too(kind, options):
    for found, errors in ranks.run(_inside, 4, kind, options, LOCAL_WORLD_SIZE="2"):
        assert all("choose a method without state" in error for error in errors) and len(errors) == 2
        (dense, *_), (_, _, _, before) = found[0], found[0]
        for loss, equal, surprise, _ in found:
            assert equal and abs(loss - dense) < 0.02
            assert abs(surprise) < 1e-6
        assert found[1][3] < 0.5 * before


def _two_level(rank, world, kind, method):
    stock = build(kind, world)
    reference = train(stock, adamw(stock), rank, range(6))
    sent = []
    for two_level in (False, True):
        model = build(kind, world)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method, two_level=two_level)
        losses = train(model, optimizer, rank, range(6), wire)
        sent.append(stats_of(wire)["wire_bytes_per_step"]["inter"])
        apart = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        equal = same_on_all_ranks(model)
        wire.close()
    return apart, equal, sent


@pytest.mark.parametrize("kind", spread(2, ["ddp", "fsdp2"]))
def test_two_level_sends_less_across_nodes(kind):
    results = ranks.run(_two_level, 4, kind, "int8(smallest=100)", LOCAL_WORLD_SIZE="2")
    assert all(apart < 5e-3 and equal for apart, equal, _ in results)
    one_level, two_level = (sum(sent[i] for *_, sent in results) for i in (0, 1))
    assert two_level < one_level


def _compiled(rank, world, kind):
    stock = build(kind, world)
    reference = train(stock, adamw(stock), rank, range(4))
    model = build(kind, world, bucket_cap_mb=1) if kind == "ddp" else build(kind, world)
    found = []
    for method in ("dense", "int8(smallest=100)"):
        model = build(kind, world, **({"bucket_cap_mb": 1} if kind == "ddp" else {}))
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = adamw(model)
        wire = thinwire.compress(compiled, optimizer, method)
        losses = train(compiled, optimizer, rank, range(4), wire)
        found.append(max(abs(a - b) for a, b in zip(losses, reference, strict=True)))
        wire.close()
    return found


@pytest.mark.parametrize("kind", spread(2, ["ddp", "fsdp2"]))
def test_compiled_models(kind):
    for dense, int8 in ranks.run(_compiled, 2, kind):
        assert dense < 1e-5
        assert int8 < 5e-3


def _refusals(rank, world):
    from torch.distributed._composable.replicate import replicate

    def refusal(make):
        try:
            model, optimizer, arguments = make()
            thinwire.compress(model, optimizer, *arguments[0:1], **(arguments[1] if len(arguments) > 1 else {}))
        except thinwire.ThinwireError as error:
            return str(error)
        return None

    def hooked():
        model = build("ddp", world)
        model.register_comm_hook(None, lambda state, bucket: None)
        return model, adamw(model), ("int8",)

    def half():
        model = build("ddp", world, prepare=lambda m: m.half())
        return model, adamw(model), ("int8",)

    def imaginary():
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, dtype=torch.complex64))
        return model, torch.optim.AdamW(model.parameters()), ("dense",)

    def unused():
        model = build("ddp", world, find_unused_parameters=True)
        return model, adamw(model), ("int8(feedback='gradients')",)

    def sparse():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
        model = nn.parallel.DistributedDataParallel(net)
        return model, adamw(model), ("int8",)

    def replicated():
        model = replicate(Net())
        return model, adamw(model), ("int8",)

    def bare():
        model = Net()
        return model, adamw(model), ("int8",)

    def stranger():
        model = build("ddp", world)
        return model, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), ("int8",)

    def ignored():
        net = Net()
        return fully_shard(net, ignored_params={net.head.weight}), adamw(net), ("int8",)

    def delayed():
        net = Net()
        late = {"delay_all_reduce_named_params": [("head.weight", net.head.weight)]}
        model = nn.parallel.DistributedDataParallel(net, **late, param_to_hook_all_reduce=net.embedding.weight)
        return model, adamw(model), ("int8",)

    def thawed():
        model = build("ddp", world, prepare=lambda net: net.head.weight.requires_grad_(False))
        return model.requires_grad_(), adamw(model), ("int8",)

    def frozen():
        model = build("ddp", world, find_unused_parameters=True)
        model.module.head.weight.requires_grad_(False)
        return model, adamw(model), ("dense",)

    def whole():
        model = build("fsdp2", world)
        model.head.weight = Net(layers=1).head.weight
        return model, adamw(model), ("int8",)

    def tied():
        """Inside one FSDP module; those of two modules are exchanged twice."""
        net = Net()
        model = fully_shard(net)
        model.head.weight = model.embedding.weight
        return model, adamw(model), ("int8",)

    def silent():
        model = build("fsdp2", world)
        return model, adamw(model), ("none",)

    def unknown():
        model = build("ddp", world)
        return model, adamw(model), ("int9",)

    def knob():
        model = build("ddp", world)
        return model, adamw(model), ("int8(grup=3)",)

    def weightless():
        with torch.device("meta"):
            model = build("fsdp2", world)
        return model, torch.optim.AdamW(model.parameters()), ("int8",)

    def shared():
        """As ranks that share a GPU do."""
        comm = FSDP2.comm

        def on_gpu(engine, group):
            found = comm(engine, group)
            found.device = torch.device("cuda", 0)
            return found

        FSDP2.comm = on_gpu
        model = build("fsdp2", world)
        return model, adamw(model), ("int8",)

    cases = (hooked, half, imaginary, unused, sparse, replicated, bare, stranger, silent, unknown, knob, weightless,
             shared, ignored, delayed, thawed, frozen, whole, tied)  # fmt: skip
    return {make.__name__: refusal(make) for make in cases}


def test_what_cannot_be_carried_is_refused_by_name_with_the_alternative():
    found = ranks.run(_refusals, 2)[0]
    expected = {
        "hooked": "already has a communication hook", "half": "float16",
        "imaginary": "torch.view_as_complex()",
        "unused": "such as int8", "sparse": "sparse=False", "replicated": "DistributedDataParallel",
        "bare": "fully_shard", "stranger": "none of the model's parameters", "silent": "ddp only",
        "unknown": "there are: dense", "knob": "it has: dense, send", "weightless": "call to_empty(device=...)",
        "shared": "with a GPU for each rank; or DDP",
        "ignored": "head.weight is trained, but", "delayed": "head.weight is trained, but",
        "thawed": "8 parameters are trained, and DDP exchanges 7",
        "frozen": "7 parameters are trained, and DDP exchanges 8",
        "whole": "another tensor has replaced", "tied": "tied after fully_shard(): tie them before",
    }  # fmt: skip
    for case, words in expected.items():
        assert found[case] is not None, f"{case} was not refused"
        assert words in found[case], f"{case}: {found[case]}"
        assert "\n" not in found[case]


def _divided(rank, world, kind, method):
    """The loss of a step divided by all of its tokens, and the gradients summed: torchtitan trains so."""
    found = []
    for factor in (None, 1.0, 4.0, 3.0):
        model = build(kind, world)
        if factor is not None:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
        begun, optimizer = flat(model), torch.optim.SGD(model.parameters(), lr=0.1)
        wire = thinwire.compress(model, optimizer, method)
        train(model, optimizer, rank, range(4), wire, loss=lambda *of, f=factor: loss_of(*of) * ((f or world) / world))
        found.append(flat(model))
        wire.close()
    *exact, rounded = [float((weights - found[0]).norm() / (found[0] - begun).norm()) for weights in found]
    return [apart == 0 for apart in exact] + [rounded < 0.02]  # where int8 rounds a value the other way


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("fsdp2", 2), ("hsdp-1", 2), ("hsdp", 4)]))
def test_the_sum_may_be_divided_by_any_number(kind, world):
    """By a power of two nothing is rounded."""
    assert all(all(equal) for equal in ranks.run(_divided, world, kind, "int8(smallest=100, feedback='gradients')"))


def _set_after_sharding(rank, world, kind):
    """Give the model other tensors after fully_shard(), as transformers' from_pretrained() does."""
    broken = []
    for cls in dealt((cls for cls in TABLE if kind in cls.engines), kind, ("fsdp2", "", "fsdp2", "hsdp", "")):
        ends = []
        for anew in (False, True):
            model = build(kind, world)
            for module in model.modules() if anew else ():
                for name, weight in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(weight.detach().clone()))
            optimizer = made(cls.OPTIMIZER, model)
            wire = thinwire.compress(model, optimizer, small(cls))
            train(model, optimizer, rank, range(2), wire)
            ends.append((flat(model), wire.ledger.stats()["wire_bytes_per_step"]))
            wire.close()
        if not torch.equal(ends[0][0], ends[1][0]) or ends[0][1] != ends[1][1]:
            broken.append(cls.name)
    return broken


@pytest.mark.parametrize(("kind", "world"), alternating(0, [("fsdp2", 2), ("hsdp", 4)]))
def test_weights_set_after_sharding_are_trained_as_those_set_before(kind, world):
    """Until the first forward pass torch's FSDP2 has others than the model."""
    assert ranks.run(_set_after_sharding, world, kind) == [[]] * world


def test_engines_module_is_importable_by_ranks():
    assert engines.build is build


def _separate_group(rank, world):
    found, used = [], []
    plain = GroupComm._all_to_all

    def noted(self, out, rows):
        used.append(self.group)
        plain(self, out, rows)

    with mock.patch.object(GroupComm, "_all_to_all", noted):
        for separate in (False, True):
            model = build("fsdp2", world)
            if separate:
                model.set_separate_reduce_scatter_group()
            wire = thinwire.compress(model, optimizer := adamw(model), "int8(smallest=0)")
            used.clear()
            found.append(train(model, optimizer, rank, range(2), wire))
            group = model._get_fsdp_state()._fsdp_param_groups[0]
            shard = group.mesh_info.shard_process_group
            separate_group = group.mesh_info.reduce_scatter_process_group
            assert len(set(used)) == 1 and used[0] not in (shard, separate_group)  # which others use meanwhile
            assert (separate_group is not None) == separate
            wire.close()
    model = build("fsdp2", world)
    wire = thinwire.compress(model, optimizer := adamw(model), "int8(smallest=0)")
    model.set_separate_reduce_scatter_group()
    with pytest.raises(thinwire.ThinwireError, match="before compress"):
        train(model, optimizer, rank, range(1), wire)
    model = build("fsdp2", world)
    model.blocks[0].set_separate_reduce_scatter_group()
    with pytest.raises(thinwire.ThinwireError, match="on the root module"):
        thinwire.compress(model, adamw(model), "int8(smallest=0)")
    return found


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="torch has no such groups")
def test_gradients_go_over_the_group_that_fsdp_has_for_them():
    """Or on a CPU over a double of it: the same losses. Another one than compress() knows is refused."""
    for plain, separate in ranks.run(_separate_group, 2):
        assert plain == separate


def _beside_the_backward_pass(rank, world, kind):
    """The first exchange ends once the backward pass of the next block has begun; the last one fails, or not."""
    found = []
    for fails in (False, True):
        model = build(kind, world, net=lambda: Net(layers=2))
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, "bf16")
        begun, reduce, seconds = threading.Event(), Stage.reduce, []
        model.blocks[0].register_full_backward_pre_hook(lambda *_, begun=begun: begun.set())

        def slow(stage, flat, pieces, out, begun=begun, reduce=reduce, seconds=seconds, fails=fails):
            began = time.monotonic()
            begun.wait(20)
            seconds.append(time.monotonic() - began)
            if fails and pieces[0].name == "embedding.weight":
                raise ThinwireError("as it happens")
            return reduce(stage, flat, pieces, out)

        with mock.patch.object(Stage, "reduce", slow):
            try:
                loss_of(model, 0, rank).backward()
                said = ""
            except ThinwireError as error:
                said = str(error)
        found.append((len(seconds), max(seconds) < 20, said))
        wire.close()
    return found


@pytest.mark.parametrize(("kind", "world"), alternating(1, [("fsdp2", 2), ("hsdp", 4)]))
def test_sharded_gradients_travel_beside_the_backward_pass(kind, world):
    calls = 3 if kind == "fsdp2" else 6  # modules, and on HSDP two hops each
    for right, wrong in ranks.run(_beside_the_backward_pass, world, kind):
        assert right == (calls, True, "")
        assert wrong[1:] == (True, "as it happens")


def _seen_by_hooks(rank, world):
    """What a hook sees when a gradient is there, and what a second backward pass is added to, are means."""
    model = build("fsdp2", world)
    wire = thinwire.compress(model, adamw(model), "dense")
    seen = {}
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(
            lambda weight, name=name: seen.update({name: weight.grad.to_local().clone()})
        )
    reduce = Stage.reduce

    def late(*given):
        time.sleep(0.05)
        return reduce(*given)

    with mock.patch.object(Stage, "reduce", late), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss_of(model, 0, rank).backward()
        once = all(torch.equal(seen[name], weight.grad.to_local()) for name, weight in model.named_parameters())
        for _, weight in model.named_parameters():
            weight._post_accumulate_grad_hooks.clear()
        loss_of(model, 0, rank).backward()
    twice = all(torch.equal(2 * seen[name], weight.grad.to_local()) for name, weight in model.named_parameters())
    wire.close()
    return once, twice


def test_fsdp2_waits_where_torch_or_a_hook_looks_at_gradients():
    assert all(found == (True, True) for found in ranks.run(_seen_by_hooks, 2))


def _in_one_pass(rank: int, world: int, kind: str) -> bool:
    """Do two models, each with a wire, end as in plain torch where one backward pass goes through both?"""
    ends = []
    for wired in (False, True):
        models = [build(kind.removesuffix(" shared"), world, net=lambda: Net(layers=3)) for _ in range(2)]
        if kind.endswith("shared"):  # one group for the gradients of both
            FSDPModule.set_separate_reduce_scatter_group(nn.ModuleList(models))
        optimizers = [adamw(model) for model in models]
        wires = [thinwire.compress(*both, "dense") for both in zip(models, optimizers, strict=True)] if wired else []
        for step in range(8):
            sum(loss_of(model, 2 * step + number, rank) for number, model in enumerate(models)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(torch.cat([flat(model) for model in models]))
        for wire in wires:
            wire.close()
    return torch.equal(*ends)


SHARED = [("fsdp2 shared", 2), ("hsdp shared", 4)] * hasattr(FSDPModule, "set_separate_reduce_scatter_group")


@pytest.mark.parametrize(("kind", "world"), spread(2, [("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("hsdp-1", 2), *SHARED]))
def test_one_backward_pass_may_go_through_two_models(kind, world):
    assert all(ranks.run(_in_one_pass, world, kind))


NO_SENSE = [
    ("two_level", "no"), ("two_level", 1), ("steps", 10.5), ("steps", "100"), ("steps", True), ("seed", "x"),
    ("seed", None), ("stages", "pp"), ("safety", "on"),
]  # fmt: skip


def _makes_no_sense(rank: int, world: int, kind: str) -> list[tuple[str, str]]:
    model = build(kind, world)
    optimizer = adamw(model)
    said = [(name, refusal(thinwire.compress, model, optimizer, "int8", **{name: value})) for name, value in NO_SENSE]
    wire = thinwire.compress(model, optimizer, "int8")
    said.append(("compress() was already called on this", refusal(thinwire.compress, model, adamw(model), "int8")))
    said.append(("max_norm is a number", refusal(wire.clip_grad_norm_, model.parameters(), 1.0)))
    if kind == "ddp":
        loss_of(model.module, 0, rank).backward()
        said.append(("not the module inside", refusal(optimizer.step)))
    wire.close()
    if kind == "ddp":
        said.append(("call compress() again", refusal(loss_of(model, 0, rank).backward)))
    thinwire.compress(model, optimizer, "int8").close()
    return said


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_what_makes_no_sense_is_one_line_and_leaves_the_model_as_it_was(kind):
    for said in ranks.run(_makes_no_sense, 2, kind):
        assert [(words, line) for words, line in said if words not in line or "\n" in line] == []
