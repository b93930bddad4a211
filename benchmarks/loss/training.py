"""Validation loss of each method against dense, with the same data, seeds and steps: tables of docs/runs.md.

    python benchmarks/loss/training.py --corpus peps-train.txt.xz --valid peps-valid.txt.xz --out runs/training
    python benchmarks/loss/training.py ... --only "radius:paper-d0.5(smallest=16384)" --seeds 0

Every run is a ``thinwire train`` of its own; a run that is there already is not repeated, so the table can be made in
pieces, and --table prints it without training. A gap's ± is half of a 95% interval, as in ``thinwire compare``. On a
GPU: --preset gpt-125m --steps 5000 --batch-size 16.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

from thinwire.lab import verdict

METHODS = {
    "dense": "dense",
    "bf16": "bf16",
    "int8, error feedback": "int8(smallest={small},feedback='gradients')",
    "Radius d=0.5, T=200 (paper)": "radius:paper-d0.5",
    "Radius d=0.4, T=200 (paper)": "radius:paper",
    "Radius d=0.1, T=200 (paper)": "radius:paper-d0.1",
    "Radius d=0.5, T=50": "radius(density=0.5,T=50,residual_scale=1.0,smallest={small})",
    "Radius d=0.5, T=10": "radius(density=0.5,T=10,residual_scale=1.0,smallest={small})",
    "Radius d=0.5, T=4": "radius(density=0.5,T=4,residual_scale=1.0,smallest={small})",
    "Radius d=0.5, T=50, residual_scale=0.25": "radius(density=0.5,T=50,residual_scale=0.25,smallest={small})",
    "SEPARATE 16x, cyclic SRHT (ours)": "separate(beta=None,ratio=16,smallest={small})",
    "SEPARATE 16x (paper)": "separate:paper(smallest={small})",
    "TAGC 10x (ours)": "tagc(feedback='gradients',smallest={small})",
    "TAGC 10x (paper)": "tagc:paper(smallest={small})",
    "SEPARATE 16x, cyclic SRHT, no feedback": "separate(ratio=16,beta=1.0,smallest={small})",
    "SEPARATE 16x, cyclic SRHT, from 15%": "separate(beta=None,ratio=16,start=0.15,smallest={small})",
    "SEPARATE 16x (paper), from 15%": "separate:paper(start=0.15,smallest={small})",
    "TAGC d=0.05, shared mask, from 15%": (
        "tagc(feedback='gradients',theta=0.95,mask='shared',start=0.15,smallest={small})"
    ),
    "PowerSGD rank 4": "powersgd(feedback='gradients',rank=4,smallest={small})",
    "top-k d=0.05, error feedback": "topk(feedback='gradients',density=0.05,smallest={small})",
    "top-k d=0.01, error feedback": "topk(feedback='gradients',density=0.01,smallest={small})",
    "top-k d=0.4 from 15%, error feedback": "topk(feedback='gradients',density=0.4,start=0.15,smallest={small})",
    "top-k d=0.4 from 15%, no feedback": ("topk(density=0.4,start=0.15,feedback=None,smallest={small})"),
    "top-k d=0.01 from 15%, error feedback": "topk(feedback='gradients',density=0.01,start=0.15,smallest={small})",
    "top-k d=0.01 from 15%, no feedback": ("topk(density=0.01,start=0.15,feedback=None,smallest={small})"),
    "ZeRO++ (8-bit weights)": "zeropp(smallest={small})",
    "ZeRO++ as the paper compares it (4-bit weights)": (
        "sdp4bit(weights='plain',weight_bits=4,intra_bits=4,hadamard=False,send='*')"
    ),
    "SDP4Bit (ours)": "sdp4bit(smallest={small})",
    "SDP4Bit (paper)": "sdp4bit:paper",
    "qWD alone": "sdp4bit:qwd",
    "qW alone": "sdp4bit:qw",
    "TLq-HS alone": "sdp4bit:tlq-hs",
    "TLq alone": "sdp4bit:tlq",
    "ULq alone": "sdp4bit:ulq",
    "QSDP": "qsdp(smallest={small})",
    "LoCo": "loco(smallest={small})",
    "1-bit Adam": "onebit-adam(smallest={small})",
    "AdamS dense": "dense --optimizer adams",
    "SCAPE d=0.1 (paper)": "scape:paper-d0.1 --optimizer adams",
    "SCAPE d=0.01 (paper)": "scape:paper --optimizer adams",
    "SCAPE d=0.1": "scape(density=0.1,smallest={small}) --optimizer adams",
    "SCAPE d=0.01": "scape(smallest={small}) --optimizer adams",
}
REFERENCE = {"adamw": "dense", "adams": "AdamS dense"}


def run(label: str, method: str, seed: int, args: argparse.Namespace) -> None:
    out = directory(label, seed, args)
    if (out / "summary.json").exists():
        return
    method, *options = method.split(" --")
    command = [
        sys.executable, "-m", "thinwire", "train", "--method", method, "--engine", args.engine, "--preset", args.preset,
        "--steps", str(args.steps), "--seed", str(seed), "--ranks", str(args.ranks), "--seq-len", str(args.seq_len),
        "--batch-size", str(args.batch_size), "--corpus", args.corpus, "--valid", args.valid, "--out", str(out),
        "--eval-every", str(max(args.steps // 8, 1)), "--eval-sequences", "256", "--lr", str(args.lr),
        "--no-checkpoints", "--overwrite",
    ]  # fmt: skip
    if args.ranks_per_node:
        command += ["--ranks-per-node", str(args.ranks_per_node)]
    for option in options:
        command += f"--{option}".split()
    print(" ".join(command[2:]), flush=True)
    log = out.with_name(f"{out.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        print(f"{label}, seed {seed}: exit status {done.returncode}, see {log}", flush=True)


def directory(label: str, seed: int, args: argparse.Namespace) -> Path:
    name = re.sub(r"[^A-Za-z0-9.=]+", "-", label).strip("-")
    return Path(args.out) / args.engine / f"{name}-seed{seed}"


def table(args: argparse.Namespace, methods: dict[str, str]) -> str:
    found: dict[str, list[dict]] = {}
    for label in methods:
        for seed in args.seeds:
            file = directory(label, seed, args) / "summary.json"
            if file.exists():
                windows = verdict.read_windows(file.with_name(verdict.WINDOWS))
                run = {"seed": seed, "windows": windows, "summary": json.loads(file.read_text())}
                found.setdefault(label, []).append(run)
    dense = {(o, run["seed"]): run for o, name in REFERENCE.items() for run in found.get(name, [])}
    lines = [
        "| method | validation loss (by seed) | gap to dense | sent per step | share of dense | skipped |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for label, runs in found.items():
        summaries = [run["summary"] for run in runs]
        losses = ", ".join(f"{summary['valid_loss']:.4f}" for summary in summaries)
        optimizer = "adams" if "adams" in methods[label] else "adamw"
        references = [dense.get((optimizer, run["seed"])) for run in runs]
        pairs = [(run, of) for run, of in zip(runs, references, strict=True) if of]
        span = verdict.above(pairs) if pairs else None
        gap = "-" if span is None else f"{span.mean:+.2%} ± {span.half:.2%}"
        sent = statistics.mean(sum(summary["wire_bytes_per_step"].values()) for summary in summaries)
        share = sent / statistics.mean(summary["dense_bytes_per_step"] for summary in summaries)
        skipped = sum(summary["skipped_steps"] for summary in summaries)
        lines.append(f"| {label} | {losses} | {gap} | {sent / 1e6:.2f} MB | {share:.1%} | {skipped} |")
    return "\n".join(lines)


def draw(args: argparse.Namespace, methods: dict[str, str]) -> None:
    """Loss curves of the first seed, and their distance from dense: at most eight to a panel, dense in each."""
    curves = {}
    for label in methods:
        file = directory(label, args.seeds[0], args) / "metrics.jsonl"
        if file.exists() and (file.parent / "summary.json").exists():
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            curves[label] = {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}
    if "dense" not in curves:
        return
    import matplotlib.pyplot as plt

    from thinwire.lab import plots

    dense, rest = curves["dense"], [label for label in curves if label != "dense"]
    size = plots.PANEL_CURVES - 1
    panels = [rest[at : at + size] for at in range(0, max(len(rest), 1), size)]
    with plt.rc_context(plots.STYLE):
        figure, grid = plt.subplots(len(panels), 2, figsize=(15, 5 * len(panels)), squeeze=False)
        for (left, right), labels in zip(grid, panels, strict=True):
            seen = []
            for label in ["dense", *labels]:
                tint = plots.colour(methods[label].partition(" ")[0])
                dashes = plots.DASHES[seen.count(tint) % len(plots.DASHES)]
                seen.append(tint)
                steps = [step for step in curves[label] if step in dense and step > 0]
                gaps = [100 * (curves[label][step] / dense[step] - 1) for step in steps]
                left.plot(steps, [curves[label][step] for step in steps], dashes, color=tint, marker=".")
                right.plot(steps, gaps, dashes, color=tint, marker=".", label=label)
            plots.label_curves(right)
            left.set_ylabel("validation loss, nats per byte")
            right.set_ylabel("above dense at the same step, %")
        for axes in grid[-1]:
            axes.set_xlabel("optimizer steps")
        plots.save(figure, Path(args.out) / f"training-{args.engine}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--valid", required=True)
    parser.add_argument("--out", default="runs/training")
    parser.add_argument("--only", nargs="*", help="labels of the table, or methods as thinwire takes them")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--engine", default="ddp")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, help="take the ranks for so many per node")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--smallest", type=int, default=16384, help="elements below which a tensor stays dense")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    chosen = {label: METHODS.get(label, label) for label in args.only} if args.only else METHODS
    methods = {label: method.format(small=args.smallest) for label, method in chosen.items()}
    if not args.table:
        for seed in args.seeds:
            for label, method in methods.items():
                run(label, method, seed, args)
    print(table(args, methods))
    draw(args, methods)


if __name__ == "__main__":
    main()
