"""Choose the backend of an operation by the device of its tensors."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import Tensor

from thinwire.base.extras import EXTRAS


@functools.cache
def _load(family: str, module: str, needs: str) -> ModuleType:
    """Import the fast module at first use; if ``needs`` is not installed, warn once and import the reference."""
    try:
        if needs:  # first, so that it is what is missing, and not a package that comes with it
            importlib.import_module(needs)
        return importlib.import_module(f"{family}.{module}")
    except ModuleNotFoundError as error:
        if error.name != needs:
            raise
        command = f"pip install 'thinwire[{EXTRAS[needs]}]'"
        message = f"{needs} is not installed: thinwire's kernels run as plain torch, slower: {command}"
        warnings.warn(message, stacklevel=4)
        return importlib.import_module(f"{family}.reference")


def cpu_kernels() -> str:
    """Return the backend of operations on CPU tensors: "numba" or "plain torch"."""
    return "numba" if _load("thinwire.ops.adams", "cpu", "numba").__name__.endswith(".cpu") else "plain torch"


Report = Callable[[str, tuple[Any, ...]], object]
"""(an operation's family and name, its arguments)"""

launches: ContextVar[Report | None] = ContextVar("launches", default=None)
"""Told of every operation on tensors without storage, where set."""

timer: ContextVar[Callable[..., Any] | None] = ContextVar("timer", default=None)
"""Runs every operation on tensors with storage, where set: (its name, itself, *its arguments) -> its result."""

every_variant: ContextVar[bool] = ContextVar("every_variant", default=False)
"""Compile all variants of a launched kernel, for any memory: on a GPU, before the first step."""

host_code: ContextVar[Mapping[str, ModuleType] | None] = ContextVar("host_code", default=None)
"""The module that runs on tensors without storage, by family; without one nothing runs. Set by tests alone."""


class _Nothing(ModuleType):
    """Reports operations on tensors without storage and runs nothing: results go to tensors that are handed in."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def tell(*args: object) -> None:
            if (report := launches.get()) is not None:
                report(f"{self.__name__}.{name}", args)

        return tell


class _Timed(ModuleType):
    """Hands the operations of a module to ``timer``."""

    def __init__(self, family: str, module: ModuleType) -> None:
        super().__init__(family)
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation, run = getattr(self._module, name), timer.get()
        return operation if run is None else functools.partial(run, f"{self.__name__}.{name}", operation)


def backend(family: str, cpu: str = "cpu") -> Callable[[Tensor], ModuleType]:
    """Make a function from a tensor to the module of ``family`` for its device; ``cpu`` names the one for CPUs."""
    nothing = _Nothing(family)

    def choose(tensor: Tensor) -> ModuleType:
        if tensor.is_meta:
            return (host_code.get() or {}).get(family, nothing)
        module = for_device(tensor)
        return module if timer.get() is None else _Timed(family, module)

    def for_device(tensor: Tensor) -> ModuleType:
        if tensor.is_cpu:
            return _load(family, cpu, "numba")
        if tensor.is_cuda:
            return _load(family, "triton", "triton")
        return _load(family, "reference", "")

    return choose
