"""What does it cost that a part of a model stays dense beside steps? The training loss in one step, and held out.

    python benchmarks/loss/beside.py --corpora DIR "trickle(smallest=1024)" \\
        "trickle(smallest=1024,dense='*attention.*')"
    python benchmarks/loss/beside.py --corpora DIR --model small --text wikitext "trickle(smallest=65536)"

With ``--clip`` the norm that gradients are clipped at. What came of it is in docs/log.md, "what may stay dense beside
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
    parser.add_argument("--model", choices=regimes.MODELS, default="tiny")
    parser.add_argument("--text", choices=regimes.TEXTS, default="peps")
    parser.add_argument("--clip", type=float, nargs="+", default=[1.0])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for method in args.methods:
        for clip in args.clip:
            job = regimes.Job("scratch", args.text, args.model, 4, method, args.lr, 0, 800, "")
            config = replace(job.config(), clip=clip)
            names, length = regimes.TEXTS[args.text], config.sequence_length
            text, held_out = (regimes.windows_of(args.corpora, name, length, config.seed) for name in names)
            trained = virtual.train(config, text, batched=True)
            sequences = regimes.batches(held_out.spread(regimes.EVALUATED), 16)
            valid = virtual.evaluate(trained.ranks[0].replica.model, sequences)
            print(
                f"{method}, {args.model}, {args.text}, lr {args.lr:g}, clip {clip:g}: {trained.losses[STEP]:.3f} in "
                f"step {STEP}, {trained.losses[-1]:.3f} in the last; held out {valid:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
