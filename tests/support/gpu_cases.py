"""Each method on each engine, on the GPUs of this machine: a NaN step, a skipped step, a resume; then its speed.

    python tests/support/gpu_cases.py                           # all cases, a line of JSON each
    python tests/support/gpu_cases.py --device cpu --engines ddp --methods int8      # a rehearsal without a GPU
    python tests/support/gpu_cases.py --what writes --jobs 4    # weights that a program writes by itself, alone

Ranks with a GPU each talk by NCCL. Ranks that share one talk by gloo, on FSDP2 and HSDP through the host (staged.py),
and one rank talks to itself by NCCL: on DDP all that a step does is done but for the network. A case has processes of
its own and a limit of its own: one that hangs is ended, with the stacks of its threads, and the next one begins.
``--jobs`` of them run at once; speed is measured alone, after them.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import copy
import faulthandler
import functools
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ranks
import staged  # noqa: F401  # makes its backend known
import thinwire
import writes
from engines import same_on_all_ranks
from models import Net, batch
from thinwire import methods as method_table
from thinwire.base.errors import ThinwireError
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

ENGINES = ("ddp", "fsdp2", "hsdp")
METHODS = (
    "dense", "bf16", "int8(smallest=0)", "sdp4bit(smallest=0)", "trickle(density=0.25,smallest=0)",
    "trickle(mask='merged',density=0.25,smallest=0)", "topk(density=0.1,smallest=0)",
    "scape(density=0.25,warmup=2,smallest=0)", "radius(T=2,start=1,density=0.3,smallest=0)",
    "tagc(theta=0.75,smallest=0)", "powersgd(rank=1,smallest=0)",
    "onebit-adam(warmup=2,smallest=0)", "local-steps(every=2)", "separate(smallest=0)",
)  # fmt: skip
WRITTEN = ("sdp4bit(smallest=0)", "zeropp(smallest=0)")
TIMED = ("dense", "int8", "sdp4bit", "trickle")
STEPS, NAN_STEP, SAVED = 6, 2, 4
"""Steps of a case; the one whose loss is NaN on rank 0; how many are taken before the state is saved."""


@dataclass
class Case:
    """``what``: "steps", or "writes" of weights, or "speed" of the preset, or "hang": rank 1 never comes, and the case
    has to be ended.

    Attributes:
        backend: of GPUs, "gloo", "nccl" or "staged". sets_device: the program calls ``torch.cuda.set_device``.
        limit: seconds.
        result: what came of it; ``ended`` is "passed", "hung" or the error's last line.
    """

    engine: str
    method: str
    world: int
    device: str
    backend: str
    what: str = "steps"
    sets_device: bool = True
    preset: str = "gpt-125m"
    limit: float = 90
    result: dict[str, Any] = field(default_factory=dict)


def cases(
    device: str, gpus: int, engines: Sequence[str], methods: Sequence[str], timed: Sequence[str],
    written: Sequence[str] = WRITTEN,
) -> Iterator[Case]:  # fmt: skip
    """All cases on so many GPUs, the cheapest proof first."""
    several = min(gpus, 8) // 2 * 2
    for engine in engines:
        least = 4 if engine == "hsdp" else 2
        shared = "staged" if device == "cuda" and engine != "ddp" else "gloo"
        worlds = [(least, shared)] if several < least else [(several, "nccl")]
        if device == "cuda" and several < 2 and engine == "ddp":
            worlds.append((1, "nccl"))
        for method in methods:
            if engine in method_table.resolve(method).engines:
                yield from (Case(engine, method, world, device, backend) for world, backend in worlds)
        for method in written if engine != "ddp" else ():
            yield Case(engine, method, worlds[0][0], device, worlds[0][1], "writes")
    backend = "nccl" if several else "gloo"
    yield Case("ddp", "int8(smallest=0)", 2, device, backend, sets_device=False)
    yield Case("ddp", "int8(smallest=0)", 2, device, backend, "hang", limit=20)
    for method in timed:
        world = several or (2 if device == "cpu" else 1)
        yield Case("ddp", method, world, device, "gloo" if device == "cpu" else "nccl", "speed")


def run(case: Case) -> Case:
    """Fill in ``case.result``."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            by_rank = ranks.run(_rank, case.world, asdict(case), folder, seconds=case.limit + 15)
            case.result = by_rank[0] if case.what != "writes" else _judged(case, by_rank)
            wrong = [name for name in ("equal", "resumed", "skipped", "right") if not case.result.get(name, True)]
            case.result["ended"] = f"not {' nor '.join(wrong)}" if wrong else "passed"
        except (AssertionError, TimeoutError) as error:
            stacks = [file.read_text() for file in sorted(Path(folder).glob("stacks-*")) if file.stat().st_size]
            said = str(error).strip().splitlines()
            case.result = {"ended": "hung" if stacks else said[-1], "said": said[-30:], "stacks": stacks}
    case.result["seconds"] = round(time.monotonic() - began, 1)
    return case


