"""CPU seconds of a step, user and system, by method, beside those of a step that exchanges nothing.

    python benchmarks/speed/cpu_seconds.py [--steps 20] [--methods none int8 sdp4bit trickle] [--profile trickle]

Two gloo ranks on one machine, DDP, AdamW, clipping; 3.3 million parameters, 1024 tokens per rank and step. All methods'
models live in one process and take turns, step by step, so that what else runs on the machine meets all of them alike.
CPU seconds are those of all threads of rank 0, gloo's and the system's own included; a clock's time is not looked at.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import resource
import statistics
import sys
import threading
import time
from typing import Any

from starter import start_ranks

RANKS, WIDTH, LAYERS, BATCH, CONTEXT = 2, 256, 4, 8, 128
WARMUP = 5


def cpu_seconds() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire
    from thinwire.train.model.decoder import Decoder
    from thinwire.train.model.shapes import ModelConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here = dist.get_rank()
    shape = ModelConfig(layers=LAYERS, width=WIDTH, heads=4, context=CONTEXT, vocabulary=256)
    tokens = torch.randint(0, 256, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(here))
    profile = cProfile.Profile(timer=time.thread_time)
    runs: list[tuple[str, Any, Any, Any]] = []
    for method in options.methods:
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(shape), gradient_as_bucket_view=True)
        make = thinwire.AdamS if method.startswith("scape") else torch.optim.AdamW
        optimizer = make(model.parameters(), lr=1e-3, **({} if make is thinwire.AdamS else {"fused": True}))
        wire = thinwire.compress(model, optimizer, method, steps=1000)
        if method == options.profile:
            wire._road.reduce = profiled(wire._road.reduce, profile)
        runs.append((method, model, optimizer, wire))
    spent: dict[str, list[tuple[float, float]]] = {method: [] for method in options.methods}
    for step in range(WARMUP + options.steps):
        if step == WARMUP:
            profile.clear()
        for method, model, optimizer, wire in runs if step % 2 else runs[::-1]:
            dist.barrier()
            before = cpu_seconds()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            if method == options.profile:
                profile.enable()
            wire.clip_grad_norm_(1.0)
            optimizer.step()
            profile.disable()
            optimizer.zero_grad()
            if step >= WARMUP:
                user, system = (after - of for after, of in zip(cpu_seconds(), before, strict=True))
                spent[method].append((user, system))
    if here == 0:
        values = sum(parameter.numel() for parameter in runs[0][1].parameters())
        print(f"{RANKS} gloo ranks, DDP, {values:,} parameters, {BATCH * CONTEXT} tokens, torch {torch.__version__}")
        print("| method | user ms | system ms | CPU ms of a step | times `none` |\n|---|--:|--:|--:|--:|")
        totals = {method: statistics.median(map(sum, each)) for method, each in spent.items()}
        for method, each in spent.items():
            user, system = (1e3 * statistics.median(values) for values in zip(*each, strict=True))
            times = totals[method] / totals.get("none", float("nan"))
            print(f"| `{method}` | {user:.1f} | {system:.1f} | {1e3 * totals[method]:.1f} | {times:.2f} |", flush=True)
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    dist.destroy_process_group()


def profiled(function: Any, profile: cProfile.Profile) -> Any:
    def call(*args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return function(*args)
        profile.enable()
        try:
            return function(*args)
        finally:
            profile.disable()

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--methods", nargs="+", default=["none", "int8", "sdp4bit", "trickle"])
    parser.add_argument("--profile", help="one of the methods: where its time goes, by function")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank(options)
        return
    sys.exit(start_ranks(RANKS))


if __name__ == "__main__":
    main()
