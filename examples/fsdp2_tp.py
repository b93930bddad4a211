"""FSDP2 with tensor parallelism.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/fsdp2_tp.py [METHOD]

Tensor parallelism splits each block into two halves, and FSDP2 shards each half over two ranks. What FSDP2 exchanges is
compressed; what tensor parallelism exchanges is not. The text is Python's own argparse.py, byte by byte.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import thinwire

CONTEXT, WIDTH, STEPS = 16, 256, 20
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
WINDOWS = TEXT.unfold(0, CONTEXT + 1, 1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main(method: str = "int8") -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    rank, replica = dist.get_rank(), mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, WIDTH), Block(), Block()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 256)).to(device)
    for block in model:
        if isinstance(block, Block):
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    # foreach=False: some weights are on both meshes, some on one, and torch cannot step them together.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, foreach=False)
    wire = thinwire.compress(model, optimizer, method, steps=STEPS)
    if rank == 0:
        print(wire.plan)

    places = torch.Generator().manual_seed(replica)  # the two ranks of a pair see the same batch
    for step in range(1, STEPS + 1):
        window = WINDOWS[torch.randint(len(WINDOWS), (128,), generator=places)].to(device)
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        wire.clip_grad_norm_(1.0)  # one norm over both meshes
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(wire.report())
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
