"""Does Thinwire hide communication behind the backward pass as well as stock DDP does?

    thinwire lab run --nodes 2 --link 200mbit -- python benchmarks/speed/overlap.py

One process per rank trains the same model three ways, a step of each in turn: stock DDP, Thinwire's dense, and without
any exchange. Prints the median step of each and the ratios. Exits 1 if dense is more than 5% slower than stock.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="net20m", choices=sorted(PRESETS))
    parser.add_argument("--steps", type=int, default=12, help="steps of each kind (the first two are left out)")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per rank")
    parser.add_argument("--limit", type=float, default=1.05, help="slowest dense / stock that passes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = dataclasses.replace(PRESETS[options.preset], vocabulary=256)
    kinds = {"stock": None, "dense": "dense", "none": "none"}
    runs = {}
    for kind, method in kinds.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(shape), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        if method:
            thinwire.compress(model, optimizer, method)
        runs[kind] = (model, optimizer)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, 256, (options.batch_size, shape.context + 1), generator=generator)
    for _ in range(options.steps):
        for kind, (model, optimizer) in runs.items():
            dist.barrier()
            began = time.perf_counter()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            times[kind].append(time.perf_counter() - began)
    step = {kind: statistics.median(values[2:]) for kind, values in times.items()}
    slow = step["dense"] / step["stock"] > options.limit
    if dist.get_rank() == 0:
        print(f"{options.preset}, {dist.get_world_size()} ranks, {options.batch_size} x {shape.context} tokens each")
        for kind, seconds in step.items():
            ratios = f"x stock {seconds / step['stock']:.3f}   x none {seconds / step['none']:.2f}"
            print(f"{kind:<6} {1e3 * seconds:8.1f} ms   {ratios}")
    dist.destroy_process_group()
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
