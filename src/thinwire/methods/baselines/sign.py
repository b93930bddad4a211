"""Signs with error feedback at both ends (Karimireddy et al., ICML 2019, arXiv 1901.09847; Zheng et al., NeurIPS 2019).

EF-signSGD (Karimireddy et al., Alg. 1) in the form with servers, dist-EF-SGD with the scaled sign of blocks (Zheng et
al., arXiv 1905.10936). On worker n, for each tensor:

    x_n = g_n + e_n;  send C[x_n], chunk j to server j;  e_n = x_n - C[x_n]
    y = mean_n C[x_n] + s, on each server;  send C[y] to everybody;  s = y - C[y]
    C[y] takes the gradient's place

C keeps the sign of each value and one scale per group, the mean of |x|. See ``twoway.py``.

On FSDP2 the server of a row owns its weights and keeps the mean as it is: nothing goes back, and there is no s.

Where ours differs. In the papers SGD follows, and what waits has the unit of its steps: x_n contains lr, or the errors
are rescaled whenever lr changes. Here the user's optimizer follows, and what waits has the gradient's unit. Their
blocks are tensors or layers, ours are ``group`` consecutive values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from thinwire.codecs.base import Codec
from thinwire.codecs.sign import Sign as SignCodec
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card
from thinwire.methods.parts.feedback import GRADIENTS, Gradients, Lossy, Updates
from thinwire.methods.parts.twoway import mean_both_ways


@dataclass
class Sign(Lossy):
    """Signs and a scale per group, with error feedback each way: 1 + 32 / group bits per value (arXiv 1901.09847).

    Args:
        group: values that share a scale, a power of two from 32 to 4096; larger => fewer bytes, more error.
        scale: a group's scale: "mean" of |x| (the smallest error) or "rms" (the norm is kept).
    """

    name: ClassVar[str] = "sign"
    feedback: Gradients | Updates = GRADIENTS
    group: int = 128
    scale: Literal["mean", "rms"] = "mean"

    def make_codec(self) -> Codec:
        return SignCodec(self.group, self.scale)

    def describe(self) -> Card:
        promise = replace(self.conserves, waits={"residual": 1.0, "server": 1.0})
        return replace(super().describe(), promise=promise, summed_by_network=False)

    def compress(self, bucket: Bucket, exchange: Exchange) -> None:
        assert self.codec is not None
        mean_both_ways(bucket, exchange, self.codec, self.state, back=not exchange.owner)
