"""How the experiments measure: training on virtual ranks, plans of whole models, comparisons on an emulated network."""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
import random
import shutil
import string
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path += [str(Path(__file__).parents[1] / room) for room in ("loss", "speed")]

import budgets
import regimes
import virtual
from frame import Settings
from thinwire.base.errors import ThinwireError
from thinwire.core.exchange import AllReduce, ReduceScatter
from thinwire.core.names import describe
from thinwire.lab.compare import Comparison, compare
from thinwire.methods import resolve
from thinwire.network.comm import CountingComm
from thinwire.network.ledger import Ledger
from thinwire.plan.plan import Plan, plan_of
from thinwire.train.data.corpus import SPAN, read_corpus
from thinwire.train.data.windows import Windows, batches
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

Run = dict[str, Any]
Look = Callable[[virtual.Rank, int], None]
Make = Callable[[regimes.Job, Path], Run]
SPACE = ord(" ")
WIDTHS = {name: shape.width for name, shape in PRESETS.items()}
RANKS = 4
"""Virtual ranks of a training run, in one process."""
HELD_OUT_SPANS = 8


def corpora(settings: Settings) -> Path:
    """Return the folder of the texts: the user's, or one with Python's standard library (a dry pass: with noise)."""
    if settings.corpora is not None:
        for name in (name for pair in regimes.TEXTS.values() for name in pair):
            if not (settings.corpora / name).exists():
                raise ThinwireError(f"no {name} in {settings.corpora}: --corpora is the folder of the texts")
        return settings.corpora.resolve()
    folder = (settings.out / ("noise" if settings.dry else "stdlib")).resolve()
    if not folder.exists():
        folder.mkdir(parents=True)
        words = random.Random(0)
        text = "".join(words.choices(string.printable, k=4 * SPAN)) if settings.dry else read_corpus(["stdlib"])
        held_out = SPAN if settings.dry else HELD_OUT_SPANS * SPAN
        for train, valid in regimes.TEXTS.values():
            (folder / train).write_bytes(lzma.compress(text[held_out:].encode(), preset=0))
            (folder / valid).write_bytes(lzma.compress(text[:held_out].encode(), preset=0))
    return folder


def trained(
    settings: Settings,
    methods: Mapping[str, str],
    steps: int,
    *,
    model: str = "tiny",
    text: str = "wikitext",
    lr: float = 4e-3,
    ranks: int = RANKS,
    make: Make | None = None,
    file: str = "runs.jsonl",
) -> dict[str, list[Run]]:
    """Train with each of ``methods`` (label -> method, with flags of ``thinwire train``) and return its runs by seed.

    A run: "valid" (nats per byte; None: it diverged), "curve" (step, validation loss), "train", "tasks", "bytes",
    "dense_bytes", "facts". Runs that are in ``settings.out`` already are not repeated.
    ``make``: trains; None: ``trained_once``. ``file``: of the runs.
    """
    return {
        label: [
            remembered(
                settings,
                regimes.Job("scratch", text, model, ranks, method, lr, seed, settings.length(steps)),
                make or trained_once,
                file,
            )
            for seed in range(settings.seeds)
        ]
        for label, method in methods.items()
    }


def remembered(
    settings: Settings, job: regimes.Job, make: Make, file: str = "runs.jsonl"
) -> Run:
    """Return the run of ``job`` from ``file`` in ``settings.out``; ``make(job, folder of the texts)`` if it is new."""
    folder = corpora(settings)
    for run in read(settings.out / file):
        if run["job"] == job.key and run["corpora"] == folder.name:
            return run
    print(f"training {job.method} ({job.model}), seed {job.seed} ...", file=sys.stderr, flush=True)
    run = {"job": job.key, "corpora": folder.name, **make(job, folder)}
    regimes.append(settings.out / file, run)
    return run


