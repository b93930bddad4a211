"""How far does the size of the smallest value that is sent move from one step to the next?

    python benchmarks/loss/thresholds.py --corpora DIR --model 842k --steps 200 --methods trickle trickle:merged

A GPU guesses that it stays (``src/thinwire/ops/sparse/triton.py``): a wrong guess costs it a pass over all values.
Ranks are played as in ``ladder.py``. The table has the share of k-th sizes that the guess misses, by the number of rows
that are chosen from at a time (N: what goes to each server) and the values of a tensor's row, in the first 20 steps and
in the second half of the run, with windows of half and twice the width beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import ladder
from thinwire.ops import sparse

NEAR = 1 << 20
"""How far, in units of the last place, a size may be from the guess: half of ``ops.sparse.triton.NEAR``."""
FIRST = 20
"""Steps of a beginning."""


class Watch:
    """Keeps the bits of the k-th sizes of every call of ``sparse.largest``, by what is chosen from."""

    def __init__(self) -> None:
        self.kths: dict[tuple[int, sparse.ListSegment, int], list[Tensor]] = defaultdict(list)
        self._largest = sparse.largest

    def largest(self, rows, residual, segments, total_out, positions, payload, *others, **more) -> None:  # type: ignore[no-untyped-def]
        self._largest(rows, residual, segments, total_out, positions, payload, *others, **more)
        for of in segments:
            if of.k:
                listed = payload[:, of.list_start : of.list_start + of.k].abs().view(torch.int32)
                self.kths[len(rows), of, len(segments)].append(listed.amin(1).clone())

    def moves(self, ranks: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield rows, width and the distances from step to step, (steps - 1, values). Ranks are played in turn."""
        for (rows, of, _), kths in self.kths.items():
            by_step = torch.stack(kths).view(-1, ranks * rows).long()
            yield rows, of.width, (by_step[1:] - by_step[:-1]).abs()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", required=True, help="the folder of the texts")
    parser.add_argument("--model", choices=ladder.MODELS, default="120k")
    parser.add_argument("--text", default="peps")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", default="4e-3")
    parser.add_argument("--methods", nargs="+", default=["trickle", "trickle:merged"])
    given = parser.parse_args()
    print("| method | rows | values of a row | first 20 steps | second half | half the window | twice |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for method in given.methods:
        watch = Watch()
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(sparse, "largest", watch.largest):
            words = (
                f"ladder.py --corpora {given.corpora} --model {given.model} --text {given.text} --ranks {given.ranks} "
                f"--lrs {given.lr} --lengths {given.steps} --data {Path(folder) / 'rows'} --out {folder}"
            )
            sys.argv = [*words.split(), "--methods", method]
            with contextlib.redirect_stdout(sys.stderr):
                ladder.main()
        moved: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for rows, width, distances in watch.moves(given.ranks):
            moved[rows, width].append(distances)
        for (rows, width), several in sorted(moved.items()):
            distances = torch.cat(several, 1)
            parts = distances[: FIRST - 1], *[distances[len(distances) // 2 :]] * 3
            shares = [
                float((part >= NEAR * factor).double().mean()) if len(part) else math.nan
                for part, factor in zip(parts, (1, 1, 0.5, 2), strict=True)
            ]
            print(f"| `{method}` | {rows} | {width} | " + " | ".join(f"{100 * share:.1f}%" for share in shares) + " |")


if __name__ == "__main__":
    main()
