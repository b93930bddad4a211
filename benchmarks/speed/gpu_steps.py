"""Steps of a model on a GPU, methods in turns: milliseconds beside dense's, and each kernel's time by name.

    python benchmarks/speed/gpu_steps.py --tokens 4096 16384                 # one rank, which talks to itself by NCCL
    torchrun --nproc-per-node 8 benchmarks/speed/gpu_steps.py --engine fsdp2

One rank does all of DDP's step but for the network: its buckets are packed, encoded, handed to NCCL, decoded and
summed. (FSDP2 on one rank exchanges nothing: it needs several GPUs.) The model runs as it is written, in autocast to
bfloat16; AdamW is fused; each step has other tokens, the r-th of the vocabulary about as often as 1 / r. "issued" is
when the host had given the step to the GPU: where it equals the step, the host is what is waited for. ``--kernels``: a
line of JSON for each method, with a step's launches and microseconds by kernel. ``--compile``: torch.compile writes the
model's kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import torch
import torch.distributed as dist
from torch.nn import functional as F

import gpu_cases
import thinwire
from thinwire import methods as method_table
from thinwire.base.processes import free_port
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

METHODS = ("none", "dense", "int8", "sdp4bit", "trickle", "trickle(mask='merged')")
TURNS, STEPS = 6, 5
"""Each method has its turn so many times, the first of which is not counted; steps of a turn."""
ANNOTATIONS = ("DistributedDataParallel", "Optimizer.")
"""Of spans of kernels, which are no kernels."""


class Run:
    """A model with a method, on the GPU ``device``."""

    def __init__(
        self, method: str, engine: str, preset: str, device: torch.device, bucket_mb: float, *, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        resolved, self.method, self.device = method_table.resolve(method), method, device
        model = Decoder(PRESETS[preset])
        if compiled:
            model.compile()
        self.model = gpu_cases.wrapped(engine, model, device, bucket_mb)
        fused = {"fused": True} if resolved.OPTIMIZER is torch.optim.AdamW else {}
        self.optimizer = resolved.OPTIMIZER(self.model.parameters(), lr=1e-4, **fused)
        thinwire.compress(self.model, self.optimizer, resolved, steps=1000)
        self.taken = 0

    def steps(self, batches: torch.Tensor, count: int) -> None:
        """Take ``count`` steps, each of the next of ``batches`` (batches, sequences, tokens)."""
        for _ in range(count):
            tokens = batches[self.taken % len(batches)]
            self.taken += 1
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def turn(self, batches: torch.Tensor) -> tuple[float, float]:
        """Milliseconds of a step, and until it was issued."""
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        self.steps(batches, STEPS)
        issued = time.perf_counter()
        torch.cuda.synchronize(self.device)
        return 1e3 * (time.perf_counter() - began) / STEPS, 1e3 * (issued - began) / STEPS

    def kernels(self, batches: torch.Tensor) -> tuple[int, dict[str, float]]:
        """Launches of a step, and microseconds by kernel."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.steps(batches, 2)
            torch.cuda.synchronize(self.device)
        times, counts = defaultdict(float), Counter()
        for event in profiler.events():
            annotates = getattr(event, "is_user_annotation", False) or event.name.startswith(ANNOTATIONS)
            if event.device_type == torch.autograd.DeviceType.CUDA and not annotates:
                times[event.name] += event.device_time / 2
                counts[event.name] += 1
        return sum(counts.values()) // 2, dict(times)


def compare(runs: list[Run], batches: torch.Tensor) -> None:
    """Print a line of the table for each run."""
    turns = [[run.turn(batches) for run in runs] for _ in range(TURNS)][1:]
    steps = {run.method: [turn[at][0] for turn in turns] for at, run in enumerate(runs)}
    dense = statistics.median(steps.get("dense", [float("nan")]))
    for at, run in enumerate(runs):
        step, issued = statistics.median(steps[run.method]), statistics.median(turn[at][1] for turn in turns)
        spread = f"{step:.2f} ({min(steps[run.method]):.1f} to {max(steps[run.method]):.1f})"
        print(f"| {batches[0].numel()} | `{run.method}` | {spread} | {step / dense:.2f} | {issued:.2f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=gpu_cases.ENGINES, default="ddp")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--preset", default="gpt-125m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of a step, on each rank")
    parser.add_argument("--kernels", action="store_true", help="each method's kernels, too, at the first of --tokens")
    parser.add_argument("--bucket-mb", type=float, default=25, help="DDP's bucket_cap_mb")
    parser.add_argument("--compile", action="store_true", help="the model")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees no CUDA device on this machine", file=sys.stderr)
        return 2
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(free_port())}.items():  # fmt: skip
        os.environ.setdefault(name, value)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    context = PRESETS[options.preset].context
    setup = options.engine, options.preset, device, options.bucket_mb
    runs = [Run(method, *setup, compiled=options.compile) for method in options.methods]
    world = f"{dist.get_world_size()} ranks, {options.engine}, buckets of {options.bucket_mb:g} MB"
    compiled = ", compiled" * options.compile
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {world}{compiled}\n")
    print("| tokens | method | ms per step (least to most) | x dense | issued |\n|---|---|---|--:|--:|")
    for number in options.tokens:
        uniform = torch.rand(TURNS * STEPS, max(number // context, 1), context, device=device)
        batches = (PRESETS[options.preset].vocabulary ** uniform).long() - 1
        compare(runs, batches)
        for run in runs if options.kernels and number == options.tokens[0] else ():
            launches, times = run.kernels(batches)
            ours = {name: round(us) for name, us in sorted(times.items(), key=lambda item: -item[1]) if name[0] == "_"}
            line = {"method": run.method, "tokens": number, "launches": launches, "us": round(sum(times.values()))}
            print(json.dumps(line | {"ours": ours}), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
