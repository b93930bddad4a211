"""ZeRO++ (arXiv 2306.10209), with the settings of its paper: SDP4Bit's code, without differences and Hadamard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinwire.base.knobs import own_knobs_of
from thinwire.methods.papers.sdp4bit import Bits, SDP4Bit, Weights


@dataclass
class ZeROPP(SDP4Bit):
    """ZeRO++ (arXiv 2306.10209): weights in 8 bits; gradients in 4 bits, inside and across nodes.

    Small weight changes that it rounds away are lost. HSDP replaces its second copy of weights in each node (hpZ).
    """

    name: ClassVar[str] = "zeropp"
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(own_knobs_of(SDP4Bit), "as in the paper: sdp4bit has it")

    weights: Weights = "plain"
    weight_bits: Literal[4, 8] = 8
    intra_bits: Bits = 4
    hadamard: bool = False
