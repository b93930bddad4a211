"""One replica of a small run under torchft: an MLP that learns a linear map, with compressed gradients.

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python benchmarks/elastic/replica.py NAME --method trickle --until 500

It prints a line of JSON for each attempt at a step: seconds, step, replicas, whether it counted, loss, and after every
step that counted a hash of the weights, which must be the same on all replicas. ``benchmarks/elastic/kills.py`` runs
and kills several of these.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn

from thinwire import methods
from thinwire.adapters.torchft import compress

WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of this replica: its data are drawn from it")
    parser.add_argument("--method", default="trickle(density=0.05, smallest=0)")
    parser.add_argument("--until", type=int, default=500, help="steps that count")
    parser.add_argument("--hidden", type=int, default=256, help="higher => a larger model: 128 parameters for each")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=10, help="seconds that a replica waits for another")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of computing that each step pretends to take")
    parser.add_argument("--dense-torchft", action="store_true", help="torchft's own all-reduce, without Thinwire")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, options.hidden), nn.GELU(), nn.Linear(options.hidden, WIDTH))
    method = methods.resolve(options.method)
    optimizer = method.OPTIMIZER(model.parameters(), lr=1e-3)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=options.timeout)), load_state_dict=None, state_dict=None,
        min_replica_size=options.min_replicas, use_async_quorum=False, timeout=timedelta(seconds=options.timeout),
        quorum_timeout=timedelta(seconds=600), rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
        replica_id=options.name, hostname="127.0.0.1",
    )  # fmt: skip
    try:
        train(model, optimizer, method, manager, options)
    finally:
        manager.shutdown(wait=False)


def train(model: nn.Module, optimizer: Any, method: Any, manager: Any, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(int.from_bytes(options.name.encode(), "big") % 2**63)
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    wire = None
    if options.dense_torchft:
        manager.register_state_dict_fn(
            "replica",
            lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])),
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )
    else:
        wire = compress(model, optimizer, method, manager=manager)
    began = time.time()
    while manager.current_step() < options.until:
        before = manager.current_step()
        if wire is None:
            manager.start_quorum()
        x = torch.randn(32, WIDTH, generator=generator)
        optimizer.zero_grad()
        loss = ((model(x) - x @ target) ** 2).mean()
        loss.backward()
        if options.pause:
            time.sleep(options.pause)
        if wire is not None:
            optimizer.step()
        else:
            for work in [manager.allreduce(weight.grad) for weight in model.parameters()]:
                work.wait()
            if manager.should_commit():
                optimizer.step()
        step = manager.current_step()
        line = {
            "time": round(time.time(), 3), "replica": options.name, "step": step, "counted": step > before,
            "replicas": manager.num_participants(), "loss": round(float(loss), 5),
        }  # fmt: skip
        if step > before:
            line["hash"] = digest(model)
        if wire is not None and wire.turnover.losses:
            line["lost"] = round(sum(loss.norm**2 for loss in wire.turnover.losses.values()) ** 0.5, 6)
        print(json.dumps(line), flush=True)
    seconds = time.time() - began
    print(json.dumps({"replica": options.name, "done": True, "seconds": round(seconds, 2)}), flush=True)


def digest(model: nn.Module) -> str:
    """Hash the bits of all weights."""
    state = hashlib.sha1()
    for weight in model.parameters():
        state.update(weight.detach().contiguous().numpy().tobytes())
    return state.hexdigest()[:12]


if __name__ == "__main__":
    main()
