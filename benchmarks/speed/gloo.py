"""How much of a link do gloo's collectives and ours use?

    thinwire lab run --nodes 2 --link 200mbit -- python benchmarks/speed/gloo.py --rate 200e6

Prints the payload per second and direction of each, as a share of what the link can carry (1448 bytes of payload in
every 1514 on the wire).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from thinwire.network.comm import GroupComm
from thinwire.network.ledger import Ledger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200e6, help="the link's rate, bit/s")
    parser.add_argument("--bytes", type=int, default=10_000_000, help="sent by each rank")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    comm = GroupComm(dist.group.WORLD, Ledger())
    size, nbytes = comm.size, options.bytes
    per_peer = nbytes // (size - 1)
    rows, out = torch.zeros(size, per_peer, dtype=torch.uint8), torch.zeros(size, per_peer, dtype=torch.uint8)
    flat = torch.zeros(nbytes * size // (8 * (size - 1)), dtype=torch.float32)
    lists = list(out.unbind())
    cases: dict[str, Callable[[], object]] = {
        "all-reduce (gloo)": lambda: dist.all_reduce(flat),
        "all-to-all (gloo)": lambda: dist.all_to_all_single(out, rows),
        "all-to-all (ours)": lambda: comm.all_to_all(out, rows),
        "all-gather (gloo)": lambda: dist.all_gather(lists, rows[0]),
        "all-gather (ours)": lambda: comm.all_gather(out, rows[0]),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, case in cases.items():
            dist.barrier()
            began = time.perf_counter()
            case()
            times[name].append(time.perf_counter() - began)
    if comm.rank == 0:
        rate = f"{options.rate / 1e6:g} Mbit/s"
        print(f"{size} ranks, {nbytes / 1e6:g} MB sent by each, {rate}; median of {options.rounds}")
        for name, values in times.items():
            seconds = statistics.median(values)
            share = nbytes * 8 / seconds / (options.rate * 1448 / 1514)
            print(f"{name:<18} {1e3 * seconds:7.0f} ms {share:7.1%} of the link")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
