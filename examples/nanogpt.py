"""nanoGPT's loop.  OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/nanogpt.py --method=topk:density:0.1

Three lines are Thinwire's. As in nanoGPT, ``--key=value`` replaces a global. It is split at ``=``, so the knobs of a
method are written with colons. The text is Python's own argparse.py, byte by byte.
"""

import argparse
import math
import os
import sys
from ast import literal_eval
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire

method = "int8"
n_layer, n_head, n_embd, block_size = 2, 4, 128, 64
batch_size, gradient_accumulation_steps, max_iters, log_interval = 8, 2, 40, 10
learning_rate, min_lr, warmup_iters, grad_clip = 2e-3, 2e-4, 5, 1.0

for argument in sys.argv[1:]:  # nanoGPT's configurator
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = value if isinstance(globals()[key], str) else literal_eval(value)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, n_head, c // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.Sequential(*(Block() for _ in range(n_layer))), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, 256, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        return F.cross_entropy(self.lm_head(self.ln_f(self.h(x))).flatten(0, 1), targets.flatten())


local = int(os.environ["LOCAL_RANK"])
cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", local) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
rank, master_process = dist.get_rank(), dist.get_rank() == 0
data = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(1337 + rank)


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    rows = torch.stack([data[i : i + block_size + 1] for i in ix]).to(device)
    return rows[:, :-1], rows[:, 1:]


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


torch.manual_seed(1337)
model = DDP(GPT().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
wire = thinwire.compress(model, optimizer, method, steps=max_iters)  # 1: after DDP and optimizer, before the first step
if master_process:
    print(wire.plan)

for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        # nanoGPT's own switch: one exchange per optimizer step, however many micro-batches
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(*get_batch()) / gradient_accumulation_steps
        loss.backward()
    wire.clip_grad_norm_(grad_clip)  # 2: in place of torch.nn.utils.clip_grad_norm_
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if master_process and (iter_num + 1) % log_interval == 0:
        print(f"iter {iter_num + 1}: loss {loss.item() * gradient_accumulation_steps:.4f}")

if master_process:
    print(wire.report())
wire.close()  # 3
dist.destroy_process_group()
