"""Time of the mask operations on this machine, as a ratio to ``Tensor.copy_`` of the same float32 tensor.

    python benchmarks/masks.py [--sizes 1 8] [--densities .01 .1 .4] [--rounds 15] [--threads 1] [--device cpu]

Each round times the copy and all operations one after another, so that a busy machine slows all alike; printed are
medians. Values are heavy-tailed (normal times log-normal), as gradients are. An operation whose result is wrong is not
timed: the program stops with exit status 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from thinwire.codecs import TopK
from thinwire.ops import mask
from thinwire.ops.mask import reference

PEERS = 4
LISTED = 1 / 32  # below this density a list of positions is shorter than mask bits


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) * 1e3


class Case:
    """All operations on rows of ``n`` values of which ``k`` are kept, and their buffers."""

    def __init__(self, n: int, k: int, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        heavy = torch.randn(1, n, generator=generator) * torch.randn(1, n, generator=generator).mul_(0.7).exp_()
        self.k, self.rows, self.residual = k, heavy.to(device), torch.zeros(1, n, device=device)
        self.words = mask.topk_mask(self.rows, k, torch.zeros(1, n // mask.WORD, dtype=torch.int64, device=device))
        self.payload, self.out = torch.zeros(1, k, device=device), torch.zeros(1, n, device=device)
        self.positions = torch.zeros(1, k, dtype=torch.int32, device=device)
        self.flags = torch.zeros(1, n, dtype=torch.bool, device=device)
        self.codec = TopK([(0, n, k)], listed=k < LISTED * n)
        self.wire = torch.zeros(PEERS, self.codec.wire_numel(n), dtype=torch.uint8, device=device)
        for peer in range(PEERS):
            self.codec.encode(self.rows.roll(31 * peer, 1), self.wire[peer : peer + 1])
        self.operations: dict[str, Callable[[], Tensor]] = {
            "topk": lambda: mask.topk_mask(self.rows, k, self.words),
            "gather": lambda: mask.gather_keep(self.rows, self.residual, self.words, self.payload, self.residual),
            "scatter": lambda: mask.scatter(self.payload, self.words, self.out),
            "indices": lambda: mask.indices(self.words, self.positions),
            "from_ind": lambda: mask.from_indices(self.positions, self.words),
            "unpack": lambda: mask.unpack(self.words, self.flags),
            "pack": lambda: mask.pack(self.flags, self.words),
            "popcount": lambda: mask.popcount(self.words),
            "encode": lambda: self.codec.encode(self.rows, self.wire[:1]),
            f"sum({PEERS})": lambda: self.codec.decode_sum(self.wire, self.out[0], 1 / PEERS),
        }


def self_check(device: torch.device) -> None:
    """Raise where an operation is not the reference's, or the sum of peers not the sum of their decodes."""
    n = 64 * 1031
    for density in (0.01, 0.4):
        case = Case(n, int(density * n), device, seed=1)
        words = torch.zeros_like(case.words)
        reference.topk_mask(case.rows, case.k, words)
        case.residual.copy_(case.rows.flip(1))
        payload, rest = torch.zeros_like(case.payload), torch.zeros_like(case.rows)
        reference.gather_keep(case.rows, case.residual, words, payload, rest)
        out, flags = torch.zeros_like(case.out), torch.zeros_like(case.flags)
        reference.scatter(payload, words, out)
        reference.unpack(words, flags)
        for name in ("topk", "gather", "scatter", "indices", "from_ind", "unpack", "pack"):
            case.operations[name]()
        found = (case.words, case.payload, case.residual, case.out, case.flags, mask.popcount(words))
        expected = (words, payload, rest, out, flags, flags.sum(1))
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"density {density}: an operation differs from the reference")
        total = case.codec.decode_sum(case.wire, torch.full_like(out[0], torch.nan), 1 / PEERS)
        rows = case.codec.decode(case.wire, torch.full((PEERS, n), torch.nan, device=device))
        if not torch.equal(total, (((rows[0] + rows[1]) + rows[2]) + rows[3]) * (1 / PEERS)):
            raise AssertionError(f"density {density}: decode_sum is not the sum of the decodes in rank order")


def measure(case: Case, rounds: int, device: torch.device) -> tuple[float, dict[str, float]]:
    """Median milliseconds of the copy, and the median ratio of every operation to it."""
    target = torch.zeros_like(case.rows)
    for operation in case.operations.values():
        operation()
    copies: list[float] = []
    ratios: dict[str, list[float]] = {name: [] for name in case.operations}
    for _ in range(rounds):
        copy = timed(lambda: target.copy_(case.rows), device)
        copies.append(copy)
        for name, operation in case.operations.items():
            ratios[name].append(timed(operation, device) / copy)
    return statistics.median(copies), {name: statistics.median(samples) for name, samples in ratios.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Ratios of mask operations to Tensor.copy_ of the float32 tensor.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8], help="Mi elements of the tensor")
    parser.add_argument("--densities", type=float, nargs="+", default=[0.01, 0.1, 0.4], help="share of values kept")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (the copy's, too)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} thread(s), {arguments.rounds} rounds")
    try:
        self_check(arguments.device)
    except AssertionError as error:
        print(f"not timed: {error}", file=sys.stderr)
        return 1
    for i, size in enumerate(arguments.sizes):
        for density in arguments.densities:
            n = size << 20
            case = Case(n, int(density * n), arguments.device)
            copy, ratios = measure(case, arguments.rounds, arguments.device)
            if i == 0 and density == arguments.densities[0]:
                print(f"{'elements':<9}{'density':>8}{'copy_ ms':>10}" + "".join(f"{name:>10}" for name in ratios))
            columns = "".join(f"{ratio:>9.2f}x" for ratio in ratios.values())
            print(f"{f'{size} Mi':<9}{density:>8}{copy:>10.3f}{columns}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
