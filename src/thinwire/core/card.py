"""A method's card: all that it says of itself once. ``Method`` itself says what changes from step to step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from thinwire.core.promise import EXACT, Promise


@dataclass(frozen=True, kw_only=True)
class StateKind:
    """The properties of one kind of state, or of all kinds that an ``fnmatch`` pattern names.

    Attributes:
        resized: what becomes of a tensor that was ``put`` into the state when a run goes on with other ranks. "equal":
            it is the same on all ranks, and is kept. "shard": it is the same on all ranks that hold the same shard,
            which have to be as many as before. "mean": it becomes its mean over those. "anew": it belongs to the ranks
            of before, and the method finds it anew. None: such a state is refused. What has rows needs no word: it
            becomes its mean over the ranks that held it, which is as much of the next mean as before.
        rank_equal: it is the same on all ranks that the exchange connects (no pattern; kinds that begin so).
        offloaded: it lives in CPU memory (no pattern).
        of_weights: it belongs to the weights as they were, and is dropped with what waits when other weights are put in
            their place (no pattern).
        fault: (a saved state, its keys as in ``State.state_dict``) -> what of this kind cannot be used there, and why,
            or "": integers that would become addresses, in the first place. It is called before anything is loaded.
    """

    resized: Literal["equal", "shard", "mean", "anew"] | None = None
    rank_equal: bool = False
    offloaded: bool = False
    of_weights: bool = False
    fault: Callable[[Mapping[str, Tensor]], str] | None = None


EQUAL, SHARD, MEAN, ANEW = (StateKind(resized=word) for word in ("equal", "shard", "mean", "anew"))


class StepMaker(Protocol):
    """An object that makes steps of the weights of gradients, before they are exchanged."""

    @property
    def names(self) -> Collection[str]:
        """The parameters whose gradient, as the engine holds it now, is a step of the weights already."""

    def power(self) -> Tensor | None:
        """About the squared norm of the mean gradient of what became steps, 0-dim; None: nothing has."""

    def resting(self) -> Collection[str]:
        """The parameters that hold still in the step under way: what waited of them goes on waiting."""

    def cancel(self, names: Collection[str]) -> None:
        """Forget what was noted of the gradients of ``names``: they were exchanged and then thrown away."""

    def send_second(self, bucket: Any, exchange: Any) -> None: ...

    def hand_over(self, name: str, second: Tensor) -> None: ...

    def moments_of(self, name: str) -> dict[str, Tensor] | None: ...


@dataclass(frozen=True, kw_only=True)
class Card:
    """The properties of a method with its knobs as they are and, once begun, in its run. Defaults: dense baseline.

    Attributes:
        promise: what the method keeps of the values that it is given.
        group: elements that its codecs take together; each parameter's columns are padded to a multiple of it.
        summed_by_network: the network sums what is sent (a linear codec, or none). False: all-to-all and a sum in fp32.
        native: the engine's own buffer goes out as it is, in its own dtype: nothing is split, nothing is encoded.
        keeps_state: something has to survive from step to step.
        adds_up: two exchanges in one optimizer step give the sum of two means. A method that keeps an average over the
            steps, which would move on twice, says False.
        bytes_follow_data: the bytes of a step depend on the data, and the plan is an upper bound.
        grows_with_ranks: where all ranks want the result, each receives every rank's message, so that what a rank sends
            grows with their number.
        instead_at_scale: what to write in the method's place among many ranks, or "" where nothing else is better.
        encodes_weights: something else than the weights themselves travels where the engine shards them, and
            ``Method.weight_message`` makes it.
        same_arithmetic: ranks hold equal bits only if their CPUs round alike: by the same kernels, and with the same
            instructions in torch.
        takes_dense: gradients of parameters that stay dense go to ``Method.reduce``, too. False: the engine sums them.
        alone_from: the first optimizer step in which each rank (HSDP: each node) goes its own way, or None. From then
            on nothing of a step's gradients travels, each rank decides by itself whether its step counts, and ranks'
            numbers of steps taken may differ.
        steady: the first optimizer step that is like all that follow: neither start nor warm-up.
        cycle: steps, counted from ``steady``, that stand for all of the steady state, and each one's share of them: a
            plan is their average.
        state_kinds: what holds of the kinds of state. The first name or pattern that fits a kind counts.
        step_maker: makes steps of the weights of this rank's gradients, where the method exchanges such steps. It knows
            whose "gradients", as the engine holds them before a step, are steps already. None: there are never any.
        intra: the ``Method`` of the hop inside a node, where there are two hops; None: dense.
        carrier: the ``Method`` that encodes what travels, where that is another one.
    """

    promise: Promise = EXACT
    group: int = 1
    summed_by_network: bool = True
    native: bool = True
    keeps_state: bool = False
    adds_up: bool = True
    bytes_follow_data: bool = False
    grows_with_ranks: bool = False
    instead_at_scale: str = ""
    encodes_weights: bool = False
    same_arithmetic: bool = False
    takes_dense: bool = False
    alone_from: int | None = None
    steady: int = 0
    cycle: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})
    state_kinds: Mapping[str, StateKind] = field(default_factory=lambda: {"replica": ANEW, "replica step": ANEW})
    step_maker: StepMaker | None = None
    intra: Any = None
    carrier: Any = None

    def alone(self, number: int) -> bool:
        """Does each rank go its own way in the step after ``number`` others?"""
        return self.alone_from is not None and number >= self.alone_from

    @property
    def steady_steps(self) -> dict[int, float]:
        """``cycle`` by the number of the optimizer step."""
        return {self.steady + number: share for number, share in self.cycle.items()}

    @property
    def offloaded_kinds(self) -> list[str]:
        """The kinds of state that live in CPU memory."""
        return [name for name, kind in self.state_kinds.items() if kind.offloaded]

    def fault_of(self, saved: Mapping[str, Tensor]) -> str:
        """Name what of a ``saved`` state cannot be used, and why; "" where nothing is wrong."""
        faults = (kind.fault(saved) for kind in self.state_kinds.values() if kind.fault is not None)
        return next(filter(None, faults), "")
