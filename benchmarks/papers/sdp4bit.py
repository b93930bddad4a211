"""SDP4Bit (NeurIPS 2024): four bits for weight differences, two levels for gradients."""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from frame import Claim, Headline, Paper, Published, Result, Settings, bars, curves, headline

PAPER = Paper("sdp4bit", "SDP4Bit (NeurIPS 2024)")
FIGURES = Published.read("sdp4bit")
STEPS = 200
MODELS = {
    "0.14M": "--preset tiny --layers 1 --width 96 --heads 4 --seq-len 64",
    "0.24M": "--preset tiny --layers 1 --width 128 --heads 4 --seq-len 64",
    "0.44M": "--preset tiny --layers 2 --width 128 --heads 4 --seq-len 64",
}
"""Sizes in place of 125M, 350M and 1.3B: from 96 wide on, so that a matrix's shard is about one group of weights."""
LARGEST = "0.44M"
SIZES = dict(zip(MODELS, ("125M", "350M", "1.3B"), strict=True))
VOCABULARY = 50304
"""GPT-2's, padded as Megatron pads it. The paper does not print it."""
UNPRINTED = {"2.7B": (2560, 32)}
"""Width and layers of the size that Table 7 leaves out: GPT-3's of that name."""
SMALL = (
    "4 virtual ranks on 2 nodes, sharded weights in fp32, WikiText's bytes, 200 steps by default, in place of 80,000 "
    "steps of the Pile with bf16 weights"
)


def methods(**more: str) -> dict[str, str]:
    """Return the paper's parts by name."""
    return {
        "baseline": "dense", "qW": "sdp4bit:qw", "qWD": "sdp4bit:qwd(weight_rounding='stochastic')", 
        "TLq": "sdp4bit:tlq",
        "TLq-HS": "sdp4bit:tlq-hs", "SDP4Bit": "sdp4bit:paper", **more,
    }  # fmt: skip


def with_models() -> None:
    from measures import regimes

    regimes.MODELS.update(MODELS)


@PAPER.experiment("headline", minutes=5)
def speedup(settings: Settings) -> Result:
    """4.08x (18B, 128 H800), at that row's ratio of communication to computing, with its loss."""
    row, cluster = "18B, H800", "H800"
    computing, dense = split(cluster, "18B")
    claim = Headline(
        method="sdp4bit",
        dense_ms=1e3 * dense,
        none_ms=1e3 * computing,
        speedup=FIGURES("Table 2", row, "speedup"),
        derived=(
            f"Table 2, {row}: two constants, seconds per FLOP and per byte of a node's NICs, are fitted to the five "
            "dense rows of that cluster, which they meet to "
            f"{100 * max(abs(error) for error in fit(cluster).errors.values()):.0f}%; computing is then "
            f"{computing:.3f} of {dense:.3f} s"
        ),
    )
    result = headline(
        settings,
        "sdp4bit",
        claim,
        steps=12,
        guess_mbit=200.0,
        flags=("--engine", "fsdp2", "--no-reshard"),
    )
    result.differs = [
        *result.differs,
        "The model trains on FSDP2 in fp32, and gloo's reduce-scatter moves as much as an all-reduce: dense sends 12 "
        "bytes per value and step, the paper's baseline 6 (gradients in fp32, weights in bf16), SDP4Bit about 1.03 in "
        "both. So more can be saved here: with the paper's bytes and codecs that cost nothing, the "
        f"ratio allows {1 / ((1 - exchanged()) * computing / dense + exchanged()):.2f}x.",
    ]
    return result


def exchanged() -> float:
    """Return SDP4Bit's bytes over the baseline's across nodes: 4 bits and scales, of gradients and weights."""
    return (4 + 32 / 128 + 4 + 32 / 2048) / (32 + 16)


@dataclass(frozen=True)
class Fit:
    """Seconds per FLOP of a GPU and per byte of a node's NICs; the relative ``errors`` of the dense rows, by size."""

    flop: float
    byte: float
    errors: dict[str, float]


GPUS = {"A100": 64, "H800": 128}
SIZES_OF_SPEED = ("1.3B", "2.7B", "6.7B", "13B", "18B")


@functools.cache
def fit(cluster: str) -> Fit:
    """Fit two constants to the dense rows of Table 2: least squares of the relative errors."""
    import numpy as np

    rows = {size: (*work(cluster, size), dense_seconds(cluster, size)) for size in SIZES_OF_SPEED}
    table = np.array([[flops / seconds, nbytes / seconds] for flops, nbytes, seconds in rows.values()])
    scale = table.max(0)
    flop, byte = np.linalg.lstsq(table / scale, np.ones(len(table)), rcond=None)[0] / scale
    errors = {
        size: float((flops * flop + nbytes * byte) / seconds - 1) for size, (flops, nbytes, seconds) in rows.items()
    }
    return Fit(float(flop), float(byte), errors)


