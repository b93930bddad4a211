"""compress() beside tensor parallelism and pipelines, on real gloo processes."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ranks
import thinwire
from breadth import dealt, spread
from engines import adamw, refusal, shown, stats_of
from models import Net, batch, flat
from thinwire.base.knobs import knobs_of
from thinwire.methods import TABLE, Updates, resolve
from threaded import entries

METHODS = [
    "int8(smallest=100, feedback='gradients')", "radius(smallest=100, start=0, T=2, density=0.2)",
    "topk(feedback='gradients', smallest=100, density=0.3)", "powersgd(smallest=100, feedback='gradients')",
    "scape(smallest=100, warmup=1, density=0.3)",
]  # fmt: skip


def methods_of_gradients() -> list[str]:
    """Each method that FSDP2 has and that trains, with the feedback of gradients where steps are its default."""
    texts = []
    for cls in TABLE:
        method = resolve(cls.name)
        knobs = [knob.name for knob in knobs_of(method)]
        text = [f"{knob}={value}" for knob, value in (("smallest", 100), ("start", 0)) if knob in knobs]
        if isinstance(getattr(method, "feedback", None), Updates):
            text.append("feedback='gradients'")
        if "fsdp2" in cls.engines and cls.name != "none":
            texts.append(f"{cls.name}({','.join(text)})")
    return texts


def build(style: str, vocabulary: int) -> tuple[nn.Module, DeviceMesh]:
    """A (dp, tp) mesh. ``linears``: only the blocks' linears are tensor parallel. ``whole``: every parameter is, norms
    as replicas. ``hsdp``: as linears, on a (replicate, shard, tp) mesh with one rank to shard over."""
    torch.manual_seed(0)
    model = Net(vocabulary, layers=1)
    if style == "hsdp":
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
        dp = mesh["replicate", "shard"]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp = mesh["dp"]
    if style == "whole":
        inside = {
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        around = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], around)
    else:
        inside = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], dict(inside))
        fully_shard(block, mesh=dp)
    return fully_shard(model, mesh=dp), mesh


def optimizer_for(method: str, model: nn.Module) -> torch.optim.Optimizer:
    return thinwire.AdamS(model.parameters(), lr=3e-3) if method.startswith("scape") else adamw(model)


def backward(model: nn.Module, step: int, vocabulary: int) -> float:
    tokens, targets = batch(step, torch.distributed.get_rank() // 2, vocabulary)  # one batch per dp rank
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item()


def train(model, optimizer, steps, vocabulary, wire=None, *, clipped=True) -> list[float]:
    losses = []
    for step in steps:
        losses.append(backward(model, step, vocabulary))
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0) if wire is None else wire.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole_norm(model: nn.Module) -> torch.Tensor:
    """Of every gradient, gathered."""
    return torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm()


def same_on(group: torch.distributed.ProcessGroup, tensors: list[torch.Tensor]) -> bool:
    low = torch.cat([tensor.detach().flatten() for tensor in tensors])
    high = low.clone()
    torch.distributed.all_reduce(low, torch.distributed.ReduceOp.MIN, group=group)
    torch.distributed.all_reduce(high, torch.distributed.ReduceOp.MAX, group=group)
    return torch.equal(low, high)


def sent_beside_the_plan(wire) -> float:
    """Bytes per step that are neither the plan's nor gathered weights."""
    stats = stats_of(wire)
    return sum(stats["wire_bytes_per_step"].values()) - stats["weight_bytes_per_step"] - wire.plan.wire_bytes


def replicas(model: nn.Module) -> list[torch.Tensor]:
    """This rank's part of what tensor parallelism leaves whole: off its mesh, or replicated on it."""
    return [
        p.to_local()
        for p in model.parameters()
        if "tp" not in p.device_mesh.mesh_dim_names or isinstance(p.placements[-1], Replicate)
    ]


