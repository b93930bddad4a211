"""The interface of every engine, and the functions that engines share."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.core.bucket import Layout
from thinwire.core.exchange import Exchange
from thinwire.core.method import Method, Parameter
from thinwire.network.comm import Comm, CountingComm, GroupComm, local
from thinwire.network.guard import Guard

if TYPE_CHECKING:
    from thinwire.core.road import Levels, Road


Meet = Callable[[], None]
"""An engine calls it after it has read its model, before it makes groups of its own: collective."""


class Way(NamedTuple):
    """The way of an engine's gradients. Its groups alone decide it, so a prediction makes it without processes.

    Attributes:
        hops, levels, parameters, chunk: of :class:`Engine`. own_comms: the groups made for it.
    """

    hops: tuple[Exchange, ...]
    parameters: dict[int, Parameter]
    levels: Levels | None = None
    chunk: tuple[int, int] | None = None
    own_comms: Sequence[Any] = ()


class ModuleHook:
    """Call ``function`` before or after a module's forward pass. A copy, which a copy of the module gets, does not."""

    def __init__(self, function: Callable[[], object] | None = None) -> None:
        self._function = function

    def __call__(self, *_: Any) -> None:
        if self._function is not None:
            self._function()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return type(self), ()


class Engine:
    """An adapter of PyTorch's parallel training: it hands out gradients and takes their means back.

    Methods that do nothing here are for engines that gather weights or keep gradients back.

    Attributes:
        kind: "ddp", "fsdp2" or "hsdp". model: the wrapped model.
        parameters: each trained parameter's description, by id.
        hops: the exchanges of the road, in order; the last one is the method's. levels: see ``Road``.
        chunk: see :class:`thinwire.core.method.Run`.
        comms: the groups on which ranks agree whether a step counts. beside: those of them whose ranks hold other parts
            of the parameters for another reason than data parallelism.
        rank: this process's number among the data-parallel ones.
        gathers: dtypes in which sharded weights are gathered; empty where they are not sharded.
        exchanges: False where torch leaves out what a single rank would exchange with itself, so we are never called.
        void: has the step under way failed, as a replica was lost?
        shows_late: the user sees no gradient before all of a backward pass are exchanged, and ``Road.end_pass`` does.
    """

    kind: str
    model: Any
    parameters: dict[int, Parameter]
    hops: tuple[Exchange, ...]
    levels: Levels | None = None
    chunk: tuple[int, int] | None = None
    comms: list[Comm]
    beside: Sequence[GroupComm] = ()
    rank: int
    gathers: frozenset[torch.dtype] = frozenset()
    exchanges = True
    void = False
    shows_late = False

    def attach(self, step_loop: Any, road: Road) -> None:
        """Send every gradient down ``road``, and tell ``step_loop``, the model's ``StepLoop``."""

    def layout(self) -> Layout:
        """Return the buffers that the engine will hand out."""
        raise NotImplementedError

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Suppress the exchange in this backward pass unless it is the ``last`` of the optimizer step."""
        raise NotImplementedError

    def exchange(self) -> None:
        """Exchange the gradients that the engine keeps until they are clipped or an optimizer steps. Collective."""

    def agree(
        self, guard: Guard, device: torch.device, trouble: bool, comms: Sequence[Comm] | None = None
    ) -> tuple[bool, bool]:
        """Agree whether the step counts: ``Guard.agree``."""
        return guard.agree(device, trouble, comms)

    def attempt(self, road: Road, exchange: Callable[[int], Any]) -> Any:
        """Return ``exchange(road.step)``, an exchange of a method's own, which ``agree`` is to follow."""
        return exchange(road.step)

    def after_vote(self) -> AbstractContextManager[None]:
        """Wrap what a method sends when the step counts already."""
        return nullcontext()

    def gradients(self) -> list[Tensor | None]:
        """Return this rank's part of the gradients of all trained parameters."""
        return [parameter.grad for parameter in self._all_parameters if parameter.requires_grad]

    @functools.cached_property
    def _all_parameters(self) -> list[Tensor]:
        """The model's, listed once: to walk through its modules again takes the host as long as some launches."""
        return list(self.model.parameters())

    def accumulated(self) -> bool:
        """Does this rank have gradients that torch keeps from the optimizer?"""
        return False

    def cut_short(self) -> bool:
        """Did torch exchange only some gradients of the last backward pass, and leave the others local?"""
        return False

    def missing(self) -> str | None:
        """Name a parameter whose missing gradient keeps torch from exchanging those of others."""
        return None

    def dropped(self, weights: Sequence[Tensor], *, look: bool, comms: Sequence[Comm] | None = None) -> bool:
        """Were gradients of ``weights``, exchanged earlier in this step, thrown away? ``look``: check for zeros too.

        Collective over ``comms`` (None: ``self.comms``) where gradients are sharded.
        """
        raise NotImplementedError

    def emptied(self, comms: Sequence[Comm] | None = None) -> bool:
        """Are the gradients of all ranks None or zero? Collective over ``comms`` (None: ``self.comms``)."""
        return all_zero(self.gradients(), self.comms if comms is None else comms)

    def end_step(self) -> None:
        """Note that the step is over."""

    def stepping(self, *, retry: bool = False) -> None:
        """Note that an optimizer, or the method in its place, is about to give the weights new values.

        ``retry``: its step has raised an error, after the method may have given some weights their new values.
        """

    def stepped(self) -> None:
        """Note that an optimizer has given the weights new values."""

    def send_weights(self, step: int) -> None:
        """Send weights ahead of the next forward pass; optimizers have taken ``step`` steps. Collective."""

    def wait_for_weights(self) -> None:
        """Wait for the weights that ``send_weights`` sent."""

    def weights_changed(self) -> None:
        """Note that something else than an optimizer changed the weights."""

    def missed(self) -> str | None:
        """Explain that ranks have computed with unlike weights since the last step; None if they have not."""
        return None

    def close(self) -> None:
        """End threads. Hooks stay until ``renew``, so that no exchange passes unnoticed."""

    @staticmethod
    def renew(model: Any) -> None:
        """Remove the hooks that a closed engine left on ``model``, before another engine comes."""


