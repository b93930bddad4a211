"""Ray Train with two workers, with gloo on CPUs.  python examples/clusters/ray_train.py [METHOD [STEP]]

If a worker is lost, Ray ends the others and starts all of them again. They resume from the last checkpoint, which also
holds what each worker had not sent yet. With STEP, worker 1 ends once in that step, to show this.
"""

import os
import sys
import tempfile

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import thinwire

VOCABULARY, WIDTH, STEPS = 256, 512, 40


def train(config: dict) -> None:
    """One worker: Ray has called init_process_group()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))
    model = ray.train.torch.prepare_model(model)  # DistributedDataParallel, on the worker's device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wire = thinwire.compress(model, optimizer, config["method"], steps=STEPS)
    rank, done = ray.train.get_context().get_world_rank(), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            done, weights, moments = torch.load(f"{folder}/model.pt").values()
            model.load_state_dict(weights)
            optimizer.load_state_dict(moments)
            wire.load_state_dict(torch.load(f"{folder}/wire-{rank}.pt"))  # after model and optimizer
        print(f"worker {rank} goes on after step {done}", flush=True)
    device = next(model.parameters()).device
    for step in range(done + 1, STEPS + 1):
        if rank == 1 and step == config["lost in"] and done == 0:
            os._exit(1)
        data = torch.Generator().manual_seed(2 * step + rank)
        tokens = torch.randint(0, VOCABULARY, (1024,), generator=data).to(device)
        loss = nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            sent = sum(wire.last_step()["wire_bytes_per_step"].values())
            with tempfile.TemporaryDirectory() as folder:  # Ray joins the files of all workers to one checkpoint
                torch.save(wire.state_dict(), f"{folder}/wire-{rank}.pt")
                if rank == 0:
                    state = {"done": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    torch.save(state, f"{folder}/model.pt")
                figures = {"step": step, "loss": loss.item(), "wire_mb": sent / 1e6}
                ray.train.report(figures, checkpoint=Checkpoint.from_directory(folder))  # on all workers
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}, {sent / 1e6:.3f} MB sent", flush=True)
    wire.close()


def main(method: str = "int8", lost_in: str = "0") -> None:
    ray.init(include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"method": method, "lost in": int(lost_in)},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
            torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=3)),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
