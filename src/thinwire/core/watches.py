"""Notice what a program does to parameters and gradients between compress() and the optimizers' steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from thinwire.base.errors import ThinwireError, ThinwireWarning
from thinwire.core.card import StepMaker
from thinwire.core.engine import Engine
from thinwire.core.names import REPLACED, bare_name, clean_name
from thinwire.core.optimizers import makes_state, parameters, unwrapped
from thinwire.core.run import Run

_LATE = (
    "{name} was frozen when compress() was called, and has a gradient now: unfreeze it before, or wrap the model "
    "anew and call compress() again"
)
_JOINED = (
    "{name} joined the model after compress(), so Thinwire does not exchange its gradients: wrap the model anew, and "
    "call compress() again"
)
_STRANGER = (
    "{kind} updates {name}, and compress() was not told of it: its steps would be neither guarded nor agreed on by the "
    "ranks. Pass all optimizers to compress(); to change one in mid-run, keep wire.state_dict(), call wire.close(), "
    "then compress() with the new one, and wire.load_state_dict() with what you kept"
)
_WRITTEN = (
    ".grad of {name} was written between backward() and optimizer.step(), and holds a step of the weights, not a "
    "gradient: clipping has no effect on it (call wire.clip_grad_norm_), and what a mask takes from it is lost"
)


class ParameterWatch:
    """Knows the parameters as they were at compress(): trained or frozen, by which optimizers, of which kind."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._model, self._optimizers, self._weights = engine.model, run.optimizers, run.weights
        named = engine.model.named_parameters()
        self._frozen = {bare_name(name): weight for name, weight in named if id(weight) not in engine.parameters}
        self._thawed: dict[int, str] = {}  # of those, by id, that the last backward pass differentiated
        self._names = {id(weight): name for name, weight in self._weights.items()}
        self._known = {*self._names, *map(id, self._frozen.values())}
        self._elsewhere = WeakIdKeyDictionary()  # parameters of other models, as keys
        self._kinds = {name: _kind(weight) for name, weight in self._weights.items()}

    def name_of(self, weight: Tensor) -> str | None:
        """Name ``weight`` if it is a trained parameter."""
        return self._names.get(id(weight))

    def exchange_begins(self) -> None:
        """Note which frozen parameters this backward pass differentiates."""
        self._thawed = {id(weight): name for name, weight in self._frozen.items() if weight.requires_grad}

    def check_names(self, names: Iterable[str]) -> None:
        """Raise ThinwireError if one of ``names``, whose gradients are to be exchanged, was frozen at compress()."""
        for name in names:
            if name not in self._weights:
                raise ThinwireError(_LATE.format(name=name))

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check any ``optimizer`` of this process before it steps.

        Raise ThinwireError if compress() was not told of it, and a trained, thawed or new parameter of the model in it
        has a gradient.
        """
        if any(inner in self._optimizers for inner in unwrapped(optimizer)):
            return
        if (reason := self._joined(optimizer)) is not None:
            raise ThinwireError(reason)
        known = self._names | self._thawed
        members = (weight for weight in parameters(optimizer) if weight.grad is not None and id(weight) in known)
        if (weight := next(members, None)) is not None and not makes_state(optimizer):
            reason = _LATE if id(weight) in self._thawed else _STRANGER
            raise ThinwireError(reason.format(kind=type(optimizer).__name__, name=known[id(weight)]))

    def changed(self) -> str | None:
        """Explain that a parameter is of another dtype, on another device or another object than at compress(); DDP's
        hooks are on what it was before. None: there is no such parameter."""
        present = {id(weight): clean_name(name) for name, weight in self._model.named_parameters()}
        for name, weight in self._weights.items():
            former, now = self._kinds[name], _kind(weight)
            if now != former:
                return f"{name} was {former} at compress() and is {now} now: convert the model before you wrap it"
            if present.get(id(weight)) not in (name, f"module.{name}"):  # DDP's prefix
                return REPLACED.format(name=name)
        return None

    def unserved(self) -> str | None:
        """Explain that an optimizer would step a parameter that was frozen at compress(), or was not there; None: it
        would not.

        DDP does not exchange parameters that were frozen when it was made: each rank would go its own way.
        """
        for name, weight in self._frozen.items():
            thawed = weight.requires_grad and weight.grad is not None
            if thawed and any(weight is member for optimizer in self._optimizers for member in parameters(optimizer)):
                return _LATE.format(name=name)
        return next(filter(None, map(self._joined, self._optimizers)), None)

    def _joined(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Explain that ``optimizer`` would step a parameter that the model did not have at compress()."""
        unknown = [weight for weight in parameters(optimizer) if id(weight) not in self._known]
        stepped = {id(weight) for weight in unknown if weight.grad is not None and weight not in self._elsewhere}
        if not stepped:
            return None
        for name, weight in self._model.named_parameters():
            if id(weight) in stepped:
                return _JOINED.format(name=bare_name(name))
        self._elsewhere.update((weight, None) for weight in unknown if id(weight) in stepped)
        return None


class GradientWatch:
    """Notices that others have written gradients that hold steps of the weights (feedback="updates")."""

    def __init__(self, step_maker: StepMaker | None, run: Run) -> None:
        """``step_maker``: the method's, if it exchanges steps."""
        self._step_maker, self._weights = step_maker, run.weights
        self._counts: dict[str, int] = {}  # of writes to each step
        self.active = step_maker is not None and not run.scaled  # a GradScaler writes them; after a warning: no more

    def note(self) -> None:
        """Note how often the gradients were written until now."""
        if self.active:
            assert self._step_maker is not None
            gradients = ((name, self._weights[name].grad) for name in self._step_maker.names)
            self._counts = {name: gradient._version for name, gradient in gradients if gradient is not None}

    def warn(self) -> None:
        """Warn once if others have written one since. (torch does not count what one call does to DTensors.)"""
        for name, count in self._counts.items() if self.active else ():
            gradient = self._weights[name].grad
            if gradient is not None and gradient._version != count:
                self.active = False
                warnings.warn(_WRITTEN.format(name=name), ThinwireWarning, stacklevel=2)
                return

    def step_is_over(self) -> None:
        """Forget the step's gradients."""
        self._counts = {}


def _kind(weight: Tensor) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
