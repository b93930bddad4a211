"""Settings that describe a run. When a run resumes, a difference is refused, or named in a warning."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from thinwire.base.errors import ThinwireError
from thinwire.base.version import __version__
from thinwire.methods import AUTO, resolve
from thinwire.train.config import SHAPE, Config
from thinwire.train.model.shapes import ModelConfig

FITS = "fits"  # weights, moments, the method's state or the counts would not fit: always refused
DATA = "data"  # the run would silently train on other data or in another order: refused without --resume-anyway
EXACT = "exact"  # the run resumes, but is not bit for bit what it would have been: a warning

TABLE: dict[str, tuple[str, str]] = {
    **dict.fromkeys((*SHAPE, "vocabulary"), (FITS, "the model's shape")),
    "context": (FITS, "the model's shape, if positions are learned (family gpt)"),
    "engine": (FITS, "how weights and state lie on the ranks"),
    "mesh": (FITS, "number of ranks that share one copy of the weights, times number of copies"),
    "init": (FITS, "hash of the weights before the first step"),
    "lora": (FITS, "rank, alpha and target modules of the adapters"),
    "world_size": (FITS, "number of ranks"),
    "method": (FITS, "the method and its knobs, which say what its state means"),
    "two_level": (FITS, "which ranks keep the method's state"),
    "intra": (FITS, "the method inside a node"),
    "optimizer": (FITS, "which moments exist"),
    "sequence": (FITS, "tokens per sequence: tokens, and the place in the text, are counted in sequences"),
    "elastic": (FITS, "replicas that come and go: their checkpoints lack a part of the method's state"),
    "seed": (DATA, "the order of the data, and all random numbers"),
    "text": (DATA, "hash of the training tokens (of `thinwire tokenize`: as they were when it wrote them)"),
    "order": (DATA, "how an epoch is shuffled: at once, or, if it is very long, by a function"),
    "batch_size": (DATA, "sequences per rank and micro-batch"),
    "accumulate": (DATA, "micro-batches per step"),
    "valid_text": (EXACT, "hash of the validation tokens"),
    "steps": (EXACT, "steps of the whole run, on which the learning rate's schedule depends"),
    **dict.fromkeys(("lr", "muon_lr", "lr_end", "warmup"), (EXACT, "the learning rate's schedule")),
    **dict.fromkeys(("weight_decay", "betas"), (EXACT, "the optimizer's settings")),
    "clip": (EXACT, "the norm to which the gradient is clipped"),
    "guard": (EXACT, "whether a step with a non-finite gradient is skipped"),
    "dtype": (EXACT, "the dtype of the computation"),
    "device": (EXACT, "CPU or GPU"),
    "compile": (EXACT, "whether torch.compile is used: other kernels round differently"),
    "threads": (EXACT, "threads per rank: sums are added in another order"),
    "bucket_mb": (EXACT, "size of DDP's buckets: sums are added in another order"),
    "reshard": (EXACT, "whether weights are gathered again in the backward pass"),
    "nodes": (EXACT, "which ranks share a node: sums are added in another order"),
    "torch": (EXACT, "its version"),
    "thinwire": (EXACT, "its version"),
}
"""Consequence of a difference, and meaning, of each entry of a run's description."""
OTHER_INIT = "--init is another model, or has buffers, which earlier versions of Thinwire did not save"
LAYOUT = ("engine", "mesh", "world_size", "two_level", "intra")
"""Entries that say how weights and state lie on the ranks. They may differ, unless --resize is refuse."""


def describe_run(
    config: Config, shape: ModelConfig | dict[str, Any], *, tokens: Sequence[str], world_size: int, per_node: int,
    device: str, dtype: str, init: str | None = None, order: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Describe the run, by the names of ``TABLE``.

    Args:
        shape: a dict if the model is Hugging Face's.
        tokens: hashes of the training text and of the held-out text.
        init: hash of the weights that the run began with; None: they were drawn.
    """
    if isinstance(shape, ModelConfig):
        shape = dataclasses.asdict(shape) | {"context": shape.context if shape.family == "gpt" else 0}
    adapters, lora = config.adapters, None
    if adapters is not None:
        lora = f"rank {config.lora}, alpha {adapters['lora_alpha']:g}, {' '.join(config.lora_targets) or 'all-linear'}"
    sharing = {"ddp": 1, "fsdp2": world_size, "hsdp": config.shard_size or per_node}[config.engine]
    settings = {
        **vars(config), **shape, "sequence": config.sequence_length, "init": init, "order": order, "lora": lora,
        "lr": config.top_lr, "optimizer": config.optimizer_name,
        "method": config.method if config.chooses else str(resolve(config.method)),
        "intra": config.intra and str(resolve(config.intra)), "mesh": f"{sharing} x {world_size // sharing}",
        "world_size": world_size, "nodes": -(-world_size // per_node), "text": tokens[0], "valid_text": tokens[1],
        "device": device, "dtype": dtype, "torch": torch.__version__, "thinwire": __version__,
    }  # fmt: skip
    return {name: list(value) if isinstance(value := settings[name], tuple) else value for name in TABLE}


def differing(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    chooses = current.get("method") == AUTO  # which takes the method of any checkpoint
    return [n for n in TABLE if saved.get(n) != current.get(n) and not (chooses and n == "method")]


def layout_differs(saved: dict[str, Any], current: dict[str, Any]) -> bool:
    return not {*LAYOUT}.isdisjoint(differing(saved, current))


def compare(
    saved: dict[str, Any], current: dict[str, Any], *, resume_anyway: bool = False, resize: str | None = None
) -> str:
    """Return a line about the differences with which the run resumes; "" if there are none.

    Raises:
        ThinwireError: a difference is refused, always or without ``resume_anyway`` or ``resize``; names both values.
    """

    def describe(*levels: str) -> str:
        return ", ".join(
            f"{name} was {_shown(saved.get(name))} and is {_shown(current.get(name))} now"
            for name in differing(saved, current)
            if (EXACT if resize and name in LAYOUT else TABLE[name][0]) in levels
        )

    if layout_differs(saved, current) and not resize:
        line = describe(FITS)
        if saved.get("world_size") != current.get("world_size"):
            line = f"made by {saved.get('world_size')} ranks, this run has {current.get('world_size')}"
        raise ThinwireError(
            f"the checkpoint does not fit this run: {line}; use the same, or allow the change with "
            "--resize redistribute"
        )
    if line := describe(FITS):
        if saved.get("init") and current.get("init") not in (None, saved["init"]):
            line += f"; {OTHER_INIT}"
        raise ThinwireError(f"the checkpoint does not fit this run: {line}")
    if (line := describe(DATA)) and not resume_anyway:
        raise ThinwireError(
            f"the checkpoint's run has other data, or reads it in another order: {line}; --resume-anyway allows it"
        )
    return describe(DATA, EXACT)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
