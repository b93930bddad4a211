"""Lightning: its strategies for DDP and for FSDP2 with compression. The LightningModule stays as it is.

Trainer(strategy=ThinwireStrategy("int8"), ...)
Trainer(strategy=ThinwireModelParallelStrategy("int8", data_parallel_size=2, tensor_parallel_size=1), ...)
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from thinwire.adapters import files
from thinwire.base import extras
from thinwire.base.errors import ThinwireError
from thinwire.methods import Method
from thinwire.wire import Wire
from thinwire.wire import compress as compress_model

try:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as error:
    raise extras.missing(error) from None


class _Compressed(ParallelStrategy):
    """Adds to Lightning's strategies the wire, its state beside checkpoints, and schedules that wait."""

    def __init__(self, method: Method | str = "int8", options: Mapping[str, Any] | None = None, **theirs: Any) -> None:
        super().__init__(**theirs)
        self._method, self._options = method, dict(options or {})
        self.wire: Wire | None = None
        self._resumed: Path | None = None

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        steps = trainer.estimated_stepping_batches
        self.wire = compress_model(
            self._wrapped(), self.optimizers, self._method,
            **{"steps": int(steps) if 0 < steps < math.inf else None, **self._options},
            scaler=getattr(self.precision_plugin, "scaler", None),
        )  # fmt: skip
        if len(self.optimizers) == 1:  # through the wire: methods may need to know the scale of clipped gradients
            wire = self.wire
            self.precision_plugin.clip_grad_by_norm = lambda optimizer, clip_val: wire.clip_grad_norm_(clip_val)
        self._let_schedules_wait(self.wire)

    def _wrapped(self) -> nn.Module:
        """Return the module that the wire is for."""
        assert self.model is not None
        return self.model

    def _let_schedules_wait(self, wire: Wire) -> None:
        """Leave out the step of a schedule that goes by steps, where the optimizer's step was skipped."""
        module, move = self.lightning_module, self.lightning_module.lr_scheduler_step
        by_step = {id(config.scheduler) for config in self.lr_scheduler_configs if config.interval == "step"}

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if not (wire.step_was_skipped and id(scheduler) in by_step):
                move(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        whole = "optimizer_states" in checkpoint  # otherwise it holds the weights only
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.wire is not None and whole:
            files.save(self.wire, _beside(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        shutil.rmtree(_beside(filepath), ignore_errors=True)  # on every rank: each host has its own folder

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.wire is not None:
            files.warn_of_evaluation(self.wire)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.wire is not None:
            files.meet(self.wire)

    def teardown(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.lightning_module.__dict__.pop("lr_scheduler_step", None)
        super().teardown()


class ThinwireStrategy(_Compressed, DDPStrategy):
    """DDP that exchanges gradients by ``method``, and saves each rank's state beside a checkpoint, in FILE.thinwire.

    A schedule that goes by steps waits where the guard skips the optimizer's step.

    Args:
        method: see ``thinwire.compress``.
        options: other arguments of ``thinwire.compress``: ``{"seed": 1}``. Default of ``steps``: the Trainer's.
        theirs: for Lightning's ``DDPStrategy``: ``find_unused_parameters``, ``process_group_backend``, ...

    Attributes:
        wire: the wire of the model; None before training.

    Raises:
        ThinwireError: when training begins, as ``thinwire.compress``.
    """

    strategy_name = "thinwire"

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.wire is not None and self._resumed is not None:
            files.load(self.wire, self._resumed)


class ThinwireModelParallelStrategy(_Compressed, ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` (FSDP2) that exchanges gradients by ``method``.

    The LightningModule shards one module in ``configure_model()``, by ``fully_shard`` with
    ``mesh=self.device_mesh["data_parallel"]``. With ``accumulate_grad_batches`` gradients are exchanged once per
    optimizer step; Lightning's own strategy exchanges them in every micro-batch.

    Args and attributes: as ``ThinwireStrategy``, with the arguments of ``ModelParallelStrategy``.

    Raises:
        ThinwireError: when training begins, as ``thinwire.compress``; or not one module holds all that is sharded.
    """

    strategy_name = "thinwire_model_parallel"

    def _wrapped(self) -> nn.Module:
        assert self.model is not None
        sharded = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        inside = {id(submodule) for module in sharded for submodule in list(cast(nn.Module, module).modules())[1:]}
        roots = [cast(nn.Module, module) for module in sharded if id(module) not in inside]
        if len(roots) != 1:
            raise ThinwireError(
                f"the LightningModule has {len(roots)} sharded modules that no sharded module contains: call "
                "fully_shard() on one that contains them all, after its parts"
            )
        return roots[0]

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.wire is not None
        with self.wire.accumulate(last=False):
            yield

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # weights and optimizers with it
        if self.wire is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            files.load(self.wire, _beside(checkpoint_path))
        return checkpoint


def _beside(checkpoint: Any) -> Path:
    """Return the folder beside ``checkpoint``, or beside the file that it links to (``last.ckpt``)."""
    file = Path(checkpoint).resolve()
    return file.with_name(file.name + ".thinwire")
