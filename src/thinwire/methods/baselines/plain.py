"""The plain baselines: what every fancier method has to beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from thinwire.base.errors import ThinwireError
from thinwire.codecs.base import Codec
from thinwire.codecs.cast import Bf16 as Bf16Codec
from thinwire.codecs.intquant import Int8 as Int8Codec
from thinwire.core.bucket import Bucket
from thinwire.core.exchange import Exchange
from thinwire.core.method import Card, Method, Parameter, Promise, Rounding
from thinwire.core.run import NO_SCALER, Run
from thinwire.methods.parts.feedback import Lossy

_SENT_WHOLE = dict.fromkeys(("send", "smallest"), "all is sent that dense= does not name")


@dataclass
class Dense(Method):
    """No compression: the engine's own dtype, summed by the network; bit for bit as torch's engine alone."""

    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(("dense", "send"), "nothing is compressed")


@dataclass
class Bf16(Lossy):
    """bfloat16, summed by the network in bfloat16: half the bytes of fp32 (as torch's ``bf16_compress_hook``).

    The rounding error of the sum grows with the number of ranks, and no rank sees it or can feed it back.
    """

    name: ClassVar[str] = "bf16"
    ABSENT: ClassVar[Mapping[str, str]] = {
        **_SENT_WHOLE,
        "feedback": "the network's sum rounds where no rank can see it",
        "start": "a dense start is for methods that drop values, not bits",
    }

    @property
    def rounding(self) -> Rounding:
        return Rounding("bfloat16", value=2.0**-8)

    def _promise(self) -> Promise:
        lost = "the error of rounding values and sums to bfloat16 is lost: int8(feedback='gradients') keeps it"
        return Promise("rounds", lost, rounding=self.rounding)

    def make_codec(self) -> Codec:
        return Bf16Codec()

    def policy(self, parameter: Parameter) -> str | None:
        return None


@dataclass
class Int8(Lossy):
    """8-bit integers in groups that share an fp32 scale, summed in fp32: 8 + 32 / group bits per value.

    Args:
        group: values that share a scale (larger => fewer bytes, more error).
    """

    name: ClassVar[str] = "int8"
    group: int = 128

    @property
    def rounding(self) -> Rounding:
        return Rounding("8 bits", step=1 / 254, group=self.group)

    def describe(self) -> Card:
        return replace(super().describe(), summed_by_network=False, rows_apart=not self.updates, row_codec=self.codec)

    def make_codec(self) -> Codec:
        return Int8Codec(self.group)


@dataclass
class NoExchange(Method):
    """Nothing is sent: every rank trains alone. For measuring what the network costs, not for training."""

    name: ClassVar[str] = "none"
    engines: ClassVar[tuple[str, ...]] = ("ddp",)
    rank_equal: ClassVar[bool] = False
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(("dense", "send"), "nothing is sent")

    def describe(self) -> Card:
        return replace(super().describe(), promise=Promise("lossy", "the other ranks' gradients never arrive"))

    def begin(self, run: Run) -> None:
        super().begin(run)
        if run.scaled:
            raise ThinwireError(NO_SCALER.format(name=self.name))

    def reduce(self, bucket: Bucket, exchange: Exchange) -> None:
        """Leave each rank its own gradient."""