def _rank(rank: int, world: int, fields: dict[str, Any], folder: str) -> dict[str, Any]:
    case = Case(**fields)
    with open(f"{folder}/stacks-{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(case.limit, exit=True, file=stacks)
        warnings.simplefilter("ignore")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits on whichever stream
        cuda = case.device == "cuda"
        device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
        if cuda and case.sets_device:
            torch.cuda.set_device(device)
        store = dist.PrefixStore("case", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group(case.backend, store=store, rank=rank, world_size=world)
        try:
            return {"steps": _steps, "writes": _writes, "hang": _hang, "speed": _speed}[case.what](case, device, rank)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _hang(case: Case, device: torch.device, rank: int) -> dict[str, Any]:
    if rank:
        time.sleep(1e6)
    values = torch.ones(1, device=device)
    dist.all_reduce(values)
    values.tolist()  # NCCL returns at once
    return {}


def _writes(case: Case, device: torch.device, rank: int) -> dict[str, Any]:
    """By how much outputs are off, or why a step is refused, by what is written and where."""
    outcomes: dict[str, Any] = {}
    every = set(range(case.world))
    one = {1, 3} if case.engine == "hsdp" else {1}  # of each node, as nodes stay equal
    for name, writers in (("all", every), ("one", one), ("told", every), ("micro-batch", every), ("unshard", every),
                          ("evaluation", one), ("uneven", every)):  # fmt: skip
        program = writes.Program(
            case.engine, rank, case.world, case.method, writers, device=device.type,
            reshard_after_forward=name != "uneven",
        )  # fmt: skip
        data = name in ("told", "evaluation")
        try:
            if name == "unshard":  # before anything of torch's has begun
                for _ in range(2):
                    program.model.blocks[0].unshard()
                    program.model.blocks[0].reshard()
            for number in range(4):
                if name == "uneven":
                    program.uneven_step(number, keep=True)
                elif name in ("micro-batch", "unshard"):
                    program.step(number, name if name == "micro-batch" else "unshard before")
                else:
                    program.step(number, "" if name == "evaluation" else "forward", data=data, told=name == "told")
                if name == "uneven":
                    program.write()
                if name == "evaluation":
                    program.write(data=True)
                    program.evaluate(number)
            outcomes[name] = round(program.off, 6)
        except ThinwireError as error:
            outcomes[name] = str(error)
        program.wire.close()
    return outcomes


def _judged(case: Case, by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Tell whether each outcome is right on all ranks or, where it may be, refused by all in one line."""
    refusable = {"one"} if case.device == "cuda" else set()
    refusable |= set() if case.method in writes.SENDS_ALL else {"micro-batch"}
    wrong = []
    for name in by_rank[0]:
        said = [outcomes[name] for outcomes in by_rank]
        right = all(isinstance(off, float) and off <= writes.METHODS[case.method] for off in said)
        lines = [str(of) for of in said]
        refused = all(line == writes.OTHER or (line.startswith(writes.MODULE) and "\n" not in line) for line in lines)
        if not (right and (name != "micro-batch" or name not in refusable)) and not (refused and name in refusable):
            wrong.append(name)
    return {"right": not wrong, "wrong": wrong, "by_rank": by_rank}


def wrapped(engine: str, model: nn.Module, device: torch.device, bucket_mb: float = 25) -> nn.Module:
    model = model.to(device)
    if engine == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.01 if isinstance(model, Net) else bucket_mb)
    shape, names = ((2, dist.get_world_size() // 2), ("replicate", "shard")) if engine == "hsdp" else (None, None)
    mesh = init_device_mesh(device.type, shape or (dist.get_world_size(),), mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _Run:
    """A model, its optimizer and its wire, which take steps."""

    def __init__(self, case: Case, device: torch.device, rank: int) -> None:
        torch.manual_seed(0)
        method = method_table.resolve(case.method)
        in_place = case.engine == "fsdp2" and case.method.startswith(("trickle", "topk"))
        net = Net(width=64 if in_place else 18)  # so that the root's gradients are cut where the engine has put them
        self.model, self.device, self.rank = wrapped(case.engine, net, device), device, rank
        self.optimizer = method.OPTIMIZER(self.model.parameters(), lr=3e-3)
        self.wire = thinwire.compress(self.model, self.optimizer, method, steps=1000)

    @functools.cache  # noqa: B019  # a run lives as long as its case
    def tokens(self, number: int) -> list[Tensor]:
        return [part.to(self.device) for part in batch(number, self.rank)]

    def step(self, number: int) -> None:
        tokens, targets = self.tokens(number)
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        (loss * (torch.nan if number == NAN_STEP and self.rank == 0 else 1.0)).backward()
        self.wire.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor]:
        return [getattr(p, "_local_tensor", p).detach() for p in self.model.parameters()]

    def saved(self) -> tuple[list[Tensor], dict, dict]:
        weights = [weight.clone() for weight in self.weights()]
        return weights, copy.deepcopy(self.optimizer.state_dict()), copy.deepcopy(self.wire.state_dict())

    def load(self, weights: list[Tensor], optimizer: dict, wire: dict) -> None:
        for weight, value in zip(self.model.parameters(), weights, strict=True):
            with torch.no_grad():
                getattr(weight, "_local_tensor", weight).copy_(value)
        self.optimizer.load_state_dict(optimizer)
        self.wire.load_state_dict(wire)


def _steps(case: Case, device: torch.device, rank: int) -> dict[str, Any]:
    """Six steps, one of them spoilt; the last two once more, from what was saved before them."""
    first = _Run(case, device, rank)
    for number in range(SAVED):
        first.step(number)
    saved = first.saved()
    for number in range(SAVED, STEPS):
        first.step(number)
    end, skipped = [weight.clone() for weight in first.weights()], first.wire.skipped == 1
    alone = first.wire.method.card.alone(STEPS)  # ranks that step alone are equal where they meet
    found = {"skipped": skipped or alone, "equal": alone or same_on_all_ranks(first.model), **_watched(first, device)}
    first.wire.close()
    second = _Run(case, device, rank)
    second.load(*saved)
    for number in range(SAVED, STEPS):
        second.step(number)
    same = all(torch.equal(a, b) for a, b in zip(end, second.weights(), strict=True))
    # The first backward pass after a start has DDP's buckets of a first pass; torch's own sums then have another order.
    found["resumed"] = same or (case.method in ("dense", "bf16") and case.engine == "ddp")
    second.wire.close()
    return found


def _watched(run: _Run, device: torch.device) -> dict[str, Any]:
    """Of one more step: how often the host waited, as torch warns, and what was launched, as its profiler says."""
    if device.type != "cuda":
        return {"waits": None, "where": {}, "launches": None}
    run.tokens(STEPS)
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        said.clear()  # that this mode is a prototype
        run.step(STEPS)
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{Path(of.filename).name}:{of.lineno}" for of in said if "synchroniz" in str(of.message)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run.step(STEPS + 1)
        torch.cuda.synchronize(device)
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return {"waits": len(waits), "where": dict(collections.Counter(waits)), "launches": len(kernels)}


def _speed(case: Case, device: torch.device, rank: int) -> dict[str, Any]:
    """Milliseconds of a step of 4096 tokens per rank, of its stages and of the host; peak memory beside the plan's."""
    cuda = device.type == "cuda"
    torch.manual_seed(0)
    shape = PRESETS[case.preset]
    method = method_table.resolve(case.method)
    bare = Decoder(shape)
    tokens = torch.randint(shape.vocabulary, (max(4096 // shape.context, 1), shape.context), device=device)
    model = wrapped(case.engine, bare, device)
    optimizer = method.OPTIMIZER(model.parameters(), lr=1e-4)
    wire = thinwire.compress(model, optimizer, method, steps=1000)

    def steps(count: int) -> float:
        began = time.thread_time()
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.thread_time() - began

    steps(5 if cuda else 1)
    wire.ledger.reset()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    count, began = 20 if cuda else 2, time.monotonic()
    host = steps(count)
    if cuda:
        torch.cuda.synchronize(device)
    step_ms, stats = 1e3 * (time.monotonic() - began) / count, wire.ledger.stats()
    found = {
        "step_ms": step_ms, "host_ms": 1e3 * host / count, "planned_MB": (wire.plan.memory_bytes or 0) / 1e6,
        "peak_MB": torch.cuda.max_memory_allocated(device) / 1e6 if cuda else None,
        **{name: stats[name] for name in ("encode_ms", "wire_ms", "decode_ms", "exposed_ms")},
    }  # fmt: skip
    wire.close()
    return {name: value if value is None else round(value, 2) for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--engines", nargs="*", default=ENGINES)
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--timed", nargs="*", default=TIMED, help="methods whose speed is measured")
    parser.add_argument("--written", nargs="*", default=WRITTEN, help="methods whose program writes weights by itself")
    parser.add_argument("--preset", default="gpt-125m", help="the model of which speed is measured")
    parser.add_argument("--hang-after", type=float, default=20, help="seconds until the case that hangs is ended")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    parser.add_argument("--what", nargs="*", default=("steps", "writes", "hang", "speed"), help="kinds of cases")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device on this machine", file=sys.stderr)
        return 2
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # a hang is ours to end, with stacks
    gpus, failed = torch.cuda.device_count() if options.device == "cuda" else 1, False
    waiting = list(cases(options.device, gpus, options.engines, options.methods, options.timed, options.written))
    waiting = [case for case in waiting if case.what in options.what]
    for case in waiting:
        case.preset = options.preset
        case.limit = options.hang_after if case.what == "hang" else case.limit
    for case in _at_once(options.jobs, waiting):
        print(json.dumps(asdict(case)), flush=True)
        failed |= case.result["ended"] != ("hung" if case.what == "hang" else "passed")
    return int(failed)


def _at_once(jobs: int, waiting: Sequence[Case]) -> Iterator[Case]:
    """Run ``jobs`` cases at a time, and those whose speed is measured one by one at the end."""
    alone = [case for case in waiting if jobs == 1 or case.what == "speed"]
    if jobs > 1:
        together = [case for case in waiting if case.what != "speed"]
        with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            done = concurrent.futures.as_completed([pool.submit(run, case) for case in together])
            yield from (future.result() for future in done)  # whatever comes later may be ended by a limit
    yield from map(run, alone)


if __name__ == "__main__":
    sys.exit(main())
