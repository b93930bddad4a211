"""LoCo: four-bit gradients with a moving average of their errors (arXiv 2407.04480).

With Q the quantizer of groups and e_n the error that rank n keeps, at step k:

    h_n   = g_n + e_n
    mean  = mean over n of Q(h_n): all-to-all, summed in fp32
    e_n'  = beta e_n + (1 - beta) (h_n - Q(h_n));  every ``reset`` steps e_n' = 0

Where ours differs. e_n is float32 where theirs has 8 bits, and where every rank needs the whole mean (DDP), it also
takes what the second encoding leaves out. beta = 0 is plain error feedback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from thinwire.base.knobs import StepsOrNever, Within
from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.intquant import Int4
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card, Promise
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Lossy, Updates


@dataclass
class LoCo(Lossy):
    """Gradients in 4 bits; a moving average of the errors is added to the next ones (arXiv 2407.04480).

    Args:
        beta: weight of the old error, 0 to below 1. Higher => smoother, and more of each error is never sent.
        reset: every so many steps the error is set to zero; 0: never.
        group: values that share a scale (larger => fewer bytes, more error).
    """

    name: ClassVar[str] = "loco"
    ABSENT: ClassVar[Mapping[str, str]] = {"feedback": "its error is of gradients, as in the paper; topk has this knob"}

    feedback: Gradients | Updates = GRADIENTS
    beta: Annotated[float, Within(lambda beta: 0 <= beta < 1, "is the weight of the old error, 0 to below 1")] = 0.8
    reset: StepsOrNever = 1024
    group: int = 128

    def describe(self) -> Card:
        return replace(super().describe(), summed_by_network=False, row_codec=self.codec)

    def _promise(self) -> Promise:
        waits = {"error": 1 / (1 - self.beta)}
        if self.reset:
            return Promise("lossy", f"every {self.reset} steps what waits is dropped: reset=0 keeps it", waits)
        return replace(self.conserves, waits=waits)

    def make_codec(self) -> Codec:
        return Int4(self.group)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        old, new = self.state.read("error", bucket), self.state.write("error", bucket)
        exchange.mean(bucket, self.codec, on_wire=False, residual=Residual(old, new))  # new = h_n - Q(h_n)
        if self.reset and (bucket.step + 1) % self.reset == 0:
            new.zero_()
        elif self.beta:
            new.mul_(1 - self.beta).add_(old, alpha=self.beta)  # e_n'
