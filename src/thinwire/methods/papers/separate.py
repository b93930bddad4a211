"""SEPARATE: a common random projection, with an averaged error fed back (ICLR 2025).

Algorithm 1 on rank n at step k, for blocks of B values, with M (B, m) Gaussian, the same on all ranks (its columns are
the paper's xi_i; the paper numbers steps, not lines):

    STEP 1  h_n = g_n + e_n
    STEP 2  p_n = h_n M, M fresh every step
    STEP 3  p = mean_n p_n
    STEP 4  h~ = p M^T / m takes the gradient's place
    STEP 5  e_n = (1 - beta) e_n + beta (h_n - h~);   e_n = 0 instead if k % T = 0

Where ours differs. STEP 5 has h_n - C(h_n) with C(h) = h M M^T / m, the rank's own projection in place of all ranks'.
The mean of e_n over n is the same, and the next h~ depends on nothing else.

C is unbiased, but |C(h) - h|^2 is w = (B + 1) / m, about the ratio, times |h|^2, so the update is stable only for a
weight of the new error below 2 / (1 + w): 0.117 at ratio 16. With the paper's beta = 0.95 as that weight it overflows
within dozens of steps. Ours takes beta as the weight of the *old* error, e' = beta e + (1 - beta)(h - C(h)): that is
stable, and agrees with what the paper reports (0.95 fine, 0.80 NaN).

The default sends an orthogonal projection instead (see ``Estimator``), without feedback. Plain error feedback
(``beta=None``) is stable with it for every gradient, and needs no reset, which throws gradient away. It has the least
error of the accumulated gradient, and the worst loss in the training runs measured so far. See docs/separate.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from thinwire.base.errors import ThinwireError
from thinwire.base.knobs import StepsOrNever, Within
from thinwire.codecs.projection import Estimator, Projection
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card, Promise
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Lossy, Updates

Beta = Annotated[float, Within(lambda beta: 0 <= beta <= 1, "is a weight from 0 to 1")]


@dataclass
class SEPARATE(Lossy):
    """A random projection of each block, the same on all ranks: 32 / ratio bits per value (ICLR 2025, Alg. 1).

    Args:
        ratio: how many values become one, a power of two (higher => fewer bytes, longer delay or more noise).
        estimator: "cyclic_srht" or "paper": see ``thinwire.codecs.projection.Estimator``.
        block: values projected together, a power of two (larger => more work; the error depends on the ratio alone).
            None: 256 for the SRHT (which pads tensors to multiples of 16 blocks), 512 for the paper's matrices.
        beta: weight of the old error in the new one (higher => slower). 1: no feedback, the best in training. None: 0
            for contractions, the most stable 1 - 1 / (1 + w) for the unbiased "paper".
        reset: the paper's T: each step k with k % reset = 0 drops the error, and so loses gradient. 0: never.

    Raises:
        ThinwireError: a knob is not as above, or beta diverges.
    """

    name: ClassVar[str] = "separate"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"ratio": 16, "estimator": "paper", "beta": 0.95, "reset": 128},
    }

    feedback: Gradients | Updates = GRADIENTS
    ratio: int = 16
    estimator: Literal["cyclic_srht", "paper"] = "cyclic_srht"
    block: int | None = None
    beta: Beta | None = 1.0  # the nearest to dense of all measured: in training, feedback costs more than it brings
    reset: StepsOrNever = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._weight_of_old  # noqa: B018  (refuses a beta that diverges)

    @cached_property
    def _estimator(self) -> Estimator:
        block = (256 if self.estimator == "cyclic_srht" else 512) if self.block is None else self.block
        return Estimator(self.estimator, self.ratio, block)

    @cached_property
    def _weight_of_old(self) -> float:
        """The beta of e' = beta e + (1 - beta)(h - C(h)). Raises ThinwireError for one that diverges."""
        variance = (self._estimator.block + 1) / self._estimator.sent_per_block  # w
        unbiased = self.estimator == "paper"
        if self.beta is None:
            return 1 - 1 / (1 + variance) if unbiased else 0.0
        bound = 2 / (1 + variance)
        if unbiased and 1 - self.beta >= bound:
            raise ThinwireError(
                f"separate: with beta={self.beta} the error that is fed back grows without bound: take beta above "
                f"{1 - bound:.3f} (1 - beta must be below 2 / (1 + w), where w = (block + 1) / m = {variance:.1f})"
            )
        return self.beta

    def describe(self) -> Card:
        return replace(
            super().describe(), group=self._estimator.granule, same_arithmetic=True,
            keeps_state=self._weight_of_old < 1 or self.updates is not None,
        )  # fmt: skip

    def _promise(self) -> Promise:
        if self._weight_of_old == 1:
            return Promise("lossy", "what the projection leaves out is lost: beta below 1 keeps it")
        waits = {"residual": 1 / (1 - self._weight_of_old)}
        if self.reset:
            return Promise("lossy", f"every {self.reset} steps what waits is dropped: reset=0 keeps it", waits)
        return replace(self.conserves, waits=waits)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        residual = self.residual(bucket) if self._weight_of_old < 1 else None
        draw = functools.partial(self._estimator.draw, self.run.seed, device=bucket.device, draw_once=bucket.once)
        drawn = tuple((s.start, s.width, draw(s.name, bucket.step)) for s in bucket.segments)
        codec = Projection(self._estimator, drawn)  # STEP 2: M
        # STEP 1: with the residual. STEP 2: Projection.encode. STEP 3: the network's mean. STEP 4: Projection.decode.
        exchange.mean(bucket, codec, residual=residual)
        if residual is None:
            return
        new = residual.new  # h_n - C(h_n)
        if self.reset and bucket.step % self.reset == 0:
            new.zero_()  # STEP 5, k % T = 0
            return
        if self._weight_of_old and residual.old is not None:
            new.lerp_(residual.old, self._weight_of_old)  # STEP 5; for a weight of 0, new is that already
        bucket.clear_padding(new)  # a projection spreads over whole blocks; padding has no gradient to wait for
