"""Reads the user's optimizers: wrappers around them, their parameters and gradients, closures that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.engine import all_zero

UNSUITABLE_CLOSURE = (
    "{kind}.step(closure) asks for gradients at weights that it has changed, as SAM does, or beside those of a pass "
    "before it, and Thinwire runs a closure once, before the step: pass the inner optimizer to compress(), and call "
    "first_step() and second_step() yourself"
)


def unwrapped(optimizer: Any) -> Iterator[Any]:
    """Yield the optimizers inside wrappers.

    Accelerate's and Lightning's wrapper has one ``optimizer`` and never calls its own ``step`` hooks; torchtitan's
    container has several ``optimizers``.
    """
    inner = getattr(optimizer, "optimizers", getattr(optimizer, "optimizer", None))
    if isinstance(optimizer, list | tuple):
        for member in optimizer:
            yield from unwrapped(member)
    elif inner is None:
        yield optimizer
    else:
        yield from unwrapped(inner)


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Has any parameter a gradient?"""
    return any(parameter.grad is not None for parameter in parameters(optimizer))


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Drop gradients: an optimizer leaves such parameters, their moments and their step counts as they are."""
    for parameter in parameters(optimizer):
        parameter.grad = None


def makes_state(optimizer: torch.optim.Optimizer) -> bool:
    """Is this an empty first step? ``torch.distributed.checkpoint`` takes one, to have a state to load into."""
    if optimizer.state or any(float(group.get("lr", 1.0)) != 0 for group in optimizer.param_groups):
        return False
    return has_gradients(optimizer) and all_zero(parameter.grad for parameter in parameters(optimizer))


def replace_closure(
    closure: Callable[[], Any], loss: Any, optimizer: torch.optim.Optimizer, call: tuple[tuple, dict], *,
    weights_are_final: bool,
) -> tuple[tuple, dict]:  # fmt: skip
    """Let ``optimizer.step(*args, **kwargs)``, ``call``, get in place of ``closure`` one that returns its ``loss``.

    ``weights_are_final``: no hook follows that may change weights before the step. Then the new closure raises
    ThinwireError if the optimizer has changed them before it asks; and in any case if it asks more than once.
    """
    losses, marks = [loss], _marks(optimizer) if weights_are_final else None

    def give_once() -> Any:
        if not losses:
            raise ThinwireError(
                f"{type(optimizer).__name__} calls its closure several times in one step, each time with other "
                "weights: use an optimizer that needs one gradient per step"
            )
        if marks is not None and marks != _marks(optimizer):
            raise ThinwireError(UNSUITABLE_CLOSURE.format(kind=type(optimizer).__name__))
        return losses.pop()

    args, kwargs = call
    return (
        tuple(give_once if value is closure else value for value in args),
        {name: give_once if value is closure else value for name, value in kwargs.items()},
    )


@torch._disable_dynamo
def _marks(optimizer: torch.optim.Optimizer) -> list[tuple[int, bool]]:
    """Return what shows that weights were written, or gradients dropped."""
    return [(weight._version, weight.grad is None) for weight in parameters(optimizer)]
