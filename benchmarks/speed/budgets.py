"""Kernel launches, collectives, host synchronizations, bytes and memory of a step on CUDA, for any number of ranks.

    python benchmarks/speed/budgets.py                            # the tables of docs/gpu.md
    python benchmarks/speed/budgets.py --model gpt2 --engine ddp --ranks 8 --methods int8 topk
    python benchmarks/speed/budgets.py --model gpt2 --engine ddp --methods int8 --list     # every launch, by name
    python benchmarks/speed/budgets.py --model net20m --ranks 4 --per-node 1       # a preset of `thinwire train`

Nothing is measured and no GPU is needed: a dry run plays a step of the steady state on tensors without storage,
through the host code of the CUDA kernels, over groups that only count. It is a step as a run takes it: guard, outlier
clip, clipping of the mean, the agreed flag, the method, the optimizer (AdamW: fused). An operation of torch on lists
counts as CUDA launches it (tests/support/launches.py), and a wait of the host where it happens. Bytes are those that
kernels read and write, whatever caches save: of torch's operations their operands, of ours what they touch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import dry_cuda
from launches import LaunchWatch
from thinwire.core.bucket import Layout, Piece, Shard
from thinwire.core.exchange import AllReduce, Exchange, ReduceScatter
from thinwire.core.method import Parameter
from thinwire.core.names import role_of
from thinwire.core.selection import keep_dense
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm
from thinwire.network.ledger import Ledger
from thinwire.plan.dry_run import dry_run, stand_in_run
from thinwire.plan.plan import road_of
from thinwire.proof.ranks import Shapes
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS
from whole_step import WholePlayback

METHODS = (
    "dense", "bf16", "int8", "sdp4bit", "radius", "scape", "topk", "trickle", "separate", "powersgd", "onebit-adam",
    "tagc",
)  # fmt: skip
CAP = 25 * 2**20
"""Bytes of a DDP bucket."""


@dataclass(frozen=True)
class Budget:
    """Of one rank and step. ``sent``: bytes of gradients; ``weights``: of one gathering. ``held``, ``peak``: bytes.

    ``syncs``: waits of the host. ``moved``: bytes that all kernels read and write, for each of the model's values.
    ``names``: launches by name; ``bytes``: those of ``moved``; ``waits``: by reason. ``buffers``: of the engine's.
    ``buckets``: parts of these that travel each in its own way, what is compressed and, in the same buffer, what stays
    dense.
    """

    launches: float
    ours: float
    collectives: float
    syncs: float
    moved: float
    sent: float
    weights: float
    held: int
    peak: int
    names: Mapping[str, float]
    bytes: Mapping[str, float]
    waits: Mapping[str, float]
    buffers: int
    buckets: int


def gpt2() -> list[Shapes]:
    """The 148 tensors of GPT-2 (124M), module by module, the root last."""
    d = 768
    norm = {"weight": d, "bias": d}
    linears = {"attn.c_attn": (3 * d, d), "attn.c_proj": (d, d), "mlp.c_fc": (4 * d, d), "mlp.c_proj": (d, 4 * d)}
    blocks: list[Shapes] = []
    for i in range(12):
        block: Shapes = {f"h.{i}.ln_{j}.{name}": n for j in (1, 2) for name, n in norm.items()}
        for name, shape in linears.items():
            block |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[0]}
        blocks.append(block)
    return [*blocks, {"wte.weight": (50257, d), "wpe.weight": (1024, d), "ln_f.weight": d, "ln_f.bias": d}]


def llama() -> list[Shapes]:
    """The 291 tensors of a Llama of 7 billion parameters, module by module, the root last."""
    d, hidden = 4096, 11008
    shapes = {f"self_attn.{name}_proj": (d, d) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (hidden, d), "mlp.up_proj": (hidden, d), "mlp.down_proj": (d, hidden)}
    blocks: list[Shapes] = [
        {f"layers.{i}.{name}.weight": shape for name, shape in shapes.items()}
        | {f"layers.{i}.{name}.weight": d for name in ("input_layernorm", "post_attention_layernorm")}
        for i in range(32)
    ]
    return [*blocks, {"embed_tokens.weight": (32000, d), "norm.weight": d, "lm_head.weight": (32000, d)}]


def preset(name: str, vocabulary: int | None = 256) -> list[Shapes]:
    """The tensors of one of ``thinwire train``'s models, with bytes as tokens. ``vocabulary`` None: the model's own."""
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(PRESETS[name], vocabulary=vocabulary or PRESETS[name].vocabulary))
    modules: dict[str, Shapes] = {}
    for of, tensor in model.named_parameters():
        block = ".".join(of.split(".")[:2]) if of.startswith("blocks.") else "root"
        modules.setdefault(block, {})[of] = tuple(tensor.shape)
    root = modules.pop("root")
    return [*modules.values(), root]


MODELS = {"gpt2": gpt2, "llama": llama} | {name: functools.partial(preset, name) for name in PRESETS}


def parameter(name: str, given: int | tuple[int, ...], ranks: int) -> Parameter:
    """``ranks``: over which it is sharded."""
    shape = (given,) if isinstance(given, int) else given
    local = -(-shape[0] // ranks) * math.prod(shape[1:])
    norm = "norm" in name or ".ln_" in name or name.startswith("ln_")
    role = "norm" if norm else "embedding" if name.startswith(("wte", "wpe", "embed")) else role_of(name, None)
    return Parameter(name, shape, math.prod(shape), role, torch.float32, local)


def sharded(modules: Sequence[Sequence[Parameter]], exchange: Exchange) -> Layout:
    """FSDP2: a buffer and a shard for each module, the last one's first."""
    buffers, shards = [], []
    for module in reversed(modules):
        total, place, pieces, own = sum(of.local for of in module), 0, [], []
        for of in module:
            pieces.append(Piece(of.name, place, of.local * exchange.ranks, exchange.ranks, total))
            own.append(Piece(of.name, place, of.local))
            place += of.local
        buffers.append(tuple(pieces))
        shards.append(Shard(tuple(own), (), total, torch.float32))
    return Layout(buffers, [torch.float32] * len(buffers), shards, exchange.comm)