def all_zero(gradients: Iterable[Tensor | None], comms: Sequence[Comm] = ()) -> bool:
    """Are all ``gradients`` None or zero? Waits for the device.

    Collective over ``comms`` unless all are None, because a rank may own nothing but zeros.
    """
    present = [local(gradient) for gradient in gradients if gradient is not None]
    if not present:
        return True
    any_nonzero = torch.stack([gradient.any() for gradient in present]).any().float().reshape(1)
    for comm in comms:
        comm.all_reduce(any_nonzero, "max")
    return not bool(any_nonzero)


def wants_two_levels(comm: Comm, method: Method, two_level: bool | None) -> bool:
    """Follow the user, else the method; use two levels only where both have several ranks."""
    nodes = len(set(comm.nodes))
    return (method.two_level if two_level is None else two_level) and 1 < nodes < comm.size


Divisible = TypeVar("Divisible", GroupComm, CountingComm)


def split_by_node(comm: Divisible) -> tuple[Divisible, Divisible]:
    """Group the ranks of this node, and the ranks with this local rank on every node. Collective over ``comm``."""
    sizes = [size for _, size in sorted(Counter(comm.nodes).items())]
    if len(set(sizes)) != 1:
        raise ThinwireError(
            f"two levels need the same number of ranks on every node, got {sizes}: pass two_level=False"
        )
    if sorted(comm.nodes) != list(comm.nodes):
        raise ThinwireError("two levels need consecutive rank numbers on each node: pass two_level=False")
    size = sizes[0]
    node, local_rank = divmod(comm.rank, size)
    return comm.subset(range(node * size, (node + 1) * size)), comm.subset(range(local_rank, comm.size, size))
