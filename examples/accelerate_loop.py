"""A loop written for Accelerate.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/accelerate_loop.py [METHOD]

It saves its state midway and loads it again, as after a crash. The text is Python's own argparse.py, byte by byte.
Needs the extra ``hf``.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader

from thinwire.adapters.accelerate import compress

CONTEXT, STEPS, MICRO_BATCHES = 16, 40, 2
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
WINDOWS = TEXT.unfold(0, CONTEXT + 1, 3)


def main(method: str = "int8") -> None:
    cpu = torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=cpu)
    torch.manual_seed(0)
    layers = [nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * CONTEXT, 512), nn.GELU(), nn.Linear(512, 256)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = DataLoader(WINDOWS, batch_size=128, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    wire = compress(accelerator, model, optimizer, method, steps=STEPS)  # the one line; the loop is as it was
    accelerator.print(wire.plan)

    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    step, batches = 0, iter(loader)
    while step < STEPS:
        window = next(batches)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(window[:, :-1]), window[:, -1])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % 10 == 0:
                accelerator.print(f"step {step}: loss {loss.item():.3f}")
            if step == STEPS // 2:
                accelerator.save_state(folder)  # also each rank's state of the method, in FOLDER/thinwire
                accelerator.wait_for_everyone()  # until rank 0 has written what all ranks read
                accelerator.load_state(folder)
    accelerator.print(wire.report())
    wire.close()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
