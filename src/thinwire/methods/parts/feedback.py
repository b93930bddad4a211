"""Error feedback: what the lossy methods share that keep what they did not send, as gradients or as steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import Share, Within, check_types, read_arguments
from thinwire.codecs.base import Residual
from thinwire.core.bucket import Bucket
from thinwire.core.card import EQUAL, Card, StateKind
from thinwire.core.exchange import Exchange
from thinwire.core.method import MATRIX, SMALL, Method, Smallest, Start, exempt_small, first_step
from thinwire.core.promise import CONSERVES, Promise, Rounding
from thinwire.core.run import Parameter, Run, Step
from thinwire.core.selection import keep_dense
from thinwire.methods.parts.updates import UpdateSpace, move_moments

_OF_UPDATE_SPACE = {
    "seen": EQUAL, "turned": EQUAL, "alike": EQUAL, "first": StateKind(apart=True), "second": StateKind(apart=True),
}  # fmt: skip


class _Feedback:
    """A value of the knob ``feedback``, which text writes as "gradients" or "updates(delivered_share=0.25)"."""

    def __str__(self) -> str:
        settings = [(entry.name, getattr(self, entry.name), entry.default) for entry in fields(self)]  # type: ignore[arg-type]
        changed = ", ".join(f"{name}={value!r}" for name, value, default in settings if value != default)
        return type(self).__name__.lower() + (f"({changed})" if changed else "")

    def __repr__(self) -> str:
        return repr(str(self))


@dataclass(frozen=True, repr=False)
class Gradients(_Feedback):
    """Gradients are sent and wait, as the papers have it, for any optimizer."""


@dataclass(frozen=True, repr=False)
class Updates(_Feedback):
    """Steps of the weights are sent and wait.

    Adam's rule without momentum makes a step of this rank's gradient (``parts/updates.py``), so that what waits is not
    scaled anew when it is sent, and a short run keeps dense's loss. Needs ``torch.optim.AdamW``, whose steps on the
    compressed parameters the method then takes, and 8 bytes per element in place of its moments. The engine's ``grad``
    of these parameters is the step, which ``wire.clip_grad_norm_`` leaves alone. Matrices that ``torch.optim.Muon``
    holds take Muon's step of this rank's momentum (``parts/muon.py``) instead: each rank orthogonalises all of them.

    Args:
        delivered_share: share of what a step sends that is delivered; the rest goes on waiting, in the same state.
            Lower => smoother and later steps (if all values are sent: a momentum of 1 - delivered_share). None: the
            best measured for the method and its density (``default_share``); of Muon's steps all.
        beta1: decay of an average of this rank's own gradients above sqrt(v), 0 (none) to below 1; higher => smoother
            and later steps. Above 0: 8 bytes more per element. Of all methods powersgd alone gains by it. Muon's steps
            have their own momentum.
    """

    delivered_share: Share | None = None
    beta1: Annotated[float, Within(lambda beta: 0 <= beta < 1, "is the decay of an average, from 0 to below 1")] = 0.0

    def __post_init__(self) -> None:
        check_types(self, str)


GRADIENTS, UPDATES = Gradients(), Updates()
KINDS: dict[str, Callable[..., Gradients | Updates]] = {"gradients": Gradients, "updates": Updates}


def read_feedback(text: str, method: str) -> Gradients | Updates:
    """Read "gradients" or "updates(delivered_share=0.25)" for ``method``. Raises ThinwireError for other text."""
    name, bracket, knobs = text.strip().partition("(")
    try:
        return KINDS[name](**read_arguments(bracket + knobs))
    except ThinwireError as error:
        raise ThinwireError(f"{method}: {error}") from None
    except (KeyError, SyntaxError, ValueError, TypeError):
        names = ", ".join(field.name for field in fields(Updates))
        raise ThinwireError(
            f"{method}: feedback is 'gradients' or 'updates(knob=value, ...)' with {names}, got '{text}'"
        ) from None


def share_of(density: float) -> float:
    """Return the delivered share that keeps the loss where ``density`` of all values is sent (docs/quality.md).

    A step then delivers about as much as at a density of 0.01, spread over more values. The least is 0.1, momentum's.
    """
    return min(max(0.0125 / density, 0.1), 1.0)


@dataclass
class Lossy(Method):
    """The base of methods that do not send all of each gradient: the common policy, a dense start, and what waits.

    Args:
        start: length of a dense start: below 1 a share of the run, else a number of optimizer steps. Higher => more
            bytes, and nothing waits in the first steps, in which weights move fastest.
        smallest: tensors of fewer elements stay dense (higher => fewer tensors compressed). None: 65,536 if gradients
            are sent; 1024 if steps are sent, so that all matrices are compressed: with dense attention the loss of a
            short run from scratch was up to 25% higher (docs/quality.md).
        feedback: what happens to what is not sent. ``Gradients()``: it is added to this rank's next gradient, with any
            optimizer (8 bytes per element). ``Updates(...)``: ranks send AdamW's steps in place of gradients, and what
            is not sent is added to the next step. None: it is lost, if the method allows that. As text: "gradients",
            "updates(delivered_share=0.25)".
    """

    encodes_steps: ClassVar[bool] = False
    """``compress`` hands gradients, of which steps are to be made, to a codec as they are."""

    start: Start = 0
    smallest: Smallest | None = None
    feedback: Gradients | Updates | None = None

    def __post_init__(self) -> None:
        self.update_space: UpdateSpace | None = None
        text: Any = self.feedback
        if isinstance(text, str):
            self.feedback = read_feedback(text, self.name)
        super().__post_init__()
        share = None if self.updates is None else self.updates.delivered_share
        if share is not None and self.card.promise != self.conserves:
            raise ThinwireError(
                f"{self.name}: delivered_share is for methods whose ranks keep what was not sent: leave it out"
            )

    @property
    def updates(self) -> Updates | None:
        """The knobs that turn gradients into steps; None: gradients are sent."""
        return self.feedback if isinstance(self.feedback, Updates) else None

    def begin(self, run: Run) -> None:
        super().begin(run)
        if self.updates is not None:
            sent = [name for name, parameter in run.parameters.items() if keep_dense(self, parameter) is None]
            self.update_space = UpdateSpace(
                self.name, self.updates, run, sent, read_state=lambda: self.state, instead=lambda: self.for_gradients
            )

    first = property(lambda self: first_step(self, "start"))

    @property
    def smallest_sent(self) -> int:
        """``smallest``, or its default for what is sent."""
        if self.smallest is not None:
            return self.smallest
        return SMALL if self.updates is None else MATRIX

    @property
    def rounding(self) -> Rounding | None:
        """The rounding of one encoding; None: no format bounds what it leaves out."""
        return None

    def describe(self) -> Card:
        card = super().describe()
        return replace(
            card, promise=self._promise(), native=False, keeps_state=self.feedback is not None,
            adds_up=self.updates is None, steady=self.first, step_maker=self.update_space,
            state_kinds={**card.state_kinds, **_OF_UPDATE_SPACE}, move=None if self.updates is None else move_moments,
        )  # fmt: skip

    def _promise(self) -> Promise:
        if self.feedback is not None:
            return self.conserves
        if self.rounding is None:
            return Promise("lossy", "what is not sent is dropped: feedback='gradients' keeps it")
        lost = f"the error of rounding to {self.rounding.bits} is lost: feedback='gradients' keeps it"
        return Promise("rounds", lost, rounding=self.rounding)

    @property
    def conserves(self) -> Promise:
        """The promise that everything unsent waits."""
        return CONSERVES if self.updates is None else replace(CONSERVES, of="updates")

    @property
    def for_gradients(self) -> str:
        """This method as text, sending gradients in place of steps."""
        text = str(replace(self, feedback=Gradients()))
        return f"{text}, or {self.name}:paper" if "paper" in self.PRESETS else text

    @property
    def default_share(self) -> float:
        """The ``delivered_share`` unless ``Updates`` sets another."""
        return 1.0

    @property
    def delivered_share(self) -> float:
        """The share of what a step sends that is delivered."""
        if self.updates is None or self.card.promise != self.conserves:
            return 1.0
        return self.default_share if self.updates.delivered_share is None else self.updates.delivered_share

    def policy(self, parameter: Parameter) -> str | None:
        return exempt_small(parameter, self.smallest_sent)

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        self._exchange(bucket, exchange, self.compress if self._shares(bucket) is None else self._deliver_share)

    def deliver(self, bucket: Bucket, exchange: Exchange) -> None:
        self._exchange(bucket, exchange, super().deliver)

    def _exchange(self, bucket: Bucket, exchange: Exchange, send: Callable[[Bucket, Exchange], None]) -> None:
        if bucket.step < self.first:  # Radius' Alg. 1, l. 3-5: dense before the threshold
            if self.update_space is not None:
                self.update_space.watch(bucket)
            exchange.mean(bucket)
            return
        if self.update_space is not None:
            self.update_space.enter(bucket, exchange, as_encoded=self.encodes_steps and send == self.compress)
        send(bucket, exchange)
        if self.update_space is not None:
            self.update_space.leave(bucket)

    def _shares(self, bucket: Bucket) -> float | Tensor | None:
        """Return the share of each value in ``bucket`` that is delivered, (n,) if they differ; None: all of all."""
        share = self.delivered_share
        space = self.update_space
        if share == 1 or space is None or not space.matrices or (self.updates and self.updates.delivered_share):
            return None if share == 1 else share
        whole = [segment for segment in bucket.segments if segment.name in space.matrices]
        if len(whole) == len(bucket.segments):
            return None

        def make() -> Tensor:
            shares = torch.full((bucket.shape[1],), share, dtype=torch.float32, device=bucket.device)
            for segment in whole:
                shares[segment.columns] = 1.0
            return shares

        return bucket.once("shares", make) if whole else share

    def _deliver_share(self, bucket: Bucket, exchange: Exchange) -> None:
        """Compress, and deliver the share p of what was sent, c = h - e': p mean_n c arrives, h - p c waits."""
        h, share = bucket.scratch("whole", bucket.shape, torch.float32), self._shares(bucket)
        assert share is not None
        torch.add(bucket.rows, self.state.read("residual", bucket), out=h)
        self.compress(bucket, exchange)
        self.state.write("residual", bucket).lerp_(h, 1 - share)
        bucket.mean.mul_(share)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        """Do what ``reduce`` does after the dense start. The rows are gradients or, with ``Updates``, steps."""
        exchange.mean(bucket, self.codec, on_wire=self.card.summed_by_network, residual=self.residual(bucket))

    def residual(self, bucket: Bucket) -> Residual | None:
        """Return the memory of what is not sent; None: it is lost."""
        if self.feedback is None:
            return None
        old, new = self.state.read("residual", bucket), self.state.write("residual", bucket)
        return Residual(old, new, bucket.adam, bucket.guess("residual", len(old)))

    def before_step(self, step: Step) -> None:
        if self.update_space is not None:
            self.update_space.take_steps(step)

    def after_step(self, step: Step) -> None:
        if self.update_space is not None:
            self.update_space.end_step(step)

    def undo(self) -> None:
        if self.update_space is not None:
            self.update_space.forget()

    def finish(self) -> None:
        if self.update_space is not None:
            self.update_space.refuse_scaled()
