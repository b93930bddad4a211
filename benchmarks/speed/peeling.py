"""After how many rounds nothing more can be peeled of a count sketch, if all elements alone in a cell go at once.

    python benchmarks/speed/peeling.py

Printed are, by load (elements per cell) and elements, the median and the most rounds of as many random sketches, and of
how many of them more is left than must be after ``thinwire.ops.sketch.ROUNDS``, where a GPU stops.
"""

from __future__ import annotations

import math
import statistics

import numpy as np

from thinwire.ops.sketch import ROUNDS

LOADS = (0.5, 0.7, 0.75, 0.77, 0.79)
TRIALS = {200: 3000, 2000: 1000, 20_000: 100, 200_000: 10, 2_000_000: 2}
"""Elements -> sketches of so many."""


def rounds(elements: int, load: float, generator: np.random.Generator) -> int:
    """Of one sketch with the cells that ``TAGC`` gives it."""
    cells = math.ceil(elements / load / 3) + 8
    waiting = np.stack([generator.integers(0, cells, elements) + table * cells for table in range(3)])
    counts = np.bincount(waiting.ravel(), minlength=3 * cells)
    for number in range(elements):
        found = (counts[waiting] == 1).any(0)
        if not found.any():
            return number
        counts -= np.bincount(waiting[:, found].ravel(), minlength=3 * cells)
        waiting = waiting[:, ~found]
    return elements


def main() -> None:
    generator = np.random.default_rng(0)
    print("| load |" + "".join(f" {elements:,} |" for elements in TRIALS) + "\n|--:|" + "--:|" * len(TRIALS))
    for load in LOADS:
        line = f"| {load} |"
        for elements, trials in TRIALS.items():
            found = [rounds(elements, load, generator) for _ in range(trials)]
            late = sum(number > ROUNDS for number in found)
            line += f" {statistics.median(found):.0f}, {max(found)}; {late} of {trials} |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
