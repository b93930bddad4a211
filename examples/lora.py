"""LoRA by PEFT.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/lora.py [METHOD]

By default a method compresses tensors of 65,536 elements or more. Adapters are smaller, so the method here is
``int8:smallest:0``. Needs the extra ``hf``.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import GPT2Config, GPT2LMHeadModel

import thinwire

BLOCK, STEPS = 64, 40
LORA = LoraConfig(r=8, lora_alpha=32, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def main(method: str = "int8:smallest:0") -> None:
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    rank = dist.get_rank()
    torch.manual_seed(0)
    # An untrained model. In practice: AutoModelForCausalLM.from_pretrained(...).
    base = GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=BLOCK, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    ))  # fmt: skip
    adapted = get_peft_model(base, LORA)
    model = DDP(adapted.to(device))
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    wire = thinwire.compress(model, optimizer, method, steps=STEPS)
    if rank == 0:
        print(wire.plan)

    places = torch.Generator().manual_seed(rank)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(TEXT) - BLOCK, (8,), generator=places)
        tokens = torch.stack([TEXT[start : start + BLOCK] for start in starts]).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        wire.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {loss.item():.3f}")
    if rank == 0:
        print(wire.report())
        adapted.save_pretrained("runs/lora")
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
