"""Parameters that a method steps itself, in the optimizer's place."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.run import Holder, Run, Step


class OwnSteps:
    """The parameters whose gradient, as the engine holds it, is something else, which the optimizer must not see.

    The method steps ``names`` next. The optimizer does not change a parameter without ``grad``, its moments or count.
    """

    def __init__(self, method: str) -> None:
        self._method = method
        self.names: set[str] = set()

    def take(self, step: Step, run: Run, move: Callable[[str, Tensor, Holder], None]) -> None:
        """Call ``move(name, weight, holder)`` for ``names`` in ``step`` that have a ``weight.grad``, and hide that.

        Raises:
            ThinwireError: a state that was loaded has brought settings that these steps do not have: nothing has moved.
        """
        taken, holders = sorted(self.names.intersection(step.weights)), run.holders
        for optimizer, group in {id(holders[name].group): holders[name] for name in taken}.values():
            refuse_settings(self._method, optimizer, group)
        for name in taken:
            self.names.remove(name)
            weight = step.weights[name]
            if weight.grad is not None:
                move(name, weight, holders[name])
                step.hide_gradients([weight])


REFUSED = ("amsgrad", "maximize", "differentiable")
"""Settings of Adam that the methods' own steps do not have."""


def require_adam(method: str, run: Run, names: Iterable[str]) -> None:
    """Check that ``method`` can take the steps of the parameters ``names`` in their optimizers' place.

    Raises:
        ThinwireError: an optimizer is no Adam with decoupled weight decay, or has a setting of ``REFUSED``; a
            GradScaler would unscale the gradients of several optimizers.
    """
    if run.scaled and len(run.optimizers) > 1:
        raise ThinwireError(
            f"{method} under a GradScaler works with one optimizer only: the scaler unscales the gradients of "
            "several one by one"
        )
    holders = run.holders
    for name in filter(holders.__contains__, names):
        optimizer, group = holders[name]
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ThinwireError(
                f"{method} is built on Adam: pass torch.optim.AdamW or Adam as the optimizer of {name}, got "
                f"{type(optimizer).__name__}, or name it in dense="
            )
        if not has_step_of_torch(optimizer):
            raise ThinwireError(
                f"{method} computes Adam's step of {name} itself, and {type(optimizer).__name__} has a step() of its "
                "own: pass torch.optim.AdamW, or name the parameter in dense="
            )
        refuse_settings(method, optimizer, group)
        if run.scaled and group.get("fused"):
            raise ThinwireError(
                f"{method} under a GradScaler needs gradients that are unscaled before the step: leave fused=True out"
            )


def refuse_settings(method: str, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Refuse a ``group`` of an Adam (or Muon) whose steps ``method`` would not take as the ``optimizer`` would.

    Raises:
        ThinwireError: a setting of ``REFUSED``, or coupled weight decay.
    """
    for knob in REFUSED:
        if group.get(knob):
            raise ThinwireError(f"{method} computes Adam's steps itself, and cannot with {knob}=True: leave it out")
    if group["weight_decay"] and not is_decoupled(optimizer, group):
        raise ThinwireError(f"{method} needs decoupled weight decay: pass torch.optim.AdamW instead of Adam")


def is_decoupled(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Does the weight decay of ``optimizer``, an Adam or Muon, act on weights, not on gradients?"""
    return group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW | torch.optim.Muon))


def has_step_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Is ``optimizer.step`` torch's own, not that of a subclass (cautious, schedule-free, with another decay)?"""
    # torch wraps the ``step`` of every class that is used as an optimizer.
    step = inspect.unwrap(type(optimizer).step)
    return step in [inspect.unwrap(kind.step) for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Muon)]


def beta1_of(method: str, run: Run, names: Iterable[str]) -> float:
    """Return beta1 as the groups of ``names`` have it in this step: schedulers (OneCycleLR) and checkpoints change it.

    Raises:
        ThinwireError: the groups differ.
    """
    holders = run.holders
    betas = {float(holders[name].group["betas"][0]) for name in names if name in holders}
    if len(betas) > 1:
        raise ThinwireError(f"{method} needs one beta1 for all parameter groups, got {sorted(betas)}")
    return betas.pop() if betas else 0.0


def refuse_chunks(method: str, run: Run) -> None:
    """Refuse two levels on DDP for a ``method`` on the optimizer's moments: DDP has them whole, levels send chunks."""
    if run.chunk is not None:
        raise ThinwireError(
            f"{method} on DDP works on one level only: leave two_level=True out, or use fully_shard on a "
            "('replicate', 'shard') mesh (HSDP), whose ranks hold the chunk that they send"
        )
