"""What it costs to be careful: guard, ledger, agreement at the start, and hashes of the replicas, as a share of a step.

    python benchmarks/speed/overhead.py [--steps 20] [--every 100] [--method int8]

Two gloo ranks, a model of 9 million parameters. Two models take turns, step by step: one with all of it and one with
none; the medians of their steps are printed beside each other. On a busy machine these differ by more than what is
looked for, so each part is also measured in CPU time, as a share of a step's CPU time. That leaves out what the agreed
flag waits for: one round trip on the network, and the slower rank, for which the next exchange would wait anyway.

* guard: observing each buffer, and the agreed flag, in every step
* ledger: counting and timing, in every step (what its own calls take)
* hashes: all weights, every ``--every`` steps
* agreement: once, when ``compress()`` is called; said in steps
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from starter import start_ranks

RANKS = 2


def timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    """``function``, with the CPU seconds of its calls added to ``spent``."""

    def call(*args: Any, **more: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args, **more)
        finally:
            spent[name] += time.thread_time() - began

    return call


def rank(steps: int, every: int, method: str) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import thinwire
    from thinwire.core.agreement import Agreement
    from thinwire.network.ledger import Ledger
    from thinwire.train.model.decoder import Decoder
    from thinwire.train.model.shapes import ModelConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here = dist.get_rank()
    shape = ModelConfig(layers=6, width=320, heads=5, context=128, vocabulary=4096)
    spent: dict[str, float] = defaultdict(float)
    Agreement.collect = timed(Agreement.collect, spent, "agreement")  # type: ignore[method-assign]
    runs = []
    for careful in (True, False):
        torch.manual_seed(0)
        model = DistributedDataParallel(Decoder(shape))
        optimizer = torch.optim.AdamW(model.parameters())
        safety = thinwire.Safety(careful, check_every=every if careful else None)
        wire = thinwire.compress(model, optimizer, method, safety=safety)
        runs.append((careful, model, optimizer, wire))
    agreement = spent["agreement"] / len(runs)
    guard, replicas = runs[0][3]._guard, runs[0][3]._step_loop._replica_check
    for name in ("observe", "agree"):
        setattr(guard, name, timed(getattr(guard, name), spent, "guard"))
    for name in ("count", "call", "add", "count_dense", "close_step"):
        setattr(Ledger, name, timed(getattr(Ledger, name), spent, "ledger"))
    tokens = torch.randint(0, shape.vocabulary, (4, shape.context + 1), generator=torch.Generator().manual_seed(here))
    times: dict[bool, list[float]] = {True: [], False: []}
    busy = 0.0
    for step in range(steps + 3):
        if step == 3:
            spent.clear()
        for careful, model, optimizer, _ in runs if step % 2 else runs[::-1]:
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step >= 3:
                times[careful].append(time.perf_counter() - began)
                busy += 0 if careful else time.process_time() - worked
    hashes = []
    for _ in range(5):
        began = time.thread_time()
        replicas._last = -every
        replicas.look(0, ())
        hashes.append(time.thread_time() - began)
    if here == 0:
        values = sum(parameter.numel() for parameter in runs[0][1].parameters())
        all_of_it, none = (1e3 * statistics.median(times[careful]) for careful in (True, False))
        step_s = busy / steps
        print(f"{method}, {RANKS} gloo ranks, {values:,} parameters, {steps} steps of each, torch {torch.__version__}")
        print(f"a step, median: {all_of_it:.1f} ms with all of it, {none:.1f} ms with none")
        print(f"CPU time of a step with none: {1e3 * step_s:.1f} ms; of that")
        parts = {"guard": spent["guard"] / steps, "ledger": spent["ledger"] / (2 * steps)}
        parts[f"hashes, every {every} steps"] = statistics.median(hashes) / every
        for name, seconds in [*parts.items(), ("together", sum(parts.values()))]:
            print(f"  {name:<24}{1e3 * seconds:>9.3f} ms {seconds / step_s:>8.2%}")
        print(f"agreement, once: {1e3 * agreement:.1f} ms, {agreement / step_s:.2f} steps")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--method", default="int8")
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given.steps, given.every, given.method)
        return
    sys.exit(start_ranks(RANKS))


if __name__ == "__main__":
    main()
