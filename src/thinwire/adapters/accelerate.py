"""Hugging Face Accelerate.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    wire = compress(accelerator, model, optimizer, "int8", steps=1000)

The training loop stays as it is: ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state``, ``load_state``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from thinwire.adapters import files
from thinwire.base.errors import ThinwireError
from thinwire.methods import Method
from thinwire.wire import Wire
from thinwire.wire import compress as compress_model


def compress(accelerator: Any, model: nn.Module, optimizer: Any, method: Method | str = "int8", **options: Any) -> Wire:
    """Call ``thinwire.compress`` with the accelerator's scaler, and connect its clipping and checkpoints.

    Collective. Call it after ``accelerator.prepare`` and before the first step.

    Args:
        accelerator: the ``accelerate.Accelerator`` that prepared ``model`` and ``optimizer`` (or a list of several).
        method, options: see ``thinwire.compress``: ``steps``, ``guard``, ``seed``, ...

    Raises:
        ThinwireError: as ``thinwire.compress``; or the accelerator knows of one process only.
    """
    if accelerator.num_processes == 1:
        raise ThinwireError(
            "the Accelerator knows of one process: start under torchrun or accelerate launch; without a GPU with "
            "Accelerator(cpu=True), or use_cpu=True in TrainingArguments"
        )
    wire = compress_model(model, optimizer, method, scaler=accelerator.scaler, **options)
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
    # Every rank calls both hooks. The wire's state does not depend on the weights, which are loaded after it.
    accelerator.register_save_state_pre_hook(lambda models, weights, path: files.save(wire, Path(path, "thinwire")))
    accelerator.register_load_state_pre_hook(lambda models, path: files.load(wire, Path(path, "thinwire")))
    return wire
