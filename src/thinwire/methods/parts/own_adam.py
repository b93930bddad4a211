"""The Adam of a rank that steps alone: steps as large as those of the mean gradient, moments that are saved or met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError, Unsavable
from thinwire.core.agreement import Agreement
from thinwire.core.optimizers import parameters
from thinwire.core.run import Holder, Run, Step
from thinwire.methods.parts.own_steps import has_step_of_torch, is_decoupled
from thinwire.network.comm import GroupComm, local

BEYOND = 4.0
"""A first moment this many times beyond its bound is another rank's. Not 1: rates of decay may have changed since."""
_NUMBER = " as a number"
"""Ends the kinds of what is no tensor in an optimizer's state."""


def check_adam(method: str, run: Run) -> None:
    """Refuse optimizers whose step ``step_by_mean_moment`` cannot take, for ``method`` with second_moment='mean'."""
    for name, (optimizer, _) in run.holders.items():
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or not has_step_of_torch(optimizer):
            raise ThinwireError(
                f"{method}: second_moment='mean' works inside Adam's own step: pass torch.optim.AdamW or Adam as the "
                f"optimizer of {name}, got {type(optimizer).__name__}, or leave it out"
            )


def step_by_mean_moment(step: Step, ranks: int) -> None:
    """Let the Adams of ``step`` step its weights with v / N (LS1), and hide the gradients from the step that follows.

    Between steps v is that of a mean over N ranks, so a start that averages gradients leaves it as it is to be. Adam
    itself sees N v, sqrt(N) lr, sqrt(N) eps and, if it is decoupled, decay / sqrt(N): so it steps by
    lr m / (sqrt(v) + eps) and lr decay. Groups and v are put back, whatever the step raises.
    """
    root, served = math.sqrt(ranks), {id(weight) for weight in step.weights.values() if weight.grad is not None}
    for optimizer in step.optimizers:
        users = optimizer.param_groups
        weights = [[weight for weight in group["params"] if id(weight) in served] for group in users]
        optimizer.param_groups = [
            {**group, "params": own, "lr": group["lr"] * root, "eps": group["eps"] * root,
             "weight_decay": group["weight_decay"] / (root if is_decoupled(optimizer, group) else 1.0)}
            for group, own in zip(users, weights, strict=True)
        ]  # fmt: skip
        try:
            _rescale(torch._foreach_mul_, optimizer, ranks)
            step.own_step(optimizer)
        finally:
            _rescale(torch._foreach_div_, optimizer, ranks)
            optimizer.param_groups = users
        for own in weights:
            step.hide_gradients(own)


