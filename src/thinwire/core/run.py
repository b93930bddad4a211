"""The facts that a method is told: about parameters, the run, and each optimizer step."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.core.exchange import Exchange


@dataclass(frozen=True)
class Parameter:
    """A trained parameter.

    ``dtype`` is that of the engine's buffer in which its gradient travels.
    ``local`` is the number of elements of its shard with the engine's padding (``numel`` if nothing is sharded).
    ``rank_shape`` is its shape on this rank before data parallelism shards it: ``shape``, or a tensor-parallel part.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    role: str
    dtype: torch.dtype
    local: int
    rank_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.rank_shape:
            object.__setattr__(self, "rank_shape", self.shape)


class Holder(NamedTuple):
    """The optimizer that steps a parameter, and the parameter's group there."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]


def find_holders(optimizers: Iterable[torch.optim.Optimizer], weights: Mapping[str, Tensor]) -> dict[str, Holder]:
    """Find which of ``optimizers`` steps each of ``weights``, and in which group."""
    names = {id(weight): name for name, weight in weights.items()}
    return {
        names[id(weight)]: Holder(optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for weight in group["params"]
        if id(weight) in names
    }


class HolderCache:
    """Caches ``find_holders`` of ``optimizers`` and ``weights`` until an optimizer's groups change.

    A weight that was taken out of its optimizer keeps its former holder, with lr 0: it rests until it is added again.
    """

    def __init__(self, optimizers: tuple[torch.optim.Optimizer, ...], weights: Mapping[str, Tensor]) -> None:
        self.optimizers, self.weights = optimizers, weights
        self._seen: list[object] = []  # groups and their members, alive, so that no new one has their address
        self._cached: dict[str, Holder] = {}

    def look(self) -> dict[str, Holder]:
        """Return the holder of each of ``weights``."""
        seen: list[object] = []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                seen.append(group)
                seen.extend(group["params"])
        if len(seen) != len(self._seen) or not all(map(operator.is_, seen, self._seen)):
            self._seen = seen
            held = find_holders(self.optimizers, self.weights)
            rest = {name: Holder(last.optimizer, {**last.group, "lr": 0.0}) for name, last in self._cached.items()}
            self._cached = rest | held
        return self._cached


NO_SCALER = (
    "{name} does not run under a GradScaler, which skips steps of single ranks, so that these would miss the others: "
    "train in bfloat16"
)


@dataclass(frozen=True)
class Run:
    """The facts that ``compress()`` tells a method once.

    Attributes:
        parameters: the trainable parameters by name. exchange: the topology that ``reduce`` will be handed.
        steps: optimizer steps of the whole run, or None if the user did not say. seed: for every random stream.
        optimizers: the user's; together they hold all of ``parameters``.
        weights: the tensors of ``parameters``, by name (DTensors on FSDP2).
        rank: this process's data-parallel rank, for streams that must differ by rank. Tensor-parallel ranks share it,
            or what they hold in common would drift apart.
        hop: 2 if a hop inside the node has averaged the method's input; else 1. inside: the topology of that hop.
        chunk: (index, number) of the equal chunk of each parameter's dim 0 that travels here, if the rank holds whole
            weights (two levels on DDP). None: what the rank holds travels.
        scaled: gradients reach the optimizer multiplied with a GradScaler's scale, which the optimizer may undo itself.
        gathers: dtypes in which the engine gathers weights that it shards; empty if it shards none.
        shows_late: ``StepMaker.end_pass`` sees all gradients of a backward pass before the user sees any.
        began: the steps with which it began, of which a start or warm-up below 1 is a share; None: ``steps``.
        cache: of ``holders``; a run of the same weights and optimizers, made by ``replace``, shares it.
    """

    parameters: Mapping[str, Parameter]
    exchange: Exchange
    steps: int | None = None
    seed: int = 0
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    rank: int = 0
    scaled: bool = False
    hop: int = 1
    chunk: tuple[int, int] | None = None
    gathers: frozenset[torch.dtype] = frozenset()
    inside: Exchange | None = None
    began: int | None = None
    shows_late: bool = False
    cache: HolderCache = field(default_factory=lambda: HolderCache((), {}), compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.cache.weights is not self.weights or self.cache.optimizers is not self.optimizers:
            object.__setattr__(self, "cache", HolderCache(self.optimizers, self.weights))
        self.cache.look()  # what is taken out before anyone asks has a holder, too

    @property
    def holders(self) -> dict[str, Holder]:
        """The optimizer that steps each of ``weights``, and the group there as it is now.

        Do not keep a group over a step: ``optimizer.load_state_dict()`` replaces the groups' dicts, and schedulers
        change the new ones. Looking takes as long as there are weights: look once for many of them.
        """
        return self.cache.look()

    def resting(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return a group, with lr 0, for each of ``weights`` that was taken out of ``optimizer``."""
        members = find_holders((optimizer,), self.weights)
        groups = {name: holder.group for name, holder in self.holders.items() if holder.optimizer is optimizer}
        return [{**group, "params": [self.weights[name]]} for name, group in groups.items() if name not in members]

    def travels(self, name: str, values: Tensor) -> Tensor:
        """Select those of this rank's ``values`` (1-D) of parameter ``name`` that travel here: see ``chunk``."""
        if self.chunk is None:
            return values
        first = self.chunk[0] * self.parameters[name].local
        return values[first : first + self.parameters[name].local]


