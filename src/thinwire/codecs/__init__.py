"""Codecs: immutable objects that turn values into a wire and back, without communication."""

from thinwire.codecs.base import Codec, Residual
from thinwire.codecs.cast import Bf16, Fp32
from thinwire.codecs.intquant import Int4, Int8, Integers
from thinwire.codecs.mask import Masked
from thinwire.codecs.sign import Sign
from thinwire.codecs.sparse import Sparse

__all__ = ["Bf16", "Codec", "Fp32", "Int4", "Int8", "Integers", "Masked", "Residual", "Sign", "Sparse"]
