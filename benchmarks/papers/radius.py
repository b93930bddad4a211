"""Radius (MLSys 2025): one mask for T steps."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from frame import Claim, Headline, Paper, Published, Result, Settings, bars, curves, headline, in_proportion

PAPER = Paper("radius", "Radius (MLSys 2025)")
FIGURES = Published.read("radius")
SPEED = "Table 3"
STEPS = 600
SCALE = 10
"""The paper's T over ours: runs are 500 times as short, and a residual must return more often than three times."""
SMALL = "120,000 parameters, 4 virtual ranks and 600 steps of bytes by default, in place of GPT-2.0B and 64 GPUs"
START = 0.2
"""Share of the run that is dense first: 60,000 of 300,000 steps in the paper."""


def radius(density: float, interval: int, start: float = START) -> str:
    return f"radius:paper(density={density},T={interval},start={start})"


@PAPER.experiment("headline", minutes=6)
def speedup(settings: Settings) -> Result:
    """1.27x at density 0.4, at the paper's ratio of communication to computing, with its loss."""
    dense, exchange = (FIGURES(SPEED, "dense", quantity) for quantity in ("step", "all-reduce"))
    claim = Headline(
        method="radius(density=0.4,T=200,start=0)",
        dense_ms=dense,
        none_ms=dense - exchange,
        speedup=dense / FIGURES(SPEED, "d=0.4", "step"),
        derived=f"{SPEED}: {dense} ms a step, {exchange} ms of them all-reduce, which Megatron did not overlap",
    )
    return headline(settings, "radius", claim)


