"""The interface of a method, and its base class: the dense baseline.

This module re-exports what a method needs from ``run.py``, ``card.py`` and ``promise.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Within, check_types, unknown_knob
from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Fp32 as Fp32Codec
from thinwire.core.bucket import Arena, Bucket, Piece, Shard
from thinwire.core.card import ANEW, EQUAL, Card, StateKind
from thinwire.core.exchange import Exchange, bucket_rows
from thinwire.core.promise import CONSERVES, EXACT, Promise, Rounding
from thinwire.core.run import Holder, Parameter, Run, Step, find_holders
from thinwire.core.state import State, find_entries, put_back, read_existing
from thinwire.core.weights import Message

__all__ = ["ANEW", "CONSERVES", "EQUAL", "EXACT", "Card", "Fp32", "Holder", "Method", "Parameter", "Promise",
           "Rounding", "Run", "StateKind", "Step", "find_holders"]  # fmt: skip

SMALL = 64 * 1024
"""Tensors with fewer elements stay dense: they are 0.3% of a model's values, and make most of an 8-bit wire's error."""
MATRIX = 1024
"""Methods that send steps send every tensor from this many elements on; a smaller one is no matrix of a model."""

Smallest = Annotated[int, Within(lambda elements: elements >= 0, "must be 0 or more elements")]
Density = Annotated[float, Within(lambda share: 0 < share <= 1, "is the share of values sent, above 0 and up to 1")]
Start = Annotated[
    float,
    Within(
        lambda start: start >= 0 and (start < 1 or start == int(start)),
        "is a share of the run below 1 or a whole number of steps",
    ),
]
"""See ``first_step``."""


@dataclass
class Method:
    """A way to exchange gradients (and weights). This base class is the dense baseline.

    A method is one paper in one file. It sees the network only through the exchange that the engine hands in, so it is
    written once for DDP, FSDP2 and HSDP. Three touch points:

    * ``reduce(bucket, exchange)``: gradients. Compensate, choose a codec, exchange.
    * ``before_step(step)`` and ``after_step(step)``: around each optimizer step whose gradients were finite.
    * ``weight_message(shard, rank)``: weights, where the engine shards them.

    Its ``card`` has its constant properties. ``self.state`` is its memory between steps and forgets a non-finite step.

    Args:
        dense: patterns (``fnmatch``) of names of parameters that stay dense, that is, are not compressed.
        send: patterns of names of parameters that are compressed, even small ones, unless ``dense`` names them.
    """

    name: ClassVar[str] = "dense"
    """The name on the command line."""
    engines: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2", "hsdp")
    ELSEWHERE: ClassVar[str] = ""
    """The reason why it does not run on other engines, and what to take there."""
    two_level: ClassVar[bool] = False
    """Use two levels wherever there are several nodes of several ranks, unless the user says no."""
    OPTIMIZER: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.AdamW
    """The default optimizer, for which the method is made."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named settings: ``"radius:paper"`` on the command line, further knobs in parentheses behind it."""
    ABSENT: ClassVar[Mapping[str, str]] = {}
    """Knobs of the base class that this method lacks, and why: they are not listed, and setting one is refused."""

    missed = 0
    """Skipped steps of which it knows, if it lets ranks step alone. (No knob, so not annotated.)"""

    dense: tuple[str, ...] = ()
    send: tuple[str, ...] = ()
    state: State = field(init=False, repr=False, compare=False)
    run: Run = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for knob in ("dense", "send"):
            patterns = getattr(self, knob)
            if isinstance(patterns, str | list):
                setattr(self, knob, (patterns,) if isinstance(patterns, str) else tuple(patterns))
        check_types(self, lambda knob: f"{self.name}: {knob}")
        for knob in self.ABSENT:
            if getattr(self, knob) != getattr(type(self), knob):
                raise unknown_knob(type(self), knob)
        self.codec: Codec | None = self.make_codec()

    def make_codec(self) -> Codec | None:
        """Make the codec of the compressed parameters; None: nothing is encoded."""
        return None

    def begin(self, run: Run) -> None:
        """Prepare for ``run``, once, before ``compress()`` makes the plan. Raise ThinwireError for what cannot work."""
        self.run = run
        self.__dict__.pop("card", None)  # the run decides some of it

    @cached_property
    def card(self) -> Card:
        """The card from ``describe``, made at its first use, and again after ``begin``."""
        return self.describe()

    def describe(self) -> Card:
        """Make the card: ``replace(super().describe(), ...)`` with the differences of this class."""
        return Card() if self.codec is None else Card(native=False, group=self.codec.group)

    @property
    def rank_equal(self) -> bool:
        """Do all ranks (HSDP: those with the same shard) hold the same weights after the last step?"""
        return True

    def policy(self, parameter: Parameter) -> str | None:
        """Return why ``parameter``, which no pattern names, stays dense; None: it is compressed."""
        return None

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Write the mean over ranks of ``bucket.rows`` to ``bucket.mean``."""
        exchange.mean(bucket, self.codec, on_wire=self.card.summed_by_network)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        """Reduce in a dense step, after which nothing waits."""
        send_all(self.card.promise.waits, self.state, bucket, exchange)

    def before_step(self, step: Step) -> None:
        """Called right before each optimizer's part of a step, when its gradients are known to be finite.

        ``step`` has the optimizer and its weights alone. Change only here what the user sees of an optimizer (``grad``
        of its parameters, ``param_groups``), and let ``step.put_back`` put that back.
        """

    def after_step(self, step: Step) -> None:
        """Called once after a step, when all optimizers that take part have stepped.

        Values that it puts into the state are committed at once.
        """

    def after_skip(self, step: Step) -> None:
        """Called in place of both when the step did not count: after ``undo``, with unchanged weights.

        Values that it puts into the state are committed at once.
        """

    def undo(self) -> None:
        """Forget what ``reduce`` noted outside the state: the step under way does not count."""

    def finish(self) -> None:
        """Wait for the method's own work between steps; called before its state is read."""

    def facts(self) -> dict[str, float]:
        """Return the method's own figures for the report, by their names there."""
        return {}

    def weight_message(self, shard: Shard, rank: int) -> Message:
        """Make the message of a module's weights, of which ``rank`` owns ``shard``, if the ``card`` says so."""
        raise NotImplementedError

    def state_changed(self) -> None:
        """Called after ``state`` was loaded from a checkpoint."""

    def __str__(self) -> str:
        knobs = [knob for knob in fields(self) if knob.init]
        changed = [f"{knob.name}={value!r}" for knob in knobs if (value := getattr(self, knob.name)) != knob.default]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclass
