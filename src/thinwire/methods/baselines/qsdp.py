"""QSDP (arXiv 2302.02390), with the settings of its paper: SDP4Bit's code on one level, with a shifted lattice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.base.knobs import own_knobs_of
from thinwire.methods.papers.sdp4bit import SDP4Bit


@dataclass
class QSDP(SDP4Bit):
    """QSDP (arXiv 2302.02390): weights in 8 bits on a randomly shifted lattice, gradients in 8 bits.

    One level: all-to-all between all ranks.
    """

    name: ClassVar[str] = "qsdp"
    two_level: ClassVar[bool] = False
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    ABSENT: ClassVar[Mapping[str, str]] = dict.fromkeys(own_knobs_of(SDP4Bit), "as in the paper: sdp4bit has it")

    weights: str = "plain"
    weight_bits: int = 8
    weight_group: int = 1024
    weight_rounding: str = "shift"
    bits: int = 8
    group: int = 1024
    hadamard: bool = False
