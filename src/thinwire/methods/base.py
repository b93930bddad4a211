"""The interface of a method, and its base class: the dense baseline.

A method needs one import: what it is told (``run.py``), and what it says of itself (``card.py``, ``promise.py``), are
here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

import torch

from thinwire.bucket import Bucket, Shard
from thinwire.codecs.base import Codec, Residual
from thinwire.collectives import Exchange
from thinwire.errors import ThinwireError
from thinwire.knobs import check_types, unknown_knob
from thinwire.knobs import must as must
from thinwire.knobs import refuse_idle as refuse_idle
from thinwire.methods.buckets import send_all as send_all
from thinwire.methods.card import ANEW as ANEW
from thinwire.methods.card import EQUAL as EQUAL
from thinwire.methods.card import Card as Card
from thinwire.methods.card import StateKind as StateKind
from thinwire.methods.promise import CONSERVES as CONSERVES
from thinwire.methods.promise import EXACT as EXACT
from thinwire.methods.promise import Promise as Promise
from thinwire.methods.promise import Rounding as Rounding
from thinwire.methods.run import Held as Held
from thinwire.methods.run import Parameter as Parameter
from thinwire.methods.run import Run as Run
from thinwire.methods.run import Step as Step
from thinwire.methods.run import held_by as held_by
from thinwire.methods.selection import keep_dense as keep_dense
from thinwire.methods.steps import refuse_scaled_apart as refuse_scaled_apart
from thinwire.methods.update import UpdateSpace
from thinwire.state import State
from thinwire.weights import Message

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

    What holds of it all the time is on its ``card``.

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
        """The codec of the compressed parameters; None: nothing is encoded."""
        return None

    def begin(self, run: Run) -> None:
        """Called once by ``compress()``, before the plan is made. Raises ThinwireError for what cannot be done."""
        self.run = run
        self.__dict__.pop("card", None)  # the run decides some of it

    @cached_property
    def card(self) -> Card:
        """What the method ``describe``s. It is made when it is first asked for, and anew after ``begin``."""
        return self.describe()

    def describe(self) -> Card:
        """Make the card: ``replace(super().describe(), ...)`` with what is different in this class."""
        return Card() if self.codec is None else Card(native=False, group=self.codec.group)

    @property
    def rank_equal(self) -> bool:
        """Do all ranks (HSDP: those with the same shard) hold the same weights after the last step?"""
        return True

    def policy(self, parameter: Parameter) -> str | None:
        """The method's rule for parameters that no pattern names. The base class encodes nothing, exempts nothing."""
        return None

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Write the mean over ranks of ``bucket.rows`` to ``bucket.mean``."""
        exchange.mean(bucket, self.codec, on_wire=self.card.summed_by_network)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        """``reduce`` in a step that is dense, after which nothing waits."""
        send_all(self, bucket, exchange)

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

    def finish(self) -> None:
        """Wait for what the method has under way between steps; called before its state is read."""

    def facts(self) -> dict[str, float]:
        """Figures of the method's own for the report, by what they are called there."""
        return {}

    def weight_message(self, shard: Shard, rank: int) -> Message:
        """What travels of a module's weights, of which ``rank`` owns ``shard``; called only if the ``card`` says so."""
        raise NotImplementedError

    def state_changed(self) -> None:
        """``state`` was loaded from a checkpoint."""

    def __str__(self) -> str:
        knobs = [knob for knob in fields(self) if knob.init]
        changed = [f"{knob.name}={value!r}" for knob in knobs if (value := getattr(self, knob.name)) != knob.default]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


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