def replicated(parameters: Iterable[Parameter]) -> Layout:
    """DDP: buckets of up to ``CAP`` bytes, the last parameter first."""
    buffers: list[tuple[Piece, ...]] = []
    pieces: list[Piece] = []
    size = 0
    for of in reversed(list(parameters)):
        if pieces and 4 * (size + of.numel) > CAP:
            buffers.append(tuple(pieces))
            pieces, size = [], 0
        pieces.append(Piece(of.name, size, of.numel))
        size += of.numel
    return Layout([*buffers, tuple(pieces)], [torch.float32] * (len(buffers) + 1))


def budget(method: str, model: str, engine: str, ranks: int, per_node: int = 8) -> Budget:
    """Of ``method`` with ``ranks`` ranks, ``per_node`` on a node; ``engine``: ddp or fsdp2."""
    comm = CountingComm(0, [rank // per_node for rank in range(ranks)], Ledger())
    exchange = AllReduce(comm) if engine == "ddp" else ReduceScatter(comm)
    shards = ranks if engine == "fsdp2" else 1
    modules = [[parameter(name, shape, shards) for name, shape in of.items()] for of in MODELS[model]()]
    parameters = [of for module in modules for of in module]
    layout = sharded(modules, exchange) if engine == "fsdp2" else replicated(parameters)
    made = resolve(method)
    run = dataclasses.replace(stand_in_run(made, parameters, exchange), shows_late=engine == "ddp")
    watch = LaunchWatch()
    with dry_cuda.run():
        found = dry_run(layout, road_of(made, parameters, exchange), run, [comm], watch, WholePlayback)
    counts = watch.average()
    launches, values = counts.launches, sum(of.numel for of in parameters)
    moved = {name: nbytes / values for name, nbytes in counts.moved.items()}
    return Budget(
        launches=sum(launches.values()),
        ours=sum(count for name, count in launches.items() if not name.startswith("aten.")),
        collectives=sum(found.collectives.values()),
        syncs=sum(counts.waits.values()),
        moved=sum(moved.values()),
        sent=sum(found.sent.values()),
        weights=found.weights,
        held=found.memory.resident,
        peak=found.memory.peak,
        names=launches,
        bytes=moved,
        waits=counts.waits,
        buffers=len(layout.buffers),
        buckets=sum(
            len({keep_dense(made, run.parameters[of.name]) is None for of in pieces}) for pieces in layout.buffers
        ),
    )


def listing(model: str, engine: str, ranks: Sequence[int], methods: Sequence[str], per_node: int) -> None:
    """Every launch by name, a column for each number of ranks; below, what is beyond dense's, per bucket and buffer."""
    dense = {count: budget("dense", model, engine, count, per_node) for count in ranks}
    for method in methods:
        for count in ranks:
            budget(method, model, engine, count, per_node)  # copies tables of places, which later steps find
        of = {count: budget(method, model, engine, count, per_node) for count in ranks}
        any_of = of[ranks[0]]
        print(f"### {method}, {model}, {engine}: {any_of.buffers} buffers, {any_of.buckets} buckets\n")
        print("| launches with N = |" + "".join(f" {count} |" for count in ranks))
        print("|---|" + "--:|" * len(ranks))
        for name in sorted({name for each in of.values() for name, times in each.names.items() if times}):
            print(f"| `{name}` |" + "".join(f" {of[count].names.get(name, 0):.4g} |" for count in ranks))
        print("| all |" + "".join(f" {of[count].launches:.4g} |" for count in ranks))
        for name, moved in sorted(any_of.bytes.items(), key=lambda item: -item[1]):
            if moved >= 0.05:
                print(f"| bytes per value: `{name}` |" + "".join(f" {of[n].bytes.get(name, 0):.2f} |" for n in ranks))
        print("| bytes per value |" + "".join(f" {of[count].moved:.1f} |" for count in ranks))
        for why in sorted({why for each in of.values() for why in each.waits}):
            print(f"| host waits: {why} |" + "".join(f" {of[count].waits.get(why, 0):.3g} |" for count in ranks))
        beyond = {count: of[count].launches - dense[count].launches for count in ranks}
        print("| beyond dense, per bucket |" + "".join(f" {beyond[n] / any_of.buckets:.1f} |" for n in ranks))
        print("| beyond dense, per buffer |" + "".join(f" {beyond[n] / any_of.buffers:.1f} |" for n in ranks))
        print(flush=True)


def table(model: str, engine: str, ranks: Sequence[int], methods: Sequence[str], per_node: int) -> None:
    values = sum(parameter(name, shape, 1).numel for of in MODELS[model]() for name, shape in of.items())
    print(f"### {model}, {engine}: {values / 1e6:.0f} million values\n")
    columns = "launches (ours) | bytes per value | collectives | host waits | MB sent | MB per gathering | GB held"
    print(f"| method | N | {columns} | GB at peak |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for method in methods:
        for count in ranks:
            budget(method, model, engine, count, per_node)  # copies tables of places, which later steps find
            of = budget(method, model, engine, count, per_node)
            digits = 1 if values > 1e8 else 3
            sent = f"{of.sent / 1e6:.{digits}f} | {of.weights / 1e6:.{digits}f}"
            sizes = f"{sent} | {of.held / 1e9:.2f} | {of.peak / 1e9:.2f}"
            kernels = f"{of.launches:.0f} ({of.ours:.0f}) | {of.moved:.1f}"
            calls = f"{kernels} | {of.collectives:.0f} | {of.syncs:.3g}"
            print(f"| `{method}` | {count} | {calls} | {sizes} |", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="default: gpt2 on both engines, llama on fsdp2")
    parser.add_argument("--engine", choices=("ddp", "fsdp2"), default="fsdp2")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--per-node", type=int, default=8, help="ranks on a node")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--list", action="store_true", help="every launch by name, instead of a table")
    options = parser.parse_args()
    every = [("gpt2", "ddp"), ("gpt2", "fsdp2"), ("llama", "fsdp2")]
    for model, engine in [(options.model, options.engine)] if options.model else every:
        (listing if options.list else table)(model, engine, options.ranks, options.methods, options.per_node)


if __name__ == "__main__":
    main()
