"""SEPARATE's estimators with error feedback: how far the sum of what arrived is from the sum of the gradients.

    python benchmarks/separate_estimators.py

For gradients of white noise, noise with a mean as long as the noise ("strong") and 0.2 of it ("weak"): the error after
1024 steps, |sum g~ - sum g| / |sum g|, its projection on sum g (1: nothing is missing), and |e| / |g| at the end.
"""

from __future__ import annotations

import torch

from thinwire.codecs.projection import ESTIMATORS, Feedback, Projection
from thinwire.methods import Separate

N, RATIO, STEPS = 16384, 16, 1024


def study(method: Separate, mean: float, feedback: bool = True) -> tuple[float, float, float]:
    generator = torch.Generator().manual_seed(0)
    steady = torch.randn(1, N, generator=generator) * mean
    codec: Projection = method._make([("w", 0, N)])
    error = torch.zeros(1, N)
    given, got = torch.zeros(1, N, dtype=torch.float64), torch.zeros(1, N, dtype=torch.float64)
    wire, out = torch.empty(1, N // RATIO), torch.empty(1, N)
    for step in range(STEPS):
        gradient = torch.randn(1, N, generator=generator) + steady
        if feedback and method.reset and step % method.reset == 0:
            error.zero_()
        codec.set_step(step)
        codec.feedback = Feedback(error, error, method._keep) if feedback else None
        codec.decode(codec.encode(gradient, wire), out)
        given += gradient
        got += out
    projection = float((got * given).sum() / given.square().sum())
    return float((got - given).norm() / given.norm()), projection, float(error.norm() / gradient.norm())


def main() -> None:
    torch.set_num_threads(1)
    rows = [("paper, no feedback", Separate(estimator="paper"), False)]
    rows += [("paper, beta=0.95, reset 128", Separate(estimator="paper", beta=0.95, reset=128, restart="zero"), True)]
    rows += [(name, Separate(estimator=name), True) for name in reversed(ESTIMATORS)]
    print(f"ratio {RATIO}, {STEPS} steps, {N} values; error, projection, |e| / |g|\n")
    print("| estimator | white | strong mean | weak mean |\n|---|---:|---:|---:|")
    for label, method, feedback in rows:
        cells = [" ".join(f"{value:.3f}" for value in study(method, mean, feedback)) for mean in (0.0, 1.0, 0.2)]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
