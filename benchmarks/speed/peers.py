"""torch's own communication hooks beside ours, on DDP and the loopback: bytes, time per step, and the loss.

    python benchmarks/speed/peers.py [--ranks 2] [--steps 60] [--rank 4]

torch's ``powerSGD_hook`` runs collectives inside a future's callback, which hangs on gloo as soon as there is more than
one bucket: all runs here have a single bucket. Its bytes are worked out from its own rule, ours are the ledger's. Its
``bf16_compress_hook`` is not among them: DDP refuses it on gloo.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire

WIDTH, CLASSES = 512, 64


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, CLASSES, bias=False)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of a fixed random teacher."""
    teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(1))
    points = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return points, (points @ teacher).argmax(1)


def low_rank_bytes(model: nn.Module, rank: int, ranks: int) -> float:
    """What torch's hook sends: P and Q of matrices that they make smaller, the rest as it is; a ring's share of it."""
    values = 0
    for parameter in model.parameters():
        rows, cols = (parameter.shape[0], parameter[0].numel()) if parameter.dim() > 1 else (parameter.numel(), 1)
        thin = min(rank, rows, cols) * (rows + cols)
        values += thin if parameter.dim() > 1 and thin * 2 < rows * cols else rows * cols
    return 4 * values * 2 * (ranks - 1) / ranks


def run(rank: int, ranks: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    dense = 4 * sum(parameter.numel() for parameter in net().parameters()) * 2 * (ranks - 1) / ranks
    kinds = ["torch: no hook", "ours: dense", "ours: bf16", "torch: powerSGD_hook",
             f"ours: powersgd(feedback='gradients', rank={args.rank},smallest=0)", "ours: none"]  # fmt: skip
    if rank == 0:
        print(f"{ranks} ranks, {args.steps} steps, {dense / 1e6:.2f} MB dense per step and rank, median step\n")
        print("| run | step | sent per step | loss of the last 10 steps |\n|---|---:|---:|---:|")
    for kind in kinds:
        model = DistributedDataParallel(net(), bucket_cap_mb=1000)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        wire, sent = None, dense
        if kind.startswith("ours"):
            wire = thinwire.compress(model, optimizer, kind.removeprefix("ours: "))
        elif "powerSGD" in kind:
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=args.rank, start_powerSGD_iter=2, min_compression_rate=2
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            sent = low_rank_bytes(model.module, args.rank, ranks)
        losses, times = [], []
        for step in range(args.steps):
            points, labels = batch(step, rank)
            began = time.perf_counter()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
            losses.append(loss.item())
        if wire is not None:
            sent = sum(wire.last_step()["wire_bytes_per_step"].values())
            wire.close()
        if rank == 0:
            last, middle = statistics.mean(losses[-10:]), statistics.median(times) * 1e3
            print(f"| {kind} | {middle:.1f} ms | {sent / 1e6:.3f} MB | {last:.3f} |", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=4, help="of PowerSGD's matrices")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run, args=(args.ranks, port, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()
