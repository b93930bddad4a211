"""Follows a GradScaler, which steps optimizers or leaves their step out, and tells nobody.

Its traces are its frame among the callers of ``step``, the scale before and after, and its own notes of whom it has
stepped.
"""

from __future__ import annotations

import itertools
import sys
import traceback

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.engine import Engine
from thinwire.core.method import Method, Run
from thinwire.core.run import NO_SCALER
from thinwire.network.comm import local

FRAMES = 16
"""The number of callers of ``optimizer.step()`` searched for a GradScaler."""


class ScalerWatch:
    """Knows what a GradScaler has done with the step under way.

    Attributes:
        scaler: the one that compress() was told of, if any.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None, method: Method, run: Run) -> None:
        self.scaler = scaler if run.scaled else None
        self._method = method
        self._optimizers = {id(optimizer) for optimizer in run.optimizers}
        self._scale: Tensor | None = None  # of the gradients exchanged last
        self._stepped_before: set[int] | None = None  # since its update, before the step's exchanges
        self._scales_wrappers = False  # is it given other objects than the optimizers that compress() has?
        self._checked = run.scaled or (method.rank_equal and not method.card.keeps_state)

    def exchange_begins(self, device: torch.device) -> None:
        """Note the scale as the first gradients of a step are exchanged."""
        if self.scaler is not None:
            self._scale = self.scaler.scale(torch.ones((), dtype=torch.float32, device=device))
            stepped = _stepped_by(self.scaler)
            self._stepped_before = stepped if self._stepped_before is None else stepped & self._stepped_before

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whom the scaler steps.

        Raises:
            ThinwireError: one steps ``optimizer`` that compress() was not told of, and the method needs to know.
        """
        if not self._checked and scaler_above() is not None:
            if not self._method.rank_equal:
                raise ThinwireError(NO_SCALER.format(name=self._method.name))
            raise ThinwireError(
                f"{self._method.name} keeps values from step to step, and a GradScaler changes their scale: pass it "
                "as compress(..., scaler=scaler)"
            )
        self._checked = True
        if self.scaler is not None:
            self._scales_wrappers = id(optimizer) not in self.scaler._per_optimizer_states

    def step_is_over(self) -> None:
        """Forget whom the scaler had stepped before."""
        self._stepped_before = None

    def left_out(self, engine: Engine) -> bool:
        """Did it leave out the step of the gradients exchanged last? It calls no optimizer then, and so no hook.

        It steps each optimizer once until its update: what is exchanged after that (a GAN's generator passes through
        the discriminator) it cannot leave out. Of other models' optimizers it may leave out what it will.
        """
        before = self._stepped_before or set()
        if self._optimizers <= before:
            return False
        gradients = [local(gradient) for gradient in engine.gradients() if gradient is not None]
        if not gradients or self.scaler is None or self._scale is None:  # of shards, one rank alone may see it
            finite = engine.kind != "ddp" or all(bool(gradient.isfinite().all()) for gradient in gradients)
            return not gradients or not finite
        stepped = _stepped_by(self.scaler) - before
        return bool(stepped if self._scales_wrappers else stepped & self._optimizers) or (
            self.scaler.get_scale() < float(self._scale)
        )


def scaler_above() -> torch.amp.GradScaler | None:
    """Return the GradScaler that is stepping the optimizer. Its only trace is its frame among the callers."""
    frames = itertools.islice(traceback.walk_stack(sys._getframe(1)), FRAMES)
    scalers = (self for frame, _ in frames if isinstance(self := frame.f_locals.get("self"), torch.amp.GradScaler))
    return next((scaler for scaler in scalers if scaler.is_enabled()), None)


def back_off(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Let ``scaler.update()`` lower the scale: a mask has hidden from ``scaler`` what overflowed, or another rank."""
    states = scaler._per_optimizer_states
    for key, state in states.items():
        if key == id(optimizer) or id(optimizer) not in states:  # a wrapper's
            for flag in state["found_inf_per_device"].values():
                flag.fill_(1.0)


def _stepped_by(scaler: torch.amp.GradScaler) -> set[int]:
    """Return, by id, what ``scaler`` has stepped or left out since its last update."""
    return {key for key, state in scaler._per_optimizer_states.items() if state["stage"].name == "STEPPED"}
