"""Thinwire: data-parallel training of language models, fast where the network is the bottleneck.

    wire = thinwire.compress(model, optimizer, thinwire.Int8())

Names are imported when first used, so that the command line can set torch's environment before torch is there.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.errors import ThinwireError as ThinwireError
    from thinwire.errors import ThinwireWarning as ThinwireWarning
    from thinwire.methods import DGC as DGC
    from thinwire.methods import LHC as LHC
    from thinwire.methods import QSDP as QSDP
    from thinwire.methods import SCAPE as SCAPE
    from thinwire.methods import SEPARATE as SEPARATE
    from thinwire.methods import TAGC as TAGC
    from thinwire.methods import Bf16 as Bf16
    from thinwire.methods import Bf16Acc32 as Bf16Acc32
    from thinwire.methods import DeMo as DeMo
    from thinwire.methods import Dense as Dense
    from thinwire.methods import Fp8 as Fp8
    from thinwire.methods import Fp32 as Fp32
    from thinwire.methods import Int8 as Int8
    from thinwire.methods import LoCo as LoCo
    from thinwire.methods import Method as Method
    from thinwire.methods import NoExchange as NoExchange
    from thinwire.methods import OneBitAdam as OneBitAdam
    from thinwire.methods import PowerSGD as PowerSGD
    from thinwire.methods import Radius as Radius
    from thinwire.methods import SDP4Bit as SDP4Bit
    from thinwire.methods import TopK as TopK
    from thinwire.methods import ZeROPP as ZeROPP
    from thinwire.optim import AdamS as AdamS
    from thinwire.wire import Wire as Wire
    from thinwire.wire import compress as compress

_METHODS = (
    "Bf16", "Bf16Acc32", "DeMo", "Dense", "DGC", "Fp8", "Fp32", "Int8", "LHC", "LoCo", "Method", "NoExchange",
    "OneBitAdam", "PowerSGD", "QSDP", "Radius", "SCAPE", "SDP4Bit", "SEPARATE", "TAGC", "TopK", "ZeROPP",
)  # fmt: skip
_HOME = {
    "AdamS": "optim",
    "Wire": "wire",
    "compress": "wire",
    "ThinwireError": "errors",
    "ThinwireWarning": "errors",
    **dict.fromkeys(_METHODS, "methods"),
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'thinwire' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"thinwire.{_HOME[name]}"), name)
    globals()[name] = value
    return value
