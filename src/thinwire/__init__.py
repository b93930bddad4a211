"""Thinwire: data-parallel training of language models, fast where the network is the bottleneck.

    wire = thinwire.compress(model, optimizer, thinwire.Int8())

Names are imported when first used, so that the command line can set torch's environment before torch is there. Nor is
anything of Python's own library imported before: the program must soon be able to answer a Ctrl-C.
"""

from __future__ import annotations

from thinwire.base.version import __version__ as __version__

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from thinwire.base.errors import LostRank as LostRank
    from thinwire.base.errors import ThinwireError as ThinwireError
    from thinwire.base.errors import ThinwireWarning as ThinwireWarning
    from thinwire.core.method import Method as Method
    from thinwire.core.safety import Safety as Safety
    from thinwire.methods.table import *  # noqa: F403
    from thinwire.optim import AdamS as AdamS
    from thinwire.predict.choice import Auto as Auto
    from thinwire.wire import Wire as Wire
    from thinwire.wire import compress as compress

_HOME = {
    "AdamS": "optim",
    "Auto": "predict.choice",
    "LostRank": "base.errors",
    "Method": "core.method",
    "Safety": "core.safety",
    "ThinwireError": "base.errors",
    "ThinwireWarning": "base.errors",
    "Wire": "wire",
    "compress": "wire",
}
"""The names that are not those of methods, and where they live. The methods are those of ``thinwire.methods.TABLE``."""


def _import(name: str) -> Any:
    import importlib

    return importlib.import_module(f"thinwire.{name}")


def _methods() -> dict[str, Any]:
    return {cls.__name__: cls for cls in _import("methods").TABLE}


def __dir__() -> list[str]:
    return sorted({*_HOME, *_methods()})


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in _HOME:
        value = getattr(_import(_HOME[name]), name)
        globals()[name] = value
        return value
    if name[:1].isupper() and name in (found := _methods()):
        return found[name]
    raise AttributeError(f"module 'thinwire' has no attribute '{name}'")
