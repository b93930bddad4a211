"""Error feedback: what the lossy methods share that keep what they did not send, as gradients or as steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import must, refuse_idle
from thinwire.codecs.base import Residual
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import (
    EQUAL,
    MATRIX,
    SMALL,
    Card,
    Method,
    check_smallest,
    check_start,
    exempt_small,
    first_step,
    refuse_chunks,
)
from thinwire.core.method_buckets import send_all
from thinwire.core.promise import CONSERVES, Promise, Rounding
from thinwire.core.run import Parameter, Run, Step
from thinwire.core.selection import keep_dense
from thinwire.methods.parts.updates import UpdateSpace


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
    """The portion of ``density`` of all steps, each rank's own largest, that keeps the loss (docs/quality.md).

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
            them a short run from scratch loses up to 25% (docs/quality.md).
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
            sent = [name for name, parameter in run.parameters.items() if keep_dense(self, parameter) is None]
            self.update_space = UpdateSpace(self, run, sent)

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
            steady=self.first, step_maker=self.update_space,
            state_kinds={**card.state_kinds, "seen": EQUAL, "alike": EQUAL},  # of UpdateSpace
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
        self._exchange(bucket, exchange, partial(send_all, self.card, self.state))

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
