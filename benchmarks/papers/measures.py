"""How the experiments measure: training on virtual ranks, plans of whole models, comparisons on an emulated network."""

from __future__ import annotations

import dataclasses
import json
import lzma
import random
import shutil
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "loss"))

import regimes
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
from thinwire.train.model.decoder import Decoder
from thinwire.train.model.shapes import PRESETS

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
) -> dict[str, list[dict[str, Any]]]:
    """Train with each of ``methods`` (label -> method, with flags of ``thinwire train``) and return its runs by seed.

    A run is a row of ``regimes.py``: "valid" (nats per byte; None: diverged), "curve", "bytes", "dense_bytes", "facts".
    Those that are in ``settings.out`` already are not repeated.
    """  # fmt: skip
    torch.set_num_threads(1)
    place = regimes.Place(corpora(settings), settings.out.resolve() / "runs.jsonl", settings.out.resolve())
    runs: dict[str, list[dict[str, Any]]] = {}
    for label, method in methods.items():
        for seed in range(settings.seeds):
            job = regimes.Job("scratch", text, model, ranks, method, lr, seed, settings.length(steps))
            if job.key not in regimes.read(place.data):
                print(f"training {label}, seed {seed} ...", file=sys.stderr, flush=True)
                regimes.run(job, place)
            row = regimes.read(place.data)[job.key]
            if row["error"]:
                raise ThinwireError(f"{label}: {row['error']}")
            runs.setdefault(label, []).append(row)
    return runs


def loss(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the mean validation loss over seeds; inf where one diverged."""
    return fmean(float("inf") if run["valid"] is None else run["valid"] for run in runs)


def curve(runs: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the (step, validation loss) pairs, mean over seeds."""
    points = zip(*(run["curve"] for run in runs), strict=True)
    return [(point[0][0], fmean(float("nan") if loss is None else loss for _, loss in point)) for point in points]


def share(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the bytes sent over those that dense sends, over the whole run."""
    return runs[0]["bytes"] / runs[0]["dense_bytes"]


def planned(preset: str, method: str, ranks: int, *, per_node: int = 1, sharded: bool = False) -> Plan:
    """Return the plan of ``method`` in its steady state for a whole model on ``ranks`` ranks. Nothing is computed.

    ``sharded``: reduce-scatter in place of all-reduce.
    """  # fmt: skip
    with torch.device("meta"):
        model = Decoder(dataclasses.replace(PRESETS[preset]).check())
    parameters = list(describe(model).values())
    comm = CountingComm(0, [rank // per_node for rank in range(ranks)], Ledger())
    if sharded:
        parameters = [
            dataclasses.replace(p, local=-(-p.shape[0] // ranks) * (p.numel // p.shape[0])) for p in parameters
        ]
    return plan_of(resolve(method), parameters, (ReduceScatter if sharded else AllReduce)(comm))


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
    text = ["--corpus", str(settings.corpora.resolve() / regimes.TEXTS["wikitext"][0])] if settings.corpora else []
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
