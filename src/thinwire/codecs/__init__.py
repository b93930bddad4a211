"""Codecs: values <-> wire, pure, no communication."""

from thinwire.codecs.base import WIRE_DTYPES, Codec
from thinwire.codecs.cast import Bf16, Fp8, Fp32
from thinwire.codecs.intquant import Int8
from thinwire.codecs.mask import Masked, TopK
from thinwire.codecs.sign import Sign

__all__ = ["WIRE_DTYPES", "Bf16", "Codec", "Fp8", "Fp32", "Int8", "Masked", "Sign", "TopK"]
