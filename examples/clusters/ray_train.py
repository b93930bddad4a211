"""Ray Train with a thin exchange, two workers with gloo on CPUs.  python examples/clusters/ray_train.py [METHOD]"""

import sys
import tempfile

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
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
    rank = ray.train.get_context().get_world_rank()
    data = torch.Generator().manual_seed(rank)
    device = next(model.parameters()).device
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, VOCABULARY, (1024,), generator=data).to(device)
        loss = nn.functional.cross_entropy(model(tokens), (3 * tokens + 1) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            sent = sum(wire.last_step()["wire_bytes_per_step"].values())
            ray.train.report({"step": step, "loss": loss.item(), "wire_mb": sent / 1e6})  # on all workers
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}, {sent / 1e6:.3f} MB sent", flush=True)
    wire.close()


def main(method: str = "int8") -> None:
    ray.init(include_dashboard=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train,
            train_loop_config={"method": method},
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
            torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
            run_config=RunConfig(storage_path=folder),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
