"""One rank of a replica of a small run under torchft: an MLP that learns a noisy linear map, with compressed gradients.

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python benchmarks/elastic/replica.py NAME --method trickle --until 500

It prints a line of JSON for each attempt at a step: seconds, step, replicas, whether it counted, loss, and after every
step that counted a hash of the weights, which must be the same on all replicas. ``benchmarks/elastic/kills.py`` runs
and kills several of these. A replica of several ranks (HSDP) shards the model among them:

    for rank in 0 1; do ... replica.py NAME --shard $rank --shards 2 --meet /tmp/NAME.port & done
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from books import Books
from thinwire import methods
from thinwire.adapters.torchft import compress
from thinwire.network.comm import local

WIDTH = 64
MEET_S = 60.0  # for the ranks of a replica to find each other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help="of this replica: its data are drawn from it")
    parser.add_argument("--method", default="trickle(density=0.05, smallest=0)")
    parser.add_argument("--until", type=int, default=500, help="steps that count")
    parser.add_argument("--hidden", type=int, default=256, help="higher => a larger model: 128 parameters for each")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--spares", action="store_true", help="more replicas than --min-replicas are spares")
    parser.add_argument("--timeout", type=float, default=10, help="seconds that a replica waits for another")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of computing that each step pretends to take")
    parser.add_argument("--waits", action="store_true", help="let the others wait while it fetches their state")
    parser.add_argument("--dense-torchft", action="store_true", help="torchft's own all-reduce, without Thinwire")
    parser.add_argument("--shard", type=int, default=0, help="this rank's number in its replica")
    parser.add_argument("--shards", type=int, default=1, help="ranks of a replica, which shard the model (HSDP)")
    parser.add_argument("--meet", type=Path, help="a file in which rank 0 tells the others its port")
    parser.add_argument("--books", action="store_true", help="write what is taken, delivered and waits, too")
    parser.add_argument("--address", default="127.0.0.1", help="at which other replicas reach this one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # torchft's HTTP transport names itself by the host's name, which all emulated nodes share.
    socket.gethostname = lambda: options.address
    store = meet(options)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, options.hidden), nn.GELU(), nn.Linear(options.hidden, WIDTH))
    if options.shards > 1:
        os.environ["LOCAL_WORLD_SIZE"] = str(options.shards)
        dist.init_process_group("gloo", store=store, rank=options.shard, world_size=options.shards)
        mesh = init_device_mesh("cpu", (options.shards,))
        for part in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
    method = methods.resolve(options.method)
    optimizer = method.OPTIMIZER(model.parameters(), lr=1e-3)
    limit = timedelta(seconds=options.timeout)
    mode = torchft.manager.WorldSizeMode.FIXED_WITH_SPARES if options.spares else torchft.manager.WorldSizeMode.DYNAMIC

    def open_manager() -> torchft.Manager:
        return torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=limit), load_state_dict=None, state_dict=None,
            min_replica_size=options.min_replicas, use_async_quorum=False, timeout=limit, world_size_mode=mode,
            quorum_timeout=timedelta(seconds=600), rank=options.shard, world_size=options.shards,
            store_addr=options.address, store_port=store.port, replica_id=options.name, hostname=options.address,
        )  # fmt: skip

    train(model, optimizer, method, open_manager, options)


def meet(options: argparse.Namespace) -> Any:
    """Make the replica's store, or find it."""
    if options.shard == 0:
        store = dist.TCPStore(options.address, 0, is_master=True, wait_for_workers=False)
        if options.meet is not None:
            draft = options.meet.with_suffix(".draft")
            draft.write_text(str(store.port))
            draft.rename(options.meet)
        return store
    end = time.monotonic() + MEET_S
    while not options.meet.exists():
        if time.monotonic() > end:
            raise SystemExit(f"{options.name}: rank 0 has not come within {MEET_S:g} s")
        time.sleep(0.02)
    return dist.TCPStore(options.address, int(options.meet.read_text()), is_master=False, wait_for_workers=False)


def train(model: nn.Module, optimizer: Any, method: Any, open_manager: Any, options: argparse.Namespace) -> None:
    name = f"{options.name}/{options.shard}" if options.shard else options.name
    generator = torch.Generator()
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9))
    wire = books = None

    def write(line: dict[str, Any]) -> None:
        print(json.dumps({"process": os.getpid(), "shard": options.shard, **line}), flush=True)

    print(json.dumps({"time": round(time.time(), 3), "replica": options.name, "ready": True}), flush=True)
    if options.dense_torchft:
        manager = open_manager()
        manager.register_state_dict_fn(
            "replica",
            lambda state: (model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])),
            lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        )
    else:
        wire = compress(model, optimizer, method, manager=open_manager() if options.waits else open_manager)
        manager = wire.manager
        follows = wire.turnover.follows
        books = Books(wire, manager, model, write) if options.books else None
    began = time.time()
    opened = {"time": round(began, 3), "replica": options.name, "opened": True}
    if wire is not None and follows is not None:
        opened |= {"fetched": follows.tree["clock"]}
    print(json.dumps(opened), flush=True)
    while manager.current_step() < options.until:
        before = manager.current_step()
        if wire is None:
            manager.start_quorum()
        # An attempt that did not count is taken again on the same data, by a new process, too.
        taken = before if wire is None else wire.step - wire.skipped
        alone = wire is not None and wire.method.card.alone(taken)
        generator.manual_seed(int.from_bytes(hashlib.sha1(f"{name} {taken}".encode()).digest()[:4], "big"))
        x = torch.randn(32, WIDTH, generator=generator)
        optimizer.zero_grad()
        noise = torch.randn(32, WIDTH, generator=generator)  # without it, a long run's loss is 0
        loss = ((model(x) - x @ target - noise) ** 2).mean()
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
            "replicas": manager.num_participants(), "loss": round(float(loss.detach()), 5),
        }  # fmt: skip
        if manager.participating_rank() is None:
            line["spare"] = True
        if step > before:
            line["hash"] = digest(model)
        elif alone:
            line["alone"] = True
        if wire is not None and wire.turnover.losses:
            line["lost"] = round(sum(loss.norm**2 for loss in wire.turnover.losses.values()) ** 0.5, 6)
        if books is not None:
            line |= {"number": books.number, "delivered": books.delivered}
        write(line)
    seconds = time.time() - began
    print(json.dumps({"replica": options.name, "done": True, "seconds": round(seconds, 2)}), flush=True)
    manager.shutdown(wait=False)


def digest(model: nn.Module) -> str:
    """Hash the bits of all weights, or of this rank's part of them."""
    state = hashlib.sha1()
    for weight in model.parameters():
        state.update(local(weight).detach().contiguous().numpy().tobytes())
    return state.hexdigest()[:12]


if __name__ == "__main__":
    main()
