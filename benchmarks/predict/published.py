"""Holds predictions against step times that others have published.

    python benchmarks/predict/published.py           # every row of classes a and b, predicted; then the score
    python benchmarks/predict/published.py --write   # the same, into docs/data/predicted.csv for docs/predictions.md
    python benchmarks/predict/published.py --fit     # the clusters' fitted constants, from the rows that they name

docs/data/published.csv has the rows and their classes, which were written down before: (a) dense rows and communication
times, (b) rows of a method, with the authors' own overhead or kernel rate as an input that the row names, (c) rows that
the printed set-up cannot explain, each with its arithmetic. docs/data/diloco_measured.csv has 51 measured runs, all a.

Models come from shapes, timelines from the library's dry run of the method (in its paper's form), constants from the
shipped clusters. Where a paper prints its method's overhead, it takes the place of our kernels' passes, because the
rows hold the authors' code, not ours.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from thinwire.predict.cluster import Cluster, Constant, Kernel, cluster_names, read_cluster
from thinwire.predict.layouts import timeline_of
from thinwire.predict.play import Costs, play
from thinwire.predict.profile import ModelProfile, profile_of
from thinwire.predict.timeline import Group, Message, Pass, Stretch, Timeline
from thinwire.train.model.decoder import Block, Decoder
from thinwire.train.model.shapes import PRESETS, ModelConfig

DATA = Path(__file__).resolve().parents[2] / "docs" / "data"
META = torch.device("meta")
ONE_BUCKET = 1_000_000
"""MB of a DDP bucket that takes the whole model: nothing leaves before the backward pass has ended."""

Row = dict[str, str]
LLAMA = ModelConfig("llama", vocabulary=32000)
SHAPES = {
    "GPT-2.0B": PRESETS["gpt-2.0b"],
    "Llama-500M (H2O-Danube3-500M)": replace(PRESETS["llama-500m"], context=4096),
    "Llama-1.8B (H2O-Danube3-1.8B)": PRESETS["llama-1.8b"],
    "GPT-2 small (untied)": PRESETS["gpt-125m"],
    "GPT-1.3B": ModelConfig(layers=24, width=2048, heads=16, context=2048, vocabulary=50304),
    "GPT-6.7B": ModelConfig(layers=32, width=4096, heads=32, context=2048, vocabulary=50304),
    "GPT-13B": ModelConfig(layers=40, width=5120, heads=40, context=2048, vocabulary=50304),
    "Llama 3 8B": replace(
        LLAMA, layers=32, width=4096, heads=32, kv_heads=8, hidden=14336, context=8192, vocabulary=128256
    ),
    "diloco-measured": replace(LLAMA, layers=6, width=256, heads=8, hidden=768, context=512, vocabulary=50257),
}
SHAPES["Llama 3.1 8B"] = SHAPES["Llama 3 8B"]


@functools.cache
def model_of(name: str) -> nn.Module:
    """Make a model of ``SHAPES`` on the meta device."""
    with META:
        model = Decoder(SHAPES[name])
        if "untied" in name:
            model.head.weight = nn.Parameter(torch.empty_like(model.embedding.weight))
        if name == "diloco-measured":  # its rotary caches, one per layer and one more: (131072, 16) floats
            for number in range(7):
                model.register_buffer(f"rope{number}", torch.empty(131072, 16))
    return model


@functools.cache
def profile(name: str, recomputed: float = 0.0) -> ModelProfile:
    """Count the computing of one sequence. ``recomputed``: of a forward pass, once more in the backward pass."""
    tokens = torch.zeros(1, SHAPES[name].context, dtype=torch.long, device=META)
    counted = profile_of(model_of(name), (tokens, tokens))
    modules = [
        replace(module, backward_flops=module.backward_flops + recomputed * module.forward_flops)
        for module in counted.modules
    ]
    return replace(counted, modules=tuple(modules))


@functools.cache
def record(name: str, method: str, nodes: int, per_node: int, *, units: str = "", **settings) -> Timeline:
    """Record ``method`` on DDP, or on FSDP2 with the sharded ``units``: "model", "blocks" or "layers"."""
    model = model_of(name)
    wraps: dict[str, Callable[[str, nn.Module], bool]] = {
        "model": lambda name, module: False,
        "blocks": lambda name, module: isinstance(module, Block),
        "layers": lambda name, module: isinstance(module, Block | nn.Embedding) or module is model.head,
    }
    if units:
        settings |= {"engine": "fsdp2", "wrap": wraps[units], "reshard": units != "model"}
    return timeline_of(model, method, nodes=nodes, per_node=per_node, **{"engine": "ddp", **settings})


def edit(timeline: Timeline, change: Callable[[Pass | Message], Pass | Message | None]) -> Timeline:
    """Change each event, or leave it out."""

    def edited(stretch: Stretch) -> Stretch:
        events = (change(event) for event in stretch.events)
        return replace(stretch, events=tuple(event for event in events if event is not None))

    steps = [
        replace(
            step,
            **{name: tuple(map(edited, getattr(step, name))) for name in ("forward", "again", "gradients")},
            update=edited(step.update),
        )
        for step in timeline.steps
    ]
    return replace(timeline, steps=tuple(steps))


def without_ours(timeline: Timeline, *, codec: bool = False) -> Timeline:
    """Leave our kernels out, where the authors' overhead takes their place; with ``codec``, all but the codec's.

    Megatron has neither FSDP2's copies nor our guard.
    """
    return edit(
        timeline,
        lambda event: (
            event if isinstance(event, Message) or (codec and event.kernel.startswith("thinwire.ops.")) else None
        ),
    )


def nominal(costs: Costs, stretches: Iterable[Stretch]) -> float:
    """Sum the seconds of all kernels and messages of ``stretches``."""
    events = [event for stretch in stretches for event in stretch.events]
    return sum(float((costs.kernel(e) if isinstance(e, Pass) else costs.message(e))[0]) for e in events)


@dataclass(frozen=True)
class Published:
    """The published rows, by their names, and the inputs that some of them need of others."""

    rows: dict[str, Row]

    @classmethod
    def read(cls) -> Published:
        with (DATA / "published.csv").open(newline="") as file:
            return cls({row["row"]: row for row in csv.DictReader(file)})

    def value(self, row: str) -> float:
        return float(self.rows[row]["value"])


PUBLISHED = Published.read()


# One function for each source: a row and the constants of its cluster -> the predicted number, in the row's unit.


def radius(row: Row, cluster: Cluster) -> float:
    def step(method: str) -> tuple[float, float]:
        """Return the seconds of a step and of its messages."""
        timeline = without_ours(record("GPT-2.0B", method, 16, 4, bucket_cap_mb=ONE_BUCKET))
        prediction = play(timeline, profile("GPT-2.0B"), cluster, sequences=8)
        return prediction.seconds, prediction.busy["network"]

    scheme = row["scheme"]
    if "powersgd" in scheme:  # a dry run of rank 128 takes minutes; bytes and seconds are linear in the rank
        four, eight = (np.array(step(f"powersgd:paper(rank={rank})")) for rank in (4, 8))
        seconds, messages = four + (128 - 4) / 4 * (eight - four)
    else:
        density = scheme.partition("d=")[2].partition(",")[0]
        seconds, messages = step(f"radius:paper(density={density})" if density else "dense")
    if row["quantity"] == "all-reduce time":
        return 1e3 * messages
    overhead = {"dense": "radius-03", "powersgd(rank=128)": "radius-06", "radius(d=0.1,T=200)": "radius-12"}
    seconds += PUBLISHED.value(overhead.get(scheme, "radius-09")) / 1e3
    if row["quantity"] == "step time":
        return 1e3 * seconds
    return (60e3 * step("dense")[0] + 240e3 * seconds) / 86400


def scape(row: Row, cluster: Cluster) -> float:
    name, sharded = row["model"], "distributed optimizer" in row["scheme"]

    def step(gpus: int) -> float:
        settings = {"units": "model", "gather_dtype": torch.bfloat16} if sharded else {"bucket_cap_mb": ONE_BUCKET}
        timeline = without_ours(record(name, "dense", gpus, 1, **settings))
        return play(timeline, profile(name), cluster, sequences=1024 / gpus).seconds

    if "efficiency" in row["quantity"]:
        return 100 * step(4) / 16 / step(64)
    seconds = step(int(row["gpus"]))
    return seconds * 1e5 / 86400 if row["unit"] == "days" else seconds * 1e3


def tagc(row: Row, cluster: Cluster) -> float:
    name, costs = row["model"], Costs(cluster)
    timeline = record(name, "dense", 2, 1, units="layers")
    (step,) = timeline.steps
    gather, exchange = nominal(costs, step.again), nominal(costs, step.gradients)
    per_mb = 1e9 * exchange / (4 * sum(timeline.numel.values()))
    if row["quantity"] == "gradient exchange":
        return per_mb
    if row["scheme"].startswith("tagc("):
        ratio = PUBLISHED.value("tagc-06") / per_mb
        timeline = edit(
            timeline, lambda e: replace(e, nbytes=e.nbytes * ratio) if getattr(e, "verb", "") == "reduce_scatter" else e
        )
    # Computing in the backward pass is a share of the dense one's time, which is that of its messages.
    computing = PUBLISHED.value("tagc-07") / 100
    backward = float(costs.computing(sum(module.backward_flops for module in profile(name).modules))[0])
    prediction = play(timeline, profile(name), cluster, sequences=computing * (gather + exchange) / backward)
    dense_backward = prediction.seconds - prediction.split["computing"] / 3
    return {
        "iteration time": 20 * prediction.seconds,
        "communication / backward time": 100 * (gather + exchange) / (dense_backward - nominal(costs, step.forward)),
        "reduce-scatter / communication in backward": 100 * exchange / (gather + exchange),
    }[row["quantity"]]


def sdp4bit(row: Row, cluster: Cluster) -> float:
    """Predict with tensor parallelism: each rank has 1/T of every layer, and T groups share a node's NICs."""
    name, gpus = row["model"], int(row["gpus"])
    split = {"GPT-1.3B": 1, "GPT-6.7B": 4, "GPT-13B": 8}[name]
    per_node = max(cluster.per_node // split, 1)
    dense = record(name, "dense", gpus // split // per_node, per_node, units="model", gather_dtype=torch.bfloat16)
    timeline = dense
    if row["scheme"] != "dense":
        ours = "sdp4bit:ulq" if row["scheme"].startswith("ULq") else "sdp4bit:paper"
        timeline = record(name, ours, gpus // split // per_node, per_node, units="model", gather_dtype=torch.bfloat16)
        optimizer = Kernel(0.0, cluster.memory_rate.value * cluster.memory_share.value)
        rate = Constant(1e9 * PUBLISHED.value("sdp4bit-36"), "measured")
        cluster = replace(
            cluster, memory_rate=rate, memory_share=Constant(1.0, "measured"), kernels={"optimizer": optimizer}
        )

    def shared(event: Pass | Message) -> Pass | Message:
        event = replace(event, nbytes=event.nbytes / split)
        return (
            replace(event, group=replace(event.group, beside=event.group.beside * split))
            if isinstance(event, Message)
            else event
        )

    timeline = edit(without_ours(timeline, codec=True), shared)
    timeline = replace(timeline, optimizer_bytes=timeline.optimizer_bytes / split)
    costs = Costs(cluster)
    if row["quantity"] == "gradient communication time":
        return 1e3 * nominal(costs, timeline.steps[0].gradients)
    timeline = replace(timeline, per_node=cluster.per_node)
    seconds = play(timeline, profile(name), cluster, sequences=1 / split).seconds
    shape = SHAPES[name]
    if split > 1:  # two sums of the activations forwards and two backwards, in each layer
        nbytes = 2 * 2 * shape.context * shape.width * (split - 1) / split
        message = Message("all_reduce", nbytes, Group(split, split), rounds=2 * (split - 1))
        seconds += 4 * shape.layers * float(costs.message(message)[0])
    # Megatron's count: attention is not halved, nothing is computed again.
    width, length, layers = shape.width, shape.context, shape.layers
    flops = 72 * length * layers * width**2 * (1 + length / 6 / width + shape.vocabulary / 16 / layers / width)
    return flops / split / seconds / 1e12


def onebit(row: Row, cluster: Cluster) -> float:
    """Predict the time of an all-reduce of 3.4e8 values of two bytes."""
    gpus, per_node = int(row["gpus"]), cluster.per_node
    nbytes = 2 * (gpus - 1) / gpus * 2 * float(row["params"])
    message = Message("all_reduce", nbytes, Group(gpus, min(per_node, gpus)), rounds=2 * (gpus - 1))
    return 1e3 * float(Costs(cluster).message(message)[0])


def titan(row: Row, cluster: Cluster) -> float:
    gpus, tokens = int(row["gpus"]), int(row["tokens_per_gpu_step"])
    if "compile" in row["precision"]:
        gain = PUBLISHED.value("titan-h100-03") / PUBLISHED.value("titan-h100-01")
        cluster = replace(
            cluster, compute_share=replace(cluster.compute_share, value=cluster.compute_share.value * gain)
        )
    timeline = record(row["model"], "dense", gpus // 8, 8, units="blocks", gather_dtype=torch.bfloat16)
    recomputed = 0.5 if "selective layer" in row["engine"] else 0.3
    sequences = tokens / SHAPES[row["model"]].context
    return tokens / play(timeline, profile(row["model"], recomputed), cluster, sequences=sequences).seconds


def diloco(run: Row, cluster: Cluster) -> float:
    """Predict the mean seconds of a measured step of one run.

    Of the run's own set-up come the link's rate (iperf3) and the number of outer steps among those measured.
    """
    name, requested = "diloco-measured", run["requested_bit_s"]
    if requested != "unshaped":
        cluster = cluster.with_link(float(run["measured_bit_s"] or 0.9925 * float(requested)) / 8)
    if run["algorithm"] == "ddp":
        return play(record(name, "dense", 4, 1), profile(name), cluster, sequences=4).seconds
    every, measured = int(run["H"]), int(run["steps_measured"])
    warm = {90: 10, 95: 5, 180: 20, 140: 10, 130: 20, 72: 8, 30: 5, 32: 3, 10: 2, 14: 1}[measured]
    outer = sum((step + 1) % every == 0 for step in range(warm, warm + measured)) / measured
    timeline = record(name, f"local-steps(every={every})", 4, 1, bucket_cap_mb=ONE_BUCKET, broadcast_buffers=False)
    loudest = max(timeline.steps, key=lambda step: sum(m.nbytes for s in step.stretches for m in s.messages))
    quiet = min(timeline.steps, key=lambda step: sum(m.nbytes for s in step.stretches for m in s.messages))
    steps = (replace(loudest, share=outer), replace(quiet, share=1 - outer))
    return play(replace(timeline, steps=steps), profile(name), cluster, sequences=4).seconds


SOURCES: dict[str, tuple[Callable[[Row, Cluster], float], Callable[[Row], str]]] = {
    "Radius": (radius, lambda row: "perlmutter-a100"),
    "SCAPE": (scape, lambda row: "scape-gh200"),
    "TAGC": (tagc, lambda row: "tagc-3080"),
    "SDP4Bit": (sdp4bit, lambda row: "sdp4bit-a100" if "A100" in row["interconnect_intra"] else "sdp4bit-h800"),
    "1-bit Adam": (onebit, lambda row: "onebit-eth40" if "40 GbE" in row["interconnect_inter"] else "onebit-edr100"),
    "torchtitan benchmarks 2024-12": (titan, lambda row: "titan-h100"),
    "torchtitan docs 2024 (A100)": (titan, lambda row: "titan-a100"),
}
"""Paper -> its function, and the cluster of a row."""


@dataclass(frozen=True)
class Held:
    """A published number beside its prediction. ``fitted``: a constant of the cluster comes from this row."""

    row: str
    source: str
    kind: str
    what: str
    unit: str
    published: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def runs() -> list[Row]:
    """Return the runs of diloco-measured whose steps were timed."""
    with (DATA / "diloco_measured.csv").open(newline="") as file:
        table = csv.DictReader(line for line in file if line[0] != "#")
        return [run for run in table if run["compute_s"]]


def link_of(run: Row) -> str:
    return "unshaped" if run["requested_bit_s"] == "unshaped" else f"{float(run['requested_bit_s']) / 1e6:.0f} Mbit/s"


def run_cluster(run: Row) -> str:
    return "diloco-l40s-50m" if link_of(run) == "50 Mbit/s" else "diloco-l40s"


def hold(clusters: dict[str, Cluster]) -> list[Held]:
    """Predict every row of classes a and b, and every run."""
    fitted = {
        name: {c.source.removeprefix("fitted:") for c in cluster.constants.values() if "fitted:" in c.source}
        for name, cluster in clusters.items()
    }
    table = []
    for row in PUBLISHED.rows.values():
        if row["class"] in ("a", "b"):
            predict, choose = SOURCES[row["paper"]]
            name = choose(row)
            source = row["paper"] if row["paper"] in ("Radius", "SCAPE", "TAGC") else name
            what = f"{row['model']}, {row['gpus']} GPUs, {row['scheme']}: {row['quantity']}"
            value = predict(row, clusters[name])
            table.append(
                Held(row["row"], source, row["class"], what, row["unit"], float(row["value"]), value,
                     row["row"] in fitted[name])
            )  # fmt: skip
    for run in runs():
        name = run_cluster(run)
        seconds = float(run["total_s"]) / int(run["steps_measured"])
        what = f"{run['algorithm']}, H={run['H']}, repeat {run['repeat']}: step time"
        is_fitted = run["run"] in fitted[name] and name == "diloco-l40s-50m"  # else its computing alone was fitted
        table.append(
            Held(run["run"], f"diloco-measured {link_of(run)}", "a", what, "s", seconds, diloco(run, clusters[name]),
                 is_fitted)
        )  # fmt: skip
    return table


# The fit


def target(field: str, row: str, cluster: Cluster) -> float:
    """Return predicted / published of the row from which ``field`` comes; of a run's computing, seconds alone."""
    if row in PUBLISHED.rows:
        published = PUBLISHED.rows[row]
        return SOURCES[published["paper"]][0](published, cluster) / float(published["value"])
    run = next(run for run in runs() if run["run"] == row)
    if field != "compute_share":
        return diloco(run, cluster) * int(run["steps_measured"]) / float(run["total_s"])
    split = play(record("diloco-measured", "dense", 4, 1), profile("diloco-measured"), cluster, sequences=4).split
    seconds = (float(run["compute_s"]) + float(run["optimizer_s"])) / int(run["steps_measured"])
    return (split["computing"] + split["optimizer"]) / seconds


def fit(cluster: Cluster) -> Cluster:
    """Solve for the fitted constants, one row for each: a few rounds of Newton's steps in logarithms."""
    fields = {name: c.source.removeprefix("fitted:") for name, c in cluster.constants.items() if "fitted:" in c.source}

    def moved(name: str, factor: float) -> Cluster:
        constant = getattr(cluster, name)
        return replace(cluster, **{name: replace(constant, value=constant.value * factor)})

    for _ in range(12):
        for name, row in fields.items():
            error = math.log(target(name, row, cluster))
            slope = (math.log(target(name, row, moved(name, 1.01))) - error) / math.log(1.01)
            if abs(slope) > 1e-3:
                cluster = moved(name, math.exp(max(-1.0, min(1.0, -error / slope))))
    return cluster


def show(table: list[Held]) -> None:
    for held in table:
        mark = "  fitted" if held.fitted else ""
        print(
            f"{held.row:26} {held.kind}  {held.published:10.4g} {held.predicted:10.4g} {held.unit:8} "
            f"{held.error:+7.1%}  {held.what}{mark}"
        )
    print()
    for kind in "ab":
        medians = []
        for source in dict.fromkeys(held.source for held in table):
            errors = [h.error for h in table if (h.source, h.kind, h.fitted) == (source, kind, False)]
            if errors:
                medians.append(statistics.median(map(abs, errors)))
                print(
                    f"{kind}  {source:28} {len(errors):3} rows  median {medians[-1]:6.1%}  "
                    f"worst {max(errors, key=abs):+7.1%}"
                )
        print(f"{kind}  median of {len(medians)} sources: {statistics.median(medians):.1%}")


def write(table: list[Held]) -> None:
    with (DATA / "predicted.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "source", "class", "what", "unit", "published", "predicted", "fitted"])
        for held in table:
            writer.writerow(
                [held.row, held.source, held.kind, held.what, held.unit, f"{held.published:.6g}",
                 f"{held.predicted:.4g}", "yes" if held.fitted else ""]
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/data/predicted.csv")
    parser.add_argument(
        "--fit", nargs="*", metavar="CLUSTER", help="print the fitted constants anew, of all or of these"
    )
    options = parser.parse_args()
    clusters = {name: read_cluster(name) for name in cluster_names()}
    if options.fit is not None:
        for name in options.fit or clusters:
            for field, constant in fit(clusters[name]).constants.items():
                if "fitted:" in constant.source:
                    print(f"{name:18} {field:14} {constant.value:9.4g}  {constant.source}")
        return 0
    table = hold(clusters)
    show(table)
    if options.write:
        write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
