"""What does it cost that a part of a model stays dense beside steps? The training loss of the tiny model in one step.

    python benchmarks/beside.py --corpora DIR "trickle(smallest=1024)" "trickle(smallest=1024,dense='*attention.*')"

With ``--clip`` the norm that gradients are clipped at. What came of it is in docs/training.md, "What stays dense beside
steps".
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

import regimes
import virtual

STEP = 180


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="+")
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--clip", type=float, nargs="+", default=[1.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method in args.methods:
        for clip in args.clip:
            job = regimes.Job("scratch", "peps", "tiny", 4, method, args.lr, 0, 800, "")
            config = replace(job.config(), clip=clip)
            text = regimes.windows_of(args.corpora, regimes.TEXTS["peps"][0], config.sequence, config.seed)
            losses = virtual.train(config, text, batched=True).losses
            print(f"{method}, clip {clip:g}: {losses[STEP]:.3f} in step {STEP}, {losses[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