def split(cluster: str, size: str) -> tuple[float, float]:
    """Return the seconds of computing and of the whole dense step of a row, computing by :func:`fit`."""
    return fit(cluster).flop * work(cluster, size)[0], dense_seconds(cluster, size)


def shape_of(size: str) -> tuple[int, int]:
    """Return width and layers."""
    return UNPRINTED.get(size) or (int(FIGURES("Table 7", size, "hidden")), int(FIGURES("Table 7", size, "layers")))


def parallel(cluster: str, size: str) -> tuple[int, int]:
    """Return tensor and pipeline parallel ranks."""
    row = f"{size}, {cluster}"
    return int(FIGURES("Table 8", row, "tensor parallel")), int(FIGURES("Table 8", row, "pipeline parallel"))


def flops_of(size: str) -> float:
    """Return Megatron's count for a sequence: attention whole, nothing computed again."""
    width, layers = shape_of(size)
    length = FIGURES("Table 7", "1.3B", "sequence")
    return 72 * length * layers * width**2 * (1 + length / 6 / width + VOCABULARY / 16 / layers / width)


def work(cluster: str, size: str) -> tuple[float, float]:
    """Return the FLOPs of a GPU, and the bytes out of a node, in a dense step: gradients in fp32, weights in bf16."""
    width, layers = shape_of(size)
    tensor, pipeline = parallel(cluster, size)
    ranks = GPUS[cluster] // tensor // pipeline
    values = 12 * layers * width**2 + (VOCABULARY + FIGURES("Table 7", "1.3B", "sequence")) * width
    return flops_of(size) / tensor / pipeline, 6 * values / pipeline * (ranks - 1) / ranks


def dense_seconds(cluster: str, size: str) -> float:
    tensor, pipeline = parallel(cluster, size)
    return flops_of(size) / tensor / pipeline / (1e12 * FIGURES("Table 2", f"{size}, {cluster}", "baseline"))


@PAPER.experiment("table-1", minutes=5)
def losses(settings: Settings) -> Result:
    """Validation loss of the parts of SDP4Bit: weights, gradients, both, for three sizes."""
    import sharded
    from measures import loss

    with_models()
    runs = {
        size: sharded.trained(settings, methods(**{"SDP4Bit, nearest": "sdp4bit(send=('*',))"}), STEPS, model=size)
        for size in MODELS
    }
    rows = []
    for label in next(iter(runs.values())):
        row: dict[str, Any] = {"run": label}
        for size, theirs in SIZES.items():
            base, printed = loss(runs[size]["baseline"]), FIGURES.get("Table 1", label, f"loss, {theirs}")
            row[f"loss, {size}"] = loss(runs[size][label])
            row[f"over baseline, %, {size}"] = 100 * (loss(runs[size][label]) / base - 1)
            row[f"over baseline, %, {theirs} (paper)"] = printed and 100 * (
                printed / FIGURES("Table 1", "baseline", f"loss, {theirs}") - 1
            )
        rows.append(row)
    gap = {row["run"]: [row[f"over baseline, %, {size}"] for size in MODELS] for row in rows}
    printed_worst = max(rows[5][f"over baseline, %, {theirs} (paper)"] for theirs in SIZES.values())
    return Result(
        rows,
        [
            f"{SMALL}. Sizes: {', '.join(f'{ours} for {theirs}' for ours, theirs in SIZES.items())}.",
            "Megatron's groups run through one flat buffer, ours through one shard of one tensor: in shards smaller "
            "than 2048 values groups are smaller too, and qW loses less than in the paper.",
            "'nearest' is the library's form: weight differences are rounded to the nearest, the authors' "
            "stochastically.",
        ],
        [
            Claim(
                f"SDP4Bit ends at most {printed_worst:.2f}% above the baseline; "
                f"here {max(gap['SDP4Bit']):+.2f}% at most",
                max(gap["SDP4Bit"]) <= printed_worst,
            ),
            Claim(
                f"4-bit weights (qW) lose far more than differences (qWD); here {min(gap['qW']):+.2f}% at least, and "
                f"{max(gap['qWD']):+.2f}% at most",
                min(gap["qW"]) > 2 * max(max(gap["qWD"]), 0.0),
            ),
            Claim(
                "TLq loses more than TLq-HS at every size; here "
                + ", ".join(f"{a:+.2f}% and {b:+.2f}%" for a, b in zip(gap["TLq"], gap["TLq-HS"], strict=True)),
                all(a > b for a, b in zip(gap["TLq"], gap["TLq-HS"], strict=True)),
            ),
        ],
        [
            bars(rows[1:], "run", [f"over baseline, %, {size}" for size in MODELS], "% above the baseline", "here"),
            bars(
                rows[1:6],
                "run",
                [f"over baseline, %, {size} (paper)" for size in SIZES.values()],
                "% above the baseline",
                "the paper",
            ),
        ],
    )


