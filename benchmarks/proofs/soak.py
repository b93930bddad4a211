"""Does anything grow? Memory, threads, descriptors and live tensors of one rank over thousands of steps, and over
cycles of compress() and close().

    python benchmarks/proofs/soak.py                       all cases, 5,000 steps each, 100 cycles: an hour on two cores
    python benchmarks/proofs/soak.py --steps 500 trickle:fsdp2   one case, shorter
    python benchmarks/proofs/soak.py --cycles 20 cycles:ddp

Two ranks of this machine, a small model. Flat: from the second reading on as many threads, descriptors and tensors as
then, and at the end no more than 3 MB of memory above it. (The first reading is of when caches still fill.)
Exits with 1 if something is not. docs/data/soak.txt has what came of it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import ranks
import thinwire

READINGS = 6
WIDTH = 64
METHODS = {
    "trickle": "trickle(density=0.02)", "tagc": "tagc(smallest=1024)", "sdp4bit": "sdp4bit(smallest=1024)",
    "local-steps": "local-steps(every=5)", "topk": "topk(density=0.02)",
}  # fmt: skip
CASES = (
    "cycles:ddp", "cycles:fsdp2", "trickle:ddp", "trickle:fsdp2", "tagc:ddp", "tagc:fsdp2", "sdp4bit:fsdp2",
    "local-steps:ddp",
)  # fmt: skip


class Reading(NamedTuple):
    """Of this process: resident memory in MB, threads, open descriptors, live tensors."""

    megabytes: float
    threads: int
    descriptors: int
    tensors: int


def reading() -> Reading:
    """What this process holds once all garbage is gone, that of the C library's allocator included."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    tensors = sum(isinstance(held, torch.Tensor) for held in gc.get_objects())
    return Reading(
        int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(os.listdir("/proc/self/fd")), tensors
    )


def model(engine: str, world: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    if engine == "ddp":
        return DistributedDataParallel(layers)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (layers[0], layers[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def take(net: nn.Module, optimizer: torch.optim.Optimizer, wire: thinwire.Wire, rank: int, step: int) -> None:
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    with wire.accumulate(last=True):
        (net(inputs) - inputs.roll(1, 1)).square().mean().backward()
    wire.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def steps(rank: int, world: int, method: str, engine: str, count: int) -> list[Reading]:
    """Readings at equal distances in ``count`` steps."""
    warnings.simplefilter("ignore")
    net = model(engine, world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    wire = thinwire.compress(net, optimizer, METHODS[method], steps=count)
    seen = []
    for step in range(count):
        take(net, optimizer, wire, rank, step)
        if (step + 1) % max(count // READINGS, 1) == 0:
            seen.append(reading())
    wire.close()
    return seen


def cycles(rank: int, world: int, engine: str, count: int) -> list[Reading]:
    """Readings in ``count`` cycles of compress(), three steps, hand_over() and close(), on one model and optimizer."""
    warnings.simplefilter("ignore")
    net = model(engine, world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    methods = list(METHODS)
    if engine == "fsdp2":
        methods.remove("local-steps")
    seen = []
    every = max(count // READINGS // len(methods), 1) * len(methods)  # after the same method every time
    for cycle in range(count):
        wire = thinwire.compress(net, optimizer, METHODS[methods[cycle % len(methods)]])
        for step in range(3):
            take(net, optimizer, wire, rank, step)
        wire.hand_over()
        wire.close()
        wire = None
        if (cycle + 1) % every == 0:
            seen.append(reading())
    return seen


def growth(seen: list[Reading], megabytes: float = 3.0) -> list[str]:
    """What is not flat, in words. ``megabytes``: that memory may grow by (caches of a short run still fill: more)."""
    first, last = seen[1], seen[-1]
    found = [
        f"{kind} {getattr(first, kind)} -> {getattr(last, kind)}"
        for kind in ("threads", "descriptors", "tensors")
        if getattr(last, kind) > getattr(first, kind)
    ]
    if last.megabytes > first.megabytes + megabytes:
        found.append(f"memory {first.megabytes:.1f} -> {last.megabytes:.1f} MB")
    return found


def soak(case: str, count: int, megabytes: float = 3.0) -> tuple[list[Reading], list[str]]:
    """Rank 0's readings of ``case``, and what of them is not flat."""
    kind, _, engine = case.partition(":")
    if kind == "cycles":
        seen = ranks.run(cycles, 2, engine, count, seconds=3600)[0]
    else:
        seen = ranks.run(steps, 2, kind, engine, count, seconds=7200)[0]
    return seen, growth(seen, megabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--cycles", type=int, default=100)
    args = parser.parse_args()
    bad = False
    for case in args.cases:
        count = args.cycles if case.startswith("cycles") else args.steps
        seen, found = soak(case, count)
        bad |= bool(found)
        print(f"{case}, {count}: {'; '.join(found) or 'flat'}")
        for number, held in enumerate(seen, 1):
            print(
                f"    {number}/{len(seen)}  {held.megabytes:7.1f} MB  {held.threads} threads  {held.descriptors} "
                f"descriptors  {held.tensors} tensors",
                flush=True,
            )
    sys.exit(bad)


if __name__ == "__main__":
    main()
