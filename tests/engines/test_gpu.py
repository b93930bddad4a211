"""Engines on GPUs: ranks that share one and talk by gloo, and ranks with one each that talk by NCCL.

What single operations compute on a GPU is tested beside them (``pytest -m gpu`` runs all of it).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import ranks
import thinwire
from engines import same_on_all_ranks
from models import Net, batch

METHODS = ("dense", "int8(smallest=0)", "sdp4bit(smallest=0)", "topk(feedback='gradients', density=0.1, smallest=0)",
           "scape(density=0.1, warmup=2, smallest=0)", "radius(T=2, start=1, density=0.3, smallest=0)")  # fmt: skip
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no CUDA device")]


def _trained(rank: int, world: int, backend: str) -> dict[str, tuple[float, float, bool]]:
    """By method: the losses of the first and of the last step, and are all ranks' weights the same?"""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.new_group(backend=backend)
    found = {}
    for method in METHODS:
        torch.manual_seed(0)
        model = DistributedDataParallel(Net().to(device), process_group=group, bucket_cap_mb=0.005)
        made = thinwire.AdamS if method.startswith("scape") else torch.optim.AdamW
        optimizer = made(model.parameters(), lr=3e-3)
        wire = thinwire.compress(model, optimizer, method, steps=1000)
        losses = []
        for step in range(8):
            tokens, targets = (part.to(device) for part in batch(step, rank))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            wire.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[method] = losses[0], losses[-1], same_on_all_ranks(model.cpu())
        wire.close()
    return found


def _holds(found: list[dict[str, tuple[float, float, bool]]]) -> None:
    for by_method in found:
        for method, (first, last, same) in by_method.items():
            assert same and last < first, method


def test_ranks_that_share_a_gpu():
    _holds(ranks.run(_trained, 2, "gloo"))


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ranks_with_a_gpu_each():
    _holds(ranks.run(_trained, min(GPUS, 8), "nccl"))
