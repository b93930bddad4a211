"""Time of masks, sketches and projections on this machine, as a ratio to ``Tensor.copy_`` of the same float32 tensor.

    python benchmarks/speed/sparse.py [--sizes 1 8] [--rounds 9] [--device cpu]

Each round times the copy and all operations one after another, so that a busy machine slows all alike; printed are
medians. Results are checked against each other before anything is timed: values off the mask + values at it = input,
bit for bit; every element comes out of its sketch; a projection and what it leaves over make the input.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from thinwire.base.random import random_order, random_signs
from thinwire.ops import mask, projection, sketch, sparse
from timer import seconds

DENSITIES = (0.0125, 0.05, 0.1, 0.4)
LOAD, RATIO, BLOCK = 0.7, 16, 256


def operations(n: int, device: torch.device) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    heavy = torch.randn(1, n, generator=generator) * torch.randn(1, n, generator=generator).mul_(0.7).exp_()
    heavy = heavy.to(device)
    residual, out, rest = torch.randn(1, n, generator=generator).to(device), heavy.clone(), heavy.clone()
    found: dict[str, Callable[[], object]] = {"copy_": lambda: out.copy_(heavy)}

    def add(density: float) -> None:
        k = int(density * n)
        words = torch.zeros(1, n // mask.WORD, dtype=torch.int64, device=device)
        payload = torch.empty(1, k, device=device)
        largest = (sparse.ListSegment(0, n, k, 0),)
        positions = torch.empty(1, k, dtype=torch.int32, device=device)
        sparse.marked(heavy, largest, words)
        sparse.largest(heavy, None, largest, None, positions, payload)
        mask.gather_keep(heavy, None, words, payload, rest)
        assert torch.equal(mask.scatter(payload, words, out) + rest, heavy)
        found[f"top-k mask, d={density}"] = lambda: sparse.marked(heavy, largest, words)
        found[f"top-k list + feedback, d={density}"] = lambda: sparse.largest(
            heavy, residual, largest, rest, positions, payload
        )
        found[f"gather + feedback, d={density}"] = lambda: mask.gather_keep(heavy, residual, words, payload, rest)
        found[f"scatter, d={density}"] = lambda: mask.scatter(payload, words, out)
        if density > 0.05:
            return
        parts = sketch.SketchSegments([sketch.SketchSegment(0, n, k, 0, k, 0, int(k / LOAD / 3) + 8, 1)], device)
        at, sent = torch.empty(1, k, dtype=torch.int32, device=device), torch.empty_like(payload)
        wire, left = torch.empty(1, parts.wire_numel, device=device), words.clone()
        sketch.gather(heavy, words, parts, at, sent)
        sketch.round_to(sent, torch.tensor([2.0**-14], device=device), parts, torch.empty_like(sent))
        sketch.encode(sent, at, parts, heavy, wire)
        sketch.peel(wire, words, parts, 0, out, left)
        assert not left.any() and torch.equal(out, mask.scatter(sent, words, torch.empty_like(out)))
        found[f"sketch, {density} of the values"] = lambda: sketch.encode(sent, at, parts, heavy, wire)
        found[f"peel, {density} of the values"] = lambda: sketch.peel(wire, words, parts, 0, out, left)

    for density in DENSITIES:
        add(density)
    signs, chosen = random_signs(1, BLOCK, device), random_order(2, BLOCK, device)[: BLOCK // RATIO].contiguous()
    small = torch.empty(1, n // RATIO, device=device)
    projection.srht_project(heavy, None, signs, chosen, small, rest)
    assert torch.allclose(projection.srht_reconstruct(small, signs, chosen, out) + rest, heavy, atol=1e-3)
    found["SRHT 16x project + feedback"] = lambda: projection.srht_project(heavy, residual, signs, chosen, small, rest)
    found["SRHT 16x reconstruct"] = lambda: projection.srht_reconstruct(small, signs, chosen, out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 8], help="Mi elements")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(args.device)
    table: dict[str, list[str]] = {}
    for size in args.sizes:
        chosen = operations(size << 20, device)
        times: dict[str, list[float]] = {name: [] for name in chosen}
        for _ in range(args.rounds):
            for name, function in chosen.items():
                times[name].append(seconds(function, device))
        for name, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found, times["copy_"], strict=True))
            table.setdefault(name, []).append(f"{ratio:.2f}x ({statistics.median(found) * 1e3:.2f} ms)")
    print("| operation | " + " | ".join(f"{size} Mi" for size in args.sizes) + " |")
    print("|---" + "|---:" * len(args.sizes) + "|")
    for name, cells in table.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
