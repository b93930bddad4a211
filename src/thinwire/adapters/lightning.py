"""Lightning: its DDP strategy with compression. The LightningModule stays as it is.

Trainer(strategy=ThinwireStrategy("int8"), ...)
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.adapters import files
from thinwire.base import extras
from thinwire.methods import Method
from thinwire.wire import Wire
from thinwire.wire import compress as compress_model

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise extras.missing(error) from None


class ThinwireStrategy(DDPStrategy):
    """DDP that exchanges gradients by ``method``, and saves each rank's state beside a checkpoint, in FILE.thinwire.

    Args:
        method: see ``thinwire.compress``.
        options: other arguments of ``thinwire.compress``: ``{"guard": False}``. Default of ``steps``: the Trainer's.
        ddp: for Lightning's ``DDPStrategy``: ``find_unused_parameters``, ``process_group_backend``, ...

    Attributes:
        wire: the wire of the model; None before training.

    Raises:
        ThinwireError: when training begins, as ``thinwire.compress``.
    """

    strategy_name = "thinwire"

    def __init__(self, method: Method | str = "int8", options: Mapping[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._method, self._options = method, dict(options or {})
        self.wire: Wire | None = None
        self._resumed: Path | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        steps = trainer.estimated_stepping_batches
        self.wire = compress_model(
            self.model, self.optimizers, self._method,
            **{"steps": int(steps) if 0 < steps < math.inf else None, **self._options},
            scaler=getattr(self.precision_plugin, "scaler", None),
        )  # fmt: skip
        if len(self.optimizers) == 1:  # through the wire: methods may need to know the scale of clipped gradients
            wire = self.wire
            self.precision_plugin.clip_grad_by_norm = lambda optimizer, clip_val: wire.clip_grad_norm_(clip_val)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.wire is not None and "optimizer_states" in checkpoint:  # otherwise it holds the weights only
            files.save(self.wire, _beside(filepath))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.wire is not None and self._resumed is not None:
            files.load(self.wire, self._resumed)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        shutil.rmtree(_beside(filepath), ignore_errors=True)  # on every rank: each host has its own folder

    def teardown(self) -> None:
        if self.wire is not None:
            self.wire.close()
        super().teardown()


def _beside(checkpoint: Any) -> Path:
    """Return the folder beside ``checkpoint``, or beside the file that it links to (``last.ckpt``)."""
    file = Path(checkpoint).resolve()
    return file.with_name(file.name + ".thinwire")
