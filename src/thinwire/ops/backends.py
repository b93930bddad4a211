"""Which code runs an operation: by the device of its tensors."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType

from torch import Tensor

from thinwire.base.extras import EXTRAS


@functools.cache
def _load(family: str, module: str, needs: str) -> ModuleType:
    """The fast module, imported at first use; the reference, said once, where ``needs`` is not installed."""
    try:
        return importlib.import_module(f"{family}.{module}")
    except ModuleNotFoundError as error:
        if error.name != needs:
            raise
        how = f"pip install 'thinwire[{EXTRAS[needs]}]'"
        warnings.warn(f"{needs} is not installed: thinwire's kernels run as plain torch, slower: {how}", stacklevel=4)
        return importlib.import_module(f"{family}.reference")


def cpu_kernels() -> str:
    """What operations on CPU tensors run as: "numba" or "plain torch"."""
    return "numba" if _load("thinwire.ops.adams", "cpu", "numba").__name__.endswith(".cpu") else "plain torch"


launches: ContextVar[Counter[str] | None] = ContextVar("launches", default=None)
"""Where operations on tensors without storage are counted, by family and name, if anybody wants to know."""

every_variant: ContextVar[bool] = ContextVar("every_variant", default=False)
"""Compile what a launch would need on other memory, too: on a GPU, before the first step."""

host_code: ContextVar[Mapping[str, ModuleType] | None] = ContextVar("host_code", default=None)
"""By family, what runs on tensors without storage in place of nothing at all: see ``thinwire.ops.dry``."""


class _Nothing(ModuleType):
    """What runs on tensors without storage: every operation writes to tensors that are handed in."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def count(*args: object, **knobs: object) -> None:
            if (counter := launches.get()) is not None:
                counter[f"{self.__name__}.{name}"] += 1

        return count


def backend(family: str, cpu: str = "cpu") -> Callable[[Tensor], ModuleType]:
    """For a family of operations, ``"thinwire.ops.quant"``: tensor -> the module that runs them on its device.

    ``cpu``: the one for CPU tensors, where that is not the family's ``cpu``.
    """
    nothing = _Nothing(family)

    def choose(tensor: Tensor) -> ModuleType:
        if tensor.is_meta:
            return (host_code.get() or {}).get(family, nothing)
        if tensor.device.type == "cpu":
            return _load(family, cpu, "numba")
        if tensor.device.type == "cuda":
            return _load(family, "triton", "triton")
        return _load(family, "reference", "")

    return choose