def take_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Take the step of the class of ``optimizer``, without hooks."""
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


@dataclass(frozen=True)
class Step:
    """An optimizer step that counts, as ``before_step`` and ``after_step`` see it. Several optimizers make one step.

    Attributes:
        number: optimizer steps taken before this one. weights: the trained parameters by name (DTensors on FSDP2).
        clip_factor: what ``clip_grad_norm_`` multiplied the averaged gradients with, 0-dim; None if it was not called.
        agree: (values) -> are they finite on every rank? Collective, waits for the device; True without a guard.
        agree_inside: the same among the ranks that hold this replica together, where the replicas have agreed already.
        failed: did the last agreement fail because a replica was lost, not because of values?
        put_back: what ``before_step`` adds here ``restore`` calls, right after the optimizer's own step, before the
            hooks of the user's; if that step raised an error, after it is taken again.
        own_step: (optimizer) -> its own step, for ``before_step``, which hides the gradients from the one that follows.
    """

    number: int
    optimizers: tuple[torch.optim.Optimizer, ...]
    weights: Mapping[str, Tensor]
    clip_factor: Tensor | None = None
    agree: Callable[[Iterable[Tensor]], bool] = lambda values: True
    around: Callable[[Callable[[int], Any]], Any] | None = None
    agree_inside: Callable[[Iterable[Tensor]], bool] = lambda values: True
    failed: Callable[[], bool] = lambda: False
    put_back: list[Callable[[], None]] = field(default_factory=list)
    own_step: Callable[[torch.optim.Optimizer], None] = take_own_step

    def restore(self) -> None:
        """Give the user back what ``before_step`` has hidden or scaled for the optimizer's own step."""
        for put_back in self.put_back:
            put_back()

    def hide_gradients(self, weights: Iterable[Tensor]) -> None:
        """Hide the gradients of ``weights`` from the optimizer, which leaves these, their moments and count alone."""
        hidden = [(weight, weight.grad) for weight in weights if weight.grad is not None]
        for weight, _ in hidden:
            weight.grad = None

        def show() -> None:
            for weight, gradient in hidden:
                weight.grad = gradient

        self.put_back.append(show)

    def attempt(self, exchange: Callable[[int], Any]) -> Any:
        """Return ``exchange(number)``, which ``agree`` is to follow; None (``around``): a replica was lost in it."""
        return exchange(self.number) if self.around is None else self.around(exchange)

    @functools.cached_property
    def holders(self) -> dict[str, Holder]:
        """The optimizer that steps each of ``weights``, and the group there as it is now."""
        return find_holders(self.optimizers, self.weights)
