"""The Hugging Face Trainer, with its own checkpoints, resuming, accumulation, clipping, bf16, FSDP2.

    trainer = Trainer(...)
    attach(trainer, "int8")
    trainer.train()

or ``Trainer(..., callbacks=[ThinwireCallback("int8")])``, where a program takes callbacks.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from thinwire.adapters import accelerate, files
from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.methods import Method
from thinwire.wire import Wire

try:
    from transformers import Trainer, TrainerCallback
except ModuleNotFoundError as error:
    raise extras.missing(error) from None


def attach(trainer: Trainer, method: Method | str = "int8", **options: Any) -> ThinwireCallback:
    """Compress the gradients of ``trainer`` from its next ``train()`` on. Return the callback, which has the wire.

    Every log of a loss gains ``wire_mb`` (10^6 bytes) and ``exposed_ms`` of the last step on this rank, and
    ``skipped_steps`` so far. If ``ddp_find_unused_parameters`` is None, it becomes False: the Trainer would turn it on
    for its own models, and methods that keep state refuse it.

    Args:
        method, options: see ``thinwire.compress``: ``seed``, ``safety``, ... ``steps`` is the Trainer's.

    Raises:
        ThinwireError: this Trainer compresses already, or its version is not carried; ``train()`` raises the rest.
    """
    callback = ThinwireCallback(method, **options)
    callback.join(trainer)
    return callback


class ThinwireCallback(TrainerCallback):
    """Does what ``attach`` does, for ``Trainer(callbacks=[...])`` and for programs that take a callback's name.

    Args:
        method: None: that of the environment variable THINWIRE_METHOD, or "int8". options: see ``attach``.

    Attributes:
        trainer: the Trainer that it serves, which hands callbacks the model without DDP; None before it has one.
        wire: the wire of the model; None before training.
    """

    def __init__(self, method: Method | str | None = None, **options: Any) -> None:
        self.method = (os.environ.get("THINWIRE_METHOD") or "int8") if method is None else method
        self.options = options
        self.trainer: Trainer | None = None
        self.wire: Wire | None = None
        self._resumed: Path | None = None

    def join(self, trainer: Trainer) -> None:
        """Serve ``trainer``, as ``attach`` describes."""
        callbacks = trainer.callback_handler.callbacks
        if any(isinstance(other, ThinwireCallback) and other is not self for other in callbacks):
            raise ThinwireError(
                "this Trainer compresses already: use one of attach(), ThinwireCallback and THINWIRE_METHOD, once"
            )
        if not hasattr(trainer, "_save_optimizer_and_scheduler"):
            raise ThinwireError(
                "this version of transformers saves checkpoints in a way that Thinwire does not know: pip install "
                "-U 'thinwire[hf]'"
            )
        self.trainer = trainer
        # Before the callbacks that report its logs. One that is being called stays behind those that were.
        callbacks[:] = [self, *(other for other in callbacks if other is not self)]
        if trainer.args.ddp_find_unused_parameters is None:
            trainer.args.ddp_find_unused_parameters = False
            if getattr(trainer.accelerator, "ddp_handler", None) is not None:
                trainer.accelerator.ddp_handler.find_unused_parameters = False
        save, load = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

        # The Trainer calls these two on every rank, with the folder.
        def save_with_wire(folder: str) -> None:
            save(folder)
            if self.wire is not None:
                files.save(self.wire, Path(folder, "thinwire"))

        def load_with_wire(folder: str | None) -> None:
            load(folder)
            self._resumed = None if folder is None else Path(folder, "thinwire")

        trainer._save_optimizer_and_scheduler = save_with_wire
        trainer._load_optimizer_and_scheduler = load_with_wire

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the Trainer that is being made: it tells callbacks everything but itself."""
        frames = traceback.walk_stack(sys._getframe(1))
        callers = (frame.f_locals.get("self") for frame, _ in frames)
        self.join(next(caller for caller in callers if isinstance(caller, Trainer)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None:
            raise ThinwireError(
                "pass ThinwireCallback to Trainer(callbacks=[...]); for a Trainer that exists already, call "
                "attach(trainer)"
            )
        model = self.trainer.model_wrapped
        if self.wire is None or self.wire.engine.model is not getattr(model, "_orig_mod", model):
            if self.wire is not None:
                # DDP's. Where memory ran out after a forward pass (auto_find_batch_size), it still waits for gradients,
                # and would take those of the next DDP around the same parameters.
                getattr(self.wire.engine.model, "_remove_autograd_hooks", lambda: None)()
                self.wire.close()
            self.wire = accelerate.compress(
                self.trainer.accelerator, model, self.trainer.optimizer, self.method, steps=state.max_steps,
                **self.options,
            )  # fmt: skip
        if self._resumed is not None:
            files.load(self.wire, self._resumed)
            self._resumed = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.wire is not None:
            files.meet(self.wire)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.wire is not None:
            files.warn_of_evaluation(self.wire)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.wire is None or logs is None or "loss" not in logs:
            return
        last = self.wire.last_step()
        added = {
            "wire_mb": round(sum(last["wire_bytes_per_step"].values()) / 1e6, 3),
            "exposed_ms": round(last["exposed_ms"], 2),
            "skipped_steps": self.wire.skipped,
        }
        logs.update(added)
        state.log_history[-1].update(added)
