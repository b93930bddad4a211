"""The methods by name. Adding one is a new file and a line in ``TABLE``."""

from __future__ import annotations

import ast
from inspect import getdoc

from thinwire.errors import ThinwireError
from thinwire.methods.base import Lossy, Method, Parameter
from thinwire.methods.baselines import Bf16, Bf16Acc32, Dense, Fp8, Fp32, Int8, NoExchange
from thinwire.methods.demo import DeMo
from thinwire.methods.dgc import DGC
from thinwire.methods.loco import LoCo
from thinwire.methods.onebit import OneBitAdam
from thinwire.methods.powersgd import PowerSGD
from thinwire.methods.radius import Radius
from thinwire.methods.scape import SCAPE
from thinwire.methods.sdp4bit import QSDP, SDP4Bit, ZeROPP
from thinwire.methods.separate import SEPARATE
from thinwire.methods.tagc import LHC, TAGC
from thinwire.methods.topk import TopK

TABLE: tuple[type[Method], ...] = (
    Dense, Fp32, Bf16, Bf16Acc32, Int8, Fp8, Radius, SCAPE, SEPARATE, TAGC, SDP4Bit, LHC, ZeROPP, QSDP, LoCo, PowerSGD,
    TopK, DGC, DeMo, OneBitAdam, NoExchange,
)  # fmt: skip

__all__ = [
    "TABLE", "Bf16", "Bf16Acc32", "DeMo", "Dense", "DGC", "Fp8", "Fp32", "Int8", "LHC", "LoCo", "Lossy", "Method",
    "NoExchange", "OneBitAdam", "Parameter", "PowerSGD", "QSDP", "Radius", "SCAPE", "SDP4Bit", "SEPARATE", "TAGC",
    "TopK", "ZeROPP", "names", "resolve",
]  # fmt: skip


def names() -> list[str]:
    """The names that the command line knows."""
    return [method.name for method in TABLE]


def resolve(method: Method | str) -> Method:
    """A method from its name: ``"int8"``, ``"int8(group=64, error_feedback=True)"``, ``"radius:paper(density=0.4)"``.

    Raises:
        ThinwireError: the name or a knob is unknown, or a knob's value is not one.
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise ThinwireError(f"a method is a thinwire method or its name, got {type(method).__name__}")
    name, _, knobs = method.strip().partition("(")
    name, _, preset = name.partition(":")
    table = {cls.name: cls for cls in TABLE}
    cls = table.get(name.strip().lower().replace("_", "-"))
    if cls is None:
        raise ThinwireError(f"unknown method '{name.strip()}'; there are: {', '.join(table)}")
    try:
        call = ast.parse(f"f({knobs}" if knobs or "(" in method else "f()", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise ThinwireError(f"cannot read '{method}'; write {cls.name}(knob=value, ...)") from None
    if preset:
        if preset.strip() not in cls.PRESETS:
            known_presets = ", ".join(f"{cls.name}:{known}" for known in cls.PRESETS) or "none"
            raise ThinwireError(f"{cls.name} has no preset '{preset.strip()}'; there are: {known_presets}")
        values = {**cls.PRESETS[preset.strip()], **values}
    known = [knob.name for knob in cls.knobs()]
    for knob in values:
        if knob not in known:
            raise cls.no_knob(knob)
    try:
        return cls(**values)
    except TypeError as error:
        raise ThinwireError(f"{cls.name}: {error}") from None


def main(argv: list[str]) -> int:
    """``thinwire methods``: each method, what it does, its knobs and their defaults."""
    if argv and argv[0] not in ("-h", "--help"):
        raise ThinwireError(f"'thinwire methods' takes no arguments, got '{argv[0]}'")
    for cls in TABLE:
        knobs = ", ".join(f"{knob.name}={knob.default!r}" for knob in cls.knobs()) or "none"
        print(f"{cls.name:<12}{(getdoc(cls) or '').splitlines()[0]}\n{'':<12}knobs: {knobs}")
        for preset, values in cls.PRESETS.items():
            print(f"{'':<12}{cls.name}:{preset}: {', '.join(f'{knob}={value!r}' for knob, value in values.items())}")
    return 0
