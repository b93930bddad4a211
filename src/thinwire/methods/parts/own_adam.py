"""The Adam of a rank that steps alone: steps as large as those of the mean gradient, and moments from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.run import Run, Step
from thinwire.methods.parts.own_steps import has_step_of_torch
from thinwire.network.comm import local


def check_adam(method: str, run: Run) -> None:
    """Refuse optimizers whose step ``MeanMomentView`` cannot change, for ``method`` with second_moment='mean'."""
    for name, (optimizer, _) in run.holders.items():
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            raise ThinwireError(
                f"{method}: second_moment='mean' needs Adam: pass torch.optim.AdamW or Adam as the optimizer of "
                f"{name}, got {type(optimizer).__name__}, or leave it out"
            )
        if not has_step_of_torch(optimizer):
            raise ThinwireError(
                f"{method}: second_moment='mean' works inside Adam's own step, and {type(optimizer).__name__} has "
                "another step(): leave it out"
            )


class MeanMomentView:
    """Lets Adam step with v / N (LS1), by groups of its own in place of the user's, which stay as they are.

    From g / sqrt(N) Adam makes m / sqrt(N) and v / N. With lr sqrt(N) its step is lr m / (sqrt(v / N) + eps), and with
    decay / sqrt(N) the product lr decay is the same.
    """

    def __init__(self) -> None:
        self._entered: dict[torch.optim.Optimizer, tuple[list[dict[str, Any]], list[Tensor], float]] = {}

    def enter(self, step: Step, ranks: int) -> None:
        """Give the optimizers of ``step``, for its weights, gradients g / sqrt(N), lr sqrt(N) and decay / sqrt(N)."""
        for optimizer in step.optimizers:
            if optimizer not in self._entered:  # else its step raised an error, and is taken again
                self._enter(optimizer, step.weights.values(), math.sqrt(ranks))
            step.put_back.append(partial(self._leave, optimizer))

    def _enter(self, optimizer: torch.optim.Optimizer, weights: Iterable[Tensor], root: float) -> None:
        served = set(map(id, weights))
        groups: list[dict[str, Any]] = []
        gradients: list[Tensor] = []
        for group in optimizer.param_groups:
            own = [weight for weight in group["params"] if id(weight) in served]
            gradients += [local(weight.grad) for weight in own if weight.grad is not None]
            scaled = {"params": own, "lr": group["lr"] * root, "weight_decay": group["weight_decay"] / root}
            others = [weight for weight in group["params"] if id(weight) not in served]
            groups += [{**group, **changed} for changed in (scaled, {"params": others}) if changed["params"]]
        self._entered[optimizer] = optimizer.param_groups, gradients, root
        optimizer.param_groups = groups
        if gradients:
            torch._foreach_mul_(gradients, 1 / root)

    def _leave(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups, gradients, root = self._entered.pop(optimizer)
        if gradients:
            torch._foreach_mul_(gradients, root)

    def forget(self) -> None:
        """Put the user's groups back where a step has raised an error; gradients may be others by now."""
        for optimizer, (groups, _, _) in self._entered.items():
            optimizer.param_groups = groups
        self._entered.clear()


def check_saved_shape(run: Run, kind: str, name: str, saved: Tensor) -> None:
    """Refuse a ``saved`` state of parameter ``name`` whose shape is not that of this rank's weight."""
    weight = run.weights.get(name)
    if weight is None or local(weight).shape != saved.shape:
        needs = "does not train it" if weight is None else f"needs {tuple(local(weight).shape)}"
        raise ThinwireError(
            f"state '{kind}' of {name} has shape {tuple(saved.shape)}, this run {needs}: it was saved with another "
            "model, world size or engine"
        )


def restore_moment(run: Run, kind: str, name: str, saved: Tensor) -> None:
    """Make ``saved`` the ``kind`` of the optimizer's state of parameter ``name``."""
    weight, (optimizer, group) = run.weights[name], run.holders[name]
    moments = optimizer.state[weight]
    if kind not in moments:
        on_device = saved.dim() > 0 or group.get("capturable") or group.get("fused")
        if saved.dim() > 0 and saved.shape == local(weight).shape:
            moments[kind] = torch.zeros_like(weight, dtype=saved.dtype, requires_grad=False)
        else:
            moments[kind] = saved.clone() if on_device else saved.cpu()
    local(moments[kind]).copy_(saved)
