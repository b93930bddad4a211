"""Digests of the weights after 20 steps of every method on every engine: does a change of the code change a result?

    python benchmarks/proofs/digests.py > before.json      # and later, or in another checkout
    python benchmarks/proofs/digests.py --beside before.json

Ranks are processes that talk by gloo: 2, 3 and 4 of them, and two nodes of two. A digest is that of the bits of all
weights; beside it stand the bytes that rank 0 has sent per step, by link, and for weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import torch

import ranks
import thinwire
from engines import adamw, build, train
from models import Net, flat

STEPS = 20
KNOBS = {
    "radius": "T=5, start=2, density=0.3", "scape": "density=0.1, warmup=5", "separate": "ratio=4, block=16",
    "tagc": "theta=0.9", "powersgd": "rank=2", "topk": "density=0.1", "dgc": "density=0.1",
    "sign": "group=64", "onebit-adam": "warmup=5, group=64", "sdp4bit": "weight_group=64",
    "local-steps": "every=5",
}  # fmt: skip
MORE = (
    "int8(smallest=0, feedback='gradients')", "sdp4bit:paper(weight_group=64)", "sdp4bit:ulq", "tagc:paper(smallest=0)",
    "tagc(feedback='gradients', theta=0.95, smallest=0)", "separate:paper(smallest=0, block=64)",
    "scape(density=0.3, warmup=3, smallest=0, refresh=2)", "trickle:merged(smallest=0)",
    "powersgd(rank=2, smallest=0, feedback='gradients')", "topk(density=0.1, smallest=0, feedback='gradients')",
    "local-steps(every=5, outer='int8:smallest:0:feedback:gradients')",
    "onebit-adam(warmup=5, warmup_bits=4, smallest=0)",
    "scape(density=0.01, warmup=4, smallest=0, offload=True)",
    "radius(T=4, start=0, density=0.2, smallest=0, residual_scale=0.5)",
)  # fmt: skip
NO_SMALLEST = ("dense", "fp32", "bf16", "none", "local-steps")


def specs() -> list[str]:
    from thinwire.methods import TABLE

    found = []
    for cls in TABLE:
        knobs = KNOBS.get(cls.name, "")
        if cls.name not in NO_SMALLEST:
            knobs = f"{knobs}, smallest=0" if knobs else "smallest=0"
        found.append(f"{cls.name}({knobs})")
    return [*found, *MORE]


def play(rank: int, world: int, kinds: list[str], methods: list[str]) -> dict[str, object]:
    """Every method on every engine in one process group."""
    found: dict[str, object] = {}
    for kind in kinds:
        for method in methods:
            model = build(kind, world, net=partial(Net, layers=3))
            name = method.split("(")[0]
            if name == "scape":
                optimizer = thinwire.AdamS(model.parameters(), lr=3e-3)
            elif name == "dgc":
                optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
            else:
                optimizer = adamw(model)
            try:
                wire = thinwire.compress(model, optimizer, method, steps=STEPS)
                train(model, optimizer, rank, range(STEPS), wire)
            except thinwire.ThinwireError as error:
                found[f"{method} {kind}"] = f"refused: {error}"
                continue
            weights = flat(model)
            digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
            stats = wire.stats()
            sent = [round(nbytes) for _, nbytes in sorted(stats["wire_bytes_per_step"].items())]  # between, in nodes
            found[f"{method} {kind}"] = [digest, *sent, round(stats["weight_bytes_per_step"])]
            wire.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="digests to compare with: what differs is printed")
    parser.add_argument("--methods", nargs="*", help="these alone, as written on the command line")
    options = parser.parse_args()
    found = {}
    both = ["ddp", "fsdp2"]
    cases = ((2, 1, both), (3, 1, both), (4, 1, ["ddp", "fsdp2-keep"]), (4, 2, [*both, "hsdp"]))
    for world, per_node, kinds in cases:
        of = ranks.run(play, world, kinds, options.methods or specs(), seconds=1200, LOCAL_WORLD_SIZE=str(per_node))
        found |= {f"{world} ranks, {per_node} per node: {case}": value for case, value in of[0].items()}
    if options.beside is None:
        print(json.dumps(found, indent=0))
        return 0
    before = json.loads(options.beside.read_text())
    differ = [case for case in found if case in before and found[case] != before[case]]
    for case in differ:
        print(f"{case}\n  before {before[case]}\n  now    {found[case]}")
    print(f"{len(found)} cases, {len(set(found) - set(before))} of them new, {len(differ)} differ")
    return bool(differ)


if __name__ == "__main__":
    raise SystemExit(main())