def _beside(rank, world, style, vocabulary, methods):
    """Dense against the stock engine, then every method."""
    clipped = style == "whole"  # torch's own clip_grad_norm_ takes no norm over parameters on several meshes
    stock, _ = build(style, vocabulary)
    train(stock, adamw(stock), range(3), vocabulary, clipped=clipped)
    found = {}
    for method in ("dense", *methods):
        model, mesh = build(style, vocabulary)
        optimizer = optimizer_for(method, model)
        wire = thinwire.compress(model, optimizer, method, steps=100)
        losses = train(model, optimizer, range(2), vocabulary, wire, clipped=clipped)
        wire.reset_stats()
        losses += train(model, optimizer, [2], vocabulary, wire, clipped=clipped)
        identical = torch.equal(flat(stock), flat(model))
        losses.append(backward(model, 3, vocabulary))
        norms = float(whole_norm(model)), float(wire.clip_grad_norm_(0.2)), float(whole_norm(model))
        optimizer.step()
        optimizer.zero_grad()
        groups = [mesh.get_group(name) for name in mesh.mesh_dim_names]
        found[method] = {
            "identical": identical,
            "losses": losses,
            "norms": norms,
            "equal": all(same_on(group, [p.full_tensor() for p in model.parameters()]) for group in groups),
            "replicas": len(replicas(model)),
            "replicas equal": same_on(mesh.get_group("tp"), replicas(model)),
            "surprise": sent_beside_the_plan(wire),
            "share": wire.plan.wire_bytes / wire.plan.dense_bytes,
            "rows": {row.parameter.name: (row.parameter.shape, row.parameter.rank_shape) for row in wire.plan.rows},
        }
        assert shown(wire)
        wire.close()
    return found


@pytest.mark.parametrize(
    ("style", "vocabulary", "methods"),
    [
        ("linears", 51, spread(2, [METHODS[2], METHODS[0], "sdp4bit(smallest=100)", METHODS[1]])),
        ("whole", 53, dealt(METHODS, 1, range(2))),
        ("hsdp", 51, METHODS[:1]),
    ],
)
def test_fsdp2_beside_tensor_parallelism(style, vocabulary, methods):
    for rank, found in enumerate(ranks.run(_beside, 4, style, vocabulary, methods)):
        assert len(found) == 1 + len(methods)
        for method, what in found.items():
            assert what["identical"] == (method == "dense"), method
            assert what["losses"][-1] < what["losses"][0], method
            if method.startswith("int8"):
                apart = zip(what["losses"], found["dense"]["losses"], strict=True)
                assert max(abs(a - b) for a, b in apart) < 5e-3
            before, told, after = what["norms"]
            assert told == pytest.approx(before, rel=1e-6) and before > 0.2, method
            assert after == pytest.approx(0.2, rel=1e-5), method
            assert what["equal"] and what["replicas equal"] and what["replicas"] >= 3, method
            assert abs(what["surprise"]) < 1e-6, method
            assert (what["share"] < 0.7) == (method != "dense"), method
            rows = what["rows"]
            assert rows["blocks.0.up.weight"] == ((72, 18), (36, 18))
            assert rows["blocks.0.down.weight"] == ((18, 72), (18, 36))
            assert rows["blocks.0.norm.weight"] == ((18,), (18,))
            uneven = 27 - rank % 2 if style == "whole" else vocabulary
            assert rows["head.weight"] == ((vocabulary, 18), (uneven, 18))