def read(file: Path) -> list[Run]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trained_once(
    job: regimes.Job, folder: Path, look: Look | None = None, start: dict[str, torch.Tensor] | None = None
) -> Run:
    """Train on virtual ranks, from the weights ``start``; ``look`` is called behind every step of rank 0."""
    torch.set_num_threads(1)
    config, evaluated = job.config(), min(regimes.EVALUATED, 8 * job.steps)
    texts = (job.text, *(name for name in regimes.TEXTS if name != job.text))
    train, *valid = (
        regimes.windows_of(folder, name, config.sequence_length, config.seed)
        for name in (regimes.TEXTS[job.text][0], *(regimes.TEXTS[text][1] for text in texts))
    )
    with watched(look):
        end = virtual.train(config, train, valid[0], batched=True, sequences=evaluated // 4, start=start)
    first = end.ranks[0]
    held_out = batches(valid[0].spread(evaluated), 16)
    last = end.losses[-max(len(end.losses) // 10, 1) :]
    return {
        "valid": regimes._number(virtual.evaluate(first.replica.model, held_out)),
        "curve": [[step, regimes._number(value)] for step, value in end.curve],
        "train": regimes._number(fmean(last)),
        "tasks": tasks(first.replica.model, valid, evaluated // 4),
        "bytes": first.sent,
        "dense_bytes": first.dense,
        "parameters": sum(parameter.numel for parameter in first.parameters.values()),
        "facts": {name: regimes._number(value) for name, value in first.method.facts().items()},
    }


@contextmanager
def watched(look: Look | None) -> Iterator[None]:
    """Call ``look(rank, step)`` behind every step of rank 0, while it is open."""
    step = virtual.Rank.step

    def watching(rank: virtual.Rank, turn: int) -> bool:
        done = step(rank, turn)
        if look is not None and rank.rank == 0:
            look(rank, turn)
        return done

    virtual.Rank.step = watching  # type: ignore[method-assign]
    try:
        yield
    finally:
        virtual.Rank.step = step  # type: ignore[method-assign]


@torch.no_grad()
def tasks(model: nn.Module, texts: Sequence[Windows], items: int) -> dict[str, float]:
    """Return what share a model gets right of tasks that it was not trained for, on its own text and on others.

    "next byte"; "end of word": the last letter of every word (after LAMBADA); "ending of 4": which second half of a
    window, out of 4, has the lowest loss behind the first half (after HellaSwag).
    """
    scores: dict[str, float] = {}
    for number, text in enumerate(texts):
        windows = torch.stack(text.spread(items)).long()
        inputs, targets = windows[:, :-1], windows[:, 1:]
        right = model(inputs).argmax(-1) == targets
        ends = (targets[:, :-1] != SPACE) & (targets[:, 1:] == SPACE)
        half = inputs.shape[1] // 2
        offered = torch.stack([targets[:, half:].roll(shift, 0) for shift in range(4)])
        costs = []
        for ending in offered:
            whole = torch.cat([windows[:, : half + 1], ending], 1)
            each = F.cross_entropy(model(whole[:, :-1]).transpose(1, 2), whole[:, 1:], reduction="none")
            costs.append(each[:, half:].sum(1))
        where = "" if number == 0 else ", other text"
        scores[f"next byte{where}"] = float(right.float().mean())
        scores[f"end of word{where}"] = float(right[:, :-1][ends].float().mean())
        scores[f"ending of 4{where}"] = float((torch.stack(costs).argmin(0) == 0).float().mean())
    return scores


def loss(runs: Sequence[Run]) -> float:
    """Return the mean validation loss over seeds; inf where one diverged."""
    return fmean(float("inf") if run["valid"] is None else run["valid"] for run in runs)


def curve(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Return the (step, validation loss) pairs, mean over seeds."""
    points = zip(*(run["curve"] for run in runs), strict=True)
    return [(point[0][0], fmean(float("nan") if loss is None else loss for _, loss in point)) for point in points]


def share(runs: Sequence[Run]) -> float:
    """Return the bytes sent over those that dense sends, over the whole run."""
    return runs[0]["bytes"] / runs[0]["dense_bytes"]


def task_scores(runs: Sequence[Run]) -> dict[str, float]:
    """Return what share of each task is right, mean over seeds."""
    return {task: fmean(run["tasks"][task] for run in runs) for task in runs[0]["tasks"]}


def values_of(preset: str) -> int:
    """Return the number of a model's parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(PRESETS[preset]).parameters())


def planned(
    preset: str, method: str, ranks: int, *, per_node: int = 1, sharded: bool = False, layers: int | None = None
) -> Plan:
    """Return the plan of ``method`` in its steady state for a whole model on ``ranks`` ranks. Nothing is computed.

    ``sharded``: reduce-scatter in place of all-reduce. ``layers``: instead of the model's.
    """
    shape = PRESETS[preset]
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(shape, layers=layers or shape.layers))
    parameters = list(describe(model).values())
    comm = CountingComm(0, [rank // per_node for rank in range(ranks)], Ledger())
    if sharded:
        parameters = [
            dataclasses.replace(p, local=-(-p.shape[0] // ranks) * (p.numel // p.shape[0])) for p in parameters
        ]
    return plan_of(resolve(method), parameters, (ReduceScatter if sharded else AllReduce)(comm))


def sent(preset: str, method: str, ranks: int, *, per_node: int = 1) -> tuple[float, float]:
    """Return the bytes of a step that ``method`` sends, and those that dense sends, for a whole model.

    For methods that treat every tensor alone: blocks are equal, so the plan of one is enough.
    """
    plan = planned(preset, method, ranks, per_node=per_node, layers=1)
    blocks = PRESETS[preset].layers
    weights = [blocks if row.parameter.name.startswith("blocks.") else 1 for row in plan.rows]
    pairs = list(zip(weights, plan.rows, strict=True))
    return sum(weight * row.wire_bytes for weight, row in pairs), sum(weight * row.dense_bytes for weight, row in pairs)


def held_mib(preset: str, method: str, engine: str, ranks: int) -> float:
    """Return the MiB that ``method`` holds on a GPU beside ``engine``, model and optimizer, one rank on a node."""
    budgets.MODELS[preset] = functools.partial(modules_of, preset)
    return budgets.budget(method, preset, engine, ranks, 1).held / 2**20


def modules_of(preset: str) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of a preset's tensors with its own vocabulary, module by module, the root last."""
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.named_parameters():
        block = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root"
        modules.setdefault(block, {})[name] = tuple(tensor.shape)
    return [*(shapes for block, shapes in modules.items() if block != "root"), modules["root"]]


def compared(
    settings: Settings,
    name: str,
    methods: Sequence[str],
    link: str,
    steps: int,
    *,
    preset: str = "net20m",
    nodes: int = 2,
    per_node: int = 1,
    flags: Sequence[str] = (),
) -> dict[str, Any] | None:
    """Train with each of ``methods`` on an emulated network by ``thinwire compare``; return its report (dry: None).

    ``name``: of the report's folder in ``settings.out``; an earlier report there is replaced.
    """  # fmt: skip
    if settings.dry:
        return None
    out = settings.out / "compare" / name
    shutil.rmtree(out, ignore_errors=True)
    text = ["--corpus", str(corpora(settings) / regimes.TEXTS["wikitext"][0])] if settings.corpora else []
    comparison = Comparison(
        nodes=nodes, ranks_per_node=per_node, link=link, methods=",".join(methods), preset=preset,
        steps=settings.length(steps), out=out, extra=(*text, *flags),
        command=f"thinwire paper {name.replace('-', ' ', 1)}",
    )  # fmt: skip
    compare(comparison)
    report = json.loads((out / "report.json").read_text())
    if not report["emulated_network"]:
        raise ThinwireError(
            "this machine allows no network namespaces, so there is no link to measure on (thinwire lab)"
        )
    for run in report["runs"]:
        if run["failed"]:
            raise ThinwireError(f"{run['method']} failed: {run['failed']}")
    return report


def summaries(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the runs of a report measured, in the order of its methods, the silent run first."""
    return [run["summary"] for run in report["runs"]]