@PAPER.experiment("table-3", minutes=4)
def groups(settings: Settings) -> Result:
    """Validation loss by group size, of gradients, of weight differences and of weights."""
    import sharded
    from measures import loss

    with_models()
    tries = {"baseline, -": "dense"}
    tries |= {f"TLq-HS, group {group}": f"sdp4bit:tlq-hs(group={group})" for group in (64, 128, 512)}
    tries |= {
        f"qWD, group {group}": f"sdp4bit:qwd(weight_rounding='stochastic',weight_group={group})"
        for group in (1024, 2048)
    }
    tries |= {f"qW, group {group}": f"sdp4bit:qw(weight_group={group})" for group in (32, 128, 2048)}
    tries = {
        label: spec.replace("(group=128)", "").replace(",weight_group=2048", "").replace("(weight_group=2048)", "")
        for label, spec in tries.items()
    }
    runs = sharded.trained(settings, tries, STEPS, model=LARGEST)
    base, printed_base = loss(runs["baseline, -"]), FIGURES("Table 3", "baseline", "-")
    rows = [
        {
            "run": label,
            "loss": loss(of),
            "over baseline, %": 100 * (loss(of) / base - 1),
            "over baseline, % (paper)": 100 * (FIGURES("Table 3", *label.split(", ")) / printed_base - 1),
        }
        for label, of in runs.items()
    ]
    gap = {str(row["run"]): row["over baseline, %"] for row in rows}
    plain = [gap[f"qW, group {group}"] for group in (32, 128, 2048)]
    other = max(value for label, value in gap.items() if not label.startswith("qW,"))
    return Result(
        rows,
        [f"{SMALL}; {LARGEST} parameters in place of 125M."],
        [
            Claim(
                f"qW loses more the larger its groups; here {', '.join(f'{value:+.2f}%' for value in plain)}",
                plain == sorted(plain),
            ),
            Claim(
                f"even in groups of 32 qW loses more than any other; here {plain[0]:+.2f}%, the others at most "
                f"{other:+.2f}%",
                plain[0] > other,
            ),
            Claim(
                "TLq-HS in groups of 128 is as good as in groups of 64, to 0.1%",
                abs(gap["TLq-HS, group 128"] - gap["TLq-HS, group 64"]) <= 0.1,
            ),
        ],
        [
            bars(
                rows[1:],
                "run",
                ["over baseline, %", "over baseline, % (paper)"],
                "% above the baseline",
                "loss by group",
            )
        ],
    )


@PAPER.experiment("figure-5", minutes=2)
def levels(settings: Settings) -> Result:
    """Validation loss of gradients in 4 bits on both levels, in 8 and 4 bits, and with the Hadamard transform."""
    import sharded
    from measures import curve, loss

    with_models()
    chosen = {label: spec for label, spec in methods().items() if label in ("baseline", "TLq", "TLq-HS")}
    runs = sharded.trained(settings, {**chosen, "ULq": "sdp4bit:ulq"}, STEPS, model=LARGEST)
    base = loss(runs["baseline"])
    rows = [
        {
            "run": label,
            "loss": loss(of),
            "over baseline, %": 100 * (loss(of) / base - 1),
            "over baseline, % (paper)": {
                "baseline": "0", "ULq": "a noticeable gap", "TLq": "mitigated", "TLq-HS": "nearly identical",
            }[label],
        }
        for label, of in runs.items()
    ]  # fmt: skip
    gap = {row["run"]: row["over baseline, %"] for row in rows}
    return Result(
        rows,
        [
            f"{SMALL}; {LARGEST} parameters in place of 125M. The figure prints no numbers (TLq and TLq-HS stand in "
            "Table 1)."
        ],
        [
            Claim(
                f"ULq loses more than TLq, and TLq more than TLq-HS; here {gap['ULq']:+.2f}%, {gap['TLq']:+.2f}%, "
                f"{gap['TLq-HS']:+.2f}%",
                gap["ULq"] > gap["TLq"] > gap["TLq-HS"],
            ),
            Claim("TLq-HS is nearly identical to the baseline (0.1%)", abs(gap["TLq-HS"]) <= 0.1),
        ],
        [
            curves({label: curve(of) for label, of in runs.items()}, "step", "validation loss, nats per byte"),
            bars(rows[1:], "run", ["over baseline, %"], "% above the baseline", "at the end"),
        ],
    )


