"""Time of every codec on this machine, as a ratio to ``Tensor.copy_`` of the same float32 tensor.

    python benchmarks/speed/codecs.py [--sizes 1 8] [--rounds 21] [--threads 1] [--device cpu]
    python benchmarks/speed/codecs.py --errors

Each round times the copy and the three operations of a codec one after another, so that a busy machine slows all alike;
printed are medians, and in brackets the share of the copy's bandwidth at which the operation moves its own bytes (what
it reads and what it writes). An operation whose result is wrong is not timed: the program stops with exit status 1.

``--errors``: what int4 loses, with SDP4Bit's Hadamard transform and without, by how the values are distributed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from thinwire.base.random import Seeds
from thinwire.codecs import Bf16, Codec, Fp32, Int4, Int8, Integers
from timer import seconds

PEERS = 4
# Largest error over the largest value of a group: half a step of each format, with room for float32 rounding.
BOUNDS: dict[str | int, float] = {
    "Fp32": 0.0, "Bf16": 2.0**-8, 8: 0.5001 / 127, 4: 0.5001 / 7,
}  # fmt: skip


def codecs() -> list[Codec]:
    """One of each, and stochastic rounding."""
    integers = [kind(hadamard=hadamard) for hadamard in (False, True) for kind in (Int8, Int4)]
    rounded = [replace(codec, rounding="stochastic") for codec in integers]
    return [Fp32(), Bf16(), Int4(2048), *integers, *rounded]


def self_check(codec: Codec, device: torch.device) -> None:
    """Raise where a result is outside the error bound of the format, or decode_sum is not the sum of the decodes."""
    n = 8 * 4096
    rows = torch.randn(PEERS, n, generator=torch.Generator().manual_seed(1)).to(device)
    wire = torch.empty(PEERS, codec.wire_numel(n), dtype=codec.wire_dtype, device=device)
    codec.encode(rows, wire, seed=Seeds(((0, 4096, 1),)))
    values = codec.decode(wire, torch.full_like(rows, torch.nan))
    transformed = isinstance(codec, Integers) and codec.hadamard
    bound = BOUNDS[codec.bits if isinstance(codec, Integers) else type(codec).__name__]
    if codec.draws:
        bound *= 2
    errors = values - rows
    if transformed:
        # a transformed value is at most as long as its 32 neighbours, and a group's error as long as its transform's
        lengths = rows.view(-1, codec.group // 32, 32).norm(dim=2).amax(1)
        within = errors.view(-1, codec.group).norm(dim=1) <= lengths * bound * codec.group**0.5
    else:
        groups = rows.view(PEERS, -1, codec.group if isinstance(codec, Integers) else 128)
        within = errors.view_as(groups).abs() <= groups.abs().amax(2, keepdim=True) * bound
    if not bool(within.all()):
        raise AssertionError(f"{codec}: decode(encode(x)) is outside the error bound")
    total = codec.decode_sum(wire, torch.full((n,), torch.nan, device=device), 1 / PEERS)
    expected = values[0].clone()
    for row in values[1:]:
        expected += row
    # one transform of the sum is a sum of transforms up to rounding
    rounding = 1e-5 if transformed else 0.0
    if not torch.allclose(total, expected * (1 / PEERS), rtol=0, atol=rounding):
        raise AssertionError(f"{codec}: decode_sum is not the sum of the decodes in rank order")


def measure(codec: Codec, n: int, rounds: int, device: torch.device) -> tuple[float, list[float]]:
    """Median milliseconds of the copy, and the median ratios of encode, decode and decode_sum to it."""
    row = torch.randn(1, n, device=device)
    target = torch.zeros_like(row)
    seed = Seeds(((0, n, 1),))
    wire = torch.zeros(PEERS, codec.wire_numel(n), dtype=codec.wire_dtype, device=device)
    codec.encode(row.expand(PEERS, n), wire, seed=seed)
    operations: list[Callable[[], object]] = [
        lambda: codec.encode(row, wire[:1], seed=seed),
        lambda: codec.decode(wire[:1], target),
        lambda: codec.decode_sum(wire, target[0], 1 / PEERS),
    ]
    for operation in operations:
        operation()
    copies: list[float] = []
    ratios: list[list[float]] = [[] for _ in operations]
    for _ in range(rounds):
        copy = seconds(lambda: target.copy_(row), device)
        copies.append(copy)
        for operation, samples in zip(operations, ratios, strict=True):
            samples.append(seconds(operation, device) / copy)
    return 1e3 * statistics.median(copies), [statistics.median(samples) for samples in ratios]


def print_errors() -> None:
    """Relative L2 error of int4 in groups of 128, to the nearest."""
    draw, n = np.random.default_rng(0), 512 * 256
    samples = {
        "Gauss": draw.standard_normal(n),
        "Student-t(3)": draw.standard_t(3, n),
        "Student-t(2)": draw.standard_t(2, n),
        "Gauss, one in 512 x100": np.where(np.arange(n) % 512 == 5, 100.0, 1.0) * draw.standard_normal(n),
    }
    print("| values | without | with the transform |\n|---|---:|---:|")
    for name, values in samples.items():
        rows = torch.from_numpy(values).float().unsqueeze(0)
        errors = []
        for codec in (Int4(), Int4(hadamard=True)):
            wire = codec.encode(rows, torch.empty(1, codec.wire_numel(n), dtype=codec.wire_dtype))
            errors.append(float((codec.decode(wire, torch.empty_like(rows)) - rows).norm() / rows.norm()))
        print(f"| {name} | {errors[0]:.3f} | {errors[1]:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="Ratios of codec times to Tensor.copy_ of the float32 tensor.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8], help="Mi elements of the tensor")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (the copy's, too)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--errors", action="store_true", help="print errors of int4 instead of times")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.errors:
        print_errors()
        return 0

    print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} thread(s), {arguments.rounds} rounds")
    print(f"{'codec':<74}{'elements':>10}{'bytes/value':>13}{'copy_ ms':>10}{'encode':>16}{'decode':>16}{'sum(4)':>16}")
    for codec in codecs():
        try:
            self_check(codec, arguments.device)
        except AssertionError as error:
            print(f"not timed: {error}", file=sys.stderr)
            return 1
        for size in arguments.sizes:
            n = size << 20
            copy, ratios = measure(codec, n, arguments.rounds, arguments.device)
            wire = codec.wire_bytes(n)
            moved = (4 * n + wire, wire + 4 * n, PEERS * wire + 4 * n)
            shares = [nbytes / (8 * n) / ratio for nbytes, ratio in zip(moved, ratios, strict=True)]
            columns = "".join(f"{r:>8.2f}x{f'({share:.0%})':>7}" for r, share in zip(ratios, shares, strict=True))
            print(f"{codec!r:<74}{f'{size} Mi':>10}{codec.wire_bytes(n) / n:>13.3f}{copy:>10.3f}{columns}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
