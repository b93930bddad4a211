"""Peak memory of a rank with each method, less that of the stock engine, against what the plan foretells.

    python benchmarks/speed/memory.py
    python benchmarks/speed/memory.py --preset gpt-125m --device cuda                 # one GPU per rank

Every case runs in processes of its own: a few steps of a tiny model, so that kernels are compiled; then some steps of
the model itself, then the peak of some more, less what there was before the model. On a CPU the peak is the kernel's
count of resident memory (VmHWM of /proc/self/status, reset after the first steps), and glibc is told to return what is
freed; on a GPU it is torch's count of allocated memory.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

METHODS = (
    "dense", "bf16", "int8", "int8(feedback='gradients')", "radius(density=0.4,start=0,T=200,residual_scale=1.0)",
    "separate(beta=None)", "tagc(feedback='gradients')",
    "powersgd(feedback='gradients')", "topk(feedback='gradients')", "trickle", "dgc", "scape(warmup=2)",
    "sdp4bit", "zeropp", "loco", "onebit-adam(warmup=2)",
)  # fmt: skip
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def measure(rank: int, store: str, engine: str, method: str, stock: bool, options: argparse.Namespace) -> dict:
    """Peak bytes of one rank above what was there before; with ``method``, or by the ``stock`` engine."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import thinwire
    from thinwire.train.model.decoder import Decoder
    from thinwire.train.model.shapes import PRESETS

    torch.set_num_threads(1)
    cuda = options.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    kind: Any = thinwire.AdamS if method.startswith("scape") else partial(torch.optim.AdamW, foreach=False)

    def prepared(preset: str) -> tuple[Callable[[int], None], Any]:
        """A function that trains so many steps, and the wire."""
        torch.manual_seed(0)
        shape = dataclasses.replace(PRESETS[preset], vocabulary=256)
        model: Any = Decoder(shape).to(device)
        if engine == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            mesh = init_device_mesh(options.device, (options.ranks,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        optimizer = kind(model.parameters(), lr=1e-4)
        wire = None if stock else thinwire.compress(model, optimizer, method)
        tokens = torch.randint(0, 256, (options.batch_size, shape.context + 1), device=device)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(tokens[:, :-1], tokens[:, 1:]).backward()
                optimizer.step()
                optimizer.zero_grad()

        return train, wire

    def tidy() -> None:
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)

    train, wire = prepared("tiny")
    train(options.steps)
    if wire is not None:
        wire.close()
    del train, wire
    tidy()
    before = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    train, wire = prepared(options.preset)
    train(options.steps)
    tidy()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    train(options.steps)
    found = {"peak": (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) - before}
    if wire is not None:
        memory = wire.plan.dry_run.memory
        assert memory is not None
        found |= {"planned": memory.peak, "planned_held": memory.resident, "held": wire.memory_bytes()}
    dist.barrier()
    dist.destroy_process_group()
    return found


def resident(what: str) -> int:
    """Bytes, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    return 0


def _rank(rank: int, results: Any, *rest: Any) -> None:
    results.put((rank, measure(rank, *rest)))


def on_ranks(context: Any, *case: Any, options: argparse.Namespace) -> dict:
    """What rank 0 found."""
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, results, f"{folder}/store", *case, options))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"{case}: a rank failed")
        return dict(results.get() for _ in ranks)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="net20m")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="before the peak is counted, and while it is")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences per rank")
    options = parser.parse_args()
    os.environ.update({**MALLOC, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "thinwire", "thinwire.train.model.decoder"])
    print(
        "| method | engine | held | planned peak | measured peak | measured / planned |\n|---|---|---:|---:|---:|---:|"
    )
    worst, stock = 0.0, {}
    for engine in options.engines:
        for method in options.methods:
            optimizer = "adams" if method.startswith("scape") else "adamw"
            if (engine, optimizer) not in stock:
                stock[engine, optimizer] = on_ranks(context, engine, method, True, options=options)["peak"]
            found = on_ranks(context, engine, method, False, options=options)
            measured = found["peak"] - stock[engine, optimizer]
            ratio = measured / found["planned"] if found["planned"] > 1e6 else None
            worst = max(worst, abs(ratio - 1) if ratio is not None else 0.0)
            shown = ["-" if ratio is None else f"{ratio:.3f}"]
            numbers = [f"{value / 1e6:.1f} MB" for value in (found["held"], found["planned"], measured)]
            print(f"| `{method}` | {engine} | {' | '.join(numbers + shown)} |", flush=True)
    for (engine, optimizer), peak in stock.items():
        print(f"\nstock {engine} with {optimizer}: {peak / 1e6:.1f} MB", end="")
    print(f"\nlargest distance of a ratio from 1: {worst:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