@PAPER.experiment("table-2", minutes=4)
def perplexity(settings: Settings) -> Result:
    """Perplexity and training time by density and by interval."""
    from measures import curve, loss, share, trained

    source, methods = "Table 2", {"dense": "dense"}
    for density, interval in ((0.9, 200), (0.5, 200), (0.4, 200), (0.4, 400), (0.1, 200)):
        methods[f"d={density}, T={interval}"] = radius(density, interval // SCALE)
    runs = trained(settings, methods, STEPS)
    rows = []
    for label, seeds in runs.items():
        rows.append({
            "run": label,
            "valid ppl": math.exp(loss(seeds)),
            "valid ppl (paper)": FIGURES(source, label, "valid ppl"),
            "over dense": math.exp(loss(seeds) - loss(runs["dense"])),
            "over dense (paper)": FIGURES(source, label, "valid ppl") / FIGURES(source, "dense", "valid ppl"),
            "bytes over dense": share(seeds),
            "days over dense (paper)": FIGURES(source, label, "days") / FIGURES(source, "dense", "days"),
        })  # fmt: skip
    gaps = {row["run"]: row["over dense"] for row in rows}
    printed = {row["run"]: row["over dense (paper)"] for row in rows}
    dense_enough = [label for label in list(methods)[1:] if "0.1" not in label]
    limit = max(printed[label] for label in dense_enough)
    worst = max(gaps[label] for label in dense_enough)
    sparsest = list(methods)[-1]
    return Result(
        rows,
        [
            f"{SMALL}. Perplexity is by byte.",
            f"The intervals are the paper's over {SCALE}: T=200 is 20 steps here. The first {100 * START:.0f}% of the "
            "run are dense, as in the paper.",
            "Days are not measured here (table-3 measures steps); bytes are those of the whole run, with its dense "
            "part.",
        ],
        [
            Claim(f"d >= 0.4 has at most {limit:.4f} times dense's perplexity; here {worst:.4f}", worst <= limit),
            Claim(f"d = 0.1 is worse than every larger density; here {gaps[sparsest]:.4f}", gaps[sparsest] > worst),
        ],
        [
            curves({label: curve(seeds) for label, seeds in runs.items()}, "step", "validation loss, nats per byte"),
            bars(rows[1:], "run", ["over dense", "over dense (paper)"], "perplexity over dense's", "at the end"),
        ],
    )  # fmt: skip


@PAPER.experiment("table-3", minutes=5)
def breakdown(settings: Settings) -> Result:
    """A step's parts: dense, PowerSGD and three densities, at the paper's ratio of communication to computing."""
    from measures import WIDTHS, compared, sent

    powersgd_rank = in_proportion(128, WIDTHS["gpt-2.0b"], WIDTHS["net20m"])
    methods = {
        "dense": "dense",
        "powersgd": f"powersgd(rank={powersgd_rank})",
        **{f"d={density}": f"radius(density={density},T=200,start=0)" for density in (0.5, 0.4, 0.1)},
    }
    whole = methods | {"powersgd": "powersgd(rank=4)" if settings.dry else "powersgd(rank=128)"}
    dense, exchange = (FIGURES(SPEED, "dense", quantity) for quantity in ("step", "all-reduce"))
    claim = Headline("", dense, dense - exchange, 1.0, "")
    rate = claim.find_rate(settings, "radius-table-3")
    report = compared(settings, "radius-table-3", list(methods.values()), f"{rate:.0f}mbit", 12)
    ours = dict(zip(("none", *methods), (run["summary"] for run in report["runs"]), strict=True)) if report else {}
    rows: list[dict[str, Any]] = []
    for label in methods:
        run, base = ours.get(label), ours.get("dense")
        nbytes, dense_bytes = sent("gpt-2.0b", whole[label], 64, per_node=4)
        rows.append({
            "run": label,
            "step over dense": run and base and run["step_ms"] / base["step_ms"],
            "step over dense (paper)": FIGURES(SPEED, label, "step") / dense,
            "waiting, ms": run and run["exposed_ms"],
            "codec, ms": run and run["encode_ms"] + run["decode_ms"],
            "codec, ms (paper)": FIGURES(SPEED, label, "overhead"),
            "bytes over dense, GPT-2.0B": nbytes / dense_bytes,
            "all-reduce over dense (paper)": FIGURES(SPEED, label, "all-reduce") / exchange,
        })  # fmt: skip
    steps = {row["run"]: row["step over dense"] for row in rows}
    faster = None if not ours else all(steps[label] < 1 for label in steps if label != "dense")
    against = None if not ours else steps["d=0.4"] < steps["powersgd"]
    return Result(
        rows,
        [
            f"Steps: 19 million parameters, 2 ranks, gloo, on a link of {rate:.0f} Mbit/s, where dense's exchange adds "
            f"about what it adds in the paper ({claim.ratio:.2f} of a step without it). PowerSGD's rank is 128 x our "
            f"width / theirs: {powersgd_rank}.",
            "Bytes: the plan of the paper's own GPT-2.0B on 64 ranks. The paper's all-reduce time falls by less than "
            "its bytes, because it holds the gathering of values at the mask.",
        ],
        [Claim("every method is faster than dense", faster), Claim("d = 0.4 is faster than PowerSGD", against)],
        [
            bars(rows, "run", ["step over dense", "step over dense (paper)"], "of dense's", "step"),
            bars(rows, "run", ["bytes over dense, GPT-2.0B", "all-reduce over dense (paper)"], "of dense's", "sent"),
        ],
    )  # fmt: skip


@PAPER.experiment("figure-1", minutes=1)
def stability(settings: Settings) -> Result:
    """How long the largest 1% of the gradients stay at the same places, in an MLP and in an attention layer."""
    from measures import RANKS, corpora, regimes, trained_once

    steps = settings.length(STEPS)
    first, names = steps - max(steps // 5, 1), ("blocks.1.mlp.up.weight", "blocks.1.attention.output.weight")
    seen: dict[str, Counter[int]] = {name: Counter() for name in names}
    sizes: dict[str, int] = {}

    def look(rank: Any, turn: int) -> None:
        for name in names if turn >= first else ():
            gradient = rank.replica.weights[name].grad.flatten()
            sizes[name] = gradient.numel()
            seen[name].update(gradient.abs().topk(max(gradient.numel() // 100, 1)).indices.tolist())

    trained_once(regimes.Job("scratch", "wikitext", "tiny", RANKS, "dense", 4e-3, 0, steps), corpora(settings), look)
    window = steps - first
    rows, lines = [], {}
    for name in names:
        frequencies = sorted((count / window for count in seen[name].values()), reverse=True)
        chosen = sum(frequencies)
        rows.append({
            "layer": name,
            "places, largest 1%": round(chosen),
            "places ever among them": len(frequencies),
            "mean frequency of the 1% most frequent": sum(frequencies[: round(chosen)]) / round(chosen),
            "by chance": 0.01,
            "close to 1 (paper)": "a small share",
        })  # fmt: skip
        lines[name] = [(100 * i / sizes[name], value) for i, value in enumerate(frequencies)]
    least = min(row["mean frequency of the 1% most frequent"] for row in rows)
    return Result(
        rows,
        [
            f"{SMALL}; dense. The window is the last fifth of the run, {window} steps (the paper's: 4,000 of 500,000).",
            "The figure prints no numbers. The claim is taken as: the most frequent places are among the largest 1% "
            "in most steps.",
        ],
        [Claim(f"the largest gradients keep their places in most steps; here {least:.2f}", least > 0.5)],
        [curves(lines, "places, % of the tensor, most frequent first", "share of steps among the largest 1%")],
    )  # fmt: skip


@PAPER.experiment("figure-6", minutes=4)
def naive(settings: Settings) -> Result:
    """Naive top-k with error feedback against Radius, after the same dense beginning."""
    from measures import curve, loss, share, trained

    naive = "topk:paper(density={},start={})"
    methods = {
        "dense": "dense",
        "Radius d=0.5": radius(0.5, 200 // SCALE, 0.16),
        **{f"naive d={density}": naive.format(density, 0.16) for density in (0.5, 0.4, 0.01)},
    }
    runs = trained(settings, methods, STEPS)
    rows = [
        {
            "run": label,
            "valid loss": loss(seeds),
            "over dense": loss(seeds) / loss(runs["dense"]) - 1,
            "bytes over dense": share(seeds),
            "ends (paper)": "diverges" if "0.01" in label else "flattens" if "naive" in label else "follows dense",
        }
        for label, seeds in runs.items()
    ]
    gap = {row["run"]: row["over dense"] for row in rows}
    return Result(
        rows,
        [
            f"{SMALL} (GPT-355M, and 8 GPUs for naive top-k). The first 16% are dense, as 80,000 of 500,000 steps.",
            f"Radius with the paper's T over {SCALE}. Naive top-k is ours: the authors' own ranked by |w / g| for a "
            "year, which picks the smallest gradients, so the paper's curve may be of that.",
            "The figure has no numbers; its words are in the last column.",
        ],
        [
            Claim(
                f"naive top-k with d = 0.01 diverges; here {100 * gap['naive d=0.01']:+.1f}% of dense's loss",
                not math.isfinite(gap["naive d=0.01"]),
            ),
            Claim(
                f"Radius is nearer to dense than naive top-k of as many values; here {100 * gap['Radius d=0.5']:+.2f}% "
                f"and {100 * gap['naive d=0.5']:+.2f}%",
                gap["Radius d=0.5"] < gap["naive d=0.5"],
            ),
        ],
        [curves({label: curve(seeds) for label, seeds in runs.items()}, "step", "validation loss, nats per byte")],
    )  # fmt: skip


@PAPER.experiment("figure-7", minutes=4)
def intervals(settings: Settings) -> Result:
    """Training error against dense by the interval T, at density 0.5."""
    from measures import curve, loss, trained

    intervals = (10, 50, 100, 200)
    methods = {"dense": "dense", **{f"T={interval}": radius(0.5, interval) for interval in intervals}}
    runs = trained(settings, methods, STEPS)
    rows: list[dict[str, Any]] = [
        {
            "run": label,
            "valid loss": loss(seeds),
            "over dense": loss(seeds) / loss(runs["dense"]) - 1,
            "error (paper)": "largest" if label == "T=10" else "smaller" if label != "dense" else "0",
        }
        for label, seeds in runs.items()
    ]
    dense = dict(curve(runs["dense"]))
    errors = {label: [(step, value - dense[step]) for step, value in curve(seeds)] for label, seeds in runs.items()}
    gap = {row["run"]: row["over dense"] for row in rows}
    rest = max(gap[f"T={interval}"] for interval in intervals[1:])
    return Result(
        rows,
        [
            f"{SMALL}. T is the paper's own, in steps, of a run that is 500 times as short: T=200 resamples "
            f"{int((1 - START) * STEPS / 200) + 1} times.",
            "The figure prints no numbers; its text says which interval is worst. It draws training loss, we "
            "validation loss.",
        ],
        [
            Claim(
                f"T = 10 errs more than every larger T; here {100 * gap['T=10']:+.2f}%, the largest of the others "
                f"{100 * rest:+.2f}%",
                gap["T=10"] > rest,
            )
        ],
        [curves({label: errors[label] for label in list(errors)[1:]}, "step", "validation loss - dense's")],
    )  # fmt: skip
