"""FSDP2 with a reduce-scatter in 8 bits.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/fsdp2.py [METHOD]"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire

VOCABULARY, WIDTH, STEPS = 256, 512, 20


def main(method: str = "int8") -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    # Shard inside the node and replicate across nodes (HSDP)?
    # init_device_mesh(device.type, (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)]
    model = nn.Sequential(*layers).to(device)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.compress(model, optimizer, method)
    rank = dist.get_rank()
    if rank == 0:
        print(wire.plan)

    data = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, VOCABULARY, (1024,), generator=data).to(device)
        with wire.accumulate(last=True):
            loss = nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % VOCABULARY)
            loss.backward()
        wire.clip_grad_norm_(1.0)
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