class Uneven(nn.Module):
    """A (37, 18) weight of which tensor-parallel ranks hold 19 and 18 rows, and others that they hold in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.second, self.last = (nn.Linear(18, n, bias=False) for n in (18, 37, 18, 18))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return self.last(F.gelu(self.second(x + F.gelu(self.up(x))[:, :18])))


def _uneven(rank: int, world: int) -> dict[str, bool]:
    """Do tensor-parallel ranks hold the same of what they have in common, on HSDP?"""
    mesh, found = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp")), {}
    for method in (*METHODS[:2], METHODS[4]):
        torch.manual_seed(0)
        model = parallelize_module(Uneven(), mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(model, mesh=mesh["replicate", "shard"])
        optimizer = optimizer_for(method, model)
        wire = thinwire.compress(model, optimizer, method, steps=20)
        for step in range(4):
            x = torch.randn(2, 16, 18, generator=torch.Generator().manual_seed(10 * step + rank // 2))
            F.mse_loss(model(x[0]), x[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        common = [model.first.weight, model.second.weight, model.last.weight]
        found[method] = same_on(mesh.get_group("tp"), [weight.to_local() for weight in common])
        wire.close()
    return found


def test_ranks_choose_alike_for_what_they_hold_in_common():
    """Beside parts of different sizes, which are dealt to the ranks that choose their masks."""
    for found in ranks.run(_uneven, 4):
        assert all(found.values()), found


def _spoilt(rank: int, world: int, some: list[str]) -> dict[str, bool]:
    """Are replicas equal after steps of which one has a spoilt batch, whose gradients are bounded?"""
    found = {}
    for method in some:
        model, mesh = build("whole", 53)
        optimizer = optimizer_for(method, model)
        wire = thinwire.compress(model, optimizer, method, steps=20)
        for step in range(5):
            tokens, targets = batch(step, rank // 2, 53)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            (1000 * loss if step == 3 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[method] = same_on(mesh.get_group("tp"), replicas(model))
        wire.close()
    return found


def test_what_tensor_parallelism_replicates_stays_equal_in_a_spoilt_batch():
    some = dealt(methods_of_gradients(), 0, range(5))
    assert all(found == dict.fromkeys(some, True) for found in ranks.run(_spoilt, 4, some))


def _steps_refused(rank: int, world: int) -> list[str]:
    refused = []
    for method in ("trickle(smallest=100)", "topk(smallest=100)"):
        model, _ = build("whole", 53)
        with pytest.raises(thinwire.ThinwireError) as error:
            thinwire.compress(model, adamw(model), method)
        refused.append(str(error.value))
    return refused


def test_steps_of_which_tensor_parallel_ranks_hold_parts_are_refused():
    for said in ranks.run(_steps_refused, 4):
        assert all("beside tensor parallelism" in line and "feedback='gradients'" in line for line in said)


def _kept(rank, world):
    """What arrived, what waits, and what the stock engine would have brought, of this rank's shards."""
    stock, _ = build("whole", 53)
    backward(stock, 0, 53)
    found = []
    for method in (METHODS[0], METHODS[2]):
        model, mesh = build("whole", 53)
        optimizer = adamw(model)
        wire = thinwire.compress(model, optimizer, method)
        backward(model, 0, 53)
        arrived = {name: parameter.grad.to_local().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        saved = entries(wire.state_dict())
        residuals = {key.partition("/")[2]: value for key, value in saved.items() if "residual/" in key}
        wire.close()
        worst, most = 0.0, 0.0
        for name, parameter in stock.named_parameters():
            expected = parameter.grad.to_local()
            if name in residuals:
                torch.distributed.all_reduce(residuals[name], group=mesh.get_group("dp"))
                waiting = residuals[name][mesh.get_local_rank("dp")][: expected.numel()].view_as(expected) / 2
                most = max(most, float(waiting.abs().max()))
                expected = expected - waiting
            worst = max(worst, float((arrived[name] - expected).abs().max()))
        found.append((worst, most, sorted(residuals)))
    return found


def _several(rank, world):
    return {part.__name__: part(rank, world) for part in (_kept, _one_part, _refused)}


@pytest.fixture(scope="module")
def several():
    """What each of the parts returned on each rank, all of them in the same four processes."""
    found = ranks.run(_several, 4)
    return {name: [of[name] for of in found] for name in found[0]}


def test_nothing_is_lost_of_doubly_sharded_parameters(several):
    for found in several["_kept"]:
        for worst, most, names in found:
            assert worst < 1e-7 < most  # of gradients of about 0.1, in fp32
            assert names == ["blocks.0.down.weight", "blocks.0.up.weight", "embedding.weight", "head.weight"]


def _resume(rank, world):
    same = {}
    for method in spread(2, (METHODS[0], METHODS[1], METHODS[4])):
        model, _ = build("whole", 53)
        optimizer = optimizer_for(method, model)
        wire = thinwire.compress(model, optimizer, method, steps=100)
        train(model, optimizer, range(2), 53, wire)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict())), wire.state_dict()
        train(model, optimizer, range(2, 4), 53, wire)
        wire.close()
        again, _ = build("whole", 53)
        optimizer = optimizer_for(method, again)
        again.load_state_dict(saved[0][0])
        optimizer.load_state_dict(saved[0][1])
        wire = thinwire.compress(again, optimizer, method, steps=100)
        wire.load_state_dict(saved[1])
        train(again, optimizer, range(2, 4), 53, wire)
        wire.close()
        same[method] = torch.equal(flat(model), flat(again))
    return same


