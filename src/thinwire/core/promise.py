"""A method's promise about the values that it is given: what is sent, what waits, and what is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Rounding:
    """The largest error of one encoding, by its format alone.

    Each value is off by at most ``value`` of itself plus ``step`` of the largest of its group. If ``block`` neighbours
    are transformed together (by an orthogonal matrix), the bound is on the lengths of blocks instead: the error of a
    block x is no longer than ``value`` |x| + sqrt(block) ``step`` times the longest block of the group.

    Attributes:
        bits: what rounds, for the user: "8 bits".
        value: half a unit in the last place, as a share of the value (bfloat16: 2^-8). step: for codes that share a
            scale, half a code (a whole one if rounding is stochastic), as a share of the largest.
        group: values that share a scale. block: values that are transformed together (1: none).
    """

    bits: str
    value: float = 0.0
    step: float = 0.0
    group: int = 1
    block: int = 1


@dataclass(frozen=True)
class Promise:
    """A method's promise, which ``thinwire.proof.laws`` checks.

    Attributes:
        kind: "exact": the mean, bit for bit the stock engine's.
            "conserves": summed over the N ranks, inputs + what waited before = N means + what waits after, up to the
            rounding of float32.
            "rounds": the same up to ``rounding``: what is rounded off is lost.
            "lossy": a part of the input never arrives.
        lost: what is lost, and what keeps it, in one plain phrase; "" if nothing is lost.
        waits: kinds of state that wait -> how often a value of each counts. For a moving average e' = beta e +
            (1 - beta) (what was left out), which is added to every input, e / (1 - beta) is still to come. A kind with
            one row where the bucket has N belongs to that row's owner, and stands for all N ranks.
        of: what the inputs are. "gradients". Or first "moments" m (the optimizer's ``exp_avg``): (1 - beta1) times the
            inputs and beta1 (``method.beta1``) times the last m come in, and m arrives. Or "updates": steps of the
            weights, which ``compress()`` finds in the bucket's rows. Or "weights", if ranks go their own ways: how far
            each has moved its weights since all were equal comes in, and how far all are then moved arrives (with an
            outer rate of 1 and no momentum).
        rounding: the rounding of one encoding, for "rounds".
    """

    kind: Literal["exact", "conserves", "rounds", "lossy"]
    lost: str = ""
    waits: Mapping[str, float] = field(default_factory=lambda: {"residual": 1.0})
    of: Literal["gradients", "moments", "updates", "weights"] = "gradients"
    rounding: Rounding | None = None

    def __str__(self) -> str:
        if self.kind == "exact":
            return "exact: the mean of torch's own engine, bit for bit"
        return f"{self.kind}: {self.lost or 'nothing is lost: what is not sent waits for a later step'}"


EXACT, CONSERVES = Promise("exact"), Promise("conserves")
