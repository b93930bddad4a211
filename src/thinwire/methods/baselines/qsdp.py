"""QSDP (arXiv 2302.02390), with the settings of its paper: SDP4Bit's code on one level, with a shifted lattice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinwire.base.knobs import own_knobs_of
from thinwire.methods.papers.sdp4bit import Bits, SDP4Bit, Weights


@dataclass
class QSDP(SDP4Bit):
    """QSDP (arXiv 2302.02390): weights in 8 bits on a randomly shifted lattice, gradients in 8 bits.

    One level: all-to-all between all ranks.
    """

    name: ClassVar[str] = "qsdp"
    two_level: ClassVar[bool] = False
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(own_knobs_of(SDP4Bit), "as in the paper: sdp4bit has it")

    weights: Weights = "plain"
    weight_bits: Literal[4, 8] = 8
    weight_group: int = 1024
    weight_rounding: Literal["nearest", "stochastic", "shift"] = "shift"
    bits: Bits = 8
    group: int = 1024
    hadamard: bool = False