@dataclass
class Lossy(Method):
    """What the lossy baselines share: the common policy, and error feedback.

    Args:
        smallest: elements below which a tensor stays dense (higher => fewer tensors compressed).
        error_feedback: add what the encoding left out to the next step's gradient (4 + 4 bytes per element and rank).
    """

    smallest: int = SMALL
    error_feedback: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_smallest(self.name, self.smallest)

    @property
    def rounding(self) -> Rounding | None:
        """Of one encoding; None: it leaves out more than a format bounds."""
        return None

    def describe(self) -> Card:
        return replace(super().describe(), promise=self._promise(), keeps_state=self.error_feedback)

    def _promise(self) -> Promise:
        if self.error_feedback:
            return CONSERVES
        if self.rounding is None:
            return Promise("lossy", "what is not encoded is not returned: error_feedback=True returns it")
        what = f"what {self.rounding.bits} cannot hold is not returned: error_feedback=True returns it"
        return Promise("rounds", what, rounding=self.rounding)

    def policy(self, parameter: Parameter) -> str | None:
        return exempt_small(parameter, self.smallest)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = None
        if self.error_feedback:
            residual = Residual(self.state.read("residual", bucket), self.state.write("residual", bucket))
        exchange.mean(bucket, self.codec, on_wire=self.card.summed_by_network, residual=residual)


OF_UPDATES = ("beta1", "direction", "portion")
"""Knobs of ``ErrorFeedback`` that say how a gradient becomes a step."""


def portion_of(density: float) -> float:
    """The portion of ``density`` of all steps, each rank's own largest, that keeps the loss (docs/training.md).

    So that a step delivers about as much as at a density of 0.01, of more values; no less than momentum has.
    """
    return min(max(0.0125 / density, 0.1), 1.0)