def test_state_resumes_bit_for_bit_beside_tensor_parallelism():
    for same in ranks.run(_resume, 4):
        assert len(same) >= 2 and all(same.values()), same


def _one_part(rank, world):
    """An infinity in a gradient of one rank alone, which no all-reduce of tensor parallelism carries to the others."""
    model, _ = build("linears", 51)
    optimizer = adamw(model)
    wire = thinwire.compress(model, optimizer, METHODS[0])
    before = flat(model)
    spoil(model.embedding, rank == 3)
    backward(model, 0, 51)
    wire.clip_grad_norm_(1.0)
    optimizer.step()
    result = wire.skipped, torch.equal(before, flat(model))
    wire.close()
    return result


def spoil(module: nn.Module, really: bool) -> None:
    if really:
        module.register_forward_hook(lambda *of: of[2].register_hook(lambda gradient: gradient * torch.inf) and None)


def test_a_step_is_skipped_on_all_tensor_parallel_ranks_or_none(several):
    assert several["_one_part"] == [(1, True)] * 4


def _refused(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Net(layers=1)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    try:
        thinwire.compress(model, adamw(model), "int8")
    except thinwire.ThinwireError as error:
        return str(error)


def test_tensor_parallelism_under_ddp_is_refused(several):
    message = several["_refused"][0]
    assert "tensor parallelism under DDP" in message and "fully_shard" in message and "\n" not in message


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        net = Net(layers=2)
        self.embedding, self.blocks = net.embedding, net.blocks[:1]

    def forward(self, tokens):
        return self.blocks[0](self.embedding(tokens))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        net = Net(layers=2)
        self.blocks, self.head = net.blocks[1:], net.head

    def forward(self, x):
        return self.head(self.blocks[0](x))


MICRO = 4


def stage_of(kind: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    stage = (First, Last)[mesh.get_local_rank("pp")]()
    if kind == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group("dp"), bucket_cap_mb=0.005)
    for block in stage.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(stage, mesh=mesh["dp"])


def schedule_of(which: str, stage: nn.Module, mesh: DeviceMesh):
    """Static shapes: torch 2.12 and 2.13 cannot infer them with DDP. The mean over micro-batches is in the loss."""
    tokens, hidden, logits = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, 18), torch.zeros(2, 16, 51)
    shapes = [
        {"input_args": (tokens,), "output_args": (hidden.requires_grad_(),)},
        {"input_args": (hidden.requires_grad_(),), "output_args": (logits.requires_grad_(),)},
    ]
    index = mesh.get_local_rank("pp")
    part = PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("pp"), **shapes[index])

    def loss(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO

    return {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[which](part, MICRO, loss_fn=loss, scale_grads=False)


def pipe(schedule, mesh, step) -> float:
    """One optimizer step's forward and backward passes; the loss on the last stage, 0 before it."""
    tokens, targets = batch(step, mesh.get_local_rank("dp"))
    losses: list[torch.Tensor] = []
    if mesh.get_local_rank("pp") == 0:
        schedule.step(tokens)
    else:
        schedule.step(target=targets, losses=losses)
    return float(sum(loss.item() for loss in losses))


def mesh_of_pipeline() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def stages_norm(stage, mesh) -> torch.Tensor:
    square = sum(whole(p.grad).square().sum() for p in stage.parameters()).reshape(1)
    torch.distributed.all_reduce(square, group=mesh.get_group("pp"))
    return square.sqrt()


def pipeline(kind, which, mesh, method="dense", *, stock=False):
    stage = stage_of(kind, mesh)
    schedule, optimizer = schedule_of(which, stage, mesh), optimizer_for(method, stage)
    wire = None if stock else thinwire.compress(stage, optimizer, method, stages=mesh.get_group("pp"), steps=99)
    losses, norms = [], []
    for step in range(4):
        losses.append(pipe(schedule, mesh, step))
        norms.append((float(stages_norm(stage, mesh)), float(wire.clip_grad_norm_(1e9)) if wire else 0.0))
        optimizer.step()
        optimizer.zero_grad()
        if wire and step == 1:
            wire.reset_stats()
    return stage, schedule, optimizer, wire, losses, norms


def _pipeline(rank, world, kind):
    mesh = mesh_of_pipeline()
    found = {}
    cases = [("gpipe", ("dense",)), ("1f1b", ("dense", METHODS[4], METHODS[0]))]
    for which, methods in dealt(cases, kind, ("ddp", "fsdp2")):
        stock, *_, reference, _ = pipeline(kind, which, mesh, stock=True)
        for method in methods:
            stage, schedule, optimizer, wire, losses, norms = pipeline(kind, which, mesh, method)
            found[which, method] = {
                "identical": torch.equal(flat(stock), flat(stage)),
                "losses": losses,
                "apart": max(abs(a - b) for a, b in zip(losses, reference, strict=True)),
                "norms": norms,
                "equal": same_on(mesh.get_group("dp"), [whole(p) for p in stage.parameters()]),
                "surprise": sent_beside_the_plan(wire),
            }
            if method.startswith("int8"):  # an infinity in one gradient of one rank of the first stage
                before = flat(stage)
                spoil(getattr(getattr(stage, "module", stage), "embedding", stage), rank == 0)
                pipe(schedule, mesh, 4)
                optimizer.step()
                found[which, method]["skipped"] = wire.skipped, torch.equal(before, flat(stage))
            wire.close()
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_pipeline_stages_exchange_once_per_step_each_in_its_group(kind):
    for rank, found in enumerate(ranks.run(_pipeline, 4, kind)):
        for (which, method), what in found.items():
            assert what["identical"] == (method == "dense"), (which, method)
            assert what["equal"], (which, method)
            # Clipping sends the stages' norm besides: 4 bytes to the other stage.
            assert abs(what["surprise"] - 4) < 1e-6, (which, method)
            assert all(told == pytest.approx(norm, rel=1e-6) for norm, told in what["norms"])
            if method.startswith("int8"):
                assert what["apart"] < 5e-3
                assert what["skipped"] == (1, True)
            if rank >= 2:
                assert what["losses"][-1] < what["losses"][0]


def _twice(rank, world, kind):
    """Gradients of a step of two schedules, of which the first accumulates, and those of stock torch, which exchanges
    in both; or the refusal."""
    mesh, gradients = mesh_of_pipeline(), []
    for wired in (False, True):
        stage = stage_of(kind, mesh)
        schedule, optimizer = schedule_of("gpipe", stage, mesh), adamw(stage)
        if not wired:
            pipe(schedule, mesh, 0)
        else:
            wire = thinwire.compress(stage, optimizer, "dense", stages=mesh.get_group("pp"))
            with wire.accumulate(last=False):
                if said := refusal(pipe, schedule, mesh, 0):
                    return said
        pipe(schedule, mesh, 1)
        gradients.append([parameter.grad.clone() for parameter in stage.parameters()])
    wire.close()
    return max(float((one - other).abs().max()) for one, other in zip(*gradients, strict=True))


def test_two_schedules_of_a_step_add_up_on_ddp_and_are_refused_where_they_exchange():
    assert max(ranks.run(_twice, 4, "ddp")) < 1e-6
    for said in ranks.run(_twice, 4, "fsdp2"):
        assert "all micro-batches of an optimizer step to one schedule" in said


DOCUMENT = Path(__file__).parents[2] / "docs" / "compose.md"


def _recipes(rank, world, programs):
    for program in programs:
        exec(compile(program, str(DOCUMENT), "exec"), {"__name__": "__main__"})


def test_the_documented_programs_run():
    programs = re.findall("```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(programs) == 2
    ranks.run(_recipes, 4, programs)