def _rescale(rescale: Callable[[list[Tensor], int], None], optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Multiply or divide by ``ranks`` each v, and the largest one so far (amsgrad), of the weights of ``optimizer``."""
    states = [optimizer.state.get(weight, {}) for weight in parameters(optimizer)]
    kinds = ("exp_avg_sq", "max_exp_avg_sq")
    if moments := [local(moments[kind]) for moments in states for kind in kinds if kind in moments]:
        rescale(moments, ranks)


def check_patchwork(method: str, optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """Refuse an Adam's first moments that its second ones cannot be of, as where a checkpoint has one of each rank's.

    Of one rank's gradients |m| <= sqrt(v) (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), by Cauchy's inequality. Waits for
    the device.

    Args:
        ranks: N, if v is that of a mean over N ranks.
    """
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    flags = []
    for group in optimizer.param_groups:
        b1, b2 = map(float, group["betas"])
        if b1 * b1 >= b2 or b2 >= 1:
            continue
        bound = BEYOND * math.sqrt(ranks) * (1 - b1) / math.sqrt((1 - b2) * (1 - b1 * b1 / b2))
        for moments in (optimizer.state.get(weight, {}) for weight in group["params"]):
            if "exp_avg" in moments:
                m, v = local(moments["exp_avg"]), local(moments["exp_avg_sq"])
                flags.append((m.abs() > bound * (v.sqrt() + group["eps"])).any())
    if flags and not flags[0].is_meta and bool(torch.stack(flags).any()):  # a dry run has no values
        raise ThinwireError(
            f"{method}: the optimizer's moments are not of one rank: its first ones are too large for its second ones, "
            "as in a checkpoint that has one kind of each rank's: load the wire's state, too, which holds each rank's "
            "own, or call wire.hand_over() before such a checkpoint is saved"
        )


def check_saved_shape(run: Run, kind: str, name: str, saved: Tensor) -> None:
    """Refuse a ``saved`` state of parameter ``name`` whose shape is not that of this rank's weight."""
    weight = run.weights.get(name)
    if weight is None or local(weight).shape != saved.shape:
        needs = "does not train it" if weight is None else f"needs {tuple(local(weight).shape)}"
        raise ThinwireError(
            f"state '{kind}' of {name} has shape {tuple(saved.shape)}, this run {needs}: it was saved with another "
            "model, world size or engine"
        )


def _places(name: str, holder: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each tensor and number in an optimizer's state of parameter ``name``: its kind, its dict or list, its key.

    Kinds are ``exp_avg``, or ``Q[0]`` for the first entry of a list.
    """
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        kind = f"{prefix}[{key}]" if prefix else str(key)
        if isinstance(value, dict | list):
            yield from _places(name, value, kind)
        elif isinstance(value, Tensor | int | float):
            yield kind if isinstance(value, Tensor) else f"{kind}{_NUMBER}", holder, key
        elif value is not None and not isinstance(value, str):
            raise Unsavable(
                f"the optimizer keeps a {type(value).__name__} as '{kind}' of {name}, which may differ by rank and "
                "cannot be saved: use an optimizer that keeps tensors, numbers, and lists and dicts of these"
            )


def own_moments(run: Run) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (kind, parameter's name, value) of the optimizers' state; numbers as 0-dim tensors, int64 or float64."""
    holders = run.holders
    for name, weight in run.weights.items():
        for kind, holder, key in _places(name, holders[name].optimizer.state.get(weight, {})):
            value = holder[key]
            if isinstance(value, Tensor):
                yield kind, name, local(value.detach())
            else:
                dtype = torch.float64 if isinstance(value, float) else torch.int64
                yield kind, name, torch.tensor(value, dtype=dtype, device="cpu")


class OwnNumbers:
    """The numbers in the groups of a user's own optimizers that its steps change: ScheduleFree's k, Prodigy's d.

    torch's optimizers have none. What schedules and users set is none of them, and is never put back.
    """

    def __init__(self, run: Run) -> None:
        optimizers = [o for o in run.optimizers if not type(o).__module__.startswith("torch.optim")]
        self._places = [
            (optimizer, number, key)
            for optimizer in optimizers
            for number in range(len(optimizer.param_groups))
            for key, value in sorted(optimizer.defaults.items())
            if type(value) in (int, float)
        ]
        self._changed: set[int] = set()

    def _read(self) -> list[Any]:
        return [optimizer.param_groups[number].get(key) for optimizer, number, key in self._places]

    def watch(self, step: Step) -> None:
        """Note what the optimizer's own step, which follows, changes."""
        if not self._places:
            return
        before = self._read()

        def note() -> None:
            self._changed |= {i for i, pair in enumerate(zip(before, self._read(), strict=True)) if pair[0] != pair[1]}

        step.put_back.append(note)

    def save(self) -> Tensor | None:
        """Return the numbers that steps have changed, else 0, and where they are: (2, n), float64. None: none can."""
        if not self._places:
            return None
        changed = [index in self._changed for index in range(len(self._places))]
        rows = [[float(value) if flag else 0.0 for value, flag in zip(self._read(), changed, strict=True)], changed]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")

    def restore(self, saved: Tensor) -> None:
        """Put back what ``save`` returned."""
        self._changed = {index for index, flag in enumerate(saved[1].tolist()) if flag}
        for index in self._changed:
            optimizer, number, key = self._places[index]
            optimizer.param_groups[number][key] = type(optimizer.defaults[key])(saved[0, index].item())


def average_moments(run: Run) -> None:
    """Give the optimizers' floating-point state its mean over the ranks, through float64. Collective.

    Raises:
        ThinwireError: ranks have state of different parameters, or state that has no mean. Raised on all ranks.
    """
    comm, held = run.exchange.comm, dict[str, Tensor]()
    assert isinstance(comm, GroupComm)
    with Agreement([GroupComm.aside(comm.group, comm.device)]) as agreement:
        for kind, name, value in own_moments(run):
            if value.is_floating_point() and not kind.endswith(_NUMBER):
                held[f"{kind} of {name}"] = value
            elif value.dim():
                raise ThinwireError(
                    f"wire.hand_over(): {kind} of {name} is {value.dtype}, and has no mean over the ranks: make a "
                    f"new {type(run.holders[name].optimizer).__name__} for what follows"
                )
        agreement.compare({f"its optimizer's {key}": str(tuple(value.shape)) for key, value in held.items()})
    for value in held.values():
        mean = comm.all_reduce(value.to(comm.device, torch.float64)).div_(comm.size)
        value.copy_(mean)


def restore_moment(weight: Tensor, holder: Holder, kind: str, name: str, saved: Tensor) -> None:
    """Make ``saved`` the ``kind`` of the state of ``weight``, whose name is ``name``; lists and dicts must be there."""
    optimizer, group = holder
    moments = optimizer.state[weight]
    places = {label: (owner, key) for label, owner, key in _places(name, moments)}
    if "[" in kind and kind not in places:
        raise ThinwireError(
            f"the optimizer's state of {name} has no '{kind.removesuffix(_NUMBER)}': load the optimizer's own state "
            "before the wire's"
        )
    owner, key = places.get(kind, (moments, kind.removesuffix(_NUMBER)))
    if kind.endswith(_NUMBER):
        owner[key] = type(owner[key])(saved.item()) if kind in places else saved.item()
        return
    if kind not in places:
        on_device = saved.dim() > 0 or group.get("capturable") or group.get("fused")
        if saved.dim() > 0 and saved.shape == local(weight).shape:
            moments[kind] = torch.zeros_like(weight, dtype=saved.dtype, requires_grad=False)
        else:
            moments[kind] = saved.clone() if on_device else saved.cpu()
    local(owner[key]).copy_(saved)
