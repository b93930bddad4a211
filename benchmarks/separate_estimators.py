"""SEPARATE's estimators with error feedback: how far the sum of what arrived is from the sum of the gradients; time.

    python benchmarks/separate_estimators.py [--ratio 16] [--time-only]

Gradients: white noise; noise with a mean as long as the noise ("strong") and 0.2 of it ("weak"), which turns slowly (an
AR(1) process, 200 steps). Printed for 1024 steps: the error |sum g~ - sum g| / |sum g|, the projection of sum g~ on
sum g (1: nothing is missing), and |e| / |g| at the end; "overflow" with the step in which |e| left float32.

Time: encoding with feedback, and decoding, of 8 Mi values in one tensor, one thread, with the random numbers of a new
step each time, as a ratio to ``Tensor.copy_`` of the same tensor. The thread's own time on the processor, medians of
interleaved rounds, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from thinwire.bucket import Bucket
from thinwire.codecs import Residual
from thinwire.codecs.projection import ESTIMATORS, Projection
from thinwire.methods import SEPARATE

N, STEPS, TURN = 16384, 1024, 200
SIZE, ROUNDS = 8 * 2**20, 7


def study(method: SEPARATE, strength: float, feedback: bool) -> str:
    generator = torch.Generator().manual_seed(0)
    steady = torch.randn(1, N, generator=generator)
    error, gradient = torch.zeros(1, N), torch.empty(1, N)
    given, got = torch.zeros(1, N, dtype=torch.float64), torch.zeros(1, N, dtype=torch.float64)
    wire, out = torch.empty(1, N // method.ratio), torch.empty(1, N)
    for step in range(STEPS):
        turn = torch.randn(1, N, generator=generator)
        steady = steady * math.sqrt(1 - 2 / TURN) + turn * math.sqrt(2 / TURN)
        gradient = torch.randn(1, N, generator=generator) + strength * steady
        codec, rest = method.codec_for([("w", 0, N)], step), torch.empty_like(error)
        codec.encode(gradient.clone(), wire, residual=Residual(error, rest) if feedback else None)
        codec.decode(wire, out)
        if feedback:
            error = rest.lerp_(error, method._keep)
        if not math.isfinite(float(error.norm())):
            return f"overflow, step {step}"
        if method.reset and step % method.reset == 0:
            error.zero_()
        given += gradient
        got += out
    projection = float((got * given).sum() / given.square().sum())
    relative = float((got - given).norm() / given.norm())
    return f"{relative:.3f}  {projection:.3f}  {float(error.norm() / gradient.norm()):.2f}"


def accuracy(ratio: int) -> None:
    dropped = {"reset": 128, "restart": "zero"}
    rows = [
        ("paper as printed, beta=0.95 (forced)", {"estimator": "paper", "beta": 0.95, "update": "printed"}, True),
        ("paper, no feedback", {"estimator": "paper"}, False),
        ("paper, beta=0.95 of the old error, reset 128", {"estimator": "paper", "beta": 0.95, **dropped}, True),
        *((name, {"estimator": name}, True) for name in reversed(ESTIMATORS)),
        ("shrunk, reset 128", {"estimator": "shrunk", **dropped}, True),
        ("cyclic_srht, reset 128", {"estimator": "cyclic_srht", **dropped}, True),
    ]
    print(f"ratio {ratio}, {STEPS} steps, {N} values: error, projection, |e| / |g|\n")
    print("| estimator | white | strong mean | weak mean |\n|---|---:|---:|---:|")
    for label, knobs, feedback in rows:
        method = SEPARATE(ratio=ratio, force=True, **knobs)  # type: ignore[arg-type]
        cells = [study(method, strength, feedback) for strength in (0.0, 1.0, 0.2)]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start


def timing(ratio: int) -> None:
    gradient, error, out = torch.randn(1, SIZE), torch.randn(1, SIZE), torch.empty(1, SIZE)
    rows, rest = gradient.clone(), torch.empty(1, SIZE)
    wire = torch.empty(1, SIZE // ratio)
    tasks: dict[str, Callable[[], object]] = {"copy_": lambda: out.copy_(gradient)}
    labels = []
    for estimator in ESTIMATORS:
        for block in (256, 512, 1024):
            method = SEPARATE(ratio=ratio, estimator=estimator, block=block)
            bucket = Bucket([], rows=1, owner=False, group=1, dtype=torch.float32, device=out.device)
            steps = itertools.count()

            def encode(method: SEPARATE = method, steps: Iterator[int] = steps, bucket: Bucket = bucket) -> None:
                codec = method.codec_for([("w", 0, SIZE)], next(steps), once=bucket.once)
                codec.encode(rows, wire, residual=Residual(error, rest), space=bucket.buffer)
                if method._keep:
                    rest.lerp_(error, method._keep)

            codec = method.codec_for([("w", 0, SIZE)], 0)

            def decode(codec: Projection = codec, bucket: Bucket = bucket) -> None:
                codec.decode(wire, out, space=bucket.buffer)

            label = f"{estimator} | {block}"
            labels.append(label)
            tasks[f"{label} encode"], tasks[f"{label} decode"] = encode, decode
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(ROUNDS + 1):
        for name, task in tasks.items():
            taken = seconds(task)
            if round_:  # the first one compiles and takes memory
                times[name].append(taken)
        rows.copy_(gradient)  # or what the matrices' encoding adds to them would grow from round to round
    copy = statistics.median(times["copy_"])
    print(f"\n{SIZE} values, ratio {ratio}; copy_: {1e3 * copy:.1f} ms\n")
    print("| estimator | block | encode + feedback | decode | both, ms |\n|---|---:|---:|---:|---:|")
    for label in labels:
        encode_s, decode_s = (statistics.median(times[f"{label} {what}"]) for what in ("encode", "decode"))
        both = 1e3 * (encode_s + decode_s)
        print(f"| {label} | {encode_s / copy:.1f}x | {decode_s / copy:.1f}x | {both:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=int, default=16)
    parser.add_argument("--time-only", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.time_only:
        accuracy(arguments.ratio)
    timing(arguments.ratio)


if __name__ == "__main__":
    main()
