"""Thinwire: data-parallel training of language models, fast where the network is the bottleneck.

    wire = thinwire.compress(model, optimizer, thinwire.Int8())
"""

from thinwire.compress import Wire, compress
from thinwire.errors import ThinwireError
from thinwire.methods import Bf16, Bf16Acc32, Dense, Fp8, Fp32, Int8, Method, NoExchange

__all__ = [
    "Bf16", "Bf16Acc32", "Dense", "Fp8", "Fp32", "Int8", "Method", "NoExchange", "ThinwireError", "Wire", "compress",
]  # fmt: skip
