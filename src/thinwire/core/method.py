"""The interface of a method, and its base class: the dense baseline.

A method needs one import: what it is told (``run.py``) and what it promises (``promise.py``) are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import check_types
from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Fp32 as Fp32Codec
from thinwire.core.bucket import Arena, Bucket, Piece, Shard
from thinwire.core.exchange import Exchange, bucket_rows
from thinwire.core.promise import CONSERVES as CONSERVES
from thinwire.core.promise import EXACT as EXACT
from thinwire.core.promise import Promise as Promise
from thinwire.core.promise import Rounding as Rounding
from thinwire.core.run import Holder as Holder
from thinwire.core.run import Parameter as Parameter
from thinwire.core.run import Run as Run
from thinwire.core.run import Step as Step
from thinwire.core.run import find_holders as find_holders
from thinwire.core.state import State, put_back, read_existing
from thinwire.core.weights import Message

Resized = Literal["equal", "shard", "mean", "anew"]
"""See ``Method.resized``."""
SMALL = 64 * 1024
"""Elements below which a tensor is not worth compressing: 0.3% of a model's values, most of an 8-bit wire's error."""
MATRIX = 1024
"""Elements below which nothing is a matrix of a model's: all others are sent where what is sent are steps."""


@dataclass
class Method:
    """One way to exchange gradients (and weights). This base class is the dense baseline.

    A method is one paper in one file. It sees the network only through the exchange that the engine hands in, so it is
    written once for DDP, FSDP2 and HSDP. Three touch points:

    * ``reduce(bucket, exchange)``: gradients. Compensate, choose a codec, exchange.
    * ``before_step(step)`` and ``after_step(step)``: around each optimizer step whose gradients were finite.
    * ``weight_message(shard, rank)``: weights, where the engine shards them.

    What it remembers between steps goes to ``self.state``, which forgets a step that turned out not to be finite.

    Args:
        dense: patterns (``fnmatch``) of parameter names that stay dense whatever the policy says.
        send: patterns of parameter names that are compressed whatever the policy says; ``dense`` wins over ``send``.
    """

    name: ClassVar[str] = "dense"
    """As written on the command line."""
    engines: ClassVar[tuple[str, ...]] = ("ddp", "fsdp2", "hsdp")
    ELSEWHERE: ClassVar[str] = ""
    """Why it does not run on other engines, and what to take there."""
    two_level: ClassVar[bool] = False
    """Made for two levels: used wherever there are several nodes of several ranks, unless the user says no."""
    OPTIMIZER: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.AdamW
    """What it is made for, where nobody says otherwise."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named settings: ``"radius:paper"`` on the command line, further knobs in parentheses behind it."""
    ABSENT: ClassVar[Mapping[str, str]] = {}
    """Knobs of the base class that this method has not, and why: setting one is refused, and they are not listed."""

    same_arithmetic: ClassVar[bool] = False
    """Do ranks hold equal bits only if their CPUs round alike: the same kernels, and torch's own instructions?"""

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
                raise self.no_knob(knob)
        self.codec: Codec | None = self.make_codec()

    @classmethod
    def knobs(cls) -> list[Field[Any]]:
        """The fields that a user can set."""
        return [knob for knob in fields(cls) if knob.init and knob.name not in cls.ABSENT]

    @classmethod
    def no_knob(cls, knob: str) -> ThinwireError:
        """What to raise where ``knob`` was set and there is none of that name."""
        why = f" ({cls.ABSENT[knob]})" if knob in cls.ABSENT else ""
        known = ", ".join(known.name for known in cls.knobs()) or "none"
        return ThinwireError(f"{cls.name} has no knob '{knob}'{why}; it has: {known}")

    def refuse_idle(self, when: str, *knobs: str) -> None:
        """Refuse those of ``knobs`` that are set: they do nothing ``when`` another is set so."""
        for knob in knobs:
            if getattr(self, knob) != getattr(type(self), knob):
                raise ThinwireError(f"{self.name}: {knob} does nothing with {when}: leave it out")

    def must(self, good: bool, knob: str, be: str) -> None:
        """Refuse ``knob`` as it is unless that is ``good``: it "is a number of steps, 1 or more"."""
        if not good:
            raise ThinwireError(f"{self.name}: {knob} {be}, got {getattr(self, knob)}")

    def make_codec(self) -> Codec | None:
        """The codec of the compressed parameters; None: nothing is encoded."""
        return None

    def intra(self) -> Method:
        """The method for the hop inside a node, where there are two: the base class stays dense there."""
        return Method()

    def begin(self, run: Run) -> None:
        """Called once by ``compress()``, before the plan is made. Raises ThinwireError for what cannot be done."""
        self.run = run

    @property
    def promise(self) -> Promise:
        """What is kept of the values, with the knobs as they are. The base class is the dense baseline."""
        return EXACT

    @property
    def adapts(self) -> bool:
        """Do the bytes of a step follow the data? Then the plan is a bound."""
        return False

    @property
    def carrier(self) -> Method:
        """The method that encodes what travels: this one, or the one that it hands it to."""
        return self

    @property
    def rank_equal(self) -> bool:
        """Do all ranks (HSDP: those with the same shard) hold the same weights after the last step?"""
        return True

    @property
    def alike(self) -> Collection[str]:
        """Kinds of state of any shape (``State.put``) that are the same on all ranks that the exchange connects."""
        return ()

    def alone(self, number: int) -> bool:
        """Does each rank (HSDP: each node) go its own way in the step after ``number`` others?

        Then nothing of its gradients travels, and whether it counts is decided where it is taken: ranks' numbers of
        steps taken may differ from then on.
        """
        return False

    @property
    def granule(self) -> int:
        """Elements that the codecs take together: a parameter's columns are padded to a multiple."""
        return 1 if self.codec is None else self.codec.group

    @property
    def native(self) -> bool:
        """The engine's own buffer goes out as it is, in its own dtype: nothing to split, nothing to encode."""
        return self.codec is None

    @property
    def keeps_state(self) -> bool:
        """Does something have to survive from step to step?"""
        return False

    @property
    def bounded(self) -> bool:
        """Does it keep what it takes of gradients before they are averaged and clipped? Then ``bound.py`` cuts what is
        spoilt."""
        return self.keeps_state

    def keep_dense(self, parameter: Parameter) -> str | None:
        """Why ``parameter`` is not compressed, or None if it is. Patterns first, then the method's own policy."""
        if parameter.numel == 0:
            return "empty"
        if any(fnmatchcase(parameter.name, pattern) for pattern in self.dense):
            return "named in dense="
        if any(fnmatchcase(parameter.name, pattern) for pattern in self.send):
            return None
        return self.policy(parameter)

    def dense_among(self, parameters: Iterable[Parameter]) -> frozenset[str]:
        """The names of those of ``parameters`` that are not compressed."""
        return frozenset(parameter.name for parameter in parameters if self.keep_dense(parameter) is not None)

    def unmatched(self, names: Iterable[str]) -> str | None:
        """A line about the first pattern of the user's that matches none of the parameters ``names``, or None.

        Those of a preset are for any model: with ``dense=("*bias",)`` one without biases is fine.
        """
        names = list(names)
        for knob in ("dense", "send"):
            preset = {pattern for values in self.PRESETS.values() for pattern in values.get(knob, ())}
            for pattern in getattr(self, knob):
                if pattern not in preset and not any(fnmatchcase(name, pattern) for name in names):
                    return f"{self.name}: {knob}='{pattern}' matches no trained parameter of this rank's model"
        return None

    def policy(self, parameter: Parameter) -> str | None:
        """The method's rule for parameters that no pattern names. The base class encodes nothing, exempts nothing."""
        return None

    def bucket_of(
        self, pieces: Sequence[Piece], exchange: Exchange, device: torch.device, arena: Arena | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Bucket:  # fmt: skip
        """For ``pieces`` that this method reduces over ``exchange``. ``arena``: that it shares with other buckets."""
        return Bucket(
            pieces, rows=bucket_rows(exchange, self.on_wire), owner=exchange.owner, group=self.granule, dtype=dtype,
            device=device, arena=arena,
        )  # fmt: skip

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Write the mean over ranks of ``bucket.rows`` to ``bucket.mean``."""
        exchange.mean(bucket, self.codec, on_wire=self.on_wire)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        """``reduce`` in a step that is dense, after which nothing waits."""
        self.send_all(bucket, exchange)

    def send_all(self, bucket: Bucket, exchange: Exchange) -> None:
        """``bucket.mean`` = the mean over ranks of ``bucket.rows`` and of all that waits; nothing waits then.

        One dense exchange. The rows are in the unit of what waits; between steps they are zeros.
        """
        for kind, counts in self.promise.waits.items():
            old = read_existing(self.state, kind, bucket)
            if old is None:
                continue
            if len(old) == len(bucket.rows):
                bucket.rows.add_(old, alpha=counts)
            else:  # an owner's, which stands for all ranks
                bucket.rows[exchange.rank].add_(old[0], alpha=exchange.ranks * counts)
            self.state.write(kind, bucket, len(old)).zero_()
            put_back(self.state, kind, bucket)
        bucket.clear_padding(bucket.rows)
        exchange.mean(bucket)

    def before_step(self, step: Step) -> None:
        """Called once per optimizer step, when its gradients are known to be finite, before the step is taken."""

    def after_step(self, step: Step) -> None:
        """Called when that step has been taken. What it puts into the state is kept at once."""

    def after_skip(self, step: Step) -> None:
        """Called in place of both when the step did not count: after ``undo``, with weights as they were.

        What it puts into the state is kept at once. Not called where gradients were thrown away, and no step was due.
        """

    def undo(self) -> None:
        """The step under way does not count. What ``reduce`` noted elsewhere than in the state is forgotten."""

    @property
    def resting(self) -> Collection[str]:
        """The parameters that hold still in the step under way, whatever was exchanged: what waited goes on waiting."""
        return ()

    def power_of_moves(self) -> Tensor | None:
        """About the squared norm of the mean gradient of what ``moves``, on the exchange's ranks, 0-dim; None: nothing
        does."""
        return None

    def cancel(self, names: Collection[str]) -> None:
        """The gradients of ``names`` were exchanged and then thrown away; the others' step counts.

        The state of theirs is as before the exchange already. What ``reduce`` noted of them elsewhere is forgotten.
        """

    def drop_waiting(self) -> None:
        """What waits is dropped, on this rank: the weights that it belongs to are no more."""
        for kind in self.promise.waits:
            self.state.drop(kind)

    def finish(self) -> None:
        """Wait for what the method has under way between steps; called before its state is read."""

    @property
    def steady(self) -> int:
        """The first optimizer step that is like all that follow: neither start nor warm-up."""
        return 0

    @property
    def on_wire(self) -> bool:
        """Does the network sum what is sent (linear codec or none)? False: all-to-all and a sum in fp32."""
        return True

    @property
    def adds_up(self) -> bool:
        """Do two exchanges in one optimizer step give the sum of two means?

        Not so for a method with an average of its own over the steps, which would move on twice.
        """
        return True

    @property
    def gathers(self) -> bool:
        """Where all ranks want the result: does each of them receive every rank's message, so that what a rank sends
        grows with their number?"""
        return False

    @property
    def at_scale(self) -> str:
        """What to write in its place among many ranks, if it ``gathers`` and something else does not."""
        return ""

    @property
    def moves(self) -> Collection[str]:
        """The parameters whose gradient, as the engine holds it before a step, is a step of the weights already."""
        return ()

    @property
    def cycle(self) -> Mapping[int, float]:
        """Steps that stand for all steps of the steady state, and each one's share of them: a plan is their average."""
        return {self.steady: 1.0}

    def facts(self) -> dict[str, float]:
        """Figures of the method's own for the report, by what they are called there."""
        return {}

    @property
    def offloads(self) -> tuple[str, ...]:
        """Kinds of its state that live in CPU memory."""
        return ()

    @property
    def resized(self) -> Mapping[str, Resized]:
        """What becomes of each kind (or pattern of kinds) that was ``put`` into its state when a run goes on with other
        ranks. What has rows needs no word: it becomes its mean over the ranks that held it, which is as much of the
        next mean as before.

        "equal": it is the same on all ranks, and is kept. "shard": on all that hold the same shard, which have to be as
        many as before. "mean": its mean over those. "anew": it belongs to these ranks, and is found anew. No word: such
        a state is refused.
        """
        return {"replica": "anew", "replica step": "anew"}

    @property
    def encodes_weights(self) -> bool:
        """Does anything but the weights themselves travel where the engine shards them?"""
        return False

    def weight_message(self, shard: Shard, rank: int) -> Message:
        """What travels of a module's weights, of which ``rank`` owns ``shard``; called only if ``encodes_weights``."""
        raise NotImplementedError

    def fault_of(self, saved: Mapping[str, Tensor]) -> str:
        """What of a ``saved`` state (its key as in ``dump_state``, and why) cannot be used: integers that would
        become addresses, in the first place. "" where nothing is wrong. Called before anything of it is taken."""
        return ""

    def state_changed(self) -> None:
        """``state`` was loaded from a checkpoint."""

    def __str__(self) -> str:
        knobs = [knob for knob in fields(self) if knob.init]
        changed = [f"{knob.name}={value!r}" for knob in knobs if (value := getattr(self, knob.name)) != knob.default]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


@dataclass
class Fp32(Method):
    """Everything in fp32, all-to-all, summed in rank order: the same bits whatever the engine's buckets are.

    Where dense depends on a ring's order of summation, this does not. On gloo, whose reduce-scatter moves as many bytes
    as an all-reduce, it is also the fair dense baseline for FSDP2: half of what ``dense`` sends.
    """

    name: ClassVar[str] = "fp32"
    on_wire: ClassVar[bool] = False
    promise: ClassVar[Promise] = CONSERVES
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(("dense", "send"), "everything is sent in fp32")

    def make_codec(self) -> Codec:
        return Fp32Codec()


def refuse_chunks(method: str, run: Run) -> None:
    """For a ``method`` that works on the optimizer's moments: DDP has them whole, and two levels carry chunks there."""
    if run.chunk is not None:
        raise ThinwireError(
            f"{method} on DDP takes one level: leave two_level=True out, or use fully_shard on a ('replicate', "
            "'shard') mesh (HSDP), whose ranks hold the chunk that they send"
        )


def first_step(method: str, knob: str, value: float, steps: int | None) -> int:
    """The optimizer step that ``value`` means: a share of the run's ``steps`` below 1, a number of steps from 1 on.

    Raises:
        ThinwireError: the share of an unknown number of steps; a step beyond the end of the run.
    """
    check_start(method, knob, value)
    if 0 < value < 1 and steps is None:
        raise ThinwireError(f"{method}: {knob}={value} is a share of the run: compress() needs steps=")
    first = int(value) if value == 0 or value >= 1 else round(value * (steps or 0))
    if steps is not None and first >= steps:
        raise ThinwireError(f"{method}: {knob}={value} lies beyond the end of the run of {steps} steps")
    return first


def check_start(method: str, knob: str, value: float) -> None:
    """Refuse a ``value`` that ``first_step`` cannot read, whatever the run."""
    if value < 0 or (value >= 1 and value != int(value)):
        raise ThinwireError(f"{method}: {knob} is a share of the run below 1 or a whole number of steps, got {value}")


def check_smallest(method: str, smallest: int) -> None:
    """Refuse a ``smallest`` that is no number of elements."""
    if smallest < 0:
        raise ThinwireError(f"{method}: smallest must be 0 or more elements, got {smallest}")


def check_density(method: str, density: float, knob: str = "density") -> None:
    """Refuse a ``density`` that is no share of values."""
    if not 0 < density <= 1:
        raise ThinwireError(f"{method}: {knob} is the share of values sent, above 0 and up to 1, got {density}")


def count_of(density: float, values: int) -> int:
    """How many of so many ``values`` a ``density`` sends: one at least."""
    return max(int(density * values), 1)


def exempt_small(parameter: Parameter, smallest: int) -> str | None:
    """The common policy of lossy methods: norms, biases, other 1-D tensors, routers and small tensors stay dense."""
    if parameter.role in ("norm", "bias", "router"):
        return parameter.role
    if len(parameter.shape) < 2:
        return "1-D"
    if parameter.numel < smallest:
        return f"small (< {smallest})"
    return None
