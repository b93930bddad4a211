"""What of a round's exchange do the ranks wait for, where they stop for it and where it travels beside their steps?

    thinwire lab run --nodes 2 --link 50mbit -- python benchmarks/speed/rounds.py --computing 0.13

Where ranks compute on the cores that also encode and send, the clock shows both. ``--computing 0.13`` stands in for an
accelerator: a rank learns one short sequence, and sleeps until 0.13 s of each step are over, while its processor is
idle. The model, and so the messages, are those of the run that computes; what its ranks do beyond is communication.

Every rank trains the same model without any exchange, with rounds that stop (``local-steps``), and with rounds beside
the steps (streaming DiLoCo: fragments and a delay), a block of as many steps as a round has of each in turn. Nothing is
under way between blocks. A way's exposed communication is its time per step beyond that of ``none`` in the same turn;
± is half of the 95% interval over turns. Exits 1 if the streaming rounds expose more than ``--limit`` of what the
others do.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.lab.verdict import interval
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS


class Way:
    """A model that trains by one method."""

    def __init__(self, preset: str, method: str) -> None:
        torch.manual_seed(0)
        self.method = method
        self.model = DistributedDataParallel(Decoder(dataclasses.replace(PRESETS[preset], vocabulary=256)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # Ranks that never meet: the guard would let them wait for each other in every step of none.
        safety = thinwire.Safety(guard=method != "none")
        self.wire = thinwire.compress(self.model, self.optimizer, method, safety=safety)

    def block(self, tokens: torch.Tensor, steps: int, computing: float) -> float:
        """Take ``steps`` steps whose passes last ``computing`` seconds at least; return the seconds of one."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            end = time.perf_counter() + computing
            self.model(tokens[:, :-1], tokens[:, 1:]).backward()
            time.sleep(max(end - time.perf_counter(), 0.0))
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return (time.perf_counter() - began) / steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", choices=sorted(PRESETS))
    parser.add_argument("--every", type=int, default=20, help="steps of a round")
    parser.add_argument("--fragments", type=int, default=4)
    parser.add_argument("--delay", type=int, default=4, help="below every / fragments")
    parser.add_argument("--outer", default="dense", help="the method that averages what was moved")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank")
    parser.add_argument(
        "--computing", type=float, default=0.0, help="seconds that a step's forward and backward pass last, asleep"
    )
    parser.add_argument("--limit", type=float, default=0.2, help="largest share of the stopping rounds' exposed time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = f'every={options.every}, outer="{options.outer}"'
    stop, stream = (
        f"local-steps({shared}{more})" for more in ("", f", fragments={options.fragments}, delay={options.delay}")
    )
    ways = [Way(options.preset, method) for method in ("none", stop, stream)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batch, context = options.batch_size, PRESETS[options.preset].context
    if options.computing:
        batch, context = 1, 8
    tokens = torch.randint(0, 256, (batch, context + 1), generator=generator)
    for way in ways:  # as the delay is over, nothing is under way
        way.block(tokens, options.every + options.delay, options.computing)
        way.wire.reset_stats()
    times: list[list[float]] = [
        [way.block(tokens, options.every, options.computing) for way in ways] for _ in range(options.turns)
    ]
    exposed = [interval([1e3 * (turn[number] - turn[0]) for turn in times]) for number in range(len(ways))]
    share = exposed[2].mean / exposed[1].mean
    most = (exposed[2].mean + exposed[2].half) / (exposed[1].mean - exposed[1].half)
    if dist.get_rank() == 0:
        size = f"{dist.get_world_size()} ranks, {batch} x {context} tokens each"
        asleep = f", {1e3 * options.computing:g} ms of computing (asleep)" * bool(options.computing)
        print(f"{options.preset}, {size}{asleep}, {options.turns} turns of {options.every} steps")
        for number, way in enumerate(ways):
            waited = sum(step.seconds["exposed"] for step in way.wire.ledger.steps) / way.wire.ledger.total.steps
            sent = sum(way.wire.ledger.total.bytes.values()) / way.wire.ledger.total.steps
            step = 1e3 * statistics.fmean(turn[number] for turn in times)
            print(
                f"{step:8.1f} ms per step, {exposed[number].mean:6.1f} ± {exposed[number].half:.1f} beyond none "
                f"(by the ledger {1e3 * waited:.1f}), {sent / 1e3:.0f} kB sent   {way.method}"
            )
        print(f"exposed: {share:.1%} of the rounds that stop, at most {most:.1%} by both intervals")
    for way in ways:
        way.wire.close()
    dist.destroy_process_group()
    return int(share > options.limit)


if __name__ == "__main__":
    sys.exit(main())
