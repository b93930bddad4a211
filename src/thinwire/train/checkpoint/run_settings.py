"""What a run is, and what of it may be another when it goes on: each difference is refused or warned of by name."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.agreement import version
from thinwire.methods import resolve
from thinwire.train.config import Config
from thinwire.train.data.windows import TokenSequence
from thinwire.train.model.shapes import ModelConfig

FITS = "fits"
"""Weights, moments or the method's state would not fit: always refused."""
DATA = "data"
"""The run would silently train on other data, or on the same in another order: refused without --resume-anyway."""
EXACT = "exact"
"""The run goes on, but is not bit for bit what it would have been: a warning."""

TABLE: dict[str, tuple[str, str]] = {
    "family": (FITS, "the model's shape"),
    "layers": (FITS, "the model's shape"),
    "width": (FITS, "the model's shape"),
    "heads": (FITS, "the model's shape"),
    "kv_heads": (FITS, "the model's shape"),
    "hidden": (FITS, "the model's shape"),
    "vocabulary": (FITS, "the model's shape"),
    "context": (FITS, "the model's shape, where positions are learned (family gpt)"),
    "engine": (FITS, "how weights and state lie on the ranks"),
    "mesh": (FITS, "ranks that share one copy of the weights, times copies"),
    "init": (FITS, "hash of the weights that it began with"),
    "lora": (FITS, "rank, alpha and places of the adapters"),
    "world_size": (FITS, "how weights and state lie on the ranks"),
    "method": (FITS, "the method and its knobs: what its state means"),
    "two_level": (FITS, "which ranks keep the method's state"),
    "intra": (FITS, "the hop inside a node"),
    "optimizer": (FITS, "which moments there are"),
    "seed": (DATA, "order of the data, and every random stream"),
    "text": (DATA, "hash of the tokens that are trained on"),
    "order": (DATA, "how the order of an epoch comes about, where it is not drawn at once"),
    "sequence": (DATA, "tokens per sequence"),
    "batch_size": (DATA, "sequences per rank and micro-batch"),
    "accumulate": (DATA, "micro-batches per step"),
    "valid_text": (EXACT, "hash of the tokens that are evaluated on"),
    "steps": (EXACT, "steps of the whole run: the learning rate's schedule, a method's start as a share"),
    "lr": (EXACT, "the learning rate's schedule"),
    "lr_end": (EXACT, "the learning rate's schedule"),
    "warmup": (EXACT, "the learning rate's schedule"),
    "weight_decay": (EXACT, "the optimizer's settings"),
    "betas": (EXACT, "the optimizer's settings"),
    "clip": (EXACT, "largest norm of the gradient"),
    "guard": (EXACT, "whether steps are skipped"),
    "dtype": (EXACT, "of the computation"),
    "device": (EXACT, "kind of device"),
    "compile": (EXACT, "other kernels"),
    "threads": (EXACT, "the order of sums"),
    "bucket_mb": (EXACT, "the order of sums"),
    "reshard": (EXACT, "when weights are gathered"),
    "nodes": (EXACT, "which ranks share a node: the order of sums"),
    "torch": (EXACT, "version"),
    "thinwire": (EXACT, "version"),
}
"""For each entry of what a run is: what becomes of a difference, and what the entry says."""


LAYOUT = ("engine", "mesh", "world_size", "two_level", "intra")
"""How weights and the method's state lie on the ranks: these may be others, unless --resize refuse says no."""


def about(
    config: Config, shape: ModelConfig | dict[str, Any], *, tokens: tuple[str, str], world_size: int, per_node: int,
    device: str, dtype: str, init: str | None = None, order: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What the run is, by the names of ``TABLE``.

    Args:
        shape: a dict where the model is not one of ours.
        tokens: hashes of the text trained on and of the held-out one.
        init: a hash of the weights that it began with; None: they were drawn.
        order: as ``Windows.order`` has it.
    """
    if isinstance(shape, ModelConfig):
        shape = dataclasses.asdict(shape) | {"context": shape.context if shape.family == "gpt" else 0}
    places = " ".join(config.lora_targets) or "all-linear"
    lora = config.lora and f"rank {config.lora}, alpha {config.alpha:g}, {places}"
    names = {name for name in TABLE if name in {field.name for field in dataclasses.fields(config)}}
    share = {"ddp": 1, "fsdp2": world_size, "hsdp": config.shard_size or per_node}[config.engine]
    found = {
        **{name: getattr(config, name) for name in names}, **shape, "sequence": config.sequence, "init": init,
        "order": order,
        "lora": lora, "lr": config.top_lr, "method": str(resolve(config.method)),
        "intra": config.intra and str(resolve(config.intra)), "mesh": f"{share} x {world_size // share}",
        "optimizer": config.stepper,
        "world_size": world_size, "nodes": -(-world_size // per_node), "text": tokens[0], "valid_text": tokens[1],
        "device": device, "dtype": dtype, "torch": torch.__version__, "thinwire": version(),
    }  # fmt: skip
    return {name: list(value) if isinstance(value := found[name], tuple) else value for name in TABLE}


def hash_of(tokens: Tensor | TokenSequence) -> str:
    """Of (T,) tokens on the CPU, or in files."""
    if not isinstance(tokens, Tensor):
        return tokens.digest()
    return hashlib.blake2b(tokens.numpy().data, digest_size=8).hexdigest()


def between(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """The names of ``TABLE`` by which two runs differ."""
    return [name for name in TABLE if saved.get(name) != ours.get(name)]


def moved(saved: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Do weights and state lie otherwise on the ranks than they did?"""
    return bool({*LAYOUT} & {*between(saved, ours)})


def compare(saved: dict[str, Any], ours: dict[str, Any], *, anyway: bool = False, resize: str | None = None) -> str:
    """A line about the differences with which the run goes on; "" if there are none.

    Raises:
        ThinwireError: it cannot go on, or must not without ``anyway`` or ``resize``; with both values of each
            difference.
    """
    differ = between(saved, ours)

    def told(*levels: str) -> str:
        return ", ".join(
            f"{name} {_shown(saved.get(name))} there and {_shown(ours.get(name))} here"
            for name in differ
            if (EXACT if resize and name in LAYOUT else TABLE[name][0]) in levels
        )

    if moved(saved, ours) and not resize:
        what = told(FITS)
        if "world_size" in differ:
            what = f"made by {saved.get('world_size')} ranks, this run has {ours.get('world_size')}"
        raise ThinwireError(
            f"the checkpoint is not of such a run: {what}; make it one, or say with --resize redistribute that its "
            "ranks may be others"
        )
    if told(FITS):
        raise ThinwireError(f"the checkpoint is not of such a run: {told(FITS)}")
    if told(DATA) and not anyway:
        raise ThinwireError(
            f"the checkpoint's run has other data or another order: {told(DATA)}; --resume-anyway goes on all the same"
        )
    return told(DATA, EXACT)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