class Fp32(Method):
    """No compression: fp32, summed in the order of ranks, so that the bits do not depend on the engine's buckets.

    Where dense depends on a ring's order of summation, this does not. On gloo, whose reduce-scatter moves as many bytes
    as an all-reduce, it is also the fair dense baseline for FSDP2: half of what ``dense`` sends.
    """

    name: ClassVar[str] = "fp32"
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(("dense", "send"), "everything is sent in fp32")

    def describe(self) -> Card:
        return replace(super().describe(), promise=CONSERVES, summed_by_network=False)

    def make_codec(self) -> Codec:
        return Fp32Codec()


def carrier_of(method: Method) -> Method:
    """Return the method that encodes: the card's carrier, else ``method``."""
    return method.card.carrier or method


def intra_of(method: Method) -> Method:
    """Return the method of the hop inside a node, if there are two hops: dense unless the card names another."""
    return method.card.intra or Method()


def check_engine(method: Method, engine: str) -> None:
    """Raise ThinwireError if ``method`` does not run on ``engine``, with what to take there."""
    if engine not in method.engines:
        elsewhere = f": {method.ELSEWHERE}" if method.ELSEWHERE else ""
        raise ThinwireError(
            f"method '{method.name}' runs on {', '.join(method.engines)} only, not on {engine}{elsewhere}"
        )


def bucket_of(
    method: Method, pieces: Sequence[Piece], exchange: Exchange, device: torch.device, arena: Arena | None = None,
    dtype: torch.dtype = torch.float32,
) -> Bucket:  # fmt: skip
    """Make the bucket for ``pieces`` that ``method`` reduces over ``exchange``."""
    rows = bucket_rows(exchange, method.card.summed_by_network)
    return Bucket(
        pieces, rows=rows, owner=exchange.owner, group=method.card.group, dtype=dtype, device=device, arena=arena,
        apart=method.card.rows_apart,
    )  # fmt: skip


def send_all(waits: Mapping[str, float], state: State, bucket: Bucket, exchange: Exchange) -> None:
    """Add all values that wait (kinds ``waits``) to ``bucket.rows``, write the mean to ``bucket.mean``, and zero them.

    It is one dense exchange. The rows are in the unit of the waiting values; between steps they are zeros.
    """
    for kind, weight in waits.items():
        waiting = read_existing(state, kind, bucket)
        if waiting is None:
            continue
        if len(waiting) == len(bucket.rows):
            bucket.rows.add_(waiting, alpha=weight)
        else:  # an owner's row, which stands for all ranks
            bucket.rows[exchange.rank].add_(waiting[0], alpha=exchange.ranks * weight)
        state.write(kind, bucket, len(waiting)).zero_()
        put_back(state, kind, bucket)
    bucket.clear_padding(bucket.rows)
    exchange.mean(bucket)


def drop_waiting(method: Method) -> None:
    """Drop this rank's waiting values, and other state that belongs to weights that are gone."""
    for kind in method.card.promise.waits:
        method.state.drop(kind)
    for pattern, kinds in method.card.state_kinds.items():
        for _, name, _ in find_entries(method.state, pattern) if kinds.of_weights else ():
            method.state.keep(pattern, name, None)


def first_step(method: Method, knob: str) -> int:
    """Convert ``knob`` to an optimizer step: below 1 a share of the run as it began, from 1 on a number of steps.

    Raises:
        ThinwireError: the share of an unknown number of steps; a step beyond the end of the run.
    """
    value, run = getattr(method, knob), getattr(method, "run", None)
    if run is None:
        return 0
    length = run.began or run.steps
    if 0 < value < 1 and length is None:
        raise ThinwireError(f"{method.name}: {knob}={value} is a share of the run: pass compress(..., steps=...)")
    first = int(value) if value == 0 or value >= 1 else round(value * length)
    if run.steps is not None and first >= run.steps:
        began = "" if length == run.steps else f" (it is step {first}, as the run began with {length})"
        raise ThinwireError(f"{method.name}: {knob}={value} lies beyond the end of the run of {run.steps} steps{began}")
    return first


def count_of(density: float, values: int) -> int:
    """Count how many of ``values`` a ``density`` sends: at least one."""
    return max(int(density * values), 1)


def exempt_small(parameter: Parameter, smallest: int) -> str | None:
    """Apply the common policy of lossy methods: norms, biases, other 1-D, routers' and small tensors stay dense."""
    if parameter.role in ("norm", "bias", "router"):
        return parameter.role
    if len(parameter.shape) < 2:
        return "1-D"
    if parameter.numel < smallest:
        return f"small (< {smallest})"
    return None
