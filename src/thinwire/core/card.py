"""A method's card: its constant properties. ``Method`` itself has what changes from step to step."""

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
        resized: how a tensor that was ``put`` into the state moves to other ranks. "equal": it is the same on all ranks
            that the exchange connects, and is kept, or that of the nearest shard. "shard": the same, but there must be
            as many shards as before. "mean": it becomes its mean over those ranks. "anew": the method finds it anew.
            None: such a state is refused. State with rows needs no rule: it becomes its mean over the ranks that held
            it, which contributes as much to the next mean as before.
        rank_equal: it is the same on all ranks that the exchange connects (no pattern; kinds that begin so).
        offloaded: it lives in CPU memory (no pattern).
        of_weights: it belongs to the present weights and is dropped with what waits if they are replaced (no pattern).
        own: it is this rank's alone: a replica that joins begins with a copy of the kind that is named here, "none":
            without (no pattern; kinds that begin so). "": it is not.
        apart: each rank has its own, of its own gradients (an average of their squares, say), and one that joins may
            begin with any rank's, or with what that rank had a while ago.
        served: it has one row, its owner's, where the bucket has one for each rank (no pattern).
        one_row: where each rank gets the whole mean: does it have one row, or one for each rank? None: one if the
            network sums the wire (``Card.summed_by_network``).
        fault: (a saved state, its keys as in ``State.state_dict``) -> what of this kind is unusable and why, or "".
            Called before anything is loaded, mainly to check integers that would become addresses.
    """

    resized: Literal["equal", "shard", "mean", "anew"] | None = None
    rank_equal: bool = False
    offloaded: bool = False
    of_weights: bool = False
    own: str = ""
    apart: bool = False
    served: bool = False
    one_row: bool | None = None
    fault: Callable[[Mapping[str, Tensor]], str] | None = None


EQUAL, SHARD, MEAN, ANEW = (StateKind(resized=word) for word in ("equal", "shard", "mean", "anew"))
_SHARED_KINDS = {"replica": ANEW, "replica step": ANEW, "server": StateKind(served=True)}
"""The kinds of ``core/weights.py`` and ``methods/parts/twoway.py``, which several methods have."""


class StepMaker(Protocol):
    """An object that turns gradients into steps of the weights before they are exchanged."""

    @property
    def names(self) -> Collection[str]:
        """The parameters whose gradient in the engine's buffer is a step of the weights already."""

    def end_pass(self, gradients: Mapping[str, Tensor]) -> None:
        """Finish a backward pass, all of whose gradients have been exchanged: see ``Run.shows_late``. Collective."""

    def power(self) -> Tensor | None:
        """Estimate the squared norm of the mean gradient of what became steps, 0-dim; None: nothing has."""

    def resting(self) -> Collection[str]:
        """Return the parameters that rest in the present step: what waited of them goes on waiting."""

    def cancel(self, names: Collection[str]) -> None:
        """Forget the notes on the gradients of ``names``, which were exchanged and then thrown away."""

    def send_second(self, bucket: Any, exchange: Any) -> None: ...

    def hand_over(self, name: str, second: Tensor) -> None: ...

    def moments_of(self, name: str) -> dict[str, Tensor] | None: ...


@dataclass(frozen=True, kw_only=True)
class Card:
    """The properties of a method with its present knobs and, once begun, its run. Defaults: dense baseline.

    Attributes:
        promise: what becomes of the values that the method is given.
        group: elements that its codecs take together; each parameter's columns are padded to a multiple of it.
        summed_by_network: the network sums what is sent (a linear codec, or none). False: all-to-all and a sum in fp32.
        rows_apart: ``Method.reduce`` takes rows that lie apart in memory, each of them contiguous, so that what it
            compresses stays in the engine's buffer where that has such rows.
        native: the engine's own buffer is sent as it is, in its own dtype, neither split nor encoded.
        keeps_state: something has to survive from step to step.
        adds_up: two exchanges in one optimizer step give the sum of two means. False: for example, the method keeps an
            average over the steps, which would move on twice.
        bytes_follow_data: the bytes of a step depend on the data, and the plan is an upper bound.
        grows_with_ranks: if all ranks want the result, each rank's bytes grow with the number of ranks, since each
            receives every rank's message.
        instead_at_scale: what to write in the method's place among many ranks; "": nothing is better.
        encodes_weights: where the engine shards weights, messages of ``Method.weight_message`` travel in their place.
        why_whole: why the weights are gathered whole, though the method could send less of them; "": they are not, or
            were asked for.
        same_arithmetic: ranks hold equal bits only if they round alike: CPUs with the same kernels and the same
            instructions in torch, GPUs of one kind.
        takes_dense: gradients of parameters that stay dense go to ``Method.reduce``, too. False: the engine sums them.
        alone_from: the first optimizer step in which each rank (HSDP: each node) goes its own way, or None. From then
            on no gradients travel (``Method.reduce`` is not called), each rank decides alone whether its step counts,
            and numbers of steps may differ.
        round_steps: optimizer steps of a round, of which one or a few wait for the network: the means of whole rounds
            are compared. 1: every step does the same, or nearly.
        common: where ranks go their own ways and never all hold the same weights: the kind of state with the weights
            that they share, from which each differs. "": they hold the same after each round.
        delay: optimizer steps for which an exchange may travel while the rank computes on; it is needed after them.
        steady: the first optimizer step of the steady state, after start and warm-up.
        cycle: steps, counted from ``steady``, that represent the steady state -> each one's share in a plan's average.
        state_kinds: properties by kind of state. The first name or pattern that fits a kind counts.
        move: (a state by key, ranks per node and nodes that saved it, those that go on) -> changes in the state what
            depends on them, once the rest has moved. None: nothing does.
        step_maker: turns this rank's gradients into steps of the weights, if the method exchanges such steps, and knows
            which parameters' "gradients" in the engine's buffer are steps already. None: there are never any.
        intra: the ``Method`` of the hop inside a node, if there are two hops; None: dense.
        carrier: the ``Method`` that encodes what travels, if it is another one.
        row_codec: of rows that are sent to their owners; dense ones are packed behind its wire, and not copied there.
    """

    promise: Promise = EXACT
    group: int = 1
    summed_by_network: bool = True
    rows_apart: bool = False
    native: bool = True
    keeps_state: bool = False
    adds_up: bool = True
    bytes_follow_data: bool = False
    grows_with_ranks: bool = False
    instead_at_scale: str = ""
    encodes_weights: bool = False
    why_whole: str = ""
    same_arithmetic: bool = False
    takes_dense: bool = False
    alone_from: int | None = None
    round_steps: int = 1
    common: str = ""
    delay: int = 0
    steady: int = 0
    cycle: Mapping[int, float] = field(default_factory=lambda: {0: 1.0})
    state_kinds: Mapping[str, StateKind] = field(default_factory=lambda: dict(_SHARED_KINDS))
    move: Callable[[dict[str, Tensor], tuple[int, int], tuple[int, int]], None] | None = None
    step_maker: StepMaker | None = None
    intra: Any = None
    carrier: Any = None
    row_codec: Any = None

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
        """Name what is unusable in a ``saved`` state, and why; "" if nothing is."""
        faults = (kind.fault(saved) for kind in self.state_kinds.values() if kind.fault is not None)
        return next(filter(None, faults), "")
