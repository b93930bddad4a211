"""One spoilt batch (a loss 10,000 times too large, once): what does it cost each method, and what does the bound cut?

    .venv/bin/python benchmarks/proofs/spoilt.py                    every method, on two ranks of this machine
    .venv/bin/python benchmarks/proofs/spoilt.py --bound 3 topk     methods whose name begins with "topk", another bound
    .venv/bin/python benchmarks/proofs/spoilt.py --bound 0          no bound: what it is there for

A byte-level decoder of 1 layer x 64 on the text of Python's own library, DDP, clip 1, 100 steps; the loss of step 20
is multiplied on all ranks. Prints the mean loss of steps 81-90 (70 steps after it) without and with the spoilt batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import ranks

SMALL, GRADIENT = "smallest=1000", "feedback='gradients'"
METHODS = {
    "dense": "adamw", f"int8({SMALL})": "adamw", f"int8({SMALL}, feedback='gradients')": "adamw",
    f"topk({GRADIENT}, {SMALL}, density=0.01)": "adamw",
    f"tagc({GRADIENT}, {SMALL})": "adamw",
    f"lhc({SMALL})": "adamw", f"radius({SMALL}, start=2, T=20, density=0.1, residual_scale=1.0)": "adamw",
    f"separate({SMALL}, ratio=4, beta=None)": "adamw", f"separate({SMALL})": "adamw",
    f"powersgd({GRADIENT}, {SMALL})": "adamw", f"loco({SMALL})": "adamw",
    f"sdp4bit({SMALL})": "adamw", f"zeropp({SMALL})": "adamw", f"qsdp({SMALL})": "adamw",
    f"onebit-adam({SMALL}, warmup=15)": "adamw",
    f"topk({SMALL})": "adamw", f"tagc({SMALL})": "adamw", f"powersgd({SMALL})": "adamw", f"trickle({SMALL})": "adamw",
    f"trickle:merged({SMALL})": "adamw", f"sign({SMALL})": "adamw", "local-steps(every=5)": "adamw",
    "dense ": "adams", f"scape({SMALL}, density=0.01, warmup=5)": "adams",
    f"scape({SMALL}, density=0.1, warmup=5)": "adams",
    "dense  ": "sgd", f"dgc({SMALL}, density=0.01)": "sgd",
}  # fmt: skip
RATES = {"adamw": 2e-3, "adams": 2e-3, "sgd": 0.05}
STEPS, SPOILT, FACTOR = 92, 20, 1e4


def train(rank: int, world: int, method: str, optimizer: str, spoilt: bool, bound: float | None, steps: int = STEPS):
    """The losses of one run, averaged over the ranks, and what was cut on this rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire
    from thinwire.train.data.corpus import read_corpus
    from thinwire.train.data.windows import Windows
    from thinwire.train.model.decoder import Decoder
    from thinwire.train.model.shapes import ModelConfig

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = DistributedDataParallel(Decoder(ModelConfig(layers=1, width=64, context=32).check()))
    kinds = {"adamw": torch.optim.AdamW, "adams": thinwire.AdamS, "sgd": torch.optim.SGD}
    rate = RATES[optimizer]
    stepper = kinds[optimizer](model.parameters(), lr=rate)
    wire = thinwire.compress(model, stepper, method.strip(), steps=steps, safety=thinwire.Safety(outlier_clip=bound))
    windows = Windows(torch.tensor(list(read_corpus(["stdlib"])[:200_000].encode())), 32)
    losses = torch.zeros(steps)
    for step in range(steps):
        inputs, targets = windows.batch((step * world + rank) * 4, 4)
        loss = model(inputs, targets)
        (loss * (FACTOR if spoilt and step == SPOILT else 1.0)).backward()
        wire.clip_grad_norm_(1.0)
        stepper.step()
        stepper.zero_grad()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    found = wire.stats()["bound"]
    wire.close()
    return (losses / world).tolist(), found


def both(rank: int, world: int, method: str, optimizer: str, bound: float | None):
    return [train(rank, world, method, optimizer, spoilt, bound) for spoilt in (False, True)]


def cost(method: str, bound: float | None) -> tuple[float, float, dict, dict]:
    """The loss 70 steps later without and with the spoilt batch, and what was cut in each."""
    (plain, ordinary), (spoilt, cut) = ranks.run(both, 2, method, METHODS[method], bound)[0]
    late = slice(SPOILT + 61, SPOILT + 71)
    return statistics.fmean(plain[late]), statistics.fmean(spoilt[late]), ordinary, cut


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", help="beginnings of names; none: all")
    parser.add_argument("--bound", type=float, default=10.0, help="usual norms; 0: no bound")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"| method | loss without it | loss with it | difference | cut with it | cut without it |\n|{'---|' * 6}")
    for method, optimizer in METHODS.items():
        if not options.methods or any(method.startswith(name) for name in options.methods):
            plain, spoilt, ordinary, cut = cost(method, options.bound or None)
            name = f"{method.strip()}, {optimizer}"
            counts = f"{cut.get('cut', '-')} | {ordinary.get('cut', '-')}"
            print(f"| {name} | {plain:.3f} | {spoilt:.3f} | {spoilt / plain - 1:+.1%} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