@dataclass
class ErrorFeedback(Method):
    """What the methods share that keep what they did not send: a residual as state, the common policy, a dense start.

    Args:
        start: dense before: a share of the run below 1, or a number of optimizer steps. Later => more bytes, and the
            first steps, in which weights move fastest, lose nothing to waiting.
        smallest: elements below which a tensor stays dense (higher => fewer tensors compressed). None: 65,536 where
            gradients are sent; 1024, so all matrices, where steps are: with attention left to AdamW's momentum beside
            them a short run from scratch loses up to 25% (docs/training.md).
        feedback: what is sent, and what waits. "gradient": as the papers have it, for any optimizer. "update": steps of
            the weights, from this rank's gradient by Adam's rule without momentum (``methods/update.py``): what waits
            is then not scaled anew when it is sent, and a short run keeps dense's loss. Needs ``torch.optim.AdamW``,
            whose steps on the compressed parameters are then the method's, and 8 bytes more per element in place of its
            moments; what an engine holds as their gradient is the step, which ``wire.clip_grad_norm_`` leaves alone.
        beta1: with feedback="update", of an average of this rank's own gradients above sqrt(v), 0 (none) to below 1;
            higher => smoother and later steps, and 8 bytes more per element. What waits is an average already.
        direction: with feedback="update", whose step it is. "adam", or "muon" (``methods/muon.py``): of matrices that
            are no embedding and no head the orthogonalised momentum of this rank's own gradients, at lr 0.2
            sqrt(max(rows, columns)); embeddings and heads keep Adam's, and what is not a matrix stays dense. For
            weights that the rank holds whole.
        portion: with feedback="update", the share of what a step sends that is delivered; the rest goes on waiting, in
            the same state. Lower => smoother and later steps (of all values, it would be a momentum of 1 - portion).
            None: what was measured best for the method and its density (``usual_portion``).
    """

    start: float = 0
    smallest: int | None = None
    feedback: Literal["gradient", "update"] = "gradient"
    beta1: float = 0.0
    direction: Literal["adam", "muon"] = "adam"
    portion: float | None = None

    def __post_init__(self) -> None:
        self.first = 0
        self.update_space: UpdateSpace | None = None
        super().__post_init__()
        check_start(self.name, "start", self.start)
        check_smallest(self.name, self.least)
        must(self, 0 <= self.beta1 < 1, "beta1", "is the decay of an average, from 0 to below 1")
        if self.feedback == "gradient":
            refuse_idle(self, "feedback='gradient' (the optimizer has its own)", *OF_UPDATES)
        must(self, self.portion is None or 0 < self.portion <= 1, "portion", "is a share, above 0 and up to 1")
        if self.portion is not None and self.card.promise != self.conserves:
            raise ThinwireError(f"{self.name}: portion is for methods whose ranks keep what was not sent: leave it out")
        if self.direction == "muon":
            refuse_idle(self, "direction='muon'", "beta1")

    def begin(self, run: Run) -> None:
        super().begin(run)
        self.first = first_step(self.name, "start", self.start, run.steps)
        if self.feedback == "update":
            if self.direction == "muon":
                refuse_chunks(f"{self.name}(direction='muon')", run)
            self.update_space = UpdateSpace(self, run)

    @property
    def least(self) -> int:
        """``smallest``, as it is used."""
        if self.smallest is not None:
            return self.smallest
        return MATRIX if self.feedback == "update" else SMALL

    def describe(self) -> Card:
        card = super().describe()
        return replace(
            card, promise=self.conserves, native=False, keeps_state=True, adds_up=self.feedback != "update",
            steady=self.first, moves=self.update_space,
            state_kinds={**card.state_kinds, "seen": EQUAL, "alike": EQUAL},  # update.py's
        )  # fmt: skip

    @property
    def conserves(self) -> Promise:
        """Nothing is lost, of what waits."""
        return replace(CONSERVES, of="updates") if self.feedback == "update" else CONSERVES

    @property
    def of_gradients(self) -> str:
        """What to write where this method is to send gradients, as the papers have it, and not steps."""
        idle: dict[str, Any] = {knob: getattr(type(self), knob) for knob in OF_UPDATES}
        same = str(replace(self, feedback="gradient", **idle))
        return f"{same}, or {self.name}:paper" if "paper" in self.PRESETS else same

    @property
    def usual_portion(self) -> float:
        """``portion``, where nobody says otherwise."""
        return 1.0

    @property
    def delivered(self) -> float:
        """``portion``, as it is used."""
        if self.feedback == "gradient" or self.card.promise != self.conserves:
            return 1.0
        return self.usual_portion if self.portion is None else self.portion

    def policy(self, parameter: Parameter) -> str | None:
        if self.direction == "muon" and len(parameter.shape) > 2:
            return "not a matrix"
        return exempt_small(parameter, self.least)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        self._exchange(bucket, exchange, self.compress if self.delivered == 1 else self._compress_in_portions)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        self._exchange(bucket, exchange, partial(send_all, self))

    def _exchange(self, bucket: Bucket, exchange: Exchange, send: Callable[[Bucket, Exchange], None]) -> None:
        if bucket.step < self.first:
            if self.update_space is not None:
                self.update_space.watch(bucket)
            exchange.mean(bucket)
            return
        if self.update_space is not None:
            self.update_space.enter(bucket, exchange)
        send(bucket, exchange)
        if self.update_space is not None:
            self.update_space.leave(bucket)

    def _compress_in_portions(self, bucket: Bucket, exchange: Exchange) -> None:
        """``compress``, and of c = h - e', which was sent, a portion p is taken: p mean_n c arrives, h - p c waits."""
        h = bucket.scratch("whole", bucket.shape, torch.float32)
        torch.add(bucket.rows, self.state.read("residual", bucket), out=h)
        self.compress(bucket, exchange)
        self.state.write("residual", bucket).lerp_(h, 1 - self.delivered)
        bucket.mean.mul_(self.delivered)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        """``reduce``, once the dense start is over. The rows are gradients or, with feedback="update", steps."""
        raise NotImplementedError

    def before_step(self, step: Step) -> None:
        if self.update_space is not None:
            self.update_space.take(step)

    def after_step(self, step: Step) -> None:
        if self.update_space is not None:
            self.update_space.done(step)

    def undo(self) -> None:
        if self.update_space is not None:
            self.update_space.forget()

    def finish(self) -> None:
        if self.update_space is not None:
            self.update_space.refuse_scaled()
