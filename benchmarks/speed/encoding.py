"""What encoding and decoding take of a step, in CPU time: a busy machine does not change it much.

    python benchmarks/speed/encoding.py [--preset net20m] [--tokens 1024] [--ranks 2] [--steps 12] [--methods trickle]

Gloo ranks on DDP, one thread each, ``--tokens`` per rank and step. Printed are medians over the steps: the CPU time
of a rank's whole step with ``dense`` (forward, backward, optimizer), and of the method's own encoding and decoding, as
the ledger has them, in ms and as a share of that step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.base.processes import free_port
from thinwire.network.ledger import Ledger
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

UNTIMED = 2


def rank(number: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=options.ranks)
    spent: dict[str, float] = defaultdict(float)
    span = Ledger.span

    @contextmanager
    def timed(self: Ledger, kind: str, tensor: torch.Tensor | None = None) -> Iterator[None]:
        began = time.thread_time()
        with span(self, kind, tensor):
            yield
        spent[kind] += time.thread_time() - began

    Ledger.span = timed  # type: ignore[method-assign]
    shape = PRESETS[options.preset]
    tokens = torch.randint(0, shape.vocabulary, (options.tokens // shape.context, shape.context + 1))
    whole = 0.0
    for method in ("dense", *options.methods):
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(shape))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        wire = thinwire.compress(model, optimizer, method, steps=options.steps + UNTIMED)
        steps: list[tuple[float, float, float]] = []
        for step in range(options.steps + UNTIMED):
            spent.clear()
            began = time.process_time()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= UNTIMED:
                steps.append((time.process_time() - began, spent["encode"], spent["decode"]))
        wire.close()
        step_s, encode, decode = (statistics.median(each) for each in zip(*steps, strict=True))
        if method == "dense":
            whole = step_s
        if number == 0:
            cells = " | ".join(f"{1e3 * each:.1f} ms" for each in (whole, encode, decode))
            print(f"| `{method}` | {cells} | {(encode + decode) / whole:.1%} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="net20m")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", nargs="+", default=["trickle", "topk"])
    options = parser.parse_args()
    print("| method | step | encode | decode | encode + decode, share of the step |\n|---|--:|--:|--:|--:|", flush=True)
    torch.multiprocessing.spawn(rank, (free_port(), options), options.ranks)


if __name__ == "__main__":
    main()
