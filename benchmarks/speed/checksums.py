"""What does a checksum behind every message cost? Steps with and without it, in turn in one run, and raw speed.

    python benchmarks/speed/checksums.py

Two ranks of this machine, DDP, a byte-level decoder of 842k parameters, steps of 16 sequences. CPU time of both ranks,
since the machine may have other work; the median of the ratios of neighbours. docs/faults.md has the figures.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import ranks
import thinwire
from thinwire.network.checksum import seal, unseal
from thinwire.train.config import from_arguments
from thinwire.train.model.decoder import Decoder

METHODS = ("int8(smallest=1024)", "sdp4bit(smallest=1024)", "trickle", "topk")
ROUNDS, STEPS = 6, 4


def measure(rank: int, world: int, method: str) -> float:
    """CPU time with checksums over that without."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shape = from_arguments(["--preset", "small", "--seq-len", "128"]).shape(256)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Decoder(shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(rank))

    def steps(checksum: bool) -> float:
        wire = thinwire.compress(model, optimizer, method, safety=thinwire.Safety(checksum=checksum))
        for number in range(STEPS + 1):
            if number == 1:  # the first one makes buffers
                began = time.process_time()
            model(tokens, tokens.roll(1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        spent = time.process_time() - began
        wire.close()
        return spent

    steps(False)
    return statistics.median(steps(True) / steps(False) for _ in range(ROUNDS))


def main() -> None:
    rows = torch.randint(0, 256, (4, 1 << 20), dtype=torch.uint8)
    out = torch.empty_like(rows)
    took = []
    for _ in range(20):
        began = time.process_time()
        unseal(seal(rows), out)
        took.append(time.process_time() - began)
    print(f"sealed and opened: {rows.nbytes / statistics.median(took) / 1e9:.1f} GB/s of one core")
    for method in METHODS:
        ratios = ranks.run(measure, 2, method)
        print(f"{method}: CPU time of a step x {statistics.fmean(ratios):.4f}", flush=True)


if __name__ == "__main__":
    main()
