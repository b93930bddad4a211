"""Muon for matrices, AdamW for the rest.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/muon_adamw.py [METHOD]

The text is Python's own argparse.py, byte by byte. Muon is torch.optim.Muon.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

CONTEXT, WIDTH, STEPS = 16, 64, 30
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
WINDOWS = TEXT.unfold(0, CONTEXT + 1, 1)


def main(method: str = "int8") -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank = dist.get_rank()
    torch.manual_seed(0)
    embedding, head = nn.Embedding(256, 64), nn.Linear(WIDTH, 256)
    hidden = nn.Sequential(nn.Linear(64 * CONTEXT, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
    model = DDP(nn.Sequential(embedding, nn.Flatten(), hidden, head).to(device))
    matrices = [weight for weight in hidden.parameters() if weight.dim() == 2]
    taken = {id(weight) for weight in matrices}
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02),
        torch.optim.AdamW([weight for weight in model.parameters() if id(weight) not in taken], lr=2e-3),
    ]
    # One call for both optimizers: a step counts for both, or is skipped for both.
    wire = thinwire.compress(model, optimizers, method, steps=STEPS)
    if rank == 0:
        print(wire.plan)

    places = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        window = WINDOWS[torch.randint(len(WINDOWS), (128,), generator=places)].to(device)
        loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
        loss.backward()
        wire.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(wire.report())
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