@PAPER.experiment("figure-4", minutes=1)
def histograms(settings: Settings) -> Result:
    """Weights and weight differences on their 4-bit lattices: spread, use of the levels, and error."""
    import torch

    import sharded
    from measures import corpora, regimes
    from thinwire.codecs import Int4

    with_models()
    steps = settings.length(STEPS)
    kept: dict[str, torch.Tensor] = {}

    def look(owner: Any, turn: int) -> None:
        if turn == steps // 2:  # a message is due: what the ranks hold is a step behind
            own = torch.cat([weight.detach() for weight in owner.rank.weights.values()])
            kept["weights"] = own
            kept["weight differences"] = own - owner.resident
            kept["sizes"] = torch.tensor([weight.numel() for weight in owner.rank.weights.values()])

    job = regimes.Job("scratch", "wikitext", LARGEST, sharded.RANKS, methods()["qWD"], 4e-3, 0, steps)
    sharded.trained_once(job, corpora(settings), look)
    codec, rows, lines = Int4(2048), [], {}
    whole = 0.0  # of the weights, which come first
    for label, levels in (("weights", "few of them hold most"), ("weight differences", "more uniform, smaller range")):
        matrices = [part for part in kept[label].split(kept["sizes"].tolist()) if part.numel() >= 2048]
        values = torch.cat([part[: part.numel() // 2048 * 2048] for part in matrices]).view(1, -1)
        whole = whole or float(values.norm())
        wire = codec.encode(values, torch.empty(1, codec.wire_numel(values.shape[1]), dtype=codec.wire_dtype))
        error = codec.decode(wire, torch.empty_like(values)) - values
        scaled = (values.view(-1, 2048) / values.view(-1, 2048).abs().amax(1, keepdim=True)).nan_to_num().flatten()
        shares = torch.histc((scaled * 7).round(), bins=15, min=-7.5, max=7.5) / scaled.numel()
        used = -(shares * shares.clamp(min=1e-12).log2()).sum()
        rows.append({
            "values": label,
            "largest": float(values.abs().max()),
            "share on the level 0": float(shares[7]),
            "bits used of log2 15 = 3.9": float(used),
            "error / values": float(error.norm() / values.norm()),
            "error / weights": float(error.norm() / whole),
            "levels (paper)": levels,
        })  # fmt: skip
        lines[label] = [(level, float(share)) for level, share in zip(range(-7, 8), shares, strict=True)]
    first, second = rows
    return Result(
        rows,
        [
            f"{SMALL}; {LARGEST} parameters, in the middle of the run (qWD, rank 0's shard, groups of 2048, to the "
            "nearest). The figure prints no numbers, and does not say of which model it is.",
        ],
        [
            Claim(
                f"differences have a smaller range; here {second['largest']:.2g} and {first['largest']:.2g}",
                second["largest"] < first["largest"],
            ),
            Claim(
                f"differences use the levels more evenly; here {second['bits used of log2 15 = 3.9']:.2f} and "
                f"{first['bits used of log2 15 = 3.9']:.2f} bits",
                second["bits used of log2 15 = 3.9"] > first["bits used of log2 15 = 3.9"],
            ),
            Claim(
                "differences make the error of the weights smaller; here "
                f"{first['error / weights'] / second['error / weights']:.0f} times",
                second["error / weights"] < first["error / weights"],
            ),
        ],
        [curves(lines, "level of the 4-bit lattice", "share of values")],
    )


@PAPER.experiment("figure-6", minutes=1)
def smoothed(settings: Settings) -> Result:
    """A gradient before and after the Hadamard transform: outliers, and the error of 4 bits."""
    import torch

    from measures import RANKS, corpora, regimes, trained_once
    from thinwire.codecs import Int4

    with_models()
    steps = settings.length(STEPS)
    kept: dict[str, torch.Tensor] = {}

    def look(rank: Any, turn: int) -> None:
        if turn == steps - 1:
            kept.update(
                (name, weight.grad.clone()) for name, weight in rank.replica.weights.items() if weight.dim() == 2
            )

    job = regimes.Job("scratch", "wikitext", LARGEST, RANKS, "dense", 4e-3, 0, steps)
    trained_once(job, corpora(settings), look)
    hadamard = torch.ones(1, 1)
    while len(hadamard) < 32:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard /= math.sqrt(32)
    before = torch.cat([gradient.flatten()[: gradient.numel() // 128 * 128] for gradient in kept.values()])
    rows, lines = [], {}
    for label, values, codec in (
        ("before", before, Int4()), ("after", (before.view(-1, 32) @ hadamard).flatten(), Int4(hadamard=True)),
    ):  # fmt: skip
        row = before.view(1, -1)
        wire = codec.encode(row, torch.empty(1, codec.wire_numel(row.shape[1]), dtype=codec.wire_dtype))
        error = codec.decode(wire, torch.empty_like(row)) - row
        groups = values.view(-1, 128)
        spread = groups.std(1, keepdim=True).clamp(min=1e-30)
        rows.append({
            "gradient": label,
            "largest / standard deviation, in groups of 128": float((groups.abs().amax(1) / spread[:, 0]).mean()),
            "kurtosis (3: normal)": float((values / values.std()).pow(4).mean()),
            "error of 4 bits": float(error.norm() / row.norm()),
            "distribution (paper)": "with outliers" if label == "before" else "smoother",
        })  # fmt: skip
        shares = torch.histc((groups / spread).flatten(), bins=41, min=-8.2, max=8.2) / values.numel()
        lines[label] = [(-8 + 0.4 * i, float(share)) for i, share in enumerate(shares) if share > 0]
    first, second = rows
    return Result(
        rows,
        [
            f"The mean gradient of {LARGEST} parameters after {steps} dense steps, all matrices. The figure prints no "
            "numbers."
        ],
        [
            Claim(
                "the transform shrinks outliers; "
                f"here from {first['largest / standard deviation, in groups of 128']:.2f} to "
                f"{second['largest / standard deviation, in groups of 128']:.2f} standard deviations",
                second["largest / standard deviation, in groups of 128"]
                < first["largest / standard deviation, in groups of 128"],
            ),
            Claim(
                "the transform shrinks the error; "
                f"here from {first['error of 4 bits']:.3f} to {second['error of 4 bits']:.3f}",
                second["error of 4 bits"] < first["error of 4 bits"],
            ),
        ],
        [curves(lines, "standard deviations of the group", "share of values")],
    )


@PAPER.experiment("table-5", minutes=1)
def kernels(settings: Settings) -> Result:
    """Throughput of 4-bit quantization and back, with the Hadamard transform and without, by size."""
    import torch

    sys.path.append(str(Path(__file__).parents[1] / "speed"))
    from thinwire.base.random import Seeds
    from thinwire.codecs import Integers
    from timer import seconds

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.set_num_threads(1)
    sizes = (1,) if settings.dry else (8, 16, 64, 512, 1024, 2048) if cuda else (8, 16, 64)
    rows: list[dict[str, Any]] = []
    for megabytes in sizes:
        n = megabytes * 2**20 // 4
        values, back = torch.randn(1, n, device=device), torch.empty(1, n, device=device)
        operations: dict[str, Callable[[], object]] = {}
        for name, codec in (
            ("", Integers(128, 4, rounding="stochastic")),
            (", Hadamard", Integers(128, 4, True, "stochastic")),
        ):
            wire = torch.empty(1, codec.wire_numel(n), dtype=codec.wire_dtype, device=device)
            operations[f"quantize{name}"] = functools.partial(codec.encode, values, wire, seed=Seeds(((0, n, 1),)))
            operations[f"dequantize{name}"] = functools.partial(codec.decode, wire, back)
        found: dict[str, list[float]] = {name: [] for name in operations}
        for turn in range(3 if settings.dry else 11):
            for name, operation in operations.items():  # in turns: a busy machine slows all alike
                found[name] += [megabytes * 2**20 / seconds(operation, device) / 1e9] if turn else []
                if not turn:
                    operation()
        for name, rates in found.items():
            plain = found[name.removesuffix(", Hadamard")]
            rows.append({
                "size, MB": megabytes,
                "operation": name,
                "GB/s": statistics.median(rates),
                "standard deviation": statistics.stdev(rates),
                "with / without": statistics.median(rates) / statistics.median(plain) if "Hadamard" in name else None,
                "GB/s (paper)": FIGURES.get("Table 5", f"{megabytes} MB", name),
                "with / without (paper)": _printed_share(megabytes, name),
            })  # fmt: skip
    shares = {row["operation"]: row["with / without"] for row in rows if row["size, MB"] == sizes[-1]}
    names = [name for name in shares if "Hadamard" in name]
    return Result(
        rows,
        [
            f"On {torch.cuda.get_device_name() if cuda else 'one core of a CPU'} in place of an A100. A rate is the "
            "fp32 bytes over the time, median of 10 turns; quantizing rounds stochastically, as the authors' code "
            "does.",
        ],
        [
            Claim(
                f"the fused transform costs nothing (5%); here {name.partition(',')[0]} keeps "
                f"{100 * shares[name]:.0f}%",
                shares[name] >= 0.95,
            )
            for name in names
        ],
        [
            curves(
                {name: [(row["size, MB"], row["GB/s"]) for row in rows if row["operation"] == name] for name in found},
                "MB",
                "GB/s",
                "here",
                log=True,
            ),
            curves(
                {
                    f"{name} (paper)": [
                        (megabytes, FIGURES("Table 5", f"{megabytes} MB", name))
                        for megabytes in (8, 16, 64, 512, 1024, 2048)
                    ]
                    for name in found
                },
                "MB",
                "GB/s",
                "the paper's A100",
                log=True,
            ),
        ],
    )


def _printed_share(megabytes: int, name: str) -> float | None:
    with_it, without = (FIGURES.get("Table 5", f"{megabytes} MB", of) for of in (name, name.removesuffix(", Hadamard")))
    return with_it / without if with_it and without and "Hadamard" in name else None


@functools.cache
def model_of(size: str) -> tuple[Any, Any]:
    """Return the whole model on the meta device, and its profile."""
    import torch

    from thinwire.predict.profile import profile_of
    from thinwire.train.model.decoder import Decoder
    from thinwire.train.model.shapes import ModelConfig

    width, layers = shape_of(size)
    length = int(FIGURES("Table 7", "1.3B", "sequence"))
    with torch.device("meta"):
        model = Decoder(
            ModelConfig(layers=layers, width=width, heads=width // 128, context=length, vocabulary=VOCABULARY)
        )
        tokens = torch.zeros(1, length, dtype=torch.long)
    return model, profile_of(model, (tokens, tokens))


@functools.cache
def recorded(size: str, method: str, nodes: int, per_node: int) -> Any:
    """Record ``method`` as Megatron's distributed optimizer does it: the model in one piece, weights gathered once."""
    import torch

    from thinwire.predict.layouts import timeline_of

    return timeline_of(
        model_of(size)[0],
        method,
        engine="fsdp2",
        nodes=nodes,
        per_node=per_node,
        gather_dtype=torch.bfloat16,
        reshard=False,
        wrap=lambda name, module: False,
    )


@dataclass(frozen=True)
class Speed:
    """A predicted step: ``seconds``, those of the gradients' kernels and messages, and Megatron's TFLOP/s per GPU."""

    seconds: float
    gradients: float
    throughput: float


def predicted(size: str, name: str, gpus: int, method: str, extra: float = 0.0) -> Speed:
    """Predict a step on the cluster ``name`` with the paper's parallelism.

    Each rank has a share of every layer, or of half of the layers, and the groups of ranks with the same share use a
    node's NICs side by side. The kernels' rate is the authors' on an A100 (Table 5), on others as their memory's.
    ``extra``: bytes per value for further passes over memory.
    """
    from thinwire.predict.cluster import Constant, Kernel, read_cluster
    from thinwire.predict.play import OPTIMIZER, Costs, play
    from thinwire.predict.timeline import Group, Message, Pass

    tensor, pipeline = parallel(name, size)
    cluster = read_cluster(f"sdp4bit-{name.lower()}")
    per_node = max(cluster.per_node // tensor, 1)
    timeline = recorded(size, method, gpus // tensor // pipeline // per_node, per_node)
    if method != "dense":
        printed = 1e9 * FIGURES("Table 5", "1024 MB", "quantize, Hadamard")
        rate = printed * cluster.memory_rate.value / read_cluster("sdp4bit-a100").memory_rate.value
        optimizer = Kernel(0.0, cluster.memory_rate.value * cluster.memory_share.value)
        cluster = replace(
            cluster, memory_rate=Constant(rate, "measured"), memory_share=Constant(1.0, "measured"),
            kernels={OPTIMIZER: optimizer},
        )  # fmt: skip

    def edited(stretch: Any) -> Any:
        events = []
        for event in stretch.events:
            if isinstance(event, Pass) and not event.kernel.startswith("thinwire."):
                continue  # FSDP2's copies, and norms: Megatron's gradients lie in one buffer from the start
            event = replace(event, nbytes=event.nbytes / tensor / pipeline)
            if not isinstance(event, Pass):
                event = replace(event, group=replace(event.group, beside=event.group.beside * tensor))
            events.append(event)
        return replace(stretch, events=tuple(events))

    steps = tuple(
        replace(
            step,
            update=edited(step.update),
            **{part: tuple(map(edited, getattr(step, part))) for part in ("forward", "again", "gradients")},
        )
        for step in timeline.steps
    )
    timeline = replace(
        timeline, steps=steps, optimizer_bytes=timeline.optimizer_bytes / tensor / pipeline, per_node=cluster.per_node
    )
    costs = Costs(cluster)
    events = [event for stretch in steps[0].gradients for event in stretch.events]
    values = sum(timeline.numel.values()) / tensor / pipeline
    more = extra * values / cluster.memory_rate.value
    gradients = more + sum(float((costs.kernel if isinstance(e, Pass) else costs.message)(e)[0]) for e in events)
    seconds = more + play(timeline, model_of(size)[1], cluster, sequences=1 / tensor).seconds
    if tensor > 1:  # two sums of the activations forwards and two backwards, in each layer
        width, layers = shape_of(size)
        nbytes = 2 * 2 * FIGURES("Table 7", "1.3B", "sequence") * width * (tensor - 1) / tensor
        message = Message("all_reduce", nbytes, Group(tensor, tensor), rounds=2 * (tensor - 1))
        seconds += 4 * layers * float(costs.message(message)[0])
    return Speed(seconds, gradients, flops_of(size) / tensor / pipeline / seconds / 1e12)


PREDICTED = (
    "Predicted, not measured: the library's recorded exchange of the whole model, played on two constants (computing "
    "and link) that are fitted to dense rows of this paper, with the authors' kernel rate (Table 5)."
)
WRONG_LINK = (
    "On the A100 cluster the printed link cannot carry the dense rows of 6.7B and more: 6 bytes of each value over one "
    "100 Gbit/s NIC take longer than the whole printed step. Their predictions are slower than the paper, dense most."
)


@PAPER.experiment("table-2", minutes=1)
def throughput(settings: Settings) -> Result:
    """Throughput by model size on both clusters, dense and with SDP4Bit."""
    rows = []
    for name, gpus in GPUS.items():
        for size in SIZES_OF_SPEED[:1] if settings.dry else SIZES_OF_SPEED:
            dense, ours = (predicted(size, name, gpus, method).throughput for method in ("dense", "sdp4bit:paper"))
            row = f"{size}, {name}"
            rows.append({
                "model": row,
                "baseline, TFLOP/s": dense,
                "baseline, TFLOP/s (paper)": FIGURES("Table 2", row, "baseline"),
                "SDP4Bit, TFLOP/s": ours,
                "SDP4Bit, TFLOP/s (paper)": FIGURES("Table 2", row, "SDP4Bit"),
                "speedup": ours / dense,
                "speedup (paper)": FIGURES("Table 2", row, "speedup"),
            })  # fmt: skip
    speed = {row["model"]: row["speedup"] for row in rows}
    both = [size for size in ("1.3B", "2.7B", "6.7B") if f"{size}, H800" in speed]
    claimed = FIGURES("Table 2", "18B, H800", "speedup")
    last = speed.get("18B, H800", 0.0)
    grows = [("1.3B", "2.7B"), ("13B", "18B")] if len(both) > 1 else []
    return Result(
        rows,
        [PREDICTED, WRONG_LINK, "Width and layers of 2.7B are GPT-3's: Table 7 leaves that size out."],
        [
            Claim(f"SDP4Bit is up to {claimed:g}x as fast (18B, H800); predicted {last:.2f}x", last >= claimed),
            Claim("SDP4Bit is faster in every row", all(value > 1 for value in speed.values())),
            Claim(
                "the speedup is larger on the slower network, at the same size",
                all(speed[f"{size}, A100"] > speed[f"{size}, H800"] for size in both),
            ),
            Claim(
                "the speedup is larger for the larger model, at the same parallelism (1.3B and 2.7B, 13B and 18B)",
                all(speed[f"{small}, {name}"] < speed[f"{large}, {name}"] for small, large in grows for name in GPUS),
            ),
        ],
        [
            bars(rows, "model", ["speedup", "speedup (paper)"], "SDP4Bit / baseline", "speedup"),
            bars(rows, "model", ["SDP4Bit, TFLOP/s", "SDP4Bit, TFLOP/s (paper)"], "TFLOP/s per GPU", "SDP4Bit"),
        ],
    )


@PAPER.experiment("table-4", minutes=1)
def strategies(settings: Settings) -> Result:
    """Time of the gradients' exchange and throughput by strategy, 1.3B on 32 A100."""
    tries = {
        "baseline": ("dense", 0.0), "TLq-HS": ("sdp4bit:tlq-hs", 0.0), "ULq": ("sdp4bit:ulq", 0.0),
        "SDP4Bit": ("sdp4bit:paper", 0.0),
        # Each value is read and written once more before it is quantized, and 1/4 of them behind the first hop.
        "SDP4Bit, HS not fused": ("sdp4bit:paper", 8 * 1.25),
    }  # fmt: skip
    rows = []
    for label, (method, extra) in tries.items():
        speed = predicted("1.3B", "A100", 32, method, extra)
        rows.append({
            "strategy": label,
            "gradients, ms": 1e3 * speed.gradients,
            "gradients, ms (paper)": FIGURES("Table 4", label, "gradients"),
            "TFLOP/s": speed.throughput,
            "TFLOP/s (paper)": FIGURES("Table 4", label, "throughput"),
        })  # fmt: skip
    ms = {row["strategy"]: row["gradients, ms"] for row in rows}
    printed = {row["strategy"]: row["gradients, ms (paper)"] for row in rows}
    gain, printed_gain = (of["baseline"] / of["SDP4Bit"] for of in (ms, printed))
    saved, printed_saved = (100 * (1 - of["SDP4Bit"] / of["SDP4Bit, HS not fused"]) for of in (ms, printed))
    return Result(
        rows,
        [PREDICTED, "Not fused: one more read and write of fp32 values for each transform, at the same rate."],
        [
            Claim(
                f"the gradients' exchange is {printed_gain:.1f}x as fast; predicted {gain:.1f}x", gain >= printed_gain
            ),
            Claim(
                "8 bits inside the node cost next to nothing (5% of the exchange); predicted "
                f"{100 * (ms['TLq-HS'] / ms['ULq'] - 1):+.1f}%",
                ms["TLq-HS"] / ms["ULq"] < 1.05,
            ),
            Claim(
                f"fusing saves {printed_saved:.0f}% of the exchange; predicted {saved:.0f}%",
                saved >= 0.9 * printed_saved,
            ),
        ],
        [
            bars(rows, "strategy", ["gradients, ms", "gradients, ms (paper)"], "ms", "exchange of gradients"),
            bars(rows, "strategy", ["TFLOP/s", "TFLOP/s (paper)"], "TFLOP/s per GPU", "throughput"),
        ],
    )


@PAPER.experiment("figure-7", minutes=2)
def scaling(settings: Settings) -> Result:
    """Throughput of 6.7B and 13B by number of GPUs, on both clusters."""
    counts = {"A100": (16, 32, 64), "H800": (16, 32, 64, 128)}
    rows, lines = [], dict[str, list[tuple[float, float]]]()
    for name, gpus in counts.items():
        for size in ("6.7B",) if settings.dry else ("6.7B", "13B"):
            for count in gpus[-1:] if settings.dry else gpus:
                dense, ours = (predicted(size, name, count, method).throughput for method in ("dense", "sdp4bit:paper"))
                rows.append({
                    "model": f"{size}, {name}",
                    "GPUs": count,
                    "baseline, TFLOP/s": dense,
                    "SDP4Bit, TFLOP/s": ours,
                    "speedup": ours / dense,
                    "speedup, average (paper)": FIGURES("Figure 7", f"{size}, {name}", "speedup"),
                })  # fmt: skip
                for label, value in (("baseline", dense), ("SDP4Bit", ours)):
                    lines.setdefault(f"{size}, {name}, {label}", []).append((count, value))
    mean = {
        model: statistics.fmean(row["speedup"] for row in rows if row["model"] == model)
        for model in dict.fromkeys(row["model"] for row in rows)
    }
    steady = [
        max(values) / min(values)
        for values in ([row["speedup"] for row in rows if row["model"] == model] for model in mean)
    ]
    return Result(
        rows,
        [
            PREDICTED,
            WRONG_LINK,
            "The figure's points are not in the text, its averages are. 16 nodes of 4 A100 are 64 GPUs.",
        ],
        [
            *(
                Claim(
                    f"{model}: {FIGURES('Figure 7', model, 'speedup'):.2f}x on average; predicted {value:.2f}x",
                    value >= FIGURES("Figure 7", model, "speedup"),
                )
                for model, value in mean.items()
            ),
            Claim(
                f"the speedup is stable over numbers of GPUs; predicted by a factor of {max(steady):.2f} at most",
                max(steady) < 1.25,
            ),
        ],
        [curves(lines, "GPUs", "TFLOP/s per GPU", log=True)],
    )


@PAPER.experiment("figure-8", minutes=1)
def parts(settings: Settings) -> Result:
    """Speedup of qWD alone, TLq-HS alone and both, 2.7B on both clusters."""
    size = "1.3B" if settings.dry else "2.7B"
    tries = {"qWD": methods()["qWD"], "TLq-HS": methods()["TLq-HS"], "SDP4Bit": methods()["SDP4Bit"]}
    rows = []
    for name, gpus in GPUS.items():
        dense = predicted(size, name, gpus, "dense").seconds
        for label, method in tries.items():
            rows.append({
                "part": f"{label}, {name}",
                "speedup": dense / predicted(size, name, gpus, method).seconds,
                "least (paper)": FIGURES("Figure 8", label, "speedup, least"),
                "most (paper)": FIGURES("Figure 8", label, "speedup, most"),
            })  # fmt: skip
    of = {row["part"]: row["speedup"] for row in rows}
    return Result(
        rows,
        [PREDICTED, "The paper's figures are a range over both clusters, in the text. " + WRONG_LINK],
        [
            Claim(
                "TLq-HS (gradients) brings more than qWD (weights), and both together the most",
                all(of[f"qWD, {name}"] < of[f"TLq-HS, {name}"] < of[f"SDP4Bit, {name}"] for name in GPUS),
            ),
            *(
                Claim(
                    f"{label}: {FIGURES('Figure 8', label, 'speedup, least')}x to "
                    f"{FIGURES('Figure 8', label, 'speedup, most')}x; "
                    f"predicted {of[f'{label}, H800']:.2f}x and {of[f'{label}, A100']:.2f}x",
                    of[f"{label}, H800"] >= FIGURES("Figure 8", label, "speedup, least") - 0.05
                    and of[f"{label}, A100"] >= FIGURES("Figure 8", label, "speedup, most") - 0.05,
                )
                for label in tries
            ),
        ],
        [bars(rows, "part", ["speedup", "least (paper)", "most (paper)"], "of the baseline's throughput", "speedup")],
    )
