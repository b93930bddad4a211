"""Hugging Face Accelerate.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    wire = compress(accelerator, model, optimizer, "int8", steps=1000)

The training loop stays as it is: ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state``, ``load_state``.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thinwire.adapters import files
from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.core.optimizers import unwrapped
from thinwire.methods import Method, resolve
from thinwire.wire import Wire
from thinwire.wire import compress as compress_model


def compress(accelerator: Any, model: nn.Module, optimizer: Any, method: Method | str = "int8", **options: Any) -> Wire:
    """Call ``thinwire.compress`` with the accelerator's scaler, and connect its clipping, checkpoints and schedules.

    Collective. Call it after ``accelerator.prepare`` and before the first step. Of a step that the guard skips, the
    accelerator says ``optimizer_step_was_skipped``, so that the schedules that it prepared wait.

    Args:
        accelerator: the ``accelerate.Accelerator`` that prepared ``model`` and ``optimizer`` (or a list of several).
        method, options: see ``thinwire.compress``: ``steps``, ``seed``, ``safety``, ...

    Raises:
        ThinwireError: as ``thinwire.compress``; or the accelerator knows of one process only, shards with FSDP1, or
            exchanges every micro-batch (``sync_each_batch``) where the method may not.
    """
    method = resolve(method) if isinstance(method, str) else method
    _check(accelerator, method)
    wire = compress_model(model, optimizer, method, scaler=accelerator.scaler, **options)
    _connect_clipping(accelerator, model, wire)
    _connect_schedules(accelerator, optimizer, wire)
    _connect_checkpoints(accelerator, model, wire)
    return wire


def number_of(accelerator: Any, model: nn.Module) -> int | None:
    """Return the place of ``model`` among those that ``accelerator`` prepared; None: it did not prepare it."""
    inner = getattr(model, "_orig_mod", model)
    bare = getattr(inner, "module", inner)  # of what it wraps in DDP, it keeps the inside
    prepared = [getattr(one, "_orig_mod", one) for one in accelerator._models]
    return next((number for number, one in enumerate(prepared) if one is inner or one is bare), None)


def _check(accelerator: Any, method: Any) -> None:
    """Refuse what is not supported; warn of a sharding that was asked for and not made."""
    if accelerator.num_processes == 1:
        raise ThinwireError(
            "Accelerate sees one process only: start with torchrun or accelerate launch; without a GPU, pass "
            "Accelerator(cpu=True), or use_cpu=True in TrainingArguments"
        )
    sharded = accelerator.distributed_type.value == "FSDP"
    if sharded and not accelerator.is_fsdp2:
        raise ThinwireError(
            "Accelerate is set to FSDP1, its default, which Thinwire does not support: set fsdp_version: 2 in its "
            "config file, or pass FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    settings, known = accelerator.gradient_state, isinstance(method, Method)  # or it is an Auto
    adds_up = known and method.card.adds_up
    if settings.num_steps > 1 and settings.plugin_kwargs.get("sync_each_batch") and not adds_up:
        keeper = f"{method.name} keeps" if known else "what 'auto' chooses may keep"
        raise ThinwireError(
            f"sync_each_batch=True exchanges every micro-batch, and {keeper} a momentum, which counts exchanges as "
            "steps: leave out sync_each_batch, or take a method such as int8"
        )
    if not sharded and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and accelerator.is_main_process:
        warnings.warn(
            "FSDP was asked for, but Accelerate uses it on GPUs only: this run trains with DDP, and each rank holds "
            "the whole model",
            ThinwireWarning,
            stacklevel=3,
        )


def _connect_clipping(accelerator: Any, model: nn.Module, wire: Wire) -> None:
    """Let ``accelerator.clip_grad_norm_`` of the whole model go through the wire."""
    original_clip = accelerator.clip_grad_norm_
    all_ids = {id(parameter) for parameter in model.parameters()}
    trained_ids = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not trained_ids <= {id(parameter) for parameter in parameters} <= all_ids:
            return original_clip(parameters, max_norm, norm_type)
        accelerator.unscale_gradients()
        return wire.clip_grad_norm_(max_norm, norm_type)

    accelerator.clip_grad_norm_ = clip_grad_norm_


def _connect_checkpoints(accelerator: Any, model: nn.Module, wire: Wire) -> None:
    """Let ``save_state`` and ``load_state`` serve the wire, too, in a folder that is numbered as the model's file is.

    The wire is loaded last: local steps keep in it what rank 0's weights and moments, which all ranks load, replace.
    """
    number = number_of(accelerator, model)
    folder = f"thinwire_{number}" if number else "thinwire"
    load = accelerator.load_state
    loading: list[Path] = []

    def load_state(*args: Any, **kwargs: Any) -> None:
        load(*args, **kwargs)
        if loading:
            files.load(wire, loading.pop())

    accelerator.load_state = load_state
    wire._hooks += [  # every rank calls them, until close()
        accelerator.register_save_state_pre_hook(lambda models, weights, path: files.save(wire, Path(path, folder))),
        accelerator.register_load_state_pre_hook(lambda models, path: loading.append(Path(path, folder))),
    ]


def _connect_schedules(accelerator: Any, optimizer: Any, wire: Wire) -> None:
    """Tell the accelerator's wrappers of ``optimizer`` which steps are skipped: they ask none but their GradScaler."""

    def tell(wrapper: Any, *step: Any) -> None:
        wrapper._is_overflow = wire.step_was_skipped
        if wire.step_was_skipped:
            wrapper._accelerate_step_called = False  # so it takes the step for one that its GradScaler skipped

    inner = {id(opened) for opened in unwrapped(optimizer)}
    for wrapper in accelerator._optimizers:
        for opened in unwrapped(wrapper):
            if id(opened) in inner:
                opened.register_step_post_hook(functools.partial(tell, wrapper))  # behind the wire's own
